"""One Kafka connection: requests and responses in order (spec: kafka#framing, kafka#connections).

* PRODUCE requests are pipelined. Any other request starts when all earlier requests are answered.
* A malformed request closes the connection.
* No asyncio task or future is created per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from polywire.broker.access import Principal, Where
from polywire.broker.api import Pending
from polywire.broker.owners import Caller, caller_of
from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Denied, ErrorCode, PeerError
from polywire.log.base import Handle
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
from polywire.protocols.kafka.share_sessions import ShareSession
from polywire.protocols.kafka.structure_decoder import Wide
from polywire.protocols.kafka.structures import Record
from polywire.protocols.runtime import commands
from polywire.protocols.runtime.acquiring import Acquiring
from polywire.protocols.runtime.append_queue import AppendQueue
from polywire.protocols.runtime.framed import FramedSession
from polywire.protocols.runtime.pipelined import PipelinedSession
from polywire.protocols.runtime.sequential import CLOSED
from polywire.protocols.runtime.session import LOGIN_FRAME_BYTES_MAX, Output
from polywire.protocols.runtime.shapes import Shapes
from polywire.protocols.runtime.slices import Slices

LENGTH_BYTES: Final = 4
REQUEST_BYTES_MAX: Final = 32 * 1024 * 1024 - 4096  # size of a receive buffer; by default, clients send at most 1 MiB
LINGER_S: Final = 1.0  # how long a connection stays open after its last response, if the client does not close it
# added to the reason in the broker's log, because the client only sees that its connection is closed
LOGIN_ADVICE: Final = (
    ": this broker has users. The client sent a request without a login (set security.protocol to SASL_PLAINTEXT, or to"
    " SASL_SSL with TLS, sasl.mechanism, and the name and password)"
)
WORKING: Final = 32  # reason to wait, like those of ``Wait``: the session has ``work``
BUSY_WAIT_S: Final = 2.0  # how long batches wait for space in the log before they are rejected


class Handler(Protocol):
    """Executes a request.

    Returns the body of the response, or None if the response is sent later. Raises PeerError to close the connection.
    """

    def __call__(self, session: KafkaSession, answer: Answer, request: Any, /) -> Record | None: ...


class Work(Protocol):
    """A Produce request that is decompressed in a thread or stored in slices. Later requests of its connection wait."""

    def leave(self) -> None: ...  # called once, at its end or when the connection closes


@dataclass(frozen=True, slots=True)
class Command(commands.Command[Api, Handler]):
    """A request type of the protocol.

    Attributes:
        learn: called with the bytes of each executed request, so that ``take_repeated`` can execute those that repeat it.
    """

    learn: Callable[[KafkaSession, memoryview, Request], None] | None = field(default=None, kw_only=True)


class KafkaSession(FramedSession[KafkaBroker], PipelinedSession[KafkaBroker, Answer]):
    """The session of one client.

    Attributes:
        shapes: the latest Produce requests with one batch, without the batch, for ``take_repeated``.
        fetch_shapes: the latest Fetch requests, for ``take_repeated``.
        software: name and version of the client's software; empty until the client has sent them.
        work: the request that delays later ones, if there is one.
        fetch_session: the connection's fetch session, if one is open.
        share_session: the connection's share session, if one is open.
        share_reading: the last ShareFetch request, which may have ended.
    """

    __slots__ = (
        "_caller",
        "_client_id",
        "_commands",
        "_lingers",
        "_principal",
        "_served",
        "_work",
        "append_queue",
        "fetch_session",
        "fetch_shapes",
        "sasl",
        "shapes",
        "share_reading",
        "share_session",
        "shared",
        "software",
    )

    def __init__(
        self,
        shared: Shared,
        table: Mapping[Api, Command],
        output: Output,
        resume: Callable[[], None],
        served: Mapping[Api, Served] | None = None,
    ) -> None:
        """Open the session.

        Args:
            table: the handlers of the supported requests.
            served: the supported versions, if they differ from those for clients.
        """
        super().__init__(shared.broker, output, resume)
        self.shared: Final = shared
        self.append_queue: Final = AppendQueue(shared.broker, BUSY_WAIT_S, self._continue)
        self._queued = self.append_queue.waiting
        self._short_bytes_max = LOGIN_FRAME_BYTES_MAX
        self.sasl: Final = Conversation()
        self.software = ""
        self.shapes: Final = Shapes()
        self.fetch_shapes: Final[list[Any]] = []
        self.fetch_session: FetchSession | None = None
        self.share_session: ShareSession | None = None
        self.share_reading: Acquiring | None = None
        self._work: Work | None = None
        self._commands: Final = table
        self._served: Final[Mapping[Api, Served]] = shared.served if served is None else served
        self._principal: Principal | None = None  # the user at the last check; None before a login was required
        self._lingers = False  # see ``end``
        self._caller: Caller | None = None
        self._client_id: str | None = None

    # The driver's interface

    @property
    def spoken_dialect(self) -> str:
        return self.software

    @property
    def frame_bytes_max(self) -> int:
        return LENGTH_BYTES + self._request_bytes_max()

    def _request_bytes_max(self) -> int:
        if self._principal is not None or self.output.certified is not None or self.broker.access.is_open:
            return REQUEST_BYTES_MAX
        return LOGIN_FRAME_BYTES_MAX

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        """Return the size of the request at ``at``, or 0 if its length is incomplete.

        Raises PeerError for an invalid length.
        """
        if len(data) - at < LENGTH_BYTES:
            return 0
        size = int.from_bytes(data[at : at + LENGTH_BYTES], "big", signed=True)
        if not 0 <= size <= self._request_bytes_max():
            raise PeerError(f"invalid frame length={size}", fatal=True)
        return LENGTH_BYTES + size

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        frame = data[at + LENGTH_BYTES : end]
        if self._principal is None and self.sasl.takes_tokens:
            command, request = self._commands[Api.SASL_AUTHENTICATE], bare_token(frame)
        else:
            command = self._commands.get(int.from_bytes(frame[:2], "big"))  # type: ignore[call-overload]  # an Api is an int
            if (command is None or not command.pipelined) and not self._earlier_answered():
                return False
            try:
                request = decode_request(frame, self._served)
            except Wide:
                self._take_wide(frame)
                return True
            assert command is not None, "every supported request has a handler"
            if self._principal is None and not command.anonymous:
                self._require_login()
        if request.client_id != self._client_id:
            self._client_id = request.client_id
            self.shapes.clear()
            self.fetch_shapes.clear()
            self.take_repeated = None
            self.output.set_client_id(request.client_id)
        self._prepare(request)
        self._handle(command, self.append(Answer(self, request, blocking=not command.pipelined)))
        if command.learn is not None:
            command.learn(self, frame, request)
        return True

    def _handle(self, command: Command, answer: Answer) -> None:
        """Execute a request. Raises PeerError to close the connection."""
        request = answer.request
        body = unknown_version() if request.body is None else command.handler(self, answer, request.body)
        if body is not None:
            answer.ok(body)

    def _take_wide(self, frame: memoryview) -> None:
        """Decode a large request in slices, then execute it. Later requests of this connection wait.

        The bytes are copied, because the receive buffer is reused. Raises PeerError.
        """
        head, at = decode_head(frame, self._served)
        command = self._commands[head.api]
        if self._principal is None and not command.anonymous:
            self._require_login()
        answer = self.append(Answer(self, head, blocking=True))
        answer.cancel = Slices(
            self.broker, _read(bytes(frame), head, at), partial(self._wide_decoded, command, answer)
        ).cancel

    def _wide_decoded(self, command: Command, answer: Answer, read: list[Any] | BrokerError) -> None:
        assert not isinstance(read, BrokerError), "decoding does not call the broker"
        (body,) = read
        answer.cancel = None
        try:
            if isinstance(body, PeerError):
                raise body
            answer.request = answer.request._replace(body=body)
            self._handle_wide(command, answer)
        except PeerError as error:
            self.fail(error)

    def _handle_wide(self, command: Command, answer: Answer) -> None:
        """Execute a request that was decoded in slices.

        If it needs information from other processes, it is executed when that has arrived. Raises PeerError.
        """
        try:
            self._prepare(answer.request)
        except Pending as pending:
            handle = pending.then(partial(self._handle_again, command, answer, pending))
            answer.cancel = partial(_cancel, handle)
        else:
            self._handle(command, answer)

    def _handle_again(self, command: Command, answer: Answer, pending: Pending) -> None:
        answer.cancel = None
        try:
            with pending:
                self._handle_wide(command, answer)
        except PeerError as error:
            self.fail(error)

    # The handlers' interface

    @property
    def principal(self) -> Principal:
        """The client's user. Raises Denied(LOGIN_REQUIRED) before the login."""
        if self._principal is None:
            self._principal = self.output.certified or self.broker.access.anonymous()
        return self._principal

    def _require_login(self) -> None:
        """Raise PeerError before the login, because Kafka clients expect that the connection is closed."""
        try:
            self._principal = self.principal
        except Denied as denied:
            raise PeerError(f"{denied.message}{LOGIN_ADVICE}", fatal=True) from None

    def logged_in(self, principal: Principal) -> None:
        """Set the client's user.

        Raises Busy if there are too many connections, and Denied(LOGIN_FAILED) if another user is logged in (KIP-368).
        """
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
        return self.shared.address(self.output.local)

    @property
    def peer_address(self) -> str:
        return self.output.peer

    def leads(self, topic: Topic) -> bool:
        """Return whether the topic belongs to this process."""
        del topic
        return True

    def node_of(self, topic: Topic) -> int:
        """Return the node that leads the partitions of a topic."""
        del topic
        return self.shared.node_id

    def nodes(self) -> dict[int, tuple[str, int]]:
        """Return the host and port of each node, as this client can reach them."""
        return {self.shared.node_id: self.address}

    def coordinator(self, name: str) -> int:
        """Return the node that coordinates a group or a transactional id."""
        del name
        return self.shared.node_id

    def _prepare(self, request: Request) -> None:
        """Raise Pending if the request needs information from other processes. A broker with several processes overrides this."""

    @property
    def caller(self) -> Caller:
        """The client's user, who becomes the owner of objects that the client creates."""
        if self._caller is None or self._caller.principal is not self._principal:
            self._caller = caller_of(self._principal, self.peer_address)
        return self._caller

    def authorize(self, action: Action, where: Where = None) -> None:
        """Raise Denied if the client may not perform an action."""
        self.broker.access.authorize(self.principal, action, where)

    def permits(self, action: Action, where: Where = None) -> bool:
        return self.broker.access.permits(self.principal, action, where)

    def fail(self, error: PeerError) -> None:
        """Drop waiting requests and close the connection. Used for errors that are found outside ``receive``."""
        self.append_queue.drop()
        self._stop_receiving()
        self._leave_work()
        if self._phase is not CLOSED:
            self.output.fail(error)

    def end(self, answer: Answer) -> None:
        """Close the connection ``LINGER_S`` after this response.

        Some clients drop unread data when the connection closes.
        """
        self._stop_receiving()
        # a response without bytes cannot be sent; closing the connection replaces it
        if answer.request.version != BARE:
            self._lingers = True
            self.broker.loop.call_later(LINGER_S, self._end_now)

    def finish(self, data: memoryview) -> None:
        self._lingers = False
        super().finish(data)
        if self.share_reading is not None:
            self.share_reading.stop()

    def _end_now(self) -> None:
        self._lingers = False
        self._end_when_done()

    def owes(self) -> bool:
        """Return whether a request is unanswered, or the connection waits to be closed (see ``end``)."""
        return self._lingers or super().owes()

    def refuse_silently(self) -> None:
        """Close the connection, because a request that has no response (acks 0) has failed (spec: kafka#produce)."""
        error = PeerError("records with acks=0 could not be stored", fatal=True)
        self.broker.loop.call_soon(self.fail, error)

    @property
    def work(self) -> Work | None:
        return self._work

    @work.setter
    def work(self, work: Work | None) -> None:
        self._work = work
        self._reasons = self._reasons & ~WORKING if work is None else self._reasons | WORKING

    def end_work(self) -> None:
        """End ``work``, and execute the next request."""
        self._leave_work()
        self._continue()

    def _leave_work(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.leave()

    # The end of the connection

    def close(self) -> None:
        self._enter(CLOSED)
        self._leave_work()
        self.append_queue.drop()
        self._drop_slots()
        if self.fetch_session is not None:
            self.fetch_session.end()
            self.fetch_session = None
        self.share_reading = None
        self.end_share_session()

    def end_share_session(self) -> None:
        """End the share session, if one is open, and release the records that its member has acquired."""
        share_session, self.share_session = self.share_session, None
        if share_session is not None:
            self.shared.share_sessions.end(share_session)


def _cancel(handle: Handle) -> None:
    handle.cancel()


def _read(frame: bytes, head: Request, start: int) -> Iterator[Any]:
    """Decode the body of a request in steps. Yields None after each step, and the body or the error at the end."""
    try:
        yield from decode_wide_body(frame, head, start)
    except PeerError as error:
        yield error.with_traceback(None)
