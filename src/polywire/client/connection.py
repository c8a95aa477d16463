"""What the connections of all clients share: how they end, and, on wires that answer in order, the calls under way.

Promises: a connection that was lost stays lost, and every call under way fails with an error of its own; where replies come in order each
is told to the call it belongs to. Must not know: any wire's bytes.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, ParamSpec, Self, TypeVar

from polywire.client.unreachable import hung_up, makes_no_sense, silent
from polywire.errors import BrokerError, ErrorCode, Invalid, PeerError, Unavailable
from polywire.types import spell_address

LENGTH_BYTES: Final = 4  # in front of a frame
TLS_ALERT: Final = b"\x15\x03"
FIRST_REPLY_S: Final = 10.0  # after a connection's first request; as long as opening it may take

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Reply = TypeVar("_Reply")


class Connection(asyncio.Protocol, ABC):
    """One connection to a broker. Guards: once it is lost nothing is sent and nobody waits."""

    HANGING_UP: ClassVar[str] = ""
    """What a broker of this wire means by hanging up, if that is an answer."""
    MAY_WANT: ClassVar[str] = ""
    """What else a broker of this wire may mean that hangs up before its first answer, as a question."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop: Final = loop
        self._transport: asyncio.Transport | None = None
        self._address = ""
        self._lost: BrokerError | None = None
        self._is_answered = False
        self._writable = asyncio.Event()
        self._writable.set()

    @abstractmethod
    def _take_waiting(self) -> Iterable[asyncio.Future[Any]]:
        """Forget the calls under way; returns what they wait for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to write; asyncio calls it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        host, port, *_ = transport.get_extra_info("peername") or ("unknown", 0)
        self._address = spell_address(host, port)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all calls under way; asyncio calls it."""
        if self._is_answered or self.HANGING_UP:
            cause = exc or self.HANGING_UP or "closed"
            advice = "" if self._is_answered else " (check that the port belongs to this protocol)"
            reason = f"connection lost{advice} reason={cause} address={self._address}"
            self.fail(Unavailable(ErrorCode.UNREACHABLE, reason))
        else:
            self.fail(hung_up(self._address, self.MAY_WANT))

    def pause_writing(self) -> None:
        """Hold further requests back; asyncio calls it when the peer takes nothing."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let requests through again; asyncio calls it."""
        self._writable.set()

    def fail(self, error: BrokerError) -> None:
        """End the connection; whatever is under way, or is asked later, fails with a copy of ``error``."""
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
        """Raises Invalid for what a port with TLS answers to what is none, which no wire's first reply begins with."""
        if received.startswith(TLS_ALERT):
            raise Invalid(ErrorCode.INVALID_REQUEST, "the port uses TLS (add +tls to the scheme)")

    def _opened(self) -> asyncio.Transport:
        """Where to write. Raises Unavailable when the connection is lost."""
        if self._lost is not None:
            raise _copy(self._lost)
        assert self._transport is not None, "asked before the connection was made"
        return self._transport


class _Call(Generic[_Reply]):
    """So many replies, owed to one caller."""

    __slots__ = ("count", "done", "replies")

    def __init__(self, done: asyncio.Future[list[_Reply]], count: int) -> None:
        self.done: Final = done
        self.count: Final = count
        self.replies: list[_Reply] = []


class PipelinedConnection(Connection, Generic[_Reply]):
    """A connection whose replies carry nothing to tell them apart. Guards: they are told to calls in the order in which these were made.

    A wire says where a reply ends and what it is. If the first does not come in time the connection is given up, unless it ``_is_patient``.
    ``_unsent`` is what the peer had not taken yet when that was last looked at.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._received = bytearray()
        self._unsent = 0
        self._first_reply: asyncio.TimerHandle | None = None
        self._is_patient = False
        self._calls: deque[_Call[_Reply]] = deque()

    @abstractmethod
    def _end_of(self, data: bytearray, at: int) -> int:
        """Where the reply that begins at ``at`` ends, maybe after all that has come; 0 while this cannot be told. Raises PeerError."""

    @abstractmethod
    def _reply(self, data: bytearray, at: int, end: int) -> _Reply:
        """The reply that lies there. Raises PeerError."""

    def _take_waiting(self) -> Iterable[asyncio.Future[Any]]:
        self.expect_late_replies()
        calls, self._calls = self._calls, deque()
        return [call.done for call in calls]

    def data_received(self, data: bytes) -> None:
        """Give complete replies to the calls they belong to; asyncio calls it."""
        self._received += data
        at = 0
        try:
            if not self._is_answered:
                self._look_for_tls(self._received)
            while at < len(self._received):
                if not self._calls:
                    raise PeerError("response without a request", fatal=True)
                end = self._end_of(self._received, at)
                if end == 0 or end > len(self._received):
                    break
                self._tell(self._reply(self._received, at, end))
                self._is_answered = True
                if not self._is_patient:
                    self.expect_late_replies()
                at = end
        except PeerError as error:
            self.fail(makes_no_sense(error, self._address, is_answered=self._is_answered))
            return
        except BrokerError as error:
            self.fail(error)
            return
        del self._received[:at]

    def expect_late_replies(self) -> None:
        """Wait for the first reply, too, as long as it takes: for a request that is answered when there is something to tell."""
        if self._first_reply is not None:
            self._first_reply.cancel()
            self._first_reply = None
        self._is_patient = True

    def _wait_for_first_reply(self, transport: asyncio.Transport) -> None:
        """Give up when the time is over; a peer that still takes what it is sent has some more."""
        unsent = transport.get_write_buffer_size()
        if self._first_reply is not None and not 0 < unsent < self._unsent:
            self.fail(silent(self._address))
            return
        self._unsent = unsent
        self._first_reply = self._loop.call_later(FIRST_REPLY_S, self._wait_for_first_reply, transport)

    def _tell(self, reply: _Reply) -> None:
        call = self._calls[0]
        call.replies.append(reply)
        if len(call.replies) == call.count:
            self._calls.popleft()
            if not call.done.done():
                call.done.set_result(call.replies)

    async def exchange(self, requests: bytes, count: int) -> list[_Reply]:
        """Send requests at once, and return their ``count`` replies, one at least. Raises Unavailable."""
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
            call.done.cancel()  # of a caller that gave up; what was sent is still answered


class FramedConnection(PipelinedConnection[bytes]):
    """Frames out and in: a length of four bytes, big endian, and a body of so many, which is the reply."""

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


class Scope(ABC):
    """A client that closes when its ``async with`` ends."""

    __slots__ = ()

    @abstractmethod
    async def close(self) -> None:
        """Fail what is under way, and end the connection."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def understood(read: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Read something out of a reply; a broker that makes no sense is one that cannot be used. Raises Unavailable."""
    try:
        return read(*args, **kwargs)
    except PeerError as error:
        raise Unavailable(
            ErrorCode.UNREACHABLE, f"invalid response: {error.message} (check that the port belongs to this protocol)"
        ) from None


def _copy(error: BrokerError) -> BrokerError:
    """The same error as an object of its own: one that is raised in several places gathers the traces of all."""
    return type(error)(error.code, error.message)
