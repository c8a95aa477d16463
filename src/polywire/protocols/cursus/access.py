"""Who may do what on the Cursus wire: AUTH, credentials inside a command, permissions, and topics' own lists (dossier §2.12).

Promises: every request is asked for, batches too; nobody is let in by what was proved for somebody else's request. A topic's own list
counts also on a broker without users. Must not know: how passwords are verified, what commands do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from polywire.broker.access import Access, Principal
from polywire.broker.permissions import Permission
from polywire.broker.topics import Topic
from polywire.errors import Busy, Denied
from polywire.protocols.cursus.errors import refused
from polywire.protocols.cursus.long_frame import NotYet
from polywire.protocols.cursus.messages import Refused, Request, decoded, encoded
from polywire.protocols.cursus.policies import policy_of
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.protocols.cursus.state import Operation
from polywire.types import DEFAULT_STREAM, TopicName

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.errors import BrokerError

ANYBODY: Final = "*"
VERDICTS_MAX: Final = 100  # kept before those of connections that have gone are dropped
PERMISSIONS: Final[Mapping[str, Permission]] = {
    "admin": Permission.MANAGE_TOPICS,
    "topic.read": Permission.CONSUME,
    "topic.write": Permission.PRODUCE,
    "group": Permission.GROUP,
    "transaction": Permission.TRANSACTION,
}
_OPERATIONS: Final = {Operation.READ: Permission.CONSUME, Operation.WRITE: Permission.PRODUCE}
_TRAILING: Final = re.compile(r"\A(.*?) principal=(\S+) auth_token=(\S+)\Z", re.DOTALL)
_PATTERN: Final = re.compile(r"[*?]")

Words = tuple[str, str]
"""A principal's name and its token: a password or an access token."""


class AccessGuard:
    """Implements ``state.Guard`` over the broker's users.

    Invariant: ``_acting`` is who the request that was admitted last acts for, None when nobody had to log in; ``_verdicts`` holds what
    came of words that had to be verified, until the request that brought them is offered again.
    """

    __slots__ = ("_access", "_acting", "_broker", "_payload", "_verdicts")

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._access: Final[Access] = broker.access
        self._acting: Principal | None = None
        self._payload: bytes | None = None
        self._verdicts: dict[CursusSession, tuple[Words, Principal | None]] = {}

    # The port

    def admit(self, session: CursusSession, request: Request, command: Command, /) -> None:
        """Whether the command may begin, as ``Guard`` says."""
        self._payload = request.message
        if command.open:
            self._acting = None
            return
        self._acting = self._principal(session, request)
        if self._acting is None:
            return
        where = self._topic_name(request)
        for word in command.permissions:
            if not self._allows(self._acting, PERMISSIONS[word], where):
                raise Refused("NOT_AUTHORIZED_FOR_OPERATION", f"command={_spoken(request)} permission={word}")

    def admit_batch(self, session: CursusSession, /) -> None:
        """Whether the connection may write batches; it must have logged in by AUTH. What it may write to is ``admit_topic``'s."""
        self._acting = None
        if not self._access.is_open:
            self._acting = session.principal
            if self._acting is None:
                raise Refused("authentication_required", "command=BATCH")

    def admit_topic(self, session: CursusSession, topic: Topic, operation: Operation, /) -> None:
        """Whether whoever acts may do this to the topic: by permission, and by the topic's own list."""
        acting = self._acting
        allowed = acting is None or self._access.allows(acting, _OPERATIONS[operation], topic.name)
        if not allowed or not _is_listed(topic, operation, "" if acting is None else acting.name):
            facts = f"operation={operation.value} topic={topic.name.full}"
            raise Refused("NOT_AUTHORIZED_FOR_TOPIC", facts, legacy=f"not authorized for topic '{topic.name.full}'")

    def payload(self, request: Request, /) -> bytes | None:
        """The request's message without the words that proved who sent it."""
        return self._payload

    # Who it is

    def _principal(self, session: CursusSession, request: Request) -> Principal | None:
        """Who the request acts for. Raises Refused, NotYet."""
        words = request.options.get("principal", ""), request.options.get("auth_token", "")
        if any(words):
            found = self.verified(session, words)
            if found is None:
                raise Refused("authentication_failed", "mechanism=PLAIN")
            return found
        if self._access.is_open:
            return None
        trailing = self._trailing(session, request)
        if trailing is not None:
            return trailing
        if session.principal is None:
            raise Refused("authentication_required", f"command={_spoken(request)}")
        principal: Principal = session.principal
        return principal

    def _trailing(self, session: CursusSession, request: Request) -> Principal | None:
        """Clients append their words to the whole command, and so behind the payload; only right ones are taken for such."""
        if request.name != "TXN_PUBLISH" or request.message is None:
            return None
        match = _TRAILING.match(decoded(request.message))
        if match is None:
            return None
        found = self.verified(session, (match[2], match[3]))
        if found is not None:
            self._payload = encoded(match[1])
        return found

    def verified(self, session: CursusSession, words: Words) -> Principal | None:
        """Whose words these are, None when they are nobody's, as on a broker without users.

        Raises NotYet while that is found out, Refused when too many wait.
        """
        if self._access.is_open:
            return None
        verdict = self._verdicts.pop(session, None)
        if verdict is not None and verdict[0] == words:
            return verdict[1]
        name, token = words
        known = self._access.recall(name, token) or self._holder(name, token)
        if known is not None:
            return known

        def done(result: Principal | BrokerError) -> None:
            if session.closed:
                return
            if len(self._verdicts) >= VERDICTS_MAX:
                self._verdicts = {peer: kept for peer, kept in self._verdicts.items() if not peer.closed}
            self._verdicts[session] = words, result if isinstance(result, Principal) else None
            session.wake()

        try:
            self._access.log_in(name, token, done)
        except Busy as error:
            raise refused(error) from None
        raise NotYet

    def _holder(self, name: str, token: str) -> Principal | None:
        try:
            found = self._access.log_in_with_token(token)
        except Denied:
            return None
        return found if found.name == name else None

    # What it may do

    def _topic_name(self, request: Request) -> TopicName | None:
        """The topic that a request names; a pattern names none, its topics are asked for one by one."""
        name = request.options.get("topic", "")
        if not name or _PATTERN.search(name):
            return None
        topic = self._broker.find_topic(name)
        return TopicName(DEFAULT_STREAM, name) if topic is None else topic.name

    def _allows(self, acting: Principal, permission: Permission, where: TopicName | None) -> bool:
        """Without a topic it is enough to have the permission somewhere: what belongs to a topic is asked for again."""
        if where is None:
            return self._access.allows_somewhere(acting, permission)
        return self._access.allows(acting, permission, where)


def _spoken(request: Request) -> str:
    """The command's name; an envelope without one publishes."""
    return request.name or "PUBLISH"


def _is_listed(topic: Topic, operation: Operation, name: str) -> bool:
    """Whether the topic's own policy allows it (dossier §2.1)."""
    policy = policy_of(topic)
    match policy.auth_policy:
        case "deny_read":
            return operation is not Operation.READ
        case "deny_write":
            return operation is not Operation.WRITE
        case "acl":
            listed = policy.read_acl if operation is Operation.READ else policy.write_acl
            return bool({name or ANYBODY, ANYBODY} & set(listed.split(",")))
        case _:
            return True


def authenticate(session: CursusSession, request: Request, /) -> Reply:
    """AUTH: who this connection is from now on; words that are wrong make it nobody."""
    words = request.options.get("principal", ""), request.options.get("token", "")
    if not all(words):
        raise Refused("invalid_auth", "command=AUTH")
    session.principal = session.state.guard.verified(session, words)
    if session.principal is None:
        raise Refused("authentication_failed", "mechanism=PLAIN")
    return encoded(f"OK principal={words[0]} authenticated=true")


COMMANDS: Final[Mapping[str, Command]] = {"AUTH": Command(authenticate, open=True)}
