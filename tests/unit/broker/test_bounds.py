"""Bounds of many partitions: one sync for all of them, in slices, and none for what has ended."""

from __future__ import annotations

import pytest

from polywire.broker.fetch import Bounds
from polywire.broker.sliced import SLICE_S
from polywire.errors import BrokerError, ErrorCode
from polywire.log.base import Completion
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, TopicName

COUNT = 500


def made() -> MemoryBroker:
    memory = MemoryBroker()
    memory.broker.create_topic(TopicName("default", "wide"), COUNT)
    memory.run()
    return memory


def test_one_sync_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = made()
    broker, partitions = memory.broker, memory.broker.topic("wide").partitions
    broker.produce(partitions[7], from_records([Record(b"v")] * 3), level=Level.WRITTEN, done=None)
    broker.commit()
    log = broker._log
    asked: list[Level] = []
    barrier = log.barrier

    def counted(level: Level, done: Completion[int]) -> None:
        asked.append(level)
        barrier(level, done)

    monkeypatch.setattr(type(log), "barrier", lambda _, level, done: counted(level, done))
    reported: list[list[Bounds] | BrokerError] = []
    broker.many_bounds(partitions, then=reported.append)
    assert not reported, "nobody is told inside the call"
    memory.run()
    assert asked == [Level.SYNCED]
    (found,) = reported
    assert isinstance(found, list)
    assert [bounds.next_offset for bounds in found] == [3 if number == 7 else 0 for number in range(COUNT)]


def test_bounds_of_what_ends_meanwhile_are_an_error() -> None:
    memory = made()
    broker, topic = memory.broker, memory.broker.topic("wide")
    reported: list[list[Bounds] | BrokerError] = []
    broker.many_bounds(topic.partitions, then=reported.append)
    broker.delete_topic(topic, done=None)
    memory.run()
    (error,) = reported
    assert isinstance(error, BrokerError)
    assert error.code is ErrorCode.PARTITION_MISSING


def test_slices_stay_small() -> None:
    assert SLICE_S <= 0.005, "twenty milliseconds are what everybody else may wait for all of a pass"
