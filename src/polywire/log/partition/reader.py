"""Fetch the records of a partition.

Records are read from memory-mapped journal files or from segments. A published batch has its header in the journal and
its body where it was staged, so the two are joined. If all data is in memory, a read returns at once. Otherwise a
thread reads the data, and the read's completion is called on the event loop. Returned bytes stay in memory until the
caller releases them (unpins).

This module is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import cython

from polywire.errors import BrokerError, Corrupt, ErrorCode, Missing, Unavailable
from polywire.log.base import Completion, Handle, Located, Pin, Read
from polywire.log.journal.slots import FileJournal, Slot
from polywire.log.journal.staging import NOWHERE, StagedBatch
from polywire.log.partition import lookup
from polywire.log.partition.cold_reads import PIECES_MAX, WINDOW_BYTES, ColdReads, Stop, Window
from polywire.log.partition.partition import PUBLISHED, PUBLISHED_SHIFT
from polywire.log.segments.damage import BEGINNING, Damage, PiecePosition, read_pieces
from polywire.log.segments.format import SegmentRun
from polywire.log.segments.search import NO_END
from polywire.log.segments.segment import Segment
from polywire.log.segments.segment_set import SegmentSet
from polywire.log.worker import Pending, Worker, pending
from polywire.records.batch import check_body, read_header
from polywire.records.columns import HEADER_BYTES, BatchFlags
from polywire.records.fields import header_fields
from polywire.store.base import blob_corrupt
from polywire.store.data_directory import BlobRoot
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.log.partition.partition import FilePartition
else:
    from polywire.log.partition.partition import FilePartition

# footers fetched at once for retention, so that the reader's thread can also do other work
FOOTERS_FETCHED_MAX: Final = 16
EXTENTS_MAX: Final = 8  # more pieces than this are copied into one chunk
EXTENT_BYTES_MIN: Final = 4096
_offset: Final = header_fields("base_offset")
COMPRESSED: Final = BatchFlags.LZ4 | BatchFlags.ZSTD

_T = TypeVar("_T")


class PublishedGroup:
    """Data shared by all batches of one publish.

    Attributes:
        headers: headers of the batches, with offsets.
        serial: serial of the journal file with the publish.
    """

    __slots__ = ("headers", "serial")

    def __init__(self, headers: Buffer, serial: int = NOWHERE) -> None:
        self.headers: Final = headers
        self.serial = serial


class PublishedBatch:
    """A published batch that is not in a segment yet.

    Its body was written to the journal before the publish, its header by the publish.
    """

    __slots__ = ("_at", "batch", "group")

    def __init__(self, group: PublishedGroup, at: int, batch: StagedBatch) -> None:
        self.group: Final = group
        self._at: Final = at
        self.batch: Final = batch

    @property
    def header(self) -> Buffer:
        return memoryview(self.group.headers)[self._at : self._at + HEADER_BYTES]

    @property
    def serial(self) -> int:
        return self.group.serial

    @property
    def offset(self) -> int:
        return int(_offset(self.group.headers, self._at)[0])


class NoPin:
    """Implements ``Pin`` for memory that is freed by reference counting."""

    __slots__ = ()

    def release(self) -> None:
        pass


NO_PIN: Final = NoPin()


@cython.cclass
class SlotsPin:
    """Prevents journal files from being reused until it is released."""

    if not cython.compiled:  # when compiled, reader.pxd declares the fields
        __slots__ = ("_slots", "_unpinned")

    def __init__(self, slots: list[Slot], unpinned: Callable[[], None]) -> None:
        self._slots = slots
        self._unpinned = unpinned
        for slot in slots:
            slot.pins += 1

    def release(self) -> None:
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.pins -= 1
            if slot.pins == 0:
                self._unpinned()


@cython.cclass
class Reader:
    """Reads the records of all partitions of one log.

    Attributes:
        epoch: current leader epoch.
        root: location of the segments.
        published: published batches that are not in a segment of their partition yet, by number.
        unpinned: called when the last reader of a journal file has finished.
    """

    def __init__(
        self, journal: FileJournal, segments: SegmentSet, worker: Worker, *, epoch: int, root: BlobRoot
    ) -> None:
        self._journal = journal
        self._segments = segments
        self._worker = worker
        self._cold = ColdReads(worker)
        self.epoch: Final = epoch
        self.root: Final = root
        self.published: Final[dict[int, PublishedBatch]] = {}
        self.unpinned: Callable[[], None] = _nothing
        self._fetching = 0

    def rest(self) -> None:
        """Free the memory of reads from segments if it was not used for some time. Call it every few seconds."""
        self._cold.rest()

    def segment(self, location: int) -> Segment:
        """Return a segment by its location. Raises Missing if it was removed meanwhile."""
        sealed = self._segments.by_location.get(location)
        if sealed is None:
            raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"segment was removed location={location}")
        return sealed.segment

    def run_now(self, location: int, incarnation: int) -> SegmentRun | None:
        """Return a partition's entry in a segment's footer if the footer is in memory.

        Otherwise return None, and read the footer in the background for a later call.
        """
        segment = self.segment(location)
        run = segment.run_now(incarnation)
        if run is None and self._fetching < FOOTERS_FETCHED_MAX:
            self._fetching += 1
            self._worker.run(partial(segment.run, incarnation), self._fetched)
        return run

    def _fetched(self, _: SegmentRun | BrokerError) -> None:
        self._fetching -= 1

    # One batch

    def published_offset(self, number: int) -> int:
        return self.published[number].offset

    def staged_view(self, batch: StagedBatch, *, strict: bool = False) -> Buffer:
        """Return an unpublished batch as stored, without verifying it. The call may wait for the disk.

        Args:
            strict: raise Busy if the disk cannot read it. Otherwise unreadable parts become zeros.
        """
        start, stop = batch.position, batch.position + batch.length
        if batch.location < 0:
            return memoryview(self._journal.views[batch.serial])[start:stop]
        return self.segment(batch.location).staged(start, stop, strict=strict)

    def joined(self, number: int) -> bytearray:
        """Return a published batch by its number. Raises Corrupt. Call it only if the body is in memory."""
        published = self.published[number]
        batch = published.batch
        body = self._kept_body(batch) if batch.location >= 0 else None
        try:
            return self._sound(published, _join(published, self.staged_view(batch) if body is None else body))
        except Corrupt:
            # read it again next time, which may succeed
            self._cold.forget_body(self.segment(batch.location), batch.position)
            raise

    def join(self, published: PublishedBatch, *, strict: bool = False) -> bytearray:
        """Return a published batch, its header with offsets followed by its body, without verifying it.

        Args:
            strict: raise Busy if the disk cannot read the body. Otherwise unreadable parts become zeros.
        """
        return _join(published, self.staged_view(published.batch, strict=strict))

    def _sound(self, published: PublishedBatch, joined: bytearray) -> bytearray:
        """Return ``joined`` if its body matches its checksum. Raises Corrupt otherwise."""
        batch = published.batch
        if batch.location >= 0 and not check_body(joined, 0):
            header, segment = read_header(joined), self.segment(batch.location)
            stop = batch.position + batch.length
            name, offsets = segment.notes.name_of(batch.incarnation), (header.base_offset, header.next_offset)
            damage = Damage(segment.name, batch.incarnation, batch.position, stop, *offsets, name)
            segment.notes.note(damage)
            raise damage.error()
        return joined

    def _kept_body(self, batch: StagedBatch) -> Buffer | None:
        return self._cold.body(self.segment(batch.location), batch.position, batch.position + batch.length)

    def tail_batch(self, partition: FilePartition, number: int) -> Buffer:
        """Return a batch that is not in a segment yet, by its number in the partition's tail index.

        May wait for the disk.
        """
        _, position, length, serial, _, _ = partition.tail.entry(number)
        if serial == PUBLISHED:
            return self.joined(position >> PUBLISHED_SHIFT)
        return memoryview(self._journal.views[serial])[position : position + length]

    def _is_at_hand(self, number: int) -> bool:
        """Return whether the body of a published batch can be read without waiting for a disk."""
        batch = self.published[number].batch
        return batch.location < 0 or self._kept_body(batch) is not None

    def forget(self, partition: FilePartition) -> None:
        self._cold.forget(partition.incarnation)

    # Lookups in one batch or segment

    def query(
        self,
        locations: Sequence[int],
        job: Callable[[Sequence[Segment]], _T],
        then: Completion[_T],
        again: Callable[[], None],
    ) -> None:
        """Run ``job`` on segments in the reader's thread.

        Args:
            then: called on the loop with the job's result.
            again: called instead of ``then`` if a segment was replaced before it was read. It should repeat the lookup.
        """
        segments = [self.segment(location) for location in locations]
        self._worker.run(partial(job, segments), partial(self._answered, locations, then, again))

    def query_tail(
        self,
        partition: FilePartition,
        number: int,
        job: Callable[[Buffer], int],
        then: Completion[int],
        again: Callable[[], None],
    ) -> int | None:
        """Run ``job`` on a batch that is not in a segment yet: entry ``number`` of the partition's tail index.

        Return the result if the batch is in memory and uncompressed. Otherwise run the job in the reader's thread.

        Args:
            then: called on the loop with the job's result.
            again: called instead of ``then`` if a segment with the batch's body was replaced before it was read.
        """
        self._check_open()
        _, position, _, serial, _, _ = partition.tail.entry(number)
        published = self.published[position >> PUBLISHED_SHIFT] if serial == PUBLISHED else None
        location = -1 if published is None else published.batch.location
        if location < 0:
            batch = self.tail_batch(partition, number)
            if not read_header(batch).flags & COMPRESSED:
                return job(batch)
            slot = self._journal.slots[serial if published is None else published.batch.serial]
            pin = SlotsPin([slot], self.unpinned)
            self._worker.run(partial(job, batch), partial(self._answered, (), _released(pin, then), again))
            return None
        assert published is not None, "only published batches of a tail can be in a segment"
        self._worker.run(
            lambda: job(self._sound(published, self.join(published))),
            partial(self._answered, (location,), then, again),
        )
        return None

    def locate(
        self,
        partition: FilePartition,
        offset: int,
        then: Completion[Located],
        *,
        offset_end: int | None,
    ) -> Located | Handle:
        return lookup.locate(partition, self, offset, then, offset_end=offset_end)

    def offset_at(self, partition: FilePartition, time_us: int, then: Completion[int]) -> int | Handle:
        return lookup.offset_at(partition, self, time_us, then)

    def offset_of_address(
        self, partition: FilePartition, address: int, then: Completion[int], *, covering: bool
    ) -> int | Handle:
        return lookup.offset_of_address(partition, self, address, then, covering=covering)

    def address_of_offset(self, partition: FilePartition, offset: int, then: Completion[int]) -> int | Handle:
        return lookup.address_of_offset(partition, self, offset, then)

    def _answered(
        self,
        locations: Sequence[int],
        then: Completion[_T],
        again: Callable[[], None],
        found: _T | BrokerError,
    ) -> None:
        if isinstance(found, Missing) and any(location not in self._segments.by_location for location in locations):
            again()
        elif isinstance(found, Missing) and locations:
            then(blob_corrupt(self.segment(locations[0]).name, "the blob of the segment is missing"))
        else:
            then(found)

    # Reads

    @cython.cfunc
    def _check_open(self) -> None:
        """Raise Unavailable if the log is closed: its connections end a moment later."""
        if self._journal.is_closed:
            raise Unavailable(ErrorCode.STOPPING, "log is closed")

    def read(
        self, partition: FilePartition, offset: int, bytes_max: int, then: Completion[Read], offset_end: int | None
    ) -> Read | Handle:
        """Implements ``PartitionLog.read`` for an offset that was checked."""
        readable = partition.readable_end()
        end = readable if offset_end is None or offset_end > readable else offset_end
        if offset >= end:
            return Read((), offset, readable, NO_PIN)
        start, stop, size = partition.tail.take(offset, bytes_max, end)
        if stop > start:
            self._check_open()
            stop_warm = self._warm_stop(partition, start, stop)
            if stop_warm == start:
                waiter: Pending[Read] = pending(then)
                self._warm_up(partition, start, partial(self._retried, partition, offset, bytes_max, end, waiter))
                return waiter
            if stop_warm < stop:
                stop, size = stop_warm, sum(partition.tail.entry(number)[2] for number in range(start, stop_warm))
            return self._read_tail(partition, start, stop, size, ())
        return self._read_sealed(partition, offset, bytes_max, end, then)

    @cython.cfunc
    @cython.exceptval(-1, check=False)
    def _warm_stop(
        self, partition: FilePartition, start: cython.Py_ssize_t, stop: cython.Py_ssize_t
    ) -> cython.Py_ssize_t:
        """Return the first of the tail index entries [start, stop) whose body must be read from disk, or ``stop``."""
        for number in range(start, stop) if partition.published else ():
            _, position, _, serial, _, _ = partition.tail.entry(number)
            if serial == PUBLISHED and not self._is_at_hand(position >> PUBLISHED_SHIFT):
                return number
        return stop

    def _warm_up(self, partition: FilePartition, number: int, again: Completion[None]) -> None:
        """Read the body of a published batch from its segment into memory, in the reader's thread, then call ``again``."""
        batch = self.published[partition.tail.entry(number)[1] >> PUBLISHED_SHIFT].batch
        location, segment = batch.location, self.segment(batch.location)

        def completed(body: memoryview | BrokerError) -> None:
            if isinstance(body, Missing):
                listed = location in self._segments.by_location
                again(blob_corrupt(segment.name, "the blob of the segment is missing") if listed else None)
            elif isinstance(body, BrokerError):
                again(body)
            else:
                self._cold.keep_body(segment, batch.position, body)
                again(None)

        self._worker.run(partial(segment.staged, batch.position, batch.position + batch.length), completed)

    def _retried(
        self,
        partition: FilePartition,
        offset: int,
        bytes_max: int,
        end: int,
        waiter: Pending[Read],
        fetched: BrokerError | None,
    ) -> None:
        """Repeat a read after the data it was waiting for was read from disk, and pass the result to ``waiter``.

        If the offset was trimmed meanwhile, ``waiter`` gets Missing(OFFSET_OUT_OF_RANGE).
        """
        if waiter.is_over:
            return
        try:
            if fetched is not None:
                raise fetched
            partition.check_range(offset)
            found = self.read(partition, offset, bytes_max, waiter, end)
        except BrokerError as refused:
            waiter(refused)
            return
        if isinstance(found, Read):
            waiter(found)

    @cython.cfunc
    def _read_tail(
        self,
        partition: FilePartition,
        start: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
        size: cython.longlong,
        before: Sequence[memoryview],
    ) -> Read:
        """Return a read of ``before`` and of the batches at tail index entries [start, stop), which have ``size`` bytes."""
        next_offset: cython.longlong = _entry_offset(partition, stop)
        readable: cython.longlong = partition.readable_end()
        extents: list[tuple[int, int, int]] = partition.tail.extents(start, stop)
        has_published = bool(partition.published) and PUBLISHED in [extent[0] for extent in extents]
        if not has_published and len(extents) > EXTENTS_MAX and size < len(extents) * EXTENT_BYTES_MIN:
            copied = bytearray(size)
            partition.tail.copy(start, stop, self._journal.views, copied)
            return Read([*before, memoryview(copied)], next_offset, readable, NO_PIN)
        chunks: list[memoryview] = [*before]
        slots: dict[int, Slot] = {}
        for serial, position, length in extents:
            if serial == PUBLISHED:
                chunks.append(memoryview(self.joined(position >> PUBLISHED_SHIFT)))
                continue
            slot = self._journal.slots[serial]
            slots[serial] = slot
            chunks.append(slot.view[position : position + length])
        pin: Pin = SlotsPin(list(slots.values()), self.unpinned) if slots else NO_PIN
        return Read(chunks, next_offset, readable, pin)

    def _read_sealed(
        self, partition: FilePartition, offset: int, bytes_max: int, end: int, then: Completion[Read]
    ) -> Read | Handle:
        """Begin a read whose first record is in a segment. It may continue in later segments and in the journal."""
        return self._collect(SealedRead(partition, offset, bytes_max, end, then), None)

    def _collect(self, sealed: SealedRead, window: Window | None) -> Read | Pending[Read]:
        """Add data to a read until it is complete or must wait for a disk. Raises Corrupt.

        Args:
            window: read buffer to use first.
        """
        partition, position = sealed.partition, BEGINNING
        tail_offset = partition.tail_offset
        last = min(sealed.end, tail_offset)
        while sealed.at < last and (sealed.bytes_left > 0 or not sealed.chunks):
            if window is None and (stop := self._cold.resume(partition.incarnation, sealed.at)) is not None:
                window, position = stop
            if window is None:
                window = self._cold.find(partition.incarnation, sealed.at) or self._glance(sealed)
            if window is None:
                return self._fetch(sealed)
            before = sealed.at
            position = sealed.take(window, position)
            if sealed.at == before or sealed.at < window.end or sealed.bytes_left <= 0:
                break  # the next batch does not fit, or is damaged
            if sealed.at < last and sealed.bytes_left > 0:
                window, position = None, BEGINNING
        if sealed.at >= tail_offset:
            return self._continue(partition, sealed.chunks, sealed.at, sealed.bytes_left, sealed.end)
        if window is not None and window.was_waited_for:
            self._read_ahead(sealed, window)
        stop = None if window is None else Stop(window, position)
        self._cold.was_read(partition.incarnation, sealed.offset, sealed.at, stop)
        return Read(sealed.chunks, sealed.at, partition.readable_offset, NO_PIN)

    def _glance(self, sealed: SealedRead) -> Window | None:
        partition, at = sealed.partition, sealed.at
        if self._cold.is_under_way((partition.incarnation, at)):
            return None
        segment = self.segment(partition.runs.entry(partition.runs.find_offset(at))[3])
        more = self._is_sequential(sealed)
        return self._cold.glance(segment, partition.incarnation, at, sealed.bytes_left, sealed.end, more=more)

    def _fetch(self, sealed: SealedRead) -> Pending[Read]:
        """Request the data that a read waits for. Sequential readers get a whole read buffer."""
        waiter: Pending[Read] = pending(sealed.then)
        sealed.then = waiter
        key = (sealed.partition.incarnation, sealed.at)
        segments = self._cold.requested(key) or self._segments_from(sealed.partition, sealed.at)
        bytes_left, end = (WINDOW_BYTES, NO_END) if self._is_sequential(sealed) else (sealed.bytes_left, sealed.end)
        self._cold.request(key, segments, partial(self._window_arrived, sealed, waiter, segments), bytes_left, end)
        return waiter

    def _is_sequential(self, sealed: SealedRead) -> bool:
        return self._cold.is_sequential(sealed.partition.incarnation, sealed.offset)

    def _read_ahead(self, sealed: SealedRead, window: Window) -> None:
        """Request the next read buffer if a reader is past the middle of ``window``.

        The new buffer begins at the end of ``window``, or at the reader's position if little of ``window`` is left.
        """
        partition, at = sealed.partition, sealed.at
        if (window.end - at) * 2 > window.end - window.first:
            return
        start = at if window.is_nearly_over(at) else window.end
        if start >= min(sealed.end, partition.tail_offset):
            return
        if sealed.bytes_max < WINDOW_BYTES and not self._is_sequential(sealed):
            return
        if not self._cold.begins_within(partition.incarnation, at, window.end):
            self._cold.request(
                (partition.incarnation, start), self._segments_from(partition, start), None, WINDOW_BYTES
            )

    def _segments_from(self, partition: FilePartition, offset: int) -> list[Segment]:
        """Return the segments with a partition's records from ``offset`` on, at most as many as one read buffer can
        hold.
        """
        number = partition.runs.find_offset(offset)
        stop = min(number + PIECES_MAX, len(partition.runs))
        return [self.segment(partition.runs.entry(index)[3]) for index in range(number, stop)]

    def _continue(self, partition: FilePartition, chunks: list[memoryview], at: int, bytes_left: int, end: int) -> Read:
        """Complete a read of segments with as many batches from the journal as fit."""
        if bytes_left > 0 and at < end:
            self._check_open()
            start, stop, size = partition.tail.take(at, bytes_left, end)
            if stop > start and size <= bytes_left and self._warm_stop(partition, start, stop) == stop:
                return self._read_tail(partition, start, stop, size, chunks)
        return Read(chunks, at, partition.readable_offset, NO_PIN)

    def _window_arrived(
        self,
        sealed: SealedRead,
        waiter: Pending[Read],
        requested: Sequence[Segment],
        window: Window | BrokerError | None,
    ) -> None:
        """Continue a read with the buffer that has arrived. Repeat the read if one of its segments was replaced.

        Raises Corrupt if a segment is missing although it was not replaced.

        Args:
            requested: segments from which the buffer was read.
        """
        partition = sealed.partition
        if not isinstance(window, Window):
            listed = [other.segment for other in self._segments.by_location.values()] if window is None else []
            if window is None and all(segment in listed for segment in requested):
                window = blob_corrupt(requested[0].name, "the blob of the segment is missing")
            self._retried(partition, sealed.offset, sealed.bytes_max, sealed.end, waiter, window)
            return
        if waiter.is_over:
            return
        try:
            partition.check_range(sealed.offset)
            found = self._collect(sealed, window)
        except BrokerError as refused:
            waiter(refused)
            return
        if isinstance(found, Read):
            waiter(found)


@cython.cclass
class SealedRead:
    """A read that begins in a segment.

    Attributes:
        chunks: data so far.
        at: offset after ``chunks``.
        bytes_left: remaining size limit.
    """

    if not cython.compiled:  # when compiled, reader.pxd declares the fields
        __slots__ = ("at", "bytes_left", "bytes_max", "chunks", "end", "offset", "partition", "then")

    def __init__(self, partition: FilePartition, offset: int, bytes_max: int, end: int, then: Completion[Read]) -> None:
        self.partition: Final = partition
        self.offset: Final = offset
        self.bytes_max: Final = bytes_max
        self.end: Final = end
        self.then = then
        self.chunks: Final[list[memoryview]] = []
        self.at = offset
        self.bytes_left = bytes_max

    def take(self, window: Window, position: PiecePosition) -> PiecePosition:
        """Add as many batches of a read buffer as fit, and return the position reached.

        Raises Corrupt if the data begins with damage.

        Args:
            position: where to begin the search for the offset.
        """
        self.at, self.bytes_left, position = read_pieces(
            window.pieces, self.at, self.bytes_left, self.end, self.chunks, position
        )
        if not self.chunks:
            raise blob_corrupt(f"partition {self.partition.incarnation}", f"batches are damaged offset={self.at}")
        return position


def _join(published: PublishedBatch, body: Buffer) -> bytearray:
    joined = bytearray(published.header)
    joined += memoryview(body)[HEADER_BYTES:]
    return joined


def _released(pin: SlotsPin, then: Completion[int]) -> Completion[int]:
    def completed(found: int | BrokerError) -> None:
        pin.release()
        then(found)

    return completed


@cython.cfunc
@cython.exceptval(-1, check=True)
def _entry_offset(partition: FilePartition, number: cython.Py_ssize_t) -> cython.longlong:
    """Return the first offset of tail index entry ``number``, or the end of the tail if there is no such entry."""
    return partition.tail.entry(number)[0] if number < len(partition.tail) else partition.next_offset


def _nothing() -> None:
    pass
