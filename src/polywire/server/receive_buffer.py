"""The receive buffer of one connection: an incomplete request, or memory for a stream of large reads.

* Unconsumed bytes stay in order when the buffer grows.
* Bytes are not overwritten while an uncommitted batch may refer to them, or while they are pinned.
* Finding memory for the next read calls no other code, so it is allowed while the event loop asks for a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from polywire.server.memory import READ_BYTES, Memory, ReceiveMemory, rounded
from polywire.server.socket_state import unread_bytes

FREE_BYTES_MIN: Final = 4 * 1024  # with less free memory, a new buffer is better than a short read
# factor: a buffer grows to at most this many times the bytes received, even if a request claims to be longer
GROWTH: Final = 4
STALLED_TICKS: Final = 2  # ticks (one to two seconds) after which a slow request can be closed when memory is short
SHORT_BYTES_PER_S_MIN: Final = 16 * 1024  # while memory is short, a slower request counts as stalled
BYTES_PER_S_MIN: Final = 64  # a slower request always counts as stalled


class ReceiveBuffer:
    """A block of memory with received bytes.

    A buffer cannot grow: ``replaced`` returns another one, which the connection uses from then on.

    Attributes:
        view: the memory.
        start: start of the unconsumed bytes in ``view``.
        end: end of the unconsumed bytes.
        viewed_by: ``ReceiveMemory.write_batch`` when bytes before ``start`` were consumed. Its batches may refer to
            them.
        flow_bytes: buffer size that suits the client's stream of large reads; 0 if unknown.
    """

    __slots__ = (
        "_began_bytes",
        "_began_tick",
        "_bytes",
        "_is_given",
        "_memory",
        "_pins",
        "end",
        "flow_bytes",
        "start",
        "view",
        "viewed_by",
    )

    def __init__(self, memory: ReceiveMemory, content: Memory, *, flow_bytes: int = 0) -> None:
        self._memory: Final = memory
        self._bytes: Final = content
        self._pins = 0
        self._is_given = False
        self._began_tick = 0
        self._began_bytes = 0
        self.view: Final = memoryview(content)
        self.start = 0
        self.end = 0
        self.viewed_by = -1
        self.flow_bytes = flow_bytes

    @classmethod
    def holding(cls, memory: ReceiveMemory, left: memoryview, size: int, *, flow_bytes: int = 0) -> Self:
        """Return a buffer of at least ``size`` bytes that begins with ``left``."""
        buffer = cls(memory, memory.arena.take(size), flow_bytes=flow_bytes)
        buffer.end = len(left)
        buffer.view[: buffer.end] = left
        return buffer

    @classmethod
    def of_landed(cls, memory: ReceiveMemory, left: memoryview, *, read: int, flow_bytes_max: int) -> Self | None:
        """Return a buffer for the bytes ``left`` after a read of ``read`` bytes into the shared chunk.

        Returns None if no bytes are left and the read was small.
        """
        flow = GROWTH * read if READ_BYTES <= read < flow_bytes_max else 0
        if left:
            buffer = cls.holding(memory, left, len(left) + 1, flow_bytes=flow)
            buffer.begin()
            return buffer
        wanted = min(flow, flow_bytes_max)
        if not wanted or memory.is_short or not memory.arena.fits(wanted):
            return None
        return cls.holding(memory, left, wanted, flow_bytes=flow)

    @classmethod
    def of_chunk(cls, memory: ReceiveMemory) -> Self:
        """Return the shared chunk as a buffer, so that the bytes of the last read can stay in memory."""
        chunk = memory.shared_chunk
        start, end = chunk.lent_at, chunk.lent_at + len(chunk.lent)
        buffer = cls(memory, chunk.hand_over())
        buffer.start, buffer.end = start, end
        return buffer

    @property
    def left(self) -> int:
        return self.end - self.start

    @property
    def size(self) -> int:
        return len(self.view)

    @property
    def is_pinned(self) -> bool:
        """Whether other code, such as a thread, still reads the received bytes."""
        return self._pins > 0

    # Reading

    def with_free(self) -> ReceiveBuffer:
        """Return a buffer with free memory after the unconsumed bytes: this one, or a replacement of the same size."""
        left, size = self.end - self.start, len(self.view)
        if not left and self.viewed_by < self._memory.write_batch and not self._pins:
            self.start = self.end = 0
        if size - self.end < (1 if left else FREE_BYTES_MIN):
            return self.replaced(max(size, left + 1))
        return self

    def filled(self, count: int, *, flow_bytes_max: int) -> None:
        """Count ``count`` bytes that were read into the free memory. If they filled it, increase ``flow_bytes``.

        A buffer of ``flow_bytes_max`` or more bytes leaves ``flow_bytes`` unchanged.
        """
        self.end = end = self.end + count
        if end == len(self.view) and end < flow_bytes_max:
            self.flow_bytes = GROWTH * end

    def consumed(self, count: int) -> None:
        """Count ``count`` bytes that the session consumed. A batch may refer to them until the next commit."""
        self.start += count
        self.viewed_by = self._memory.write_batch

    def replaced(self, size: int) -> ReceiveBuffer:
        """Return a buffer of at least ``size`` bytes that begins with the unconsumed bytes.

        It is this buffer if possible.
        """
        left = self.view[self.start : self.end]
        if rounded(size) == len(self.view) and self.viewed_by < self._memory.write_batch and not self._pins:
            self.view[: len(left)] = left
            self.start, self.end = 0, len(left)
            return self
        self._give()
        other = ReceiveBuffer.holding(self._memory, left, size, flow_bytes=self.flow_bytes)
        other._began_tick, other._began_bytes = self._began_tick, self._began_bytes
        return other

    def for_flow(self, flow_bytes_max: int) -> ReceiveBuffer | None:
        """Return a buffer for the next large read; None if reads are small or memory is short."""
        memory, size = self._memory, len(self.view)
        wanted = min(self.flow_bytes, flow_bytes_max)
        if wanted <= READ_BYTES or memory.is_short:
            return self.freed()
        if wanted > size and memory.arena.fits(wanted - size):
            return self.replaced(wanted)
        return self

    def wanted_size(self, *, needed: int, request_bytes_max: int, flow_bytes_max: int) -> int:
        """Return the buffer size for the request that is arriving.

        It is the length in the request's header, but at most ``GROWTH`` times the bytes received.
        """
        left, size = self.end - self.start, len(self.view)
        wanted = 2 * size if left == size else needed
        most = min(max(request_bytes_max, flow_bytes_max), GROWTH * left)
        return rounded(max(min(self.flow_bytes, flow_bytes_max), min(wanted, most), left + 1))

    # Pinning and freeing

    def pin(self) -> Callable[[], None]:
        """Keep the received bytes in memory until the returned function is called, even if the connection closes."""
        self._pins += 1
        return self._unpin

    def _unpin(self) -> None:
        self._pins -= 1
        if self._is_given and not self._pins:
            self._memory.arena.give(self._bytes)
            self._memory.freed()

    def _give(self) -> None:
        self._is_given = True
        if not self._pins:
            self._memory.arena.give(self._bytes)

    def free(self) -> None:
        self._give()
        self._memory.freed()

    def freed(self) -> ReceiveBuffer | None:
        """Free the memory and return None. A buffer with unconsumed bytes, or bytes in use, is returned instead."""
        if self.start != self.end or self._pins:
            return self
        self.free()
        return None

    # Arrival rate

    def begin(self) -> None:
        """Restart the measurement of the arrival rate."""
        self._began_tick = self._memory.tick
        self._began_bytes = self.end - self.start

    def rate(self, unread: int = 0) -> float:
        """Return bytes per second since ``begin``. Bytes in the socket (``unread``) count as received."""
        return (self.left + unread - self._began_bytes) / max(self._memory.tick - self._began_tick, 1)

    def is_slow(self, ticks: int, bytes_per_s: int) -> bool:
        """Return whether at least ``ticks`` seconds have passed since ``begin``, at a rate below ``bytes_per_s``."""
        return self._memory.tick - self._began_tick >= ticks and self.rate() < bytes_per_s

    def is_fast_enough(self, transport: object) -> bool:
        """Return whether the request arrives fast enough to keep its connection open while memory is short.

        Unread bytes in the socket count as received.
        """
        unread = unread_bytes(transport)
        return unread > 0 and self.rate(unread) >= SHORT_BYTES_PER_S_MIN
