"""The HTTP listener of a standby: liveness and readiness, with limits."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from polywire.server import standby
from polywire.server.config import Address
from polywire.server.standby import CONNECTIONS_MAX, FORWARDING, METRICS, NO_LEADER, StandbyHealth


async def ask(address: Address, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(request)
        with suppress(ConnectionError):
            return await reader.read()
        return b""
    finally:
        writer.close()


async def asked_by(health: StandbyHealth, count: int) -> None:
    """Wait until the given number of connections is open."""
    while len(health._requests) != count:  # noqa: ASYNC110 - looking is the point
        await asyncio.sleep(0.01)


def test_liveness_readiness_and_metrics() -> None:
    async def run() -> None:
        carrying = [False]
        health = StandbyHealth(lambda: carrying[0])
        address = await health.listen(Address("127.0.0.1", 0), None)
        found = await ask(address, b"GET /readyz HTTP/1.1\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 503 ")
        assert found.endswith(NO_LEADER.encode())
        carrying[0] = True
        found = await ask(address, b"GET /readyz?x HTTP/1.1\r\nHost: x\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 200 ")
        assert found.endswith(FORWARDING.encode())
        assert (await ask(address, b"HEAD /livez HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")
        found = await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 200 ")
        assert found.endswith(b'polywire_bucket_leads{shard="0000"} 0\n' + METRICS.encode().partition(b"0\n")[2] % 1)
        assert (await ask(address, b"GET /api/v1/overview HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        for wrong in (b"POST /livez HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"\x00 \xff\r\n\r\n"):
            assert (await ask(address, wrong)).startswith(b"HTTP/1.1 405 ")
        assert await ask(address, b"GET " + bytes(40_000)) == b""
        await health.stop()

    asyncio.run(run())


def test_silent_connections_have_a_limit_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        health = StandbyHealth(lambda: True)
        address = await health.listen(Address("127.0.0.1", 0), None)
        monkeypatch.setattr(standby, "REQUEST_S", 3600)
        silent = [await asyncio.open_connection(address.host, address.port) for _ in range(CONNECTIONS_MAX - 1)]
        await asked_by(health, CONNECTIONS_MAX - 1)
        monkeypatch.setattr(standby, "REQUEST_S", 0.01)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        with suppress(ConnectionError):
            assert await reader.read() == b"", "released"
        writer.close()
        assert (await ask(address, b"GET /livez HTTP/1.1\r\n\r\n")).endswith(b"alive\n")
        monkeypatch.setattr(standby, "REQUEST_S", 3600)
        silent.append(await asyncio.open_connection(address.host, address.port))
        await asked_by(health, CONNECTIONS_MAX)
        assert await ask(address, b"GET /livez HTTP/1.1\r\n\r\n") == b""
        for _, writer in silent:
            writer.close()
        await asked_by(health, 0)
        assert (await ask(address, b"GET /livez HTTP/1.1\r\n\r\n")).endswith(b"alive\n")
        await health.stop()

    asyncio.run(run())


def test_a_connection_during_stop_is_closed() -> None:
    class Ending(StandbyHealth):
        """Ends when a client has connected, before the response has begun."""

        def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            super()._connected(reader, writer)
            for task in self._requests:
                task.cancel()

    async def run() -> None:
        health = Ending(lambda: True)
        address = await health.listen(Address("127.0.0.1", 0), None)
        async with asyncio.timeout(60.0):
            assert await ask(address, b"GET /livez HTTP/1.1\r\n\r\n") == b""
        await health.stop()

    asyncio.run(run())
