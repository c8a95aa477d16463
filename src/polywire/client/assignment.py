"""The partitions that are assigned to a consumer, and how far it has read each of them.

* A consumer's position is the offset after the last record that it returned to the application. It commits an offset
  only when the application has finished all earlier records.
* A partition that is assigned again continues at its position, unless another member has committed a later offset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import Final, Literal, Protocol, TypeAlias, runtime_checkable

from polywire.client.base import Ability, WireClient
from polywire.client.polywire import PolywireClient
from polywire.client.record import EPOCH, MICROSECOND, Record, decode_batches, from_stored
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Missing

Start: TypeAlias = Literal["earliest", "latest"] | int | datetime

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
LOST_NAMED_MAX: Final = 20  # partitions named in the error of a rejected commit


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


def check_arguments(topics: Sequence[str], group: str | None, commit_interval_s: float, buffer_bytes: int) -> None:
    """Raise Invalid(INVALID_REQUEST) for arguments of ``Consumer`` that are wrong."""
    if not topics or not all(isinstance(topic, str) for topic in topics):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"topics must be one or more names got={topics!r}")
    if group is not None and not isinstance(group, str):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"group must be a str got={type(group).__name__}")
    if commit_interval_s <= 0 or buffer_bytes < 1:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"commit_interval_s and buffer_bytes must be above 0 commit_interval_s={commit_interval_s} buffer_bytes={buffer_bytes}",
        )


@runtime_checkable
class _CountsPartitions(Protocol):
    """A client of a protocol that reports only a topic's number of partitions, but no offsets and no list of topics."""

    async def partition_count(self, topic: str) -> int: ...


async def partition_count(wire: WireClient, topic: str) -> int:
    """Return the number of partitions of a topic. Raises Missing(TOPIC_MISSING)."""
    if isinstance(wire, _CountsPartitions):
        return await wire.partition_count(topic)
    if Ability.BOUNDS in wire.abilities:
        return len(await wire.bounds(topic))
    counts = [found.partition_count for found in await wire.topics() if found.name == topic]
    if not counts:
        raise Missing(ErrorCode.TOPIC_MISSING, f"no such topic topic={topic}")
    return counts[0]


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
        failure: why it cannot be read at ``fetched``; None if it can.
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
    failure: BrokerError | None = None
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
        self.failure = None
        self.chunks.clear()
        self.consumed.set()

    def put(self, records: list[Record], next_offset: int) -> None:
        """Add fetched records, which end before ``next_offset``."""
        self.fetched = next_offset
        if records:
            self.chunks.append(records)
            self.consumed.clear()

    def fail(self, error: BrokerError) -> None:
        """Note that records cannot be read until ``move``."""
        self.failure = error
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


async def read(wire: WireClient, part: Part, *, bytes_max: int, wait_ms: int) -> tuple[list[Record], int] | Missing:
    """Return the next records of a partition, and the offset after them.

    If these offsets do not exist, return the error. Raises the errors of ``WireClient.fetch``.
    """
    offset = part.fetched
    try:
        if isinstance(wire, PolywireClient):
            payloads, next_offset = await wire.fetch_batches(
                part.topic, part.partition, offset, bytes_max=bytes_max, wait_ms=wait_ms
            )
            decoded = [decode_batches(payload, part.topic, part.partition, offset) for payload in payloads]
            return list(chain.from_iterable(decoded)), next_offset
        found = await wire.fetch(part.topic, part.partition, offset, wait_ms=wait_ms)
    except Missing as error:
        if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
            raise
        return error
    records = [from_stored(record, part.topic, part.partition) for record in found]
    return records, records[-1].offset + 1 if records else offset


class Assignment:
    """The partitions assigned to a consumer, by (topic, partition).

    Attributes:
        counts: the number of partitions of each topic, if the consumer reads all of them.
    """

    __slots__ = ("_lost", "_parts", "_turn", "counts")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
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
        """Return the next partition with fetched records or a failure, or None. Partitions take turns."""
        waiting = [part for part in self._parts.values() if (part.chunks or part.failure) and not part.paused]
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


def not_owned(lost: set[tuple[str, int]]) -> Conflict:
    """Return the error of a commit for partitions that another member owns."""
    named = ", ".join(f"topic={topic} partition={partition}" for topic, partition in sorted(lost)[:LOST_NAMED_MAX])
    return Conflict(ErrorCode.PARTITION_NOT_ASSIGNED, f"another member now owns these partitions: {named}")
