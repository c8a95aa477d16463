"""Connections to a Kafka cluster: the example of RFC 7677, brokers that cannot be trusted, and the leaders of topics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polywire.client.address import Login
from polywire.client.connect import connect
from polywire.client.kafka_connection import ITERATIONS_RANGE, TRIES_MAX, Leaders, ScramProof, log_in, mechanism_for
from polywire.errors import BrokerError, Denied, ErrorCode, Invalid, Unavailable
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


ADDRESSES = {1: ("one", 9092), 2: ("two", 9092)}


class Node:
    """A broker of a cluster in which broker ``leader`` leads the topic."""

    leader = 2

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: list[Api] = []
        self.failure: BrokerError | None = None

    async def ask(self, api: Api, /, **fields: Any) -> Any:
        self.asked.append(api)
        if self.failure is not None:
            raise self.failure
        await asyncio.sleep(0)
        if api is Api.METADATA:
            reported = schema.response(api)
            partitions = [reported.Topics.Partitions(index=0, leader_id=Node.leader)]
            brokers = [
                reported.Brokers(node_id=number, host=host, port=port) for number, (host, port) in ADDRESSES.items()
            ]
            return reported(brokers=brokers, topics=[reported.Topics(name="t", partitions=partitions)])
        assert api is Api.PRODUCE
        produced = schema.response(api)
        error = 0 if Node.leader == self.number else WireError.NOT_LEADER_OR_FOLLOWER
        partition = produced.Responses.Partitions(error=error, base_offset=self.number)
        return produced(responses=[produced.Responses(partitions=[partition])])

    def fail(self, error: BrokerError) -> None:
        self.failure = error


class Cluster:
    def __init__(self) -> None:
        Node.leader = 2
        self.first = Node(1)
        self.dialled: list[Node] = []
        self.leaders = Leaders(cast(Any, self.first), cast(Any, self._dial))

    async def _dial(self, host: str, port: int) -> Node:
        (number,) = [number for number, at in ADDRESSES.items() if at == (host, port)]
        self.dialled.append(Node(number))
        return self.dialled[-1]

    async def produce(self) -> int:
        """Return the id of the broker that accepted the record, or the error."""
        answer = await self.leaders.ask("t", entries, Api.PRODUCE)
        (entry,) = entries(answer)
        return -entry.error if entry.error else int(entry.base_offset)


def entries(answer: Any) -> Iterator[Any]:
    return (entry for topic in answer.responses for entry in topic.partitions)


def test_if_the_first_broker_leads_no_other_is_asked() -> None:
    cluster = Cluster()
    Node.leader = 1
    assert asyncio.run(cluster.produce()) == 1
    assert (cluster.first.asked, cluster.dialled) == ([Api.PRODUCE], [])


def test_a_leader_is_looked_up_once() -> None:
    async def play() -> None:
        cluster = Cluster()
        assert await asyncio.gather(*(cluster.produce() for _ in range(3))) == [2, 2, 2]
        assert await cluster.produce() == 2
        (other,) = cluster.dialled
        assert cluster.first.asked == [Api.PRODUCE] * 3 + [Api.METADATA] * 3
        assert other.asked == [Api.PRODUCE] * 4

    asyncio.run(play())


def test_a_moved_leader_is_found_again_and_a_missing_one_is_an_error() -> None:
    async def play() -> None:
        cluster = Cluster()
        assert await cluster.produce() == 2
        Node.leader = 1
        assert await cluster.produce() == 1
        Node.leader = 3
        before = cluster.first.asked.count(Api.METADATA)
        assert await cluster.produce() == -WireError.NOT_LEADER_OR_FOLLOWER
        assert cluster.first.asked.count(Api.METADATA) - before == TRIES_MAX - 1

    asyncio.run(play())


def test_a_lost_connection_to_a_leader_is_replaced() -> None:
    async def play() -> None:
        cluster = Cluster()
        assert await cluster.produce() == 2
        cluster.dialled[0].failure = Unavailable(ErrorCode.UNREACHABLE, "gone")
        with pytest.raises(Unavailable):
            await cluster.produce()
        assert await cluster.produce() == 2
        assert len(cluster.dialled) == 2
        cluster.leaders.fail(Unavailable(ErrorCode.STOPPING, "client was closed"))
        assert cluster.dialled[1].failure is not None
        assert cluster.first.failure is None

    asyncio.run(play())
