"""What one connection has received of a request that is not whole yet, or reads into because much comes.

Promises: what was received and not consumed stays, in order, whatever the buffer grows to; what a write batch may view, and what somebody
has pinned, is not overwritten; finding memory for the next read calls nobody, so that it may be done while the loop asks for it.
Must not know: connections, sessions, who else wants memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from polywire.server.arena import Memory, rounded
from polywire.server.memory import ReceiveMemory
from polywire.server.shared_chunk import READ_BYTES
from polywire.server.unread import unread_bytes

FREE_BYTES_MIN: Final = 4 * 1024  # of a buffer; less is not worth a read where other memory can be had
GROWTH: Final = 4  # times what has come: for a flow that fills its reads, and at most for a request that needs more
STALLED_TICKS: Final = 2  # more than one second, at most two, after which a request that hardly arrives may have to go
SHORT_BYTES_PER_S_MIN: Final = 16 * 1024  # less is "hardly" while memory is short
BYTES_PER_S_MIN: Final = 64  # less is "not at all", memory or not


class ReceiveBuffer:
    """One piece of memory; who needs another size, or must leave this one as it is, goes on with the one that ``replaced`` gives.

    Invariant: ``view[start:end]`` is what was not consumed; the write batch ``viewed_by`` may view what lies before. flow_bytes: how large
    a buffer the flow deserves by itself, 0 while nothing is known of it.
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
        """A buffer of at least this size that begins with what is left."""
        buffer = cls(memory, memory.arena.take(size), flow_bytes=flow_bytes)
        buffer.end = len(left)
        buffer.view[: buffer.end] = left
        return buffer

    @classmethod
    def of_landed(cls, memory: ReceiveMemory, left: memoryview, *, read: int, flow_bytes_max: int) -> Self | None:
        """A buffer for what is left of a read into memory that all share, or for a flow that fills its reads; None where there is neither."""
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
        """The chunk in which everybody's bytes land, for whoever must keep what landed last as it is."""
        chunk = memory.shared_chunk
        start, end = chunk.lent_at, chunk.lent_at + len(chunk.lent)
        buffer = cls(memory, chunk.hand_over())
        buffer.start, buffer.end = start, end
        return buffer

    @property
    def left(self) -> int:
        """Bytes that were not consumed."""
        return self.end - self.start

    @property
    def size(self) -> int:
        """Bytes it takes."""
        return len(self.view)

    @property
    def is_pinned(self) -> bool:
        """Whether somebody looks at what was received."""
        return self._pins > 0

    # Reading

    def with_free(self) -> ReceiveBuffer:
        """This buffer or what replaces it, with free memory behind what is left; no more of it than there is."""
        left, size = self.end - self.start, len(self.view)
        if not left and self.viewed_by < self._memory.write_batch and not self._pins:
            self.start = self.end = 0
        if size - self.end < (1 if left else FREE_BYTES_MIN):
            return self.replaced(max(size, left + 1))
        return self

    def filled(self, count: int, *, flow_bytes_max: int) -> None:
        """So much was read into what was free."""
        self.end = end = self.end + count
        if end == len(self.view) and end < flow_bytes_max:
            self.flow_bytes = GROWTH * end

    def consumed(self, count: int) -> None:
        """So much of what was left is not wanted any more; the write batch may view it."""
        self.start += count
        self.viewed_by = self._memory.write_batch

    def replaced(self, size: int) -> ReceiveBuffer:
        """A buffer of at least this size with what is left at its front; this one if it serves."""
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
        """What the next request is read into: None when the flow deserves no buffer of its own, or memory is short."""
        memory, size = self._memory, len(self.view)
        wanted = min(self.flow_bytes, flow_bytes_max)
        if wanted <= READ_BYTES or memory.is_short:
            return self.given_back()
        if wanted > size and memory.arena.fits(wanted - size):
            return self.replaced(wanted)
        return self

    def wanted_size(self, *, needed: int, request_bytes_max: int, flow_bytes_max: int) -> int:
        """Size that the request which has begun deserves: what the flow so far does, and what it says it needs, but of that no more than a
        few times what has come."""
        left, size = self.end - self.start, len(self.view)
        wanted = 2 * size if left == size else needed
        most = min(max(request_bytes_max, flow_bytes_max), GROWTH * left)
        return rounded(max(min(self.flow_bytes, flow_bytes_max), min(wanted, most), left + 1))

    # Keeping

    def pin(self) -> Callable[[], None]:
        """Keep what was received as it is, whatever becomes of the connection, until what is returned is called."""
        self._pins += 1
        return self._unpin

    def _unpin(self) -> None:
        self._pins -= 1
        if self._is_given and not self._pins:
            self._memory.arena.give(self._bytes)
            self._memory.given_back()

    def _give(self) -> None:
        self._is_given = True
        if not self._pins:
            self._memory.arena.give(self._bytes)

    def give_back(self) -> None:
        """Nothing that was received is wanted any more."""
        self._give()
        self._memory.given_back()

    def given_back(self) -> ReceiveBuffer | None:
        """None, once it is given back; this buffer while it holds something."""
        if self.start != self.end or self._pins:
            return self
        self.give_back()
        return None

    # How quickly it arrives

    def begin(self) -> None:
        """What is left is the beginning of a request, or goes on from here."""
        self._began_tick = self._memory.tick
        self._began_bytes = self.end - self.start

    def rate(self, unread: int = 0) -> float:
        """Bytes a second since it began, with what has arrived and lies unread."""
        return (self.left + unread - self._began_bytes) / max(self._memory.tick - self._began_tick, 1)

    def is_slow(self, ticks: int, bytes_per_s: int) -> bool:
        """Whether for so long less than so much has come."""
        return self._memory.tick - self._began_tick >= ticks and self.rate() < bytes_per_s

    def goes_on(self, transport: object) -> bool:
        """Whether it arrives well enough while memory is short, if what lies unread is counted."""
        unread = unread_bytes(transport)
        return unread > 0 and self.rate(unread) >= SHORT_BYTES_PER_S_MIN
