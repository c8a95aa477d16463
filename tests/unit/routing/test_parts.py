"""State of protocols in several processes: their values, their objects, and the state of many partitions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from polywire.broker.api import Pending
from polywire.broker.owners import Caller
from polywire.errors import BrokerError, Denied, ErrorCode, PeerError, Unavailable
from polywire.log.base import Completion
from polywire.routing import topics
from polywire.routing.broker import ANSWER_S, CALL_S, RoutedBroker
from polywire.routing.session import Part, RouterFactory
from polywire.types import TopicName
from tests.unit.protocols.shards_in_memory import KEY, MemoryShards
from tests.unit.routing.test_router import THERE, Together


class Counter:
    """The object of a protocol."""

    def __init__(self) -> None:
        self.count = 0
        self.callers: list[Caller] = []

    def add(self, number: int, by: Caller) -> int:
        self.count += number
        self.callers.append(by)
        return self.count

    def add_later(self, number: int, then: Completion[int]) -> None:
        self.count += number
        then(self.count)

    def hidden(self, then: Completion[int]) -> None:
        raise AssertionError("it is not among the functions of the part")

    def deny(self, then: Completion[int]) -> None:
        raise Denied(ErrorCode.DENIED, "not allowed")


FUNCTIONS = (Counter.add, Counter.add_later, Counter.deny)


class Parted(Together):
    """Two processes with a ``Counter`` each. The first routes."""

    def __init__(self) -> None:
        self.counter = Counter()
        parts = {"counter": Part("counter", self.counter, FUNCTIONS)}
        self.shards = MemoryShards(lambda broker: RouterFactory(broker, KEY, parts=parts), 2)
        self.broker = RoutedBroker(self.shards.brokers[0], self.shards)
        self.run()


@pytest.fixture
def together() -> Parted:
    return Parted()


def test_functions_are_called_with_the_object_of_another_process(together: Parted) -> None:
    broker, results = together.broker, []  # type: ignore[var-annotated]
    caller = Caller(None, -7)
    assert together.call(lambda: broker.call_part(1, "counter", Counter.add, 2, by=caller)) == 2
    broker.call_part(1, "counter", Counter.add_later, 3, then=results.append)
    broker.call_part(1, "counter", Counter.deny, then=results.append)
    together.run()
    assert (results[0], together.counter.count, together.counter.callers) == (5, 5, [caller])
    assert isinstance(results[1], Denied)


@pytest.mark.parametrize("part", ["counter", "other"])
def test_other_functions_cannot_be_called(together: Parted, part: str) -> None:
    together.broker.call_part(1, part, Counter.hidden, then=print)
    with pytest.raises(PeerError, match="unknown method"):
        together.run()


@pytest.fixture
def reader() -> tuple[MemoryShards, RoutedBroker]:
    """Return two processes, and the broker of the second one, which reads the values of the first."""
    shards = MemoryShards(lambda broker: RouterFactory(broker, KEY), 2, own=1)
    shards.brokers[0].set_wire_state("iggy", "a", b"1")
    shards.brokers[0].set_wire_state("flux", "a", b"1")
    broker = RoutedBroker(shards.brokers[1], shards)
    shards.loop.run_due()
    return shards, broker


def run(shards: MemoryShards, seconds: float = 0) -> None:
    shards.loop.clock.advance(seconds)
    for _ in range(20):
        shards.loop.run_due()


def test_values_of_the_first_shard_are_known_to_all_processes(reader: tuple[MemoryShards, RoutedBroker]) -> None:
    shards, broker = reader
    run(shards)
    changes: list[Any] = []
    broker.watch_values(changes.append)
    assert (broker.wire_state("iggy"), broker.wire_state("flux")) == ({"a": b"1"}, {})
    shards.brokers[0].set_wire_state("iggy", "b", b"2")
    shards.brokers[0].set_wire_state("iggy", "a", None)
    run(shards)
    assert broker.wire_state("iggy") == {"b": b"2"}
    assert {(change.key, change.value) for change in changes} == {("b", b"2"), ("a", None)}


def test_values_that_were_removed_while_a_link_was_lost(reader: tuple[MemoryShards, RoutedBroker]) -> None:
    shards, broker = reader
    run(shards)
    changes: list[Any] = []
    broker.watch_values(changes.append)
    shards.links[-1].break_off()
    shards.brokers[0].set_wire_state("iggy", "a", None)
    assert broker.wire_state("iggy") == {"a": b"1"}
    run(shards, 1)
    assert (broker.wire_state("iggy"), [(change.key, change.value) for change in changes]) == ({}, [("a", None)])


def test_the_first_process_has_its_own_values(together: Parted) -> None:
    changes: list[Any] = []
    together.broker.watch_values(changes.append)
    together.shards.brokers[0].set_wire_state("iggy", "a", b"1")
    assert together.broker.wire_state("iggy") == {"a": b"1"}
    assert [(change.wire, change.key, change.value) for change in changes] == [("iggy", "a", b"1")]


@pytest.mark.parametrize("chunk", [1, 3, 500])
def test_the_state_of_many_partitions(together: Parted, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(topics, "REFRESHED_MAX", chunk)
    topic = together.there.create_topic(TopicName.parse(THERE), 7)
    together.run()
    found = together.find(THERE)
    assert found is not None
    for number, partition in enumerate(topic.partitions):
        for _ in range(number):
            together.produce(found.partitions[partition.number], b"x")
    together.run()
    require = partial(together.broker.require_current, found.partitions)
    with pytest.raises(Pending):
        require()
    together.call(require)
    assert [partition.log.readable_offset for partition in found.partitions] == list(range(7))
    assert [partition.log.stored_bytes for partition in found.partitions] == [
        partition.log.stored_bytes for partition in topic.partitions
    ]
    together.there.shrink_topic(topic, 2)
    together.call(lambda: together.broker.require_current(found.partitions))


def test_the_state_of_partitions_of_a_process_that_ends_or_hangs(together: Parted) -> None:
    together.there.create_topic(TopicName.parse(THERE), 1)
    together.run()
    found = together.find(THERE)
    assert found is not None
    for hangs in (False, True):
        with pytest.raises(Pending) as pending:
            together.broker.require_current(found.partitions)
        came: list[None] = []
        pending.value.then(lambda: came.append(None))  # noqa: B023 - called at once
        link = together.shards.links[-1]
        if hangs:
            link.pause()
        else:
            link.break_off()
        together.run(CALL_S)
        assert came == [None]
        with pytest.raises(Unavailable), pending.value:
            together.broker.require_current(found.partitions)


def test_partitions_of_this_process_are_always_current(together: Parted) -> None:
    topic = together.shards.brokers[0].create_topic(TopicName.parse("bb"), 2)
    together.broker.require_current(topic.partitions)
    assert together.broker.owns(topic.partitions[0])


def test_topics_are_awaited_until_every_process_has_reported_them() -> None:
    shards = MemoryShards(lambda broker: RouterFactory(broker, KEY), 3)
    broker = RoutedBroker(shards.brokers[0], shards)
    with pytest.raises(Pending) as pending:
        broker.require_reported()
    came: list[None] = []
    pending.value.then(lambda: came.append(None))
    run(shards)
    assert came == [None]
    broker.require_reported()
    run(shards, ANSWER_S)
    assert came == [None]


def test_a_process_that_reports_no_topics_is_awaited_for_a_limited_time() -> None:
    shards = MemoryShards(lambda broker: RouterFactory(broker, KEY), 3)
    broker = RoutedBroker(shards.brokers[0], shards)
    shards.links[1].pause()
    with pytest.raises(Pending) as pending:
        broker.require_reported()
    came: list[BrokerError | None] = []
    pending.value.then(lambda: came.append(None))
    run(shards)
    assert came == []
    run(shards, ANSWER_S)
    assert came == [None]
    with pytest.raises(Unavailable), pending.value:
        broker.require_reported()
    shards.links[1].resume()
    run(shards)
    broker.require_reported()
    assert came == [None]
