"""One Kafka connection: frames in order, answers in order (spec: kafka#framing, kafka#connections).

Promises: answers leave in the order of the requests; PRODUCE may follow PRODUCE before the first is answered, any other request begins only
when everything before it was; what makes no sense ends the connection. No task and no future per request. Must not know: sockets, other
wires, what the requests do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Protocol

from polywire.broker.access import Principal, Where
from polywire.broker.actions import Action
from polywire.broker.owners import Caller, caller_of
from polywire.errors import BrokerError, Denied, ErrorCode, PeerError
from polywire.protocols.kafka.codec import (
    BARE,
    bare_token,
    decode_head,
    decode_request,
    decode_wide_body,
    unknown_version,
)
from polywire.protocols.kafka.context import KafkaBroker, Shared
from polywire.protocols.kafka.fetch_sessions import FetchSession
from polywire.protocols.kafka.messages import Api, Request, Served
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.sasl import Conversation
from polywire.protocols.kafka.structure_decoder import Wide
from polywire.protocols.runtime import commands
from polywire.protocols.runtime.append_queue import AppendQueue
from polywire.protocols.runtime.framed import FramedSession
from polywire.protocols.runtime.pipelined import PipelinedSession
from polywire.protocols.runtime.sequential import CLOSED
from polywire.protocols.runtime.session import LOGIN_FRAME_BYTES_MAX, Output
from polywire.protocols.runtime.slices import Slices

LENGTH_BYTES: Final = 4
REQUEST_BYTES_MAX: Final = (
    32 * 1024 * 1024 - 4096
)  # what one receive buffer holds; clients send 1 MiB unless told otherwise
LINGER_S: Final = 1.0  # that a connection stays behind an answer that ends it, unless its peer closes it
BUSY_WAIT_S: Final = 2.0  # how long batches wait for room in the log before they are refused


class Handler(Protocol):
    """Carries out one request: returns the body of the answer, or None when it fills the answer later. Raises PeerError."""

    def __call__(self, session: KafkaSession, answer: Answer, request: Any, /) -> Any: ...


class Work(Protocol):
    """What is done of one request, and no other of its connection is handled meanwhile."""

    def leave(self) -> None:
        """It is handled, or not wanted any more."""


class Command(commands.Command[Api, Handler]):
    """An api of the wire."""

    __slots__ = ()


class KafkaSession(FramedSession[KafkaBroker], PipelinedSession[KafkaBroker, Answer]):
    """One peer.

    Invariant: while ``work``, a request whose batches are opened beside the loop or stored in slices, is there, or batches wait for room in
    the log, no further request is handled. ``_principal`` is who the peer was when it was last asked, None before it has asked for anything
    that takes a login. ``software``: what the client calls itself, empty before it has.
    """

    __slots__ = (
        "_caller",
        "_commands",
        "_lingers",
        "_principal",
        "_served",
        "append_queue",
        "fetch_session",
        "sasl",
        "shared",
        "software",
        "work",
    )

    def __init__(
        self,
        shared: Shared,
        table: Mapping[Api, Command],
        output: Output,
        resume: Callable[[], None],
        served: Mapping[Api, Served] | None = None,
    ) -> None:
        """served: what may be asked for, where that is not what clients may."""
        super().__init__(shared.broker, output, resume)
        self.shared: Final = shared
        self.append_queue: Final = AppendQueue(shared.broker, BUSY_WAIT_S, self._go_on)
        self.sasl: Final = Conversation()
        self.software = ""
        self.fetch_session: FetchSession | None = None
        self.work: Work | None = None
        self._commands: Final = table
        self._served: Final[Mapping[Api, Served]] = shared.served if served is None else served
        self._principal: Principal | None = None
        self._lingers = False
        self._caller: Caller | None = None

    # What the driver asks

    @property
    def spoken_dialect(self) -> str:
        """The software that the client says it is: versions are told request by request."""
        return self.software

    @property
    def frame_bytes_max(self) -> int:
        """Longest request with its length."""
        return LENGTH_BYTES + self._request_bytes_max()

    def _request_bytes_max(self) -> int:
        """Longest request; little from who has yet to log in."""
        if self._principal is not None or self.output.certified is not None or self.broker.access.is_open:
            return REQUEST_BYTES_MAX
        return LOGIN_FRAME_BYTES_MAX

    def _waits(self) -> bool:
        return self.work is not None or bool(self.append_queue.waiting) or super()._waits()

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        """Length of the frame at ``at``, 0 while it does not tell. Raises PeerError for what cannot be one."""
        if len(data) - at < LENGTH_BYTES:
            return 0
        size = int.from_bytes(data[at : at + LENGTH_BYTES], "big", signed=True)
        if not 0 <= size <= self._request_bytes_max():
            raise PeerError(f"invalid frame length={size}", fatal=True)
        return LENGTH_BYTES + size

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        """Carry out one request; False when it must wait until everything before it is answered. Raises PeerError."""
        frame = data[at + LENGTH_BYTES : end]
        if self._principal is None and self.sasl.takes_tokens:
            command, request = self._commands[Api.SASL_AUTHENTICATE], bare_token(frame)
        else:
            command = self._commands.get(int.from_bytes(frame[:2], "big"))  # type: ignore[call-overload]  # an Api is an int
            if (command is None or not command.pipelined) and not self._settled():
                return False
            try:
                request = decode_request(frame, self._served)
            except Wide:
                self._take_wide(frame)
                return True
            assert command is not None, "what is served has a handler"
            if self._principal is None and not command.anonymous:
                self._meet()
        answer = self.append(Answer(self, request, blocking=not command.pipelined))
        self._handle(command, answer)
        return True

    def _handle(self, command: Command, answer: Answer) -> None:
        """Begin to do what a request asks for. Raises PeerError."""
        request = answer.request
        body = unknown_version() if request.body is None else command.handler(self, answer, request.body)
        if body is not None:
            answer.ok(body)

    def _take_wide(self, frame: memoryview) -> None:
        """Read a request of many elements with others' requests in between; no other of this connection is taken meanwhile.

        The frame is copied: what it is in is used for what comes next. Raises PeerError.
        """
        head, at = decode_head(frame, self._served)
        command = self._commands[head.api]
        if self._principal is None and not command.anonymous:
            self._meet()
        answer = self.append(Answer(self, head, blocking=True))
        answer.cancel = Slices(
            self.broker, _read(bytes(frame), head, at), partial(self._wide_read, command, answer)
        ).cancel

    def _wide_read(self, command: Command, answer: Answer, read: list[Any] | BrokerError) -> None:
        """A request of many elements is read: go on as with any other."""
        assert not isinstance(read, BrokerError), "nobody was asked anything yet"
        (body,) = read
        answer.cancel = None
        try:
            if isinstance(body, PeerError):
                raise body
            answer.request = answer.request._replace(body=body)
            self._handle(command, answer)
        except PeerError as error:
            self.fail(error)

    # What handlers ask

    @property
    def principal(self) -> Principal:
        """Who the peer is; whose login is over may do nothing. Raises Denied(LOGIN_REQUIRED)."""
        if self._principal is None:
            self._principal = self.output.certified or self.broker.access.anonymous()
        return self._principal

    def _meet(self) -> None:
        """The peer asks for something that takes a login. Raises PeerError: peers of this wire expect no other answer."""
        try:
            self._principal = self.principal
        except Denied as denied:
            raise PeerError(denied.message, fatal=True) from None

    def logged_in(self, principal: Principal) -> None:
        """Make the peer this user. Raises Busy, Denied(LOGIN_FAILED) where it has been another user (KIP-368)."""
        if self._principal is not None and self._principal.user_id != principal.user_id:
            raise Denied(
                ErrorCode.LOGIN_FAILED,
                "a connection cannot log in as another user (open a new connection)"
                f" user={self._principal.name!r} asked={principal.name!r}",
            )
        self.output.identified(principal)
        self._principal = principal

    @property
    def address(self) -> tuple[str, int]:
        """Host and port by which the peer reaches this broker."""
        return self.shared.address(self.output.local)

    @property
    def peer_address(self) -> str:
        """Where the peer is."""
        return self.output.peer

    def check_here(self, topic: str) -> None:
        """Refuse a topic that is not here because another process has it, if there are several. Raises NotOwner(NOT_OWNER)."""

    @property
    def caller(self) -> Caller:
        """Whose it is what the peer makes."""
        if self._caller is None or self._caller.principal is not self._principal:
            self._caller = caller_of(self._principal, self.peer_address)
        return self._caller

    def authorize(self, action: Action, where: Where = None) -> None:
        """Refuse what the peer may not do. Raises Denied."""
        self.broker.access.authorize(self.principal, action, where)

    def permits(self, action: Action, where: Where = None) -> bool:
        """Whether the peer may do it. Raises Denied(LOGIN_REQUIRED) when it is nobody."""
        return self.broker.access.permits(self.principal, action, where)

    def fail(self, error: PeerError) -> None:
        """Close, dropping what was not handled, for what is not found out inside of ``receive``."""
        self.append_queue.drop()
        self._stop_taking()
        self._leave_work()
        if self._phase is not CLOSED:
            self.output.fail(error)

    def end(self, answer: Answer) -> None:
        """This answer is the last. A peer has a moment to read it: there are clients that drop what they have not looked at when they see the
        end of the connection behind it."""
        self._stop_taking()
        if answer.request.version != BARE:  # that one has no bytes: the end tells
            self._lingers = True
            self.broker.loop.call_later(LINGER_S, self._end_now)

    def finish(self, data: memoryview) -> None:
        """The peer is done."""
        self._lingers = False
        super().finish(data)

    def _end_now(self) -> None:
        self._lingers = False
        self._end_when_done()

    def owes(self) -> bool:
        """Whether something that was asked for is not answered yet, or its failure is still to be told by the end of the connection."""
        return self._lingers or super().owes()

    def refuse_silently(self) -> None:
        """What has no answer has failed: the end of the connection tells so (spec: kafka#produce)."""
        error = PeerError("records with acks=0 could not be stored", fatal=True)
        self.broker.loop.call_soon(self.fail, error)

    def worked(self) -> None:
        """``work`` is handled: go on with the next request."""
        self._leave_work()
        self._go_on()

    def _leave_work(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.leave()

    # The end

    def close(self) -> None:
        """The connection is gone."""
        self._enter(CLOSED)
        self._leave_work()
        self.append_queue.drop()
        self._abandon()
        if self.fetch_session is not None:
            self.fetch_session.end()
            self.fetch_session = None


def _read(frame: bytes, head: Request, start: int) -> Iterator[Any]:
    """The body of a request at last, or what is wrong with it; None now and then before."""
    try:
        yield from decode_wide_body(frame, head, start)
    except PeerError as error:
        yield error.with_traceback(None)
