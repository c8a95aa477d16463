"""Topics, groups, transactional ids and writers as a broker lists them, and the lag of groups in records and in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from polywire.client.base import PartitionBounds
from polywire.clock import Clock, SystemClock
from polywire.errors import ErrorCode, Missing
from polywire.matching import is_pattern, matches

INTERNAL: Final = "__"  # Kafka's own topics begin with this


def names_matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names of topics that a name or pattern matches. Only a name without a wildcard matches Kafka's own."""
    if not is_pattern(pattern):
        return [name for name in names if name == pattern]
    return [name for name in names if not name.startswith(INTERNAL) and matches(pattern, name)]


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A member of a group.

    Attributes:
        id: its name or id.
        wire: protocol over which it joined.
        partitions: partitions that are assigned to it.
        idle_ms: time since its last request.
    """

    id: str
    wire: str
    idle_ms: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group on one topic.

    Attributes:
        name: name of the group.
        topic: full name of the topic.
        generation: its generation; may be -1 if the group has no members.
        assignor: how partitions are assigned.
        members: its members.
        positions: committed offset (the next offset to read), by partition.
        owner: name of the user who owns the group; empty if there is none.
    """

    topic: str
    name: str
    generation: int
    assignor: str | None
    members: tuple[MemberInfo, ...]
    positions: Mapping[int, int]
    owner: str = ""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of a group in one partition.

    Attributes:
        partition: number of the partition.
        position: the committed offset; None if there is none. It may be outside the readable range.
        records: number of readable records from the committed offset on.
        seconds: age of the first of these records; 0 if there is none.

    ``records`` and ``seconds`` are None if nothing was committed, because the group may start at the first or at the
    next record.
    """

    partition: int
    position: int | None
    next_offset: int
    records: int | None
    seconds: float | None


class Queries(Protocol):
    """The methods of a client that ``lags_of`` calls."""

    async def bounds(self, topic: str, /) -> list[PartitionBounds]:
        """Return the first and next offset of each partition."""

    async def stored_at_us(self, topic: str, partition: int, offset: int, /) -> int | None:
        """Return the append time of the first record from an offset on, or None if there is none."""


async def lags_of(client: Queries, group: GroupInfo, *, clock: Clock | None = None) -> list[PartitionLag]:
    """Return the lag in each partition of the group's topic; no lags if the topic does not exist.

    Args:
        client: used to query the partitions' first and end offsets, and the records' append times.
        group: as returned by ``groups`` of the client.
        clock: None uses the system's clock.

    Raises:
        Denied: the user may not read the topic.
    """
    now_us = (clock or SystemClock()).now_us()
    try:
        bounds = await client.bounds(group.topic)
        return [await _lag(client, group, part, now_us) for part in bounds]
    except Missing as error:
        if error.code is not ErrorCode.TOPIC_MISSING:
            raise
        return []


def total_lag(lags: Iterable[PartitionLag]) -> tuple[int | None, float | None]:
    """Return the sum of ``records`` and the maximum of ``seconds`` over all partitions.

    Both are None if nothing was committed.
    """
    known = [lag for lag in lags if lag.records is not None]
    if not known:
        return None, None
    return sum(lag.records or 0 for lag in known), max(lag.seconds or 0.0 for lag in known)


async def _lag(client: Queries, group: GroupInfo, part: PartitionBounds, now_us: int) -> PartitionLag:
    position = group.positions.get(part.partition)
    if position is None:
        return PartitionLag(part.partition, None, part.next_offset, None, None)
    begin = max(position, part.first_offset)
    records = max(0, part.next_offset - begin)
    seconds = 0.0
    if records:
        first = await _stored_at_us(client, group.topic, part.partition, begin)
        seconds = 0.0 if first is None else max(0.0, (now_us - first) / 1e6)
    return PartitionLag(part.partition, position, part.next_offset, records, seconds)


async def _stored_at_us(client: Queries, topic: str, partition: int, offset: int) -> int | None:
    """Return the append time of a record; None if retention has just removed the record."""
    try:
        return await client.stored_at_us(topic, partition, offset)
    except Missing as error:
        if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
            raise
        return None


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """A transactional id and its latest transaction. ``owner`` is the name of a user, or empty."""

    id: str
    epoch: int
    state: str
    messages: int
    positions: int
    idle_ms: int
    owner: str


@dataclass(frozen=True, slots=True)
class WriterInfo:
    """A writer and the sequence number of its last publish. ``owner`` is the name of a user, or empty.

    ``epoch`` is the writer's latest epoch; 0 if it has begun none, or if an older broker does not report it.
    """

    writer: str
    number: int
    idle_ms: int
    owner: str
    epoch: int = 0
