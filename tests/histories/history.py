"""What clients asked a broker and what they were told: the values that checkers judge.

Promises: values only; instants are nanoseconds of the system's monotonic clock, the same in every process of the machine. Must not know: who
makes a history, and what is wrong with one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, TypeVar

NO_OFFSET: Final = -1


class Outcome(Enum):
    """What the one who asked knows of it: done; not done, and never will be; or nothing, so that it may be done at any time after."""

    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class Place(NamedTuple):
    """Where a record is."""

    topic: str
    partition: int
    offset: int


class Shared(NamedTuple):
    """A partition that a group's members share out."""

    group: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a client asked: who, when it began to ask, and when it knew the outcome."""

    who: str
    begun: int
    ended: int


@dataclass(frozen=True, slots=True)
class Produce(Event):
    """Records for one topic, in order, whose values nobody else writes.

    places: of each record, when that was told. durable: an acknowledgement says that they survive the death of the process.
    """

    topic: str
    values: tuple[bytes, ...]
    outcome: Outcome
    places: tuple[Place, ...] = ()
    durable: bool = True


@dataclass(frozen=True, slots=True)
class Fetch(Event):
    """Records that were shown: their values at the offsets from ``place`` on, as the client told them.

    member_of: the group on whose behalf they were read.
    """

    place: Place
    offsets: tuple[int, ...]
    values: tuple[bytes, ...]
    member_of: str = ""


@dataclass(frozen=True, slots=True)
class Assignment(Event):
    """A member was told which partitions are its own in a generation."""

    group: str
    topic: str
    generation: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Commit(Event):
    """A member stored a position. generation: of its assignment."""

    shared: Shared
    offset: int
    generation: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Position(Event):
    """Somebody was told a group's position; None: there was none."""

    shared: Shared
    offset: int | None


class Write(NamedTuple):
    """A record of a transaction, with a value that no other has, and the record that it was made of."""

    topic: str
    value: bytes
    source: Place


@dataclass(frozen=True, slots=True)
class Transaction(Event):
    """Records that appear together or not at all, and the positions that move with them. One whose commit nobody has asked for is REFUSED:
    it will never be done. ``who`` is its group as well.
    """

    writes: tuple[Write, ...]
    positions: tuple[tuple[Shared, int], ...]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Fault(Event):
    """Something that was done to the broker, or to a client; ``who`` says what."""


Kind = TypeVar("Kind", bound=Event)


@dataclass(slots=True)
class History:
    """All of it, in the order in which outcomes were known, and what there was in the end.

    stored: every record that could be read in the end, by topic and partition, in order. positions: where groups stood.
    """

    events: list[Event] = field(default_factory=list)
    stored: dict[tuple[str, int], list[tuple[int, bytes]]] = field(default_factory=dict)
    positions: dict[Shared, int | None] = field(default_factory=dict)

    def of(self, kind: type[Kind]) -> Iterator[Kind]:
        """The events of a kind."""
        return (event for event in self.events if isinstance(event, kind))

    def counts(self) -> Counter[str]:
        """What happened how often."""
        found: Counter[str] = Counter()
        for event in self.events:
            outcome = getattr(event, "outcome", None)
            name = type(event).__name__.lower()
            found[event.who if name == "fault" else name if outcome is None else f"{name} {outcome.value}"] += 1
            if isinstance(event, Produce) and event.outcome is Outcome.DONE:
                found["records acknowledged"] += len(event.values)
            if isinstance(event, Fetch):
                found["records read"] += len(event.values)
        found["records stored"] = sum(map(len, self.stored.values()))
        return found
