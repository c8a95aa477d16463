"""Peers that clients connect to, in the test's own loop: a broker in memory, and a port with fixed replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from polywire.broker.broker import Broker
from polywire.clock import SystemClock
from polywire.protocols.runtime.session import SessionFactory
from polywire.server.config import Address
from polywire.server.hub import Hub
from polywire.server.listener import close_listeners, open_listeners
from polywire.testing.memory_broker import MemoryBroker


@dataclass(frozen=True, slots=True)
class Reached:
    """A broker in memory, and its address."""

    memory: MemoryBroker
    host: str
    port: int

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"


@asynccontextmanager
async def serving(wire: str, make: Callable[[Broker], SessionFactory]) -> AsyncIterator[Reached]:
    """Serve this protocol; clients must disconnect before the broker ends."""
    memory = MemoryBroker(loop=asyncio.get_running_loop(), clock=SystemClock())
    hub = Hub(memory.broker)
    listeners = await open_listeners(hub, {wire: Address("127.0.0.1", 0)}, [make(memory.broker)])
    address = listeners[0].address
    try:
        yield Reached(memory, address.host, address.port)
    finally:
        close_listeners(listeners)
        while hub.connections:  # noqa: ASYNC110 - looking is the point
            await asyncio.sleep(0)
        memory.broker.close()


class Visited:
    """A port that replies to any input with fixed bytes and closes: at once for ``b""``, never for None.

    It counts connections.
    """

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self._ended: list[asyncio.Future[None]] = []
        self.place = ""

    @property
    def count(self) -> int:
        return len(self._ended)

    def peer(self) -> asyncio.Protocol:
        self._ended.append(asyncio.get_running_loop().create_future())
        return _Peer(self._answer, self._ended[-1])

    async def all_gone(self) -> None:
        await asyncio.gather(*self._ended)


@asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[Visited]:
    """Serve such a port until every client has disconnected."""
    visited = Visited(answer)
    async with await asyncio.get_running_loop().create_server(visited.peer, "127.0.0.1", 0) as server:
        visited.place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield visited
        await visited.all_gone()


class _Peer(asyncio.Protocol):
    def __init__(self, answer: bytes | None, ended: asyncio.Future[None]) -> None:
        self._answer = answer
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._answer == b"":
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._transport.write(self._answer)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set_result(None)
