"""The lag of consumer groups, in records and in seconds.

A partition without a committed offset has no lag, because its group may start at the first record or at the end. The
lag in seconds is the age of the oldest record after the committed offset, or 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from polywire.broker.broker import Broker
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.http.encoding import Slices
from polywire.http.guard import completing
from polywire.log.base import Read
from polywire.records.header import read_header
from polywire.types import PositionKind

TIME_READ_BYTES: Final = 1  # smaller than any batch, so exactly one batch is read
GROUPS_MAX: Final = 1_000  # groups in one list, and pairs of a group and a topic in the metrics
LAGS_MAX: Final = 50_000  # partitions of all groups in one response; for each, a batch may have to be read


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """Lag of a group in one partition.

    Attributes:
        committed: the committed offset; None if there is none.
        records: number of records after it; None without a committed offset.
        seconds: age of the oldest of them; None if it was not requested or is unknown.
    """

    partition: int
    committed: int | None
    first_offset: int
    next_offset: int
    records: int | None
    seconds: float | None


def total_lag(lags: Iterable[PartitionLag]) -> tuple[int | None, float | None]:
    """Return the sum of the records and the maximum of the seconds over partitions.

    Both are None if no partition has a committed offset.
    """
    known = [lag for lag in lags if lag.records is not None]
    if not known:
        return None, None
    return sum(lag.records or 0 for lag in known), max(lag.seconds or 0.0 for lag in known)


@dataclass(frozen=True, slots=True)
class GroupLag:
    """Lag of a group in a topic: the sum of the records, and the maximum of the seconds, over all partitions.

    Both are None if the group has no committed offset in the topic.
    """

    group: str
    topic: str
    records: int | None
    seconds: float | None


async def group_lags(
    broker: Broker, slices: Slices, *, count_max: int, permits: Callable[[Topic], bool] = lambda _: True
) -> tuple[list[GroupLag], bool]:
    """Return (lags of all groups, sorted by topic and name; whether some groups were excluded).

    Because of the limit LAGS_MAX, the groups of the topics with the most partitions are excluded.
    """
    pairs, more = await _group_names(broker, slices, count_max=count_max)
    topics = [(topic, name) for full_name, name in pairs if (topic := broker.find_topic(full_name)) and permits(topic)]
    topics.sort(key=lambda pair: len(pair[0].partitions))
    found, is_cut = await _lags(broker, topics, slices)
    return sorted(found, key=lambda lag: (lag.topic, lag.group)), more or is_cut


async def topic_lags(broker: Broker, topic: Topic, slices: Slices) -> tuple[list[GroupLag], bool]:
    """Return (lags of a topic's groups, sorted by name; whether some groups were excluded)."""
    full_name = topic.name.full
    names = set(broker.groups.names(full_name))
    for owner_topic, name in broker.position_owners(PositionKind.GROUP):
        if owner_topic == full_name:
            names.add(name)
        if slices.is_over:
            await slices.rest()
    found, is_cut = await _lags(broker, [(topic, name) for name in sorted(names)[:GROUPS_MAX]], slices)
    return found, is_cut or len(names) > GROUPS_MAX


async def _lags(broker: Broker, groups: Iterable[tuple[Topic, str]], slices: Slices) -> tuple[list[GroupLag], bool]:
    """Return the lags of groups up to the limit LAGS_MAX, and whether it excluded some."""
    left = LAGS_MAX
    found: list[GroupLag] = []
    for topic, name in groups:
        left -= len(topic.partitions)
        if left < 0:
            return found, True
        records, seconds = total_lag(await partition_lags(broker, topic, name, slices, seconds=True))
        found.append(GroupLag(name, topic.name.full, records, seconds))
    return found, False


async def _group_names(broker: Broker, slices: Slices, *, count_max: int) -> tuple[list[tuple[str, str]], bool]:
    """Return topic and name of groups with members or committed offsets, and whether some exceed the limit."""
    found = set(broker.groups.pairs()[: count_max + 1])
    for pair in broker.position_owners(PositionKind.GROUP):
        if len(found) > count_max:
            break
        found.add(pair)
        if slices.is_over:
            await slices.rest()
    return sorted(found)[:count_max], len(found) > count_max


async def partition_lags(
    broker: Broker, topic: Topic, group: str, slices: Slices, *, seconds: bool, among: Collection[int] | None = None
) -> list[PartitionLag]:
    committed = broker.positions_in(topic.name.full, PositionKind.GROUP, group)
    found = []
    for partition in list(topic.partitions):
        if slices.is_over:
            await slices.rest()
        if among is None or partition.number in among:
            found.append(await _lag(broker, partition, committed, seconds=seconds))
    return found


async def _lag(broker: Broker, partition: Partition, committed: Mapping[int, int], *, seconds: bool) -> PartitionLag:
    log, position = partition.log, committed.get(partition.number)
    first, end = log.first_offset, log.readable_offset
    if position is None:
        return PartitionLag(partition.number, None, first, end, None, None)
    begin = max(position, first)
    records = max(0, end - begin)
    age: float | None = 0.0 if seconds else None
    if records and seconds:
        age = await age_of(broker, partition, begin)
    return PartitionLag(partition.number, position, first, end, records, age)


async def age_of(broker: Broker, partition: Partition, offset: int) -> float | None:
    """Return the age of the record at an offset, in seconds; None if it does not exist."""
    try:
        read = await fetch(broker, partition, offset, bytes_max=TIME_READ_BYTES)
    except BrokerError:  # the record or its topic was deleted in the meantime
        return None
    try:
        stored_at_us = read_header(read.chunks[0]).append_time_us if read.chunks else None
    finally:
        read.pin.release()
    return None if stored_at_us is None else max(0.0, (broker.clock.now_us() - stored_at_us) / 1e6)


async def fetch(broker: Broker, partition: Partition, offset: int, *, bytes_max: int) -> Read:
    """Read stored batches from an offset on. The caller must release ``pin`` of the result. Raises BrokerError."""
    future: asyncio.Future[Read] = asyncio.get_running_loop().create_future()
    read = broker.fetch(partition, offset, bytes_max=bytes_max, then=completing(future))
    if isinstance(read, Read):
        return read
    try:
        return await future
    except asyncio.CancelledError:
        read.cancel()
        raise
