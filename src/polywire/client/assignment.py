"""Which partitions a consumer has, and how far it got in each.

Promises: a position counts only what was handed out, and one that may be stored only what was handed out before; a partition that comes
back to its consumer goes on where it was, unless somebody else went further meanwhile. Must not know: connections, when to store.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, TypeAlias

from polywire.client.base import Ability, WireClient
from polywire.client.record import EPOCH, MICROSECOND, Record
from polywire.errors import ErrorCode, Invalid

Start: TypeAlias = Literal["earliest", "latest"] | int | datetime

EARLIEST: Final = "earliest"
LATEST: Final = "latest"


def checked_start(start: object) -> Start:
    """Where to begin, looked at. Raises Invalid(INVALID_REQUEST), which says what was expected."""
    if start in (EARLIEST, LATEST):
        return start
    if isinstance(start, datetime) and start.tzinfo is not None:
        return start
    if type(start) is int and start >= 0:
        return start
    raise Invalid(
        ErrorCode.INVALID_REQUEST,
        f'start must be "earliest", "latest", an offset (an int of 0 or more) or a datetime with a time zone got={start!r}',
    )


async def first_offset(wire: WireClient, topic: str, partition: int, start: Start) -> int:
    """The offset that a start means in a partition. Raises Missing, and Invalid where the wire cannot tell."""
    if isinstance(start, datetime):
        return await wire.offset_at(topic, partition, (start - EPOCH) // MICROSECOND)
    if isinstance(start, int):
        return start
    if Ability.BOUNDS in wire.abilities:
        bounds = (await wire.bounds(topic))[partition]
        return bounds.first_offset if start == EARLIEST else bounds.next_offset
    if start == EARLIEST:
        return 0
    raise Invalid(ErrorCode.INVALID_REQUEST, f"this protocol cannot report the latest offset topic={topic}")


@dataclass(eq=False, slots=True)
class Part:
    """One partition that is being consumed.

    position: behind the last record handed out. fetched: behind the last one fetched. done: up to where the application has come back for
    more. stored: the position this consumer stored last. chunks: fetched and not handed out. consumed: set while no chunk waits.
    """

    topic: str
    partition: int
    position: int
    fetched: int
    done: int
    stored: int
    chunks: deque[list[Record]] = field(default_factory=deque)
    consumed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def at(cls, topic: str, partition: int, offset: int) -> Part:
        """A partition that begins at an offset."""
        part = cls(topic, partition, offset, offset, offset, offset)
        part.consumed.set()
        return part

    def move(self, offset: int) -> None:
        """Go on at another offset; what was fetched is fetched again."""
        self.position = self.fetched = self.done = offset
        self.chunks.clear()
        self.consumed.set()

    def put(self, records: list[Record], next_offset: int) -> None:
        """Keep what was fetched."""
        self.fetched = next_offset
        if records:
            self.chunks.append(records)
            self.consumed.clear()

    def take(self) -> list[Record]:
        """The first chunk, to be handed out."""
        chunk = self.chunks.popleft()
        if not self.chunks:
            self.consumed.set()
        return chunk


class Assignment:
    """The partitions a consumer has now, by topic and number."""

    __slots__ = ("_lost", "_parts", "_turn")

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], Part] = {}
        self._lost: set[tuple[str, int]] = set()
        self._turn = 0

    def __iter__(self) -> Iterator[Part]:
        return iter(list(self._parts.values()))

    def find(self, topic: str, partition: int) -> Part | None:
        """The partition, None when it is another's."""
        return self._parts.get((topic, partition))

    def add(self, part: Part) -> None:
        """Take a partition on."""
        self._parts[part.topic, part.partition] = part

    def keep(self, chosen: set[tuple[str, int]]) -> None:
        """Give up all partitions but these; what was fetched of others is forgotten."""
        self._lost |= self.uncommitted().keys() - chosen
        self._parts = {place: part for place, part in self._parts.items() if place in chosen}

    def overtake(self, part: Part, stored: int) -> None:
        """Go on where another member got to."""
        if part.position != part.stored:
            self._lost.add((part.topic, part.partition))
        part.move(stored)
        part.stored = stored

    def take_lost(self) -> set[tuple[str, int]]:
        """Partitions that went to others with handed out records not stored; each is told once."""
        lost, self._lost = self._lost, set()
        return lost

    def next_part(self) -> Part | None:
        """A partition with something to hand out, each in its turn."""
        waiting = [part for part in self._parts.values() if part.chunks]
        if not waiting:
            return None
        self._turn += 1
        return waiting[self._turn % len(waiting)]

    def uncommitted(self) -> dict[tuple[str, int], int]:
        """Positions that are not stored yet, by topic and partition."""
        return {place: part.position for place, part in self._parts.items() if part.position != part.stored}

    def positions(self) -> dict[tuple[str, int], int]:
        """Positions by topic and partition."""
        return {place: part.position for place, part in self._parts.items()}
