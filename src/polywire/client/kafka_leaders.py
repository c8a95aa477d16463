"""Which broker of a Kafka cluster leads a topic: connections to those that do, for a client that has come to one of them.

Promises: a topic is asked for where it was led last, and where Metadata says once it is not there; a client of a single broker has one
connection. Must not know: records, groups, how connections are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol

from polywire.errors import BrokerError, Unavailable
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api, WireError

TRIES_MAX: Final = 3  # of one request: a topic may move while it is looked for
ELSEWHERE: Final = frozenset({WireError.NOT_LEADER_OR_FOLLOWER, WireError.LEADER_NOT_AVAILABLE})


class Asking(Protocol):
    """A connection to one broker."""

    async def ask(self, api: Api, /, **fields: Any) -> Any:
        """Send one request; returns the body of its answer. Raises Unavailable."""

    def fail(self, error: BrokerError) -> None:
        """End it."""


class Leaders:
    """Guards: a broker has one connection at most, beside the first."""

    __slots__ = ("_by_address", "_by_topic", "_dial", "_dialling", "_first")

    def __init__(self, first: Asking, dial: Callable[[str, int], Awaitable[Asking]]) -> None:
        """first: whom the client has come to. dial: connects to another broker as it did to that one."""
        self._first: Final = first
        self._dial: Final = dial
        self._dialling: Final = asyncio.Lock()
        self._by_address: Final[dict[tuple[str, int], Asking]] = {}
        self._by_topic: Final[dict[str, Asking]] = {}

    async def ask(self, topic: str, entries: Callable[[Any], Iterator[Any]], api: Api, /, **fields: Any) -> Any:
        """Send a request about one topic to who leads it. entries: those of an answer that tell of errors. Raises BrokerError."""
        for _ in range(TRIES_MAX - 1):
            asked = self._by_topic.get(topic, self._first)
            try:
                answer = await asked.ask(api, **fields)
            except Unavailable:
                self._forget(asked)
                raise
            if not any(entry.error in ELSEWHERE for entry in entries(answer)):
                return answer
            await self._look(topic)
        return await self._by_topic.get(topic, self._first).ask(api, **fields)

    async def _look(self, topic: str) -> None:
        """Find out who leads a topic. Raises Unavailable."""
        self._by_topic.pop(topic, None)
        asked = [schema.request(Api.METADATA).Topics(name=topic)]
        answer = await self._first.ask(Api.METADATA, topics=asked, may_create=False)
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
        """A connection has ended."""
        for topic in [topic for topic, connection in self._by_topic.items() if connection is lost]:
            del self._by_topic[topic]
        for address in [address for address, connection in self._by_address.items() if connection is lost]:
            del self._by_address[address]

    def fail(self, error: BrokerError) -> None:
        """End all connections but the first."""
        for connection in self._by_address.values():
            connection.fail(error)
