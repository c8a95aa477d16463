"""Requests to one of several processes: redirects to the owner, and responses that cover all processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.broker import Broker
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING, Grants, resource_name
from polywire.broker.scram import Mechanism
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.context import KafkaSettings, node_of
from polywire.protocols.kafka.factory import COMMANDS, KafkaFactory
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.routed import AGAIN_S
from polywire.protocols.kafka.sasl import PLAIN
from polywire.protocols.runtime.shards import LinkPeer
from polywire.records.columns import Record
from polywire.routing.broker import ANSWER_S, RoutedBroker
from polywire.routing.messages import Process
from polywire.routing.resolved import ResolvedBroker
from polywire.routing.session import Part, RouterFactory
from polywire.types import PositionKind, TopicName
from tests.unit.protocols.polywire.peer import CapturedOutput
from tests.unit.protocols.shards_in_memory import Either, MemoryLink, MemoryShards

COUNT = 3
WAIT_S = 20.0
TOPICS = ("a", "bb", "ccc", "dddd")  # owned by shards 1, 2, 0 and 1, as are groups of these names
HASH = hash_password("wonderland")


class Seen:
    """The shards as one process sees them."""

    def __init__(self, shards: MemoryShards, own: int) -> None:
        self._shards = shards
        self.own = own
        self.count, self.key = shards.count, shards.key

    def shard_of(self, full_name: str) -> int | None:
        return self._shards.shard_of(full_name)

    def shard_by_hash(self, full_name: str) -> int:
        return self._shards.shard_by_hash(full_name)

    def least_loaded(self) -> int:
        return self._shards.least_loaded()

    def listener_of(self, port: int) -> str:
        return {9094: "kafka", 9095: "kafka-tls"}.get(port, "")

    def port_of(self, listener: str) -> int:
        return {"kafka": 9100, "kafka-tls": 9200}[listener] + self.own

    def connect(self, shard: int, peer: LinkPeer) -> MemoryLink:
        return self._shards.connect(shard, peer)


class Processes:
    """Several processes of one broker."""

    def __init__(
        self, count: int = COUNT, see: Callable[[MemoryShards, int], Seen] = Seen, settings: KafkaSettings | None = None
    ) -> None:
        self.shards = MemoryShards(KafkaFactory, count)
        self.loop = self.shards.loop
        self.outside: list[KafkaFactory] = []
        self.routers: dict[int, Any] = {}
        self.inside = [Either() for _ in range(count)]
        self.shards.factories = list(self.inside)
        for own in range(count):
            self.open(own, see, settings)
        self.run()

    def open(
        self, own: int, see: Callable[[MemoryShards, int], Seen] = Seen, settings: KafkaSettings | None = None
    ) -> KafkaFactory:
        """Open the factory of a process for clients, and that for links."""
        broker, seen = self.shards.brokers[own], see(self.shards, own)
        routed: Any = ResolvedBroker(RoutedBroker(broker, seen))
        made = KafkaFactory(broker, settings, router=routed)
        ports = {listener: seen.port_of(listener) for listener in ("kafka", "kafka-tls")}
        process = Process(broker.epoch, made.own.settings.host, ports, made.own.cluster_id if own == 0 else "")
        routed.executors["kafka"] = made.executor
        parts = {name: Part(name, target, functions) for name, target, functions in made.called}
        key = self.shards.key
        self.inside[own].factories[:] = [RouterFactory(broker, key, lambda: process, routed.executors, parts)]
        self.outside[own : own + 1] = [made]
        self.routers[own] = routed
        return made

    def run(self) -> None:
        for _ in range(20):
            self.loop.run_due()

    def broker(self, topic: str) -> Broker:
        """Return the broker that owns a topic."""
        shard = self.shards.shard_of(topic)
        assert shard is not None
        return self.shards.brokers[shard]

    def make(self, *topics: str) -> None:
        """Create topics in the shards that own their names."""
        for name in topics:
            self.shards.brokers[self.shards.shard_by_hash(name)].create_topic(TopicName("default", name), 2)
        self.run()


class Client:
    """A connection to one of the processes."""

    def __init__(self, processes: Processes, own: int = 0, port: int = 9094) -> None:
        self.processes = processes
        self.output = CapturedOutput()
        self.output.local = ("10.0.0.7", port)
        self.session = processes.outside[own].open(self.output, lambda: None)
        self.number = 0
        self.unread = bytearray()

    def tell(self, api: Api, version: int | None = None, /, **fields: Any) -> int:
        """Send a request."""
        version = self.session.shared.served[api].last if version is None else version
        self.number += 1
        frame = encode_request(api, version, self.number, schema.request(api)(**fields), client_id="test")
        self.unread += frame
        self.offer()
        return version

    def offer(self) -> None:
        """Offer the bytes that the session has not accepted yet."""
        if self.unread and not self.session.paused():
            del self.unread[: self.session.receive(memoryview(bytearray(self.unread)))]

    def hear(self, api: Api, version: int) -> Any:
        """Return the response to the latest request, or None while it is pending."""
        for _ in range(200):
            self.processes.loop.run_due()
            self.offer()
            for broker in self.processes.shards.brokers:
                broker.commit()
        sent = bytes(self.output.written)
        if not sent:
            return None
        self.output.written.clear()
        assert int.from_bytes(sent[:4], "big") == len(sent) - 4
        return decode_response(api, version, sent[4:])[1]

    def ask(self, api: Api, version: int | None = None, /, **fields: Any) -> Any:
        """Send a request and return the response."""
        return self.hear(api, self.tell(api, version, **fields))


@pytest.fixture
def processes() -> Processes:
    made = Processes()
    made.make(*TOPICS)
    return made


def named(api: Api, field: str, *names: str) -> list[Any]:
    return [getattr(schema.request(api), field)(name=name) for name in names]


# Brokers and leaders


@pytest.mark.parametrize("own", range(COUNT))
@pytest.mark.parametrize("version", [0, 1, 4, 9, 11])
def test_every_process_reports_all_brokers_and_topics(processes: Processes, own: int, version: int) -> None:
    reported = Client(processes, own).ask(Api.METADATA, version, topics=None if version else [])
    assert [(one.node_id, one.host, one.port) for one in reported.brokers] == [
        (node_of(shard), "10.0.0.7", 9100 + shard) for shard in range(COUNT)
    ]
    leaders = {topic.name: {one.leader_id for one in topic.partitions} for topic in reported.topics}
    assert leaders == {name: {node_of(processes.shards.shard_by_hash(name))} for name in TOPICS}
    assert reported.controller_id == (node_of(own) if version else -1)


def test_all_processes_have_the_same_cluster_id(processes: Processes) -> None:
    reported = [Client(processes, own).ask(Api.METADATA, topics=None).cluster_id for own in (2, 0, 1)]
    assert reported[0]
    assert len(set(reported)) == 1
    assert {Client(processes, own).ask(Api.DESCRIBE_CLUSTER).cluster_id for own in range(COUNT)} == set(reported)


def test_clients_under_tls_get_addresses_with_tls(processes: Processes) -> None:
    reported = Client(processes, 1, 9095).ask(Api.DESCRIBE_CLUSTER)
    assert [(one.broker_id, one.port) for one in reported.brokers] == [(1, 9200), (2, 9201), (3, 9202)]
    assert reported.controller_id == 2


@pytest.mark.parametrize("own", range(COUNT))
def test_named_topics_are_returned_in_request_order(processes: Processes, own: int) -> None:
    names = ["dddd", "nothing", "a", "ccc"]
    reported = Client(processes, own).ask(Api.METADATA, topics=named(Api.METADATA, "Topics", *names), may_create=False)
    assert [(one.name, one.error) for one in reported.topics] == [
        (name, WireError.UNKNOWN_TOPIC_OR_PARTITION if name == "nothing" else 0) for name in names
    ]


@pytest.mark.parametrize("own", range(COUNT))
def test_a_missing_topic_is_created_in_the_shard_that_owns_its_name(processes: Processes, own: int) -> None:
    reported = Client(processes, own).ask(Api.METADATA, topics=named(Api.METADATA, "Topics", "eeeee"))
    assert [one.leader_id for one in reported.topics[0].partitions] == [3, 3, 3]
    assert processes.shards.shard_of("eeeee") == processes.shards.shard_by_hash("eeeee") == 2


def test_metadata_of_all_topics_wait_a_second_for_processes_that_hang(processes: Processes) -> None:
    hang(processes, 1)
    hang(processes, 2)
    client = Client(processes)
    reported = client.ask(Api.METADATA, topics=named(Api.METADATA, "Topics", *TOPICS))
    assert len(reported.topics) == len(TOPICS), "topics that are named are known"
    assert client.ask(Api.METADATA, topics=[]).topics == [], "an empty list is for no topic"
    version = client.tell(Api.METADATA, topics=None)
    assert client.hear(Api.METADATA, version) is None
    processes.loop.advance(ANSWER_S)
    reported = client.hear(Api.METADATA, version)
    assert [(one.name, one.error, one.partitions[0].leader_id) for one in reported.topics] == [
        ("a", 0, 2),
        ("bb", 0, 3),
        ("ccc", 0, 1),
        ("dddd", 0, 2),
    ]
    assert len(reported.brokers) == COUNT


def test_a_topic_that_is_not_known_yet_is_waited_for_a_limited_time(processes: Processes) -> None:
    hang(processes, 2)
    processes.make("later")  # in shard 2
    client = Client(processes)
    version = client.tell(Api.METADATA, topics=named(Api.METADATA, "Topics", "later", "ccc"), may_create=False)
    assert client.hear(Api.METADATA, version) is None
    processes.loop.advance(ANSWER_S)
    reported = client.hear(Api.METADATA, version)
    assert [(one.name, one.error) for one in reported.topics] == [
        ("later", WireError.UNKNOWN_TOPIC_OR_PARTITION),
        ("ccc", 0),
    ]


def hang(processes: Processes, shard: int) -> None:
    """Make a process stop responding."""
    for link in processes.shards.links:
        if link._peer is not None and link.shard == shard:
            link.pause()


# Records go to the leader


@pytest.mark.parametrize("own", range(COUNT))
def test_only_the_leader_accepts_and_returns_records(processes: Processes, own: int) -> None:
    client = Client(processes, own)
    made = schema.request(Api.PRODUCE).Topics
    topics = [
        made(name=name, partitions=[made.Partitions(index=0, records=encode_batch([Record(b"v")]))])
        for name in (*TOPICS, "no")
    ]
    reported = client.ask(Api.PRODUCE, 9, acks=1, topics=topics)
    expected = {
        name: 0 if processes.shards.shard_by_hash(name) == own else WireError.NOT_LEADER_OR_FOLLOWER for name in TOPICS
    } | {"no": WireError.UNKNOWN_TOPIC_OR_PARTITION}
    assert {one.name: one.partitions[0].error for one in reported.responses} == expected
    asked = schema.request(Api.LIST_OFFSETS).Topics
    listed = [asked(name=name, partitions=[asked.Partitions(index=0, timestamp=-1)]) for name in (*TOPICS, "no")]
    reported = client.ask(Api.LIST_OFFSETS, topics=listed)
    assert {one.name: one.partitions[0].error for one in reported.topics} == expected


def test_producer_ids_differ_between_processes(processes: Processes) -> None:
    found = [Client(processes, own).ask(Api.INIT_PRODUCER_ID).producer_id for own in (0, 1, 2, 0, 1, 2)]
    assert len(set(found)) == 6
    assert min(found) > 0


def test_the_apis_are_those_of_a_single_process(processes: Processes) -> None:
    reported = Client(processes).ask(Api.API_VERSIONS, client_software_name="test", client_software_version="1")
    assert {one.api_key for one in reported.api_keys} == COMMANDS.keys()


# Administration


@pytest.mark.parametrize("own", range(COUNT))
def test_topics_are_created_changed_and_deleted_in_any_shard(processes: Processes, own: int) -> None:
    client = Client(processes, own)
    made = schema.request(Api.CREATE_TOPICS).Topics
    names = [f"new-{number}" for number in range(COUNT)]
    asked = [made(name=name, num_partitions=1, replication_factor=1) for name in (*names, "a")]
    reported = client.ask(Api.CREATE_TOPICS, topics=asked)
    assert {one.name: one.error for one in reported.topics} == dict.fromkeys(names, 0) | {
        "a": WireError.TOPIC_ALREADY_EXISTS
    }
    assert {processes.shards.shard_of(name) for name in names} == set(range(COUNT)), "one after the other"
    grown = [schema.request(Api.CREATE_PARTITIONS).Topics(name=name, count=4, assignments=None) for name in names]
    reported = client.ask(Api.CREATE_PARTITIONS, topics=grown)
    assert {one.name: one.error for one in reported.results} == dict.fromkeys(names, 0)
    assert [len(processes.broker(name).topic(name).partitions) for name in names] == [4] * COUNT
    reported = client.ask(Api.DELETE_TOPICS, 5, topic_names=[*names, "no"])
    assert {one.name: one.error for one in reported.responses} == dict.fromkeys(names, 0) | {
        "no": WireError.UNKNOWN_TOPIC_OR_PARTITION
    }
    assert [processes.shards.shard_of(name) for name in names] == [None] * COUNT


@pytest.mark.parametrize("own", range(COUNT))
def test_topic_settings_come_from_the_owner_and_broker_settings_from_the_process(
    processes: Processes, own: int
) -> None:
    client = Client(processes, own)
    change = schema.request(Api.INCREMENTAL_ALTER_CONFIGS).Resources
    resources = [
        change(resource_type=2, resource_name=name, configs=[change.Configs(name="retention.ms", value="5000")])
        for name in TOPICS
    ]
    reported = client.ask(Api.INCREMENTAL_ALTER_CONFIGS, resources=resources)
    assert [one.error for one in reported.responses] == [0] * len(TOPICS)
    asked = schema.request(Api.DESCRIBE_CONFIGS).Resources
    described = [asked(resource_type=2, resource_name=name, configuration_keys=["retention.ms"]) for name in TOPICS]
    described += [
        asked(resource_type=4, resource_name=str(node_of(shard)), configuration_keys=["node.id"])
        for shard in range(COUNT)
    ]
    reported = client.ask(Api.DESCRIBE_CONFIGS, resources=described)
    found = {(one.resource_type, one.resource_name): [each.value for each in one.configs] for one in reported.results}
    assert found == {(2, name): ["5000"] for name in TOPICS} | {
        (4, str(node_of(shard))): [str(node_of(own))] if shard == own else [] for shard in range(COUNT)
    }


def test_a_forwarded_change_without_a_response_is_not_repeated(processes: Processes) -> None:
    client = Client(processes)
    version = client.tell(Api.DELETE_TOPICS, 5, topic_names=["a"])
    next(link for link in processes.shards.links if link.shard == 1).break_off()
    reported = client.hear(Api.DELETE_TOPICS, version)
    assert [(one.name, one.error) for one in reported.responses] == [("a", WireError.REQUEST_TIMED_OUT)]


# Groups


@pytest.mark.parametrize("own", range(COUNT))
@pytest.mark.parametrize("version", [0, 3, 6])
def test_a_group_is_coordinated_by_the_shard_that_owns_its_name(processes: Processes, own: int, version: int) -> None:
    client = Client(processes, own)
    keys = {"coordinator_keys": ["a"]} if version >= 4 else {"key": "a"}
    reported = client.ask(Api.FIND_COORDINATOR, version, **keys)
    reported = reported.coordinators[0] if version >= 4 else reported
    assert (reported.error, reported.node_id, reported.host, reported.port) == (0, 2, "10.0.0.7", 9101)


def test_other_processes_answer_group_requests_with_not_coordinator(processes: Processes) -> None:
    client = Client(processes)
    assert client.ask(Api.JOIN_GROUP, group_id="a").error == WireError.NOT_COORDINATOR
    assert client.ask(Api.HEARTBEAT, group_id="a").error == WireError.NOT_COORDINATOR
    assert client.ask(Api.SYNC_GROUP, group_id="a").error == WireError.NOT_COORDINATOR
    assert client.ask(Api.LEAVE_GROUP, group_id="a").error == WireError.NOT_COORDINATOR
    assert commit(client, "a", {"a": 1}) == {"a": WireError.NOT_COORDINATOR}
    assert client.ask(Api.OFFSET_FETCH, 7, group_id="a", topics=None).error == WireError.NOT_COORDINATOR
    asked = schema.request(Api.OFFSET_FETCH).Groups
    reported = client.ask(Api.OFFSET_FETCH, 9, groups=[asked(group_id=name, topics=None) for name in ("a", "ccc")])
    assert [(one.group_id, one.error) for one in reported.groups] == [("a", WireError.NOT_COORDINATOR), ("ccc", 0)]
    reported = client.ask(Api.DESCRIBE_GROUPS, groups=["a"])
    assert [one.error for one in reported.groups] == [WireError.NOT_COORDINATOR]
    reported = client.ask(Api.DELETE_GROUPS, groups_names=["a"])
    assert [one.error for one in reported.results] == [WireError.NOT_COORDINATOR]
    assert client.ask(Api.OFFSET_DELETE, group_id="a").error == WireError.NOT_COORDINATOR


def commit(client: Client, group: str, offsets: dict[str, int], *, member: str = "", generation: int = -1) -> Any:
    """Return errors by topic of a commit for the first partitions."""
    made = schema.request(Api.OFFSET_COMMIT).Topics
    topics = [made(name=name, partitions=[made.Partitions(index=0, offset=at)]) for name, at in offsets.items()]
    reported = client.ask(Api.OFFSET_COMMIT, 9, group_id=group, member_id=member, generation=generation, topics=topics)
    return {one.name: one.partitions[0].error for one in reported.topics}


def join(client: Client, group: str) -> tuple[str, int]:
    """Join as the only member of a group; return its id and generation."""
    protocol = schema.request(Api.JOIN_GROUP).Protocols(name="range", metadata=b"")
    reported = client.ask(
        Api.JOIN_GROUP, 3, group_id=group, session_timeout_ms=10_000, rebalance_timeout_ms=10_000,
        protocol_type="x", protocols=[protocol],
    )  # fmt: skip
    assert not reported.error
    assignment = schema.request(Api.SYNC_GROUP).Assignments(member_id=reported.member_id, assignment=b"")
    synced = client.ask(
        Api.SYNC_GROUP, 3, group_id=group, member_id=reported.member_id, generation_id=reported.generation_id,
        assignments=[assignment],
    )  # fmt: skip
    assert not synced.error
    return reported.member_id, reported.generation_id


def test_offsets_are_stored_with_their_topics_and_the_coordinator_returns_all(processes: Processes) -> None:
    client = Client(processes, 1)
    member, generation = join(client, "a")
    offsets = {name: number for number, name in enumerate(TOPICS, 1)}
    assert commit(client, "a", offsets | {"no": 1}, member=member, generation=generation) == dict.fromkeys(
        TOPICS, 0
    ) | {"no": WireError.UNKNOWN_TOPIC_OR_PARTITION}
    for name, at in offsets.items():
        held = processes.broker(name).classic.positions("a", name)
        assert {number: one.offset for number, one in held.items()} == {0: at}
    asked = schema.request(Api.OFFSET_FETCH)
    for topics in (None, [asked.Groups.Topics(name=name, indexes=[0]) for name in TOPICS]):
        reported = client.ask(Api.OFFSET_FETCH, 9, groups=[asked.Groups(group_id="a", topics=topics)])
        assert {one.name: one.partitions[0].offset for one in reported.groups[0].topics} == offsets
        reported = client.ask(Api.OFFSET_FETCH, 5, group_id="a", topics=topics)
        assert {one.name: one.partitions[0].offset for one in reported.topics} == offsets


def test_commits_of_unknown_members_are_refused_for_every_topic(processes: Processes) -> None:
    client = Client(processes, 1)
    member, generation = join(client, "a")
    assert commit(client, "a", {"a": 1, "bb": 1}, member="other", generation=generation) == {
        "a": WireError.UNKNOWN_MEMBER_ID,
        "bb": WireError.UNKNOWN_MEMBER_ID,
    }
    assert commit(client, "a", {"bb": 1}, member=member, generation=generation - 1) == {
        "bb": WireError.ILLEGAL_GENERATION
    }
    assert not processes.broker("bb").classic.positions("a", "bb")


class LateLink:
    """The link from one process to another, whose bytes arrive only after the sender has given it up."""

    def __init__(self, processes: Processes, own: int, shard: int) -> None:
        router = processes.routers[own]
        self._link = next(
            link for link in processes.shards.links if link.shard == shard and link._peer is router._links[shard]
        )
        self._link._pump = lambda: None  # type: ignore[method-assign]  # the other process reads nothing

    def lose(self) -> None:
        peer, self._link._peer = self._link._peer, None
        assert peer is not None
        peer.lost()

    def arrive(self) -> None:
        self._link._session.receive(memoryview(bytearray(self._link._received)))


def test_a_delayed_commit_does_not_overwrite_a_later_one(processes: Processes) -> None:
    """The commit is delayed in a lost link until a later generation has committed."""
    first = Client(processes, 1)
    member, generation = join(first, "a")
    assert commit(first, "a", {"bb": 1}, member=member, generation=generation) == {"bb": 0}
    link = LateLink(processes, 1, 2)
    made = schema.request(Api.OFFSET_COMMIT).Topics
    late = [made(name="bb", partitions=[made.Partitions(index=0, offset=5)])]
    version = first.tell(Api.OFFSET_COMMIT, 9, group_id="a", member_id=member, generation=generation, topics=late)
    assert first.hear(Api.OFFSET_COMMIT, version) is None
    link.lose()
    second = Client(processes, 1)
    second.ask(Api.LEAVE_GROUP, 0, group_id="a", member_id=member)
    member, later = join(second, "a")
    assert later > generation
    assert commit(second, "a", {"bb": 9}, member=member, generation=later) == {"bb": 0}
    link.arrive()
    processes.loop.advance(AGAIN_S)
    reported = first.hear(Api.OFFSET_COMMIT, version)
    assert reported.topics[0].partitions[0].error == WireError.ILLEGAL_GENERATION
    assert processes.broker("bb").classic.positions("a", "bb")[0].offset == 9


def test_each_group_is_listed_and_described_by_its_coordinator_only(processes: Processes) -> None:
    join(Client(processes, 1), "a")
    for name in TOPICS:  # of a group without members, and of one with another coordinator
        processes.broker(name).commit_position(name, 0, PositionKind.GROUP, "bb", 1)
    found = [
        {(one.group_id, one.group_state) for one in Client(processes, own).ask(Api.LIST_GROUPS).groups}
        for own in range(COUNT)
    ]
    assert found == [set(), {("a", "Stable")}, {("bb", "Empty")}]
    assert [one.group_id for one in Client(processes, 1).ask(Api.LIST_GROUPS, states_filter=["Empty"]).groups] == []
    reported = Client(processes, 2).ask(Api.DESCRIBE_GROUPS, groups=["bb", "gone5"])
    assert [(one.group_id, one.error, one.group_state) for one in reported.groups] == [
        ("bb", 0, "Empty"),
        ("gone5", WireError.GROUP_ID_NOT_FOUND, "Dead"),
    ]
    reported = Client(processes, 1).ask(Api.DESCRIBE_GROUPS, groups=["a"])
    assert [(one.group_state, len(one.members)) for one in reported.groups] == [("Stable", 1)]


def test_a_group_is_deleted_in_all_shards_or_refused_while_it_has_members(processes: Processes) -> None:
    client = Client(processes, 1)
    member, generation = join(client, "a")
    commit(client, "a", dict.fromkeys(TOPICS, 1), member=member, generation=generation)
    reported = client.ask(Api.DELETE_GROUPS, groups_names=["a", "dddd"])
    assert [(one.group_id, one.error) for one in reported.results] == [
        ("a", WireError.NON_EMPTY_GROUP),
        ("dddd", WireError.GROUP_ID_NOT_FOUND),
    ]
    assert all(processes.broker(name).classic.positions("a", name) for name in TOPICS)
    client.ask(Api.LEAVE_GROUP, 0, group_id="a", member_id=member)
    made = schema.request(Api.OFFSET_DELETE).Topics
    reported = client.ask(
        Api.OFFSET_DELETE, group_id="a", topics=[made(name="bb", partitions=[made.Partitions(index=0)])]
    )
    assert [(one.name, one.partitions[0].error) for one in reported.topics] == [("bb", 0)]
    assert not processes.broker("bb").classic.positions("a", "bb")
    reported = client.ask(Api.DELETE_GROUPS, groups_names=["a"])
    assert [one.error for one in reported.results] == [0]
    assert not any(processes.broker(name).classic.positions("a", name) for name in TOPICS)


# Permissions


def with_users(processes: Processes) -> None:
    topics = Grants(topics={resource_name("default", "a"): EVERYTHING.everywhere})
    for broker in processes.shards.brokers:
        broker.access.configure([ConfiguredUser("alice", HASH, EVERYTHING), ConfiguredUser("bob", HASH, topics)])


@pytest.mark.parametrize(("name", "topics"), [("alice", {*TOPICS}), ("bob", {"a"})])
@pytest.mark.parametrize("own", [0, 1])
def test_a_logged_in_user_has_the_same_permissions_at_other_processes(
    processes: Processes, own: int, name: str, topics: set[str]
) -> None:
    with_users(processes)
    client = Client(processes, own)
    client.ask(Api.SASL_HANDSHAKE, mechanism=PLAIN)
    version = client.tell(Api.SASL_AUTHENTICATE, auth_bytes=f"\0{name}\0wonderland".encode())
    end = time.monotonic() + WAIT_S
    while (reported := client.hear(Api.SASL_AUTHENTICATE, version)) is None:
        assert time.monotonic() < end, "passwords are verified in a thread"
    assert not reported.error
    found = client.ask(Api.METADATA, topics=None)
    assert {one.name for one in found.topics} == topics
    found = client.ask(Api.DELETE_TOPICS, 5, topic_names=[*TOPICS])
    assert {one.name for one in found.responses if not one.error} == topics
    assert [processes.shards.shard_of(one) is None for one in TOPICS] == [one in topics for one in TOPICS]


def test_unauthenticated_requests_are_not_forwarded(processes: Processes) -> None:
    with_users(processes)
    before = len(processes.shards.links)
    client = Client(processes)
    with pytest.raises(Exception, match=r"log in first: .* \(set security.protocol to SASL_PLAINTEXT"):
        client.tell(Api.METADATA, topics=None)
    assert len(processes.shards.links) == before


@pytest.mark.parametrize("own", range(COUNT))
def test_scram_passwords_change_over_any_process(processes: Processes, own: int) -> None:
    client = Client(processes, own)
    upsertion = schema.request(Api.ALTER_USER_SCRAM_CREDENTIALS).Upsertions(
        name="ann", mechanism=1, iterations=4096, salt=b"salt", salted_password=b"p" * 32
    )
    reported = client.ask(Api.ALTER_USER_SCRAM_CREDENTIALS, upsertions=[upsertion], deletions=[])
    assert [(entry.user, entry.error) for entry in reported.results] == [("ann", 0)]
    for number in range(COUNT):
        found = Client(processes, number).ask(Api.DESCRIBE_USER_SCRAM_CREDENTIALS, users=None)
        assert [(entry.user, entry.error) for entry in found.results] == [("ann", 0)]
        assert processes.shards.brokers[number].access.verifier("ann", Mechanism.SHA_256).salt == b"salt"
    deletion = schema.request(Api.ALTER_USER_SCRAM_CREDENTIALS).Deletions(name="ann", mechanism=1)
    for error in (0, WireError.RESOURCE_NOT_FOUND):
        reported = client.ask(Api.ALTER_USER_SCRAM_CREDENTIALS, upsertions=[], deletions=[deletion])
        assert [(entry.user, entry.error) for entry in reported.results] == [("ann", error)]
    assert not any(broker.access.find_user("ann") for broker in processes.shards.brokers)
