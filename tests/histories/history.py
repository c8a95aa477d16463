"""Requests and responses of clients, as values for the checkers.

Times are nanoseconds of the system's monotonic clock, which all processes of the machine share.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

NO_OFFSET: Final = -1
POWER_LOSS: Final = "power loss"


class Outcome(Enum):
    """The outcome of a request as its client knows it: done, never done, or unknown."""

    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class Place(NamedTuple):
    """The partition and offset of a record."""

    topic: str
    partition: int
    offset: int


class Shared(NamedTuple):
    """A partition that the members of a group share."""

    group: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Event:
    """A request: its client, its start, and when its outcome was known."""

    who: str
    begun: int
    ended: int


@dataclass(frozen=True, slots=True)
class Produce(Event):
    """Records for one topic, in order, with unique values.

    places: offsets, if reported. durable: acknowledged records survive the death of the process.
    """

    topic: str
    values: tuple[bytes, ...]
    outcome: Outcome
    places: tuple[Place, ...] = ()
    durable: bool = True


@dataclass(frozen=True, slots=True)
class Fetch(Event):
    """Delivered records: their values from ``place`` on. member_of: the group that they were read for."""

    place: Place
    offsets: tuple[int, ...]
    values: tuple[bytes, ...]
    member_of: str = ""


@dataclass(frozen=True, slots=True)
class Assignment(Event):
    """A member's assigned partitions in a generation."""

    group: str
    topic: str
    generation: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Commit(Event):
    """A committed offset. generation: of the member's assignment."""

    shared: Shared
    offset: int
    generation: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Position(Event):
    """A group's fetched offset; None if there was none."""

    shared: Shared
    offset: int | None


class Write(NamedTuple):
    """A record of a transaction with a unique value, the record that it was copied from, and what was read there."""

    topic: str
    value: bytes
    source: Place
    read: bytes = b""


@dataclass(frozen=True, slots=True)
class Transaction(Event):
    """Records that appear together or not at all, and the offsets committed with them.

    One whose commit was not requested is REFUSED: it will never take effect. ``who`` is its group as well.
    """

    writes: tuple[Write, ...]
    positions: tuple[tuple[Shared, int], ...]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Fault(Event):
    """A fault of the broker or a client; ``who`` names it."""


Kind = TypeVar("Kind", bound=Event)


@dataclass(slots=True)
class History:
    """All events in the order of known outcomes, and the final content.

    stored: every readable record by topic and partition, in order. positions: offsets of groups.
    """

    events: list[Event] = field(default_factory=list)
    stored: dict[tuple[str, int], list[tuple[int, bytes]]] = field(default_factory=dict)
    positions: dict[Shared, int | None] = field(default_factory=dict)

    def of(self, kind: type[Kind]) -> Iterator[Kind]:
        """Return the events of a kind."""
        return (event for event in self.events if isinstance(event, kind))

    def counts(self) -> Counter[str]:
        """Return the number of events by kind."""
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


KINDS: Final = (Produce, Fetch, Assignment, Commit, Position, Transaction, Fault)


def save(history: History, path: Path) -> None:
    """Write a history as compressed JSON lines: the name and values of each event, then the final content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encode = msgspec.json.encode
    with gzip.open(path, "wb") as file:
        for event in history.events:
            file.write(encode([type(event).__name__, event]) + b"\n")
        for (topic, partition), records in history.stored.items():
            file.write(encode(["stored", [topic, partition, records]]) + b"\n")
        for shared, offset in history.positions.items():
            file.write(encode(["position", [shared, offset]]) + b"\n")


def load(path: Path) -> History:
    """Read a history that ``save`` wrote."""
    kinds: dict[str, Any] = {kind.__name__: kind for kind in KINDS}
    history = History()
    with gzip.open(path, "rb") as file:
        for line in file:
            name, value = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
            if name == "stored":
                topic, partition, records = msgspec.json.decode(value, type=tuple[str, int, list[tuple[int, bytes]]])
                history.stored[topic, partition] = records
            elif name == "position":
                shared, offset = msgspec.json.decode(value, type=tuple[Shared, int | None])
                history.positions[shared] = offset
            else:
                history.events.append(msgspec.json.decode(value, type=kinds[name]))
    return history
