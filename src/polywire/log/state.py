"""The log's state in memory, and what each kind of entry does to it: the one state machine that groups being written,
sealing and recovery share.

Promises: the same entries in the same order give the same state. Must not know: when a group is written, files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from polywire.errors import ErrorCode, Missing
from polywire.log.journal.staging import StagedBatch, StagedToken, Staging
from polywire.log.partition.partition import PUBLISHED, PUBLISHED_SHIFT, FilePartition
from polywire.log.partition.reader import PublishedBatch, PublishedGroup, Reader
from polywire.log.partition.run_index import RunIndex
from polywire.log.segments.segment_set import SegmentSet
from polywire.records.fields import header_fields

_numbers: Final = header_fields("base_offset", "base_address", "append_time_us")
LOST_AT_ONCE_MAX: Final = 8  # runs that one change loses at once: a topic loses those of thousands of partitions


@dataclass(slots=True)
class Contents:
    """What one filling of a slot touched: partitions, in order, and batches that were staged in it."""

    partitions: dict[FilePartition, None] = field(default_factory=dict)
    staged: list[StagedBatch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Image:
    """The state after group ``sequence``: packed partitions, and the tokens there were. What was staged later lies in later slots."""

    sequence: int
    partitions: Sequence[bytes]
    staged: Sequence[StagedToken]


class LogState:
    """Guards: ``partitions`` are those not dropped yet; ``_packed`` is their state when the last image was taken."""

    def __init__(self, reader: Reader, segments: SegmentSet, staging: Staging, *, hides_unsynced: bool) -> None:
        self.reader: Final = reader
        self.segments: Final = segments
        self.staging: Final = staging
        self.partitions: Final[dict[int, FilePartition]] = {}
        self.contents: Final[dict[int, Contents]] = {}
        """By serial of slot."""
        self.clean: Final[dict[int, int]] = {}
        """How far partitions were compacted, by incarnation."""
        self._hides_unsynced: Final = hides_unsynced
        self._lost: deque[tuple[RunIndex, bool]] = deque()
        """Runs that nobody needs and segments do not know of, and whether that is because their partition was dropped."""
        self._packed: dict[int, bytes] = {}
        self._next_published = 0

    # Partitions

    def find(self, incarnation: int) -> FilePartition:
        """A partition that has not ended. Raises Missing(PARTITION_MISSING)."""
        found = self.partitions.get(incarnation)
        if found is None or found.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition incarnation={incarnation}")
        return found

    def make(self, incarnation: int) -> FilePartition:
        """A partition that begins; it counts once it is ``opened``."""
        assert incarnation not in self.partitions, "incarnations are never used again"
        made = FilePartition(incarnation, self.reader, hides_unsynced=self._hides_unsynced)
        self.partitions[incarnation] = made
        return made

    def drop(self, partition: FilePartition) -> None:
        """A partition ends: nothing of it is needed any more."""
        partition.ended = True
        self.partitions.pop(partition.incarnation, None)
        self.clean.pop(partition.incarnation, None)
        partition.first_offset = partition.next_offset
        self._forget(partition.drop_tail(partition.next_offset))
        self._lose(partition.take_runs(), dropped=True)

    def trim(self, partition: FilePartition, first_offset: int, end: int) -> None:
        """Records below ``first_offset`` are not needed any more; the partition is indexed up to ``end``."""
        runs, published = partition.trim(first_offset, end)
        self._forget(published)
        self._lose(runs, dropped=False)

    def _lose(self, runs: RunIndex, *, dropped: bool) -> None:
        """Nobody needs these runs. A topic may lose millions at once, so all but few are counted later, some at a time."""
        self._lost.append((runs, dropped))
        if len(self._lost) == 1 and len(runs) <= LOST_AT_ONCE_MAX:
            self.count_lost(LOST_AT_ONCE_MAX)

    @property
    def losing(self) -> bool:
        """Whether segments count as needed for runs that were lost."""
        return bool(self._lost)

    def count_lost(self, count_max: int) -> None:
        """Release up to so many runs that nobody needs from their segments' counts."""
        while self._lost and count_max > 0:
            runs, dropped = self._lost[0]
            count = min(len(runs), count_max)
            for location, size in zip(*runs.lies_in(0, count), strict=True):
                self.segments.lose(location, size, dropped=dropped)
            runs.drop_front(count)
            count_max -= count
            if not len(runs):
                self._lost.popleft()

    def cleaned(self, partition: FilePartition, offset: int) -> None:
        """A pass of compaction has ended here; a partition may have ended before it."""
        partition.clean_offset = offset
        if not partition.ended:
            self.clean[partition.incarnation] = offset

    # Staging

    def add_published(self, published: PublishedBatch) -> int:
        """A batch is published, or about to be; returns its number."""
        number = self._next_published
        self._next_published += 1
        self.reader.published[number] = published
        return number

    def attach(self, partition: FilePartition, header: bytes, batch: StagedBatch, serial: int) -> None:
        """A staged batch became part of its partition, with this header, in a group of this slot."""
        number = self.add_published(PublishedBatch(PublishedGroup(header, serial), 0, batch))
        offset, address, time_us = _numbers(header)
        batch.published = True
        partition.published.append(number)
        partition.tail.append(offset, number << PUBLISHED_SHIFT, batch.length, PUBLISHED, address, time_us)
        partition.tail_bytes += batch.length

    def unstage(self, tokens: Iterable[bytes]) -> None:
        """Tokens are gone. What was published into its partition stays needed until it is sealed."""
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
        """What lies below ``next_offset`` is in segments now."""
        self._forget(partition.drop_tail(next_offset))

    def image(self, sequence: int, touched: Iterable[FilePartition]) -> Image:
        """The state as it is now, after group ``sequence``; ``touched`` are all that changed since the last image."""
        for partition in touched:
            if partition.opened and self.partitions.get(partition.incarnation) is partition:
                self._packed[partition.incarnation] = partition.pack()
            else:
                self._packed.pop(partition.incarnation, None)
        return Image(sequence, list(self._packed.values()), list(self.staging))
