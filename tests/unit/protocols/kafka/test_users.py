"""Users as tools see them: ACLs derived from permissions, and SCRAM credentials (spec: kafka#acls)."""

from __future__ import annotations

import hashlib
import hmac
from hashlib import pbkdf2_hmac
from typing import Any

import pytest

from polywire.broker.access import ConfiguredUser, User
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING, parse_grants
from polywire.broker.scram import Mechanism, make_verifier
from polywire.protocols.kafka import schema, users
from polywire.protocols.kafka.messages import Api, WireError
from polywire.types import TopicName
from tests.unit.protocols.kafka.dialogue import Dialogue, World

HASH = hash_password("secret")
VERIFIERS = tuple(make_verifier("secret", mechanism) for mechanism in Mechanism)
ADMIN = ConfiguredUser("admin", HASH, EVERYTHING, VERIFIERS)
READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE = 3, 4, 5, 6, 7, 8


def rules(peer: Dialogue, **filters: Any) -> dict[tuple[int, str, int], dict[str, list[int]]]:
    every = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}
    answer = peer.ask(Api.DESCRIBE_ACLS, **(every | filters))
    assert answer.error == WireError.NONE, answer.message
    found: dict[tuple[int, str, int], dict[str, list[int]]] = {}
    for resource in answer.resources:
        key = resource.resource_type, resource.resource_name, resource.pattern_type
        assert key not in found
        found[key] = {}
        for acl in resource.acls:
            assert (acl.host, acl.permission_type) == ("*", 3)
            found[key].setdefault(acl.principal, []).append(acl.operation)
    return found


def world_of(*others: ConfiguredUser) -> tuple[World, Dialogue]:
    world = World()
    broker = world.memory.broker
    broker.create_topic(TopicName("default", "clicks"), 1)
    broker.access.configure([ADMIN, *others])
    world.memory.run()
    peer = world.connect()
    peer.certified = broker.access.certified("admin")
    return world, peer


def user(name: str, *words: str) -> ConfiguredUser:
    return ConfiguredUser(name, HASH, parse_grants(words))


def test_without_users_there_are_no_acls() -> None:
    answer = World().connect().ask(Api.DESCRIBE_ACLS, resource_type_filter=1, operation=1, permission_type=1)
    assert answer.error == WireError.SECURITY_DISABLED


def test_acls_show_the_permissions_of_users() -> None:
    _, peer = world_of(
        user("reader", "consume@shop"),
        user("loader", "produce@shop/orders", "produce@default/clicks"),
        user("keeper", "manage_topics@default"),
        user("viewer", "read_servers"),
    )
    seen = rules(peer, resource_type_filter=2)
    assert seen[2, "shop.", 4] == {"User:reader": [READ, DESCRIBE, 10]}
    assert seen[2, "shop.orders", 3] == {"User:loader": [WRITE, DESCRIBE, 10]}
    assert set(seen[2, "clicks", 3]) == {"User:loader", "User:keeper"}
    assert {CREATE, DELETE, ALTER} <= set(seen[2, "clicks", 3]["User:keeper"])
    assert set(seen[2, "*", 3]) == {"User:admin"}
    assert set(rules(peer, resource_type_filter=3)) == {(3, "*", 3)}
    assert set(rules(peer, resource_type_filter=3)[3, "*", 3]) == {"User:admin", "User:keeper"}
    assert rules(peer, resource_type_filter=5) == {
        (5, "*", 3): {"User:admin": [WRITE, DESCRIBE], "User:keeper": [WRITE, DESCRIBE]}
    }
    cluster = rules(peer, resource_type_filter=4)[4, "kafka-cluster", 3]
    assert ALTER in cluster["User:admin"]
    assert ALTER not in cluster["User:viewer"]
    assert DESCRIBE in cluster["User:viewer"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"principal_filter": "User:loader", "resource_type_filter": 2}, {"shop.orders"}),
        ({"principal_filter": "loader"}, set()),
        ({"host_filter": "10.0.0.1"}, set()),
        ({"permission_type": 2}, set()),
        ({"resource_name_filter": "shop.", "pattern_type_filter": 4}, {"shop."}),
        ({"resource_name_filter": "shop.", "pattern_type_filter": 3}, set()),
        ({"resource_name_filter": "shop.orders", "pattern_type_filter": 2}, {"shop.", "shop.orders", "*"}),
        ({"resource_name_filter": "shop.orders", "pattern_type_filter": 1}, {"shop.orders"}),
        ({"resource_type_filter": 2, "operation": WRITE}, {"shop.orders", "*"}),
    ],
)
def test_acls_are_filtered(filters: dict[str, Any], expected: set[str]) -> None:
    _, peer = world_of(user("reader", "consume@shop"), user("loader", "produce@shop/orders"))
    named = {"resource_type_filter": 2} if "resource_name_filter" in filters else {}
    assert {name for _, name, _ in rules(peer, **(named | filters))} == expected


def test_acls_in_one_response_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "RULES_MAX", 10)
    _, peer = world_of(user("reader", "consume@shop"))
    assert rules(peer, principal_filter="User:reader")
    every = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}
    answer = peer.ask(Api.DESCRIBE_ACLS, **every)
    assert (answer.error, list(answer.resources)) == (WireError.POLICY_VIOLATION, [])


def test_scram_credentials_are_described() -> None:
    _, peer = world_of(user("reader", "consume"))
    every = peer.ask(Api.DESCRIBE_USER_SCRAM_CREDENTIALS, users=None)
    assert [entry.user for entry in every.results] == ["admin"]
    assert [(info.mechanism, info.iterations) for info in every.results[0].credential_infos] == [(1, 16384), (2, 16384)]
    named = schema.request(Api.DESCRIBE_USER_SCRAM_CREDENTIALS).Users
    reported = peer.ask(
        Api.DESCRIBE_USER_SCRAM_CREDENTIALS,
        users=[named(name=name) for name in ("admin", "reader", "none", "two", "two")],
    )
    assert [(entry.user, entry.error) for entry in reported.results] == [
        ("admin", WireError.NONE),
        ("reader", WireError.RESOURCE_NOT_FOUND),
        ("none", WireError.RESOURCE_NOT_FOUND),
        ("two", WireError.DUPLICATE_RESOURCE),
    ]


# Changes of SCRAM credentials

ALTER_SCRAM = schema.request(Api.ALTER_USER_SCRAM_CREDENTIALS)


def salted(name: str, password: str = "secret", mechanism: Mechanism = Mechanism.SHA_256, **fields: Any) -> Any:
    """Return the change that a client sends for a password."""
    salt, iterations = b"salt", 4096
    hashed = pbkdf2_hmac(mechanism.digest, password.encode(), salt, iterations)
    given: dict[str, Any] = {"name": name, "mechanism": users.NUMBERS[mechanism]}
    given |= {"iterations": iterations, "salt": salt, "salted_password": hashed} | fields
    return ALTER_SCRAM.Upsertions(**given)


def altered(peer: Dialogue, *upsertions: Any, deletions: tuple[tuple[str, int], ...] = ()) -> dict[str, int]:
    gone = [ALTER_SCRAM.Deletions(name=name, mechanism=number) for name, number in deletions]
    answer = peer.ask(Api.ALTER_USER_SCRAM_CREDENTIALS, upsertions=list(upsertions), deletions=gone)
    return {entry.user: entry.error for entry in answer.results}


def admitted(world: World, name: str, password: str, mechanism: Mechanism = Mechanism.SHA_256) -> bool:
    """Return whether this password matches the verifier of this name."""
    verifier = world.memory.broker.access.verifier(name, mechanism)
    digest = mechanism.digest
    hashed = pbkdf2_hmac(digest, password.encode(), verifier.salt, verifier.iterations)
    key = hmac.digest(hashed, b"Client Key", digest)
    signature = hmac.digest(hashlib.new(digest, key).digest(), b"said", digest)
    return verifier.admits(b"said", bytes(a ^ b for a, b in zip(key, signature, strict=True)))


def test_scram_credentials_create_change_and_delete_a_user() -> None:
    world, peer = world_of()
    access = world.memory.broker.access
    assert altered(peer, salted("ann"), salted("ann", mechanism=Mechanism.SHA_512)) == {"ann": 0}
    assert all(admitted(world, "ann", "secret", mechanism) for mechanism in Mechanism)
    assert access.user("ann").grants is None, "a user created this way has no permissions"
    was = access.log_in_with_token(access.create_token(access.user("ann"), "t", None))
    assert altered(peer, salted("ann", "other"), deletions=(("ann", 2),)) == {"ann": 0}
    assert (admitted(world, "ann", "secret"), admitted(world, "ann", "other")) == (False, True)
    assert not access.is_current(was), "logins end with the credentials they used"
    world.restart()
    assert admitted(world, "ann", "other"), "it is stored"
    peer = world.connect()
    peer.certified = world.memory.broker.access.certified("admin")
    assert altered(peer, deletions=(("ann", 1),)) == {"ann": 0}
    assert world.memory.broker.access.find_user("ann") is None


def test_a_user_with_a_password_stays_without_verifiers() -> None:
    world, peer = world_of()
    access = world.memory.broker.access
    access._store_user(User(9, "bob", HASH, 0), None)
    assert altered(peer, salted("bob")) == {"bob": 0}
    assert altered(peer, deletions=(("bob", 1),)) == {"bob": 0}
    assert access.user("bob").verifiers == ()


def test_refused_scram_changes() -> None:
    world, peer = world_of(user("carl", "produce"))
    unacceptable, missing = WireError.UNACCEPTABLE_CREDENTIAL, WireError.RESOURCE_NOT_FOUND
    wrong = {
        "few": salted("few", iterations=4095),
        "many": salted("many", iterations=2_000_000),
        "bland": salted("bland", salt=b""),
        "short": salted("short", salted_password=b"x"),
        "x" * 300: salted("x" * 300),
    }
    assert altered(peer, *wrong.values()) == dict.fromkeys(wrong, unacceptable)
    unknown = salted("a")
    unknown.mechanism = 3
    assert altered(peer, unknown) == {"a": WireError.UNSUPPORTED_SASL_MECHANISM}
    assert altered(peer, salted("b"), salted("b")) == {"b": WireError.DUPLICATE_RESOURCE}
    assert altered(peer, salted("b"), deletions=(("c", 1), ("admin", 1))) == {
        "c": missing,
        "admin": WireError.CLUSTER_AUTHORIZATION_FAILED,
        "b": 0,
    }
    assert altered(peer, salted("carl")) == {"carl": WireError.CLUSTER_AUTHORIZATION_FAILED}, (
        "users of the users file do not change"
    )
    assert [one.name for one in world.memory.broker.access.users()] == ["admin", "carl", "b"]


def test_a_user_manager_cannot_change_users_with_more_permissions() -> None:
    world, peer = world_of(user("keeper", "manage_users"))
    access = world.memory.broker.access
    access._store_user(User(9, "root", HASH, 0, EVERYTHING), None)
    access._store_user(User(10, "plain", HASH, 0, parse_grants(("manage_users",))), None)
    peer = world.connect()
    peer.certified = access.certified("keeper")
    denied = WireError.CLUSTER_AUTHORIZATION_FAILED
    assert altered(peer, salted("root"), salted("plain")) == {"root": denied, "plain": 0}
