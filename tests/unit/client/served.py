"""A broker on its own thread behind real sockets, for tests of clients: in memory, or over a data directory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from polywire import Client
from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.clock import Clock, SystemClock
from polywire.log.settings import LogSettings
from polywire.protocols.polywire.factory import PolywireFactory
from polywire.server.config import Address
from polywire.server.connection import Connection
from polywire.server.hub import Hub
from polywire.server.listener import Listener, close_listeners, open_listeners
from polywire.testing.memory_broker import MemoryBroker

T = TypeVar("T")
Scenario = Callable[[Client], Awaitable[None]]
"""The steps that a test runs with a client."""
Play = Callable[[Scenario], None]


class Served:
    """Listen on a free port while the context is entered."""

    def __init__(
        self,
        settings: BrokerSettings | None = None,
        *,
        data_dir: Path | None = None,
        log_settings: LogSettings | None = None,
    ) -> None:
        self._settings = settings
        self._data_dir = data_dir
        self._log_settings = log_settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> list[Connection]:
        """Return open connections; call it on the server's thread only."""
        return [peer for peer in self._hub.connections if isinstance(peer, Connection)]

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def run(self, function: Callable[[], T]) -> T:
        """Call a function on the server's thread."""

        async def called() -> T:
            return function()

        return self.call(called())

    def drop_connections(self) -> None:
        """Close every connection, as if the broker had been killed, but keep its log."""

        async def drop() -> None:
            for connection in list(self._hub.connections):
                connection.abort("dropped by a test")
            await self._emptied()

        self.call(drop())

    def stop_listening(self) -> None:
        self.run(lambda: close_listeners(self._listeners))

    def listen_again(self) -> None:
        self.call(self._listen(self.port))

    async def _open(self) -> None:
        loop, clock = asyncio.get_running_loop(), SystemClock()
        if self._data_dir is None:
            self.memory = MemoryBroker(self._settings, loop=loop, clock=clock)
            self.broker = self.memory.broker
        else:
            self.broker = self._opened(self._data_dir, loop, clock)
        self._hub = Hub(self.broker)
        await self._listen(0)

    def _opened(self, data_dir: Path, loop: asyncio.AbstractEventLoop, clock: Clock) -> Broker:
        settings = self._settings or BrokerSettings()
        return Broker.open(data_dir, settings, loop, clock, log_settings=self._log_settings)

    async def _listen(self, port: int) -> None:
        factories = [PolywireFactory(self.broker)]
        self._listeners: list[Listener] = await open_listeners(
            self._hub, {"polywire": Address("127.0.0.1", port)}, factories
        )
        self.port = self._listeners[0].address.port

    async def _close(self) -> None:
        close_listeners(self._listeners)
        for connection in list(self._hub.connections):
            connection.abort("the test is over")
        await self._emptied()
        self.broker.close()

    async def _emptied(self) -> None:
        for _ in range(1000):
            if not self._hub.connections:
                return
            await asyncio.sleep(0)
        raise AssertionError("connections did not go away")
