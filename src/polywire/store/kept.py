"""What was written last, kept in memory for who reads it soon (decision 0016).

Promises: memory for as many bytes as were asked for, or to write from if that is more; the oldest blobs make way first; memory is used
again only when nobody reads from it any more. Must not know: files, what a blob holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Final

from polywire.clock import SYSTEM_CLOCK, Clock
from polywire.records.allocation import LARGE_PAGE_BYTES
from polywire.records.arena import Arena
from polywire.store.base import BLOCK_BYTES
from polywire.store.copying import copy_into, touch
from polywire.types import Buffer

STRETCH_BLOCKS: Final = 4  # written at once: 8 MiB keep a disk at work while the processor has none for the next write
WRITTEN_BLOCKS_MIN: Final = 3 * STRETCH_BLOCKS  # to write from: one is gathered while another is written, or just was
LITTLE_SHARE: Final = 16  # little memory is made of so many blocks: one blob leaves some of them to others
GROWING_SHARE: Final = (
    0.125  # of the time since the first blob, for pages that are new: on a virtual machine 2 MiB of them may take 4 ms
)


class KeptBytes:
    """One blob's bytes in memory, until they make way. Any thread may use it."""

    __slots__ = ("_block_bytes", "_blocks", "_size")

    def __init__(self, blocks: Sequence[memoryview], size: int) -> None:
        """blocks: all of the same size, filled one after the other."""
        self._blocks = blocks
        self._block_bytes: Final = len(blocks[0]) if blocks else 0
        self._size: Final = size

    @property
    def are_there(self) -> bool:
        """Whether they have not made way yet."""
        return bool(self._blocks)

    def read(self, out: Buffer, position: int) -> bool:
        """Fill the writable ``out`` from ``position``; False where the blob ends before, or its bytes have made way."""
        blocks = self._blocks  # who holds them keeps them from being used again
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

    def make_way(self) -> None:
        """The memory is wanted for something else, once those who read from it have done so."""
        self._blocks = ()


class KeptBlobs:
    """The blobs that are kept, oldest first. Any thread may use it. ``stretch_bytes`` are written at once.

    Guards: memory beyond what is needed to write from is made only while it has taken no more than its share of the time; until then older
    blobs make way although there might be more.
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
        """bytes_max: 0 keeps none, and has memory to write from all the same."""
        little = -(-bytes_max // LITTLE_SHARE // BLOCK_BYTES) * BLOCK_BYTES
        self.block_bytes: Final = min(little or LARGE_PAGE_BYTES, LARGE_PAGE_BYTES)
        self.stretch_bytes: Final = STRETCH_BLOCKS * self.block_bytes
        self._bytes_max: Final = bytes_max
        blocks_max = max(bytes_max // self.block_bytes, WRITTEN_BLOCKS_MIN)
        self._arena: Final = Arena(block_bytes=self.block_bytes, blocks_max=blocks_max)
        self._blobs: Final[OrderedDict[str, KeptBytes]] = OrderedDict()
        self._lock: Final = Lock()
        self._clock = clock
        self._begun_at: float | None = None
        self._growing_s = 0.0

    def take(self) -> memoryview | None:
        """A block to be filled, for which the oldest blobs make way; None where there is no memory for it."""
        if self._begun_at is None:
            self._begun_at = self._clock.monotonic()
        while (block := self._arena.take_free(self.block_bytes, may_grow=False)) is None:
            grown = self._grow() if self._has_time_to_grow() else None
            if grown is not None or not self._make_way():
                return grown or self._grow()
        return block

    def _has_time_to_grow(self) -> bool:
        assert self._begun_at is not None, "somebody takes memory"
        is_needed = self._arena.block_count < WRITTEN_BLOCKS_MIN
        return is_needed or self._growing_s <= GROWING_SHARE * (self._clock.monotonic() - self._begun_at)

    def _grow(self) -> memoryview | None:
        """A block of new memory, if there is any, and there may be more."""
        begun_at = self._clock.monotonic()
        try:
            block = self._arena.take_free(self.block_bytes)
        except (OSError, MemoryError):  # what others have of it will do
            return None
        if block is not None:
            touch(block)
            self._growing_s += self._clock.monotonic() - begun_at
        return block

    def may_grow(self, size: int) -> bool:
        """Whether a blob of this size may be kept, and a stretch more of it."""
        return size + self.stretch_bytes <= self._bytes_max

    def add(self, name: str, blocks: Sequence[memoryview], size: int) -> None:
        """A blob was written from these blocks."""
        with self._lock:
            self._blobs[name] = KeptBytes(blocks, size)

    def find(self, name: str) -> KeptBytes | None:
        """A blob's bytes, where it is kept."""
        return self._blobs.get(name)

    def drop(self, name: str) -> None:
        """A blob is deleted."""
        with self._lock:
            blob = self._blobs.pop(name, None)
        if blob is not None:
            blob.make_way()

    def _make_way(self) -> bool:
        """The oldest blob gives its memory back; False where there is none."""
        with self._lock:
            if not self._blobs:
                return False
            _, oldest = self._blobs.popitem(last=False)
        oldest.make_way()
        return True
