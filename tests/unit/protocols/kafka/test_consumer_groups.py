"""Members of consumer groups: both versions, each error, and offsets by epoch (spec: kafka#consumer-groups)."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.groups.consumer import TOPICS_MAX
from polywire.broker.permissions import parse_grants
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.consumer_groups import HEARTBEAT_MS, UNSETTLED_HEARTBEAT_MS
from polywire.protocols.kafka.messages import Api, WireError
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import TopicName
from tests.unit.protocols.kafka.group_dialogue import Asker
from tests.unit.protocols.kafka.test_groups import member_of

HEARTBEAT = Api.CONSUMER_GROUP_HEARTBEAT
OWNED = schema.request(HEARTBEAT).TopicPartitions


def beat(peer: Asker, member: str = "m1", epoch: int = 0, *, version: int = 1, **fields: Any) -> Any:
    asked: dict[str, Any] = {"group_id": "g", "member_id": member, "member_epoch": epoch}
    if epoch == 0:
        asked |= {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": ["t"], "topic_partitions": []}
    return peer.ask(HEARTBEAT, version, **asked | fields)


def assigned(answer: Any) -> list[int]:
    [topic] = answer.assignment.topic_partitions
    return list(topic.partitions)


@pytest.fixture
def peer() -> Asker:
    memory = MemoryBroker()
    memory.broker.create_topic(TopicName.parse("t"), 3)
    memory.run()
    return Asker(memory)


@pytest.mark.parametrize("version", [0, 1])
def test_a_single_member_in_every_version(peer: Asker, version: int) -> None:
    first = beat(peer, version=version)
    assert (first.error, first.message, first.member_id) == (WireError.NONE, None, "m1")
    assert (first.member_epoch > 0, first.heartbeat_interval_ms) == (True, HEARTBEAT_MS)
    [topic] = first.assignment.topic_partitions
    assert (topic.topic_id, list(topic.partitions)) == (peer.broker.topic("t").id, [0, 1, 2])
    again = beat(peer, epoch=first.member_epoch, version=version)
    assert (again.error, again.member_epoch, again.assignment) == (WireError.NONE, first.member_epoch, None)
    left = beat(peer, epoch=-1, version=version)
    assert (left.error, left.member_epoch, left.assignment) == (WireError.NONE, -1, None)
    assert beat(peer, epoch=first.member_epoch).error == WireError.UNKNOWN_MEMBER_ID


def test_two_members_hand_over(peer: Asker) -> None:
    one = beat(peer)
    two = beat(peer, "m2")
    assert (two.assignment.topic_partitions, two.heartbeat_interval_ms) == ([], UNSETTLED_HEARTBEAT_MS)
    less = beat(peer, epoch=one.member_epoch)
    assert assigned(less) == [0, 2]
    assert (less.member_epoch, less.heartbeat_interval_ms) == (one.member_epoch, UNSETTLED_HEARTBEAT_MS)
    owned = [OWNED(topic_id=peer.broker.topic("t").id, partitions=[0, 2])]
    done = beat(peer, epoch=one.member_epoch, topic_partitions=owned)
    assert done.member_epoch > one.member_epoch
    assert assigned(beat(peer, "m2", two.member_epoch)) == [1]


def test_a_member_without_an_id_gets_one(peer: Asker) -> None:
    first = beat(peer, "", version=0)
    assert first.error == WireError.NONE
    assert len(first.member_id) == 36


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"group_id": ""}, WireError.INVALID_REQUEST),
        ({"group_id": "g" * 300}, WireError.INVALID_GROUP_ID),
        ({"rebalance_timeout_ms": -1}, WireError.INVALID_REQUEST),
        ({"subscribed_topic_names": None}, WireError.INVALID_REQUEST),
        ({"topic_partitions": None}, WireError.INVALID_REQUEST),
        ({"topic_partitions": [OWNED(partitions=[1])]}, WireError.INVALID_REQUEST),
        ({"server_assignor": "sticky"}, WireError.UNSUPPORTED_ASSIGNOR),
        ({"subscribed_topic_regex": "t("}, WireError.INVALID_REGULAR_EXPRESSION),
        ({"subscribed_topic_regex": "(?=t)t"}, WireError.INVALID_REGULAR_EXPRESSION),
        ({"member_epoch": 1}, WireError.UNKNOWN_MEMBER_ID),
        ({"member_id": "", "member_epoch": 1}, WireError.INVALID_REQUEST),
        ({"member_epoch": -1}, WireError.UNKNOWN_MEMBER_ID),
        ({"member_epoch": -2, "instance_id": "i"}, WireError.UNKNOWN_MEMBER_ID),
        ({"member_epoch": -2}, WireError.INVALID_REQUEST),
        ({"member_epoch": -3}, WireError.INVALID_REQUEST),
        ({"member_epoch": -3, "instance_id": "i"}, WireError.INVALID_REQUEST),
        ({"member_epoch": -(2**31)}, WireError.INVALID_REQUEST),
        ({"instance_id": ""}, WireError.INVALID_REQUEST),
        ({"instance_id": "", "member_epoch": -2}, WireError.INVALID_REQUEST),
        ({"rack_id": ""}, WireError.INVALID_REQUEST),
    ],
)
def test_refused_heartbeats(peer: Asker, fields: dict[str, Any], code: WireError) -> None:
    answer = beat(peer, **fields)
    assert (answer.error, answer.assignment) == (code, None)
    assert answer.message


def test_wrong_member_epochs_are_refused(peer: Asker) -> None:
    epoch = beat(peer).member_epoch
    assert beat(peer, epoch=epoch + 1).error == WireError.FENCED_MEMBER_EPOCH
    for away in (-2, -7):
        assert beat(peer, epoch=away).error == WireError.INVALID_REQUEST, (
            "it has no instance id, or the epoch does not exist"
        )


def test_static_members(peer: Asker) -> None:
    epoch = beat(peer, instance_id="i").member_epoch
    assert beat(peer, "m2", instance_id="i").error == WireError.UNRELEASED_INSTANCE_ID
    assert beat(peer, "m2", epoch, instance_id="i").error == WireError.FENCED_INSTANCE_ID
    assert beat(peer, epoch=-2, instance_id="i").member_epoch == -2
    back = beat(peer, "m2", instance_id="i")
    assert assigned(back) == [0, 1, 2]
    assert beat(peer, epoch=epoch, instance_id="i").error == WireError.FENCED_INSTANCE_ID


@pytest.mark.parametrize(("name", "first"), [("uniform", [0, 2]), ("range", [0, 1])])
def test_assignors(peer: Asker, name: str, first: list[int]) -> None:
    peer.broker.groups.join("g", "t", "z", wire="flux")
    one = beat(peer, server_assignor=name)
    assert assigned(one) == first


def commit(peer: Asker, epoch: int, partition: int = 0, *, version: int = 9, **fields: Any) -> WireError:
    topics = schema.request(Api.OFFSET_COMMIT).Topics
    names = {"topic_id": peer.broker.topic("t").id} if version >= 10 else {"name": "t"}
    one = topics(**names, partitions=[topics.Partitions(index=partition, offset=5, metadata="here")])
    asked = {"group_id": "g", "generation": epoch, "member_id": "m1", "topics": [one]}
    [topic] = peer.ask(Api.OFFSET_COMMIT, version, **asked | fields).topics
    return WireError(topic.partitions[0].error)


def fetch(peer: Asker, epoch: int, *, member: str | None = "m1", version: int = 9) -> tuple[WireError, list[int]]:
    groups = schema.request(Api.OFFSET_FETCH).Groups
    names = {"topic_id": peer.broker.topic("t").id} if version >= 10 else {"name": "t"}
    one = groups(group_id="g", member_id=member, member_epoch=epoch, topics=[groups.Topics(**names, indexes=[0])])
    [group] = peer.ask(Api.OFFSET_FETCH, version, groups=[one]).groups
    return WireError(group.error), [part.offset for topic in group.topics for part in topic.partitions]


@pytest.mark.parametrize("version", [9, 10])
def test_offsets_are_committed_and_fetched_by_epoch(peer: Asker, version: int) -> None:
    epoch = beat(peer).member_epoch
    assert commit(peer, epoch, version=version) == WireError.NONE
    assert commit(peer, epoch - 1, version=version) == WireError.STALE_MEMBER_EPOCH
    assert commit(peer, epoch, member_id="else", version=version) == WireError.UNKNOWN_MEMBER_ID
    assert commit(peer, -1, member_id="", version=version) == WireError.UNKNOWN_MEMBER_ID
    assert fetch(peer, epoch, version=version) == (WireError.NONE, [5])
    assert fetch(peer, epoch + 1, version=version) == (WireError.STALE_MEMBER_EPOCH, [])
    assert fetch(peer, -1, member=None, version=version) == (WireError.NONE, [5])


def test_a_commit_for_a_partition_of_another_member_is_refused(peer: Asker) -> None:
    epoch = beat(peer).member_epoch
    peer.broker.groups.join("g", "t", "z", wire="flux")
    beat(peer, epoch=epoch)
    owned = [OWNED(topic_id=peer.broker.topic("t").id, partitions=[0, 2])]
    epoch = beat(peer, epoch=epoch, topic_partitions=owned).member_epoch
    assert commit(peer, epoch, 0) == WireError.NONE
    assert commit(peer, epoch, 1) == WireError.ILLEGAL_GENERATION


def test_a_name_of_a_classic_group_is_refused(peer: Asker) -> None:
    metadata = b"\0\0\0\0\0\1\0\1t\xff\xff\xff\xff"
    protocol = schema.request(Api.JOIN_GROUP).Protocols(name="mine", metadata=metadata)
    asked = {"group_id": "g", "session_timeout_ms": 10_000, "protocol_type": "consumer", "protocols": [protocol]}
    assert peer.ask(Api.JOIN_GROUP, 0, **asked).error == WireError.NONE
    assert beat(peer).error == WireError.GROUP_ID_NOT_FOUND
    assert peer.broker.consumers.names() == []


@pytest.mark.parametrize("version", [0, 1])
def test_groups_are_described_with_members_of_all_protocols(peer: Asker, version: int) -> None:
    epoch = beat(peer, instance_id="i", rack_id="r").member_epoch
    peer.broker.groups.join("g", "t", "z", wire="flux")
    beat(peer, epoch=epoch, instance_id="i")

    def described() -> Any:
        found, missing = peer.ask(
            Api.CONSUMER_GROUP_DESCRIBE, version, group_ids=["g", "x"], want_operations=True
        ).groups
        assert (missing.error, missing.message) == (WireError.GROUP_ID_NOT_FOUND, "no such group")
        assert (found.error, found.assignor_name, found.group_epoch > epoch) == (WireError.NONE, "uniform", True)
        assert found.operations > 0
        return found

    found = described()
    one, other = found.members
    assert found.group_state == "Reconciling"
    assert (one.member_id, one.instance_id, one.rack_id, one.member_epoch) == ("m1", "i", "r", epoch)
    assert (one.client_id, one.client_host, one.subscribed_topic_names) == ("me", "/127.0.0.1", ["t"])
    assert [list(topic.partitions) for topic in one.assignment.topic_partitions] == [[0, 2]]
    assert [list(topic.partitions) for topic in one.target_assignment.topic_partitions] == [[0, 2]]
    assert (other.member_id, other.client_id, other.assignment.topic_partitions) == ("z", "flux", [])
    if version:
        assert (one.member_type, other.member_type) == (1, 0)
    owned = [OWNED(topic_id=peer.broker.topic("t").id, partitions=[0, 2])]
    beat(peer, epoch=epoch, instance_id="i", topic_partitions=owned)
    found = described()
    assert found.group_state == "Stable"
    assert [list(topic.partitions) for topic in found.members[1].assignment.topic_partitions] == [[1]]


def test_lists_distinguish_consumer_groups(peer: Asker) -> None:
    beat(peer)
    peer.broker.groups.join("other", "t", "z", wire="flux")
    listed = {group.group_id: group for group in peer.ask(Api.LIST_GROUPS, 5).groups}
    assert {name: group.group_type for name, group in listed.items()} == {"g": "consumer", "other": "classic"}
    assert (listed["g"].protocol_type, listed["g"].group_state) == ("consumer", "Stable")
    only = peer.ask(Api.LIST_GROUPS, 5, types_filter=["consumer"], states_filter=["stable"]).groups
    assert [group.group_id for group in only] == ["g"]


def kinds(peer: Asker) -> dict[str, tuple[str, str]]:
    """Return the type and state of each group."""
    return {one.group_id: (one.group_type, one.group_state) for one in peer.ask(Api.LIST_GROUPS, 5).groups}


@pytest.mark.parametrize("version", [5, 6])
def test_a_group_keeps_its_protocol_after_its_members_left(peer: Asker, version: int) -> None:
    missing = WireError.GROUP_ID_NOT_FOUND if version >= 6 else WireError.NONE

    def described() -> Any:
        [found] = peer.ask(Api.DESCRIBE_GROUPS, version, groups=["g"]).groups
        return found.error, found.group_state

    epoch = beat(peer).member_epoch
    assert commit(peer, epoch) == WireError.NONE
    assert (kinds(peer), described()) == ({"g": ("consumer", "Stable")}, (missing, "Dead"))
    beat(peer, epoch=-1)
    for _ in range(2):
        assert (kinds(peer), described()) == ({"g": ("consumer", "Empty")}, (missing, "Dead"))
        [found] = peer.ask(Api.CONSUMER_GROUP_DESCRIBE, 1, group_ids=["g"]).groups
        assert (found.error, found.group_state, found.members) == (WireError.NONE, "Empty", [])
        peer.memory.run()
        peer.memory.restart()
        peer = Asker(peer.memory)


def test_an_empty_group_has_the_protocol_of_its_next_member(peer: Asker) -> None:
    beat(peer)
    beat(peer, epoch=-1)
    member = member_of(peer)
    assert kinds(peer) == {"g": ("classic", "CompletingRebalance")}
    assert peer.ask(Api.DESCRIBE_GROUPS, 6, groups=["g"]).groups[0].error == WireError.NONE
    peer.ask(Api.LEAVE_GROUP, 1, group_id="g", member_id=member)
    peer.broker.groups.join("g", "t", "z", wire="flux")
    assert kinds(peer) == {"g": ("classic", "Stable")}


# Patterns


def by_pattern(peer: Asker, pattern: str | None, member: str = "m1", epoch: int = 0, **fields: Any) -> Any:
    """Return a heartbeat that subscribes by a pattern."""
    names = {"subscribed_topic_names": None} if epoch == 0 else {}
    return beat(peer, member, epoch, **{"subscribed_topic_regex": pattern, **names, **fields})


def topics_of(peer: Asker, answer: Any) -> dict[str, list[int]]:
    """Return the assigned partitions, by topic name."""
    assert answer.error == WireError.NONE, answer.message
    names = {topic.id: topic.name.full for topic in peer.broker.topics()}
    return {names[one.topic_id]: list(one.partitions) for one in answer.assignment.topic_partitions}


def wanted(peer: Asker) -> set[str]:
    """Return the topics of which the only member should get partitions."""
    (found,) = peer.ask(Api.CONSUMER_GROUP_DESCRIBE, 1, group_ids=["g"]).groups
    (member,) = found.members
    return {one.topic_name for one in member.target_assignment.topic_partitions}


def make(peer: Asker, *names: str) -> None:
    for name in names:
        peer.broker.create_topic(TopicName.parse(name), 1)
    peer.memory.run()


def test_a_pattern_matches_topics_even_those_created_later(peer: Asker) -> None:
    make(peer, "orders.eu", "orders.us", "my.orders")
    first = by_pattern(peer, r"orders\..*|t")
    assert topics_of(peer, first) == {"orders.eu": [0], "orders.us": [0], "t": [0, 1, 2]}
    assert beat(peer, epoch=first.member_epoch).assignment is None
    make(peer, "orders.asia", "other")
    more = beat(peer, epoch=first.member_epoch)
    assert topics_of(peer, more) == {"orders.asia": [0], "orders.eu": [0], "orders.us": [0], "t": [0, 1, 2]}
    peer.broker.delete_topic(peer.broker.topic("orders.us"))
    peer.memory.run()
    beat(peer, epoch=more.member_epoch)
    assert wanted(peer) == {"orders.asia", "orders.eu", "t"}
    by_pattern(peer, "other", epoch=more.member_epoch)
    assert wanted(peer) == {"other"}


def test_names_and_a_pattern_can_be_combined_and_the_pattern_removed(peer: Asker) -> None:
    make(peer, "a1", "a2")
    first = by_pattern(peer, "a.", subscribed_topic_names=["t"])
    assert set(topics_of(peer, first)) == {"a1", "a2", "t"}
    (found,) = peer.ask(Api.CONSUMER_GROUP_DESCRIBE, 1, group_ids=["g"]).groups
    (member,) = found.members
    assert (list(member.subscribed_topic_names), member.subscribed_topic_regex) == (["t"], "a.")
    by_pattern(peer, "", epoch=first.member_epoch)
    make(peer, "a3")
    beat(peer, epoch=first.member_epoch)
    assert wanted(peer) == {"t"}


def test_a_pattern_matches_only_readable_topics() -> None:
    memory = MemoryBroker()
    memory.broker.access.configure(
        [ConfiguredUser("reader", "", parse_grants(("consume@default/mine", "group@default/mine")))]
    )
    reader = memory.broker.access.certified("reader")
    peer = Asker(memory, principal=reader)
    make(peer, "mine", "theirs")
    assert set(topics_of(peer, by_pattern(peer, ".*"))) == {"mine"}


def test_a_pattern_with_too_many_topics_or_too_slow_is_refused(peer: Asker) -> None:
    make(peer, *(f"n{number}" for number in range(TOPICS_MAX + 1)))
    assert by_pattern(peer, "n.*").error == WireError.INVALID_REQUEST
    assert peer.broker.consumers.names() == []
    make(peer, "ab" * 100)
    answer = by_pattern(peer, "(" * 40 + ".*" + "a?)*" * 40 + "c{400}")
    assert answer.error in (WireError.INVALID_REGULAR_EXPRESSION, WireError.NONE)


def test_other_requests_are_served_while_topics_are_matched(peer: Asker) -> None:
    make(peer, *(f"n{number}" for number in range(300)))
    reported = peer.begin(
        HEARTBEAT,
        1,
        group_id="g",
        member_id="m1",
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        subscribed_topic_regex="n1.",
        topic_partitions=[],
    )
    assert not reported.bodies, "nothing was matched inside the call"
    assert reported.cancel is not None
    reported.cancel()
    peer.memory.run()
    assert not reported.bodies
    assert peer.broker.consumers.names() == []
