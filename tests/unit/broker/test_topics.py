"""Creating, changing and deleting topics, live and after a restart."""

from __future__ import annotations

import pytest

from polywire.broker.settings import TOPIC_SETTINGS, BrokerSettings, TopicSettings
from polywire.errors import Conflict, ErrorCode, Invalid, Missing
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import KeyHash, Level, PositionKind, TopicName
from tests.unit.broker.answers import Answers, batch_of

ORDERS = TopicName("default", "orders")


def test_a_topic_created_with_settings_survives_a_restart(memory: MemoryBroker) -> None:
    settings = TopicSettings(
        replication_factor=2, key_hash=KeyHash.XXH32, retention_age_us=5, wire_options={"iggy": b"\x01"}
    )
    made = memory.broker.create_topic(TopicName("shop", "orders"), 5, settings)
    memory.run()
    found = memory.restart().topic("shop.orders")
    assert (found.id, found.name, found.settings) == (made.id, made.name, settings)
    assert [partition.incarnation for partition in found.partitions] == [1, 2, 3, 4, 5]
    assert found.created_at_us == made.created_at_us


def test_creation_is_acknowledged_at_its_level(memory: MemoryBroker) -> None:
    written, synced = Answers(), Answers()
    memory.broker.create_topic(ORDERS, level=Level.WRITTEN, done=written)
    memory.broker.create_topic(TopicName("default", "b"), level=Level.SYNCED, done=synced)
    assert not written.offsets
    memory.broker.commit()
    assert written.offsets
    assert not synced.offsets
    memory.run()
    assert synced.offsets


def test_full_names_are_unique_over_streams(memory: MemoryBroker) -> None:
    made = memory.broker.create_topic(TopicName("a", "b.c"))
    with pytest.raises(Conflict) as caught:
        memory.broker.create_topic(TopicName.parse("a.b.c"))
    assert caught.value.code is ErrorCode.TOPIC_EXISTS
    for squatter in (TopicName("a.b", "c"), TopicName("default", "a.b.c"), TopicName("default", "a.x")):
        with pytest.raises(Invalid) as invalid:
            memory.broker.create_topic(squatter)
        assert invalid.value.code is ErrorCode.INVALID_TOPIC
    assert memory.broker.topic("a.b.c") is made


@pytest.mark.parametrize("name", ["", "a\nb", "..", "x" * 256, "\udcff", "__own"])
def test_invalid_names_are_refused(memory: MemoryBroker, name: str) -> None:
    with pytest.raises(Invalid) as caught:
        memory.broker.create_topic(TopicName("default", name))
    assert caught.value.code is ErrorCode.INVALID_TOPIC


def test_internal_topics_are_listed_only_on_request(memory: MemoryBroker) -> None:
    memory.broker.create_topic(TopicName("default", "__own"), internal=True)
    memory.broker.create_topic(ORDERS)
    assert [topic.name.full for topic in memory.broker.topics()] == ["orders"]
    assert [topic.name.full for topic in memory.broker.topics(internal=True)] == ["__own", "orders"]


@pytest.mark.parametrize("count", [0, -1, 10_001])
def test_invalid_partition_counts_are_refused(memory: MemoryBroker, count: int) -> None:
    with pytest.raises(Invalid) as caught:
        memory.broker.create_topic(ORDERS, count)
    assert caught.value.code is ErrorCode.INVALID_PARTITION_COUNT


def test_missing_topics_are_created_with_the_default_count_or_refused(memory: MemoryBroker) -> None:
    assert len(memory.broker.ensure_topic("orders").partitions) == 3
    assert memory.broker.ensure_topic("orders") is memory.broker.topic("orders")
    strict = MemoryBroker(BrokerSettings(auto_create=False))
    with pytest.raises(Missing) as caught:
        strict.broker.ensure_topic("orders")
    assert caught.value.code is ErrorCode.TOPIC_MISSING


def test_automatic_creation_is_one_group_with_the_first_record(memory: MemoryBroker) -> None:
    answers = Answers()
    topic = memory.broker.ensure_topic("orders")
    memory.broker.produce(topic.partitions[2], batch_of(b"v"), level=Level.WRITTEN, done=answers)
    assert memory.log.group_count == 0
    memory.run()
    assert memory.log.group_count == 1
    assert answers.offsets == [0]


def test_growing_adds_and_never_removes(memory: MemoryBroker) -> None:
    topic = memory.broker.create_topic(ORDERS, 2)
    memory.broker.grow_topic(topic, 4)
    assert [partition.number for partition in topic.partitions] == [0, 1, 2, 3]
    assert topic.partitions[3].log.next_offset == 0
    with pytest.raises(Invalid) as caught:
        memory.broker.grow_topic(topic, 3)
    assert caught.value.code is ErrorCode.INVALID_PARTITION_COUNT
    memory.run()
    assert len(memory.restart().topic("orders").partitions) == 4


def test_topics_of_events_refuse_to_grow(memory: MemoryBroker) -> None:
    topic = memory.broker.create_topic(ORDERS, 2, TopicSettings(event_sourcing=True))
    with pytest.raises(Invalid):
        memory.broker.grow_topic(topic, 3)


def test_a_recreated_topic_is_a_different_topic(memory: MemoryBroker) -> None:
    old = memory.broker.create_topic(ORDERS, 2)
    ended = old.partitions[0]
    memory.broker.produce(ended, batch_of(b"v"), level=Level.WRITTEN, done=None)
    memory.run()
    memory.broker.delete_topic(old)
    assert memory.broker.find_topic("orders") is None
    new = memory.broker.create_topic(ORDERS, 2)
    memory.run()
    assert new.id != old.id
    assert [partition.incarnation for partition in new.partitions] == [3, 4]
    assert new.partitions[0].log.next_offset == 0
    for refused in (
        lambda: memory.broker.produce(ended, batch_of(b"v"), level=Level.WRITTEN, done=None),
        lambda: memory.broker.fetch(ended, 0, bytes_max=10, then=lambda _: None),
        lambda: memory.broker.wait(ended, 0, lambda: None),
    ):
        with pytest.raises(Missing) as caught:
            refused()
        assert caught.value.code is ErrorCode.PARTITION_MISSING
    with pytest.raises(Missing) as gone:
        memory.broker.delete_topic(old)
    assert gone.value.code is ErrorCode.TOPIC_MISSING


def test_incarnations_are_not_reused_after_a_restart(memory: MemoryBroker) -> None:
    memory.broker.delete_topic(memory.broker.create_topic(ORDERS, 3))
    memory.run()
    memory.log.take_snapshot()
    topic = memory.restart().create_topic(ORDERS, 1)
    assert topic.partitions[0].incarnation == 4


def test_purging_empties_a_topic_and_offsets_continue(memory: MemoryBroker) -> None:
    answers = Answers()
    topic = memory.broker.create_topic(ORDERS, 1)
    partition = topic.partitions[0]
    memory.broker.produce(partition, batch_of(b"a", b"b"), level=Level.WRITTEN, done=None)
    memory.run()
    memory.broker.purge_topic(topic, done=answers)
    memory.run()
    assert answers.errors == []
    assert (partition.log.first_offset, partition.log.next_offset) == (2, 2)
    partition = memory.restart().topic("orders").partitions[0]
    memory.broker.produce(partition, batch_of(b"c"), level=Level.WRITTEN, done=answers)
    memory.run()
    assert answers.offsets[-1] == 2


def test_settings_are_replaced_and_checked(memory: MemoryBroker) -> None:
    topic = memory.broker.create_topic(ORDERS)
    memory.broker.configure_topic(topic, TopicSettings(retention_bytes=10))
    with pytest.raises(Invalid):
        memory.broker.configure_topic(topic, TopicSettings(retention_bytes=-1))
    memory.run()
    assert memory.restart().topic("orders").settings.retention_bytes == 10


def test_readers_of_a_deleted_topic_wake(memory: MemoryBroker) -> None:
    woken: list[int] = []
    topic = memory.broker.create_topic(ORDERS, 1)
    memory.run()
    memory.broker.wait(topic.partitions[0], 0, lambda: woken.append(1))
    wait = memory.broker.wait(topic.partitions[0], 0, lambda: woken.append(2))
    wait.cancel()
    memory.run()
    assert woken == []
    memory.broker.delete_topic(topic)
    memory.run()
    assert woken == [1]


def test_a_topics_own_key_hash_wins(memory: MemoryBroker) -> None:
    topic = memory.broker.create_topic(ORDERS, 3)
    assert memory.broker.partition_of_key(topic, b"user1", KeyHash.FNV32).number == 2  # as FLUX's SDKs compute it
    by_wire = [memory.broker.partition_of_key(topic, b"user-1", kind).number for kind in (KeyHash.FNV32, KeyHash.XXH32)]
    assert by_wire[1] == 0  # as Iggy's SDKs compute it
    memory.broker.configure_topic(topic, TopicSettings(key_hash=KeyHash.XXH32))
    assert memory.broker.partition_of_key(topic, b"user-1", KeyHash.FNV64).number == 0


def test_a_topic_shrinks_and_grows_into_new_partitions(memory: MemoryBroker) -> None:
    topic = memory.broker.create_topic(ORDERS, 3)
    stored, done = Answers(), Answers()
    memory.broker.produce(topic.partitions[2], batch_of(b"old"), level=Level.WRITTEN, done=stored)
    for number in range(3):
        memory.broker.commit_position("orders", number, PositionKind.GROUP, "g", 1)
    memory.run()
    gone = topic.partitions[2]
    memory.broker.shrink_topic(topic, 1, done=done)
    memory.run()
    assert done.offsets == [-1] or not done.errors
    assert (len(topic.partitions), gone.ended) == (1, True)
    with pytest.raises(Missing) as caught:
        memory.broker.produce(gone, batch_of(b"late"), level=Level.WRITTEN, done=None)
    assert caught.value.code is ErrorCode.PARTITION_MISSING
    assert memory.broker.positions(PositionKind.GROUP, "g") == {("orders", 0): 1}
    memory.broker.grow_topic(topic, 3)
    memory.run()
    broker = memory.restart()
    again = broker.topic("orders")
    assert [partition.incarnation for partition in again.partitions] == [1, 4, 5]
    assert [partition.log.next_offset for partition in again.partitions] == [0, 0, 0]
    assert broker.positions(PositionKind.GROUP, "g") == {("orders", 0): 1}


def test_invalid_shrinking_is_refused(memory: MemoryBroker) -> None:
    topic = memory.broker.create_topic(ORDERS, 2)
    events = memory.broker.create_topic(TopicName("default", "events"), 2, TopicSettings(event_sourcing=True))
    for shrunk, count in ((topic, 3), (topic, -1), (events, 1)):
        with pytest.raises(Invalid) as caught:
            memory.broker.shrink_topic(shrunk, count)
        assert caught.value.code is ErrorCode.INVALID_PARTITION_COUNT
    memory.broker.delete_topic(topic)
    with pytest.raises(Missing):
        memory.broker.shrink_topic(topic, 1)


def test_a_topic_without_partitions_accepts_no_records(memory: MemoryBroker) -> None:
    with pytest.raises(Invalid):
        memory.broker.create_topic(ORDERS, 0)
    topic = memory.broker.create_topic(ORDERS, 0, partition_count_min=0)
    memory.run()
    with pytest.raises(Missing) as caught:
        memory.broker.partition_of_key(topic, b"k", KeyHash.FNV32)
    assert caught.value.code is ErrorCode.PARTITION_MISSING
    assert memory.restart().topic("orders").partitions == []


def test_the_list_of_topics_has_a_version(memory: MemoryBroker) -> None:
    before = memory.broker.topics_version
    topic = memory.broker.create_topic(ORDERS)
    memory.broker.grow_topic(topic, 5)
    assert memory.broker.topics_version == before + 1
    memory.broker.delete_topic(topic)
    assert memory.broker.topics_version == before + 2


@pytest.mark.parametrize("name", TOPIC_SETTINGS)
def test_each_setting_has_one_definition(name: str) -> None:
    """The defaults of ``TopicSettings`` are those of the table, and settings are read back as given."""
    setting, default = TOPIC_SETTINGS[name], getattr(TopicSettings(), name)
    assert setting.read(name, None) == setting.default == default
    plain = setting.plain(default)
    assert plain is None or setting.read(name, plain) == default  # type: ignore[arg-type]
    wrong: list[int | str] = ["no such word"] if setting.allowed is None else [setting.allowed.stop, "1"]
    for value in wrong:
        with pytest.raises(Invalid, match=f"topic setting is invalid: {name} "):
            setting.read(name, value)
