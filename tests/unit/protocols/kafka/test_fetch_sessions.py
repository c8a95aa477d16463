"""Fetch sessions over the Kafka wire (spec: kafka#fetch-sessions)."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from polywire.broker.settings import AccessList
from polywire.broker.topics import Topic
from polywire.protocols.kafka import fetch, fetch_sessions, schema
from polywire.protocols.kafka.client_batches import decode_batches
from polywire.protocols.kafka.client_codec import decode_response
from polywire.protocols.kafka.fetch_responses import IDS_SINCE
from polywire.protocols.kafka.messages import NO_ID, SERVED, Api, WireError
from polywire.protocols.kafka.session import KafkaSession
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.memory_log import MemoryPartition
from polywire.types import Level, TopicName
from tests.unit.protocols.kafka.dialogue import Dialogue, World

REQUEST = schema.request(Api.FETCH)
FIRST_VERSION = 7
BYTES = 1 << 20


@pytest.fixture
def world() -> World:
    return World()


def make(world: World, partitions: int = 1, name: str = "orders") -> Topic:
    return world.memory.broker.create_topic(TopicName.parse(name), partitions)


def put(world: World, topic: Topic, *values: bytes, partition: int = 0) -> None:
    batch = from_records([Record(value) for value in values])
    world.memory.broker.produce(topic.partitions[partition], batch, level=Level.WRITTEN, done=None)
    world.memory.run()


class Consumer:
    """A client's side of a session: the offset of each partition, and what the broker has been sent."""

    def __init__(self, world: World, version: int = 12) -> None:
        self.world = world
        self.peer: Dialogue = world.connect()
        self.version = version
        self.number = 0
        self.epoch = 0

    def names(self, topic: Topic) -> dict[str, Any]:
        return {"topic": topic.name.full, "topic_id": topic.id if self.version >= IDS_SINCE else NO_ID}

    def body(self, wanted: dict[Topic, dict[int, int]], forgotten: dict[Topic, list[int]], **fields: Any) -> Any:
        limit = fields.pop("limit", BYTES)
        topics = [
            REQUEST.Topics(
                **self.names(topic),
                partitions=[
                    REQUEST.Topics.Partitions(partition=number, fetch_offset=offset, partition_max_bytes=limit)
                    for number, offset in partitions.items()
                ],
            )
            for topic, partitions in wanted.items()
        ]
        dropped = [REQUEST.Forgotten(**self.names(topic), partitions=numbers) for topic, numbers in forgotten.items()]
        asked = {"min_bytes": 1, "session_id": self.number, "session_epoch": self.epoch, **fields}
        return REQUEST(topics=topics, forgotten=dropped, **asked)

    def tell(
        self, wanted: dict[Topic, dict[int, int]], forgotten: dict[Topic, list[int]] | None = None, **fields: Any
    ) -> None:
        """Send a fetch without waiting."""
        self.peer.tell(Api.FETCH, self.version, self.body(wanted, forgotten or {}, **fields))
        self.peer.pass_by()

    def hear(self) -> Any:
        """Return the response and advance the session."""
        (frame,) = self.peer.frames()
        answer = decode_response(Api.FETCH, self.version, frame)[1]
        if not answer.error:
            self.number = answer.session_id
            self.epoch += 1
        return answer

    def ask(
        self,
        wanted: dict[Topic, dict[int, int]] | None = None,
        forgotten: dict[Topic, list[int]] | None = None,
        **fields: Any,
    ) -> Any:
        self.tell(wanted or {}, forgotten, **fields)
        return self.hear()


def reported(answer: Any) -> dict[tuple[str, int], list[bytes | None] | int]:
    """Return the values or the error of each partition in a response."""
    return {
        (one.topic or "", entry.index): entry.error or [record.value for record in decode_batches(entry.records)]
        for one in answer.responses
        for entry in one.partitions
    }


def session_of(consumer: Consumer) -> KafkaSession:
    session = consumer.peer.session
    assert isinstance(session, KafkaSession)
    return session


def waits(world: World, topic: Topic) -> int:
    """Return how many requests wait for records of a topic."""
    logs = [partition.log for partition in topic.partitions]
    return sum([len(log.wakes) for log in logs if isinstance(log, MemoryPartition)])


# Responses


@pytest.mark.parametrize("version", range(FIRST_VERSION, SERVED[Api.FETCH].last + 1))
def test_a_response_has_only_changes(world: World, version: int) -> None:
    topic = make(world, 3)
    put(world, topic, b"a", partition=1)
    consumer = Consumer(world, version)
    name = topic.name.full if version < IDS_SINCE else ""
    first = consumer.ask({topic: {0: 0, 1: 0, 2: 0}})
    assert reported(first) == {(name, 0): [], (name, 1): [b"a"], (name, 2): []}
    assert consumer.number > 0
    assert reported(consumer.ask({topic: {1: 1}})) == {}
    put(world, topic, b"b", partition=2)
    assert reported(consumer.ask()) == {(name, 2): [b"b"]}
    assert consumer.number == first.session_id


def test_a_partition_of_an_earlier_request_completes_an_empty_request(world: World) -> None:
    topic = make(world, 3)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0, 1: 0, 2: 0}})
    for number in range(6):
        consumer.tell({}, max_wait_ms=60_000)
        assert not consumer.peer.sent
        put(world, topic, b"a", partition=number % 3)
        consumer.peer.pass_by()
        assert reported(consumer.hear()) == {("orders", number % 3): [b"a"]}
        consumer.ask({topic: {number % 3: number // 3 + 1}})


def test_a_waiting_request_without_changes_ends_in_time(world: World) -> None:
    topic = make(world)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0}})
    consumer.tell({}, max_wait_ms=500)
    world.memory.advance(0.4)
    consumer.peer.pass_by()
    assert not consumer.peer.sent
    world.memory.advance(0.2)
    consumer.peer.pass_by()
    assert reported(consumer.hear()) == {}


def test_records_are_sent_again_until_the_client_advances(world: World) -> None:
    topic = make(world)
    put(world, topic, b"a")
    consumer = Consumer(world)
    for _ in range(3):
        assert reported(consumer.ask({topic: {0: 0}} if not consumer.number else {})) == {("orders", 0): [b"a"]}


def test_partitions_are_added_and_forgotten(world: World) -> None:
    topic, other = make(world, 2), make(world, 1, "others")
    put(world, topic, b"a", partition=1)
    put(world, other, b"b")
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0}})
    assert reported(consumer.ask({topic: {1: 1}, other: {0: 0}})) == {("orders", 1): [], ("others", 0): [b"b"]}
    assert reported(consumer.ask({}, {other: [0, 7], topic: [1]})) == {}
    put(world, other, b"c")
    put(world, topic, b"d", partition=1)
    assert reported(consumer.ask()) == {}
    put(world, topic, b"e", partition=0)
    assert reported(consumer.ask()) == {("orders", 0): [b"e"]}
    assert waits(world, other) == 0


def test_a_session_without_partitions_ends(world: World) -> None:
    topic = make(world)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0}})
    assert consumer.ask({}, {topic: [0]}, min_bytes=0).session_id == 0
    assert world.factory.shared.fetch_sessions.count == 0


def test_a_session_waits_for_min_bytes(world: World) -> None:
    topic = make(world, 2)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0, 1: 0}})
    consumer.tell({}, max_wait_ms=60_000, min_bytes=3_000)
    for number, partition in enumerate((0, 1, 0)):
        assert not consumer.peer.sent, number
        put(world, topic, b"%d" % number * 1_100, partition=partition)
        consumer.peer.pass_by()
    found = reported(consumer.hear())
    assert found == {("orders", 0): [b"0" * 1_100, b"2" * 1_100], ("orders", 1): [b"1" * 1_100]}


def test_partitions_take_turns_if_a_response_is_too_small_for_all(world: World) -> None:
    topic = make(world, 4)
    consumer = Consumer(world)
    offsets = dict.fromkeys(range(4), 0)
    consumer.ask({topic: offsets}, max_bytes=1)
    for number in range(4):
        put(world, topic, *[b"a" * 100] * 4, partition=number)
    served = []
    for _ in range(16):
        ((_, number), found), *others = reported(consumer.ask({}, max_bytes=100)).items()
        assert isinstance(found, list)
        assert found
        assert not any(values for _, values in others)
        served.append(number)
    assert sorted(served[:4]) == sorted(served[4:8]) == [0, 1, 2, 3]


# Errors


def test_errors_are_repeated_until_they_are_resolved(world: World) -> None:
    topic = make(world)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0, 5: 0}})
    missing = {("orders", 5): WireError.UNKNOWN_TOPIC_OR_PARTITION}
    for _ in range(2):
        assert reported(consumer.ask({}, max_wait_ms=9_000)) == missing
    assert reported(consumer.ask({}, {topic: [5]})) == {}
    assert reported(consumer.ask({topic: {0: 9}})) == {("orders", 0): WireError.OFFSET_OUT_OF_RANGE}


def test_a_deleted_topic_is_reported_and_its_replacement_is_read(world: World) -> None:
    topic = make(world)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0}})
    consumer.tell({}, max_wait_ms=60_000)
    assert not consumer.peer.sent
    world.memory.broker.delete_topic(topic)
    consumer.peer.pass_by()
    assert reported(consumer.hear()) == {("orders", 0): WireError.UNKNOWN_TOPIC_OR_PARTITION}
    put(world, make(world), b"new")
    assert reported(consumer.ask()) == {("orders", 0): [b"new"]}


def test_a_user_who_lost_permission_gets_no_records(world: World) -> None:
    topic = make(world)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0}})
    consumer.tell({}, max_wait_ms=60_000)
    world.memory.broker.configure_topic(topic, replace(topic.settings, access=AccessList(readers=("root",))))
    put(world, topic, b"secret")
    consumer.peer.pass_by()
    assert reported(consumer.hear()) == {("orders", 0): WireError.TOPIC_AUTHORIZATION_FAILED}


def test_sessions_of_other_connections_are_refused(world: World) -> None:
    topic = make(world)
    consumer, other = Consumer(world), Consumer(world)
    consumer.ask({topic: {0: 0}})
    other.ask({topic: {0: 0}})
    assert consumer.number != other.number
    thief = Consumer(world)
    thief.number, thief.epoch = consumer.number, consumer.epoch
    for number, epoch, error in (
        (consumer.number + 100, 1, WireError.FETCH_SESSION_ID_NOT_FOUND),
        (other.number, 1, WireError.FETCH_SESSION_ID_NOT_FOUND),
        (0, 1, WireError.FETCH_SESSION_ID_NOT_FOUND),
        (consumer.number, 2, WireError.INVALID_FETCH_SESSION_EPOCH),
        (consumer.number, -2, WireError.INVALID_FETCH_SESSION_EPOCH),
    ):
        answer = consumer.peer.ask(Api.FETCH, 12, session_id=number, session_epoch=epoch)
        assert (answer.error, answer.session_id, list(answer.responses)) == (error, 0, [])
    assert thief.ask().error == WireError.FETCH_SESSION_ID_NOT_FOUND
    assert reported(consumer.ask()) == {}, "none of that affected it"


def test_a_session_uses_names_or_ids(world: World) -> None:
    topic = make(world)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0}})
    consumer.version = IDS_SINCE
    assert consumer.ask({topic: {0: 0}}).error == WireError.FETCH_SESSION_TOPIC_ID_ERROR


def test_a_restarted_broker_has_no_sessions(world: World) -> None:
    topic = make(world)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0}})
    world.restart()
    consumer.peer = world.connect()
    assert consumer.ask().error == WireError.FETCH_SESSION_ID_NOT_FOUND


# Start and end


def test_a_client_that_requests_no_session_gets_none(world: World) -> None:
    topic = make(world)
    consumer = Consumer(world)
    assert consumer.ask({topic: {0: 0}}, session_epoch=-1).session_id == 0
    assert consumer.peer.ask(Api.FETCH, 12, session_epoch=0).session_id == 0, "no partition is requested"
    assert world.factory.shared.fetch_sessions.count == 0


@pytest.mark.parametrize("epoch", [fetch.SESSIONLESS, fetch.BEGINNING])
def test_a_client_can_end_its_session(world: World, epoch: int) -> None:
    topic = make(world)
    put(world, topic, b"a")
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0}})
    former = consumer.number
    answer = consumer.ask({topic: {0: 0}}, session_epoch=epoch)
    assert reported(answer) == {("orders", 0): [b"a"]}
    assert (answer.session_id != 0) == (epoch == fetch.BEGINNING)
    assert answer.session_id != former
    assert world.factory.shared.fetch_sessions.count == (epoch == fetch.BEGINNING)


def test_session_epochs_wrap_around(world: World) -> None:
    topic = make(world)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0}})
    kept = session_of(consumer).fetch_session
    assert kept is not None
    kept.epoch = consumer.epoch = fetch_sessions.EPOCH_MAX
    consumer.ask()
    consumer.epoch = 1
    assert reported(consumer.ask()) == {}


def test_a_closed_connection_leaves_no_session_behind(world: World) -> None:
    topic = make(world, 300)
    consumer = Consumer(world)
    consumer.ask({topic: dict.fromkeys(range(300), 0)})
    consumer.tell({}, max_wait_ms=60_000)
    sessions = world.factory.shared.fetch_sessions
    assert (sessions.count, waits(world, topic)) == (1, 300)
    assert sessions.bytes >= 300 * fetch_sessions.PARTITION_BYTES
    consumer.peer.session.close()
    consumer.peer.pass_by()
    assert (sessions.count, sessions.bytes, waits(world, topic)) == (0, 0, 0)
    put(world, topic, b"a")
    consumer.peer.pass_by()
    assert not consumer.peer.sent


# Limits


def test_sessions_are_bounded_and_idle_ones_are_evicted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "SESSIONS_MAX", 2)
    topic = make(world)
    first, second, third = Consumer(world), Consumer(world), Consumer(world)
    first.ask({topic: {0: 0}})
    second.ask({topic: {0: 0}})
    assert third.ask({topic: {0: 0}}).session_id == 0, "both are in use"
    world.memory.advance(fetch_sessions.IDLE_S - 1)
    assert reported(first.ask()) == {}
    world.memory.advance(2)
    third.epoch = 0
    third.ask({topic: {0: 0}})
    assert third.number > 0
    assert second.ask().error == WireError.FETCH_SESSION_ID_NOT_FOUND, "it was least recently used"
    assert reported(first.ask()) == reported(third.ask()) == {}


def test_sessions_have_a_memory_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "BYTES_MAX", 20 * fetch_sessions.PARTITION_BYTES)
    topic = make(world, 30)
    put(world, topic, b"a", partition=29)
    consumer, small = Consumer(world), Consumer(world)
    small.ask({topic: {0: 0}})
    answer = consumer.ask({topic: dict.fromkeys(range(30), 0)})
    assert (answer.session_id, reported(answer)["orders", 29]) == (0, [b"a"]), "it gets a response, but no session"
    consumer.peer.pass_by()
    consumer.epoch = 0
    consumer.ask({topic: dict.fromkeys(range(10), 0)})
    assert consumer.number > 0
    assert consumer.ask({topic: dict.fromkeys(range(10, 30), 0)}).error == WireError.FETCH_SESSION_ID_NOT_FOUND
    consumer.peer.pass_by()
    sessions = world.factory.shared.fetch_sessions
    assert sessions.count == 1
    assert 0 < sessions.bytes <= 2 * (fetch_sessions.PARTITION_BYTES + fetch_sessions.TOPIC_BYTES)
    assert reported(small.ask()) == {}


def test_an_idle_session_is_evicted_for_a_larger_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "BYTES_MAX", 12 * fetch_sessions.PARTITION_BYTES)
    topic = make(world, 10)
    idle, consumer = Consumer(world), Consumer(world)
    idle.ask({topic: dict.fromkeys(range(8), 0)})
    world.memory.advance(fetch_sessions.IDLE_S + 1)
    for expected in (False, True):
        consumer.epoch = consumer.number = 0
        assert (consumer.ask({topic: dict.fromkeys(range(9), 0)}).session_id != 0) == expected
        consumer.peer.pass_by()
    assert idle.ask().error == WireError.FETCH_SESSION_ID_NOT_FOUND


def test_a_session_evicted_while_its_request_waits_is_reported(world: World) -> None:
    topic = make(world)
    consumer = Consumer(world)
    consumer.ask({topic: {0: 0}})
    consumer.tell({}, max_wait_ms=200_000)
    kept = session_of(consumer).fetch_session
    assert kept is not None
    kept.end()
    world.memory.advance(201)
    consumer.peer.pass_by()
    assert consumer.hear().error == WireError.FETCH_SESSION_ID_NOT_FOUND


# Cost


def test_the_cost_of_a_request_depends_on_changes_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = make(world, 2_000)
    consumer = Consumer(world)
    consumer.ask({topic: dict.fromkeys(range(2_000), 0)})
    consumer.ask()
    broker = type(world.memory.broker)
    calls: list[str] = []
    for verb in ("wait", "fetch"):
        original = getattr(broker, verb)

        def counted(*args: Any, name: str = verb, asked: Any = original, **fields: Any) -> Any:
            calls.append(name)
            return asked(*args, **fields)

        monkeypatch.setattr(broker, verb, counted)
    consumer.ask()
    assert calls == []
    put(world, topic, b"a", partition=1_999)
    assert reported(consumer.ask()) == {("orders", 1_999): [b"a"]}
    consumer.ask({topic: {1_999: 1}})
    assert calls == ["fetch", "wait"]


# Completeness


@pytest.mark.parametrize("seed", range(30))
def test_a_session_returns_every_record(world: World, seed: int) -> None:
    """A client like Java's with partitions added and removed, small responses and broken connections."""
    chance = Random(seed)
    version = chance.choice((12, 13))
    topics = [make(world, 5, "a"), make(world, 3, "b")]
    by_name = {topic.name.full: topic for topic in topics}
    by_id = {topic.id: topic for topic in topics}
    every = [(topic, number) for topic in topics for number in range(len(topic.partitions))]
    written: dict[tuple[str, int], list[bytes | None]] = {(topic.name.full, number): [] for topic, number in every}
    found: dict[tuple[str, int], list[bytes | None]] = {key: [] for key in written}
    said: dict[tuple[Topic, int], int] = {}
    consumer = Consumer(world, version)
    for step in range(250):
        if step < 200:
            for _ in range(chance.choice((0, 0, 1, 3))):
                topic, number = chance.choice(every)
                value = b"%d" % step * chance.choice((1, 300))
                written[topic.name.full, number].append(value)
                put(world, topic, value, partition=number)
        if chance.random() < 0.02:
            consumer.peer.session.close()
            consumer.peer, consumer.epoch = world.connect(), 0
            said = {}
        wants = every if step >= 200 else chance.sample(every, chance.randrange(1, len(every) + 1))
        wanted: dict[Topic, dict[int, int]] = {}
        for topic, number in wants:
            at = len(found[topic.name.full, number])
            if said.get((topic, number)) != at:
                wanted.setdefault(topic, {})[number] = at
            said[topic, number] = at
        forgotten: dict[Topic, list[int]] = {}
        for topic, number in said.keys() - set(wants):
            forgotten.setdefault(topic, []).append(number)
            del said[topic, number]
        answer = consumer.ask(
            wanted, forgotten, max_bytes=chance.choice((1, 500, BYTES)), limit=chance.choice((1, BYTES))
        )
        assert not answer.error
        for one in answer.responses:
            topic = by_name[one.topic] if version < IDS_SINCE else by_id[one.topic_id]
            for entry in one.partitions:
                assert not entry.error
                values = found[topic.name.full, entry.index]
                values += [record.value for record in decode_batches(entry.records, offset=len(values))]
    assert found == written
