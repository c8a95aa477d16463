"""One Iggy connection: read requests and send replies in their order.

* A request sees the effects of all earlier requests of its connection.
* Every request that can be decoded gets a reply. Invalid bytes end the connection, with the error of the specification.
* The connection leaves its groups when it ends.
* No asyncio task or future is created per request.

(spec: iggy#classic-framing, iggy#d3-frames)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from polywire.broker.access import Principal, Where
from polywire.broker.api import Pending
from polywire.broker.owners import ITSELF, Caller, caller_of
from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Denied, ErrorCode, PeerError
from polywire.log.base import Completion
from polywire.protocols.iggy import documented, errors, vsr
from polywire.protocols.iggy.context import ClientState, GroupNumbers, IggyBroker, Shared
from polywire.protocols.iggy.dialect import D0, D3, Dialect
from polywire.protocols.iggy.held import HeldRequests
from polywire.protocols.iggy.messages import HEAD, Code, Refused
from polywire.protocols.iggy.patches import translate
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.recognition import Recognition
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.runtime import commands
from polywire.protocols.runtime.append_queue import AppendQueue
from polywire.protocols.runtime.framed import FramedSession
from polywire.protocols.runtime.pipelined import PipelinedSession
from polywire.protocols.runtime.sequential import CLOSED, Wait
from polywire.protocols.runtime.session import LOGIN_FRAME_BYTES_MAX, Output
from polywire.protocols.runtime.shapes import Shapes

FRAME_BYTES_MAX: Final = 32 * 1024 * 1024 - 4096  # size of a receive buffer; larger than any batch that the log accepts
# number of replies that are stored for repeats of D3 requests that change state (spec: iggy#request-numbers)
REPLAYS_MAX: Final = 8
BUSY_WAIT_S: Final = 2.0  # how long messages wait if the log is overloaded, before they are refused


class Handler(Protocol):
    """Executes a request. Returns the payload of the reply, or None if the reply is sent later.

    Raises Refused or BrokerError; the client gets their error number.
    """

    def __call__(self, session: IggySession, answer: Answer, reader: Reader, /) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Command(commands.Command[Code, Handler]):
    """A request type of the protocol and its handler.

    Attributes:
        empty: whether the command has no payload, and requests without a header may have none (spec: iggy#d0-requests).
        today: whether only clients since protocol 0.12 have the command.
        held: whether it may wait for messages while later requests are executed.
    """

    empty: bool = field(default=False, kw_only=True)
    today: bool = field(default=False, kw_only=True)
    held: bool = field(default=False, kw_only=True)


class IggySession(FramedSession[IggyBroker], PipelinedSession[IggyBroker, Answer]):
    """The session of one client."""

    __slots__ = (
        "_caller",
        "_commands",
        "_held_requests",
        "_number",
        "_replays",
        "append_queue",
        "client_id",
        "epoch",
        "members",
        "poll_counts",
        "principal",
        "recognition",
        "shapes",
        "shared",
    )

    def __init__(
        self, shared: Shared, commands: Mapping[int, Command], output: Output, resume: Callable[[], None]
    ) -> None:
        super().__init__(shared.broker, output, resume)
        self.shared: Final = shared
        self.recognition: Final = Recognition(shared.forced)
        self.append_queue: Final = AppendQueue(shared.broker, BUSY_WAIT_S, self._continue)
        self._queued = self.append_queue.waiting
        self.shapes: Final = Shapes()  # the beginnings of the latest requests that send messages, for ``take_repeated``
        self.principal: Principal | None = None
        self._caller: Caller | None = None
        self.epoch = 0
        self.client_id = shared.enter(self, self.peer)
        self.members: Final[dict[tuple[bytes, str], tuple[Topic, int]]] = {}
        """The groups joined over this connection, by topic id and group name: the topic, and the partition polled last.
        """
        self.poll_counts: Final[dict[tuple[bytes, str], int]] = {}
        self._commands = commands
        self._replays: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._number = 0
        self._held_requests: HeldRequests | None = None

    # Called by the driver

    @property
    def spoken_dialect(self) -> str:
        return "" if self.recognition.framed is None else self.recognition.dialect.name

    @property
    def frame_bytes_max(self) -> int:
        return self._length_max() + vsr.HEADER_BYTES

    def _length_max(self) -> int:
        is_known = (self.principal or self.output.certified) is not None or self.broker.access.is_open
        return FRAME_BYTES_MAX if is_known else LOGIN_FRAME_BYTES_MAX

    @property
    def peer(self) -> str:
        return self.output.peer

    @property
    def local(self) -> tuple[str, int]:
        return self.output.local

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        if len(data) - at < 4:
            return 0
        length = int.from_bytes(data[at : at + 4], "little")
        if self.recognition.framed is None:
            self.recognition.see_framing(length)
        if self.recognition.framed is not True:
            if length < 4 or (length > LOGIN_FRAME_BYTES_MAX and length > self._length_max()):
                self.output.write(HEAD.pack(errors.UNKNOWN_COMMAND if length < 4 else errors.TOO_BIG, 0))
                raise PeerError(f"invalid frame length={length}", fatal=True)
            return 4 + length
        if len(data) - at < vsr.HEADER_BYTES:
            return 0
        head = vsr.parse_head(data[at:])
        if head.command != vsr.REQUEST or not vsr.HEADER_BYTES <= head.size <= self._length_max():
            raise PeerError(f"invalid request command={head.command} size={head.size}", fatal=True)
        return head.size

    # Requests

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        if not self.recognition.framed:
            return self._handle(int.from_bytes(data[at + 4 : at + 8], "little"), data[at + 8 : end], None)
        head = vsr.parse_head(data[at:end])
        body = data[at + vsr.HEADER_BYTES : end]
        if head.operation == vsr.REGISTER:
            return self._handle(Code.LOGIN, body, head)
        if head.operation == vsr.PLAIN:
            if head.code in (Code.LOGIN, Code.LOGIN_TOKEN):
                self._slot(head, D3).evict(vsr.EVICT_LOGIN)
                return True
            if head.code == Code.BIND_SESSION:  # a login ends with its connection, so the client must log in again
                self._slot(head, self.recognition.dialect).status(errors.NOT_LOGGED_IN)
                return True
            if head.code == Code.CANCEL and self.recognition.dialect.contexts:
                self._cancel_held(head)
                return True
            return self._handle(head.code, body, head)
        return self._take_change(head, body)

    def _take_change(self, head: vsr.Head, body: memoryview) -> bool:
        """Execute a request that changes state, or send the stored reply if it is a retry.

        Return False if it must wait and be passed again.
        """
        dialect = self.recognition.dialect
        is_patch = head.operation == vsr.UPDATE and dialect.contexts
        code = vsr.OPERATIONS.get(head.operation)
        if code is None and not is_patch:
            self._slot(head, dialect).evict(vsr.EVICT_UNKNOWN)
            return True
        if self.principal is None and head.operation != vsr.LOG_OUT:
            self._slot(head, dialect).evict(vsr.EVICT_NO_LOGIN)
            return True
        if head.has_result and head.operation < vsr.SEND:
            if not self._earlier_answered():
                return False
            if self._replay(head):
                return True
        if code is None:
            try:
                code, payload = translate(body)
            except Refused as error:
                self._slot(head, dialect).refuse(error)
                return True
            body = memoryview(payload)
        return self._handle(code, body, head)

    def _handle(self, code: int, payload: memoryview, head: vsr.Head | None) -> bool:
        command = self._commands.get(code)
        pipelined = command is not None and command.pipelined
        if not pipelined and not self._earlier_answered():
            return False
        if self._must_scan(code):
            return False
        dialect = self.recognition.dialect_for(code, payload, logged_in=self.principal is not None)
        return self._begin(command, code, payload, head, dialect)

    def named_incarnation(self, answer: Answer) -> int:
        """Return the partition's incarnation number in the current request; 0 if it has none."""
        return 0 if answer.head is None else answer.head.incarnation

    def _begin(
        self, command: Command | None, code: int, payload: memoryview, head: vsr.Head | None, dialect: Dialect
    ) -> bool:
        """Execute a request. Return False if it must wait and be passed again. Raises Pending."""
        if command is not None and command.held and head is not None and dialect.contexts:
            held = self._held_slot(head, dialect)
            if held is None:
                return True
            answer = held
        else:
            answer = self._slot(head, dialect, blocking=command is None or not command.pipelined)
        try:
            if command is None:
                raise Refused(errors.UNAVAILABLE if code in _KNOWN and dialect is not D0 else errors.UNKNOWN_COMMAND)
            if self.principal is None:
                self._set_default_user(command)
            if command.today and not dialect.contexts:
                raise Refused(errors.UNKNOWN_COMMAND)
            if command.empty and head is None and len(payload) > 0:
                raise Refused(errors.UNKNOWN_COMMAND)
            reader = documented.reader_of(code, payload) if dialect is D0 else Reader(payload, dialect)
            result = command.handler(self, answer, reader)
        except BrokerError as error:
            answer.refuse(error)
        except Pending:
            self._remove_newest(answer)
            self._number -= 1
            raise
        else:
            if result is not None:
                answer.ok(result)
        return True

    def _must_scan(self, code: int) -> bool:
        """Return whether a request must wait until numbers are assigned to many new topics.

        That is true for the first request of a connection, and for requests that may name any topic.
        """
        directory = self.shared.directory
        if (self._number and code in _GOING_ON) or not directory.needs_long_scan:
            return False
        self._reasons |= Wait.YIELDING
        directory.scan_in_slices(self._begin_quantum)
        return True

    def _set_default_user(self, command: Command) -> None:
        """Set the user of a connection without login: that of the TLS certificate, or the anonymous user.

        Raises Denied if the command needs a login (spec: iggy#recognising-the-dialect).
        """
        self.principal = self.output.certified
        if self.principal is None and not command.anonymous:
            if self.recognition.framed:
                raise Denied(ErrorCode.LOGIN_REQUIRED, "log in first")
            self.principal = self.broker.access.anonymous()

    def _held_slot(self, head: vsr.Head, dialect: Dialect) -> Answer | None:
        """Return a reply for a request that may wait for messages; None if too many wait."""
        if self._held_requests is None:
            self._held_requests = HeldRequests(self, self.output)
        self._number += 1
        held = self._held_requests.open(dialect, head, self._number)
        if held is None:
            self._slot(head, dialect).status(errors.HELD_TOO_MANY)
        return held

    def _slot(self, head: vsr.Head | None, dialect: Dialect, *, blocking: bool = True) -> Answer:
        self._number += 1
        return self.append(Answer(self, dialect, head, number=self._number, blocking=blocking))

    def store_reply(self, head: vsr.Head, reply: bytes) -> None:
        self._replays[head.number] = (head.operation, reply)
        while len(self._replays) > REPLAYS_MAX:
            self._replays.popitem(last=False)

    def _replay(self, head: vsr.Head) -> bool:
        """Return whether a request is a retry of one that has changed state (spec: iggy#request-numbers).

        If so, send the stored reply again.
        """
        stored = self._replays.get(head.number)
        if stored is None or stored[0] != head.operation:
            return False
        self.output.write(stored[1])
        return True

    def logged_in(self, principal: Principal) -> None:
        """Set the client's user. Raises Busy if there are too many connections."""
        self.output.identified(principal)
        if self.principal is not None and self.principal != principal:
            self.leave_groups()
        self.principal = principal
        self._replays.clear()

    def renew(self, principal: Principal) -> None:
        self.output.identified(principal)
        self.principal = principal

    def logged_out(self) -> None:
        """Leave the user's groups and remove the user."""
        self.leave_groups()
        self.output.identified(None)
        self.principal = None

    # Permissions

    @property
    def caller(self) -> Caller:
        """The client's user, against whose quota the streams, topics and groups that the client creates count."""
        if self._caller is None or self._caller.principal is not self.principal:
            self._caller = caller_of(self.principal, self.peer)
        return self._caller

    def authorize(self, action: Action, where: Where = None) -> None:
        self.broker.access.authorize(self.principal, action, where)

    def permits(self, action: Action, where: Where = None) -> bool:
        return self.broker.access.permits(self.principal, action, where)

    # End of the connection

    def end(self) -> None:
        self._stop_receiving()

    def fail(self, error: PeerError) -> None:
        self.output.fail(error)

    def _stop_receiving(self) -> None:
        self._drop_held()
        super()._stop_receiving()

    def _cancel_held(self, head: vsr.Head) -> None:
        """Cancel a request that waits for messages. This has no reply."""
        if self.principal is None:
            self._slot(head, self.recognition.dialect).status(errors.NOT_LOGGED_IN)
        elif self._held_requests is not None:
            self._held_requests.cancel(head.number)

    def _drop_held(self) -> None:
        # breaks the reference cycle between the requests and this session
        held, self._held_requests = self._held_requests, None
        if held is not None:
            held.drop()

    def close(self) -> None:
        """Leave the groups of the connection and drop its requests."""
        self._enter(CLOSED)
        self.append_queue.drop()
        self._drop_held()
        self._drop_slots()
        self.leave_groups()
        self.shared.leave(self)

    def joined(self) -> list[tuple[Topic, str]]:
        for key, (topic, _) in list(self.members.items()):
            if self.broker.topic_of_id(topic.id) is not topic:
                del self.members[key]
                self.poll_counts.pop(key, None)
        return [(topic, group) for (_, group), (topic, _) in self.members.items()]

    def describe(self) -> ClientState:
        directory, groups = self.shared.directory, []
        for topic, group in self.joined():
            number = directory.group_number(topic, group)
            if number is not None:
                groups.append(GroupNumbers(directory.stream_of(topic).number, directory.stored(topic).number, number))
        user = self.principal
        return ClientState(self.client_id, None if user is None else user.user_id, self.peer, groups)

    def leave_groups(self) -> None:
        for topic_id, group in list(self.members):
            self.leave_group(topic_id, group)

    def leave_group(self, topic_id: bytes, group: str, done: Completion[int] | None = None) -> None:
        """Leave a group, if the client is still a member."""
        topic, _ = self.members.pop((topic_id, group))
        self.poll_counts.pop((topic_id, group), None)
        try:
            self.broker.groups.leave(group, topic.name.full, self.member_id, None, wire="iggy", by=ITSELF, done=done)
        except BrokerError as error:
            if done is not None:
                self.broker.loop.call_soon(done, -1, None)
            del error  # the group, its topic or the membership no longer exists

    @property
    def member_id(self) -> str:
        return f"iggy-{self.client_id}"


_KNOWN: Final = frozenset(Code)
_GOING_ON: Final = frozenset({Code.PING, Code.SEND, Code.POLL, Code.STORE_OFFSET, Code.GET_OFFSET})
