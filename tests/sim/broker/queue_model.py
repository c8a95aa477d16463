"""The deliveries and outcomes of records in share groups, as their workers know them.

Each event belongs to a moment of the history. A start that recovers an earlier moment removes the events after it, so
delivery counts and outcomes must be exact after every stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

LETTERS: Final = "dead"  # the dead-letter topic

SeenKey = tuple[str, int]
"""Group, and incarnation of the partition."""


class Kind(Enum):
    """Kinds of events."""

    BEGIN = "begin"
    FORGET = "forget"
    DELIVER = "deliver"
    LATER = "later"
    END = "end"
    LETTER = "letter"


_ENDS: Final = (Kind.END, Kind.LETTER)


class Event(NamedTuple):
    """One event of a record. value: system time in milliseconds at which a delayed retry is due."""

    moment: int
    kind: Kind
    offset: int
    value: int = 0


class Times(NamedTuple):
    """When a record is due and when its time is over, in milliseconds since 1970."""

    due_ms: int | None
    expires_ms: int | None

    def is_over(self, now_ms: int) -> bool:
        """Return whether the time of the record is over."""
        return self.expires_ms is not None and self.expires_ms <= now_ms


NO_TIMES: Final = Times(None, None)


@dataclass(slots=True)
class Seen:
    """One group in one partition.

    begin: the offset from which the group reads, None without progress. counts: deliveries by offset. later: due times of
    delayed retries. ended: records that a worker accepted or rejected. letters: records with a copy in ``LETTERS``.
    """

    events: list[Event] = field(default_factory=list)
    begin: int | None = None
    counts: dict[int, int] = field(default_factory=dict)
    later: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    letters: set[int] = field(default_factory=set)

    def add(self, event: Event) -> None:
        """Add an event."""
        self.events.append(event)
        match event.kind:
            case Kind.BEGIN | Kind.FORGET:
                self._clear()
                self.begin = event.offset if event.kind is Kind.BEGIN else None
            case Kind.DELIVER:
                self.counts[event.offset] = self.counts.get(event.offset, 0) + 1
                self.later.pop(event.offset, None)
            case Kind.LATER:
                self.later[event.offset] = event.value
            case Kind.END:
                self.ended.add(event.offset)
            case Kind.LETTER:
                self.letters.add(event.offset)

    def ended_at(self, offset: int) -> int:
        """Return the moment since which a record has ended, 0 if it has not."""
        ends = (event.moment for event in reversed(self.events) if event.offset == offset and event.kind in _ENDS)
        return next(ends, 0)

    def _clear(self) -> None:
        self.begin = None
        for known in (self.counts, self.later, self.ended, self.letters):
            known.clear()

    def settle(self, moment: int) -> None:
        """Account for a start with the state of a moment."""
        events, self.events = self.events, []
        self._clear()
        for event in events:
            if event.moment <= moment:
                self.add(event._replace(moment=0))


class Queues:
    """All share groups. times: of records that have some, by incarnation and offset. latest_ms: the latest system time
    so far.
    """

    def __init__(self) -> None:
        self.seen: Final[dict[SeenKey, Seen]] = {}
        self.times: Final[dict[int, dict[int, Times]]] = {}
        self.latest_ms = 0

    def of(self, group: str, incarnation: int) -> Seen:
        """Return what a group has done with a partition."""
        return self.seen.setdefault((group, incarnation), Seen())

    def times_of(self, incarnation: int, offset: int) -> Times:
        """Return the times of a record."""
        return self.times.get(incarnation, {}).get(offset, NO_TIMES)

    def settle(self, moment: int, ends: Mapping[int, int]) -> None:
        """Account for a start with the state of a moment. ends: next offsets of partitions."""
        for key, seen in list(self.seen.items()):
            if key[1] in ends:
                seen.settle(moment)
            else:
                del self.seen[key]
        for incarnation, times in list(self.times.items()):
            end = ends.get(incarnation, 0)
            for offset in [offset for offset in times if offset >= end]:
                del times[offset]
