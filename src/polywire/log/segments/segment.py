"""Read a segment: an immutable file of batches, sorted by partition and offset (decision 0102).

Opening reads only the footer (layout in ``format``). A *run* is the contiguous part with the batches of one partition.
A *stride* is the part of a run between two index entries, about 64 KiB. A read returns verified batches, and accesses
at most one stride more than it returns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Final, Generic, TypeVar

from polywire.clock import SYSTEM_CLOCK, Clock
from polywire.errors import BrokerError, Busy, ErrorCode, Missing, Unavailable
from polywire.log.segments.batch_scan import INDEX_STRIDE_BYTES
from polywire.log.segments.damage import (
    Damage,
    DamageNotes,
    Mark,
    Piece,
    VerifiedRanges,
    read_pieces,
    salvaged,
    split_sound,
)
from polywire.log.segments.format import ENTRY, SegmentInfo, SegmentRun, read_footer, read_info
from polywire.log.segments.search import BY_ADDRESS, BY_OFFSET, BY_POSITION, BY_TIME, NO_END, find_entry, scan_to
from polywire.records.batch import check_body, first_damaged
from polywire.records.fields import header_fields
from polywire.store.base import BLOCK_BYTES, BlobMissing, Store, blob_corrupt

ENTRY_CACHE_BYTES_MAX: Final = 16 * 1024 * 1024  # index entries of 32 GB of segments
FOOTER_CACHE_BYTES_MAX: Final = 32 * 1024 * 1024  # runs of a gigabyte of segments that 10,000 partitions share
UNREAD_RETRY_MS: Final = 1000  # until a retry after a disk read error
RUNS_RECENT_MAX: Final = 4096  # decoded runs, of all segments together: some 2 MB

_T = TypeVar("_T")
_Read = Callable[[memoryview, int, int], memoryview]
_offset: Final = header_fields("base_offset")
_place: Final = header_fields("length", "base_address")


class _Cache(Generic[_T]):
    """Least-recently-used cache for items of all segments, limited in total size. Thread-safe."""

    __slots__ = ("_bytes", "_bytes_max", "_items", "_lock", "_size_of")

    def __init__(self, bytes_max: int, size_of: Callable[[_T], int]) -> None:
        self._items: OrderedDict[str, _T] = OrderedDict()
        self._bytes = 0
        self._bytes_max = bytes_max
        self._size_of = size_of
        self._lock = Lock()

    def get(self, name: str) -> _T | None:
        with self._lock:
            item = self._items.get(name)
            if item is not None:
                self._items.move_to_end(name)
            return item

    def put(self, name: str, item: _T) -> None:
        with self._lock:
            if name in self._items:
                return
            self._items[name] = item
            self._bytes += self._size_of(item)
            while self._bytes > self._bytes_max and len(self._items) > 1:
                _, oldest = self._items.popitem(last=False)
                self._bytes -= self._size_of(oldest)

    def drop(self, name: str) -> None:
        with self._lock:
            item = self._items.pop(name, None)
            if item is not None:
                self._bytes -= self._size_of(item)


class EntryCache(_Cache[bytes]):
    """Cache of index entries and footers of all segments."""

    __slots__ = ("footers", "runs")

    def __init__(self, bytes_max: int = ENTRY_CACHE_BYTES_MAX, footer_bytes_max: int = FOOTER_CACHE_BYTES_MAX) -> None:
        super().__init__(bytes_max, len)
        self.footers: Final = _Cache[SegmentInfo](footer_bytes_max, _footer_bytes)
        self.runs: Final[dict[tuple[str, int], SegmentRun]] = {}
        """Entries of footers, by segment and partition."""

    def drop(self, name: str) -> None:
        super().drop(name)
        self.footers.drop(name)


def _footer_bytes(info: SegmentInfo) -> int:
    return len(info.runs) + len(info.epochs)


class Segment:
    """One open segment file.

    Positions are byte positions in the file. Returned batches are verified unless stated otherwise.

    Methods may wait for a disk, so they must not be called on the event loop. The exceptions are those whose names end
    in ``_now``. The footer is only cached, because all footers of a long log would exceed memory.
    """

    __slots__ = (
        "_cache",
        "_direct_bytes",
        "_index_count",
        "_store",
        "_verified",
        "data_bytes",
        "name",
        "notes",
        "run_count",
    )

    def __init__(
        self,
        store: Store,
        info: SegmentInfo,
        cache: EntryCache | None = None,
        notes: DamageNotes | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store = store
        self._cache = EntryCache() if cache is None else cache
        self.notes: Final = DamageNotes() if notes is None else notes
        self._direct_bytes = 0
        self._verified: Final = VerifiedRanges(clock)
        self.name: Final = info.name
        self.data_bytes: Final = info.data_bytes
        self.run_count: Final = info.run_count
        self._index_count: Final = info.index_count

    @classmethod
    def open(cls, store: Store, name: str, cache: EntryCache | None = None) -> Segment:
        """Read and verify the footer. Raises BlobMissing or Corrupt."""
        return cls(store, read_info(store, name), cache)

    @property
    def info(self) -> SegmentInfo:
        """The footer, from the cache or from the file. Raises BlobMissing or Corrupt."""
        info = self._cache.footers.get(self.name)
        if info is None:
            info = read_info(self._store, self.name)
            self._cache.footers.put(self.name, info)
        return info

    def run(self, partition: int) -> SegmentRun:
        """Return the footer's entry for a partition's batches, without those that are unpublished.

        Raises Missing(PARTITION_MISSING), and the errors of ``info``.
        """
        run = self._cache.runs.get((self.name, partition))
        return self._found(self.info, partition) if run is None else run

    def run_now(self, partition: int) -> SegmentRun | None:
        """Return the result of ``run`` if that needs no disk, else None. Raises Missing(PARTITION_MISSING)."""
        run = self._cache.runs.get((self.name, partition))
        if run is None:
            info = self._cache.footers.get(self.name)
            run = None if info is None else self._found(info, partition)
        return run

    def _found(self, info: SegmentInfo, partition: int) -> SegmentRun:
        run = info.find(partition)
        if run is None:
            raise Missing(
                ErrorCode.PARTITION_MISSING,
                f"partition is not in the segment partition={partition} segment={self.name!r}",
            )
        if len(self._cache.runs) >= RUNS_RECENT_MAX:
            self._cache.runs.clear()
        self._cache.runs[self.name, partition] = run
        return run

    def epochs(self, partition: int) -> list[tuple[int, int]]:
        """Return (leader epoch, first offset of the epoch in this segment) in order."""
        return self.info.epochs_of(self.run(partition))

    def locate(self, partition: int, offset: int, bytes_max: int = 0, offset_end: int = NO_END) -> tuple[int, int]:
        """Return the byte range [start, stop) that a read needs, rounded to blocks of about 64 KiB.

        The first block contains ``offset``. Reads index entries from the store unless they are cached. Raises
        Missing(OFFSET_OUT_OF_RANGE).
        """
        return self._strides(self._checked_run(partition, offset), self._entries(), offset, bytes_max, offset_end)

    def span(self, partition: int, first_offset: int, next_offset: int) -> tuple[int, int]:
        """Return the byte range [start, stop) of the whole batches that contain records [first_offset, next_offset).

        Reads index entries from the store unless they are cached or the range is the partition's whole content. Raises
        Missing(OFFSET_OUT_OF_RANGE).
        """
        run = self._checked_run(partition, first_offset)
        warm = self.span_now(partition, first_offset, next_offset)
        if warm is not None:
            return warm
        return self._strides(run, self._entries(), first_offset, run.size, next_offset)

    def span_now(self, partition: int, first_offset: int, next_offset: int) -> tuple[int, int] | None:
        """Return the result of ``span``, or None if that needs a disk."""
        if self.run_now(partition) is None:
            return None
        run = self._checked_run(partition, first_offset)
        if first_offset == run.first_offset and next_offset >= run.next_offset:
            return run.position, run.stop
        entries = self._cache.get(self.name)
        return None if entries is None else self._strides(run, entries, first_offset, run.size, next_offset)

    def _strides(
        self, run: SegmentRun, entries: bytes, offset: int, bytes_max: int, offset_end: int
    ) -> tuple[int, int]:
        """Implement ``locate`` with the given index entries."""
        first = find_entry(entries, run.index_start, run.index_count, BY_OFFSET, offset)
        start, stop = self._stride(run, entries, first)
        reach = start + INDEX_STRIDE_BYTES + bytes_max  # batches begin less than a stride after their index entry
        if bytes_max and stop <= min(reach, run.stop - 1):
            last = find_entry(entries, run.index_start, run.index_count, BY_POSITION, reach)
            if offset_end < run.next_offset:
                last = min(last, find_entry(entries, run.index_start, run.index_count, BY_OFFSET, offset_end - 1))
            stop = self._stride(run, entries, max(first, last))[1]
        return start, stop

    def read(self, partition: int, offset: int, bytes_max: int, offset_end: int = NO_END) -> tuple[memoryview, int]:
        """Return whole batches back to back, and the offset after their last record.

        The first batch contains ``offset``. More batches follow as long as they fit ``bytes_max`` and begin below
        ``offset_end``, up to the first damaged one. Raises Missing(OFFSET_OUT_OF_RANGE), or Corrupt if the first is
        damaged.
        """
        start, stop = self.locate(partition, offset, bytes_max, offset_end)
        pieces = self._fresh_pieces(partition, start, stop)
        chunks: list[memoryview] = []
        next_offset, _, _ = read_pieces(pieces, offset, bytes_max, offset_end, chunks)
        if not chunks:
            raise blob_corrupt(self.name, f"batches are damaged offset={offset}")
        return chunks[0], next_offset

    def pieces(self, block: memoryview, partition: int, start: int, stop: int) -> list[Piece]:
        """Read bytes [start, stop) of a partition, which must be whole 64 KiB blocks, into ``block`` and verify their
        checksums.

        The call may wait for the disk.
        """
        return self._read_and_verify(self.read_into, block, partition, start, stop)

    def pieces_now(self, block: memoryview, partition: int, start: int, stop: int) -> list[Piece] | None:
        """Return the result of ``pieces``, or None if that needs a disk.

        Bytes verified recently are not verified again.
        """
        data = self.read_now(block, start, stop, only_known=True)
        if data is None:
            self._verified.forget()
            return None
        if self._verified.hold(start, stop):
            return [Piece(data, self.run(partition).next_offset, None)]
        if first_damaged(data) >= 0:
            return None  # a damaged copy is read again where waiting for the disk is allowed
        return self._sound(data, partition, start, stop)

    def verify_uncached(self, block: memoryview, partition: int, start: int, stop: int) -> list[Damage]:
        """Read bytes [start, stop) past the page cache, and return the damage found. They are whole 64 KiB blocks."""
        pieces = self._read_and_verify(self.read_uncached, block, partition, start, stop)
        return [piece.damage for piece in pieces if piece.damage is not None]

    def windows(self, partition: int, bytes_max: int) -> Iterator[tuple[int, int]]:
        """Yield consecutive byte ranges (start, stop) that together cover a partition's batches.

        Each range consists of as many 64 KiB blocks as fit ``bytes_max``, but at least one.
        """
        run = self.run(partition)
        positions = [mark[0] for mark in self._marks(run, run.position, run.stop)]
        start, last = run.position, run.position
        for position in positions[1:]:
            if position - start > bytes_max and last > start:
                yield start, last
                start = last
            last = position
        if last > start:
            yield start, last

    def locate_now(
        self, partition: int, offset: int, bytes_max: int = 0, offset_end: int = NO_END
    ) -> tuple[int, int] | None:
        """Return the result of ``locate`` if that needs no disk, else None."""
        entries = self._cache.get(self.name) if self._index_count else b""
        if entries is None or self.run_now(partition) is None:
            return None
        return self._strides(self._checked_run(partition, offset), entries, offset, bytes_max, offset_end)

    def offset_at(self, partition: int, position: int) -> int:
        """Return the offset at a byte position, which is the start of a 64 KiB block or the end of the partition's
        batches.
        """
        run = self.run(partition)
        if position >= run.stop:
            return run.next_offset
        entries = self._entries()
        number = find_entry(entries, run.index_start, run.index_count, BY_POSITION, position)
        return int(ENTRY.unpack_from(entries, (run.index_start + number) * ENTRY.size)[0])

    def _read_and_verify(self, read: _Read, block: memoryview, partition: int, start: int, stop: int) -> list[Piece]:
        """Read whole 64 KiB blocks with ``read`` and verify them.

        If the local copy of an object in a bucket is damaged, it is discarded and the object is read again.
        """
        data = read(block, start, stop)
        if first_damaged(data) < 0:
            return self._sound(data, partition, start, stop)
        if self._store.drop_copy(self.name):
            self._verified.forget()
            data = read(block, start, stop)
            if first_damaged(data) < 0:
                return self._sound(data, partition, start, stop)
        return self._damaged(data, partition, start, stop)

    def _sound(self, data: memoryview, partition: int, start: int, stop: int) -> list[Piece]:
        self._verified.add(start, stop)
        return [Piece(data, self.run(partition).next_offset, None)]

    def _damaged(self, data: memoryview, partition: int, start: int, stop: int) -> list[Piece]:
        run = self.run(partition)
        marks = self._marks(run, start, stop)
        name = self.notes.name_of(partition)
        pieces = split_sound(data, marks, segment=self.name, partition=partition, name=name)
        if stop == marks[-1][0] and pieces[-1].damage is None:
            pieces[-1] = pieces[-1]._replace(end=run.next_offset)  # the run continues after these strides
        for piece in pieces:
            if piece.damage is not None:
                self.notes.note(piece.damage)
        return pieces

    def _marks(self, run: SegmentRun, start: int, stop: int) -> Sequence[Mark]:
        entries = self._entries()
        marks = [(run.position, run.first_offset)]
        for number in range(run.index_start, run.index_start + run.index_count):
            offset, position, _, _ = ENTRY.unpack_from(entries, number * ENTRY.size)
            if position > run.position:
                marks.append((position, offset))
        marks.append((run.stop, run.next_offset))
        return [mark for mark in marks if start <= mark[0] <= stop]

    def read_now(self, block: memoryview, start: int, stop: int, *, only_known: bool = False) -> memoryview | None:
        """Read bytes [start, stop) into the caller's memory, or return None if that needs a disk. Does not verify them.

        Args:
            only_known: return None unless earlier reads show that the bytes are in memory. A check with the system
                would itself make the system read them.
        """
        try:
            blob = self._store.open(self.name)
        except (BlobMissing, BrokerError):
            return None  # the read that follows opens the segment again and reports the error
        if only_known and self._is_new_to_the_cache and not blob.is_cached:
            return None
        target = block[: stop - start]
        return target if blob.read_now(target, start) else None

    def read_into(self, block: memoryview, start: int, stop: int) -> memoryview:
        """Read bytes [start, stop) into the caller's memory. Does not verify them. May wait for the disk.

        ``block`` must be suitable for ``Blob.read_direct``. Most data is read only once, so reads bypass the page cache
        until as many bytes were read as the segment has. Later reads use the page cache.
        """
        past = self._is_new_to_the_cache
        self._direct_bytes += stop - start
        return self._read(block, start, stop, past=past)

    @property
    def _is_new_to_the_cache(self) -> bool:
        return self._direct_bytes <= self.data_bytes

    def _read(self, block: memoryview, start: int, stop: int, *, past: bool) -> memoryview:
        """Read bytes into ``block``. Unreadable or missing bytes become zeros, which fail verification later.

        Args:
            past: bypass the page cache.
        """
        blob = self._store.open(self.name)
        past = past and len(block) >= stop - start + 2 * BLOCK_BYTES
        try:
            if past:
                found = blob.read_direct(block, start, stop)
            else:
                found = block[: blob.pread_into(block[: stop - start], start)]
        except Unavailable:
            return salvaged(blob, block[: stop - start], start)
        return found if len(found) == stop - start else salvaged(blob, block[: stop - start], start)

    def read_uncached(self, block: memoryview, start: int, stop: int) -> memoryview:
        """Read bytes [start, stop) into the caller's memory, bypassing the page cache. Does not verify them.

        Used for scans that read everything once.
        """
        return self._read(block, start, stop, past=True)

    def batch_at(self, partition: int, offset: int) -> memoryview:
        """Return the batch that contains ``offset``. Raises Missing(OFFSET_OUT_OF_RANGE) or Corrupt."""
        return self.read(partition, offset, 0)[0]

    def by_time(self, partition: int, time_us: int) -> int:
        """Return the first offset appended at or after ``time_us``, or the offset after the last record if there is
        none.

        Raises Corrupt.
        """
        run = self.run(partition)
        if time_us > run.last_time_us:
            return run.next_offset
        if time_us <= run.first_time_us:
            return run.first_offset
        entries = self._entries()
        start, stop = self._stride(
            run, entries, find_entry(entries, run.index_start, run.index_count, BY_TIME, time_us - 1)
        )
        for piece in self._fresh_pieces(partition, start, stop):
            at = scan_to(piece.data, 0, BY_TIME, time_us - 1)
            if at < len(piece.data):
                return int(_offset(piece.data, at)[0])
        number = find_entry(entries, run.index_start, run.index_count, BY_POSITION, stop)
        return int(ENTRY.unpack_from(entries, (run.index_start + number) * ENTRY.size)[0])

    def by_address(self, partition: int, address: int) -> memoryview | None:
        """Return the batch with the record at a byte position (Kafka 0.7's offset), or None if this segment has none
        there.

        Raises Corrupt.
        """
        run = self.run(partition)
        if not run.first_address <= address < run.next_address:
            return None
        entries = self._entries()
        start, stop = self._stride(
            run, entries, find_entry(entries, run.index_start, run.index_count, BY_ADDRESS, address)
        )
        damage = None
        for piece in self._fresh_pieces(partition, start, stop):
            chunk = piece.data
            at = scan_to(chunk, 0, BY_ADDRESS, address)
            if at == len(chunk):
                damage = piece.damage
                continue
            length, begin = _place(chunk, at)
            if begin <= address:
                return chunk[at : at + length]
            break
        if damage is not None:  # the damage is at the address
            raise damage.error()
        return None

    def stored(self, start: int, stop: int, *, strict: bool = False) -> memoryview:
        """Return bytes [start, stop) of an unpublished batch or of its header, not verified.

        Args:
            strict: raise Busy if the disk cannot read them. Otherwise unreadable bytes become zeros.
        """
        if not strict:
            return self.read_into(memoryview(bytearray(stop - start)), start, stop)
        found = bytearray(stop - start)
        try:
            self._store.open(self.name).pread_into(found, start)
        except Unavailable as error:
            raise Busy(ErrorCode.BUSY, error.message, retry_after_ms=UNREAD_RETRY_MS) from error
        return memoryview(found)

    def staged(self, start: int, stop: int, *, strict: bool = False) -> memoryview:
        """Return an unpublished batch.

        If the local copy of an object in a bucket is damaged, it is discarded and the object is read again.

        Args:
            strict: raise Busy if the disk cannot read the batch. Otherwise unreadable bytes become zeros.
        """
        found = self.stored(start, stop, strict=strict)
        if not check_body(found, 0) and self._store.drop_copy(self.name):
            return self.stored(start, stop, strict=strict)
        return found

    def _fresh_pieces(self, partition: int, start: int, stop: int) -> list[Piece]:
        block = memoryview(bytearray(stop - start))
        pieces = self.pieces_now(block, partition, start, stop)
        return self.pieces(block, partition, start, stop) if pieces is None else pieces

    def _checked_run(self, partition: int, offset: int) -> SegmentRun:
        run = self.run(partition)
        if not run.first_offset <= offset < run.next_offset:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset is not in the segment partition={partition} offset={offset} segment={self.name!r}",
            )
        return run

    def _entries(self) -> bytes:
        entries = self._cache.get(self.name)
        if entries is None:
            info, table = read_footer(self._store, self.name)
            entries = bytes(table)
            self._cache.footers.put(self.name, info)
            self._cache.put(self.name, entries)
        return entries

    def _stride(self, run: SegmentRun, entries: bytes, number: int) -> tuple[int, int]:
        """Return the byte range [start, stop) of the 64 KiB block at index entry ``number``, or of the first block for
        -1.
        """
        number = max(number, 0)
        start, stop = run.position, run.stop
        if number < run.index_count:
            start = ENTRY.unpack_from(entries, (run.index_start + number) * ENTRY.size)[1]
        if number + 1 < run.index_count:
            stop = ENTRY.unpack_from(entries, (run.index_start + number + 1) * ENTRY.size)[1]
        return start, stop
