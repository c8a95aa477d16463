"""Transactions over the Kafka protocol (spec: kafka#transactions, kafka#base-offsets-in-transactions)."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.producers import WRAP
from polywire.broker.settings import BrokerSettings
from polywire.broker.transaction_state import PRODUCER_EPOCHS
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.kafka.messages import Api, WireError
from polywire.records.columns import Record
from polywire.types import Level, TopicName
from tests.unit.protocols.kafka.dialogue import World
from tests.unit.protocols.kafka.transaction_dialogue import (
    GROUP,
    TIMEOUT_MS,
    TRANSACTIONAL,
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


# Ends


def test_records_are_visible_after_the_commit_only(world: World, producer: Producer) -> None:
    assert producer.add(0, 1) == [0, 0]
    assert producer.add(0, topic="u") == [0]
    reported = [producer.produce(0, b"a", b"b"), producer.produce(2, b"c"), producer.produce(0, b"d", partition=1)]
    reported.append(producer.produce(0, b"e", topic="u"))
    assert [(entry.error, entry.base_offset) for entry in reported] == [(0, -1)] * 4
    assert producer.offsets() == 0
    assert (producer.move(7), producer.move(8, group="h", topic="u")) == (0, 0)
    assert stored(world) == stored(world, 1) == stored(world, topic="u") == []
    assert position(world) == (-1, -1, "")
    assert producer.end() == 0
    assert (stored(world), stored(world, 1), stored(world, topic="u")) == ([b"a", b"b", b"c"], [b"d"], [b"e"])
    assert position(world) == (7, 3, "m")
    assert position(world, "h", "u") == (8, 3, "m")


def test_an_aborted_transaction_leaves_nothing_and_sequences_continue(world: World, producer: Producer) -> None:
    producer.add()
    producer.produce(0, b"a", b"b")
    producer.offsets()
    producer.move(7)
    assert producer.end(commits=False) == 0
    producer.add()
    assert producer.produce(2, b"c").error == 0
    assert producer.end() == 0
    assert (stored(world), position(world)) == ([b"c"], (-1, -1, ""))


def test_an_ended_transaction_can_end_again_the_same_way_only(world: World, producer: Producer) -> None:
    assert [producer.end(commits=commits) for commits in (True, False)] == [WireError.INVALID_TXN_STATE] * 2
    for commits in (True, False):
        producer.add()
        producer.produce(int(not commits), b"v")
        assert [producer.end(commits=commits), producer.end(commits=commits)] == [0, 0]
        assert producer.end(commits=not commits) == WireError.INVALID_TXN_STATE
    assert stored(world) == [b"v"]


def test_a_duplicate_batch_is_staged_once(world: World, producer: Producer) -> None:
    producer.add()
    for first in (0, 0, 2, 0, 2):
        entry = producer.produce(first, b"a%d" % first, b"b")
        assert (entry.error, entry.base_offset) == (0, -1)
    assert producer.produce(5, b"gap").error == WireError.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producer.produce(3, b"overlap", b"overlap").error == WireError.OUT_OF_ORDER_SEQUENCE_NUMBER
    producer.end()
    assert stored(world) == [b"a0", b"b", b"a2", b"b"]


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("restarts", [True, False])
def test_sequences_of_an_earlier_transaction_are_no_repetition(
    world: World, producer: Producer, commits: bool, restarts: bool
) -> None:
    """librdkafka gives sequences of batches whose responses it did not get to other records, after an abort."""
    producer.add()
    producer.produce(0, b"a", b"b", b"c")
    producer.end(commits=commits)
    if restarts:
        world.restart()
        producer.peer = world.connect()
    producer.add()
    for values in ([b"d"], [b"d", b"e"], [b"d", b"e", b"f"], [b"d"] * 4):
        assert producer.produce(0, *values).error == WireError.OUT_OF_ORDER_SEQUENCE_NUMBER
    for _ in range(2):
        assert producer.produce(3, b"g").error == 0
    for first in (2, 0):
        assert producer.produce(first, b"h").error == WireError.OUT_OF_ORDER_SEQUENCE_NUMBER
    producer.end()
    assert stored(world) == ([b"a", b"b", b"c"] if commits else []) + [b"g"]


def test_a_batch_is_recognised_after_a_restart(world: World, producer: Producer) -> None:
    producer.add()
    producer.produce(0, b"a", b"b")
    producer.end()
    producer.add()
    producer.produce(2, b"c", b"d")
    world.restart()
    producer.peer = world.connect()
    assert producer.produce(2, b"c", b"d").error == 0
    assert producer.produce(1, b"b", b"c").error == WireError.OUT_OF_ORDER_SEQUENCE_NUMBER
    producer.end()
    assert stored(world) == [b"a", b"b", b"c", b"d"]


def test_sequences_restart_at_0_with_each_epoch(world: World, producer: Producer) -> None:
    producer.add()
    assert producer.produce(1, b"first was lost").error == WireError.OUT_OF_ORDER_SEQUENCE_NUMBER
    producer.produce(0, b"a")
    producer.end()
    producer.init()
    producer.add()
    assert producer.produce(1, b"b").error == WireError.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producer.produce(0, b"b").error == 0


def test_sequences_wrap_around(world: World, producer: Producer) -> None:
    producer.add()
    producer.produce(0, b"a")
    held = world.memory.broker.transactions.find("T")
    assert held is not None
    for numbers in (held.firsts, held.sequences):
        numbers[next(iter(numbers))] = WRAP - 3
    assert producer.produce(WRAP - 2, b"b", b"c", b"d").error == 0
    assert producer.produce(WRAP - 2, b"b", b"c", b"d").error == 0
    assert producer.produce(1, b"e").error == 0
    producer.end()
    assert stored(world) == [b"a", b"b", b"c", b"d", b"e"]


# Holders of an id


def test_a_new_holder_fences_the_old_one_and_aborts_its_transaction(world: World, producer: Producer) -> None:
    producer.add()
    producer.produce(0, b"lost")
    other = Producer(world.connect())
    assert other.init() == 0
    assert (other.number, other.epoch) == (producer.number, 1)
    old, new = WireError.INVALID_PRODUCER_EPOCH, WireError.PRODUCER_FENCED
    for version in range(4):
        code = new if version >= 2 else old
        assert producer.add(version=version) == [code]
        assert producer.offsets(version=version) == code
        assert producer.end(version=version) == code
        assert producer.move(1, version=version) == old
    assert producer.produce(1, b"late").error == old
    other.add()
    other.produce(0, b"new")
    assert other.end() == 0
    assert stored(world) == [b"new"]


@pytest.mark.parametrize(("version", "code"), [(3, WireError.INVALID_PRODUCER_EPOCH), (4, WireError.PRODUCER_FENCED)])
def test_a_claimed_id_and_epoch_are_verified(world: World, producer: Producer, version: int, code: WireError) -> None:
    first = Producer(producer.peer, "T", producer.number, 0)
    assert (first.init(again=True, version=version), first.epoch) == (0, 1)
    repeated = Producer(producer.peer, "T", producer.number, 0)
    assert (repeated.init(again=True, version=version), repeated.epoch) == (0, 1)
    assert (first.init(again=True, version=version), first.epoch) == (0, 2)
    repeated.epoch = 0
    assert repeated.init(again=True, version=version) == code
    stranger = Producer(producer.peer, "T", producer.number + 1, 2)
    assert stranger.init(again=True, version=version) == code
    first.add()
    repeated.epoch = 1
    assert repeated.init(again=True, version=version) == code, "its epoch is in use"
    unknown = Producer(producer.peer, "U", 5, 7)
    assert (unknown.init(again=True, version=version), unknown.epoch) == (0, 0)


def test_an_exhausted_epoch_gets_a_new_producer_id(world: World, producer: Producer) -> None:
    held = world.memory.broker.transactions.find("T")
    assert held is not None
    held.epoch = PRODUCER_EPOCHS - 2
    was = producer.number
    producer.init()
    assert (producer.number, producer.epoch) == (was, PRODUCER_EPOCHS - 1)
    last = Producer(producer.peer, "T", producer.number, producer.epoch)
    producer.init()
    assert producer.number != was
    assert producer.epoch == 0
    assert last.add() == [WireError.INVALID_PRODUCER_ID_MAPPING]
    assert producer.add() == [0]


def test_unknown_ids_and_producer_numbers_are_refused(world: World, producer: Producer) -> None:
    other = Producer(producer.peer, "T", producer.number + 1, 0)
    unknown = Producer(producer.peer, "U", producer.number, 0)
    for wrong in (other, unknown):
        code = WireError.INVALID_PRODUCER_ID_MAPPING
        assert (wrong.add(), wrong.offsets(), wrong.move(1), wrong.end()) == ([code], code, code, code)
        assert wrong.produce(0, b"v").error == code
    assert Producer(producer.peer, "").init() == WireError.INVALID_REQUEST
    assert Producer(producer.peer, "x" * 300).init() == WireError.INVALID_REQUEST
    for timeout_ms in (0, -1, 900_001):
        assert producer.init(timeout_ms=timeout_ms) == WireError.INVALID_TRANSACTION_TIMEOUT


def test_an_id_that_alternates_between_protocols_fences_each_time(world: World, producer: Producer) -> None:
    transactions = world.memory.broker.transactions
    producer.add()
    producer.produce(0, b"lost")
    assert transactions.begin_epoch("T", done=None).epoch == 1
    assert producer.end() == WireError.PRODUCER_FENCED
    was = producer.number
    assert producer.init() == 0
    held = transactions.find("T")
    assert held is not None
    assert held.epoch == 2
    assert producer.number != was
    assert producer.epoch == 0


# Contents of a transaction


def test_partitions_are_added_all_or_none(world: World, producer: Producer) -> None:
    unknown, not_tried = WireError.UNKNOWN_TOPIC_OR_PARTITION, WireError.OPERATION_NOT_ATTEMPTED
    assert producer.add(0, 5, 1) == [not_tried, unknown, not_tried]
    assert producer.add(0, topic="missing") == [unknown]
    assert producer.end() == WireError.INVALID_TXN_STATE, "no transaction was opened"


@pytest.mark.parametrize(
    ("version", "code"), [(9, WireError.INVALID_TXN_STATE), (11, WireError.TRANSACTION_ABORTABLE), (12, WireError.NONE)]
)
def test_records_for_a_partition_that_was_not_added(
    world: World, producer: Producer, version: int, code: WireError
) -> None:
    assert producer.produce(0, b"none is open", version=version).error == code
    producer.add(1)
    assert producer.produce(int(not code), b"v", version=version).error == code
    assert producer.end() == 0
    assert len(stored(world)) == (0 if code else 2)


def test_offsets_need_a_transaction_and_a_member(world: World, producer: Producer) -> None:
    assert producer.move(1) == WireError.INVALID_TXN_STATE
    producer.offsets()
    assert producer.move(1, generation_id=4, member_id="m") == WireError.ILLEGAL_GENERATION
    assert producer.move(1) == 0
    assert producer.move(1, topic="missing") == WireError.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("version", [7, 8])
def test_require_stable_fails_while_a_transaction_holds_offsets(world: World, producer: Producer, version: int) -> None:
    def asked(*, stable: bool) -> list[tuple[int, int]]:
        peer, api = world.connect(), Api.OFFSET_FETCH
        if version == 7:
            topics = [schema.request(api).Topics(name="t", indexes=[0, 1])]
            body = peer.ask(api, 7, group_id=GROUP, topics=topics, require_stable=stable)
        else:
            groups = schema.request(api).Groups
            one = groups(group_id=GROUP, topics=[groups.Topics(name="t", indexes=[0, 1])])
            (body,) = peer.ask(api, 8, groups=[one], require_stable=stable).groups
        return [(entry.error, entry.offset) for entry in body.topics[0].partitions]

    for offset, commits in ((3, True), (4, False), (5, True)):
        was = asked(stable=True)
        producer.offsets()
        assert producer.move(offset) == 0
        assert asked(stable=True) == [(WireError.UNSTABLE_OFFSET_COMMIT, -1), (0, -1)]
        assert asked(stable=False) == was
        assert producer.end(commits=commits) == 0
        assert asked(stable=True) == ([(0, offset), (0, -1)] if commits else was)
    producer.offsets()
    producer.move(6)
    world.memory.advance(TIMEOUT_MS / 1000)
    assert asked(stable=True) == [(0, 5), (0, -1)], "it has timed out"


def test_offsets_and_records_of_a_deleted_topic_are_dropped(world: World, producer: Producer) -> None:
    producer.add()
    producer.add(topic="u")
    producer.produce(0, b"gone")
    producer.produce(0, b"kept", topic="u")
    producer.offsets()
    producer.move(3)
    producer.move(4, topic="u")
    world.memory.broker.delete_topic(world.memory.broker.topic("t"))
    assert producer.end() == 0
    assert stored(world, topic="u") == [b"kept"]
    assert position(world, topic="u")[0] == 4


def test_limits(world: World) -> None:
    limited = BrokerSettings(transaction_batches_max=2, transaction_partitions_max=2, transaction_positions_max=1)
    world = World(broker=limited)
    world.memory.broker.create_topic(TopicName.parse("t"), 3)
    producer = Producer(world.connect())
    producer.init()
    busy = WireError.COORDINATOR_NOT_AVAILABLE
    assert producer.add(0, 1, 2) == [busy] * 3
    assert producer.add(0, 1) == [0, 0]
    assert producer.add(2) == [busy]
    reported = [producer.produce(0, b"v").error, producer.produce(1, b"v").error, producer.produce(2, b"v").error]
    assert reported == [0, 0, WireError.REQUEST_TIMED_OUT]
    assert producer.move(1) == 0
    world.memory.broker.create_topic(TopicName.parse("u"), 1)
    assert producer.move(1, topic="u") != 0
    assert producer.end() == 0


# Timeouts and restarts


def test_a_transaction_that_times_out_is_aborted_and_its_producer_fenced(world: World) -> None:
    producer = Producer(world.connect())
    producer.init(timeout_ms=1_000)
    producer.add()
    producer.produce(0, b"v")
    world.memory.advance(0.9)
    assert producer.produce(1, b"w").error == 0
    world.memory.advance(0.2)
    assert producer.produce(2, b"x").error == WireError.INVALID_PRODUCER_EPOCH
    assert producer.end() == WireError.PRODUCER_FENCED
    assert producer.init(again=True) == WireError.PRODUCER_FENCED
    assert producer.init() == 0
    assert producer.epoch == 2
    assert stored(world) == []


def test_a_transaction_times_out_without_any_request(world: World, producer: Producer) -> None:
    producer.add()
    producer.produce(0, b"v")
    world.memory.advance(TIMEOUT_MS / 1000 + world.memory.settings.expiry_interval_s + 1)
    state = world.memory.broker._state
    assert not state.transactions.open
    assert not world.memory.log._staged


def test_a_restart_leaves_a_transaction_open(world: World, producer: Producer) -> None:
    producer.add()
    producer.produce(0, b"a")
    producer.offsets()
    producer.move(2)
    world.restart()
    producer.peer = world.connect()
    assert producer.produce(0, b"a").error == 0
    assert producer.produce(1, b"b").error == 0
    assert producer.end() == 0
    assert producer.end() == 0
    world.restart()
    producer.peer = world.connect()
    assert producer.end() == 0
    producer.add()
    assert producer.produce(1, b"b").error == WireError.OUT_OF_ORDER_SEQUENCE_NUMBER, "sequences are remembered"
    assert producer.produce(2, b"c").error == 0
    producer.end()
    assert (stored(world), position(world)[0]) == ([b"a", b"b", b"c"], 2)


def test_unsynced_records_are_not_committed_after_a_restart() -> None:
    world = World(kafka=KafkaSettings(acks_all=Level.WRITTEN))
    world.memory.broker.create_topic(TopicName.parse("t"), 1)
    producer = Producer(world.connect())
    producer.init()
    producer.add()
    producer.produce(0, b"may be lost")
    world.restart()
    producer.peer = world.connect()
    assert producer.end() == WireError.PRODUCER_FENCED
    producer.init()
    producer.add()
    producer.produce(0, b"v")
    assert producer.end() == 0
    assert stored(world) == [b"v"]


# Other requests


def test_a_transactional_batch_must_name_its_transaction(world: World, producer: Producer) -> None:
    batch = encode_batch([Record(b"v")], attributes=TRANSACTIONAL, producer_id=1, producer_epoch=0, base_sequence=0)
    topics = schema.request(Api.PRODUCE).Topics
    one = topics(name="t", partitions=[topics.Partitions(records=batch)])
    answer = producer.peer.ask(Api.PRODUCE, 9, acks=1, topics=[one])
    code = answer.responses[0].partitions[0].error
    assert code == WireError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


def test_transactions_are_listed_and_described(world: World, producer: Producer) -> None:
    other = Producer(world.connect(), "U")
    other.init()
    for made, commits in ((producer, True), (other, False)):
        made.add()
        made.produce(0, b"v")
        made.end(commits=commits)
    third = Producer(world.connect(), "V")
    third.init(timeout_ms=30_000)
    third.add(1, 0)
    Producer(world.connect(), "W").init()
    world.memory.broker.transactions.begin_epoch("X", done=None)

    def listed(**filters: Any) -> dict[str, str]:
        answer = producer.peer.ask(Api.LIST_TRANSACTIONS, **filters)
        return {entry.transactional_id: entry.transaction_state for entry in answer.transaction_states}

    everything = {"T": "CompleteCommit", "U": "CompleteAbort", "V": "Ongoing", "W": "Empty", "X": "CompleteAbort"}
    assert listed() == everything
    assert set(listed(transactional_id_pattern="T|[V-W]")) == {"T", "V", "W"}
    assert listed(transactional_id_pattern="unknown") == {}
    assert listed(transactional_id_pattern="") == everything
    wrong = producer.peer.ask(Api.LIST_TRANSACTIONS, transactional_id_pattern="(")
    assert (wrong.error, list(wrong.transaction_states)) == (WireError.INVALID_REGULAR_EXPRESSION, [])
    assert listed(state_filters=["Ongoing", "Empty"]) == {"V": "Ongoing", "W": "Empty"}
    assert listed(producer_id_filters=[other.number]) == {"U": "CompleteAbort"}
    assert listed(duration_filter=5_000) == {}
    world.memory.advance(6)
    assert listed(duration_filter=5_000) == {"V": "Ongoing"}
    answer = producer.peer.ask(Api.LIST_TRANSACTIONS, state_filters=["Odd", "Dead"])
    assert (list(answer.unknown_state_filters), list(answer.transaction_states)) == (["Odd"], [])

    open_one, missing = producer.peer.ask(Api.DESCRIBE_TRANSACTIONS, transactional_ids=["V", "Z"]).transaction_states
    assert (open_one.error, open_one.transaction_state, open_one.transaction_timeout_ms) == (0, "Ongoing", 30_000)
    assert (open_one.producer_id, open_one.producer_epoch) == (third.number, 0)
    assert [(reported.topic, list(reported.partitions)) for reported in open_one.topics] == [("t", [0, 1])]
    assert missing.error == WireError.TRANSACTIONAL_ID_NOT_FOUND
