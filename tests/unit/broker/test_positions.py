"""Committed offsets, protocol-specific state and retention."""

from __future__ import annotations

import msgspec
import pytest

from polywire.broker import changes
from polywire.broker.settings import KEEP, BrokerSettings, TopicSettings
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Completion
from polywire.testing.memory_broker import MemoryBroker
from polywire.testing.memory_log import MemoryLog
from polywire.types import Level, PositionKind, TopicName
from tests.unit.broker.answers import Answers, batch_of

GROUP, CONSUMER = PositionKind.GROUP, PositionKind.CONSUMER


def test_committed_offsets_are_stored_as_given(memory: MemoryBroker) -> None:
    memory.broker.ensure_topic("orders")
    for offset in (5, 2, -7, 10**12):
        answers = Answers()
        memory.broker.commit_position("orders", 1, GROUP, "g", offset, done=answers)
        assert memory.broker.position("orders", 1, GROUP, "g") == offset
        memory.run()
        assert answers.errors == []
    memory.restart()
    assert memory.broker.position("orders", 1, GROUP, "g") == 10**12
    assert memory.broker.position("orders", 1, CONSUMER, "g") is None
    assert memory.broker.position("orders", 0, GROUP, "g") is None


@pytest.mark.parametrize("snapshot", [False, True])
def test_many_offsets_are_one_change(memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch, snapshot: bool) -> None:
    """Committing 10,000 partitions at once writes one change: a change for each would block other clients."""
    change = MemoryLog.change
    made: list[bytes] = []

    def count(log: MemoryLog, data: bytes, *, level: Level, done: Completion[int] | None) -> None:
        made.append(data)
        change(log, data, level=level, done=done)

    monkeypatch.setattr(MemoryLog, "change", count)
    topic = memory.broker.create_topic(TopicName("default", "wide"), 1000)
    made.clear()
    offsets = {number: number + 1 for number in range(1000)}
    memory.broker.commit_positions("wide", offsets, GROUP, "g")
    memory.broker.commit_positions("wide", {0: 77}, GROUP, "g")
    memory.broker.commit_positions("wide", {}, GROUP, "groupless")
    assert len(made) == 3
    memory.run()
    if snapshot:
        memory.log.take_snapshot()
    broker = memory.restart()
    assert broker.positions_in("wide", GROUP, "g") == {**offsets, 0: 77}
    assert [name for _, name in broker.position_owners(GROUP)] == ["g"]
    broker.shrink_topic(broker.topic(topic.name.full), 1)
    assert broker.positions_in("wide", GROUP, "g") == {0: 77}


def test_offsets_of_older_brokers_are_read(memory: MemoryBroker) -> None:
    topic = memory.broker.create_topic(TopicName("default", "old"))
    singly = tuple(changes.PositionStored(topic.id, "", number, GROUP, "g", 5) for number in range(2))
    memory.broker.change_all(singly, level=Level.WRITTEN, done=None)
    memory.run()
    assert memory.restart().positions_in("old", GROUP, "g") == {0: 5, 1: 5}


@pytest.mark.parametrize("snapshot", [False, True])
def test_an_offset_waits_for_its_topic(memory: MemoryBroker, snapshot: bool) -> None:
    memory.broker.commit_position("later", 0, GROUP, "g", 3)
    memory.run()
    if snapshot:
        memory.log.take_snapshot()
    memory.restart()
    assert memory.broker.position("later", 0, GROUP, "g") == 3
    memory.broker.ensure_topic("later")
    assert memory.broker.position("later", 0, GROUP, "g") == 3
    memory.run()
    assert memory.restart().position("later", 0, GROUP, "g") == 3


def test_offsets_are_deleted_with_their_topic(memory: MemoryBroker) -> None:
    topic = memory.broker.ensure_topic("orders")
    memory.broker.commit_position("orders", 0, GROUP, "g", 3)
    memory.broker.delete_topic(topic)
    assert memory.broker.position("orders", 0, GROUP, "g") is None
    memory.broker.ensure_topic("orders")
    assert memory.broker.position("orders", 0, GROUP, "g") is None
    memory.run()
    assert memory.restart().position("orders", 0, GROUP, "g") is None


def test_offsets_of_one_owner_are_listed_and_deleted(memory: MemoryBroker) -> None:
    memory.broker.ensure_topic("a")
    for topic, partition, offset in (("a", 0, 1), ("a", 1, 2), ("b", 0, 3)):
        memory.broker.commit_position(topic, partition, GROUP, "g", offset)
    memory.broker.commit_position("a", 0, GROUP, "other", 9)
    assert memory.broker.positions(GROUP, "g") == {("a", 0): 1, ("a", 1): 2, ("b", 0): 3}
    memory.broker.delete_positions(GROUP, "g", full_name="a", partition_number=1)
    assert memory.broker.positions(GROUP, "g") == {("a", 0): 1, ("b", 0): 3}
    memory.broker.delete_positions(GROUP, "g")
    assert memory.broker.positions(GROUP, "g") == {}
    memory.run()
    memory.restart()
    assert memory.broker.positions(GROUP, "g") == {}
    assert memory.broker.positions(GROUP, "other") == {("a", 0): 9}


def test_a_limit_on_offsets_still_allows_updates() -> None:
    memory = MemoryBroker(BrokerSettings(positions_max=1))
    memory.broker.commit_position("a", 0, GROUP, "g", 1)
    memory.broker.commit_position("a", 0, GROUP, "g", 2)
    with pytest.raises(Busy):
        memory.broker.commit_position("a", 1, GROUP, "g", 1)
    memory.broker.delete_positions(GROUP, "g")
    memory.broker.commit_position("a", 1, GROUP, "g", 1)


@pytest.mark.parametrize(
    ("partition", "name", "offset"), [(-1, "g", 0), (10_000, "g", 0), (0, "", 0), (0, "g" * 256, 0), (0, "g", 2**63)]
)
def test_invalid_offsets_are_refused(memory: MemoryBroker, partition: int, name: str, offset: int) -> None:
    with pytest.raises(BrokerError) as caught:
        memory.broker.commit_position("a", partition, GROUP, name, offset)
    assert caught.value.code in (ErrorCode.INVALID_NAME, ErrorCode.INVALID_REQUEST)


@pytest.mark.parametrize("snapshot", [False, True])
def test_protocol_state_is_separate_and_survives_a_restart(memory: MemoryBroker, snapshot: bool) -> None:
    memory.broker.set_wire_state("flux", "leader", b"\x01")
    memory.broker.set_wire_state("flux", "gone", b"\x02")
    memory.broker.set_wire_state("iggy", "leader", b"\x03")
    memory.broker.set_wire_state("flux", "gone", None)
    memory.run()
    if snapshot:
        memory.log.take_snapshot()
    memory.restart()
    assert dict(memory.broker.wire_state("flux")) == {"leader": b"\x01"}
    assert dict(memory.broker.wire_state("iggy")) == {"leader": b"\x03"}
    assert dict(memory.broker.wire_state("other")) == {}


def test_protocol_state_is_bounded() -> None:
    memory = MemoryBroker(BrokerSettings(wire_state_bytes_max=2, wire_state_keys_max=1))
    with pytest.raises(BrokerError):
        memory.broker.set_wire_state("flux", "a", b"123")
    memory.broker.set_wire_state("flux", "a", b"1")
    memory.broker.set_wire_state("flux", "a", b"2")
    with pytest.raises(Busy):
        memory.broker.set_wire_state("flux", "b", b"1")
    memory.broker.set_wire_state("flux", "a", None)
    memory.broker.set_wire_state("flux", "b", b"1")


def fill(memory: MemoryBroker, topic: str, settings: TopicSettings, seconds: int) -> None:
    """Write one record a second to partition 0."""
    partition = memory.broker.create_topic(TopicName("default", topic), 1, settings).partitions[0]
    for _ in range(seconds):
        memory.broker.produce(partition, batch_of(b"v" * 100), level=Level.WRITTEN, done=None)
        memory.run()
        memory.advance(1)


def first(memory: MemoryBroker, topic: str) -> int:
    return memory.broker.topic(topic).partitions[0].log.first_offset


def test_retention_by_age_and_size_trims_older_records() -> None:
    memory = MemoryBroker(BrokerSettings(retention_age_us=5_000_000))
    fill(memory, "aged", TopicSettings(), 4)
    fill(memory, "kept", TopicSettings(retention_age_us=KEEP), 4)
    size = memory.broker.topic("kept").partitions[0].log.stored_bytes
    fill(memory, "sized", TopicSettings(retention_age_us=KEEP, retention_bytes=size // 4), 4)
    memory.advance(10)
    assert (first(memory, "aged"), first(memory, "kept"), first(memory, "sized")) == (4, 0, 3)
    memory.run()
    memory.restart()
    assert (first(memory, "aged"), first(memory, "kept"), first(memory, "sized")) == (4, 0, 3)


def test_retention_checks_a_bounded_number_of_partitions_in_turn() -> None:
    memory = MemoryBroker(BrokerSettings(retention_age_us=1, retention_partitions_max=1, retention_interval_s=1000))
    for topic in ("a", "b"):
        fill(memory, topic, TopicSettings(), 1)
    memory.advance(1001)
    assert (first(memory, "a"), first(memory, "b")) == (1, 0)
    memory.advance(1000)
    assert (first(memory, "a"), first(memory, "b")) == (1, 1)


def test_retention_resumes_after_a_full_disk() -> None:
    memory = MemoryBroker(BrokerSettings(retention_age_us=1, retention_partitions_max=8, retention_interval_s=1000))
    for topic in ("a", "b"):
        fill(memory, topic, TopicSettings(), 1)
    memory.log.disk_full = True
    memory.advance(1001)
    assert (first(memory, "a"), first(memory, "b")) == (0, 0)
    memory.log.disk_full = False
    memory.advance(1000)
    assert (first(memory, "a"), first(memory, "b")) == (1, 1)


def test_a_closed_broker_trims_nothing(memory: MemoryBroker) -> None:
    answers = Answers()
    partition = memory.broker.ensure_topic("a").partitions[0]
    memory.broker.produce(partition, batch_of(b"v"), level=Level.SYNCED, done=answers)
    memory.broker.close()
    assert answers.offsets == [0]
    memory.advance(100)
    with pytest.raises(BrokerError) as caught:
        memory.broker.produce(partition, batch_of(b"v"), level=Level.WRITTEN, done=None)
    assert caught.value.code is ErrorCode.STOPPING


def test_owners_of_offsets_are_bounded() -> None:
    memory = MemoryBroker(BrokerSettings(position_owners_max=1))
    memory.broker.commit_position("a", 0, GROUP, "g", 1)
    memory.broker.commit_position("a", 1, GROUP, "g", 2)
    with pytest.raises(Busy):
        memory.broker.commit_position("a", 0, GROUP, "h", 1)
    memory.broker.delete_positions(GROUP, "g")
    memory.broker.commit_position("a", 0, GROUP, "h", 1)


def test_offsets_of_older_brokers_have_no_metadata() -> None:
    older = [6, b"i" * 16, "", 3, "group", "g", 5, 1, 0, 99], [30, b"i" * 16, "", "group", "g", {3: 5}, 1, 0, 99]
    one, several = (changes.decode_change(msgspec.msgpack.encode(stored)) for stored in older)
    assert one == changes.PositionStored(b"i" * 16, "", 3, GROUP, "g", 5, 1, 0, 99, epoch=-1, metadata="")
    assert several == changes.PositionsStored(b"i" * 16, "", GROUP, "g", {3: 5}, 1, 0, 99, notes={})


def shown(memory: MemoryBroker) -> tuple[int | None, dict[int, int], dict[int, int]]:
    """Return a group's offset in partition 0, and all its offsets, as clients see them."""
    broker = memory.broker
    kafka = {number: position.offset for number, position in broker.classic.positions("g", "orders").items()}
    return broker.position("orders", 0, GROUP, "g"), broker.positions_in("orders", GROUP, "g"), kafka


def test_with_synced_durability_clients_see_an_offset_once_its_commit_is_synced() -> None:
    memory = MemoryBroker(BrokerSettings(durability=Level.SYNCED))
    memory.broker.ensure_topic("orders")
    memory.run()
    memory.broker.commit_position("orders", 0, GROUP, "g", 5)
    memory.broker.commit()
    assert shown(memory) == (None, {}, {})
    assert memory.broker.position("orders", 0, GROUP, "g", latest=True) == 5
    memory.run()
    assert shown(memory) == (5, {0: 5}, {0: 5})
    memory.broker.commit_positions("orders", {0: 7, 1: 70}, GROUP, "g")
    memory.broker.commit()
    memory.broker.commit_position("orders", 0, GROUP, "g", 9)
    memory.broker.commit()
    assert shown(memory) == (5, {0: 5}, {0: 5})
    assert memory.broker.positions_in("orders", GROUP, "g", latest=True) == {0: 9, 1: 70}
    memory.run()
    assert shown(memory) == (9, {0: 9, 1: 70}, {0: 9, 1: 70})
    memory.broker.delete_positions(GROUP, "g", full_name="orders")
    memory.broker.delete_positions(GROUP, "g", full_name="orders", partition_number=0)
    memory.broker.commit()
    assert shown(memory) == (9, {0: 9, 1: 70}, {0: 9, 1: 70})
    memory.run()
    assert shown(memory) == (None, {}, {})


def test_what_clients_see_of_offsets_survives_a_power_loss() -> None:
    memory = MemoryBroker(BrokerSettings(durability=Level.SYNCED))
    memory.broker.ensure_topic("orders")
    memory.broker.commit_position("orders", 0, GROUP, "g", 5)
    memory.run()
    memory.broker.commit_position("orders", 0, GROUP, "g", 9)
    memory.broker.commit()
    before = shown(memory)
    memory.restart(synced_only=True)
    assert shown(memory) == before


def test_with_written_durability_clients_see_an_offset_at_once(memory: MemoryBroker) -> None:
    memory.broker.ensure_topic("orders")
    memory.broker.commit_position("orders", 0, GROUP, "g", 5)
    assert shown(memory) == (5, {0: 5}, {0: 5})
