"""Who a connection of the `polywire` wire is, and what it may do (docs/protocols/polywire.md §4.6).

Promises: every request is asked for; on a broker without users everything is allowed to everybody, at the cost of one look. Must not know:
frames, how passwords are verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from polywire.broker.access import Principal
from polywire.broker.permissions import Permission
from polywire.errors import Denied, ErrorCode
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.words import kind_of
from polywire.types import DEFAULT_STREAM, PositionKind, TopicName

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.errors import BrokerError
    from polywire.protocols.polywire.words import Answering

SEEN_BY: Final = (
    Permission.CONSUME | Permission.PRODUCE
)  # either of them: who reads or writes a topic may know where it begins
LOGIN_HINT: Final = (
    "log in first: this broker has users. Give a name and a password, as in polywire://name:password@host:port, or in"
    " Spark's options user and password"
)
_FREE: Final = frozenset({Verb.PING, Verb.CANCEL})  # for everybody
# What is asked for one topic.
_OF_TOPIC: Final[dict[type[Head], Permission]] = {
    messages.Produce: Permission.PRODUCE,
    messages.Stage: Permission.PRODUCE,
    messages.Fetch: Permission.CONSUME,
    messages.Locate: Permission.CONSUME,
    messages.Describe: SEEN_BY,
    messages.GrowTopic: Permission.MANAGE_TOPICS,
    messages.PurgeTopic: Permission.MANAGE_TOPICS,
    messages.DeleteTopic: Permission.MANAGE_TOPICS,
    messages.Join: Permission.GROUP,
    messages.Member: Permission.GROUP,
}
# What is asked for anything; each topic that is told or changed was asked for, or is.
_SOMEWHERE: Final[dict[type[Head], Permission]] = {
    messages.ListTopics: SEEN_BY,
    messages.Publish: Permission.PRODUCE,
    messages.Abandon: Permission.PRODUCE,
    messages.AskGroups: Permission.GROUP,
}


class Admission:
    """One connection's. Invariant: ``principal`` is who logged in last, None when nobody did."""

    __slots__ = ("_access", "_broker", "principal")

    def __init__(self, broker: Broker) -> None:
        self._broker: Final = broker
        self._access: Final = broker.access
        self.principal: Principal | None = None

    def log_in(self, session: Answering, correlation: int, request: messages.LogIn) -> None:
        """Find out who this is; the session takes no other request meanwhile. Raises Busy."""
        self.principal = None
        found = self._access.recall(request.name, request.password) or self._holder(request)
        if found is not None:
            self.principal = found
            session.answer(Verb.LOGIN, correlation, Head())
            return

        def done(result: Principal | BrokerError) -> None:
            self.principal = result if isinstance(result, Principal) else None
            session.logged_in()
            if isinstance(result, Principal):
                session.settle(Verb.LOGIN, correlation, Head())
            else:
                session.settle_error(Verb.LOGIN, correlation, result)

        self._access.log_in(request.name, request.password, done)
        session.owe()
        session.logging_in()

    def _holder(self, request: messages.LogIn) -> Principal | None:
        """An access token may stand for the password."""
        try:
            found = self._access.log_in_with_token(request.password)
        except Denied:
            return None
        return found if found.name == request.name else None

    def check(self, verb: int, request: Head) -> None:
        """Refuse what this connection may not do. Raises Denied."""
        if self.principal is None and self._access.is_open:
            return
        if verb in _FREE:
            return
        if self.principal is None:
            raise Denied(ErrorCode.LOGIN_REQUIRED, LOGIN_HINT)
        kind = type(request)
        permission = _OF_TOPIC.get(kind)
        if permission is not None:
            self._check(permission, request.name)  # type: ignore[attr-defined]  # all of these name a topic
            if isinstance(request, messages.Produce) and request.create and not self._broker.find_topic(request.name):
                self._check(Permission.MANAGE_TOPICS, request.name)
            return
        permission = _SOMEWHERE.get(kind)
        if permission is not None:
            if not self._access.allows_somewhere(self.principal, permission):
                raise self._denied(permission, "anything")
            return
        self._check_other(request)

    def _check_other(self, request: Head) -> None:
        match request:
            case messages.AskBounds():
                for name in request.names:
                    self._check(SEEN_BY, name)
            case messages.CreateTopic():
                self._check_at(Permission.MANAGE_TOPICS, TopicName(request.stream, request.name))
            case messages.Commit() | messages.AskPosition():
                is_group = kind_of(request.kind) is PositionKind.GROUP
                self._check(Permission.GROUP if is_group else Permission.CONSUME, request.name)
            case _:
                raise Denied(ErrorCode.DENIED, f"nobody may ask for this request={type(request).__name__}")

    def sees(self, full_name: str, permission: Permission = SEEN_BY) -> bool:
        """Whether a topic is to be told of."""
        if self.principal is None:
            return self._access.is_open
        return self._access.allows(self.principal, permission, self._name(full_name))

    def _name(self, full_name: str) -> TopicName:
        """A topic that does not exist is one of the default stream's."""
        topic = self._broker.find_topic(full_name)
        return TopicName(DEFAULT_STREAM, full_name) if topic is None else topic.name

    def _check(self, permission: Permission, full_name: str) -> None:
        self._check_at(permission, self._name(full_name))

    def _check_at(self, permission: Permission, name: TopicName) -> None:
        assert self.principal is not None, "it was looked at"
        if not self._access.allows(self.principal, permission, name):
            raise self._denied(permission, name.full)

    def _denied(self, permission: Permission, where: str) -> Denied:
        assert self.principal is not None, "it was looked at"
        words = " or ".join(str(word.name).lower() for word in permission)
        return Denied(
            ErrorCode.DENIED,
            f"not allowed, ask for the permission {words} user={self.principal.name!r} where={where!r}",
        )
