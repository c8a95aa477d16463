"""How the Kafka client finds the leaders of topics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from polywire.client.kafka_connection import TRIES_MAX, Leaders
from polywire.errors import BrokerError, ErrorCode, Unavailable
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError

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
        reported = schema.response(api).Responses
        error = 0 if Node.leader == self.number else WireError.NOT_LEADER_OR_FOLLOWER
        return schema.response(api)(
            responses=[reported(partitions=[reported.Partitions(error=error, base_offset=self.number)])]
        )

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
