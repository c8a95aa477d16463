"""Format of a segment file: batches sorted by partition and offset, and a footer that locates them (decision 0102).

The footer exists twice; one copy with a valid checksum is enough. A *run* is the contiguous part with the batches of
one partition.

```
batches of run 0 | batches of run 1 | … | footer: runs, epochs, index entries | trailer | the same footer | the same trailer

run, 112 bytes                                   trailer, the blob's last 64 bytes
  0 u64 partition                                  0 u32 magic "PWS1" (0x31535750)
  8 16  token or zeros                             4 u32 version, 2
 24 u64 position        32 u64 bytes               8 u64 footer position: the end of the batches
 40 u64 first offset    48 u64 next offset        16 u64 footer bytes
 56 u64 first address   64 u64 next address       24 u32 runs
 72 i64 first time      80 i64 last append time   28 u32 epochs
 88 u32 first index entry                         32 u64 index entries
 92 u32 index entries                             40 u64 XXH64 of the footer
 96 u32 first epoch    100 u32 epochs             48 u64 zero
104 u64 records                                   56 u64 XXH64 of the trailer's first 56 bytes

epoch, 16 bytes: u32 epoch, u32 zero, u64 its first offset in the run
index entry, 32 bytes: u64 offset, u64 position in the blob, u64 address, i64 append time
```

Version 1 has footer and trailer once. Runs are sorted by (partition, token). A run with a token contains staged
batches, which have no offsets yet: offsets, addresses and epochs are zero.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from polywire.errors import Corrupt, Unavailable
from polywire.log.segments.search import find_run
from polywire.records.checksum import xxh64
from polywire.store.base import BLOCK_BYTES, Store, blob_corrupt, blob_newer

SEGMENT_MAGIC: Final = 0x31535750  # "PWS1" as a little-endian u32
SEGMENT_VERSION: Final = 2
_VERSION_OF_ONE_FOOTER: Final = 1
TOKEN_BYTES: Final = 16
NO_TOKEN: Final = b""
TRAILER_SEARCH_BYTES: Final = 1024 * 1024  # searched first for an intact trailer if the last one is damaged

RUN: Final = struct.Struct("<Q16s6Q2q4IQ")
EPOCH: Final = struct.Struct("<IIQ")
ENTRY: Final = struct.Struct("<3Qq")
TRAILER: Final = struct.Struct("<II2Q2I4Q")

_ZERO_TOKEN: Final = bytes(TOKEN_BYTES)


class SegmentRun(NamedTuple):
    """Location of one partition's batches in a segment.

    Batches stored under a token for a publish are listed separately. Positions are byte positions in the segment file.
    """

    partition: int
    token: bytes
    position: int
    size: int
    first_offset: int
    next_offset: int
    first_address: int
    next_address: int
    first_time_us: int
    last_time_us: int
    index_start: int
    index_count: int
    epoch_start: int
    epoch_count: int
    record_count: int

    @property
    def stop(self) -> int:
        return self.position + self.size


class SegmentInfo(msgspec.Struct, frozen=True):
    """A segment's footer without its index entries. The tables are stored bytes, decoded on access."""

    name: str
    size: int
    data_bytes: int
    runs: bytes | memoryview
    epochs: bytes | memoryview
    index_count: int

    @property
    def run_count(self) -> int:
        return len(self.runs) // RUN.size

    def run(self, number: int) -> SegmentRun:
        """Return an entry of the footer by its index. Raises IndexError."""
        if not 0 <= number < self.run_count:
            raise IndexError(number)
        fields = RUN.unpack_from(self.runs, number * RUN.size)
        token = NO_TOKEN if fields[1] == _ZERO_TOKEN else fields[1]
        return SegmentRun(fields[0], token, *fields[2:])

    def __iter__(self) -> Iterator[SegmentRun]:
        return map(self.run, range(self.run_count))

    def find(self, partition: int, token: bytes = NO_TOKEN) -> SegmentRun | None:
        for number in range(find_run(self.runs, partition), self.run_count):
            run = self.run(number)
            if run.partition != partition:
                return None
            if run.token == token:
                return run
        return None

    def epochs_of(self, run: SegmentRun) -> list[tuple[int, int]]:
        """Return (leader epoch, first offset of the epoch among these batches) in order."""
        table = self.epochs[run.epoch_start * EPOCH.size : (run.epoch_start + run.epoch_count) * EPOCH.size]
        return [(epoch, first_offset) for epoch, _, first_offset in EPOCH.iter_unpack(table)]


def read_info(store: Store, name: str, block: memoryview | None = None) -> SegmentInfo:
    """Read and verify a segment's trailer and footer. Raises BlobMissing or Corrupt.

    Args:
        block: memory from ``aligned_buffer`` for a direct read, to which the result then refers.
    """
    return read_footer(store, name, block)[0]


def read_footer(store: Store, name: str, block: memoryview | None = None) -> tuple[SegmentInfo, bytes | memoryview]:
    """Read a segment's footer and index entries from the first valid copy. Raises BlobMissing or Corrupt.

    If the local copy of an object in a bucket is damaged, it is discarded and the object is read again.

    Args:
        block: memory from ``aligned_buffer`` for a direct read. The result refers to this memory, so the caller must
            not change it. If it is None or too small, other memory is used.
    """
    try:
        return _read_footer(store, name, block)
    except Corrupt:
        if not store.drop_copy(name):
            raise
    return _read_footer(store, name, block)


def _read_footer(store: Store, name: str, block: memoryview | None) -> tuple[SegmentInfo, bytes | memoryview]:
    size = store.size(name)
    trailer = _find_trailer(store, name, size, block)
    _, version, position, count, run_count, epoch_count, index_count, checksum, _, _ = TRAILER.unpack(trailer)
    if not _VERSION_OF_ONE_FOOTER <= version <= SEGMENT_VERSION:
        raise blob_newer(name, version)
    epochs_at = run_count * RUN.size
    entries_at = epochs_at + epoch_count * EPOCH.size
    positions = [position] if version == _VERSION_OF_ONE_FOOTER else [position, position + count + TRAILER.size]
    if entries_at + index_count * ENTRY.size != count:
        raise blob_corrupt(name, "positions in the trailer are outside of the blob")
    for footer_position in positions:
        footer = _stored(store, name, footer_position, footer_position + count, block)
        if len(footer) != count or xxh64(footer) != checksum:
            continue
        info = SegmentInfo(
            name=name,
            size=size,
            data_bytes=position,
            runs=footer[:epochs_at],
            epochs=footer[epochs_at:entries_at],
            index_count=index_count,
        )
        return info, footer[entries_at:]
    raise blob_corrupt(name, "footer is damaged")


def _stored(store: Store, name: str, start: int, stop: int, block: memoryview | None) -> bytes | memoryview:
    """Read bytes of a segment file, directly into ``block`` if possible, otherwise through the page cache."""
    if block is not None and 0 <= start < stop and len(block) >= stop - start + 2 * BLOCK_BYTES:
        with suppress(Unavailable):
            return store.open(name).read_direct(block, start, stop)
    return store.get(name, start, stop)


def _find_trailer(store: Store, name: str, size: int, block: memoryview | None = None) -> bytes:
    """Return the trailer at the end of the file or, if it is damaged, the copy before it. Raises Corrupt."""
    if size < TRAILER.size:
        raise blob_corrupt(name, f"blob is too short size={size}")
    trailer = bytes(_stored(store, name, size - TRAILER.size, size, block))
    if _is_trailer(trailer):
        return trailer
    magic, reach = SEGMENT_MAGIC.to_bytes(4, "little"), TRAILER_SEARCH_BYTES
    while True:
        begun = max(size - reach, 0)
        tail = store.get(name, begun, size)
        at = tail.rfind(magic)
        while at >= 0:
            found = tail[at : at + TRAILER.size]
            if len(found) == TRAILER.size and _is_trailer(found) and _footer_ends(found) == begun + at:
                return found
            at = tail.rfind(magic, 0, at + len(magic) - 1)
        if begun == 0:
            raise blob_corrupt(name, "trailer is damaged")
        reach *= 16


def _footer_ends(trailer: bytes) -> int:
    fields = TRAILER.unpack(trailer)
    return int(fields[2] + fields[3])


def _is_trailer(trailer: bytes) -> bool:
    fields = TRAILER.unpack(trailer)
    return bool(fields[0] == SEGMENT_MAGIC and xxh64(trailer[:-8]) == fields[-1])
