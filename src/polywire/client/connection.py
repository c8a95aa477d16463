"""The base class of the connections of all asynchronous clients.

Replies arrive in the order of the calls, and each call gets its reply. A lost connection is never reopened: each
pending call fails.
"""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, ParamSpec, Protocol, Self, TypeVar, cast

from polywire.client.address import secured
from polywire.client.failures import cannot_connect, connection_closed, invalid_reply, no_reply
from polywire.errors import BrokerError, ErrorCode, Invalid, PeerError, Unavailable
from polywire.types import spell_address

LENGTH_BYTES: Final = 4  # length prefix of a frame
TLS_ALERT: Final = b"\x15\x03"
FIRST_REPLY_S: Final = 10.0  # seconds from the first request to its reply; the same limit as for connecting

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Reply = TypeVar("_Reply")
Opened = TypeVar("Opened", bound=asyncio.BaseProtocol)


class Connection(asyncio.Protocol, ABC):
    """One connection to a broker.

    After it is lost, every call fails immediately.
    """

    CLOSE_REASON: ClassVar[str] = ""
    """Why brokers close connections over this protocol, for error messages; empty if there is no single reason."""
    CLOSE_ADVICE: ClassVar[str] = ""
    """Advice to add to the error if the broker closes the connection before its first reply."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop: Final = loop
        self._transport: asyncio.Transport | None = None
        self._address = ""
        self._lost: BrokerError | None = None
        self._has_reply = False
        self._writable = asyncio.Event()
        self._writable.set()

    @abstractmethod
    def _take_waiting(self) -> Iterable[asyncio.Future[Any]]:
        """Remove all pending calls, and return the futures that their callers await."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport. Called by asyncio."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports have no common base class
        host, port, *_ = transport.get_extra_info("peername") or ("unknown", 0)
        self._address = spell_address(host, port)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all pending calls. Called by asyncio."""
        if self._has_reply or self.CLOSE_REASON:
            cause = exc or self.CLOSE_REASON or "closed"
            advice = "" if self._has_reply else " (check that the port belongs to this protocol)"
            reason = f"connection lost{advice} reason={cause} address={self._address}"
            self.fail(Unavailable(ErrorCode.UNREACHABLE, reason))
        else:
            self.fail(connection_closed(self._address, self.CLOSE_ADVICE))

    @property
    def is_lost(self) -> bool:
        """Whether the connection was lost or closed, so that every call fails without sending anything."""
        return self._lost is not None or (self._transport is not None and self._transport.is_closing())

    @property
    def loss(self) -> BrokerError | None:
        """Why every call fails without sending anything; None while the connection can be used."""
        if self._lost is None and self.is_lost:
            self.connection_lost(None)  # asyncio calls it in a later pass, and logs a warning for each write until then
        return self._lost

    def pause_writing(self) -> None:
        """Make further requests wait. Called by asyncio if the send buffer is full."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let requests continue. Called by asyncio."""
        self._writable.set()

    def fail(self, error: BrokerError) -> None:
        """Close the connection. Each pending or later call fails with a copy of ``error``."""
        if self._lost is not None:
            return
        self._lost = error
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()
        for reply in self._take_waiting():
            if not reply.done():
                reply.set_exception(_copy(error))

    @staticmethod
    def _look_for_tls(received: bytearray) -> None:
        """Raise Invalid if the first reply is a TLS alert. No protocol's first reply begins with the same bytes."""
        if received.startswith(TLS_ALERT):
            raise Invalid(ErrorCode.INVALID_REQUEST, "the port uses TLS (add +tls to the scheme)")

    def _opened(self) -> asyncio.Transport:
        """Return the transport, or raise the error of the lost connection."""
        if self.loss is not None:
            raise _copy(self.loss)
        assert self._transport is not None, "asked before the connection was made"
        return self._transport


@dataclass(eq=False, slots=True)
class _Call(Generic[_Reply]):
    done: asyncio.Future[list[_Reply]]
    count: int
    replies: list[_Reply] = field(default_factory=list)


class PipelinedConnection(Connection, Generic[_Reply]):
    """A connection whose replies have no request id. Calls receive their replies in the order of the requests.

    Subclasses define where a reply ends and how it is decoded. The connection fails if the first reply does not arrive
    in time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._received = bytearray()
        self._unsent = 0  # size of the send buffer at the last check
        self._first_reply: asyncio.TimerHandle | None = None
        self._is_patient = False  # whether the first reply may take any time
        self._calls: deque[_Call[_Reply]] = deque()

    @abstractmethod
    def _end_of(self, data: bytearray, at: int) -> int:
        """Return the end of the reply that begins at ``at``; 0 if more bytes are needed to know it.

        The end may be beyond the received data. Raises PeerError.
        """

    @abstractmethod
    def _reply(self, data: bytearray, at: int, end: int) -> _Reply:
        """Decode the reply ``data[at:end]``. Raises PeerError."""

    def _take_waiting(self) -> Iterable[asyncio.Future[Any]]:
        self.expect_late_replies()
        calls, self._calls = self._calls, deque()
        return [call.done for call in calls]

    def data_received(self, data: bytes) -> None:
        """Pass complete replies to their calls. Called by asyncio."""
        self._received += data
        at = 0
        try:
            if not self._has_reply:
                self._look_for_tls(self._received)
            while at < len(self._received):
                if not self._calls:
                    raise PeerError("response without a request", fatal=True)
                end = self._end_of(self._received, at)
                if end == 0 or end > len(self._received):
                    break
                self._deliver(self._reply(self._received, at, end))
                self._has_reply = True
                if not self._is_patient:
                    self.expect_late_replies()
                at = end
        except PeerError as error:
            self.fail(invalid_reply(error, self._address, is_later=self._has_reply))
            return
        except BrokerError as error:
            self.fail(error)
            return
        del self._received[:at]

    def expect_late_replies(self) -> None:
        """Disable the time limit for the first reply, because the broker may respond to a request much later."""
        if self._first_reply is not None:
            self._first_reply.cancel()
            self._first_reply = None
        self._is_patient = True

    def _wait_for_first_reply(self, transport: asyncio.Transport) -> None:
        """Fail the connection if no reply has arrived.

        If the broker is still receiving the request, check again later.
        """
        unsent = transport.get_write_buffer_size()
        if self._first_reply is not None and not 0 < unsent < self._unsent:
            self.fail(no_reply(self._address))
            return
        self._unsent = unsent
        self._first_reply = self._loop.call_later(FIRST_REPLY_S, self._wait_for_first_reply, transport)

    def _deliver(self, reply: _Reply) -> None:
        call = self._calls[0]
        call.replies.append(reply)
        if len(call.replies) == call.count:
            self._calls.popleft()
            if not call.done.done():
                call.done.set_result(call.replies)

    async def exchange(self, requests: bytes, count: int) -> list[_Reply]:
        """Send requests, and return their ``count`` replies, at least one. Raises Unavailable."""
        transport = self._opened()
        call: _Call[_Reply] = _Call(self._loop.create_future(), count)
        self._calls.append(call)
        transport.write(requests)
        if not self._is_patient and self._first_reply is None:
            self._wait_for_first_reply(transport)
        try:
            await self._writable.wait()
            return await call.done
        finally:
            call.done.cancel()  # the caller was cancelled; its replies still arrive


class FramedConnection(PipelinedConnection[bytes]):
    """A connection whose requests and replies are frames: a length of four bytes, big-endian, and a body."""

    BODY_BYTES_MIN: ClassVar[int] = 0
    BODY_BYTES_MAX: ClassVar[int]

    def _end_of(self, data: bytearray, at: int) -> int:
        if len(data) - at < LENGTH_BYTES:
            return 0
        size = int.from_bytes(data[at : at + LENGTH_BYTES], "big")
        if not self.BODY_BYTES_MIN <= size <= self.BODY_BYTES_MAX:
            raise PeerError(f"invalid response bytes={size} limit={self.BODY_BYTES_MAX}", fatal=True)
        return at + LENGTH_BYTES + size

    def _reply(self, data: bytearray, at: int, end: int) -> bytes:
        return bytes(memoryview(data)[at + LENGTH_BYTES : end])


class HasLoss(Protocol):
    """A connection that can be lost."""

    @property
    def loss(self) -> BrokerError | None:
        """Why every call fails without sending anything; None while the connection can be used."""


class Scope(ABC):
    """A client that is closed at the end of its ``async with`` block."""

    __slots__ = ()
    _connection: HasLoss

    @property
    def loss(self) -> BrokerError | None:
        """Why every call fails without sending anything; None while the connection can be used."""
        return self._connection.loss

    @abstractmethod
    async def close(self) -> None:
        """Fail pending calls, and close the connection."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def understood(read: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Decode a reply with ``read``. Raises Unavailable if the reply is invalid."""
    try:
        return read(*args, **kwargs)
    except PeerError as error:
        raise Unavailable(
            ErrorCode.UNREACHABLE, f"invalid response: {error.message} (check that the port belongs to this protocol)"
        ) from None


def _copy(error: BrokerError) -> BrokerError:
    """Return a copy of an error. If several callers raised the same object, it would collect all their tracebacks."""
    return type(error)(error.code, error.message)


async def open_connection(
    make: Callable[[asyncio.AbstractEventLoop], Opened],
    host: str,
    port: int,
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None,
) -> Opened:
    """Connect, and return the connection that ``make`` creates. Raises Unavailable(UNREACHABLE)."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(lambda: make(loop), host, port, **secured(tls, host))
    except (OSError, TimeoutError) as error:
        raise cannot_connect(error, host, port) from None
    return connection
