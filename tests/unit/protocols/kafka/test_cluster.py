"""Responses of a broker without replicas, paged topics, and wide responses in slices (spec: kafka#other-calls)."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.kafka.messages import Api, WireError
from polywire.types import TopicName
from tests.unit.protocols.kafka.dialogue import Dialogue, World

PARTITIONS = 2_000


@pytest.fixture
def world() -> World:
    world = World()
    for name, count in (("b", 3), ("a", 2), ("c", 1)):
        world.memory.broker.create_topic(TopicName("default", name), count)
    world.memory.run()
    return world


def test_elections_and_reassignments_have_nothing_to_do(world: World) -> None:
    peer = world.connect()
    made = schema.request(Api.ELECT_LEADERS).TopicPartitions
    asked = [made(topic="a", partitions=[0, 1, 2]), made(topic="none", partitions=[0])]
    reported = peer.ask(Api.ELECT_LEADERS, topic_partitions=asked).replica_election_results
    assert [[(one.partition_id, one.error) for one in entry.partition_result] for entry in reported] == [
        [(0, 84), (1, 84), (2, 3)],
        [(0, 3)],
    ]
    assert list(peer.ask(Api.ELECT_LEADERS, topic_partitions=None).replica_election_results) == []
    assert list(peer.ask(Api.LIST_PARTITION_REASSIGNMENTS, topics=None).topics) == []
    assert list(peer.ask(Api.DESCRIBE_CLIENT_QUOTAS).entries) == []
    assert list(peer.ask(Api.LIST_CONFIG_RESOURCES).config_resources) == []


def pages(peer: Dialogue, limit: int, *names: str) -> list[list[tuple[str, list[int]]]]:
    request = schema.request(Api.DESCRIBE_TOPIC_PARTITIONS)
    cursor: Any = None
    found: list[list[tuple[str, list[int]]]] = []
    while not found or cursor is not None:
        answer = peer.ask(
            Api.DESCRIBE_TOPIC_PARTITIONS,
            topics=[request.Topics(name=name) for name in names],
            response_partition_limit=limit,
            cursor=cursor,
        )
        found.append([(topic.name, [one.index for one in topic.partitions]) for topic in answer.topics])
        cursor = answer.next_cursor and request.Cursor(
            topic_name=answer.next_cursor.topic_name, index=answer.next_cursor.index
        )
    return found


def test_topics_are_paged(world: World) -> None:
    peer = world.connect()
    a, b, c = ("a", [0, 1]), ("b", [0, 1, 2]), ("c", [0])
    assert pages(peer, 2000) == [[a, b, c]]
    assert pages(peer, 2) == [[a], [("b", [0, 1])], [("b", [2]), c]]
    assert pages(peer, 6, "c", "b", "none", "a") == [[a, b, c], [("none", [])]]
    assert pages(peer, 0, "b") == [[("b", [0])], [("b", [1])], [("b", [2])]]


def test_a_page_matches_the_metadata(world: World) -> None:
    peer = world.connect()
    request = schema.request(Api.DESCRIBE_TOPIC_PARTITIONS)
    cursor = request.Cursor(topic_name="aa", index=7)
    answer = peer.ask(Api.DESCRIBE_TOPIC_PARTITIONS, topics=[], cursor=cursor)
    assert [topic.name for topic in answer.topics] == ["b", "c"]
    topic = answer.topics[0]
    named = schema.request(Api.METADATA).Topics(name="b")
    known = peer.ask(Api.METADATA, 12, topics=[named], want_topic_operations=True).topics[0]
    assert (topic.topic_id, topic.operations) == (known.topic_id, known.operations)
    one, other = topic.partitions[0], known.partitions[0]
    assert (one.leader_id, one.leader_epoch) == (other.leader_id, other.leader_epoch)
    assert (list(one.replica_nodes), list(one.eligible_leader_replicas)) == ([1], [])
    missing = peer.ask(Api.DESCRIBE_TOPIC_PARTITIONS, topics=[request.Topics(name="none")]).topics[0]
    assert missing.error == WireError.UNKNOWN_TOPIC_OR_PARTITION


def test_a_replication_factor_above_one_is_accepted_if_configured() -> None:
    def reported(world: World, factor: int) -> Any:
        one = schema.request(Api.CREATE_TOPICS).Topics(name="t", num_partitions=1, replication_factor=factor)
        return world.connect().ask(Api.CREATE_TOPICS, topics=[one], validate_only=True).topics[0]

    def made(world: World, factor: int) -> tuple[int, int]:
        topic = reported(world, factor)
        return topic.error, topic.replication_factor

    alone, three = World(), World(kafka=KafkaSettings(replication_factor_max=3))
    assert made(alone, 1) == made(three, 1) == made(three, 3) == made(three, -1) == (WireError.NONE, 1)
    for world, factor in ((alone, 3), (alone, 0), (three, 4), (three, 0), (three, -2)):
        assert made(world, factor)[0] == WireError.INVALID_REPLICATION_FACTOR
    assert "must be 1: " in reported(alone, 3).message
    assert "must be 1 to 3: " in reported(three, 4).message
    assert "(to accept a higher number, start the broker with --kafka-replication-factor-max) got=4" in (
        reported(three, 4).message
    )


# Wide responses


ASKED = schema.request(Api.OFFSET_FOR_LEADER_EPOCH).Topics
ENDS = ASKED(topic="wide", partitions=[ASKED.Partitions(partition=n, leader_epoch=1) for n in range(PARTITIONS)])


@pytest.fixture
def wide() -> World:
    world = World()
    world.memory.broker.create_topic(TopicName("default", "wide"), PARTITIONS)
    world.memory.run()
    return world


@pytest.mark.parametrize(
    ("api", "version", "fields"),
    [
        (Api.METADATA, 9, {"topics": None}),
        (Api.METADATA, 9, {"topics": [schema.request(Api.METADATA).Topics(name="wide")]}),
        (Api.DESCRIBE_LOG_DIRS, 4, {"topics": None}),
        (
            Api.DESCRIBE_CONFIGS,
            4,
            {
                "resources": [schema.request(Api.DESCRIBE_CONFIGS).Resources(resource_type=2, resource_name="wide")]
                * 100
            },
        ),
        (Api.OFFSET_FOR_LEADER_EPOCH, 4, {"topics": [ENDS]}),
    ],
    ids=["all topics", "a topic", "log dirs", "configs", "ends"],
)
def test_other_requests_are_served_while_a_wide_response_is_built(
    wide: World, api: Api, version: int, fields: dict[str, Any]
) -> None:
    peer, other = wide.connect(), wide.connect()
    peer.tell(api, version, schema.request(api)(**fields))
    assert not peer.sent, "it is built in slices"
    other.tell(Api.API_VERSIONS, 0, schema.request(Api.API_VERSIONS)())
    assert other.sent
    assert not peer.sent
    peer.pass_by()
    assert len(list(peer.frames())) == 1


def test_a_wide_response_is_complete(wide: World) -> None:
    peer = wide.connect()
    reported = peer.ask(Api.METADATA, 9, topics=None).topics
    assert [[one.index for one in topic.partitions] for topic in reported] == [list(range(PARTITIONS))]
    ends = peer.ask(Api.OFFSET_FOR_LEADER_EPOCH, topics=[ENDS]).topics
    assert [[one.partition for one in topic.partitions] for topic in ends] == [list(range(PARTITIONS))]
    sizes = peer.ask(Api.DESCRIBE_LOG_DIRS, topics=None).results[0].topics
    assert [[one.index for one in topic.partitions] for topic in sizes] == [list(range(PARTITIONS))]
