"""How far groups are behind, in records and in seconds.

Promises: a partition without a commit counts from its first record; seconds are the age of the oldest record that is not read yet, 0 without
one. Must not know: who asks, members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from polywire.broker.broker import Broker
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.http.guard import completing
from polywire.http.slices import Slices
from polywire.log.base import Read
from polywire.records.header import read_header
from polywire.types import PositionKind

TIME_READ_BYTES: Final = 1  # one batch is always read


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """One partition of a group. committed: None where nothing was. seconds: None where that was not asked for, or is not known."""

    partition: int
    committed: int | None
    first_offset: int
    next_offset: int
    records: int
    seconds: float | None


async def group_names(broker: Broker, slices: Slices, *, count_max: int) -> tuple[list[tuple[str, str]], bool]:
    """Topic and name of groups that have members or positions, at most so many, and whether there are more."""
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
    """The lag in each partition of a topic."""
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
    begin = first if position is None else max(position, first)
    records = max(0, end - begin)
    age: float | None = 0.0 if seconds else None
    if records and seconds:
        age = await _age(broker, partition, begin)
    return PartitionLag(partition.number, position, first, end, records, age)


async def _age(broker: Broker, partition: Partition, offset: int) -> float | None:
    try:
        read = await fetched(broker, partition, offset, bytes_max=TIME_READ_BYTES)
    except BrokerError:  # retention or a deletion was faster
        return None
    try:
        stored_at_us = read_header(read.chunks[0]).append_time_us if read.chunks else None
    finally:
        read.pin.release()
    return None if stored_at_us is None else max(0.0, (broker.clock.now_us() - stored_at_us) / 1e6)


async def fetched(broker: Broker, partition: Partition, offset: int, *, bytes_max: int) -> Read:
    """Stored batches from an offset on; their pin is the caller's. Raises BrokerError."""
    future: asyncio.Future[Read] = asyncio.get_running_loop().create_future()
    read = broker.fetch(partition, offset, bytes_max=bytes_max, then=completing(future))
    if isinstance(read, Read):
        return read
    try:
        return await future
    except asyncio.CancelledError:
        read.cancel()
        raise
