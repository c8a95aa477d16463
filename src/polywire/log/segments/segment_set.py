"""All sealed segments of a log: their names, which of their runs still matter, and when a blob may go.

Promises: a segment stays listed until its removal was journalled; its number is never used again. Must not know: the journal, partitions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

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
    """Blob name of a segment."""
    return f"{SEGMENTS}/{number >> _START_SHIFT:08x}-{number & 0xFFFFFFFF:08x}.pws"


class Sealed:
    """One segment of the log.

    ``live`` counts runs and staged batches in it that are still needed, ``live_bytes`` their bytes, ``staged`` the staged ones among them.
    ``begun_us`` is the earliest append time of its runs. ``lost_partition``: it holds bytes of a partition that was dropped, noticed at
    ``lost_at_us``. ``damaged``: a checksum did not match, so it is kept as it is.
    """

    __slots__ = (
        "begun_us",
        "damaged",
        "live",
        "live_bytes",
        "location",
        "lost_at_us",
        "lost_partition",
        "number",
        "segment",
        "staged",
    )

    def __init__(self, segment: Segment, number: int, location: int) -> None:
        self.segment: Final = segment
        self.number: Final = number
        self.location: Final = location
        self.live = 0
        self.live_bytes = 0
        self.staged = 0
        self.begun_us = _NEVER_US
        self.lost_partition = False
        self.lost_at_us = 0
        self.damaged = False

    def keep(self, size: int, begun_us: int) -> None:
        """One more run is needed."""
        self.live += 1
        self.live_bytes += size
        self.begun_us = min(self.begun_us, begun_us)

    def keep_staged(self, size: int) -> None:
        """One more staged batch is needed."""
        self.live += 1
        self.live_bytes += size
        self.staged += 1


class SegmentSet:
    """Guards: ``by_location`` holds every segment whose blob must stay; ``dead`` those of them that nobody needs any more."""

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
        """Snapshots that a group names, and one that was written to be named."""
        self._leaving: Final[set[int]] = set()
        """Locations of segments whose removal is journalled, perhaps not yet on the disk."""

    def next_number(self) -> int:
        """A number for a new segment."""
        self._counter += 1
        return self._start << _START_SHIFT | self._counter

    def add(self, info: SegmentInfo, number: int, *, keep: bool = True) -> Sealed:
        """List a segment that was written, or named by recovery. keep: its footer will soon be asked for."""
        if keep:
            self._cache.footers.put(info.name, info)
        sealed = Sealed(Segment(self._store, info, self._cache, self.notes, self._clock), number, self._next_location)
        self._next_location += 1
        self.by_location[sealed.location] = sealed
        return sealed

    def settle(self, sealed: Iterable[Sealed]) -> None:
        """Runs of new segments were handed out: those without any are dead already."""
        self.dead.extend(item for item in sealed if item.live == 0)

    def drop(self, location: int, size: int) -> None:
        """A run or staged batch of a segment, of so many bytes, is not needed any more."""
        sealed = self.by_location[location]
        sealed.live -= 1
        sealed.live_bytes -= size
        assert sealed.live >= 0, "a run is dropped once"
        if sealed.live == 0 and location not in self._leaving:
            self.dead.append(sealed)

    def lose(self, location: int, size: int, *, dropped: bool) -> None:
        """A run is not needed any more, as may have been noticed late: its segment may be gone. dropped: nor is its partition."""
        sealed = self.by_location.get(location)
        if sealed is not None:
            sealed.lost_partition |= dropped
            self.drop(location, size)

    def leave(self, replaced: Iterable[Sealed]) -> list[Sealed]:
        """Segments that another one replaces: those of them whose removal the caller must journal; it calls ``removed`` afterwards."""
        leaving = [
            item for item in replaced if item.location in self.by_location and item.location not in self._leaving
        ]
        self._leaving.update(item.location for item in leaving)
        self.dead[:] = [item for item in self.dead if item.location not in self._leaving]
        return leaving

    def take_dead(self, count_max: int) -> list[Sealed]:
        """Segments to be removed; the caller journals that, then calls ``removed``."""
        dead = self.dead[:count_max]
        del self.dead[:count_max]
        self._leaving.update(sealed.location for sealed in dead)
        return dead

    def removed(self, dead: Iterable[Sealed]) -> list[str]:
        """Their removal is durable: returns the names of the blobs to delete."""
        names = []
        for sealed in dead:
            del self.by_location[sealed.location]
            self._leaving.discard(sealed.location)
            self._cache.drop(sealed.segment.name)
            names.append(sealed.segment.name)
        return names

    def names(self) -> frozenset[str]:
        """Blobs that a group names, or that were written to be named: nothing else will be of those that are older than the newest."""
        return frozenset([*self.snapshots, *(sealed.segment.name for sealed in self.by_location.values())])

    def numbers(self) -> list[int]:
        """Every segment that a snapshot taken now must list; those whose removal was journalled are not needed by what comes later."""
        return [sealed.number for sealed in self.by_location.values() if sealed.location not in self._leaving]
