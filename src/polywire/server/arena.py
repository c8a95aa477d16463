"""Receive buffers, reused. Compiled.

Promises: sizes are powers of two; a buffer that was given back is handed out again only once nothing views it any more, and goes back to the
allocator when nobody takes it for a while; taking and giving call nobody, so that both may be done while the loop asks for a buffer.
Must not know: connections, wires, when a write batch is committed.
"""

from __future__ import annotations

import mmap
from typing import Final

import cython

from polywire.records.allocation import allocate

BUFFER_BYTES_MIN: Final = 2 * 1024  # an unfinished request that has just begun
MAPPED_BYTES_MIN: Final = (
    16 * 1024
)  # from here on the system has memory back as soon as it is free; the allocator's heap may keep it
KEPT_BYTES_MAX: Final = 16 * 1024 * 1024  # free buffers kept; the rest goes back to the allocator

Memory = bytearray | mmap.mmap


def rounded(size: int) -> int:
    """The smallest buffer size that holds ``size`` bytes."""
    return max(BUFFER_BYTES_MIN, 1 << (size - 1).bit_length())


@cython.cclass
class Arena:
    """Buffers of one server.

    Invariant: ``out_bytes`` is the size of all buffers taken and not given back, ``kept_bytes`` of those that were given back: ``_free``,
    since the last sweep; ``_rested``, before it; and ``viewed``, since ``settle`` was last called: a write batch that is not committed yet
    may view them.
    """

    __slots__ = ("_free", "_rested", "bytes_max", "kept_bytes", "out_bytes", "viewed")

    def __init__(self, bytes_max: int) -> None:
        self._free: dict[int, list[Memory]] = {}
        self._rested: dict[int, list[Memory]] = {}
        self.viewed: list[Memory] = []
        self.bytes_max: Final = bytes_max
        self.kept_bytes = 0
        self.out_bytes = 0

    def fits(self, size: int) -> bool:
        """Whether so much more may be taken."""
        return self.out_bytes + size <= self.bytes_max

    def take(self, size: int) -> Memory:
        """A buffer of at least this size, its bytes undefined."""
        wanted = rounded(size)
        self.out_bytes += wanted
        free = self._free.get(wanted) or self._rested.get(wanted)
        if not free:
            return allocate(wanted, mapped_bytes_min=MAPPED_BYTES_MIN)
        self.kept_bytes -= wanted
        return free.pop()

    def give(self, buffer: Memory) -> None:
        """The buffer is not used any more; views of it may live until the next commit."""
        size = len(buffer)
        self.out_bytes -= size
        if self.kept_bytes + size <= KEPT_BYTES_MAX:
            self.kept_bytes += size
            self.viewed.append(buffer)

    def settle(self) -> None:
        """Nothing views what was given back so far."""
        for buffer in self.viewed:
            self._free.setdefault(len(buffer), []).append(buffer)
        self.viewed.clear()

    def sweep(self) -> None:
        """A second has passed: what rested before it and was not taken is not needed."""
        self.kept_bytes -= sum(size * len(buffers) for size, buffers in self._rested.items())
        self._rested, self._free = self._free, {}
