"""What a broker tells of groups, and how far each is behind: in records and in seconds.

Promises: looking changes nothing. Must not know: how lists are printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from polywire.client.base import PartitionBounds
from polywire.clock import Clock, SystemClock
from polywire.errors import ErrorCode, Missing


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A member of a group; ``wire`` is the one it joined over, ``idle_ms`` the time since it was last heard of."""

    id: str
    wire: str
    idle_ms: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group on one topic.

    ``positions`` are next offsets to read, by partition; without members ``generation`` may be -1. ``owner`` is a user's name, empty
    where it is nobody's.
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
    """How far a group is behind in one partition.

    records: behind the committed offset that can still be read. seconds: since the first of them was stored, 0 when there is none. Both are
    None where the group has committed nothing: it may read from the first record or from the next one. position: as it was committed, also
    outside of what can be read; None where nothing was.
    """

    partition: int
    position: int | None
    next_offset: int
    records: int | None
    seconds: float | None


class Queries(Protocol):
    """What lags are worked out from; clients of wires that list groups answer it."""

    async def bounds(self, topic: str, /) -> list[PartitionBounds]:
        """Return where each partition of a topic begins and ends."""

    async def stored_at_us(self, topic: str, partition: int, offset: int, /) -> int | None:
        """Return when the first record from an offset on was stored, None where there is none."""


async def lags_of(client: Queries, group: GroupInfo, *, clock: Clock | None = None) -> list[PartitionLag]:
    """Return the lag in every partition of the group's topic; none where the topic does not exist (any more).

    Args:
        client: asks for bounds and times.
        group: as ``groups`` of the client returned it.
        clock: None: the system's.

    Raises:
        Denied: the topic may not be read.
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
    """Return records and seconds of a group over its partitions; None where it has committed nothing in any."""
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
    """When a record was stored; None when retention was faster."""
    try:
        return await client.stored_at_us(topic, partition, offset)
    except Missing as error:
        if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
            raise
        return None
