"""Requests that name very many things: handled in slices, in order, and stopped when the connection closes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from polywire.broker.groups.consumer import JOINING, Beat
from polywire.protocols.kafka import reply_slots, schema
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.codec import encode_response
from polywire.protocols.kafka.messages import SERVED, Api
from polywire.protocols.kafka.positions import POSITIONS_AT_ONCE_MAX
from polywire.protocols.kafka.structure_decoder import AT_ONCE_MAX as READ_AT_ONCE_MAX
from polywire.protocols.runtime.slices import AT_ONCE_MAX
from polywire.types import TopicName
from tests.unit.protocols.kafka.dialogue import World

COUNT = 3 * AT_ONCE_MAX
TOPIC = 2  # a resource with settings


@pytest.fixture
def world() -> World:
    world = World()
    for number in range(COUNT):
        world.memory.broker.create_topic(TopicName("default", f"t{number}"), 1)
    world.memory.run()
    return world


def altered(api: Api, *, validate_only: bool = True) -> Any:
    """Return a change of all topics' settings."""
    resource = schema.request(api).Resources
    configs = [resource.Configs(name="retention.ms", value="1000")]
    named = [resource(resource_type=TOPIC, resource_name=f"t{number}", configs=configs) for number in range(COUNT)]
    return schema.request(api)(resources=named, validate_only=validate_only)


def created() -> Any:
    """Return the creation of as many topics."""
    request = schema.request(Api.CREATE_TOPICS)
    named = [request.Topics(name=f"new{number}", num_partitions=1, replication_factor=1) for number in range(COUNT)]
    return request(topics=named, validate_only=True)


def named(api: Api, prefix: str = "none", **fields: Any) -> Any:
    """Return a request for as many topics."""
    request = schema.request(api)
    return request(topics=[request.Topics(name=f"{prefix}{number}", **fields) for number in range(COUNT)])


def numbered(api: Api, **fields: Any) -> Any:
    """Return a request for as many partitions, of which the topic has one."""
    request = schema.request(api)
    partitions = [request.Topics.Partitions(index=number, **fields) for number in range(COUNT)]
    return request(topics=[request.Topics(name="t0", partitions=partitions)])


def elected() -> Any:
    """Return a request for as many partitions of one topic, as plain numbers."""
    request = schema.request(Api.ELECT_LEADERS)
    return request(topic_partitions=[request.TopicPartitions(topic="t0", partitions=list(range(1_500)))])


def added() -> Any:
    """Return a request that adds as many partitions to a transaction."""
    request = schema.request(Api.ADD_PARTITIONS_TO_TXN)
    return request(transactional_id="x", topics=[request.Topics(name="t0", partitions=list(range(COUNT)))])


def moved() -> Any:
    """Return a request that adds as many offsets to a transaction."""
    request = schema.request(Api.TXN_OFFSET_COMMIT)
    partitions = [request.Topics.Partitions(index=number, offset=1) for number in range(AT_ONCE_MAX * 17)]
    return request(transactional_id="x", group_id="g", topics=[request.Topics(name="t0", partitions=partitions)])


WIDE: dict[Api, Callable[[], Any]] = {
    Api.ALTER_CONFIGS: partial(altered, Api.ALTER_CONFIGS),
    Api.INCREMENTAL_ALTER_CONFIGS: partial(altered, Api.INCREMENTAL_ALTER_CONFIGS),
    Api.CREATE_TOPICS: created,
    Api.LIST_OFFSETS: partial(numbered, Api.LIST_OFFSETS, timestamp=-1),
    Api.DELETE_RECORDS: partial(numbered, Api.DELETE_RECORDS, offset=-2),
    Api.DELETE_TOPICS: partial(named, Api.DELETE_TOPICS),
    Api.CREATE_PARTITIONS: partial(named, Api.CREATE_PARTITIONS, count=2),
    Api.ELECT_LEADERS: elected,
    Api.ADD_PARTITIONS_TO_TXN: added,
    Api.TXN_OFFSET_COMMIT: moved,
}
"""Requests that need several slices, and whose responses wait for nothing else."""


@pytest.mark.parametrize("api", WIDE)
def test_other_requests_are_served_during_a_wide_request(world: World, api: Api) -> None:
    peer, other = world.connect(), world.connect()
    peer.tell(api, SERVED[api].last, WIDE[api]())
    assert not peer.sent, "it is done in slices"
    other.tell(Api.API_VERSIONS, 0, schema.request(Api.API_VERSIONS)())
    assert other.sent
    assert not peer.sent
    peer.pass_by()
    assert len(list(peer.frames())) == 1


def ages(world: World) -> list[int | None]:
    """Return each topic's own retention time."""
    return [world.memory.broker.topic(f"t{number}").settings.retention_age_us for number in range(COUNT)]


def test_a_request_after_many_changes_sees_them(world: World) -> None:
    peer = world.connect()
    peer.tell(Api.ALTER_CONFIGS, 2, altered(Api.ALTER_CONFIGS, validate_only=False))
    request = schema.request(Api.DESCRIBE_CONFIGS)
    last = request.Resources(resource_type=TOPIC, resource_name=f"t{COUNT - 1}", configuration_keys=["retention.ms"])
    peer.tell(Api.DESCRIBE_CONFIGS, 4, request(resources=[last]))
    peer.pass_by()
    changed, described = peer.frames()
    assert len(decode_response(Api.ALTER_CONFIGS, 2, changed)[1].responses) == COUNT
    reported = decode_response(Api.DESCRIBE_CONFIGS, 4, described)[1]
    assert [config.value for config in reported.results[0].configs] == ["1000"]
    assert ages(world) == [1_000_000] * COUNT


def test_many_changes_are_reported_one_by_one(world: World) -> None:
    asked = altered(Api.ALTER_CONFIGS, validate_only=False)
    asked.resources[COUNT - 2].resource_name = "none"
    reported = world.connect().ask(Api.ALTER_CONFIGS, resources=asked.resources).responses
    assert [one.resource_name for one in reported] == [one.resource_name for one in asked.resources]
    assert [bool(one.error) for one in reported] == [number == COUNT - 2 for number in range(COUNT)]


def test_changes_of_a_closed_connection_are_not_started(world: World) -> None:
    peer = world.connect()
    peer.tell(Api.ALTER_CONFIGS, 2, altered(Api.ALTER_CONFIGS, validate_only=False))
    peer.session.close()
    peer.pass_by()
    begun = AT_ONCE_MAX + 1  # one more, to detect whether there are more
    assert ages(world) == [1_000_000] * begun + [None] * (COUNT - begun)


def described() -> Any:
    """Return a request for all topics' settings."""
    request = schema.request(Api.DESCRIBE_CONFIGS)
    named = [request.Resources(resource_type=TOPIC, resource_name=f"t{number}") for number in range(COUNT)]
    return request(resources=named)


@pytest.mark.parametrize(
    ("api", "made"), [(Api.DESCRIBE_CONFIGS, described), (Api.ALTER_CONFIGS, WIDE[Api.ALTER_CONFIGS])]
)
def test_a_wide_response_is_encoded_entry_by_entry(
    world: World, api: Api, made: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[Any] = []

    def encoded(request: Any, body: Any) -> list[Any]:
        bodies.append(body)
        return encode_response(request, body)

    monkeypatch.setattr(reply_slots, "encode_response", encoded)
    peer = world.connect()
    peer.tell(api, SERVED[api].last, made())
    peer.pass_by()
    (frame,) = peer.frames()
    (body,) = bodies
    (entries,) = [value for name in body.DEFAULTS if isinstance(value := getattr(body, name), list)]
    assert len(entries) == COUNT
    assert {type(entry) for entry in entries} == {bytes}
    reported = decode_response(api, SERVED[api].last, frame)[1]
    named = [one.resource_name for one in (reported.results if api is Api.DESCRIBE_CONFIGS else reported.responses)]
    assert named == [f"t{number}" for number in range(COUNT)]


def test_topic_deletions_of_a_closed_connection_are_not_started(world: World) -> None:
    peer = world.connect()
    peer.tell(Api.DELETE_TOPICS, SERVED[Api.DELETE_TOPICS].last, named(Api.DELETE_TOPICS, "t"))
    peer.session.close()
    peer.pass_by()
    assert len(world.memory.broker.topics()) == COUNT - AT_ONCE_MAX - 1


def test_a_request_of_very_many_elements_is_decoded_in_slices(world: World) -> None:
    """During decoding other connections are served, and later requests of its own connection wait."""
    names = [f"none{number}" for number in range(10 * READ_AT_ONCE_MAX)]
    request = schema.request(Api.METADATA)
    wide = request(topics=[request.Topics(name=name) for name in names], may_create=False)
    peer, other = world.connect(), world.connect()
    first = peer.tell(Api.METADATA, 9, wide)
    second = peer.tell(Api.API_VERSIONS, 0, schema.request(Api.API_VERSIONS)())
    other.tell(Api.API_VERSIONS, 0, schema.request(Api.API_VERSIONS)())
    assert other.sent
    assert not peer.sent
    peer.pass_by()
    frames = list(peer.frames())
    assert [int.from_bytes(frame[:4], "big") for frame in frames] == [first, second]
    reported = decode_response(Api.METADATA, 9, frames[0])[1].topics
    assert [topic.name for topic in reported] == names


def test_an_invalid_wide_request_closes_its_connection(world: World) -> None:
    request = schema.request(Api.METADATA)
    wide = request(topics=[request.Topics(name="t")] * 2 * READ_AT_ONCE_MAX, may_create=False)
    whole = encode_request(Api.METADATA, 9, 1, wide)
    spoilt = whole[:-9] + b"\xff" * 9  # the last topics, and the tags after them
    peer = world.connect()
    peer.feed(spoilt)
    assert peer.gave_up is None
    peer.pass_by()
    assert peer.gave_up is not None
    assert not peer.sent


def test_decoding_a_wide_request_stops_when_its_connection_closes(world: World) -> None:
    request = schema.request(Api.CREATE_TOPICS)
    new = [request.Topics(name=f"new{n}", num_partitions=1, replication_factor=1) for n in range(READ_AT_ONCE_MAX + 1)]
    peer = world.connect()
    peer.tell(Api.CREATE_TOPICS, 5, request(topics=new))
    peer.session.close()
    peer.pass_by()
    assert len(world.memory.broker.topics()) == COUNT
    assert not peer.sent


def test_requests_of_a_half_closed_client_are_still_executed(world: World) -> None:
    request = schema.request(Api.METADATA)
    peer = world.connect()
    peer.tell(Api.METADATA, 9, request(topics=[request.Topics(name="t0")] * 2 * READ_AT_ONCE_MAX))
    peer.finish()
    assert len(list(peer.frames())) == 1
    assert peer.closed
    assert peer.gave_up is None


def positions(world: World, count: int) -> tuple[Any, Any]:
    """Return a commit of so many offsets, half of them in one topic, and the fetch of them."""
    made, asked = schema.request(Api.OFFSET_COMMIT), schema.request(Api.OFFSET_FETCH).Groups
    wide = [made.Topics.Partitions(index=number, offset=number + 1) for number in range(count // 2)]
    one = [made.Topics.Partitions(index=0, offset=7)]
    topics = [made.Topics(name="wide", partitions=wide)]
    topics += [made.Topics(name=f"t{number % COUNT}", partitions=one) for number in range(count // 2)]
    group = asked(group_id="g", topics=[asked.Topics(name="wide", indexes=list(range(count // 2)))])
    return made(group_id="g", generation=-1, topics=topics), schema.request(Api.OFFSET_FETCH)(groups=[group, group])


def test_many_offsets_are_committed_and_fetched_in_slices(world: World) -> None:
    count = 4 * POSITIONS_AT_ONCE_MAX
    world.memory.broker.create_topic(TopicName("default", "wide"), count // 2)
    commit, question = positions(world, count)
    peer, other = world.connect(), world.connect()
    for body in (commit, question):
        peer.tell(type_of(body), 8, body)
        other.tell(Api.API_VERSIONS, 0, schema.request(Api.API_VERSIONS)())
        assert list(other.frames())
        assert not peer.sent
        peer.pass_by()
        (frame,) = peer.frames()
        reported = decode_response(type_of(body), 8, frame)[1]
        if body is commit:
            assert [topic.name for topic in reported.topics] == [topic.name for topic in commit.topics]
            assert {entry.error for topic in reported.topics for entry in topic.partitions} == {0}
        else:
            assert [len(group.topics) for group in reported.groups] == [1, 1]
            entries = reported.groups[1].topics[0].partitions
            assert [(entry.index, entry.offset) for entry in entries] == [(n, n + 1) for n in range(count // 2)]


def type_of(body: Any) -> Api:
    return Api.OFFSET_COMMIT if hasattr(body, "generation") else Api.OFFSET_FETCH


def in_one_topic(world: World) -> Any:
    """Return a commit of three parts that is decoded at once."""
    count = 3 * POSITIONS_AT_ONCE_MAX
    world.memory.broker.create_topic(TopicName("default", "wide"), count)
    made = schema.request(Api.OFFSET_COMMIT)
    wide = [made.Topics.Partitions(index=number, offset=1) for number in range(count)]
    return made(group_id="g", generation=-1, topics=[made.Topics(name="wide", partitions=wide)])


def test_offsets_of_a_closed_connection_are_not_committed(world: World) -> None:
    peer = world.connect()
    peer.tell(Api.OFFSET_COMMIT, 8, in_one_topic(world))
    peer.session.close()
    peer.pass_by()
    begun = 2 * POSITIONS_AT_ONCE_MAX  # one part more, to detect whether there are more
    assert sorted(world.memory.broker.classic.positions("g", "wide")) == list(range(begun))


def test_permission_to_commit_is_checked_for_each_part(world: World) -> None:
    peer = world.connect()
    peer.tell(Api.OFFSET_COMMIT, 8, in_one_topic(world))
    beat = Beat("m", JOINING, "kafka", rebalance_timeout_s=1.0, topics=frozenset({"wide"}), owned={})
    world.memory.broker.consumers.beat("g", beat)
    peer.pass_by()
    (frame,) = peer.frames()
    errors = [entry.error for entry in decode_response(Api.OFFSET_COMMIT, 8, frame)[1].topics[0].partitions]
    begun = 2 * POSITIONS_AT_ONCE_MAX
    assert set(errors[:begun]) == {0}
    assert 0 not in errors[begun:]
    assert sorted(world.memory.broker.classic.positions("g", "wide")) == list(range(begun))
