"""Clients that log in, with permissions that change while they are connected.

The permissions of a client are known at each moment between a request and its answer. Only requests without permission
are refused. Acknowledged changes survive kills.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from polywire.broker import passwords
from polywire.broker.access import Access, User
from polywire.broker.broker import Broker
from polywire.broker.permissions import NOTHING, Grants, Permission, resource_name
from polywire.broker.scram import Mechanism, Verifier
from polywire.broker.users import digest_of
from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.types import DEFAULT_STREAM
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.schedule import Schedule
from tests.sim.story import Story
from tests.sim.wires.ledger import TOPICS
from tests.sim.wires.network import Link
from tests.sim.wires.peer import Peer
from tests.sim.wires.speech import Answer, Speech

_T = TypeVar("_T")

Right = tuple[str, str]
"""An act and its topic; or that a token may log in."""

State = frozenset[Right]
"""The permissions of a client."""

LOGIN: Final = "log in"
RIGHTS: Final[Sequence[Right]] = tuple((act, topic) for act in ("produce", "fetch") for topic in TOPICS)
PERMISSIONS: Final = {"produce": Permission.PRODUCE, "fetch": Permission.CONSUME}
VERIFIER: Final = Verifier(Mechanism.SHA_256, 4096, b"salt", b"unusable", b"unusable")  # a user must have a credential
NO_MEMBERS: Final[Mapping[Mechanism, Verifier | None]] = {Mechanism.SHA_256: VERIFIER}
WRONG: Final = "wrong"  # the secret of a client without a token
ENDINGS: Final = 0.25  # of changes: a token is revoked


class SimulatedThreads:
    """The threads that verify passwords: a worker of the process."""

    def __init__(self, loop: Schedule) -> None:
        self._worker = loop.make_worker("logins", loop)

    def submit(self, job: Callable[[], Any]) -> None:
        """Run a job later."""
        self._worker.run(job, lambda _: None)

    def shutdown(self, **_: object) -> None:
        """Do nothing: no jobs wait here."""


def cheap_hash(password: str) -> str:
    """Return a stored form of a password."""
    return f"cheap {password}"


@contextmanager
def cheap_logins(loop: Callable[[], Schedule]) -> Iterator[None]:
    """Verify passwords in the simulation's time only."""
    instead = {
        "ThreadPoolExecutor": lambda *_, **__: SimulatedThreads(loop()),
        "hash_password": cheap_hash,
        "check_password": lambda kept, password: kept == cheap_hash(password),
    }
    before = {name: getattr(passwords, name) for name in instead}
    try:
        for name, value in instead.items():
            setattr(passwords, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(passwords, name, value)


class Rights:
    """The permissions of a client. Guards: ``_states`` has those since the last start, newest last; ``_known`` of them
    were acknowledged.
    """

    def __init__(self, name: str, chance: Chance, story: Story) -> None:
        self.name: Final = name
        self.token = WRONG
        self.shown = WRONG
        """The secret that it uses on its current connection."""
        self.ended = 0
        """Number of states at the last revocation; earlier logins are invalid."""
        self.is_changing = False
        """Whether the newest state is not in effect yet; then earlier logins become invalid."""
        self._states: list[State] = [frozenset()]
        self._known = 0
        self._chance = chance
        self._story = story

    @property
    def now(self) -> int:
        """The number of the current state."""
        return len(self._states) - 1 - self.is_changing

    def between(self, since: int, until: int | None = None) -> list[State]:
        """Return the states since then, for a login revoked meanwhile, or still valid: after a revocation its client
        may do nothing.
        """
        found = self._states[since:until]
        return found if until is None and not self.is_changing else [*found, frozenset()]

    def started(self, broker: Broker) -> None:
        """Check that a start restored one of these states, not older than the acknowledged one."""
        user = broker.access.find_user(self.name)
        possible = self._states[self._known :]
        tokens = {token for state in possible for act, token in state if act == LOGIN}
        found = _rights_of(user) | self._logins_of(user, tokens)
        require(found in possible, "permissions are those of the last change", found=found)
        self._states, self._known, self.ended, self.is_changing = [found], 0, 0, False
        if user is None:
            self._make(broker.access)
        self.token = next((token for act, token in found if act == LOGIN), WRONG)

    def change(self, access: Access) -> None:
        """Change the permissions, or revoke or create the token. Raises the broker's refusal."""
        if self.is_changing:
            return
        user, state = access.find_user(self.name), self._states[-1]
        if user is None:  # a start that could not create it
            self._make(access)
        elif self.token == WRONG:
            self._let_in(access, user, state)
        elif self._chance.happens(ENDINGS):
            self._shut_out(access, user, state - {(LOGIN, self.token)})
        else:
            chosen = frozenset(right for right in RIGHTS if self._chance.happens(0.6))
            after = chosen | (state - frozenset(RIGHTS))
            self._note(after, lambda done: access.grant(user, _grants_of(chosen), done=done))
        self._story.tell("rights", f"{self.name} {sorted(self._states[-1] & frozenset(RIGHTS))}")

    def show(self) -> None:
        """Reconnect."""
        self.shown = self.token

    def _let_in(self, access: Access, user: User, state: State) -> None:
        """Create a credential."""
        self.token = self._note(state, lambda done: access.create_token(user, "t", None, done=done))
        self._states[-1] |= {(LOGIN, self.token)}

    def _shut_out(self, access: Access, user: User, rest: State) -> None:
        """Revoke the credential."""
        self._note(rest, lambda done: access.delete_token(user, "t", done=done))
        self.token, self.ended = WRONG, self.now

    def _logins_of(self, user: User | None, tokens: Collection[str]) -> State:
        """Return the secrets that may log in, from the stored user."""
        kept = set() if user is None else {known.digest for known in user.tokens}
        shown = {(LOGIN, token) for token in tokens if digest_of(token) in kept}
        require(len(shown) == len(kept), "a token that was ended is no more", user=self.name)
        return frozenset(shown)

    def _make(self, access: Access) -> None:
        self._note(frozenset(), lambda done: access.set_verifiers(self.name, NO_MEMBERS, done=done))

    def _note(self, state: State, verb: Callable[[Completion[User]], _T]) -> _T:
        """Add a state unless it is refused at once; its answer makes it known."""
        self._states.append(state)
        number, states = self.now, self._states

        def done(found: User | BrokerError) -> None:
            if states is self._states and not isinstance(found, BrokerError):
                self._known = max(self._known, number)

        try:
            return verb(done)
        except BrokerError:
            self._states.pop()
            raise


def _grants_of(state: State) -> Grants:
    topics: dict[str, int] = {}
    for act, topic in sorted(state):
        name = resource_name(DEFAULT_STREAM, topic)
        topics[name] = topics.get(name, int(NOTHING)) | int(PERMISSIONS[act])
    return Grants(topics=topics)


def _rights_of(user: User | None) -> State:
    """Return the permissions of a stored user."""
    grants = (None if user is None else user.grants) or Grants()
    return frozenset(
        (act, topic)
        for act, topic in RIGHTS
        if grants.topics.get(resource_name(DEFAULT_STREAM, topic), 0) & PERMISSIONS[act]
    )


class LoginSpeech(Speech):
    """The protocol of a client that logs in. login: whether it succeeded, None until that is known."""

    login: bool | None = None

    def reply(self) -> bytes:
        """Return the next bytes of the login."""
        return b""


class Guest(Peer):
    """Guards: it makes no requests before its login is answered. ``_asked_for`` has the permissions that its requests
    need, and since when.
    """

    rights: Rights
    _since = 0
    _shown = WRONG
    _is_in = False

    def bind(self, rights: Rights) -> None:
        """Set the client's permissions."""
        self.rights = rights
        self._asked_for: dict[int, tuple[Right, int]] = {}

    def connected(self, link: Link) -> None:
        self.rights.show()
        self._since, self._shown, self._is_in = self.rights.now, self.rights.shown, False
        self._asked_for.clear()
        super().connected(link)

    @property
    def is_owed(self) -> bool:
        """Whether an answer or the result of the login is outstanding; a wrong login must not wait for long."""
        waits = self.link is not None and not self.link.finished and not self._is_in
        return waits or super().is_owed

    def may_ask(self, act: str) -> bool:
        return self._is_in and super().may_ask(act)

    @property
    def _ended(self) -> int | None:
        """Return when its login was revoked, None if it was not."""
        return self.rights.ended if self.rights.ended > self._since else None

    def received(self, data: bytes) -> None:
        super().received(data)
        speech = self._speech
        assert isinstance(speech, LoginSpeech), "guests log in"
        self._unsent += speech.reply()
        self.push()
        if self.link is None or self._is_in or speech.login is None:
            return
        states, right = self.rights.between(self._since, self._ended), (LOGIN, self._shown)
        self._story.tell("let in" if speech.login else "kept out", self.name)
        if speech.login:
            require(any(right in state for state in states), "who may not log in is refused", peer=self.name)
            self._is_in = True
            return
        fine = self.may_be_refused or not all(right in state for state in states)
        require(fine, "who may log in is let in", peer=self.name)
        self.link.cut()
        self.disconnected()

    def hung_up(self, *, is_aborted: bool) -> None:
        if self._is_in and self._ended is None and not self.rights.is_changing:
            super().hung_up(is_aborted=is_aborted)
        else:
            self.disconnected()

    def _ask(self, what: str, *rest: Any) -> None:
        act, place, *_ = (*what.split(), "")
        self._asked_for[self._count + 1] = (act, place.partition("/")[0]), self.rights.now
        super()._ask(what, *rest)

    def _judge(self, answer: Answer) -> None:
        asked, (right, since) = self.asked.get(answer.number), self._asked_for[answer.number]
        states = self.rights.between(since, self._ended)
        if asked is not None and answer.is_denied:
            self._story.tell("denied", f"{self.name} {answer.number} {asked.what}")
            require(any(right not in state for state in states), "who may is not refused", peer=self.name, asked=right)
            del self.asked[answer.number]
            asked.refused()
            return
        if right in RIGHTS and not answer.error:
            require(any(right in state for state in states), "who may not is refused", peer=self.name, asked=right)
        super()._judge(answer)
