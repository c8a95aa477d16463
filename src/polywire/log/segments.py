"""All sealed segments of a log: their names, which of their runs still matter, and when a blob may go.

Promises: a segment stays listed until its removal was journalled; its number is never used again. Must not know: the journal, partitions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from polywire.log.segment import EntryCache, Segment, SegmentInfo
from polywire.store.base import Store

SEGMENTS: Final = "segments"
SNAPSHOTS: Final = "snapshots"
_START_SHIFT: Final = 32


def segment_name(number: int) -> str:
    """Blob name of a segment."""
    return f"{SEGMENTS}/{number >> _START_SHIFT:08x}-{number & 0xFFFFFFFF:08x}.pws"


class Sealed:
    """One segment of the log. ``live`` counts runs and staged batches in it that are still needed."""

    __slots__ = ("live", "number", "place", "segment")

    def __init__(self, segment: Segment, number: int, place: int) -> None:
        self.segment: Final = segment
        self.number: Final = number
        self.place: Final = place
        self.live = 0


class Segments:
    """Guards: ``by_place`` holds every segment whose blob must stay; ``dead`` those of them that nobody needs any more."""

    def __init__(self, store: Store, start: int) -> None:
        self._store = store
        self._cache = EntryCache()
        self._start: Final = start
        self._counter = 0
        self._next_place = 0
        self.by_place: Final[dict[int, Sealed]] = {}
        self.dead: Final[list[Sealed]] = []
        self._leaving: Final[set[int]] = set()
        """Places of segments whose removal is journalled, perhaps not yet on the disk."""

    def next_number(self) -> int:
        """A number for a new segment."""
        self._counter += 1
        return self._start << _START_SHIFT | self._counter

    def add(self, info: SegmentInfo, number: int) -> Sealed:
        """List a segment that was written, or named by recovery."""
        sealed = Sealed(Segment(self._store, info, self._cache), number, self._next_place)
        self._next_place += 1
        self.by_place[sealed.place] = sealed
        return sealed

    def settle(self, sealed: Iterable[Sealed]) -> None:
        """Runs of new segments were handed out: those without any are dead already."""
        self.dead.extend(item for item in sealed if item.live == 0)

    def drop(self, place: int, count: int = 1) -> None:
        """So many runs or staged batches of a segment are not needed any more."""
        sealed = self.by_place[place]
        sealed.live -= count
        assert sealed.live >= 0, "a run is dropped once"
        if sealed.live == 0:
            self.dead.append(sealed)

    def take_dead(self, count_max: int) -> list[Sealed]:
        """Segments to be removed; the caller journals that, then calls ``removed``."""
        dead = self.dead[:count_max]
        del self.dead[:count_max]
        self._leaving.update(sealed.place for sealed in dead)
        return dead

    def removed(self, dead: Iterable[Sealed]) -> list[str]:
        """Their removal is durable: returns the names of the blobs to delete."""
        names = []
        for sealed in dead:
            del self.by_place[sealed.place]
            self._leaving.discard(sealed.place)
            self._cache.drop(sealed.segment.name)
            names.append(sealed.segment.name)
        return names

    def numbers(self) -> list[int]:
        """Every segment that a snapshot taken now must list; those whose removal was journalled are not needed by what comes later."""
        return [sealed.number for sealed in self.by_place.values() if sealed.place not in self._leaving]
