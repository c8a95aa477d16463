"""Allocate large buffers without zeroing them, and reuse buffers to which no view is left.

Mapped memory costs time when it is first written, not when it is allocated. A ``bytearray`` of 64 MiB, in contrast, is
filled with zeros at once. That takes 35 ms, during which no other Python thread runs.

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
from contextlib import suppress
from itertools import chain
from typing import Final

MAPPED_BYTES_MIN: Final = 1024 * 1024  # for smaller buffers a ``bytearray`` is faster

LARGE_PAGE_BYTES = 2 * 1024 * 1024  # huge page size of x86-64, and of ARM with 4 KiB pages

_PRIVATE: Final = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
BLOCK_BYTES: Final = (4 << 20) + (64 << 10)  # one FETCH response of answer_bytes_max, plus the batch that crosses it
BLOCKS_MAX: Final = 16  # 65 MiB: one frame being received, one being decoded, and frames that a consumer still uses


def allocate(size: int, *, mapped_bytes_min: int = MAPPED_BYTES_MIN) -> bytearray | mmap.mmap:
    """Return ``size`` zero bytes of writable memory, at least one.

    Buffers of at least ``mapped_bytes_min`` come from mmap.
    """
    if size < mapped_bytes_min:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=_PRIVATE) if _PRIVATE else mmap.mmap(-1, size)


def allocate_lasting(size: int) -> mmap.mmap:
    """Return page-aligned, zeroed memory for repeated reads, in huge pages where the system has them.

    A disk request covers physically contiguous memory. A direct read of 4 MiB into small pages makes four to six
    requests. Into huge pages it makes one, in a third of the time and with a fifth of the CPU time.
    """
    if size < LARGE_PAGE_BYTES or not _PRIVATE:
        return mmap.mmap(-1, size)
    mapped = (
        -(-size // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    )  # Linux aligns mappings of such sizes so that they can use huge pages
    block = mmap.mmap(-1, mapped, flags=_PRIVATE)
    with suppress(OSError, AttributeError):  # only a hint: some systems do not support it
        block.madvise(mmap.MADV_HUGEPAGE, 0, size - size % LARGE_PAGE_BYTES)
    return block


class Arena:
    """Pool of memory blocks, for any thread. A block is reused only if no view of it is left."""

    __slots__ = ("_block_bytes", "_blocks", "_blocks_max", "_lock", "_newest", "_references_free")

    def __init__(self, *, block_bytes: int = BLOCK_BYTES, blocks_max: int = BLOCKS_MAX) -> None:
        self._block_bytes: Final = block_bytes
        self._blocks_max: Final = blocks_max
        probe = [mmap.mmap(-1, mmap.PAGESIZE)]
        # The reference count of an unused block depends on the interpreter: measure it the way _find() reads it.
        self._references_free: Final = sys.getrefcount(probe[0])
        self._blocks: list[mmap.mmap] = []
        # index of the block that was taken last
        self._newest = 0
        self._lock: Final = threading.Lock()

    @property
    def block_count(self) -> int:
        """Number of blocks retained for reuse."""
        return len(self._blocks)

    def take(self, size: int) -> memoryview:
        """Return a writable, page-aligned view of ``size`` bytes. Its block is not reused while a view of it exists."""
        free = self.take_free(size) if size <= self._block_bytes else None
        return memoryview(allocate_lasting(max(size, self._block_bytes)))[:size] if free is None else free

    def take_free(self, size: int, *, may_grow: bool = True) -> memoryview | None:
        """Return a view like ``take``, or None if all blocks of the pool are in use and no block may be added.

        Args:
            size: bytes needed, at most ``block_bytes``.
            may_grow: whether the pool may allocate another block.

        Raises:
            OSError: out of memory.
        """
        with self._lock:
            block = self._find(may_grow=may_grow)
            return None if block is None else memoryview(block)[:size]

    def clear(self) -> None:
        """Drop all blocks. The memory of those in use is freed with the last view of it."""
        with self._lock:
            self._blocks.clear()
            self._newest = 0

    def _find(self, *, may_grow: bool) -> mmap.mmap | None:
        # Blocks are often released in the order they were taken, so one after the newest is likely to be free.
        for index in chain(range(self._newest, len(self._blocks)), range(self._newest)):
            if sys.getrefcount(self._blocks[index]) == self._references_free:
                self._newest = index
                return self._blocks[index]
        if not may_grow or len(self._blocks) == self._blocks_max:
            return None
        block = allocate_lasting(self._block_bytes)
        self._newest = len(self._blocks)
        self._blocks.append(block)
        return block
