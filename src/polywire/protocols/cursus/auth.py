"""Who may do what on the Cursus wire: AUTH, credentials inside a command, permissions, and topics' own lists (spec: cursus#credentials).

Promises: every request is asked for, batches too; nobody is let in by what was proved for somebody else's request. A topic's own list
counts also on a broker without users. Must not know: how passwords are verified, what commands do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from polywire.broker.access import Access, Principal
from polywire.broker.actions import ADMINISTRATION, ANYBODY, Action, Resource
from polywire.broker.permissions import Permission
from polywire.broker.settings import Listed
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Busy, Denied
from polywire.protocols.cursus.context import CursusBroker, Peer
from polywire.protocols.cursus.errors import refused
from polywire.protocols.cursus.long_frame import NotYet
from polywire.protocols.cursus.messages import Refused, Request, decoded, encoded, topic_word
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.types import TopicName

VERDICTS_MAX: Final = 100  # kept before those of connections that have gone are dropped
WORDS: Final[Mapping[Permission, str]] = {
    Permission.CONSUME: "topic.read",
    Permission.CONSUME | Permission.PRODUCE: "topic.read",
    Permission.PRODUCE: "topic.write",
    Permission.GROUP: "group",
    Permission.TRANSACTION: "transaction",
}
"""What a permission that was missed is called on this wire; all others are ``admin`` (spec: cursus#credentials)."""

Words = tuple[str, str]
"""A principal's name and its token: a password or an access token."""


class AccessGuard:
    """Implements ``context.Guard`` over the broker's users.

    Invariant: ``_acting`` is who the request that was admitted last acts for, None when nobody had to log in; ``_verdicts`` holds what
    came of words that had to be verified, until the request that brought them is offered again.
    """

    __slots__ = ("_access", "_acting", "_broker", "_payload", "_verdicts")

    def __init__(self, broker: CursusBroker) -> None:
        self._broker = broker
        self._access: Final[Access] = broker.access
        self._acting: Principal | None = None
        self._payload: bytes | None = None
        self._verdicts: dict[Peer, tuple[Words, Principal | None]] = {}

    # The port

    def admit(self, peer: Peer, request: Request, actions: Sequence[Action], /) -> None:
        """Whether the command may begin, as ``Guard`` says."""
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
                self._access.refusal(self._acting, action, where)  # for the audit
                word = WORDS.get(action.permission, "admin")
                raise Refused("NOT_AUTHORIZED_FOR_OPERATION", f"command={_spoken(request)} permission={word}")
            if action in ADMINISTRATION:
                self._access.administers(self._acting, action, where)

    def prove(self, peer: Peer, request: Request, /) -> None:
        """Who sends the request, as ``Guard`` says."""
        self._acting = self._principal(peer, request)
        if self._acting is not None:
            _identify(peer, self._acting)

    def admit_batch(self, peer: Peer, /) -> None:
        """Whether the connection may write batches; it must have logged in by AUTH. What it may write to is ``admit_topic``'s."""
        self._acting = None
        if not self._access.is_open:
            self._acting = self._connected(peer)
            if self._acting is None:
                raise Refused("authentication_required", "command=BATCH")
            _identify(peer, self._acting)

    def admits_topic(self, peer: Peer, topic: Topic | TopicName, action: Action, /) -> bool:
        """Whether whoever acts may do this to the topic: by permission, and by the topic's own list."""
        return self._access.permits(self._acting, action, topic)

    def admit_topic(self, peer: Peer, topic: Topic | TopicName, action: Action, /) -> None:
        """Refuse whoever acts what it may not do to the topic."""
        if not self._access.permits(self._acting, action, topic):
            self._access.refusal(self._acting, action, topic)  # for the audit
            operation = "write" if action.listed is Listed.WRITERS else "read"
            name = topic.name.full if isinstance(topic, Topic) else topic.full
            facts = f"operation={operation} topic={topic_word(name)}"
            raise Refused("NOT_AUTHORIZED_FOR_TOPIC", facts, legacy=f"not authorized for topic '{topic_word(name)}'")

    @property
    def acting(self) -> Principal | None:
        """Who the request that was admitted last acts for."""
        return self._acting

    def payload(self, request: Request, /) -> bytes | None:
        """The request's message without the words that proved who sent it."""
        return self._payload

    # Who it is

    def _principal(self, peer: Peer, request: Request) -> Principal | None:
        """Who the request acts for. Raises Refused, NotYet."""
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
        principal = self._connected(peer)
        if principal is None:
            raise Refused("authentication_required", f"command={_spoken(request)}")
        return principal

    def _connected(self, peer: Peer) -> Principal | None:
        """Who the connection is: by AUTH, else by the peer's certificate."""
        return peer.output.certified if peer.principal is None else peer.principal

    def _trailing(self, peer: Peer, request: Request) -> Principal | None:
        """Clients append their words to the whole command, and so behind the payload; only right ones are taken for such."""
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
        """Whose words these are, None when they are nobody's, as on a broker without users.

        Raises NotYet while that is found out, Refused when too many wait.
        """
        if self._access.is_open:
            return None
        verdict = self._verdicts.pop(peer, None)
        if verdict is not None and verdict[0] == words:
            return verdict[1]
        name, token = words
        address = peer.peer_address
        known = self._access.recall(name, token, peer=address) or self._holder(name, token, address)
        if known is not None:
            return known

        def done(result: Principal | BrokerError) -> None:
            if peer.closed:
                return
            if len(self._verdicts) >= VERDICTS_MAX:
                self._verdicts = {other: kept for other, kept in self._verdicts.items() if not other.closed}
            self._verdicts[peer] = words, result if isinstance(result, Principal) else None
            peer.wake()

        try:
            self._access.log_in(name, token, done, peer=address)
        except Busy as error:
            raise refused(error) from None
        raise NotYet

    def _holder(self, name: str, token: str, peer: str) -> Principal | None:
        try:
            return self._access.log_in_with_token(token, peer=peer, name=name)
        except Denied:
            return None

    # What it may do

    def _topic_name(self, request: Request) -> TopicName | None:
        """The topic that a request names; a pattern names none, its topics are asked for one by one."""
        name = request.options.get("topic", "")
        if not name or (request.pattern and request.name == "CONSUME"):
            return None
        found = self._broker.resource(name)
        return found.name if isinstance(found, Topic) else found  # its own list has words of its own

    def _allows(self, acting: Principal, action: Action, where: TopicName | None) -> bool:
        """Without a topic it is enough to have the permission somewhere: what belongs to a topic is asked for again."""
        if action.resource is Resource.TOPIC and where is not None:
            return self._access.permits(acting, action, where)
        if action.resource is Resource.BROKER:
            return self._access.permits(acting, action)
        return self._access.permits_somewhere(acting, action)


def _value(word: bytes, key: bytes) -> str:
    """What stands behind the key; empty when the word is no such argument."""
    value = decoded(word.removeprefix(key)) if word.startswith(key) else ""
    return value if value.split() == [value] else ""


def _identify(peer: Peer, principal: Principal) -> None:
    try:
        peer.identify(principal)
    except BrokerError as error:
        raise refused(error) from None


def _spoken(request: Request) -> str:
    """The command's name; an envelope without one publishes."""
    return request.name or "PUBLISH"


def authenticate(session: CursusSession, request: Request, /) -> Reply:
    """AUTH: who this connection is from now on; words that are wrong make it nobody."""
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
