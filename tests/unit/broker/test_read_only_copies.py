"""Topics that a link writes: no other client may write, grow, trim, purge or delete them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from polywire.broker.broker import Broker
from polywire.broker.owners import LINKS_CALLER, NO_CALLER, Caller
from polywire.broker.settings import TopicSettings
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, TopicName

TOKEN = b"0123456789abcdef"
ADMINISTRATOR = Caller(None, 5)


def linked(memory: MemoryBroker, *, event_sourcing: bool = False) -> Topic:
    settings = TopicSettings(event_sourcing=event_sourcing)
    topic = memory.broker.create_topic(TopicName.parse("orders"), 2, settings)
    memory.broker.link_topic(topic, "old")
    memory.run()
    return topic


def batch(**fields: int | bytes) -> bytearray:
    return bytearray(from_records([Record(b"value", b"key")], **fields))  # type: ignore[arg-type]


CHANGES: dict[str, Callable[[Broker, Topic], object]] = {
    "produce": lambda broker, topic: broker.produce(topic.partitions[0], batch(), level=Level.WRITTEN, done=None),
    "stage": lambda broker, topic: broker.stage(TOKEN, topic.partitions[0], batch(), level=Level.WRITTEN, done=None),
    "grow": lambda broker, topic: broker.grow_topic(topic, 3),
    "shrink": lambda broker, topic: broker.shrink_topic(topic, 1),
    "delete": lambda broker, topic: broker.delete_topic(topic),
    "purge": lambda broker, topic: broker.purge_topic(topic),
    "purge several": lambda broker, topic: broker.purge_topics([topic], done=lambda _: None),
    "trim": lambda broker, topic: broker.trim_partition(topic.partitions[0], 0),
    "another link": lambda broker, topic: broker.link_topic(topic, "new"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("restarts", [False, True])
def test_other_clients_may_not_change_the_copy(name: str, restarts: bool) -> None:
    memory = MemoryBroker()
    linked(memory)
    if restarts:
        memory.restart()
    topic = memory.broker.topic("orders")
    with pytest.raises(Conflict, match="polywire link cut-over old") as caught:
        CHANGES[name](memory.broker, topic)
    assert caught.value.code is ErrorCode.TOPIC_LINKED
    memory.broker.link_topic(topic, "")
    memory.run()
    CHANGES[name](memory.broker, topic)


def test_large_batches_and_batches_of_producers_are_rejected() -> None:
    memory = MemoryBroker()
    partition = linked(memory).partitions[0]
    for changed in (batch(producer_id=b"p" * 8, producer_epoch=0, base_sequence=0), bytearray(100)):
        with pytest.raises(BrokerError, match="link"):
            memory.broker.produce(partition, changed, level=Level.WRITTEN, done=None)
    assert partition.log.next_offset == 0


def test_an_event_is_rejected() -> None:
    memory = MemoryBroker()
    partition = linked(memory, event_sourcing=True).partitions[0]
    with pytest.raises(Conflict, match="a copy that a link writes"):
        memory.broker.events.append(partition, b"key", 1, batch(), level=Level.WRITTEN, done=None)


def test_the_link_writes_and_adds_partitions() -> None:
    memory = MemoryBroker()
    topic = linked(memory)
    memory.broker.grow_topic(topic, 3, by=LINKS_CALLER)
    partition = topic.partitions[2]
    memory.broker.stage(TOKEN, partition, batch(), by=LINKS_CALLER, level=Level.WRITTEN, done=None)
    memory.broker.publish("link/old/x", 1, [TOKEN], by=LINKS_CALLER, done=None)
    memory.run()
    assert partition.log.next_offset == 1


def test_a_batch_that_was_staged_before_is_not_published() -> None:
    memory = MemoryBroker()
    topic = memory.broker.create_topic(TopicName.parse("orders"), 1)
    memory.broker.stage(TOKEN, topic.partitions[0], batch(), by=ADMINISTRATOR, level=Level.WRITTEN, done=None)
    memory.broker.link_topic(topic, "old")
    with pytest.raises(Conflict, match="a copy that a link writes"):
        memory.broker.publish("w", 1, [TOKEN], by=ADMINISTRATOR, done=None)
    memory.run()
    assert topic.partitions[0].log.next_offset == 0


def test_transactions_end_before_a_link_begins() -> None:
    memory = MemoryBroker()
    topic = memory.broker.create_topic(TopicName.parse("orders"), 1)
    transactions = memory.broker.transactions
    made = transactions.number_producer("t", asks_again=False, timeout_us=10**9, done=None)
    begun = transactions.begin(made, done=None)
    stage = partial(transactions.stage, begun, topic.partitions[0], done=None)
    stage(batch(), first=0, last=0)
    with pytest.raises(Busy, match="transactional_id='t'"):
        memory.broker.link_topic(topic, "old")
    transactions.abort(begun, done=None)
    memory.broker.link_topic(topic, "old")
    begun = transactions.begin(transactions.begin_epoch("t", done=None), done=None)
    with pytest.raises(Conflict, match="a copy that a link writes"):
        transactions.stage(begun, topic.partitions[0], batch(), first=0, last=0, done=None)


def test_a_change_of_settings_does_not_end_the_link() -> None:
    memory = MemoryBroker()
    topic = linked(memory)
    memory.broker.configure_topic(topic, replace(topic.settings, link="", compaction=True))
    assert (topic.settings.link, topic.partitions[0].link) == ("old", "old")
    assert topic.settings.compaction
    with pytest.raises(Conflict):
        memory.broker.produce(topic.partitions[0], batch(), by=NO_CALLER, level=Level.WRITTEN, done=None)
