"""The partitions that are assigned to a consumer, and how far it has read each of them.

* A consumer's position is the offset after the last record that it returned to the application. It commits an offset
  only when the application has finished all earlier records.
* A partition that is assigned again continues at its position, unless another member has committed a later offset.
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
    """Return ``start`` if it is valid. Raises Invalid(INVALID_REQUEST) with a message that says what is expected."""
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
    """Return the offset at which to start. Raises Missing, and Invalid if the protocol cannot report the offset."""
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
    """An assigned partition. *Delivered* records were returned to the application.

    Attributes:
        position: offset after the last delivered record.
        fetched: offset after the last fetched record.
        done: offset after the last record that the application has finished.
        stored: last committed offset.
        pending: offset of a commit that the broker has not acknowledged; -1 if there is none.
        chunks: fetched records that are not delivered yet.
        consumed: event that is set while ``chunks`` is empty.
        paused: whether its records are not delivered.
    """

    topic: str
    partition: int
    position: int
    fetched: int
    done: int
    stored: int
    chunks: deque[list[Record]] = field(default_factory=deque)
    consumed: asyncio.Event = field(default_factory=asyncio.Event)
    paused: bool = False
    pending: int = -1

    @classmethod
    def at(cls, topic: str, partition: int, offset: int) -> Part:
        """Create a partition at an offset."""
        part = cls(topic, partition, offset, offset, offset, offset)
        part.consumed.set()
        return part

    def move(self, offset: int) -> None:
        """Continue at another offset, and drop fetched records."""
        self.position = self.fetched = self.done = offset
        self.chunks.clear()
        self.consumed.set()

    def put(self, records: list[Record], next_offset: int) -> None:
        """Add fetched records, which end before ``next_offset``."""
        self.fetched = next_offset
        if records:
            self.chunks.append(records)
            self.consumed.clear()

    def put_back(self, records: list[Record]) -> None:
        """Add records that were taken, but not delivered."""
        if records:
            self.chunks.appendleft(records)
            self.consumed.clear()

    def take(self) -> list[Record]:
        """Remove and return the first chunk."""
        chunk = self.chunks.popleft()
        if not self.chunks:
            self.consumed.set()
        return chunk


class Assignment:
    """The partitions assigned to a consumer, by (topic, partition)."""

    __slots__ = ("_lost", "_parts", "_turn")

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], Part] = {}
        self._lost: set[tuple[str, int]] = set()
        self._turn = 0

    def __iter__(self) -> Iterator[Part]:
        return iter(list(self._parts.values()))

    def find(self, topic: str, partition: int) -> Part | None:
        """Return the partition, or None if it is not assigned."""
        return self._parts.get((topic, partition))

    def add(self, part: Part) -> None:
        """Add an assigned partition."""
        self._parts[part.topic, part.partition] = part

    def keep(self, chosen: set[tuple[str, int]]) -> None:
        """Remove all partitions that are not in ``chosen``, with their fetched records."""
        self._lost |= self.uncommitted().keys() - chosen
        self._parts = {key: part for key, part in self._parts.items() if key in chosen}

    def overtake(self, part: Part, stored: int) -> None:
        """Continue a partition at a later offset that another member has committed."""
        if part.position != part.stored:
            self._lost.add((part.topic, part.partition))
        part.move(stored)
        part.stored = stored

    def is_lost(self, topic: str, partition: int) -> bool:
        """Return whether ``take_lost`` would return a partition."""
        return (topic, partition) in self._lost

    def take_lost(self) -> set[tuple[str, int]]:
        """Return partitions that were revoked while delivered records were uncommitted.

        A second call does not return them again.
        """
        lost, self._lost = self._lost, set()
        return lost

    def next_part(self) -> Part | None:
        """Return the next partition with fetched records, or None. Partitions take turns."""
        waiting = [part for part in self._parts.values() if part.chunks and not part.paused]
        if not waiting:
            return None
        self._turn += 1
        return waiting[self._turn % len(waiting)]

    def uncommitted(self) -> dict[tuple[str, int], int]:
        """Return the position of each partition whose delivered records are not all committed."""
        return {key: part.position for key, part in self._parts.items() if part.position != part.stored}

    def positions(self) -> dict[tuple[str, int], int]:
        """Return all positions, by topic and partition."""
        return {key: part.position for key, part in self._parts.items()}
