"""Aggregates: gapless versions, offsets of events, snapshots, and all of it after a restart."""

from __future__ import annotations

import pytest

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings, TopicSettings
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid
from polywire.log.base import Read
from polywire.records.columns import Event, Record
from polywire.records.rows import from_records
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, TopicName


def partition_of(broker: Broker) -> Partition:
    """Return the only partition of the topic of events."""
    topic = broker.find_topic("ev")
    if topic is None:
        topic = broker.create_topic(TopicName("default", "ev"), 1, TopicSettings(event_sourcing=True))
    return topic.partitions[0]


def event(key: bytes, version: int, value: bytes = b"v") -> bytearray:
    return from_records([Record(value=value, key=key, event=Event("T", 1, version))])


def append(memory: MemoryBroker, key: bytes, version: int) -> int:
    broker = memory.broker
    return broker.events.append(partition_of(broker), key, version, event(key, version), level=Level.WRITTEN, done=None)


def places(memory: MemoryBroker, key: bytes, first_version: int = 1) -> tuple[int, list[int]]:
    broker = memory.broker
    version, offsets = broker.events.offsets(partition_of(broker), key, first_version)
    return version, list(offsets)


def test_versions_are_consecutive_and_map_to_offsets() -> None:
    memory = MemoryBroker()
    offsets = [append(memory, key, version) for key, version in ((b"a", 1), (b"b", 1), (b"a", 2), (b"a", 3))]
    memory.run()
    assert offsets == [0, 1, 2, 3]
    assert places(memory, b"a") == (1, [0, 2, 3])
    assert places(memory, b"a", 3) == (3, [3])
    assert places(memory, b"a", 9) == (9, [])
    assert places(memory, b"none") == (1, [])
    for wrong in (0, 1, 3, 5):
        with pytest.raises(Conflict) as refused:
            append(memory, b"a", wrong)
        assert refused.value.code is ErrorCode.VERSION_CONFLICT
    assert memory.broker.events.version(partition_of(memory.broker), b"a") == 3


def test_plain_records_of_the_same_turn_do_not_shift_an_event() -> None:
    memory = MemoryBroker()
    partition = partition_of(memory.broker)
    reported: list[int] = []

    def appends_more(offset: int | BrokerError) -> None:
        assert not isinstance(offset, BrokerError), offset
        if offset < 3:
            memory.broker.produce(partition, from_records([Record(value=b"x")]), level=Level.WRITTEN, done=appends_more)
        reported.append(offset)

    memory.broker.produce(partition, from_records([Record(value=b"p")]), level=Level.WRITTEN, done=appends_more)
    offset = append(memory, b"a", 1)
    memory.run()
    assert offset == 1, "the callback ran before the event had its offset"
    assert reported == [0, 2, 3]
    assert places(memory, b"a") == (1, [offset])
    (read,) = [memory.broker.fetch(partition, offset, bytes_max=1, then=lambda _: None)]
    assert isinstance(read, Read)
    assert read.next_offset == offset + 1
    read.pin.release()


def test_a_topic_without_events_and_a_bad_key_are_refused() -> None:
    memory = MemoryBroker()
    plain = memory.broker.create_topic(TopicName("default", "plain"), 1).partitions[0]
    for partition, key in (
        (plain, b"k"),
        (partition_of(memory.broker), b""),
        (partition_of(memory.broker), b"k" * 2000),
    ):
        with pytest.raises(Invalid):
            memory.broker.events.append(partition, key, 1, event(b"k", 1), level=Level.WRITTEN, done=None)


def test_versions_and_snapshots_survive_a_restart_from_changes_and_from_a_snapshot() -> None:
    memory = MemoryBroker()
    for version in (1, 2, 3):
        append(memory, b"a", version)
    partition = partition_of(memory.broker)
    memory.broker.events.save_snapshot(partition, b"a", 2, b"state", level=Level.WRITTEN, done=None)
    memory.run()
    for _ in range(2):
        memory.restart()
        found = memory.broker.events.snapshot(partition_of(memory.broker), b"a")
        assert found is not None
        assert (found.version, found.payload) == (2, b"state")
        assert places(memory, b"a") == (1, [0, 1, 2])
        assert append(memory, b"b", 1) >= 3 if _ == 0 else True
        memory.run()


def test_retention_removes_events_but_keeps_versions_and_snapshots() -> None:
    memory = MemoryBroker(BrokerSettings(events_max=4))
    for version in (1, 2, 3, 4):
        append(memory, b"a", version)
    memory.run()
    topic = memory.broker.topic("ev")
    memory.broker.events.save_snapshot(topic.partitions[0], b"a", 4, b"s", level=Level.WRITTEN, done=None)
    with pytest.raises(Busy):
        append(memory, b"a", 5)
    memory.broker.purge_topic(topic)
    memory.run()
    assert places(memory, b"a") == (5, [])
    memory.advance(11.0)
    assert append(memory, b"a", 5) == 4
    memory.run()
    memory.restart()
    assert places(memory, b"a") == (5, [4])
    found = memory.broker.events.snapshot(partition_of(memory.broker), b"a")
    assert found is not None
    assert found.payload == b"s"


def test_limits_and_the_end_of_a_topic() -> None:
    memory = MemoryBroker(
        BrokerSettings(aggregates_max=2, aggregate_snapshot_bytes_max=10, aggregate_snapshots_bytes_max=25)
    )
    append(memory, b"a", 1)
    append(memory, b"b", 1)
    with pytest.raises(Busy):
        append(memory, b"c", 1)
    partition, events = partition_of(memory.broker), memory.broker.events
    with pytest.raises(Conflict):
        events.save_snapshot(partition, b"a", 2, b"s", level=Level.WRITTEN, done=None)
    with pytest.raises(Invalid):
        events.save_snapshot(partition, b"a", 1, b"s" * 11, level=Level.WRITTEN, done=None)
    for _ in range(3):
        events.save_snapshot(partition, b"a", 1, b"s" * 10, level=Level.WRITTEN, done=None)
        events.save_snapshot(partition, b"b", 1, b"s" * 10, level=Level.WRITTEN, done=None)
    append(memory, b"a", 2)
    memory.run()
    memory.broker.delete_topic(memory.broker.topic("ev"))
    memory.run()
    assert append(memory, b"c", 1) == 0
    with pytest.raises(Conflict):
        events.save_snapshot(partition_of(memory.broker), b"a", 1, b"s", level=Level.WRITTEN, done=None)
