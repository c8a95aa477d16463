"""Connections to the brokers that lead topics in a Kafka cluster.

A request is sent to the last known leader of its topic. If that broker is no longer the leader, the client gets new
metadata and sends the request to the new leader. A cluster of one broker needs only one connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol

from polywire.errors import BrokerError, Unavailable
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError

TRIES_MAX: Final = 3  # attempts per request: the leader can change again while it is looked up
ELSEWHERE: Final = frozenset({WireError.NOT_LEADER_OR_FOLLOWER, WireError.LEADER_NOT_AVAILABLE})


class Asking(Protocol):
    """A connection to one broker."""

    async def ask(self, api: Api, /, **fields: Any) -> Any:
        """Send one request, and return the body of its response. Raises Unavailable."""

    def fail(self, error: BrokerError) -> None:
        """Close the connection."""


class Leaders:
    """Connections to leaders: at most one per broker, in addition to the client's first connection."""

    __slots__ = ("_by_address", "_by_topic", "_dial", "_dialling", "_first")

    def __init__(self, first: Asking, dial: Callable[[str, int], Awaitable[Asking]]) -> None:
        """Create the object.

        ``first`` is the client's first connection. ``dial`` connects to another broker of the cluster.
        """
        self._first: Final = first
        self._dial: Final = dial
        self._dialling: Final = asyncio.Lock()
        self._by_address: Final[dict[tuple[str, int], Asking]] = {}
        self._by_topic: Final[dict[str, Asking]] = {}

    async def ask(self, topic: str, entries: Callable[[Any], Iterator[Any]], api: Api, /, **fields: Any) -> Any:
        """Send a request about one topic to its leader. Raises BrokerError.

        ``entries`` returns those parts of a response that have an error code.
        """
        for _ in range(TRIES_MAX - 1):
            leader = self._by_topic.get(topic, self._first)
            try:
                answer = await leader.ask(api, **fields)
            except Unavailable:
                self._forget(leader)
                raise
            if not any(entry.error in ELSEWHERE for entry in entries(answer)):
                return answer
            await self._look(topic)
        return await self._by_topic.get(topic, self._first).ask(api, **fields)

    async def _look(self, topic: str) -> None:
        self._by_topic.pop(topic, None)
        topics = [schema.request(Api.METADATA).Topics(name=topic)]
        answer = await self._first.ask(Api.METADATA, topics=topics, may_create=False)
        partitions = answer.topics[0].partitions
        leader = partitions[0].leader_id if partitions else None
        for broker in answer.brokers:
            if broker.node_id == leader:
                self._by_topic[topic] = await self._connected(broker.host, broker.port)

    async def _connected(self, host: str, port: int) -> Asking:
        async with self._dialling:
            if (host, port) not in self._by_address:
                self._by_address[host, port] = await self._dial(host, port)
            return self._by_address[host, port]

    def _forget(self, lost: Asking) -> None:
        for topic in [topic for topic, connection in self._by_topic.items() if connection is lost]:
            del self._by_topic[topic]
        for address in [address for address, connection in self._by_address.items() if connection is lost]:
            del self._by_address[address]

    def fail(self, error: BrokerError) -> None:
        """Close all connections but the first."""
        for connection in self._by_address.values():
            connection.fail(error)
