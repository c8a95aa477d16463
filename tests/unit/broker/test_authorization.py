"""Permission checks: names, scopes, access lists and what earlier releases stored."""

from __future__ import annotations

import msgspec
import pytest

from polywire.broker import changes
from polywire.broker.access import ANONYMOUS_NAME, ConfiguredUser, Principal
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import ANYBODY, Action, Grants, Resource, parse_grants
from polywire.broker.settings import AccessList, BrokerSettings, Listed, TopicSettings
from polywire.broker.state import State
from polywire.errors import Denied, ErrorCode
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import TopicName

HASH = hash_password("secret")


def user_with(memory: MemoryBroker, words: str, name: str = "bob") -> Principal:
    """Create a user with these permissions, on a broker that has users."""
    access = memory.broker.access
    grants = parse_grants(words.split(",")) if words else Grants()
    access.configure([ConfiguredUser(name, HASH, grants), ConfiguredUser("other", HASH, Grants())])
    return Principal(access.user(name).id, name)


@pytest.mark.parametrize(
    ("full", "stream", "topic"),
    [
        ("orders", "default", "orders"),
        ("shop.orders", "shop", "orders"),
        ("a.b.c", "a", "b.c"),
        ("a..b", "a", ".b"),
        (".hidden", "default", ".hidden"),
        ("trailing.", "default", "trailing."),
        ("a..", "default", "a.."),
        ("...", "default", "..."),
        ("default.orders", "default", "default.orders"),
    ],
)
def test_the_first_dot_of_a_full_name_ends_its_stream(full: str, stream: str, topic: str) -> None:
    name = TopicName.parse(full)
    assert (name.stream, name.topic, name.full) == (stream, topic, full)
    assert name.is_plain


def test_every_action_requires_a_permission_on_a_resource() -> None:
    for action in Action:
        assert action.needs_no_permission is (action.resource is Resource.NOTHING), action
        assert action.listed is None or action.resource is Resource.TOPIC, action
    assert {Action.CONNECT} == ANYBODY


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ("manage_topics@shop", True),
        ("manage_topics@shop/new", True),
        ("manage_streams", True),
        ("manage_streams@shop", True),
        ("manage_topics", False),
        ("manage_topics@default", False),
        ("produce", False),
    ],
)
def test_creating_a_stream_implicitly_needs_the_permission(memory: MemoryBroker, words: str, allowed: bool) -> None:
    bob, access = user_with(memory, words), memory.broker.access
    name = TopicName.parse("shop.new")
    assert access.permits(bob, Action.TOPIC_CREATE, name) is allowed
    memory.broker.streams.declare("shop")
    assert access.permits(bob, Action.TOPIC_CREATE, name) is (allowed or words == "manage_topics")
    memory.broker.streams.end("shop")
    memory.broker.create_topic(TopicName("shop", "first"))
    assert access.permits(bob, Action.TOPIC_CREATE, name) is (allowed or words == "manage_topics")
    memory.broker.delete_topic(memory.broker.topic("shop.first"))
    assert access.permits(bob, Action.TOPIC_CREATE, name) is allowed


def test_a_dotted_name_resolves_the_same_for_creation_and_access(memory: MemoryBroker) -> None:
    bob, access = user_with(memory, "consume@shop"), memory.broker.access
    for full, seen in (("shop.orders", True), ("shopping.orders", False), ("orders", False)):
        memory.broker.ensure_topic(full)
        assert access.permits(bob, Action.FETCH, memory.broker.resource(full)) is seen, full
    assert access.permits(bob, Action.FETCH, memory.broker.resource("shop.missing")), (
        "a denial must not reveal which topics exist"
    )


def test_permissions_on_one_topic_ignore_how_its_name_is_spelled(memory: MemoryBroker) -> None:
    for words in ("produce@shop/a.b", "produce@default/shop.a.b"):
        bob = user_with(memory, words)
        assert memory.broker.access.permits(bob, Action.PRODUCE, TopicName.parse("shop.a.b")), words
        assert not memory.broker.access.permits(bob, Action.PRODUCE, TopicName.parse("shop.a")), words


def test_an_access_list_applies_to_every_user(memory: MemoryBroker) -> None:
    access = memory.broker.access
    topic = memory.broker.create_topic(
        TopicName("default", "t"), settings=TopicSettings(access=AccessList(("bob",), ()))
    )
    assert not access.permits(None, Action.FETCH, topic), "on an open broker nothing authenticates bob"
    assert access.permits(None, Action.TOPIC_DESCRIBE, topic)
    bob = user_with(memory, "admin,consume,produce,group")
    other = Principal(access.user("other").id, "other")
    for action in Action:
        assert access.permits(bob, action, topic) is (action.listed is not Listed.WRITERS), action
    assert not access.permits(other, Action.FETCH, topic), "an access list grants nothing"
    memory.broker.configure_topic(topic, TopicSettings(access=AccessList(None, ("*",))))
    assert access.permits(bob, Action.PRODUCE, topic)


def test_clients_without_a_login_act_as_the_configured_anonymous_user(memory: MemoryBroker) -> None:
    access = memory.broker.access
    assert access.permits(access.nameless(None), Action.CLUSTER_ALTER), "an open broker checks no permissions"
    user_with(memory, "consume@shop")
    assert not access.has_anonymous
    with pytest.raises(Denied) as caught:
        access.nameless(None)
    assert caught.value.code is ErrorCode.LOGIN_REQUIRED
    anonymous = user_with(memory, "consume@shop", ANONYMOUS_NAME)
    assert access.has_anonymous
    assert access.nameless(None) == anonymous
    other = access.certified("other")
    assert other is not None
    assert access.nameless(other) is other
    assert access.certified("stranger") is None


def test_topics_of_earlier_releases_keep_their_full_names() -> None:
    catalog = State(BrokerSettings()).catalog
    stored = [("default", "shop.orders"), ("a.b", "c"), ("default", "shop.__x"), ("default", "plain")]
    for number, (stream, topic) in enumerate(stored):
        catalog.restore_topic(
            changes.TopicState(bytes((number,)) * 16, stream, topic, 0, TopicSettings(), (number + 1,))
        )
    found = {full: catalog.find(full) for full in ("shop.orders", "a.b.c", "shop.__x", "plain")}
    names = {full: None if topic is None else topic.name for full, topic in found.items()}
    assert names == {
        "shop.orders": TopicName("shop", "orders"),
        "a.b.c": TopicName("a.b", "c"),
        "shop.__x": TopicName("default", "shop.__x"),
        "plain": TopicName("default", "plain"),
    }
    assert catalog.streams.exists("shop")


@pytest.mark.parametrize(
    ("policy", "reads", "writes"),
    [
        ({"auth_policy": "open", "read_acl": "x"}, True, True),
        ({"auth_policy": "deny_read"}, False, True),
        ({"auth_policy": "deny_write"}, True, False),
        ({"auth_policy": "acl", "read_acl": "bob,eve", "write_acl": "eve"}, True, False),
    ],
)
def test_access_lists_of_earlier_releases_still_apply(
    memory: MemoryBroker, policy: dict[str, str], reads: bool, writes: bool
) -> None:
    bob = user_with(memory, "consume,produce")
    old = TopicSettings(wire_options={"cursus": msgspec.json.encode(policy)})
    made = memory.broker.create_topic(TopicName("default", "t"), settings=old)
    memory.run()
    for broker in (memory.broker, memory.restart()):
        topic = broker.topic(made.name.full)
        assert broker.access.permits(bob, Action.FETCH, topic) is reads
        assert broker.access.permits(bob, Action.PRODUCE, topic) is writes
