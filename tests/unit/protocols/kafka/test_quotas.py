"""DescribeClientQuotas and AlterClientQuotas, and the delay in responses (spec: kafka#quotas)."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.client_quotas import DEFAULT
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING, parse_grants
from polywire.broker.scram import Mechanism, make_verifier
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError
from tests.unit.protocols.kafka.dialogue import Dialogue, World

USER, CLIENT_ID = "user", "client-id"
EXACT, DEFAULTS, ANY = 0, 1, 2
Entity = dict[str, str | None]
HASH = hash_password("secret")


def peer_as(name: str = "admin") -> Dialogue:
    world = World()
    access = world.memory.broker.access
    access.configure(
        [
            ConfiguredUser("admin", HASH, EVERYTHING),
            ConfiguredUser("alice", HASH, parse_grants(["consume"])),
        ]
    )
    world.memory.run()
    peer = world.connect()
    peer.certified = access.certified(name)
    return peer


def alter(peer: Dialogue, entity: Entity, *, validate_only: bool = False, **values: float | None) -> Any:
    made = schema.request(Api.ALTER_CLIENT_QUOTAS).Entries
    ops = [made.Ops(key=key, value=value or 0.0, remove=value is None) for key, value in values.items()]
    parts = [made.Entity(entity_type=kind, entity_name=name) for kind, name in entity.items()]
    entries = [made(entity=parts, ops=ops)]
    (found,) = peer.ask(Api.ALTER_CLIENT_QUOTAS, entries=entries, validate_only=validate_only).entries
    return found


def describe(peer: Dialogue, *filters: tuple[str, int, str | None], strict: bool = False) -> list[tuple[Any, Any]]:
    made = schema.request(Api.DESCRIBE_CLIENT_QUOTAS).Components
    components = [made(entity_type=kind, match_type=match, match=name) for kind, match, name in filters]
    answer = peer.ask(Api.DESCRIBE_CLIENT_QUOTAS, components=components, strict=strict)
    assert answer.error == WireError.NONE, answer.message
    return [
        ({part.entity_type: part.entity_name for part in entry.entity}, {v.key: v.value for v in entry.values})
        for entry in answer.entries
    ]


def test_quotas_are_set_described_and_removed() -> None:
    peer = peer_as()
    assert alter(peer, {USER: "alice"}, producer_byte_rate=1000.0, request_rate=5.0).error == WireError.NONE
    assert alter(peer, {USER: None}, consumer_byte_rate=2000.0).error == WireError.NONE
    assert alter(peer, {USER: "alice", CLIENT_ID: "etl"}, consumer_byte_rate=3000.0).error == WireError.NONE
    alice = {USER: "alice"}, {"producer_byte_rate": 1000.0, "request_rate": 5.0}
    both = {USER: "alice", CLIENT_ID: "etl"}, {"consumer_byte_rate": 3000.0}
    default = {USER: None}, {"consumer_byte_rate": 2000.0}
    assert describe(peer) == [default, alice, both]
    assert describe(peer, (USER, EXACT, "alice")) == [alice, both]
    assert describe(peer, (USER, EXACT, "alice"), strict=True) == [alice]
    assert describe(peer, (USER, DEFAULTS, None)) == [default]
    assert describe(peer, (USER, ANY, None)) == [default, alice, both]
    assert describe(peer, (CLIENT_ID, ANY, None)) == [both]
    assert describe(peer, (CLIENT_ID, DEFAULTS, None)) == []
    assert describe(peer, ("ip", ANY, None)) == []
    assert alter(peer, {USER: "alice"}, producer_byte_rate=None, request_rate=None).error == WireError.NONE
    assert describe(peer, (USER, EXACT, "alice")) == [both]


def test_a_check_changes_nothing() -> None:
    peer = peer_as()
    assert alter(peer, {USER: "alice"}, validate_only=True, producer_byte_rate=1000.0).error == WireError.NONE
    assert alter(peer, {USER: "bob"}, validate_only=True, producer_byte_rate=1.0).error == WireError.RESOURCE_NOT_FOUND
    assert describe(peer) == []


@pytest.mark.parametrize(
    ("entity", "values", "error", "text"),
    [
        ({USER: "alise"}, {"producer_byte_rate": 1.0}, WireError.RESOURCE_NOT_FOUND, "known=admin,alice"),
        ({"ip": "10.0.0.1"}, {"producer_byte_rate": 1.0}, WireError.INVALID_REQUEST, "type='ip'"),
        ({}, {"producer_byte_rate": 1.0}, WireError.INVALID_REQUEST, "needs a user or a client id"),
        ({USER: ""}, {"producer_byte_rate": 1.0}, WireError.INVALID_REQUEST, "empty name"),
        ({USER: "alice"}, {"request_percentage": 50.0}, WireError.INVALID_REQUEST, "request_rate"),
        ({USER: "alice"}, {"producer_byte_rate": 0.5}, WireError.INVALID_REQUEST, "from 1 to"),
        ({USER: "alice"}, {"producer_byte_rate": float("inf")}, WireError.INVALID_REQUEST, "from 1 to"),
        ({CLIENT_ID: "x" * 256}, {"producer_byte_rate": 1.0}, WireError.INVALID_REQUEST, "too long"),
    ],
)
def test_invalid_changes_are_rejected(entity: Entity, values: dict[str, Any], error: WireError, text: str) -> None:
    peer = peer_as()
    found = alter(peer, entity, **values)
    assert (found.error, text in found.message) == (error, True), found.message
    assert describe(peer) == []


def test_only_administrators_of_users_see_and_change_quotas() -> None:
    peer = peer_as("alice")
    assert alter(peer, {USER: "alice"}, producer_byte_rate=1e9).error == WireError.CLUSTER_AUTHORIZATION_FAILED
    answer = peer.ask(Api.DESCRIBE_CLIENT_QUOTAS)
    assert (answer.error, answer.entries) == (WireError.CLUSTER_AUTHORIZATION_FAILED, None)


def test_quotas_of_a_user_end_with_the_user_and_survive_a_restart() -> None:
    world = World()
    access = world.memory.broker.access
    access.set_verifiers("carol", {Mechanism.SHA_256: make_verifier("secret", Mechanism.SHA_256)})
    world.memory.run()
    access.set_quota("carol", None, {"produce": 5.0})
    access.set_quota(None, DEFAULT, {"fetch": 6.0})
    world.memory.run()
    world.restart()
    access = world.memory.broker.access
    assert [(quota.entity, dict(quota.limits)) for quota in access.quotas] == [
        (("carol", None), {"produce": 5.0}),
        ((None, DEFAULT), {"fetch": 6.0}),
    ]
    access.update_user(access.user("carol"), name="caroline")
    assert [quota.entity for quota in access.quotas] == [("caroline", None), (None, DEFAULT)]
    access.delete_user(access.user("caroline"))
    assert [quota.entity for quota in access.quotas] == [(None, DEFAULT)]


def test_a_client_id_is_passed_to_the_connection() -> None:
    peer = World().connect()
    peer.ask(Api.METADATA, topics=[])
    assert peer.client_id == "test"


def test_every_response_with_the_field_reports_the_delay() -> None:
    class Delayed(Dialogue):
        meter = object()  # type: ignore[assignment]

        def delay_ms(self, size: int) -> int:
            assert size > 0
            return 1_234

    peer = Delayed(World())
    for api in (Api.METADATA, Api.LIST_GROUPS, Api.DESCRIBE_CLIENT_QUOTAS, Api.API_VERSIONS, Api.FETCH):
        assert peer.ask(api).throttle_ms == 1_234
