"""Log in `polywire` connections, and check the permissions of their requests (spec: polywire#login).

Every request is authorized before it is executed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from polywire.broker.access import Principal
from polywire.broker.owners import Caller, caller_of
from polywire.broker.permissions import Action, Resource
from polywire.errors import BrokerError, Denied, ErrorCode
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.arguments import TOPICS_MAX, kind_of
from polywire.protocols.polywire.codec import FRAME_BYTES_MAX
from polywire.protocols.polywire.messages import Head
from polywire.protocols.runtime.commands import Command
from polywire.protocols.runtime.session import LOGIN_FRAME_BYTES_MAX, Output
from polywire.types import DEFAULT_STREAM, PositionKind, TopicName

if TYPE_CHECKING:
    from polywire.broker.topics import Topic
    from polywire.protocols.polywire.context import PolywireBroker

LOGIN_HINT: Final = (
    "log in first: this broker has users. Give a name and a password, as in polywire://name:password@host:port, or in"
    " Spark's options user and password"
)
_SOMEWHERE: Final = frozenset({Resource.ANY_TOPIC, Resource.ANY_STREAM})


class Rights(ABC):
    """The client's user and permissions, for checks that depend on the content of a request."""

    __slots__ = ("_access", "_broker")

    def __init__(self, broker: PolywireBroker) -> None:
        self._broker: Final = broker
        self._access: Final = broker.access

    @property
    @abstractmethod
    def principal(self) -> Principal | None:
        """The client's user, or None."""

    @property
    @abstractmethod
    def caller(self) -> Caller:
        """The client as the owner of the topics and groups that it creates, for quotas."""

    @abstractmethod
    def sees_files(self) -> bool:
        """Return whether the client may get the paths of the broker's files."""

    def check_tokens(self, tokens: Sequence[bytes]) -> None:
        """Raise Denied if the client may not write to the topics of the unpublished batches under these tokens."""
        for topic in self._broker.staging.staged_topics(tokens):
            self._access.authorize(self.principal, Action.PRODUCE, topic)

    def check_offsets(self, full_names: Iterable[str]) -> None:
        """Raise Denied if the client may not commit offsets of groups in these topics."""
        for full_name in full_names:
            self._access.authorize(self.principal, Action.OFFSET_COMMIT, self._broker.resource(full_name))

    def sees(self, topic: Topic | TopicName, action: Action = Action.TOPIC_DESCRIBE) -> bool:
        return self._access.permits(self.principal, action, topic)


class Admission(Rights):
    """The login of one connection. Before a login, it has the user of the TLS certificate, or None."""

    __slots__ = ("_caller", "_has_logged_in", "_output", "_principal")

    def __init__(self, broker: PolywireBroker, output: Output) -> None:
        super().__init__(broker)
        self._output: Final = output
        self._caller: Caller | None = None
        self._has_logged_in = False
        self._principal: Principal | None = None

    @property
    def principal(self) -> Principal | None:
        return self._principal if self._has_logged_in else self._output.certified

    @property
    def caller(self) -> Caller:
        if self._caller is None or self._caller.principal is not self.principal:
            self._caller = caller_of(self.principal, self._output.peer)
        return self._caller

    def log_in(self, request: messages.LogIn, done: Callable[[BrokerError | None], None]) -> bool:
        """Start a login. Return True if it succeeded immediately.

        Otherwise, ``done`` is called later, with None or the error. Raises Busy if too many logins wait.
        """
        self._set(None)
        found = self._access.recall(request.name, request.password, peer=self._output.peer) or self._token_user(request)
        if found is not None:
            self._set(found)
            return True

        def verified(result: Principal | BrokerError) -> None:
            done(result if isinstance(result, BrokerError) else self._try(result))

        self._access.log_in(request.name, request.password, verified, peer=self._output.peer)
        return False

    def _try(self, principal: Principal) -> BrokerError | None:
        try:
            self._set(principal)
        except BrokerError as error:
            return error
        return None

    def _set(self, principal: Principal | None) -> None:
        self._output.identified(principal)
        self._principal = principal
        self._has_logged_in = True

    @property
    def frame_bytes_max(self) -> int:
        """Size limit for a frame. It is lower before the login."""
        return FRAME_BYTES_MAX if self.principal is not None or self._access.is_open else LOGIN_FRAME_BYTES_MAX

    def _token_user(self, request: messages.LogIn) -> Principal | None:
        """Return the user of an access token that was sent as the password, None if the password is not an access
        token.
        """
        try:
            return self._access.log_in_with_token(request.password, peer=self._output.peer, name=request.name)
        except Denied:
            return None

    def check(self, command: Command[Any, Any], request: Head) -> None:
        if command.anonymous:
            return
        if self._access.is_open and self.principal is None:
            topic = self._broker.find_topic(getattr(request, "name", ""))
            if topic is None or topic.settings.access is None:
                return  # only the topic's access list applies
        action, *others = command.actions
        if self.principal is None and not self._access.is_open:
            raise Denied(ErrorCode.LOGIN_REQUIRED, LOGIN_HINT)
        if action.resource in _SOMEWHERE:
            self._access.authorize_somewhere(self.principal, action)
            return
        if action.resource is Resource.BROKER:
            self._access.authorize(self.principal, action)
            return
        match request:
            case messages.AskBounds():
                for name in dict.fromkeys(request.names[: TOPICS_MAX + 1]):
                    self.check_topic(action, name)
            case messages.CreateTopic():
                self._access.authorize(self.principal, action, created_name(request))
            case messages.Commit() | messages.AskPosition() if kind_of(request.kind) is PositionKind.CONSUMER:
                self.check_topic(others[0], request.name)
            case messages.Produce():
                self.check_topic(action, request.name)
                if request.create and self._broker.find_topic(request.name) is None:
                    self.check_topic(others[0], request.name)
            case messages.Acquire() | messages.Acknowledge():
                for needed in command.actions:
                    self.check_topic(needed, request.name)
            case _:
                self.check_topic(action, getattr(request, "name", ""))

    def check_topic(self, action: Action, full_name: str) -> None:
        self._access.authorize(self.principal, action, self._broker.resource(full_name))

    def sees_files(self) -> bool:
        return self._access.sees_files(on_loopback=self._output.on_loopback)


def created_name(request: messages.CreateTopic) -> TopicName:
    """Return the name of the topic to create. In the stream ``default``, the requested name is a full name."""
    if request.stream == DEFAULT_STREAM:
        return TopicName.parse(request.name)
    return TopicName(request.stream, request.name)
