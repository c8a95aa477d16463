"""Requests that name very many things: done in slices, in order, and no further when nobody waits for the answer any more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from polywire.protocols.kafka import reply_slots, schema
from polywire.protocols.kafka.client_codec import decode_response
from polywire.protocols.kafka.codec import encode_response
from polywire.protocols.kafka.messages import SERVED, Api
from polywire.protocols.kafka.replies import AT_ONCE_MAX
from polywire.types import TopicName
from tests.unit.protocols.kafka.dialogue import World

COUNT = 3 * AT_ONCE_MAX
TOPIC = 2  # a resource that has settings


@pytest.fixture
def world() -> World:
    world = World()
    for number in range(COUNT):
        world.memory.broker.create_topic(TopicName("default", f"t{number}"), 1)
    world.memory.run()
    return world


def altered(api: Api, *, validate_only: bool = True) -> Any:
    """All topics' settings."""
    resource = schema.request(api).Resources
    configs = [resource.Configs(name="retention.ms", value="1000")]
    named = [resource(resource_type=TOPIC, resource_name=f"t{number}", configs=configs) for number in range(COUNT)]
    return schema.request(api)(resources=named, validate_only=validate_only)


def created() -> Any:
    """As many new topics."""
    request = schema.request(Api.CREATE_TOPICS)
    named = [request.Topics(name=f"new{number}", num_partitions=1, replication_factor=1) for number in range(COUNT)]
    return request(topics=named, validate_only=True)


def named(api: Api, prefix: str = "none", **fields: Any) -> Any:
    """As many topics."""
    request = schema.request(api)
    return request(topics=[request.Topics(name=f"{prefix}{number}", **fields) for number in range(COUNT)])


def numbered(api: Api, **fields: Any) -> Any:
    """As many partitions, of which the topic has one."""
    request = schema.request(api)
    partitions = [request.Topics.Partitions(index=number, **fields) for number in range(COUNT)]
    return request(topics=[request.Topics(name="t0", partitions=partitions)])


WIDE: dict[Api, Callable[[], Any]] = {
    Api.ALTER_CONFIGS: partial(altered, Api.ALTER_CONFIGS),
    Api.INCREMENTAL_ALTER_CONFIGS: partial(altered, Api.INCREMENTAL_ALTER_CONFIGS),
    Api.CREATE_TOPICS: created,
    Api.LIST_OFFSETS: partial(numbered, Api.LIST_OFFSETS, timestamp=-1),
    Api.DELETE_RECORDS: partial(numbered, Api.DELETE_RECORDS, offset=-2),
    Api.DELETE_TOPICS: partial(named, Api.DELETE_TOPICS),
    Api.CREATE_PARTITIONS: partial(named, Api.CREATE_PARTITIONS, count=2),
}
"""Requests that name more than is done at once, and whose answers wait for nothing else."""


@pytest.mark.parametrize("api", WIDE)
def test_others_are_served_while_many_things_are_asked_for(world: World, api: Api) -> None:
    peer, other = world.connect(), world.connect()
    peer.tell(api, SERVED[api].last, WIDE[api]())
    assert not peer.sent, "it is done in slices"
    other.tell(Api.API_VERSIONS, 0, schema.request(Api.API_VERSIONS)())
    assert other.sent
    assert not peer.sent
    peer.pass_by()
    assert len(list(peer.frames())) == 1


def ages(world: World) -> list[int | None]:
    """How long each topic's own records are kept."""
    return [world.memory.broker.topic(f"t{number}").settings.retention_age_us for number in range(COUNT)]


def test_what_comes_behind_many_changes_finds_them_made(world: World) -> None:
    peer = world.connect()
    peer.tell(Api.ALTER_CONFIGS, 2, altered(Api.ALTER_CONFIGS, validate_only=False))
    request = schema.request(Api.DESCRIBE_CONFIGS)
    last = request.Resources(resource_type=TOPIC, resource_name=f"t{COUNT - 1}", configuration_keys=["retention.ms"])
    peer.tell(Api.DESCRIBE_CONFIGS, 4, request(resources=[last]))
    peer.pass_by()
    changed, described = peer.frames()
    assert len(decode_response(Api.ALTER_CONFIGS, 2, changed)[1].responses) == COUNT
    told = decode_response(Api.DESCRIBE_CONFIGS, 4, described)[1]
    assert [config.value for config in told.results[0].configs] == ["1000"]
    assert ages(world) == [1_000_000] * COUNT


def test_many_changes_are_answered_one_by_one(world: World) -> None:
    asked = altered(Api.ALTER_CONFIGS, validate_only=False)
    asked.resources[COUNT - 2].resource_name = "none"
    told = world.connect().ask(Api.ALTER_CONFIGS, resources=asked.resources).responses
    assert [one.resource_name for one in told] == [one.resource_name for one in asked.resources]
    assert [bool(one.error) for one in told] == [number == COUNT - 2 for number in range(COUNT)]


def test_changes_that_nobody_waits_for_any_more_are_not_begun(world: World) -> None:
    peer = world.connect()
    peer.tell(Api.ALTER_CONFIGS, 2, altered(Api.ALTER_CONFIGS, validate_only=False))
    peer.session.close()
    peer.pass_by()
    begun = AT_ONCE_MAX + 1  # one more, to see whether there are more
    assert ages(world) == [1_000_000] * begun + [None] * (COUNT - begun)


def described() -> Any:
    """All topics' settings."""
    request = schema.request(Api.DESCRIBE_CONFIGS)
    named = [request.Resources(resource_type=TOPIC, resource_name=f"t{number}") for number in range(COUNT)]
    return request(resources=named)


@pytest.mark.parametrize(
    ("api", "made"), [(Api.DESCRIBE_CONFIGS, described), (Api.ALTER_CONFIGS, WIDE[Api.ALTER_CONFIGS])]
)
def test_a_wide_answer_is_encoded_entry_by_entry(
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
    told = decode_response(api, SERVED[api].last, frame)[1]
    named = [one.resource_name for one in (told.results if api is Api.DESCRIBE_CONFIGS else told.responses)]
    assert named == [f"t{number}" for number in range(COUNT)]


def test_topics_that_nobody_waits_for_any_more_are_not_deleted(world: World) -> None:
    peer = world.connect()
    peer.tell(Api.DELETE_TOPICS, SERVED[Api.DELETE_TOPICS].last, named(Api.DELETE_TOPICS, "t"))
    peer.session.close()
    peer.pass_by()
    assert len(world.memory.broker.topics()) == COUNT - AT_ONCE_MAX - 1
