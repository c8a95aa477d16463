"""A sealed segment: an immutable blob of batches sorted by partition and offset, and the footer that finds them (decision 0002).

Promises: opening reads the footer only, and only verified footers are used; a read touches at most one index stride more than it
returns. Must not know: the journal, who deletes segments, any file.

```
batches of run 0 | batches of run 1 | … | footer: runs, epochs, index entries | trailer

run, 112 bytes                                   trailer, the blob's last 64 bytes
  0 u64 partition                                  0 u32 magic "PWS1" (0x31535750)
  8 16  token or zeros                             4 u32 version, 1
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

Runs are sorted by (partition, token). A run with a token holds staged batches: not numbered, offsets, addresses and epochs zero.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from polywire.errors import ErrorCode, Missing
from polywire.log.gather import INDEX_STRIDE_BYTES
from polywire.log.index import (
    BY_ADDRESS,
    BY_OFFSET,
    BY_POSITION,
    BY_TIME,
    NO_END,
    RUN_ENTRY_BYTES,
    find_entry,
    find_run,
    scan_read,
    scan_to,
)
from polywire.records.checksum import xxh64
from polywire.store.base import BlobMissing, Store, blob_corrupt

SEGMENT_MAGIC: Final = 0x31535750  # "PWS1" read as little-endian u32
SEGMENT_VERSION: Final = 1
TOKEN_BYTES: Final = 16
NO_TOKEN: Final = b""
ENTRY_CACHE_BYTES_MAX: Final = 16 * 1024 * 1024  # index entries of 32 GB of segments
WARM_BYTES: Final = 1024 * 1024  # read at once into the page cache
RUNS_RECENT_MAX: Final = 64  # decoded runs kept per segment

RUN: Final = struct.Struct("<Q16s6Q2q4IQ")
EPOCH: Final = struct.Struct("<IIQ")
ENTRY: Final = struct.Struct("<3Qq")
TRAILER: Final = struct.Struct("<II2Q2I4Q")

_ZERO_TOKEN: Final = bytes(TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class Run:
    """The batches of one partition, or of one token for it, in one segment. Positions are those in the blob."""

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
        """Position after the run's last batch."""
        return self.position + self.size


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment's footer without its index entries: what stays in memory for every segment. Tables are kept as stored."""

    name: str
    size: int
    data_bytes: int
    runs: bytes
    epochs: bytes
    index_position: int
    index_count: int

    @property
    def run_count(self) -> int:
        return len(self.runs) // RUN.size

    def run(self, number: int) -> Run:
        """A run by its number. Raises IndexError."""
        if not 0 <= number < self.run_count:
            raise IndexError(number)
        fields = RUN.unpack_from(self.runs, number * RUN.size)
        token = NO_TOKEN if fields[1] == _ZERO_TOKEN else fields[1]
        return Run(fields[0], token, *fields[2:])

    def __iter__(self) -> Iterator[Run]:
        return map(self.run, range(self.run_count))

    def find(self, partition: int, token: bytes = NO_TOKEN) -> Run | None:
        """The run of a partition, or of a token for it."""
        for number in range(find_run(self.runs, partition), self.run_count):
            run = self.run(number)
            if run.partition != partition:
                return None
            if run.token == token:
                return run
        return None

    def epochs_of(self, run: Run) -> list[tuple[int, int]]:
        """(epoch, its first offset in the run), in order."""
        table = self.epochs[run.epoch_start * EPOCH.size : (run.epoch_start + run.epoch_count) * EPOCH.size]
        return [(epoch, first_offset) for epoch, _, first_offset in EPOCH.iter_unpack(table)]


def read_info(store: Store, name: str) -> SegmentInfo:
    """Read and verify a segment's trailer and footer. Raises BlobMissing, Corrupt."""
    size = store.size(name)
    if size < TRAILER.size:
        raise blob_corrupt(name, f"too short size={size}")
    trailer = store.get(name, size - TRAILER.size, size)
    magic, version, position, count, run_count, epoch_count, index_count, checksum, _, own = TRAILER.unpack(trailer)
    if magic != SEGMENT_MAGIC or xxh64(trailer[:-8]) != own:
        raise blob_corrupt(name, "trailer is damaged")
    if version != SEGMENT_VERSION:
        raise blob_corrupt(name, f"unknown version={version}")
    epochs_at = run_count * RUN.size
    entries_at = epochs_at + epoch_count * EPOCH.size
    if position + count + TRAILER.size != size or entries_at + index_count * ENTRY.size != count:
        raise blob_corrupt(name, "trailer does not fit the blob")
    footer = store.get(name, position, position + count)
    if xxh64(footer) != checksum:
        raise blob_corrupt(name, "footer is damaged")
    return SegmentInfo(
        name=name,
        size=size,
        data_bytes=position,
        runs=footer[:epochs_at],
        epochs=footer[epochs_at:entries_at],
        index_position=position + entries_at,
        index_count=index_count,
    )


class EntryCache:
    """Index entries of the segments used last, for all segments of a log together; bounded in bytes. Any thread may use it."""

    __slots__ = ("_bytes", "_bytes_max", "_entries", "_lock")

    def __init__(self, bytes_max: int = ENTRY_CACHE_BYTES_MAX) -> None:
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._bytes_max = bytes_max
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes | None:
        with self._lock:
            entries = self._entries.get(name)
            if entries is not None:
                self._entries.move_to_end(name)
            return entries

    def put(self, name: str, entries: bytes) -> None:
        with self._lock:
            if name in self._entries:
                return
            self._entries[name] = entries
            self._bytes += len(entries)
            while self._bytes > self._bytes_max and len(self._entries) > 1:
                _, oldest = self._entries.popitem(last=False)
                self._bytes -= len(oldest)

    def drop(self, name: str) -> None:
        with self._lock:
            self._bytes -= len(self._entries.pop(name, b""))


class Segment:
    """One open segment. Guards: positions given out lie inside the run they were asked for.

    ``read`` and the ``by_…`` look-ups touch mapped bytes: on the loop call ``read_warm``, and where it has no answer ``locate`` and
    ``read_into`` in the reader thread.
    """

    __slots__ = ("_cache", "_direct_bytes", "_recent", "_store", "info")

    def __init__(self, store: Store, info: SegmentInfo, cache: EntryCache | None = None) -> None:
        self._store = store
        self._cache = EntryCache() if cache is None else cache
        self._recent: dict[int, Run] = {}
        self._direct_bytes = 0
        self.info: Final = info

    @classmethod
    def open(cls, store: Store, name: str, cache: EntryCache | None = None) -> Segment:
        """Read and verify the footer. Raises BlobMissing, Corrupt."""
        return cls(store, read_info(store, name), cache)

    @property
    def name(self) -> str:
        return self.info.name

    def run(self, partition: int) -> Run:
        """The numbered run of a partition. Raises Missing(PARTITION_MISSING)."""
        run = self._recent.get(partition)
        if run is None:
            run = self.info.find(partition)
            if run is None:
                raise Missing(
                    ErrorCode.PARTITION_MISSING, f"no run in segment partition={partition} segment={self.name!r}"
                )
            if len(self._recent) >= RUNS_RECENT_MAX:
                self._recent.clear()
            self._recent[partition] = run
        return run

    def epochs(self, partition: int) -> list[tuple[int, int]]:
        """(epoch, its first offset in this segment), in order."""
        return self.info.epochs_of(self.run(partition))

    def locate(self, partition: int, offset: int, bytes_max: int = 0, offset_end: int = NO_END) -> tuple[int, int]:
        """Positions [start, stop) of the strides that a read from ``offset`` of up to ``bytes_max`` bytes and ``offset_end`` touches: from
        the last index entry at or below the offset. Reads index entries from the store unless they are at hand.
        Raises Missing(OFFSET_OUT_OF_RANGE)."""
        return self._strides(self._checked_run(partition, offset), self._entries(), offset, bytes_max, offset_end)

    def span(self, partition: int, first_offset: int, next_offset: int) -> tuple[int, int]:
        """Positions [start, stop) of whole batches that hold records [first_offset, next_offset), which begin in the run. Reads index
        entries from the store unless they are at hand or that is the whole run. Raises Missing(OFFSET_OUT_OF_RANGE)."""
        warm = self.span_warm(partition, first_offset, next_offset)
        if warm is not None:
            return warm
        run = self.run(partition)
        return self._strides(run, self._entries(), first_offset, run.size, next_offset)

    def span_warm(self, partition: int, first_offset: int, next_offset: int) -> tuple[int, int] | None:
        """What ``span`` returns when it waits for no disk, else None."""
        run = self._checked_run(partition, first_offset)
        if first_offset == run.first_offset and next_offset >= run.next_offset:
            return run.position, run.stop
        entries = self._cache.get(self.name)
        return None if entries is None else self._strides(run, entries, first_offset, run.size, next_offset)

    def _strides(self, run: Run, entries: bytes, offset: int, bytes_max: int, offset_end: int) -> tuple[int, int]:
        """What ``locate`` says, of index entries that are at hand."""
        first = find_entry(entries, run.index_start, run.index_count, BY_OFFSET, offset)
        start, stop = self._stride(run, entries, first)
        reach = start + INDEX_STRIDE_BYTES + bytes_max  # batches begin less than a stride behind their entry
        if bytes_max and stop <= min(reach, run.stop - 1):
            last = find_entry(entries, run.index_start, run.index_count, BY_POSITION, reach)
            if offset_end < run.next_offset:
                last = min(last, find_entry(entries, run.index_start, run.index_count, BY_OFFSET, offset_end - 1))
            stop = self._stride(run, entries, max(first, last))[1]
        return start, stop

    def read(self, partition: int, offset: int, bytes_max: int, offset_end: int = NO_END) -> tuple[memoryview, int]:
        """Whole batches back to back, and the offset after their last record: the batch that holds ``offset``, then more while they fit
        ``bytes_max`` and begin below ``offset_end``. The view is valid as long as it is held. Raises Missing(OFFSET_OUT_OF_RANGE), Corrupt.
        """
        start, stop = self.locate(partition, offset, bytes_max, offset_end)
        return self._read(self.view(start, stop), offset, bytes_max, offset_end)

    def read_warm(
        self, partition: int, offset: int, bytes_max: int, offset_end: int = NO_END
    ) -> tuple[memoryview, int] | None:
        """What ``read`` returns when it waits for no disk, else None."""
        entries = self._cache.get(self.name) if self.info.index_count else b""
        if entries is None:
            return None
        start, stop = self._strides(self._checked_run(partition, offset), entries, offset, bytes_max, offset_end)
        try:
            blob = self._store.open(self.name)
        except BlobMissing:
            return None  # who goes on to read it is told
        return self._read(blob.map()[start:stop], offset, bytes_max, offset_end) if blob.is_warm(start, stop) else None

    def _read(self, strides: memoryview, offset: int, bytes_max: int, offset_end: int) -> tuple[memoryview, int]:
        """A read of the strides that ``locate`` has found."""
        first, end, next_offset = scan_read(strides, offset, bytes_max, offset_end)
        if first < 0 or first == end:
            raise blob_corrupt(self.name, f"batches are broken offset={offset}")
        return strides[first:end], next_offset

    def holds_warm(self, start: int, stop: int) -> bool:
        """Whether touching these bytes of ``view`` waits for no disk."""
        try:
            return self._store.open(self.name).is_warm(start, stop)
        except BlobMissing:
            return False  # who goes on to read it is told

    def warm_up(self, start: int, stop: int) -> None:
        """Bring stored bytes [start, stop) into the page cache, where ``view`` finds them. For the reader's thread. Raises BlobMissing."""
        blob, piece = self._store.open(self.name), bytearray(min(stop - start, WARM_BYTES))
        while start < stop:
            start += blob.pread_into(memoryview(piece)[: stop - start], start) or stop - start

    def read_into(self, block: memoryview, start: int, stop: int) -> memoryview:
        """Stored bytes [start, stop) in memory of the caller's; waits for the disk. See ``Blob.read_direct``.

        History is mostly read once, and past the page cache. Once as much as the whole segment was read that way it is being read again:
        then it is worth the memory, and what is read from it stays in the page cache.
        """
        blob = self._store.open(self.name)
        self._direct_bytes += stop - start
        if self._direct_bytes <= self.info.data_bytes + len(block):
            return blob.read_direct(block, start, stop)
        return block[: blob.pread_into(block[: stop - start], start)]

    def read_past(self, block: memoryview, start: int, stop: int) -> memoryview:
        """Like ``read_into``, for who reads everything once: never by way of the page cache."""
        return self._store.open(self.name).read_direct(block, start, stop)

    def batch_at(self, partition: int, offset: int) -> memoryview:
        """The batch that holds ``offset``. Raises Missing(OFFSET_OUT_OF_RANGE), Corrupt."""
        return self.read(partition, offset, 0)[0]

    def by_time(self, partition: int, time_us: int) -> int:
        """First offset appended at or after ``time_us``; the run's next offset when there is none. Raises Corrupt."""
        run = self.run(partition)
        if time_us > run.last_time_us:
            return run.next_offset
        if time_us <= run.first_time_us:
            return run.first_offset
        entries = self._entries()
        start, stop = self._stride(
            run, entries, find_entry(entries, run.index_start, run.index_count, BY_TIME, time_us - 1)
        )
        chunk = self.view(start, stop)
        at = self._checked(scan_to(chunk, 0, BY_TIME, time_us - 1), start)
        if at < len(chunk):
            return int.from_bytes(chunk[at + 32 : at + 40], "little")
        number = find_entry(entries, run.index_start, run.index_count, BY_POSITION, stop)
        return int(ENTRY.unpack_from(entries, (run.index_start + number) * ENTRY.size)[0])

    def by_address(self, partition: int, address: int) -> memoryview | None:
        """The batch whose records cover this Kafka 0.7 address, None in a hole or outside the run. Raises Corrupt."""
        run = self.run(partition)
        if not run.first_address <= address < run.next_address:
            return None
        entries = self._entries()
        start, stop = self._stride(
            run, entries, find_entry(entries, run.index_start, run.index_count, BY_ADDRESS, address)
        )
        chunk = self.view(start, stop)
        at = self._checked(scan_to(chunk, 0, BY_ADDRESS, address), start)
        if at == len(chunk) or int.from_bytes(chunk[at + 40 : at + 48], "little") > address:
            return None
        return chunk[at : at + int.from_bytes(chunk[at + 4 : at + 8], "little")]

    def view(self, start: int, stop: int) -> memoryview:
        """Stored bytes [start, stop): a whole run, or one staged batch."""
        return self._store.open(self.name).map()[start:stop]

    def _checked_run(self, partition: int, offset: int) -> Run:
        run = self.run(partition)
        if not run.first_offset <= offset < run.next_offset:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset not in segment partition={partition} offset={offset} segment={self.name!r}",
            )
        return run

    def _checked(self, at: int, start: int) -> int:
        if at < 0:
            raise blob_corrupt(self.name, f"batches are broken position={start}")
        return at

    def _entries(self) -> bytes:
        entries = self._cache.get(self.name)
        if entries is None:
            stop = self.info.index_position + self.info.index_count * RUN_ENTRY_BYTES
            entries = self._store.get(self.name, self.info.index_position, stop)
            self._cache.put(self.name, entries)
        return entries

    def _stride(self, run: Run, entries: bytes, number: int) -> tuple[int, int]:
        """Positions from a run's index entry to the next; the run's first stride for -1."""
        number = max(number, 0)
        start, stop = run.position, run.stop
        if number < run.index_count:
            start = ENTRY.unpack_from(entries, (run.index_start + number) * ENTRY.size)[1]
        if number + 1 < run.index_count:
            stop = ENTRY.unpack_from(entries, (run.index_start + number + 1) * ENTRY.size)[1]
        return start, stop
