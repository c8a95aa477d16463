"""Authenticate and authorize Cursus requests: AUTH, credentials in a command, access lists (spec: cursus#credentials).

If a request has credentials, they are used for it instead of the connection's login. Access lists also apply on a
broker without users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from polywire.broker.access import Access, Principal
from polywire.broker.api import Pending
from polywire.broker.permissions import ADMINISTRATION, ANYBODY, Action, Permission, Resource
from polywire.broker.settings import Listed
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Busy, Denied
from polywire.protocols.cursus.context import CursusBroker, Peer
from polywire.protocols.cursus.errors import refused
from polywire.protocols.cursus.messages import Refused, Request, decoded, encoded, topic_word
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.types import TopicName

VERDICTS_MAX: Final = 100  # results to keep before those of closed connections are dropped
WORDS: Final[Mapping[Permission, str]] = {
    Permission.CONSUME: "topic.read",
    Permission.CONSUME | Permission.PRODUCE: "topic.read",
    Permission.PRODUCE: "topic.write",
    Permission.GROUP: "group",
    Permission.TRANSACTION: "transaction",
}
"""The protocol's words for missing permissions; permissions that are not listed are called ``admin``."""

Words = tuple[str, str]
"""    A user's name, and the password or access token."""


class AccessGuard:
    """Checks logins and permissions with the broker's users. Implements ``context.Guard``."""

    __slots__ = ("_access", "_acting", "_broker", "_payload", "_verdicts")

    def __init__(self, broker: CursusBroker) -> None:
        self._broker = broker
        self._access: Final[Access] = broker.access
        self._acting: Principal | None = None
        self._payload: bytes | None = None
        self._verdicts: dict[Peer, tuple[Words, Principal | None]] = {}

    # Port

    def admit(self, peer: Peer, request: Request, actions: Sequence[Action], /) -> None:
        self._payload = request.message
        if ANYBODY.issuperset(actions):
            self._acting = None
            return
        self._acting = self._principal(peer, request)
        if self._acting is None:
            return
        _identify(peer, self._acting)
        where = self._topic_name(request)
        for action in actions:
            if not self._allows(self._acting, action, where):
                self._access.refusal(self._acting, action, where)  # called because it audits the refusal
                word = WORDS.get(action.permission, "admin")
                raise Refused("NOT_AUTHORIZED_FOR_OPERATION", f"command={_command_name(request)} permission={word}")
            if action in ADMINISTRATION:
                self._access.administers(self._acting, action, where)

    def prove(self, peer: Peer, request: Request, /) -> None:
        self._acting = self._principal(peer, request)
        if self._acting is not None:
            _identify(peer, self._acting)

    def admit_batch(self, peer: Peer, /) -> None:
        """Raise Refused if the client must log in with AUTH first. Permissions for the topic are checked later."""
        self._acting = None
        if not self._access.is_open:
            self._acting = self._connection_user(peer)
            if self._acting is None:
                raise Refused("authentication_required", "command=BATCH")
            _identify(peer, self._acting)

    def admits_topic(self, peer: Peer, topic: Topic | TopicName, action: Action, /) -> bool:
        return self._access.permits(self._acting, action, topic)

    def admit_topic(self, peer: Peer, topic: Topic | TopicName, action: Action, /) -> None:
        if not self._access.permits(self._acting, action, topic):
            self._access.refusal(self._acting, action, topic)  # called because it audits the refusal
            operation = "write" if action.listed is Listed.WRITERS else "read"
            name = topic.name.full if isinstance(topic, Topic) else topic.full
            facts = f"operation={operation} topic={topic_word(name)}"
            raise Refused("NOT_AUTHORIZED_FOR_TOPIC", facts, legacy=f"not authorized for topic '{topic_word(name)}'")

    @property
    def acting(self) -> Principal | None:
        return self._acting

    def payload(self, request: Request, /) -> bytes | None:
        return self._payload

    # Authentication

    def _principal(self, peer: Peer, request: Request) -> Principal | None:
        """Return the user who sends a request.

        Raises Refused if credentials are missing or wrong, and Pending while they are verified.
        """
        words = request.options.get("principal", ""), request.options.get("auth_token", "")
        if any(words):
            found = self.verified(peer, words)
            if found is None:
                raise Refused("authentication_failed", "mechanism=PLAIN")
            return found
        if self._access.is_open:
            return None
        trailing = self._trailing(peer, request)
        if trailing is not None:
            return trailing
        principal = self._connection_user(peer)
        if principal is None:
            raise Refused("authentication_required", f"command={_command_name(request)}")
        return principal

    def _connection_user(self, peer: Peer) -> Principal | None:
        """Return the user of the last AUTH, or of the TLS certificate."""
        return peer.output.certified if peer.principal is None else peer.principal

    def _trailing(self, peer: Peer, request: Request) -> Principal | None:
        """Return the user of the credentials at the end of the request's message; None if there are none.

        Clients append credentials to the command, so they follow the message. Words that are not valid credentials
        belong to the message.
        """
        if request.name != "TXN_PUBLISH" or request.message is None:
            return None
        payload, *words = request.message.rsplit(b" ", 2)
        if len(words) != 2:
            return None
        name, token = _value(words[0], b"principal="), _value(words[1], b"auth_token=")
        if not name or not token:
            return None
        found = self.verified(peer, (name, token))
        if found is not None:
            self._payload = payload
        return found

    def verified(self, peer: Peer, words: Words) -> Principal | None:
        """Return the user with these credentials; None if they are wrong, or the broker has no users.

        Raises Pending while they are verified, and Refused if too many logins wait.
        """
        if self._access.is_open:
            return None
        verdict = self._verdicts.pop(peer, None)
        if verdict is not None and verdict[0] == words:
            return verdict[1]
        name, token = words
        address = peer.peer_address
        known = self._access.recall(name, token, peer=address) or self._token_user(name, token, address)
        if known is not None:
            return known

        def done(result: Principal | BrokerError) -> None:
            if peer.closed:
                return
            if len(self._verdicts) >= VERDICTS_MAX:
                self._verdicts = {other: verdict for other, verdict in self._verdicts.items() if not other.closed}
            self._verdicts[peer] = words, result if isinstance(result, Principal) else None
            verification.again()

        verification = _Verification()
        try:
            self._access.log_in(name, token, done, peer=address)
        except Busy as error:
            raise refused(error) from None
        raise Pending(name, verification.then)

    def _token_user(self, name: str, token: str, peer: str) -> Principal | None:
        try:
            return self._access.log_in_with_token(token, peer=peer, name=name)
        except Denied:
            return None

    # Authorization

    def _topic_name(self, request: Request) -> TopicName | None:
        name = request.options.get("topic", "")
        if not name or (request.pattern and request.name == "CONSUME"):
            return None
        found = self._broker.resource(name)
        # only the name, because refusals by an access list have their own errors
        return found.name if isinstance(found, Topic) else found

    def _allows(self, acting: Principal, action: Action, where: TopicName | None) -> bool:
        """Return whether a user may perform an action.

        An action on topics is checked for the topic ``where``. If that is None, and for actions on groups, permission
        for one resource suffices.
        """
        if action.resource is Resource.TOPIC and where is not None:
            return self._access.permits(acting, action, where)
        if action.resource is Resource.BROKER:
            return self._access.permits(acting, action)
        return self._access.permits_somewhere(acting, action)


class _Verification:
    """Credentials that are being verified. Implements ``Handle``."""

    __slots__ = ("again",)

    def __init__(self) -> None:
        self.again: Callable[[], None] = _nothing

    def then(self, again: Callable[[], None]) -> _Verification:
        """Call ``again`` when the result is known."""
        self.again = again
        return self

    def cancel(self) -> None:
        self.again = _nothing


def _nothing() -> None:
    pass


def _value(word: bytes, key: bytes) -> str:
    value = decoded(word.removeprefix(key)) if word.startswith(key) else ""
    return value if value.split() == [value] else ""


def _identify(peer: Peer, principal: Principal) -> None:
    try:
        peer.identify(principal)
    except BrokerError as error:
        raise refused(error) from None


def _command_name(request: Request) -> str:
    return request.name or "PUBLISH"


def authenticate(session: CursusSession, request: Request, /) -> Reply:
    """AUTH: set the user of the connection. Wrong credentials remove it."""
    words = request.options.get("principal", ""), request.options.get("token", "")
    if not all(words):
        raise Refused("invalid_auth", "command=AUTH")
    session.identify(None)
    session.principal = None
    found = session.state.guard.verified(session, words)
    if found is not None:
        _identify(session, found)
        session.principal = found
    if session.principal is None:
        raise Refused("authentication_failed", "mechanism=PLAIN")
    return encoded(f"OK principal={words[0]} authenticated=true")


COMMANDS: Final = (Command("AUTH", authenticate, (Action.CONNECT,)),)
