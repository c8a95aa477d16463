"""The log's state in memory, and how each kind of journal entry changes it.

Writes and recovery apply entries with the same functions. The same entries in the same order give the same state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from polywire.errors import ErrorCode, Missing
from polywire.log.journal.staging import StagedBatch, StagedToken, Staging
from polywire.log.partition.partition import PUBLISHED, PUBLISHED_SHIFT, FilePartition
from polywire.log.partition.reader import PublishedBatch, PublishedGroup, Reader
from polywire.log.partition.run_index import RunIndex
from polywire.log.segments.segment_set import SegmentSet
from polywire.records.fields import header_fields

_numbers: Final = header_fields("base_offset", "base_address", "append_time_us")
# runs that a change releases at once; if a topic is dropped, thousands of partitions may release runs
LOST_AT_ONCE_MAX: Final = 8


class Contents(msgspec.Struct):
    """The partitions that a journal file changes and that are not dropped, in order, and its unpublished batches."""

    partitions: dict[FilePartition, None] = msgspec.field(default_factory=dict)
    staged: list[StagedBatch] = msgspec.field(default_factory=list)


class Image(msgspec.Struct, frozen=True):
    """Copy of the log's state after the journal write ``sequence``.

    Attributes:
        partitions: packed partitions.
        staged: tokens that had unpublished batches then. Batches added to a token later are in later journal files.
    """

    sequence: int
    partitions: Sequence[bytes]
    staged: Sequence[StagedToken]


class LogState:
    """The log's partitions, segments and unpublished batches.

    Attributes:
        partitions: partitions that are not dropped, by incarnation.
        contents: contents of journal files, by serial.
        clean: offset up to which each partition is compacted, by incarnation.
    """

    def __init__(self, reader: Reader, segments: SegmentSet, staging: Staging, *, hides_unsynced: bool) -> None:
        self.reader: Final = reader
        self.segments: Final = segments
        self.staging: Final = staging
        self.partitions: Final[dict[int, FilePartition]] = {}
        self.contents: Final[dict[int, Contents]] = {}
        self.clean: Final[dict[int, int]] = {}
        self._hides_unsynced: Final = hides_unsynced
        # (runs that are no longer needed but still counted by their segments, whether their partition was dropped)
        self._released: deque[tuple[RunIndex, bool]] = deque()
        # encoded state of each partition, as of the last ``image``
        self._packed: dict[int, bytes] = {}
        self._next_published = 0

    # Partitions

    def find(self, incarnation: int) -> FilePartition:
        """Return an open partition. Raises Missing(PARTITION_MISSING)."""
        found = self.partitions.get(incarnation)
        if found is None or found.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition incarnation={incarnation}")
        return found

    def make(self, incarnation: int) -> FilePartition:
        """Create a partition. ``find`` returns it once its attribute ``opened`` is set."""
        assert incarnation not in self.partitions, "incarnations are never used again"
        made = FilePartition(incarnation, self.reader, hides_unsynced=self._hides_unsynced)
        self.partitions[incarnation] = made
        return made

    def drop(self, partition: FilePartition) -> None:
        partition.ended = True
        self.partitions.pop(partition.incarnation, None)
        self.clean.pop(partition.incarnation, None)
        self._packed.pop(partition.incarnation, None)
        for contents in self.contents.values():  # else it would use memory until the journal file is full
            contents.partitions.pop(partition, None)
        partition.first_offset = partition.next_offset
        self._forget(partition.drop_tail(partition.next_offset))
        self._release(partition.take_runs(), dropped=True)

    def trim(self, partition: FilePartition, first_offset: int, end: int) -> None:
        """Trim records below ``first_offset``. ``end`` is the end of the partition's indexed batches."""
        runs, published = partition.trim(first_offset, end)
        self._forget(published)
        self._release(runs, dropped=False)

    def _release(self, runs: RunIndex, *, dropped: bool) -> None:
        """Record that these batches in segments are no longer needed.

        A topic may have millions of index entries, so most are subtracted from their segments' counts later.
        """
        self._released.append((runs, dropped))
        if len(self._released) == 1 and len(runs) <= LOST_AT_ONCE_MAX:
            self.subtract_released(LOST_AT_ONCE_MAX)

    @property
    def has_released(self) -> bool:
        """Whether segments contain batches that are no longer needed but are still counted as needed."""
        return bool(self._released)

    def subtract_released(self, count_max: int) -> None:
        """Update the counts of segments for up to ``count_max`` index entries that are no longer needed."""
        while self._released and count_max > 0:
            runs, dropped = self._released[0]
            count = min(len(runs), count_max)
            for location, size in zip(*runs.locations_and_sizes(0, count), strict=True):
                self.segments.release(location, size, dropped=dropped)
            runs.drop_front(count)
            count_max -= count
            if not len(runs):
                self._released.popleft()

    def cleaned(self, partition: FilePartition, offset: int) -> None:
        """Record that a compaction pass ended at ``offset``. Does nothing if the partition was dropped meanwhile."""
        partition.clean_offset = offset
        if not partition.ended:
            self.clean[partition.incarnation] = offset

    # Staging

    def add_published(self, published: PublishedBatch) -> int:
        """Add a batch that is published or about to be, and return the number by which the partition's index refers to
        it.
        """
        number = self._next_published
        self._next_published += 1
        self.reader.published[number] = published
        return number

    def attach(self, partition: FilePartition, header: bytes, batch: StagedBatch, serial: int) -> None:
        """Add a published batch to its partition.

        Args:
            header: the batch's header, in which the publish has set the offsets.
            serial: serial of the journal file with the publish.
        """
        number = self.add_published(PublishedBatch(PublishedGroup(header, serial), 0, batch))
        offset, address, time_us = _numbers(header)
        batch.published = True
        partition.published.append(number)
        partition.tail.append(offset, number << PUBLISHED_SHIFT, batch.length, PUBLISHED, address, time_us)
        partition.tail_bytes += batch.length

    def unstage(self, tokens: Iterable[bytes]) -> None:
        """Remove tokens. Their published batches stay needed until they are in segments of their partition."""
        for staged in self.staging.remove(tokens):
            for batch in staged.batches:
                if not batch.published:
                    self._unneed(batch)

    def _forget(self, published: Iterable[int]) -> None:
        for number in published:
            self._unneed(self.reader.published.pop(number).batch)

    def _unneed(self, batch: StagedBatch) -> None:
        if batch.needed:
            batch.needed = False
            if batch.location >= 0:
                self.segments.by_location[batch.location].staged -= 1
                self.segments.drop(batch.location, batch.length)

    # Sealing

    def seal_tail(self, partition: FilePartition, next_offset: int) -> None:
        """Record that all records below ``next_offset`` are in segments."""
        self._forget(partition.drop_tail(next_offset))

    def image(self, sequence: int, touched: Iterable[FilePartition]) -> Image:
        """Return a copy of the state after the journal write ``sequence``.

        Args:
            touched: partitions that changed since the last copy.
        """
        for partition in touched:
            if partition.opened and self.partitions.get(partition.incarnation) is partition:
                self._packed[partition.incarnation] = partition.pack()
            else:  # a drop that is being written
                self._packed.pop(partition.incarnation, None)
        return Image(sequence, list(self._packed.values()), list(self.staging))
