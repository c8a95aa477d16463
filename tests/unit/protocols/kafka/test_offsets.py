"""Offsets by time, ends of epochs, and deletion of records (spec: kafka#listoffsets, kafka#deleterecords)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from polywire.broker.topics import Partition
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import SERVED, Api, WireError
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level, TopicName
from tests.unit.protocols.kafka.dialogue import Dialogue, World

NOW_US = 1_700_000_000_000_000
NOW_MS = NOW_US // 1000
ASKED = schema.request(Api.LIST_OFFSETS).Topics


@pytest.fixture
def world() -> World:
    return World(now_us=NOW_US)


def partition_of(world: World) -> Partition:
    broker = world.memory.broker
    topic = broker.find_topic("orders") or broker.create_topic(TopicName.parse("orders"), 1)
    return topic.partitions[0]


def put(world: World, times_ms: Sequence[int | None]) -> None:
    """Store one batch whose records have these times."""
    records = [Record(b"v", origin_time_us=None if time is None else time * 1000 + 999) for time in times_ms]
    world.memory.broker.produce(partition_of(world), from_records(records), level=Level.WRITTEN, done=None)
    world.memory.run()


def listed(peer: Dialogue, time_ms: int, version: int | None = None, **fields: Any) -> tuple[int, int, int]:
    """Return the error, offset and time of the response for the only partition."""
    asked = ASKED(name="orders", partitions=[ASKED.Partitions(index=0, timestamp=time_ms, **fields)])
    (topic,) = peer.ask(Api.LIST_OFFSETS, version, topics=[asked]).topics
    (entry,) = topic.partitions
    return entry.error, entry.offset, entry.timestamp


@pytest.mark.parametrize("version", range(1, 12))
def test_the_ends_of_a_partition(world: World, version: int) -> None:
    put(world, [NOW_MS] * 3)
    peer = world.connect()
    assert listed(peer, -1, version) == (0, 3, -1)
    assert listed(peer, -2, version) == (0, 0, -1)
    unknown = (WireError.UNSUPPORTED_VERSION, -1, -1)
    assert listed(peer, -3, version) == ((0, 0, NOW_MS) if version >= 7 else unknown)
    assert listed(peer, -4, version) == ((0, 0, -1) if version >= 8 else unknown)
    assert listed(peer, -5, version) == ((0, -1, -1) if version >= 9 else unknown)
    assert listed(peer, -6, version) == ((0, -1, -1) if version >= 11 else unknown)
    assert listed(peer, -7, version) == unknown


def test_times_find_the_first_record_by_offset_even_out_of_order(world: World) -> None:
    peer = world.connect()
    put(world, [NOW_MS - 900, NOW_MS - 100, NOW_MS - 500])
    put(world, [NOW_MS - 700, NOW_MS + 300, NOW_MS])
    assert listed(peer, NOW_MS - 10_000) == (0, 0, NOW_MS - 900)
    assert listed(peer, NOW_MS - 899) == (0, 1, NOW_MS - 100)
    assert listed(peer, NOW_MS - 100) == (0, 1, NOW_MS - 100)
    assert listed(peer, NOW_MS - 99) == (0, 4, NOW_MS + 300)
    assert listed(peer, NOW_MS + 301) == (0, -1, -1)
    assert listed(peer, -3) == (0, 4, NOW_MS + 300)
    assert listed(peer, 2**63 - 1) == (0, -1, -1)


def test_old_timestamps_are_found_in_late_records(world: World) -> None:
    put(world, [5_000, 6_000])
    put(world, [7_000])
    peer = world.connect()
    assert listed(peer, 5_500) == (0, 1, 6_000)
    assert listed(peer, 6_500) == (0, 2, 7_000)


def test_a_record_without_a_time_has_its_append_time(world: World) -> None:
    put(world, [None, None])
    peer = world.connect()
    assert listed(peer, NOW_MS) == (0, 0, NOW_MS)
    assert listed(peer, NOW_MS + 1) == (0, -1, -1)


def test_the_first_record_with_the_greatest_time_is_found(world: World) -> None:
    peer = world.connect()
    assert listed(peer, -1) == (WireError.UNKNOWN_TOPIC_OR_PARTITION, -1, -1)
    partition_of(world)
    assert listed(peer, -3) == (0, -1, -1)
    assert listed(peer, 0) == (0, -1, -1)
    put(world, [3, 9, 4])
    put(world, [9, 1])
    assert listed(peer, -3) == (0, 1, 9)


def test_leader_epochs_are_checked_and_returned(world: World) -> None:
    put(world, [1])
    world.restart()
    peer = world.connect()
    assert listed(peer, -1, current_leader_epoch=1)[0] == WireError.FENCED_LEADER_EPOCH
    assert listed(peer, -1, current_leader_epoch=3)[0] == WireError.UNKNOWN_LEADER_EPOCH
    assert listed(peer, -1, current_leader_epoch=2)[0] == 0
    asked = ASKED(name="orders", partitions=[ASKED.Partitions(index=0, timestamp=time) for time in (-1, -2, 1)])
    (topic,) = peer.ask(Api.LIST_OFFSETS, topics=[asked]).topics
    assert [entry.leader_epoch for entry in topic.partitions] == [2, 1, 1]


def test_a_search_ends_with_its_connection(world: World) -> None:
    put(world, [1])
    peer = world.connect()
    asked = ASKED(name="orders", partitions=[ASKED.Partitions(index=0, timestamp=-3)])
    peer.tell(Api.LIST_OFFSETS, 11, schema.request(Api.LIST_OFFSETS)(topics=[asked]))
    peer.session.close()
    peer.pass_by()
    assert not peer.sent


# Epochs


@pytest.mark.parametrize("version", [2, 3, 4])
def test_end_offsets_of_epochs(world: World, version: int) -> None:
    put(world, [1, 1])
    world.restart()  # epoch 2 has no records
    partition_of(world)
    world.restart()
    put(world, [1])
    asked = schema.request(Api.OFFSET_FOR_LEADER_EPOCH).Topics

    def end_of(epoch: int, current: int = -1) -> tuple[int, int, int]:
        one = asked.Partitions(partition=0, current_leader_epoch=current, leader_epoch=epoch)
        topics = [asked(topic="orders", partitions=[one])]
        entry = world.connect().ask(Api.OFFSET_FOR_LEADER_EPOCH, version, topics=topics).topics[0].partitions[0]
        return entry.error, entry.leader_epoch, entry.end_offset

    assert end_of(1) == (0, 1, 2)
    assert end_of(2) == (0, 1, 2)
    assert end_of(3) == (0, 3, 3)
    assert end_of(0) == end_of(4) == (0, -1, -1)
    assert end_of(1, current=2) == (WireError.FENCED_LEADER_EPOCH, -1, -1)


# Deleting records


@pytest.mark.parametrize("version", range(SERVED[Api.DELETE_RECORDS].last + 1))
def test_records_are_deleted_below_an_offset(world: World, version: int) -> None:
    for _ in range(5):
        put(world, [1])
    peer = world.connect()

    def delete(offset: int) -> tuple[int, int]:
        asked = schema.request(Api.DELETE_RECORDS).Topics
        topics = [asked(name="orders", partitions=[asked.Partitions(index=0, offset=offset)])]
        entry = peer.ask(Api.DELETE_RECORDS, version, topics=topics).topics[0].partitions[0]
        return entry.error, entry.low_watermark

    assert delete(2) == (0, 2)
    assert delete(1) == (0, 2)
    assert delete(6) == delete(-2) == (WireError.OFFSET_OUT_OF_RANGE, -1)
    assert listed(peer, -2)[1] == 2
    assert delete(-1) == (0, 5)
    assert listed(peer, -2)[1] == listed(peer, -1)[1] == 5


def test_deleted_records_stay_deleted_after_a_restart(world: World) -> None:
    put(world, [1] * 3)
    asked = schema.request(Api.DELETE_RECORDS).Topics
    topics = [asked(name="orders", partitions=[asked.Partitions(index=0, offset=-1)])]
    world.connect().ask(Api.DELETE_RECORDS, topics=topics)
    world.restart()
    assert listed(world.connect(), -2)[1] == 3
