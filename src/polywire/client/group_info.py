"""Consumer groups as listed by a broker, and their lag in records and in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from polywire.client.base import PartitionBounds
from polywire.clock import Clock, SystemClock
from polywire.errors import ErrorCode, Missing


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A member of a group: ``wire`` is the protocol it joined over, ``idle_ms`` the time since its last request."""

    id: str
    wire: str
    idle_ms: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group on one topic.

    ``positions`` are next offsets to read, by partition. Without members, ``generation`` may be -1. ``owner`` is the
    name of a user, or empty.
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

    records: readable records after the committed offset. seconds: age of the first of them, 0 if there is none. Both
    are None if the group has committed nothing, because it may begin at the first or at the next record. position: the
    committed offset, which may be outside of the readable range, or None.
    """

    partition: int
    position: int | None
    next_offset: int
    records: int | None
    seconds: float | None


class Queries(Protocol):
    """The queries that lags are computed from. Clients of protocols that list groups implement them."""

    async def bounds(self, topic: str, /) -> list[PartitionBounds]:
        """Return the first and next offset of each partition."""

    async def stored_at_us(self, topic: str, partition: int, offset: int, /) -> int | None:
        """Return when the first record from an offset on was stored, or None if there is none."""


async def lags_of(client: Queries, group: GroupInfo, *, clock: Clock | None = None) -> list[PartitionLag]:
    """Return the lag in every partition of the group's topic, or nothing if the topic does not exist.

    Args:
        client: used to query bounds and times.
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
    """Return the sum of records and the maximum of seconds over all partitions, or None if nothing was committed."""
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
    """Return when a record was stored, or None if retention removed it in the meantime."""
    try:
        return await client.stored_at_us(topic, partition, offset)
    except Missing as error:
        if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
            raise
        return None
