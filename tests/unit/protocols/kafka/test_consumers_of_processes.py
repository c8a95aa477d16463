"""Consumer groups of the newer protocol, and topics by id, over several processes (decision 0130)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from polywire.broker.groups.consumer import TOPICS_MAX
from polywire.broker.settings import AccessList, TopicSettings
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.routed import AGAIN_S
from polywire.protocols.kafka.sasl import PLAIN
from polywire.protocols.kafka.subscription import WRITING
from polywire.types import TopicName
from tests.unit.protocols.kafka.consumer_members import Consumer, settle
from tests.unit.protocols.kafka.test_groups import subscription
from tests.unit.protocols.kafka.test_processes import (
    COUNT,
    TOPICS,
    WAIT_S,
    Client,
    LateLink,
    Processes,
    hang,
    with_users,
)

GROUP = "a"  # coordinated by shard 1, which owns topics a and dddd; bb is in shard 2, ccc in shard 0


@pytest.fixture
def processes() -> Processes:
    made = Processes()
    made.make(*TOPICS)
    return made


def id_of(processes: Processes, topic: str) -> bytes:
    return processes.broker(topic).topic(topic).id


# Topics by id


@pytest.mark.parametrize("own", range(COUNT))
def test_topics_in_any_shard_are_found_by_id(processes: Processes, own: int) -> None:
    client = Client(processes, own)
    made = schema.request(Api.METADATA).Topics
    ids = {name: id_of(processes, name) for name in TOPICS}
    gone = b"x" * 16
    asked = [made(topic_id=id_, name=None) for id_ in (*ids.values(), gone)] + [made(name="bb")]
    reported = client.ask(Api.METADATA, 12, topics=asked, may_create=False)
    assert [(one.name, one.topic_id, one.error) for one in reported.topics] == [
        *((name, id_, 0) for name, id_ in ids.items()),
        (None, gone, WireError.UNKNOWN_TOPIC_ID),
        ("bb", ids["bb"], 0),
    ]
    leaders = {one.name: one.partitions[0].leader_id for one in reported.topics if not one.error}
    assert leaders == {name: processes.shards.shard_by_hash(name) + 1 for name in TOPICS}


@pytest.mark.parametrize("own", range(COUNT))
def test_topics_in_any_shard_are_deleted_by_id(processes: Processes, own: int) -> None:
    client = Client(processes, own)
    made = schema.request(Api.DELETE_TOPICS).Topics
    ids = [id_of(processes, name) for name in ("a", "bb")]
    asked = [*(made(name=None, topic_id=id_) for id_ in (*ids, b"x" * 16)), made(name="ccc"), made(name="no")]
    reported = client.ask(Api.DELETE_TOPICS, 6, topics=asked)
    assert sorted((one.name or "", one.error) for one in reported.responses) == [
        ("", WireError.UNKNOWN_TOPIC_ID),
        ("a", 0),
        ("bb", 0),
        ("ccc", 0),
        ("no", WireError.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    assert [processes.shards.shard_of(name) for name in TOPICS] == [None, None, None, 1]


def test_a_known_id_is_looked_up_in_no_other_process(processes: Processes) -> None:
    client, made = Client(processes), schema.request(Api.METADATA).Topics
    asked = [made(topic_id=id_of(processes, "a"), name=None)]
    client.ask(Api.METADATA, 12, topics=asked)
    hang(processes, 1)
    assert [one.name for one in client.ask(Api.METADATA, 12, topics=asked).topics] == ["a"]


def test_an_unresponsive_shard_does_not_delay_ids_of_others(processes: Processes) -> None:
    client, made = Client(processes), schema.request(Api.METADATA).Topics
    client.ask(Api.METADATA, topics=None)
    hang(processes, 1)
    asked = [made(topic_id=id_, name=None) for id_ in (id_of(processes, "bb"), b"y" * 16)]
    version = client.tell(Api.METADATA, 12, topics=asked)
    assert client.hear(Api.METADATA, version) is None
    processes.loop.advance(1.0)
    reported = client.hear(Api.METADATA, version)
    assert [(one.name, one.error) for one in reported.topics] == [("bb", 0), (None, WireError.UNKNOWN_TOPIC_ID)]


def test_many_ids_are_looked_up_in_parts(processes: Processes) -> None:
    client, made = Client(processes), schema.request(Api.METADATA).Topics
    ids = [b"%016d" % number for number in range(1_000)] + [id_of(processes, "a")]
    reported = client.ask(Api.METADATA, 12, topics=[made(topic_id=id_, name=None) for id_ in ids])
    assert [one.name for one in reported.topics if not one.error] == ["a"]
    assert len(reported.topics) == len(ids)


@pytest.mark.parametrize("own", range(COUNT))
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("named", [False, True])
def test_pages_of_all_shards_are_merged(processes: Processes, own: int, limit: int, named: bool) -> None:
    topic = processes.broker("bb").create_topic(TopicName("default", "b"), 1)
    processes.broker("bb").shrink_topic(topic, 0)
    processes.loop.run_due()
    client, asked = Client(processes, own), schema.request(Api.DESCRIBE_TOPIC_PARTITIONS)
    names = [asked.Topics(name=name) for name in (*TOPICS, "c", "b", "zz")] if named else []
    found: list[tuple[str, int, int]] = []
    cursor, pages = None, 0
    while pages == 0 or cursor is not None:
        reported = client.ask(
            Api.DESCRIBE_TOPIC_PARTITIONS, 0, topics=names, cursor=cursor, response_partition_limit=limit
        )
        pages += 1
        assert sum(len(one.partitions) for one in reported.topics) <= limit
        for one in reported.topics:
            found += [(one.name, part.index, one.error) for part in one.partitions] or [(one.name, -1, one.error)]
        cursor = reported.next_cursor and asked.Cursor(
            topic_name=reported.next_cursor.topic_name, index=reported.next_cursor.index
        )
    missing = [("c", -1, 3), ("zz", -1, 3)] if named else []
    expected = [(name, index, 0) for name in TOPICS for index in range(2)] + missing + [("b", -1, 0)]
    assert found == sorted(expected)
    assert pages <= 8 // limit + len(expected)


# Members


@pytest.mark.parametrize("version", [0, 1])
def test_a_member_reads_topics_of_all_shards(processes: Processes, version: int) -> None:
    member = Consumer(processes, GROUP, "m1", [*TOPICS, "no"])
    reported = member.client.ask(Api.CONSUMER_GROUP_HEARTBEAT, version, **member.fields())
    assert not reported.error
    member.reported(reported)
    assert member.reads() == {name: [0, 1] for name in TOPICS}
    again = member.beat()
    assert (again.error, again.member_epoch, again.assignment) == (0, member.epoch, None)
    assert member.beat(member_epoch=-1).member_epoch == -1


def test_other_processes_answer_with_not_coordinator(processes: Processes) -> None:
    client = Client(processes)
    fields = Consumer(processes, GROUP, "m1", ["a"]).fields()
    assert client.ask(Api.CONSUMER_GROUP_HEARTBEAT, 1, **fields).error == WireError.NOT_COORDINATOR
    reported = client.ask(Api.CONSUMER_GROUP_DESCRIBE, group_ids=[GROUP, "ccc"])
    assert {one.group_id: one.error for one in reported.groups} == {
        GROUP: WireError.NOT_COORDINATOR,
        "ccc": WireError.GROUP_ID_NOT_FOUND,
    }


def test_members_share_and_hand_over_topics_of_other_shards(processes: Processes) -> None:
    one, two = (Consumer(processes, GROUP, name, ["bb", "ccc", "a"]) for name in ("m1", "m2"))
    one.beat()
    assert one.reads() == {"a": [0, 1], "bb": [0, 1], "ccc": [0, 1]}
    two.beat()
    assert two.reads() == {}, "the first member has not released them"
    settle(one, two)
    assert one.reads() == {name: [0] for name in ("a", "bb", "ccc")}
    assert two.reads() == {name: [1] for name in ("a", "bb", "ccc")}
    reported = one.client.ask(Api.CONSUMER_GROUP_DESCRIBE, group_ids=[GROUP]).groups[0]
    assert (reported.group_state, len(reported.members)) == ("Stable", 2)
    assert {one.topic_name for one in reported.members[0].assignment.topic_partitions} == {"a", "bb", "ccc"}
    one.beat(member_epoch=-1)
    settle(two)
    assert two.reads() == {"a": [0, 1], "bb": [0, 1], "ccc": [0, 1]}
    reported = Client(processes, 1).ask(Api.LIST_GROUPS)
    assert [(one.group_id, one.group_state, one.group_type) for one in reported.groups] == [
        (GROUP, "Stable", "consumer")
    ]


def test_topics_created_grown_or_deleted_in_other_shards_are_noticed(processes: Processes) -> None:
    member = Consumer(processes, GROUP, "m1", ["bb", "later"])
    settle(member, rounds=2)
    assert member.reads() == {"bb": [0, 1]}
    processes.make("later")  # in shard 2
    assert processes.shards.shard_of("later") == 2
    settle(member, rounds=3)
    assert member.reads() == {"bb": [0, 1], "later": [0, 1]}
    broker = processes.broker("later")
    broker.grow_topic(broker.topic("later"), 3)
    settle(member, rounds=3)
    assert member.reads() == {"bb": [0, 1], "later": [0, 1, 2]}
    broker.delete_topic(broker.topic("later"))
    settle(member, rounds=3)
    assert member.reads() == {"bb": [0, 1]}
    processes.make("later")
    settle(member, rounds=3)
    assert member.reads() == {"bb": [0, 1], "later": [0, 1]}, "a different topic of the same name"


def test_a_pattern_matches_topics_of_all_shards(processes: Processes) -> None:
    member = Consumer(processes, GROUP, "m1", pattern="[abx].*")
    member.beat()
    assert member.reads() == {"a": [0, 1], "bb": [0, 1]}
    processes.make("xx", "yy")
    settle(member, rounds=3)
    assert member.reads() == {"a": [0, 1], "bb": [0, 1], "xx": [0, 1]}
    broker = processes.broker("bb")
    broker.delete_topic(broker.topic("bb"))
    settle(member, rounds=3)
    assert member.reads() == {"a": [0, 1], "xx": [0, 1]}
    assert member.beat(subscribed_topic_regex="b(").error == WireError.INVALID_REGULAR_EXPRESSION


def test_topics_of_an_unresponsive_shard_stay_assigned_and_delay_no_member(processes: Processes) -> None:
    member = Consumer(processes, GROUP, "m1", ["bb", "ccc"])
    by_pattern = Consumer(processes, "dddd", "m2", pattern="bb|ccc")
    settle(member, by_pattern, rounds=2)
    everything = {"bb": [0, 1], "ccc": [0, 1]}
    hang(processes, 2)
    for _ in range(3):
        processes.loop.advance(3.0)
        assert not member.beat().error
    late = Consumer(processes, "a", "m3", ["xx", "ccc"])
    processes.make("xx")
    processes.make("extra")  # triggers another match of patterns
    version = late.client.tell(Api.CONSUMER_GROUP_HEARTBEAT, 1, **late.fields())
    assert late.client.hear(Api.CONSUMER_GROUP_HEARTBEAT, version) is None
    processes.loop.advance(1.0)
    reported = late.client.hear(Api.CONSUMER_GROUP_HEARTBEAT, version)
    assert not reported.error, "known topics are assigned at once"
    processes.loop.advance(1.5)
    version = by_pattern.client.tell(Api.CONSUMER_GROUP_HEARTBEAT, 1, **by_pattern.fields())
    reported = by_pattern.client.hear(Api.CONSUMER_GROUP_HEARTBEAT, version)
    if reported is None:
        processes.loop.advance(1.0)
        reported = by_pattern.client.hear(Api.CONSUMER_GROUP_HEARTBEAT, version)
    by_pattern.reported(reported)
    assert by_pattern.reads() == everything
    assert member.reads() == everything


def test_too_many_topics_are_refused_without_a_lookup(processes: Processes) -> None:
    member = Consumer(processes, GROUP, "m1", [f"t{number}" for number in range(TOPICS_MAX + 1)])
    assert member.beat().error == WireError.INVALID_REQUEST


# Offsets


def commit(member: Consumer, topic: str, offsets: dict[int, int], version: int = 9) -> dict[int, int]:
    """Return errors by partition."""
    made = schema.request(Api.OFFSET_COMMIT).Topics
    partitions = [made.Partitions(index=index, offset=offset) for index, offset in offsets.items()]
    name = {"name": topic} if version < 10 else {"topic_id": id_of(member.processes, topic)}
    reported = member.client.ask(
        Api.OFFSET_COMMIT, version, group_id=member.group, member_id=member.id, generation=member.epoch,
        topics=[made(**name, partitions=partitions)],
    )  # fmt: skip
    [entry] = reported.topics
    assert (entry.name if version < 10 else entry.topic_id) in name.values()
    return {one.index: one.error for one in entry.partitions}


def fetched(member: Consumer, topic: str, version: int = 9, epoch: int | None = None) -> Any:
    asked = schema.request(Api.OFFSET_FETCH).Groups
    name = {"name": topic} if version < 10 else {"topic_id": id_of(member.processes, topic)}
    epoch = member.epoch if epoch is None else epoch
    group = asked(
        group_id=member.group, member_id=member.id, member_epoch=epoch, topics=[asked.Topics(**name, indexes=[0, 1])]
    )
    [reported] = member.client.ask(Api.OFFSET_FETCH, version, groups=[group]).groups
    return reported.error or [part.offset for one in reported.topics for part in one.partitions]


@pytest.mark.parametrize("version", [9, 10])
@pytest.mark.parametrize("topic", ["a", "bb", "ccc"])
def test_offsets_are_stored_with_their_topics(processes: Processes, topic: str, version: int) -> None:
    member = Consumer(processes, GROUP, "m1", ["bb", "a", "ccc"])
    member.beat()
    assert commit(member, topic, {0: 7, 1: 8}, version) == {0: 0, 1: 0}
    assert {n: p.offset for n, p in processes.broker(topic).classic.positions(GROUP, topic).items()} == {0: 7, 1: 8}
    assert fetched(member, topic, version) == [7, 8]
    assert fetched(member, topic, version, epoch=member.epoch - 1) == WireError.STALE_MEMBER_EPOCH
    member.epoch -= 1
    assert commit(member, topic, {0: 1}, version) == {0: WireError.STALE_MEMBER_EPOCH}
    member.id = "other"
    assert commit(member, topic, {0: 1}, version) == {0: WireError.ILLEGAL_GENERATION}, "as with one process"
    assert processes.broker(topic).classic.positions(GROUP, topic)[0].offset == 7


def test_commits_for_partitions_of_other_members_are_refused_by_the_coordinator(processes: Processes) -> None:
    one, two = (Consumer(processes, GROUP, name, ["bb"]) for name in ("m1", "m2"))
    one.beat()
    settle(one, two)
    assert (one.reads(), two.reads()) == ({"bb": [0]}, {"bb": [1]})
    assert commit(one, "bb", {1: 5}) == {1: WireError.ILLEGAL_GENERATION}
    assert commit(one, "bb", {0: 5}) == {0: 0}


def test_a_member_can_commit_topics_that_it_does_not_read(processes: Processes) -> None:
    one, two = Consumer(processes, GROUP, "m1", ["bb"]), Consumer(processes, GROUP, "m2", ["ccc"])
    settle(one, two)
    for topic in ("a", "dddd"):
        assert commit(one, topic, {0: 5}) == {0: 0}
        assert processes.broker(topic).classic.positions(GROUP, topic)[0].offset == 5
    assert commit(one, "ccc", {0: 5}) == {0: WireError.ILLEGAL_GENERATION}, "the other member reads it"


@pytest.mark.parametrize("topic", ["a", "bb", "ccc"])
def test_describe_groups_does_not_know_groups_of_the_newer_protocol(processes: Processes, topic: str) -> None:
    """Whichever process has its offsets, and also after its last member left."""
    one = Consumer(processes, GROUP, "m1", [topic])
    one.beat()
    assert commit(one, topic, {0: 5}) == {0: 0}
    for state in ("Stable", "Empty"):
        [old] = one.client.ask(Api.DESCRIBE_GROUPS, 5, groups=[GROUP]).groups
        [new] = one.client.ask(Api.DESCRIBE_GROUPS, 6, groups=[GROUP]).groups
        assert (old.error, old.group_state) == (WireError.NONE, "Dead")
        assert (new.error, new.group_state) == (WireError.GROUP_ID_NOT_FOUND, "Dead")
        [found] = one.client.ask(Api.CONSUMER_GROUP_DESCRIBE, 1, group_ids=[GROUP]).groups
        assert (found.error, found.group_state) == (WireError.NONE, state)
        [listed] = one.client.ask(Api.LIST_GROUPS, 5).groups
        assert (listed.group_type, listed.group_state) == ("consumer", state)
        one.beat(member_epoch=-1)


def test_a_delayed_commit_does_not_overwrite_a_later_one(processes: Processes) -> None:
    """The commit is delayed in a lost link until another member reads the partition and has committed."""
    one, two = (Consumer(processes, GROUP, name, ["bb"]) for name in ("m1", "m2"))
    one.beat()
    assert commit(one, "bb", {0: 1, 1: 1}) == {0: 0, 1: 0}
    link = LateLink(processes, 1, 2)
    made = schema.request(Api.OFFSET_COMMIT).Topics
    late = [made(name="bb", partitions=[made.Partitions(index=index, offset=5) for index in range(2)])]
    client = one.client
    version = client.tell(Api.OFFSET_COMMIT, 9, group_id=GROUP, member_id="m1", generation=one.epoch, topics=late)
    assert client.hear(Api.OFFSET_COMMIT, version) is None
    link.lose()
    one.client = Client(processes, 1)
    settle(one, two)
    assert commit(two, "bb", {1: 9}) == {1: 0}
    link.arrive()
    processes.loop.advance(AGAIN_S)
    reported = client.hear(Api.OFFSET_COMMIT, version)
    errors = {part.error for part in reported.topics[0].partitions}
    assert errors == {0}, "it was sent again before the other member read the partition"
    assert processes.broker("bb").classic.positions(GROUP, "bb")[1].offset == 9


def test_offsets_and_groups_in_use_are_not_deleted(processes: Processes) -> None:
    member = Consumer(processes, GROUP, "m1", ["bb"])
    member.beat()
    commit(member, "bb", {0: 1})
    made = schema.request(Api.OFFSET_DELETE).Topics
    asked = [made(name="bb", partitions=[made.Partitions(index=0)])]
    reported = member.client.ask(Api.OFFSET_DELETE, group_id=GROUP, topics=asked)
    assert reported.topics[0].partitions[0].error == WireError.GROUP_SUBSCRIBED_TO_TOPIC
    reported = member.client.ask(Api.DELETE_GROUPS, groups_names=[GROUP])
    assert reported.results[0].error == WireError.NON_EMPTY_GROUP
    member.beat(member_epoch=-1)
    assert member.client.ask(Api.DELETE_GROUPS, groups_names=[GROUP]).results[0].error == 0
    assert not processes.broker("bb").classic.positions(GROUP, "bb")


def test_memberships_from_before_the_coordinator_moved_block_no_member(processes: Processes) -> None:
    """The directory had one process, which coordinated the group."""
    broker = processes.broker("bb")
    for group in (GROUP, "bb"):
        broker.groups.join(group, "bb", "m0", wire="kafka", watched=True)
        broker.groups.join(group, "bb", "flux", wire="flux")
    processes.open(2)
    left = {group: [member.id for member in broker.groups.view(group, "bb").members] for group in (GROUP, "bb")}  # type: ignore[union-attr]
    assert left == {GROUP: ["flux"], "bb": ["m0", "flux"]}


# Permissions


def test_a_member_needs_permission_for_topics_of_other_shards(processes: Processes) -> None:
    """By the user's permissions, and by the topic's access list."""
    for name, access in (("bb", AccessList(readers=())), ("ccc", AccessList(readers=("*",)))):
        broker = processes.broker(name)
        broker.configure_topic(broker.topic(name), TopicSettings(access=access))
    processes.loop.run_due()
    member = Consumer(processes, GROUP, "m1", ["bb"])
    assert member.beat().error == WireError.GROUP_AUTHORIZATION_FAILED
    member.topics = ["ccc"]
    assert not member.beat().error
    by_pattern = Consumer(processes, "dddd", "m2", pattern="bb|ccc")
    by_pattern.beat()
    assert by_pattern.reads() == {"ccc": [0, 1]}
    broker = processes.broker("ccc")
    broker.configure_topic(broker.topic("ccc"), TopicSettings(access=AccessList(readers=())))
    processes.loop.advance(1.0)
    member.client.hear(Api.CONSUMER_GROUP_HEARTBEAT, 1)
    assert member.beat().error == WireError.GROUP_AUTHORIZATION_FAILED, "the list has changed"


def login(client: Client, name: str) -> None:
    client.ask(Api.SASL_HANDSHAKE, mechanism=PLAIN)
    version = client.tell(Api.SASL_AUTHENTICATE, auth_bytes=f"\0{name}\0wonderland".encode())
    end = time.monotonic() + WAIT_S
    while (reported := client.hear(Api.SASL_AUTHENTICATE, version)) is None:
        assert time.monotonic() < end, "passwords are verified in a thread"
    assert not reported.error


def test_permissions_apply_to_topics_of_other_shards(processes: Processes) -> None:
    """Bob has permissions on one topic, which another shard owns."""
    with_users(processes)
    group = "ccc"
    of_bob = Consumer(processes, group, "m1", ["a", "bb"])
    login(of_bob.client, "bob")
    assert of_bob.beat().error == WireError.GROUP_AUTHORIZATION_FAILED
    of_bob.topics = ["a"]
    assert not of_bob.beat().error
    assert of_bob.reads() == {"a": [0, 1]}
    assert commit(of_bob, "a", {0: 1}) == {0: 0}
    assert commit(of_bob, "bb", {0: 1})[0] != 0
    by_pattern = Consumer(processes, group, "m2", pattern=".*")
    login(by_pattern.client, "bob")
    settle(of_bob, by_pattern)
    assert by_pattern.reads() == {"a": [1]}
    made = schema.request(Api.METADATA).Topics
    asked = [made(topic_id=id_of(processes, name), name=None) for name in ("a", "bb")]
    reported = of_bob.client.ask(Api.METADATA, 12, topics=asked)
    assert [(one.name, one.error) for one in reported.topics] == [("a", 0), (None, WireError.UNKNOWN_TOPIC_ID)]


# With classic members


def test_a_classic_and_a_newer_member_share_topics_of_other_shards(processes: Processes) -> None:
    member = Consumer(processes, GROUP, "m1", ["bb"])
    member.beat()
    client, protocol = Client(processes, 1), schema.request(Api.JOIN_GROUP).Protocols
    asked = {
        "group_id": GROUP, "session_timeout_ms": 30_000, "rebalance_timeout_ms": 30_000, "protocol_type": "consumer",
        "protocols": [protocol(name="range", metadata=subscription("bb", "ccc", version=0))],
    }  # fmt: skip

    def joined() -> dict[str, list[int]]:
        """Join again and return the assignment."""
        version = client.tell(Api.JOIN_GROUP, 3, **asked)
        while (reported := client.hear(Api.JOIN_GROUP, version)) is None:
            processes.loop.advance(1.0)
        assert not reported.error
        asked["member_id"] = reported.member_id
        synced = client.ask(
            Api.SYNC_GROUP, 3, group_id=GROUP, member_id=reported.member_id, generation_id=reported.generation_id
        )
        assert not synced.error
        heartbeat = {"group_id": GROUP, "member_id": reported.member_id, "generation_id": reported.generation_id}
        asked_again.append(heartbeat)
        return {name: sorted(held) for name, held in WRITING.decode(bytes(synced.assignment)).items()}

    asked_again: list[dict[str, Any]] = []
    held = joined()
    for _ in range(10):
        settle(member, rounds=1)
        if client.ask(Api.HEARTBEAT, 3, **asked_again[-1]).error:
            held = joined()
    [ours] = member.reads().values()
    assert sorted([*ours, *held["bb"]]) == [0, 1]
    assert held["ccc"] == [0, 1]
    generation = asked_again[-1]["generation_id"]
    made = schema.request(Api.OFFSET_COMMIT).Topics
    topics = [
        made(name=name, partitions=[made.Partitions(index=index, offset=1) for index in range(2)])
        for name in ("bb", "ccc")
    ]
    reported = client.ask(
        Api.OFFSET_COMMIT, 7, group_id=GROUP, member_id=asked["member_id"], generation=generation, topics=topics
    )
    errors = {one.name: {part.error for part in one.partitions} for one in reported.topics}
    assert errors == {"bb": {WireError.ILLEGAL_GENERATION}, "ccc": {0}}, "another member reads one partition of bb"
