"""Topics over Kafka: metadata, creation, growth and deletion (spec: kafka#metadata, kafka#createtopics)."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.settings import BrokerSettings
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.kafka.messages import NO_ID, NO_OPERATIONS, SERVED, Api, WireError
from polywire.types import TopicName
from tests.unit.protocols.kafka.dialogue import Dialogue, World

ASKED = schema.request(Api.METADATA).Topics
CREATED = schema.request(Api.CREATE_TOPICS).Topics


def versions(api: Api) -> range:
    return range(SERVED[api].answered_from, SERVED[api].last + 1)


@pytest.fixture
def peer() -> Dialogue:
    return World().connect()


def create(peer: Dialogue, *topics: Any, version: int | None = None, validate_only: bool = False) -> list[Any]:
    return list(peer.ask(Api.CREATE_TOPICS, version, topics=topics, timeout_ms=1, validate_only=validate_only).topics)


def new(name: str, partitions: int = -1, factor: int = -1, **fields: Any) -> Any:
    return CREATED(name=name, num_partitions=partitions, replication_factor=factor, **fields)


def errors(entries: list[Any]) -> list[int]:
    return [entry.error for entry in entries]


# Metadata


@pytest.mark.parametrize("version", versions(Api.METADATA))
def test_metadata_of_one_topic_and_of_all(peer: Dialogue, version: int) -> None:
    topic = peer.world.memory.broker.create_topic(TopicName.parse("shop.orders"), 2)
    every = peer.ask(Api.METADATA, version, topics=() if version == 0 else None)
    one = peer.ask(Api.METADATA, version, topics=[ASKED(name="shop.orders")])
    for reported in (every, one):
        assert [(node.node_id, node.host, node.port) for node in reported.brokers] == [(1, "127.0.0.1", 9094)]
        (entry,) = reported.topics
        assert (entry.error, entry.name) == (0, "shop.orders")
        assert entry.topic_id == (topic.id if version >= 10 else NO_ID)
        assert [(p.index, p.leader_id, list(p.replica_nodes), list(p.isr_nodes)) for p in entry.partitions] == [
            (0, 1, [1], [1]),
            (1, 1, [1], [1]),
        ]
        assert {p.leader_epoch for p in entry.partitions} == ({1} if version >= 7 else {-1})
        assert entry.operations == NO_OPERATIONS


def test_metadata_of_no_topic(peer: Dialogue) -> None:
    peer.world.memory.broker.create_topic(TopicName.parse("orders"), 1)
    reported = peer.ask(Api.METADATA, 1, topics=[])
    assert (list(reported.topics), reported.controller_id) == ([], 1)


def test_the_cluster_keeps_its_id(peer: Dialogue) -> None:
    first = peer.ask(Api.METADATA, topics=[]).cluster_id
    assert len(first) == 22
    world = peer.world
    assert isinstance(world, World)
    assert peer.ask(Api.DESCRIBE_CLUSTER).cluster_id == first
    world.restart()
    assert world.connect().ask(Api.METADATA, topics=[]).cluster_id == first


def test_the_advertised_address_replaces_the_connected_one() -> None:
    peer = World(kafka=KafkaSettings(host="broker.example", port=5)).connect()
    node = peer.ask(Api.METADATA, topics=[]).brokers[0]
    assert (node.host, node.port) == ("broker.example", 5)
    assert peer.ask(Api.FIND_COORDINATOR, 0, key="g").host == "broker.example"
    assert peer.ask(Api.DESCRIBE_CLUSTER, 0).brokers[0].port == 5


def test_topics_can_be_requested_by_id(peer: Dialogue) -> None:
    topic = peer.world.memory.broker.create_topic(TopicName.parse("orders"), 1)
    unknown = b"\7" * 16
    reported = peer.ask(
        Api.METADATA, 12, topics=[ASKED(topic_id=topic.id, name=None), ASKED(topic_id=unknown, name=None)]
    )
    assert [(entry.error, entry.name) for entry in reported.topics] == [
        (0, "orders"),
        (WireError.UNKNOWN_TOPIC_ID, None),
    ]
    early = peer.ask(Api.METADATA, 10, topics=[ASKED(topic_id=topic.id, name="orders")])
    assert errors(early.topics) == [WireError.INVALID_REQUEST]


def test_operations_are_returned_on_request(peer: Dialogue) -> None:
    peer.world.memory.broker.create_topic(TopicName.parse("orders"), 1)
    reported = peer.ask(Api.METADATA, 9, topics=None, want_topic_operations=True)
    assert reported.topics[0].operations == 3576
    assert peer.ask(Api.DESCRIBE_CLUSTER, want_cluster_operations=True).cluster_operations == 8096 & ~0


@pytest.mark.parametrize(
    ("version", "may_create", "made"), [(0, None, True), (3, None, True), (4, True, True), (4, False, False)]
)
def test_a_missing_topic_is_created_if_allowed(
    peer: Dialogue, version: int, may_create: bool | None, made: bool
) -> None:
    fields = {} if may_create is None else {"may_create": may_create}
    (entry,) = peer.ask(Api.METADATA, version, topics=[ASKED(name="orders")], **fields).topics
    assert entry.error == (0 if made else WireError.UNKNOWN_TOPIC_OR_PARTITION)
    assert len(entry.partitions) == (3 if made else 0)
    assert (peer.world.memory.broker.find_topic("orders") is not None) is made


def test_no_topic_is_created_if_automatic_creation_is_off() -> None:
    peer = World(broker=BrokerSettings(auto_create=False)).connect()
    (entry,) = peer.ask(Api.METADATA, 4, topics=[ASKED(name="orders")], may_create=True).topics
    assert entry.error == WireError.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "é", "x" * 250])
def test_invalid_names_are_refused(peer: Dialogue, name: str) -> None:
    (entry,) = peer.ask(Api.METADATA, 4, topics=[ASKED(name=name)], may_create=True).topics
    assert (entry.error, entry.name) == (WireError.INVALID_TOPIC, name)
    assert errors(create(peer, new(name))) == [WireError.INVALID_TOPIC]


def test_a_topic_of_another_protocol_can_have_any_name(peer: Dialogue) -> None:
    peer.world.memory.broker.create_topic(TopicName.parse("é=1"), 1)
    (entry,) = peer.ask(Api.METADATA, 4, topics=[ASKED(name="é=1")], may_create=False).topics
    assert (entry.error, len(entry.partitions)) == (0, 1)


def test_many_topics_are_returned_in_slices(peer: Dialogue) -> None:
    broker = peer.world.memory.broker
    for number in range(200):
        broker.create_topic(TopicName.parse(f"t{number}"), 1)
    reported = peer.ask(Api.METADATA, topics=None)
    assert {entry.name for entry in reported.topics} == {f"t{number}" for number in range(200)}


# Creation


@pytest.mark.parametrize("version", versions(Api.CREATE_TOPICS))
def test_topics_are_created(peer: Dialogue, version: int) -> None:
    factor = 1 if version < 4 else -1
    entries = create(peer, new("orders", 2, factor), new("events", 1 if version < 4 else -1, factor), version=version)
    broker = peer.world.memory.broker
    assert errors(entries) == [0, 0]
    assert [len(broker.topic(name).partitions) for name in ("orders", "events")] == [2, 1 if version < 4 else 3]
    if version >= 5:
        assert (entries[0].num_partitions, entries[0].replication_factor) == (2, 1)
        assert {config.name for config in entries[0].configs} >= {"cleanup.policy", "retention.ms"}
    if version >= 7:
        assert entries[0].topic_id == broker.topic("orders").id


@pytest.mark.parametrize(
    ("topic", "error"),
    [
        (new("old"), WireError.TOPIC_ALREADY_EXISTS),
        (new("t", 0), WireError.INVALID_PARTITIONS),
        (new("t", -2), WireError.INVALID_PARTITIONS),
        (new("t", 1_000_000), WireError.INVALID_PARTITIONS),
        (new("t", 1, 0), WireError.INVALID_REPLICATION_FACTOR),
        (new("t", 1, 3), WireError.INVALID_REPLICATION_FACTOR),
        (new("t", configs=[CREATED.Configs(name="colour", value="red")]), WireError.INVALID_CONFIG),
        (new("t", configs=[CREATED.Configs(name="retention.ms", value="soon")]), WireError.INVALID_CONFIG),
        (new("t", assignments=[CREATED.Assignments(index=0, broker_ids=[2])]), WireError.INVALID_REPLICA_ASSIGNMENT),
        (new("t", assignments=[CREATED.Assignments(index=1, broker_ids=[1])]), WireError.INVALID_REPLICA_ASSIGNMENT),
        (new("t", 1, assignments=[CREATED.Assignments(index=0, broker_ids=[1])]), WireError.INVALID_REQUEST),
    ],
)
def test_refused_topic_creations(peer: Dialogue, topic: Any, error: WireError) -> None:
    peer.world.memory.broker.create_topic(TopicName.parse("old"), 1)
    entries = create(peer, topic, new("good"))
    assert errors(entries) == [error, 0]
    assert ("replication factor" in entries[0].message) is (error is WireError.INVALID_REPLICATION_FACTOR)
    assert peer.world.memory.broker.find_topic("t") is None


def test_a_duplicate_name_in_a_request_is_not_created(peer: Dialogue) -> None:
    assert errors(create(peer, new("t"), new("t"), new("u"))) == [WireError.INVALID_REQUEST, 0]
    assert peer.world.memory.broker.find_topic("t") is None


def test_assigned_replicas_must_be_this_broker(peer: Dialogue) -> None:
    assigned = [CREATED.Assignments(index=index, broker_ids=[1]) for index in range(4)]
    assert errors(create(peer, new("t", assignments=assigned))) == [0]
    assert len(peer.world.memory.broker.topic("t").partitions) == 4


def test_validate_only_creates_nothing(peer: Dialogue) -> None:
    assert errors(create(peer, new("t"), new("u", 0), validate_only=True)) == [0, WireError.INVALID_PARTITIONS]
    assert not peer.world.memory.broker.topics()


# Growth and deletion


@pytest.mark.parametrize("version", versions(Api.CREATE_PARTITIONS))
def test_partitions_are_added(peer: Dialogue, version: int) -> None:
    broker = peer.world.memory.broker
    broker.create_topic(TopicName.parse("orders"), 2)
    asked = schema.request(Api.CREATE_PARTITIONS).Topics
    placed = asked.Assignments(broker_ids=[1])
    reported = peer.ask(
        Api.CREATE_PARTITIONS,
        version,
        topics=[
            asked(name="orders", count=4, assignments=[placed, placed]),
            asked(name="orders", count=2, assignments=None),
            asked(name="orders", count=6, assignments=[placed]),
            asked(name="none", count=9, assignments=None),
        ],
    )
    assert errors(reported.results) == [
        0,
        WireError.INVALID_PARTITIONS,
        WireError.INVALID_REPLICA_ASSIGNMENT,
        WireError.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    only = peer.ask(
        Api.CREATE_PARTITIONS, version, topics=[asked(name="orders", count=5, assignments=None)], validate_only=True
    )
    assert errors(only.results) == [0]
    assert len(broker.topic("orders").partitions) == 4


@pytest.mark.parametrize("version", versions(Api.DELETE_TOPICS))
def test_topics_are_deleted(peer: Dialogue, version: int) -> None:
    broker = peer.world.memory.broker
    topic = broker.create_topic(TopicName.parse("orders"), 2)
    asked = schema.request(Api.DELETE_TOPICS).Topics
    if version >= 6:
        fields: dict[str, Any] = {
            "topics": [asked(name=None, topic_id=topic.id), asked(name=None, topic_id=b"\7" * 16), asked(name="none")]
        }
        expected = [0, WireError.UNKNOWN_TOPIC_ID, WireError.UNKNOWN_TOPIC_OR_PARTITION]
    else:
        fields = {"topic_names": ["orders", "none"]}
        expected = [0, WireError.UNKNOWN_TOPIC_OR_PARTITION]
    reported = peer.ask(Api.DELETE_TOPICS, version, **fields)
    assert errors(reported.responses) == expected
    assert reported.responses[0].name == "orders"
    assert broker.find_topic("orders") is None


def test_a_recreated_topic_has_another_id(peer: Dialogue) -> None:
    (first,) = create(peer, new("t"))
    peer.ask(Api.DELETE_TOPICS, topics=[schema.request(Api.DELETE_TOPICS).Topics(name="t")])
    (second,) = create(peer, new("t"))
    assert first.topic_id != second.topic_id
