"""Compaction: retain the newest record of each key of a partition (decision 0105).

A pass first reads the records that were never compacted, and fills a table with the newest offset of each key. Then it
rewrites the partition's data in segments, a few parts at a time, oldest first. It drops records for which the table has
a newer one. The remaining records retain offset, address and time.

* Memory is bounded: one table, and one buffer for reads.
* Each step reads a bounded number of bytes, in the thread that also seals.
* If a pass stops between steps, the newest record of every key still exists.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from polywire.log.partition.partition import FilePartition
from polywire.log.partition.reader import Reader
from polywire.log.segments.format import SegmentInfo
from polywire.log.segments.key_offset_map import COMPRESSED, NOTED_ALL, KeyOffsetMap
from polywire.log.segments.merge import Merge, Source
from polywire.log.segments.segment import Segment
from polywire.log.segments.writer import Part, RunSource, StoredParts, write_segment
from polywire.records.batch import keep
from polywire.records.columns import BatchFlags
from polywire.records.compression import Compression, compress_body, expand_body
from polywire.records.fields import header_fields
from polywire.store.base import Store
from polywire.types import Buffer

KEY_SLOTS: Final = 1 << 20  # 24 MiB: 786,432 keys per pass
STEP_BYTES_MAX: Final = 64 * 1024 * 1024  # bytes read by one step, for which sealing a journal file may have to wait
DIRTY_BYTES_MIN: Final = 1024 * 1024  # a pass over less data is not worth a new segment
HOLE_MAX: Final = 1 << 30  # longest range of offsets or address bytes without a record; deltas in a batch have 32 bits
YIELD_BATCHES: Final = 64  # batches processed before the event loop's thread may take the GIL
NEVER: Final = 2**62

_facts: Final = header_fields("flags", "record_count", "base_offset", "base_address", "address_span", "offset_span")
_length: Final = header_fields("length")
"""Flags, records, offset, address, address span, offset span (decision 0101)."""


class Compaction:
    """One pass of log compaction over one partition: first collect the newest offset of each key, then rewrite.

    Segments are rewritten in order, and each step is synced before the next. So if a key's newest record is a null, it
    is removed only after all older records of the key.

    Attributes:
        noting: whether the newest offset of each key is still being collected.
        noted: end of the offsets whose keys are collected. They begin where the last pass ended.
        written: end of the rewritten offsets.
    """

    __slots__ = ("_table", "noted", "noting", "null_time_us", "partition", "written")

    def __init__(self, partition: FilePartition, null_time_us: int) -> None:
        self.partition: Final = partition
        self.null_time_us: Final = null_time_us
        self._table: Final = KeyOffsetMap(KEY_SLOTS)
        self.noted = partition.clean_offset
        self.written = 0
        self.noting = True

    def segments(self, reader: Reader) -> list[Segment]:
        """Return the segments of the next step, or none if all keys are collected or everything is rewritten."""
        partition, size = self.partition, 0
        found: list[Segment] = []
        if self.noting:
            number = max(partition.runs.find_offset(self.noted), 0)
            end = NEVER
        else:
            number = 0 if not self.written else partition.runs.find_offset(self.written - 1) + 1
            end = self.noted
        while number < len(partition.runs) and partition.runs.entry(number)[0] < end:
            entry = partition.runs.entry(number)
            size += entry[2]
            if found and size > STEP_BYTES_MAX:
                break
            found.append(reader.segment(entry[3]))
            number += 1
        return found

    def sources(self, segments: Sequence[Segment]) -> list[Source]:
        """Return the partition's records in these segments.

        While keys are collected, skip segments whose keys are collected already. Call it in a thread, because footers
        may have to be read. Raises BlobMissing or Corrupt.
        """
        runs = [(segment, segment.run(self.partition.incarnation)) for segment in segments]
        return [source for source in runs if not self.noting or source[1].next_offset > self.noted]

    def note(self, sources: Sequence[Source]) -> tuple[int, bool]:
        """Collect the keys of these records, in a thread.

        Return (end of the offsets collected, whether the table of keys is full). Raises Corrupt.
        """
        for part in StoredParts(sources, None):
            for batch in self._left_to_note(part):
                plain = expand_body(batch)
                if self._table.note(plain) != NOTED_ALL:
                    return _facts(batch)[2], True
                time.sleep(0)
        return sources[-1][1].next_offset, False

    def _left_to_note(self, part: Part) -> Iterator[memoryview]:
        """Collect the keys of uncompressed batches.

        Yield the batches whose keys were not collected, because they are compressed or the table is full.
        """
        chunk, at = memoryview(part.base), 0
        end = part.positions[-1] + part.lengths[-1]
        while at < end:
            stopped = self._table.note(chunk[at:end])
            if stopped == NOTED_ALL:
                return
            at += stopped
            length = _length(chunk, at)[0]
            yield chunk[at : at + length]
            at += length

    def write(self, store: Store, name: str, merge: Merge) -> SegmentInfo | None:
        """Write a segment with the records that remain, in a thread. Return None if none remain.

        Raises Corrupt, and errors of the store.
        """
        ((incarnation, sources),) = merge.runs.items()
        parts = _KeptParts(self._table, sources, merge, noted_end=self.noted, null_time_us=self.null_time_us)
        if not parts.loses():
            return None
        return write_segment(store, name, [RunSource(incarnation, parts, compression=self.partition.compression)])


class _KeptParts(Iterable[Part]):
    """The records that compaction retains, as batches that cover the offsets of the old segments without a gap."""

    def __init__(
        self,
        table: KeyOffsetMap,
        sources: Sequence[Source],
        merge: Merge,
        *,
        noted_end: int,
        null_time_us: int,
    ) -> None:
        self._table = table
        self._parts = StoredParts(sources, merge.damaged.append)
        # first offset and address of the runs
        self._start = (sources[0][1].first_offset, sources[0][1].first_address)
        self._end = sources[-1][1].next_offset
        self._limits = {"noted_end": noted_end, "null_time_us": null_time_us}

    def loses(self) -> bool:
        for part in self._parts:
            counts = self._table.count_kept(part.base, part.positions, **self._limits)
            for number, counted in enumerate(counts):
                facts = _facts(part.base, part.positions[number])
                kept = len(self._rows(_batch_of(part, number))) if counted == COMPRESSED else counted
                if kept < facts[1]:
                    return facts[2] + facts[5] < self._end or facts[1] > kept + 1  # the last record is always kept
                if number % YIELD_BATCHES == 0:
                    time.sleep(0)
        return False

    def _rows(self, batch: Buffer) -> array[int]:
        return self._table.rows_kept(expand_body(batch), **self._limits)

    def __iter__(self) -> Iterator[Part]:
        covered = self._start
        for part in self._parts:
            counts = self._table.count_kept(part.base, part.positions, **self._limits)
            begun = 0  # start of a sequence of batches that stay unchanged
            for number, kept in enumerate(counts):
                _, records, offset, address, address_span, span = _facts(part.base, part.positions[number])
                if kept == records and covered == (offset, address):
                    covered = (offset + span, address + address_span)
                    continue
                yield from _stretch(part, begun, number)
                begun = number + 1
                if number % YIELD_BATCHES == 0:
                    time.sleep(0)
                batch = self._kept(_batch_of(part, number), covered)
                if batch is not None:
                    _, _, offset, address, address_span, span = _facts(batch)
                    covered = (offset + span, address + address_span)
                    yield Part(batch, array("q", (0,)), array("q", (len(batch),)), verified=True)
            yield from _stretch(part, begun, len(counts))

    def _kept(self, batch: memoryview, covered: tuple[int, int]) -> Buffer | None:
        """Return a batch with the remaining records of ``batch``, or None if there are none.

        The returned batch begins at ``covered``, so that it covers removed offsets before it. To cover removed offsets
        at the end, the last record of the segments is always retained. A record is also retained if the removed range
        before it becomes too wide for a batch.

        Args:
            covered: offset, and byte position for Kafka 0.7, after the previous batch.
        """
        flags, records, offset, address, address_span, span = _facts(batch)
        plain = expand_body(batch)
        rows = self._rows(plain)
        last = offset + span == self._end
        wide = max(offset + span - covered[0], address + address_span - covered[1]) > HOLE_MAX
        if (last or (wide and not rows)) and (not rows or rows[-1] != records - 1):
            rows.append(records - 1)
        if not rows:
            return None
        if len(rows) == records and covered == (offset, address):
            return batch
        kept = keep(plain, rows, base_offset=covered[0], base_address=covered[1])
        return _packed_as(kept, flags)


def _stretch(part: Part, start: int, stop: int) -> Iterator[Part]:
    if start < stop:
        yield Part(part.base, part.positions[start:stop], part.lengths[start:stop], part.verified)


def _batch_of(part: Part, number: int) -> memoryview:
    return memoryview(part.base)[part.positions[number] : part.positions[number] + part.lengths[number]]


def _packed_as(batch: Buffer, flags: int) -> Buffer:
    if flags & BatchFlags.LZ4:
        return compress_body(batch, Compression.LZ4)
    return compress_body(batch, Compression.ZSTD) if flags & BatchFlags.ZSTD else batch


def is_worth_a_pass(partition: FilePartition) -> bool:
    """Return whether at least half of the data in segments, and at least ``DIRTY_BYTES_MIN``, was never compacted."""
    runs, dirty = partition.runs, 0
    first = 0 if not partition.clean_offset else runs.find_offset(partition.clean_offset - 1) + 1
    for number in range(first, len(runs)):
        dirty += runs.entry(number)[2]
        if dirty >= DIRTY_BYTES_MIN and 2 * dirty >= partition.sealed_bytes:
            return True
    return False
