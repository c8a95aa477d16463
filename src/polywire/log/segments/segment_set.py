"""All segments of a log: their names, which of their data is still needed, and when a segment may be deleted.

A segment stays in the set until the journal has recorded its removal. Its number is never reused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from polywire.clock import SYSTEM_CLOCK, Clock
from polywire.log.segments.damage import DamageNotes
from polywire.log.segments.format import SegmentInfo
from polywire.log.segments.segment import EntryCache, Segment
from polywire.store.base import Store

SEGMENTS: Final = "segments"
SNAPSHOTS: Final = "snapshots"
_START_SHIFT: Final = 32
_NEVER_US: Final = 2**63 - 1


def segment_name(number: int) -> str:
    return f"{SEGMENTS}/{number >> _START_SHIFT:08x}-{number & 0xFFFFFFFF:08x}.pws"


class Sealed(msgspec.Struct, eq=False):
    """One segment of the log.

    Attributes:
        number: number in the journal, which also identifies the segment after a restart.
        location: number by which the indexes of this process refer to the segment. It changes at each start.
        live: number of partitions and unpublished batches for which it is needed.
        live_bytes: total size of their data in it.
        staged: number of unpublished batches for which it is needed.
        begun_us: earliest append time of its batches.
        lost_partition: whether it holds data of a dropped partition.
        lost_at_us: time when this was noticed, 0 before.
        damaged: whether a checksum did not match. If so, the segment is never rewritten.
    """

    segment: Segment
    number: int
    location: int
    live: int = 0
    live_bytes: int = 0
    staged: int = 0
    begun_us: int = _NEVER_US
    lost_partition: bool = False
    lost_at_us: int = 0
    damaged: bool = False

    def keep(self, size: int, begun_us: int) -> None:
        self.live += 1
        self.live_bytes += size
        self.begun_us = min(self.begun_us, begun_us)

    def keep_staged(self, size: int) -> None:
        self.live += 1
        self.live_bytes += size
        self.staged += 1


class SegmentSet:
    """All segments of a log.

    Attributes:
        by_location: segments whose files must be retained, by location.
        dead: segments without needed data.
    """

    def __init__(self, store: Store, start: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store = store
        self._clock = clock
        self._cache = EntryCache()
        self.notes: Final = DamageNotes()
        self._start: Final = start
        self._counter = 0
        self._next_location = 0
        self.by_location: Final[dict[int, Sealed]] = {}
        self.dead: Final[list[Sealed]] = []
        self.snapshots: Final[set[str]] = set()
        """Snapshots that a journal group lists, and one that was written to be listed."""
        self._leaving: Final[set[int]] = set()
        """Locations of segments whose removal was written to the journal, but perhaps not yet synced."""

    def next_number(self) -> int:
        self._counter += 1
        return self._start << _START_SHIFT | self._counter

    def add(self, info: SegmentInfo, number: int, *, keep: bool = True) -> Sealed:
        """Add a segment that was written, or that recovery found in the journal.

        Args:
            keep: cache its footer for later reads.
        """
        if keep:
            self._cache.footers.put(info.name, info)
        sealed = Sealed(Segment(self._store, info, self._cache, self.notes, self._clock), number, self._next_location)
        self._next_location += 1
        self.by_location[sealed.location] = sealed
        return sealed

    def settle(self, sealed: Iterable[Sealed]) -> None:
        """Add those of these segments that have no needed data to ``dead``."""
        self.dead.extend(item for item in sealed if item.live == 0)

    def drop(self, location: int, size: int) -> None:
        """Record that a partition's data of this size, or an unpublished batch, is no longer needed."""
        sealed = self.by_location[location]
        sealed.live -= 1
        sealed.live_bytes -= size
        assert sealed.live >= 0, "a run is dropped once"
        if sealed.live == 0 and location not in self._leaving:
            self.dead.append(sealed)

    def release(self, location: int, size: int, *, dropped: bool) -> None:
        """Record that a partition's data is no longer needed. Its segment may already be removed.

        Args:
            dropped: whether the partition was dropped.
        """
        sealed = self.by_location.get(location)
        if sealed is not None:
            sealed.lost_partition |= dropped
            self.drop(location, size)

    def leave(self, replaced: Iterable[Sealed]) -> list[Sealed]:
        """Reserve replaced segments for removal and return them.

        The caller must write their removal to the journal before it calls ``removed``.
        """
        leaving = [
            item for item in replaced if item.location in self.by_location and item.location not in self._leaving
        ]
        self._leaving.update(item.location for item in leaving)
        self.dead[:] = [item for item in self.dead if item.location not in self._leaving]
        return leaving

    def take_dead(self, count_max: int) -> list[Sealed]:
        """Reserve up to ``count_max`` segments without needed data for removal and return them.

        The caller must write their removal to the journal before it calls ``removed``.
        """
        dead = self.dead[:count_max]
        del self.dead[:count_max]
        self._leaving.update(sealed.location for sealed in dead)
        return dead

    def removed(self, dead: Iterable[Sealed]) -> list[str]:
        """Remove segments whose removal is durable. Return the names of the blobs to delete."""
        names = []
        for sealed in dead:
            del self.by_location[sealed.location]
            self._leaving.discard(sealed.location)
            self._cache.drop(sealed.segment.name)
            names.append(sealed.segment.name)
        return names

    def names(self) -> frozenset[str]:
        """Return the names of all files in use. Any other file that existed before may be deleted."""
        return frozenset([*self.snapshots, *(sealed.segment.name for sealed in self.by_location.values())])

    def numbers(self) -> list[int]:
        """Return the segments that a snapshot taken now must list, which excludes those being removed."""
        return [sealed.number for sealed in self.by_location.values() if sealed.location not in self._leaving]
