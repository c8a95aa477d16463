"""The second version of transactions, and producers as tools see them (spec: kafka#transaction-dialects)."""

from __future__ import annotations

import pytest

from polywire.broker.transactions import BATCHES_AT_ONCE_MAX
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.client_codec import decode_response
from polywire.protocols.kafka.messages import Api, WireError
from polywire.records.columns import Record
from tests.unit.protocols.kafka.dialogue import World
from tests.unit.protocols.kafka.test_auth import ALICE, PASSWORD, plain
from tests.unit.protocols.kafka.transaction_dialogue import (
    Producer,
    position,
    stored,
    two_topics,
)


@pytest.fixture
def world() -> World:
    return two_topics()


@pytest.fixture
def producer(world: World) -> Producer:
    made = Producer(world.connect())
    assert made.init() == 0
    return made


# Producers of a partition


def active(world: World, *numbers: int, topic: str = "t") -> list[list[tuple[int, int, int, int]]]:
    """Return producers as tools see them: id, epoch, last sequence, start offset of the open transaction."""
    topics = schema.request(Api.DESCRIBE_PRODUCERS).Topics
    answer = world.connect().ask(Api.DESCRIBE_PRODUCERS, topics=[topics(name=topic, indexes=list(numbers))])
    return [
        sorted(
            (one.producer_id, one.producer_epoch, one.last_sequence, one.current_txn_start_offset)
            for one in entry.active_producers
        )
        for entry in answer.topics[0].partitions
    ]


def test_producers_of_a_partition_are_described(world: World, producer: Producer) -> None:
    idempotent = Producer(world.connect())
    idempotent.number, idempotent.epoch = world.memory.broker.new_producer_id(), 0
    batch = encode_batch([Record(b"a"), Record(b"b")], producer_id=idempotent.number, producer_epoch=0, base_sequence=0)
    topics = schema.request(Api.PRODUCE).Topics
    one = topics(name="t", partitions=[topics.Partitions(records=batch)])
    assert idempotent.peer.ask(Api.PRODUCE, 9, acks=1, topics=[one]).responses[0].partitions[0].error == 0
    producer.add(0, 1)
    producer.produce(0, b"c")
    known = sorted([(idempotent.number, 0, 1, -1), (producer.number, 0, 0, 2)])
    assert active(world, 0, 1) == [known, [(producer.number, 0, -1, 0)]]
    producer.end()
    assert active(world, 0, 1) == [sorted([(idempotent.number, 0, 1, -1), (producer.number, 0, 0, -1)]), []]
    assert active(world, 1, topic="u") == [[]]


def test_times_of_producers_use_the_wall_clock(world: World, producer: Producer) -> None:
    producer.add(0)
    producer.produce(0, b"a")
    at_ms = world.memory.clock.now_us() // 1000
    world.memory.advance(5)
    topics = schema.request(Api.DESCRIBE_PRODUCERS).Topics
    answer = producer.peer.ask(Api.DESCRIBE_PRODUCERS, topics=[topics(name="t", indexes=[0])])
    (one,) = answer.topics[0].partitions[0].active_producers
    assert one.last_timestamp == at_ms


def test_existing_partitions_are_described_once_each(world: World) -> None:
    topics = schema.request(Api.DESCRIBE_PRODUCERS).Topics
    asked = [topics(name="t", indexes=[0, 7, 0]), topics(name="missing", indexes=[0]), topics(name="t", indexes=[0, 1])]
    answer = world.connect().ask(Api.DESCRIBE_PRODUCERS, topics=asked)
    reported = [(topic.name, [(entry.index, entry.error) for entry in topic.partitions]) for topic in answer.topics]
    missing = WireError.UNKNOWN_TOPIC_OR_PARTITION
    assert reported == [("t", [(0, 0), (7, missing)]), ("missing", [(0, missing)]), ("t", [(1, 0)])]


# The second version


def test_an_end_that_increments_the_epoch(world: World, producer: Producer) -> None:
    for epoch, commits in enumerate((True, False, True)):
        assert producer.epoch == epoch
        assert producer.produce(0, b"v%d" % epoch, version=12).error == 0, "sequences restart"
        assert producer.move(epoch + 1, version=5) == 0
        old = Producer(producer.peer, "T", producer.number, producer.epoch)
        assert producer.finish(commits=commits) == 0
        assert (producer.number, producer.epoch) == (old.number, epoch + 1)
        assert old.produce(1, b"late", version=12).error == WireError.INVALID_PRODUCER_EPOCH
        assert old.move(9, version=5) == WireError.INVALID_PRODUCER_EPOCH
        assert (old.finish(commits=commits), old.epoch) == (0, epoch + 1), "the response was lost"
        assert Producer(producer.peer, "T", old.number, epoch).finish(commits=not commits) == WireError.PRODUCER_FENCED
    assert stored(world) == [b"v0", b"v2"]
    assert position(world)[0] == 3


def test_a_late_end_does_not_end_the_next_transaction(world: World, producer: Producer) -> None:
    """Apache Kafka's KAFKA-17754: a request that was delayed in the network arrives during the next transaction."""
    producer.produce(0, b"a", version=12)
    late = Producer(producer.peer, "T", producer.number, producer.epoch)
    assert producer.finish() == 0
    producer.produce(0, b"b", version=12)
    assert late.finish(commits=True) == late.finish(commits=False) == WireError.PRODUCER_FENCED
    assert late.offsets() == WireError.PRODUCER_FENCED
    assert stored(world) == [b"a"], "the next transaction is still open"
    producer.produce(1, b"c", version=12)
    assert producer.finish() == 0
    assert stored(world) == [b"a", b"b", b"c"]


def test_offsets_start_a_transaction_in_the_second_version(world: World, producer: Producer) -> None:
    assert producer.move(1, version=4) == WireError.INVALID_TXN_STATE
    assert producer.move(7, version=5) == 0
    assert position(world)[0] == -1
    assert producer.finish() == 0
    assert position(world)[0] == 7


def test_empty_transactions_in_the_second_version(world: World, producer: Producer) -> None:
    assert producer.finish(commits=True) == WireError.INVALID_TXN_STATE
    assert (producer.finish(commits=False), producer.epoch) == (0, 1)
    assert Producer(producer.peer, "T", producer.number, 0).finish(commits=True) == WireError.PRODUCER_FENCED
    assert producer.produce(0, b"v", version=12).error == 0
    assert (producer.finish(), producer.epoch) == (0, 2)
    assert stored(world) == [b"v"]


def test_an_end_whose_response_was_lost_with_the_broker(world: World, producer: Producer) -> None:
    producer.produce(0, b"v", version=12)
    again = Producer(producer.peer, "T", producer.number, 0)
    assert producer.finish() == 0
    world.restart()
    again.peer = world.connect()
    assert (again.finish(), again.epoch) == (0, 1)
    assert (again.produce(0, b"w", version=12).error, again.finish(), again.epoch) == (0, 0, 2)
    assert stored(world) == [b"v", b"w"]


def test_fencing_during_a_large_commit_keeps_the_new_epoch(world: World, producer: Producer) -> None:
    for number in range(BATCHES_AT_ONCE_MAX + 1):
        producer.produce(number, b"v", version=12)
    body = schema.request(Api.END_TXN)(**producer.who, committed=True)
    producer.peer.tell(Api.END_TXN, 5, body)
    other = Producer(world.connect())
    assert (other.init(), other.epoch) == (0, 1)
    producer.peer.pass_by()
    answers = [decode_response(Api.END_TXN, 5, frame)[1] for frame in producer.peer.frames()]
    assert [answer.error for answer in answers] == [WireError.CONCURRENT_TRANSACTIONS]
    assert stored(world) == []


def test_the_second_version_is_advertised(world: World) -> None:
    answer = world.connect().ask(Api.API_VERSIONS, 4, client_software_name="a", client_software_version="1")
    reported = [(one.name, one.min_version_level, one.max_version_level) for one in answer.finalized_features]
    assert (reported, answer.finalized_features_epoch) == ([("transaction.version", 2, 2)], 0)
    assert [(one.name, one.max_version) for one in answer.supported_features] == [("transaction.version", 2)]


def test_an_end_is_acknowledged_on_a_broker_with_users() -> None:
    world = two_topics()
    world.memory.broker.access.configure([ALICE])
    peer = world.connect()
    assert not plain(peer, ALICE.name, PASSWORD).error
    made = Producer(peer)
    assert made.init() == 0
    for commits in (True, False):
        assert made.produce(0, b"v", version=12).error == 0
        assert made.finish(commits=commits) == 0
    assert made.epoch == 2
