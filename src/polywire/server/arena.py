"""Receive buffers, reused.

Promises: sizes are powers of two; a buffer is handed out again only after the turn it may be viewed by was committed; what is out at one
time has a limit. Must not know: connections, wires.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final

from polywire.records.room import room

BUFFER_BYTES_MIN: Final = 16 * 1024
KEPT_BYTES_MAX: Final = 16 * 1024 * 1024  # free buffers kept; the rest goes back to the allocator

Memory = bytearray | mmap.mmap


def rounded(size: int) -> int:
    """The smallest buffer size that holds ``size`` bytes."""
    return max(BUFFER_BYTES_MIN, 1 << (size - 1).bit_length())


class Arena:
    """Buffers of one server.

    Invariant: ``out_bytes`` is the size of all buffers taken and not given back.
    """

    __slots__ = ("_commit", "_free", "_kept_bytes", "bytes_max", "out_bytes")

    def __init__(self, commit: Callable[[], None], bytes_max: int) -> None:
        self._commit = commit
        self._free: dict[int, list[Memory]] = {}
        self._kept_bytes = 0
        self.bytes_max: Final = bytes_max
        self.out_bytes = 0

    def fits(self, size: int) -> bool:
        """Whether a buffer of this size may still be taken."""
        return self.out_bytes + rounded(size) <= self.bytes_max

    def take(self, size: int) -> Memory:
        """A buffer of at least this size, its bytes undefined."""
        wanted = rounded(size)
        self.out_bytes += wanted
        free = self._free.get(wanted)
        if not free:
            return room(wanted)
        self._commit()
        self._kept_bytes -= wanted
        return free.pop()

    def give(self, buffer: Memory) -> None:
        """The buffer is not used any more; views of it may live until the next commit."""
        size = len(buffer)
        self.out_bytes -= size
        if self._kept_bytes + size <= KEPT_BYTES_MAX:
            self._kept_bytes += size
            self._free.setdefault(size, []).append(buffer)
