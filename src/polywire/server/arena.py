"""A pool of receive buffers, whose sizes are powers of two. This module is compiled.

* A freed buffer is reused only when no write batch refers to it any more.
* Buffers that are not reused for a while are returned to the allocator.
* ``take`` and ``give`` run no other Python code, so the ``get_buffer`` callback of the event loop may call them.
"""

from __future__ import annotations

import mmap
from typing import Final

import cython

from polywire.records.allocation import allocate

BUFFER_BYTES_MIN: Final = 2 * 1024  # large enough for the beginning of a request
# Larger buffers are allocated with mmap, because the allocator's heap may not return freed memory to the system.
MAPPED_BYTES_MIN: Final = 16 * 1024
KEPT_BYTES_MAX: Final = 16 * 1024 * 1024  # limit for the size of free buffers in the pool

Memory = bytearray | mmap.mmap


def rounded(size: int) -> int:
    return max(BUFFER_BYTES_MIN, 1 << (size - 1).bit_length())


@cython.cclass
class Arena:
    """The buffers of one server.

    * ``out_bytes``: size of all buffers in use.
    * ``kept_bytes``: size of all buffers in the pool.
    * ``_free``: buffers freed since the last sweep.
    * ``_rested``: buffers freed before the last sweep.
    * ``viewed``: buffers freed since the last ``settle``; the uncommitted write batch may still refer to them.
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
        """Return whether a buffer of this size is within the limit."""
        return self.out_bytes + size <= self.bytes_max

    def take(self, size: int) -> Memory:
        """Return a buffer of at least this size, with arbitrary content."""
        buffer_size = rounded(size)
        self.out_bytes += buffer_size
        free = self._free.get(buffer_size) or self._rested.get(buffer_size)
        if not free:
            return allocate(buffer_size, mapped_bytes_min=MAPPED_BYTES_MIN)
        self.kept_bytes -= buffer_size
        return free.pop()

    def give(self, buffer: Memory) -> None:
        """Free a buffer. The current write batch may still refer to it."""
        size = len(buffer)
        self.out_bytes -= size
        if self.kept_bytes + size <= KEPT_BYTES_MAX:
            self.kept_bytes += size
            self.viewed.append(buffer)

    def settle(self) -> None:
        """Allow reuse of all freed buffers. Call it when the write batch is committed."""
        for buffer in self.viewed:
            self._free.setdefault(len(buffer), []).append(buffer)
        self.viewed.clear()

    def sweep(self) -> None:
        """Return buffers to the allocator that were not reused for a second. Call it once a second."""
        self.kept_bytes -= sum(size * len(buffers) for size, buffers in self._rested.items())
        self._rested, self._free = self._free, {}
