"""Receive buffers that are reused once no view of them is left.

Writing to fresh memory for the first time can cost more than copying into it: up to 2.7 CPU seconds per GB if the
system adds pages one by one. A fetch therefore receives into page-aligned blocks that are reused. A block is free again
when its last view is gone, including views that Arrow holds.

* A block is never reused while anything refers to it.
* At most ``blocks_max`` blocks are retained.
"""

from __future__ import annotations

import mmap
import sys
import threading
from typing import Final

from polywire.records.allocation import allocate_lasting

BLOCK_BYTES: Final = (4 << 20) + (64 << 10)  # one FETCH response of answer_bytes_max, plus the batch that crosses it
BLOCKS_MAX: Final = 16  # 65 MiB: one frame being received, one being decoded, and frames that a consumer still uses


class Arena:
    """Pool of memory blocks. Invariant: a block in use is never handed out again, from any thread."""

    __slots__ = ("_block_bytes", "_blocks", "_blocks_max", "_lock", "_references_free")

    def __init__(self, *, block_bytes: int = BLOCK_BYTES, blocks_max: int = BLOCKS_MAX) -> None:
        self._block_bytes: Final = block_bytes
        self._blocks_max: Final = blocks_max
        probe = [mmap.mmap(-1, mmap.PAGESIZE)]
        # The reference count of an unused block depends on the interpreter: measure it the way take() reads it.
        self._references_free: Final = min([sys.getrefcount(block) for block in probe])
        self._blocks: list[mmap.mmap] = []
        self._lock: Final = threading.Lock()

    @property
    def block_count(self) -> int:
        """Number of blocks retained for reuse."""
        return len(self._blocks)

    def take(self, size: int) -> memoryview:
        """Return a writable, page-aligned view of ``size`` bytes. The block is in use until its last view is gone."""
        free = self.take_free(size) if size <= self._block_bytes else None
        return memoryview(allocate_lasting(max(size, self._block_bytes)))[:size] if free is None else free

    def take_free(self, size: int, *, may_grow: bool = True) -> memoryview | None:
        """Return a view like ``take``, but only of a block in the pool; None if all are in use and none may be added.

        Args:
            size: bytes needed, at most ``block_bytes``.
            may_grow: whether the pool may allocate another block.

        Raises:
            OSError: out of memory.
        """
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
