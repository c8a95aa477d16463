"""A closed connection is freed at once: nothing of it waits for garbage collection, which would block the loop."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shutil import which
from types import FrameType

import pytest

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.clock import SystemClock
from polywire.server import lifecycle
from polywire.server.config import TLS_SUFFIX, Address, ServeConfig
from polywire.server.hub import Hub
from polywire.server.listener import close_listeners, open_listeners
from polywire.server.tls import server_tls
from polywire.server.wires import factories_of
from tests.certificates import Certificates
from tests.hostile.exchanges import STREAMS

CONVERSATIONS = 12
WIRES = tuple(wire for wire in STREAMS if wire != "http")  # whose libraries leave what only a collection frees
ANSWERS_S = 0.02
RESET = struct.pack("ii", 1, 0)


class Served:
    """A broker in this process, with a listener for every protocol."""

    def __init__(self, hub: Hub, ports: dict[str, int], trusted: ssl.SSLContext | None) -> None:
        self.hub = hub
        self._ports = ports
        self._trusted = trusted

    async def converse(self, wire: str, seed: int) -> None:
        """Send something and disconnect: with a FIN, with a RST, or without reading the responses."""
        chance = random.Random(f"{wire} {seed}")
        data = STREAMS[wire](chance)
        if chance.random() < 0.3:
            data = data[: chance.randrange(len(data))]
        await asyncio.to_thread(self._say, wire, data, chance.choice(("read", "unread", "reset")))
        while self.hub.connections:  # noqa: ASYNC110 - looking is the point
            await asyncio.sleep(0.001)

    def _connected(self, wire: str) -> socket.socket:
        peer = socket.create_connection(("127.0.0.1", self._ports[wire]))
        return peer if self._trusted is None else self._trusted.wrap_socket(peer, server_hostname="localhost")

    def _say(self, wire: str, data: bytes, ending: str) -> None:
        with suppress(OSError), self._connected(wire) as peer:
            peer.sendall(data)
            peer.settimeout(ANSWERS_S)
            if ending == "reset":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            while ending == "read" and peer.recv(1 << 16):
                """Read until the broker closes the connection, or pauses."""


@asynccontextmanager
async def served(directory: Path, certificates: Certificates | None = None) -> AsyncIterator[Served]:
    """Start a broker; with certificates it uses TLS."""
    config, suffix, trusted = ServeConfig(data_dir=directory / "data"), "", None
    if certificates is not None:
        key = Path(certificates.path("server", "key"))
        config = replace(config, tls_certificate=Path(certificates.path("server")), tls_key=key)
        suffix, trusted = TLS_SUFFIX, certificates.context()
    broker = Broker.open(directory / "data", BrokerSettings(), asyncio.get_running_loop(), SystemClock())
    hub = Hub(broker)
    addresses = {wire + suffix: Address("127.0.0.1", 0) for wire in WIRES}
    factories = factories_of(broker, config)
    listeners = await open_listeners(hub, addresses, factories, tls=server_tls(config))
    try:
        ports = {listener.name.removesuffix(suffix): listener.address.port for listener in listeners}
        yield Served(hub, ports, trusted)
    finally:
        close_listeners(listeners)
        broker.close()


@contextmanager
def left_to_the_collector() -> Iterator[Counter[str]]:
    """Return our objects that only a garbage collection would free."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(filter(None, map(spelled, gc.garbage)))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def spelled(thing: object) -> str:
    """Return the name of one of our objects, empty for anything else."""
    if isinstance(thing, FrameType):
        return thing.f_code.co_qualname if "/polywire/" in thing.f_code.co_filename else ""
    kind = type(thing)
    return kind.__qualname__ if kind.__module__.startswith("polywire.") else ""


async def left_of(broker: Served, wire: str) -> Counter[str]:
    """Return what is garbage after some conversations."""
    await broker.converse(wire, -1)  # one-time objects do not count
    with left_to_the_collector() as found:
        for seed in range(CONVERSATIONS):
            await broker.converse(wire, seed)
    return found


@pytest.mark.parametrize("wire", WIRES)
def test_nothing_of_a_closed_connection_is_garbage(tmp_path: Path, wire: str) -> None:
    async def life() -> Counter[str]:
        async with served(tmp_path) as broker:
            return await left_of(broker, wire)

    with asyncio.Runner(loop_factory=lifecycle._new_loop()) as runner:
        assert runner.run(life()) == Counter()


@pytest.mark.skipif(which("openssl") is None, reason="TLS was NOT tried: no openssl to make a certificate with")
def test_nothing_of_a_closed_tls_connection_is_garbage(tmp_path: Path) -> None:
    async def life() -> Counter[str]:
        async with served(tmp_path, Certificates(tmp_path)) as broker:
            return await left_of(broker, "flux")

    with asyncio.Runner(loop_factory=lifecycle._new_loop()) as runner:
        assert runner.run(life()) == Counter()
