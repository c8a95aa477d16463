"""Connections to a Kafka cluster: the example of RFC 7677, brokers that cannot be trusted, leaders and coordinators."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from polywire.client.address import Login
from polywire.client.connect import connect
from polywire.client.kafka import KafkaClient
from polywire.client.kafka_connection import (
    BROKERS_AGE_S,
    ITERATIONS_RANGE,
    LOADS_MAX,
    TRIES_MAX,
    Cluster,
    ScramProof,
    log_in,
    mechanism_for,
)
from polywire.errors import BrokerError, Busy, Denied, ErrorCode, Invalid, NotOwner, Unavailable
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError

NONCE = "rOprNGfwEbeRWgbNEkqO"
JOINED = NONCE + "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
CHALLENGE = f"r={JOINED},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
SIGNATURE = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def proof() -> ScramProof:
    return ScramProof(Login("user", "pencil"), "sha256", NONCE)


def test_the_example_of_rfc_7677() -> None:
    one = proof()
    assert one.first == f"n,,n=user,r={NONCE}"
    assert one.final(CHALLENGE) == f"c=biws,r={JOINED},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    one.verify(SIGNATURE)


def test_special_characters_of_names_are_escaped() -> None:
    assert ScramProof(Login("a=b,c", "p"), "sha256", "n").first == "n,,n=a=3Db=2Cc,r=n"


@pytest.mark.parametrize(
    "challenge",
    [
        "",
        "r=other,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        CHALLENGE.replace(JOINED, NONCE),
        CHALLENGE.replace("i=4096", f"i={ITERATIONS_RANGE.start - 1}"),
        CHALLENGE.replace("i=4096", f"i={ITERATIONS_RANGE.stop}"),
        CHALLENGE.replace("i=4096", "i=many"),
        CHALLENGE.replace("s=W22", "s=%%"),
        "s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        CHALLENGE + ",m=x",
    ],
)
def test_invalid_challenges_are_refused(challenge: str) -> None:
    with pytest.raises(Denied) as caught:
        proof().final(challenge)
    assert caught.value.code is ErrorCode.LOGIN_FAILED


@pytest.mark.parametrize("last", ["", "v=", "v=" + "A" * 43 + "=", "e=other-error", SIGNATURE + ",m=x"])
def test_a_broker_that_does_not_know_the_password_is_refused(last: str) -> None:
    one = proof()
    with pytest.raises(Denied):
        one.verify(last)
    one.final(CHALLENGE)
    with pytest.raises(Denied):
        one.verify(last)


def test_plain_passwords_are_sent_only_over_tls_or_loopback() -> None:
    assert mechanism_for("broker.example", is_secret=True) == "PLAIN"
    assert mechanism_for("127.0.0.1", is_secret=False) == "PLAIN"
    assert mechanism_for("::1", is_secret=False) == "PLAIN"
    assert mechanism_for("localhost", is_secret=False) == "PLAIN"
    assert mechanism_for("broker.example", is_secret=False) == "SCRAM-SHA-512"
    assert mechanism_for("10.0.0.1", is_secret=False) == "SCRAM-SHA-512"


def test_an_unknown_mechanism_sends_nothing() -> None:
    async def ask(*_: Any, **fields: Any) -> Any:
        raise AssertionError("something was sent")

    with pytest.raises(Invalid, match="known=PLAIN"):
        asyncio.run(log_in(ask, Login("a", "secret"), "GSSAPI"))


def test_a_refused_handshake_fails_before_the_password_is_sent() -> None:
    async def ask(*_: Any, **fields: Any) -> Any:
        assert "auth_bytes" not in fields
        return SimpleNamespace(error=33)

    with pytest.raises(Denied):
        asyncio.run(log_in(ask, Login("a", "secret"), "PLAIN"))


def test_only_protocols_with_logins_accept_a_user_name() -> None:
    with pytest.raises(Invalid, match="polywire://, kafka://"):
        asyncio.run(connect("flux://a:secret@h:1"))


ADDRESSES = {1: ("one", 9092), 2: ("two", 9092), 3: ("three", 9092)}
TYPES = {"g": "Consumer", "first": "Classic"}
TOPIC_ID = b"t" * 16


class Node:
    """A broker of a cluster in which broker ``leader`` leads the topic's partition 0, and those in ``others`` the rest.

    ``coordinators`` are the brokers that coordinate each group; None if no broker is available. ``size`` is the number
    of brokers. ``loading`` is the number of requests until coordinators have loaded their groups.
    """

    leader = 2
    size = 2
    coordinators: ClassVar[dict[str, int | None]] = {}
    others: ClassVar[dict[int, int]] = {}
    loading = 0
    lookup_error: WireError | None = None

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: list[Api] = []
        self.failure: BrokerError | None = None
        self.is_lost = False

    async def ask(self, api: Api, /, **fields: Any) -> Any:
        self.asked.append(api)
        if self.failure is not None:
            raise self.failure
        await asyncio.sleep(0)
        return self._ANSWERS[api](self, schema.response(api), fields)

    def _metadata(self, made: Any, fields: dict[str, Any]) -> Any:
        leaders = {0: Node.leader, **Node.others}
        partitions = [made.Topics.Partitions(index=number, leader_id=leader) for number, leader in leaders.items()]
        brokers = [
            made.Brokers(node_id=number, host=host, port=port)
            for number, (host, port) in ADDRESSES.items()
            if number <= Node.size
        ]
        topics = [made.Topics(name=topic.name, topic_id=TOPIC_ID, partitions=partitions) for topic in fields["topics"]]
        return made(brokers=brokers, topics=topics)

    def _produced(self, made: Any, fields: dict[str, Any]) -> Any:
        error = 0 if Node.leader == self.number else WireError.NOT_LEADER_OR_FOLLOWER
        partition = made.Responses.Partitions(error=error, base_offset=self.number)
        return made(responses=[made.Responses(partitions=[partition])])

    def _offsets(self, made: Any, fields: dict[str, Any]) -> Any:
        leaders = {0: Node.leader, **Node.others}
        assert fields["isolation_level"] == 1
        entries = []
        for one in fields["topics"][0].partitions:
            error = 0 if leaders[one.index] == self.number else WireError.NOT_LEADER_OR_FOLLOWER
            entries.append(made.Topics.Partitions(index=one.index, error=error, offset=100 * self.number + one.index))
        return made(topics=[made.Topics(name="t", partitions=entries)])

    def _found(self, made: Any, fields: dict[str, Any]) -> Any:
        assert fields["key_type"] == 0
        number = Node.coordinators[fields["key"]]
        if Node.lookup_error is not None or number is None:
            return made(error=Node.lookup_error or WireError.COORDINATOR_NOT_AVAILABLE)
        host, port = ADDRESSES[number]
        return made(node_id=number, host=host, port=port)

    def _error(self, group: str) -> int:
        if Node.loading:
            Node.loading -= 1
            return WireError.COORDINATOR_LOAD_IN_PROGRESS
        return 0 if Node.coordinators.get(group) == self.number else WireError.NOT_COORDINATOR

    def _beat(self, made: Any, fields: dict[str, Any]) -> Any:
        if error := self._error(fields["group_id"]):
            return made(error=error)
        partitions = made.Assignment.TopicPartitions(topic_id=TOPIC_ID, partitions=[0])
        return made(member_epoch=1, assignment=made.Assignment(topic_partitions=[partitions]))

    def _committed(self, made: Any, fields: dict[str, Any]) -> Any:
        entry = made.Topics.Partitions(index=0, error=self._error(fields["group_id"]))
        return made(topics=[made.Topics(name="t", partitions=[entry])])

    def _fetched(self, made: Any, fields: dict[str, Any]) -> Any:
        group = fields["groups"][0].group_id
        topic = made.Groups.Topics
        topics = [topic(name="t", partitions=[topic.Partitions(index=0, offset=10 + self.number)])]
        error = self._error(group)
        return made(groups=[made.Groups(group_id=group, error=error, topics=[] if error else topics)])

    def _listed(self, made: Any, fields: dict[str, Any]) -> Any:
        groups = [group for group in TYPES if not self._error(group)]
        return made(groups=[made.Groups(group_id=group, group_type=TYPES[group]) for group in groups])

    def _consumers(self, made: Any, fields: dict[str, Any]) -> Any:
        (group,) = fields["group_ids"]
        is_consumer = TYPES.get(group) == "Consumer"
        error = self._error(group) or (0 if is_consumer else WireError.GROUP_ID_NOT_FOUND)
        return made(groups=[made.Groups(group_id=group, error=error, members=[])])

    def _classic(self, made: Any, fields: dict[str, Any]) -> Any:
        (group,) = fields["groups"]
        state = "Empty" if TYPES.get(group) == "Classic" else "Dead"
        return made(groups=[made.Groups(group_id=group, error=self._error(group), group_state=state, members=[])])

    _ANSWERS: ClassVar[dict[Api, Any]] = {
        Api.METADATA: _metadata,
        Api.PRODUCE: _produced,
        Api.LIST_OFFSETS: _offsets,
        Api.FIND_COORDINATOR: _found,
        Api.CONSUMER_GROUP_HEARTBEAT: _beat,
        Api.OFFSET_COMMIT: _committed,
        Api.OFFSET_FETCH: _fetched,
        Api.LIST_GROUPS: _listed,
        Api.CONSUMER_GROUP_DESCRIBE: _consumers,
        Api.DESCRIBE_GROUPS: _classic,
    }

    def fail(self, error: BrokerError) -> None:
        self.failure = error


class Brokers:
    """A cluster of fake brokers, and a client that is connected to the first."""

    def __init__(self, size: int = 2) -> None:
        Node.leader, Node.size, Node.others, Node.loading = 2, size, {}, 0
        Node.coordinators, Node.lookup_error = {"g": 2, "first": 1, "missing": size}, None
        self.first = Node(1)
        self.dialled: list[Node] = []
        self.cluster = Cluster(cast(Any, self.first), cast(Any, self._dial))
        self.client = KafkaClient(cast(Any, self.first), cast(Any, self._dial))

    async def _dial(self, host: str, port: int) -> Node:
        (number,) = [number for number, at in ADDRESSES.items() if at == (host, port)]
        self.dialled.append(Node(number))
        return self.dialled[-1]

    async def produce(self) -> int:
        """Return the id of the broker that accepted the record, or the error."""
        answer = await self.cluster.ask_leader("t", 0, entries, Api.PRODUCE)
        (entry,) = entries(answer)
        return -entry.error if entry.error else int(entry.base_offset)


def entries(answer: Any) -> Iterator[Any]:
    return (entry for topic in answer.responses for entry in topic.partitions)


def test_if_the_first_broker_leads_no_other_is_asked() -> None:
    brokers = Brokers()
    Node.leader = 1
    assert asyncio.run(brokers.produce()) == 1
    assert (brokers.first.asked, brokers.dialled) == ([Api.PRODUCE], [])


def test_a_leader_is_looked_up_once() -> None:
    async def play() -> None:
        brokers = Brokers()
        assert await asyncio.gather(*(brokers.produce() for _ in range(3))) == [2, 2, 2]
        assert await brokers.produce() == 2
        (other,) = brokers.dialled
        assert brokers.first.asked == [Api.PRODUCE] * 3 + [Api.METADATA] * 3
        assert other.asked == [Api.PRODUCE] * 4

    asyncio.run(play())


def test_a_moved_leader_is_found_again_and_a_missing_one_is_an_error() -> None:
    async def play() -> None:
        brokers = Brokers()
        assert await brokers.produce() == 2
        Node.leader = 1
        assert await brokers.produce() == 1
        Node.leader = 3
        before = brokers.first.asked.count(Api.METADATA)
        assert await brokers.produce() == -WireError.NOT_LEADER_OR_FOLLOWER
        assert brokers.first.asked.count(Api.METADATA) - before == TRIES_MAX - 1

    asyncio.run(play())


def test_a_lost_connection_to_a_leader_is_replaced() -> None:
    async def play() -> None:
        brokers = Brokers()
        assert await brokers.produce() == 2
        brokers.dialled[0].failure = Unavailable(ErrorCode.UNREACHABLE, "gone")
        with pytest.raises(Unavailable):
            await brokers.produce()
        assert await brokers.produce() == 2
        assert len(brokers.dialled) == 2
        brokers.cluster.fail(Unavailable(ErrorCode.STOPPING, "client was closed"))
        assert brokers.dialled[1].failure is not None
        assert brokers.first.failure is None

    asyncio.run(play())


def test_each_partition_has_its_own_leader() -> None:
    async def play() -> None:
        brokers = Brokers(size=3)
        Node.others = {1: 1, 2: 3, 3: 2, 4: 3}
        for _ in range(2):
            bounds = await brokers.client.bounds("t")
            assert [part.next_offset for part in bounds] == [200, 101, 302, 203, 304]
        assert [node.number for node in brokers.dialled] == [2, 3]
        assert brokers.first.asked.count(Api.METADATA) == 2 + 1  # one for each call, and one to find the leaders
        Node.others = {1: 2, 2: 2, 3: 2, 4: 2}
        Node.leader = 1
        bounds = await brokers.client.bounds("t")
        assert [part.next_offset for part in bounds] == [100, 201, 202, 203, 204]
        Node.leader = 9
        with pytest.raises(NotOwner):
            await brokers.client.bounds("t")

    asyncio.run(play())


def test_a_coordinator_that_loads_its_groups_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        brokers = Brokers()
        Node.coordinators["g"], Node.loading = 1, LOADS_MAX - 1
        assert await brokers.client.position("g", "t", 0) == 11
        Node.loading = LOADS_MAX
        with pytest.raises(Busy):
            await brokers.client.position("g", "t", 0)

    monkeypatch.setattr("polywire.client.kafka_connection.LOAD_PAUSE_S", 0)
    asyncio.run(play())


def test_the_requests_of_a_group_go_to_its_coordinator() -> None:
    async def play() -> None:
        brokers = Brokers()
        client = brokers.client
        membership = await client.join("g", "t", "m")
        assert membership.partitions == (0,)
        assert await client.heartbeat("g", "t", "m", membership.generation) == membership
        await client.commit("g", "t", 0, 5, member="m", generation=membership.generation)
        assert await client.position("g", "t", 0) == 12
        await client.leave("g", "t", "m", membership.generation)
        (coordinator,) = brokers.dialled
        beat = Api.CONSUMER_GROUP_HEARTBEAT
        assert brokers.first.asked == [Api.METADATA, beat, Api.FIND_COORDINATOR]
        assert coordinator.asked == [beat, beat, Api.OFFSET_COMMIT, Api.OFFSET_FETCH, beat]

    asyncio.run(play())


def test_a_cluster_of_one_broker_needs_no_lookups() -> None:
    async def play() -> None:
        brokers = Brokers(size=1)
        assert await brokers.client.position("first", "t", 0) == 11
        await brokers.client.commit("first", "t", 0, 5)
        assert [group.name for group in await brokers.client.groups("first")] == ["first"]
        describe = [Api.CONSUMER_GROUP_DESCRIBE, Api.DESCRIBE_GROUPS, Api.OFFSET_FETCH]
        assert (brokers.first.asked, brokers.dialled) == ([Api.OFFSET_FETCH, Api.OFFSET_COMMIT, *describe], [])
        brokers.first.asked.clear()
        for _ in range(2):
            await brokers.client.groups()
        assert brokers.first.asked.count(Api.METADATA) == 1
        assert (brokers.first.asked.count(Api.LIST_GROUPS), brokers.dialled) == (2, [])

    asyncio.run(play())


def test_a_moved_coordinator_is_found_again() -> None:
    async def play() -> None:
        brokers = Brokers()
        assert await brokers.client.position("g", "t", 0) == 12
        Node.coordinators["g"] = 3
        assert await brokers.client.position("g", "t", 0) == 13
        Node.coordinators["g"] = 1
        assert await brokers.client.position("g", "t", 0) == 11
        assert brokers.first.asked.count(Api.FIND_COORDINATOR) == 3

    asyncio.run(play())


def test_the_number_of_lookups_is_limited() -> None:
    async def play() -> None:
        brokers = Brokers()
        Node.coordinators["g"] = None
        with pytest.raises(NotOwner):
            await brokers.client.position("g", "t", 0)
        assert brokers.first.asked == [Api.OFFSET_FETCH, Api.FIND_COORDINATOR] * (TRIES_MAX - 1) + [Api.OFFSET_FETCH]

    asyncio.run(play())


def test_an_unauthorized_lookup_is_an_error() -> None:
    async def play() -> None:
        brokers = Brokers()
        Node.lookup_error = WireError.GROUP_AUTHORIZATION_FAILED
        with pytest.raises(Denied):
            await brokers.client.position("g", "t", 0)

    asyncio.run(play())


def test_a_request_whose_connection_was_lost_is_not_repeated() -> None:
    async def play() -> None:
        brokers = Brokers()
        assert await brokers.client.position("g", "t", 0) == 12
        Node.coordinators["g"] = 3
        brokers.dialled[0].failure = Unavailable(ErrorCode.UNREACHABLE, "gone")
        with pytest.raises(Unavailable):
            await brokers.client.position("g", "t", 0)
        assert await brokers.client.position("g", "t", 0) == 13

    asyncio.run(play())


def test_nothing_is_sent_over_a_connection_that_is_known_to_be_lost() -> None:
    async def play() -> None:
        brokers = Brokers()
        assert await brokers.client.position("g", "t", 0) == 12
        brokers.dialled[0].is_lost = True
        assert await brokers.client.position("g", "t", 0) == 12
        assert [node.asked for node in brokers.dialled] == [[Api.OFFSET_FETCH]] * 2

    asyncio.run(play())


def test_another_group_of_a_lost_coordinator_gets_a_new_connection() -> None:
    async def play() -> None:
        brokers = Brokers()
        assert await brokers.client.position("g", "t", 0) == 12
        brokers.dialled[0].is_lost = True
        Node.coordinators["other"] = 2
        assert await brokers.client.position("other", "t", 0) == 12
        assert len(brokers.dialled) == 2

    asyncio.run(play())


def test_groups_of_all_brokers_are_listed() -> None:
    async def play() -> None:
        brokers = Brokers()
        assert [(group.name, group.positions) for group in await brokers.client.groups()] == [
            ("first", {0: 11}),
            ("g", {0: 12}),
        ]
        assert [group.name for group in await brokers.client.groups("g")] == ["g"]
        assert await brokers.client.groups("missing") == []
        assert {node.number for node in brokers.dialled} == {1, 2}
        brokers.dialled[0].failure = Unavailable(ErrorCode.UNREACHABLE, "gone")
        with pytest.raises(Unavailable):
            await brokers.client.groups()

    asyncio.run(play())


def test_the_list_of_brokers_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        brokers = Brokers()
        await brokers.cluster.ask_all(Api.LIST_GROUPS)
        Node.size = 3
        assert len(await brokers.cluster.ask_all(Api.LIST_GROUPS)) == 2
        loop = asyncio.get_running_loop()
        now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now + BROKERS_AGE_S + 1)
        assert len(await brokers.cluster.ask_all(Api.LIST_GROUPS)) == 3

    asyncio.run(play())
