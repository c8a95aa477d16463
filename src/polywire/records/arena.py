"""Receive buffers that are used again once nobody views them.

Fresh memory costs more than the copy into it (up to 2.7 CPU seconds per GB where pages are faulted in one by one), so a fetch
receives into blocks that begin on a page and return by themselves: a block is free when no view of it is left, Arrow's included.

Promises: a block is never reused while anything refers to it; at most ``blocks_max`` blocks are kept. Must not know: sockets, frames.
"""

from __future__ import annotations

import mmap
import sys
import threading
from typing import Final

from polywire.records.allocation import allocate_lasting

BLOCK_BYTES: Final = (4 << 20) + (
    64 << 10
)  # one FETCH frame of answer_bytes_max, and space for the batch that crosses it
BLOCKS_MAX: Final = 16  # 65 MiB: a frame being received, one being read, and those a consumer holds on to


class Arena:
    """Blocks of anonymous memory, reused. Guards: a block handed out is not handed out again while it is referred to, whichever
    threads ask."""

    __slots__ = ("_block_bytes", "_blocks", "_blocks_max", "_lock", "_references_free")

    def __init__(self, *, block_bytes: int = BLOCK_BYTES, blocks_max: int = BLOCKS_MAX) -> None:
        self._block_bytes: Final = block_bytes
        self._blocks_max: Final = blocks_max
        probe = [mmap.mmap(-1, mmap.PAGESIZE)]
        # What an unused block counts depends on the interpreter, so it is measured the way take() looks.
        self._references_free: Final = min([sys.getrefcount(block) for block in probe])
        self._blocks: list[mmap.mmap] = []
        self._lock: Final = threading.Lock()

    @property
    def block_count(self) -> int:
        """Blocks kept for reuse."""
        return len(self._blocks)

    def take(self, size: int) -> memoryview:
        """A writable view of ``size`` bytes at a page boundary; the block is taken until the last view of it is gone."""
        free = self.take_free(size) if size <= self._block_bytes else None
        return memoryview(allocate_lasting(max(size, self._block_bytes)))[:size] if free is None else free

    def take_free(self, size: int, *, may_grow: bool = True) -> memoryview | None:
        """Like ``take``, of a block that is kept for reuse, or is made and will be; None while all are taken that there may be. may_grow:
        whether one may be made. Raises OSError without memory."""
        with self._lock:
            block = self._find(may_grow=may_grow)
            return None if block is None else memoryview(block)[:size]

    def _find(self, *, may_grow: bool) -> mmap.mmap | None:
        for index, count in enumerate([sys.getrefcount(block) for block in self._blocks]):
            if count == self._references_free:
                return self._blocks[index]
        if not may_grow or len(self._blocks) == self._blocks_max:
            return None
        block = allocate_lasting(self._block_bytes)
        self._blocks.append(block)
        return block
