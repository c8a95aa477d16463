"""Cache of recently written segments, for consumers that read new records (decision 0104).

* It uses at most the configured number of bytes, or what writing needs if that is more.
* The oldest segments are evicted first.
* Memory is reused only when no reader uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Final

from polywire.clock import SYSTEM_CLOCK, Clock
from polywire.records.allocation import LARGE_PAGE_BYTES, Arena
from polywire.store.base import BLOCK_BYTES
from polywire.store.native_memory import copy_into, touch
from polywire.types import Buffer

STRETCH_BLOCKS: Final = 4  # blocks per write: 8 MiB keep a disk busy until the next write can begin
# blocks needed for writing: one stretch is being filled while another is being written, or was just written
WRITTEN_BLOCKS_MIN: Final = 3 * STRETCH_BLOCKS
LITTLE_SHARE: Final = 16  # a small cache is divided into this many blocks, so that one blob does not use all of them
GROWING_SHARE: Final = (
    # share of the time since the first blob that may be spent allocating: on a virtual machine, 2 MiB of new pages may
    # take 4 ms
    0.125
)


class CachedBlob:
    """One file's bytes in memory. Thread-safe.

    Args:
        blocks: memory with the bytes. The blocks have the same size and are filled one after the other.
    """

    __slots__ = ("_block_bytes", "_blocks", "_size")

    def __init__(self, blocks: Sequence[memoryview], size: int) -> None:
        self._blocks = blocks
        self._block_bytes: Final = len(blocks[0]) if blocks else 0
        self._size: Final = size

    @property
    def is_valid(self) -> bool:
        return bool(self._blocks)

    def read(self, out: Buffer, position: int) -> bool:
        """Fill ``out`` with bytes from ``position``. Return False if the file is too short or was evicted."""
        blocks = self._blocks  # this reference keeps the blocks from being reused
        rest = memoryview(out).cast("B")
        if not blocks or position + len(rest) > self._size:
            return False
        while rest:
            number, at = divmod(position, self._block_bytes)
            piece = blocks[number][at : at + len(rest)]
            copy_into(rest, piece)
            position += len(piece)
            rest = rest[len(piece) :]
        return True

    def evict(self) -> None:
        """Evict the file. Its memory is reused once its readers have finished."""
        self._blocks = ()


class BlobCache:
    """Memory cache of recently written files. The oldest are evicted first. Thread-safe.

    New memory is slow to allocate. Beyond the memory needed for writing, the cache spends at most an eighth of its
    running time on allocating. So while the cache grows, it evicts older files although the limit would allow more.

    Attributes:
        block_bytes: size of a memory block.
        stretch_bytes: size of the pieces in which files are written to disk.

    Args:
        bytes_max: limit of the cache. With 0 nothing is cached, but writers still get memory.
    """

    __slots__ = (
        "_arena",
        "_begun_at",
        "_blobs",
        "_bytes_max",
        "_clock",
        "_growing_s",
        "_lock",
        "block_bytes",
        "stretch_bytes",
    )

    def __init__(self, bytes_max: int, clock: Clock = SYSTEM_CLOCK) -> None:
        little = -(-bytes_max // LITTLE_SHARE // BLOCK_BYTES) * BLOCK_BYTES
        self.block_bytes: Final = min(little or LARGE_PAGE_BYTES, LARGE_PAGE_BYTES)
        self.stretch_bytes: Final = STRETCH_BLOCKS * self.block_bytes
        self._bytes_max: Final = bytes_max
        blocks_max = max(bytes_max // self.block_bytes, WRITTEN_BLOCKS_MIN)
        self._arena: Final = Arena(block_bytes=self.block_bytes, blocks_max=blocks_max)
        self._blobs: Final[OrderedDict[str, CachedBlob]] = OrderedDict()
        self._lock: Final = Lock()
        self._clock = clock
        self._begun_at: float | None = None
        self._growing_s = 0.0

    def take(self) -> memoryview | None:
        """Return a memory block to fill, evicting the oldest files if necessary. Return None if there is no memory."""
        if self._begun_at is None:
            self._begun_at = self._clock.monotonic()
        while (block := self._arena.take_free(self.block_bytes, may_grow=False)) is None:
            grown = self._grow() if self._has_time_to_grow() else None
            if grown is not None or not self._evict():
                return grown or self._grow()
        return block

    def _has_time_to_grow(self) -> bool:
        assert self._begun_at is not None, "take() sets it first"
        is_needed = self._arena.block_count < WRITTEN_BLOCKS_MIN
        return is_needed or self._growing_s <= GROWING_SHARE * (self._clock.monotonic() - self._begun_at)

    def _grow(self) -> memoryview | None:
        """Allocate a memory block. Return None if the limit does not permit it or the system has no memory."""
        begun_at = self._clock.monotonic()
        try:
            block = self._arena.take_free(self.block_bytes)
        except (OSError, MemoryError):  # out of memory: the existing blocks suffice
            return None
        if block is not None:
            touch(block)
            self._growing_s += self._clock.monotonic() - begun_at
        return block

    def may_grow(self, size: int) -> bool:
        """Return whether a file of ``size`` bytes can grow by ``stretch_bytes`` and still be cached."""
        return size + self.stretch_bytes <= self._bytes_max

    def add(self, name: str, blocks: Sequence[memoryview], size: int) -> None:
        with self._lock:
            self._blobs[name] = CachedBlob(blocks, size)

    def find(self, name: str) -> CachedBlob | None:
        """Return the cached bytes of a file, or None."""
        return self._blobs.get(name)

    def drop(self, name: str) -> None:
        with self._lock:
            blob = self._blobs.pop(name, None)
        if blob is not None:
            blob.evict()

    def _evict(self) -> bool:
        with self._lock:
            if not self._blobs:
                return False
            _, oldest = self._blobs.popitem(last=False)
        oldest.evict()
        return True
