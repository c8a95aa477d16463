"""A client that floods, stalls, disconnects or sends noise affects no other client."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Final

from polywire.records.columns import Record
from tests.behaviour.conftest import WireClients
from tests.behaviour.wires import Wire

STALL_SECONDS: Final = 2.0
GROWTH_BYTES_MAX: Final = 64 * 1024 * 1024  # of the broker's own memory by a client that reads nothing


async def test_disconnecting_within_a_request(clients: WireClients, topic: str) -> None:
    host, port = clients.broker.addresses[clients.wire.name]
    request = clients.wire.opening + clients.wire.fetch(1, topic, 0)
    for size in range(1, len(request)):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(request[:size])
        await writer.drain()
        writer.close()
    await _still_serves(clients, topic)


async def test_noise(clients: WireClients, topic: str) -> None:
    host, port = clients.broker.addresses[clients.wire.name]
    for opening in (b"", clients.wire.opening):
        for size in (1, 7, 64, 1_000, 200_000):
            await _send_noise(host, port, opening + os.urandom(size))
    await _still_serves(clients, topic)


async def _send_noise(host: str, port: int, noise: bytes) -> None:
    """Send random bytes; the broker may respond and close the connection, but must finish."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(noise)
        with suppress(OSError):  # disconnected already: the broker was faster
            writer.write_eof()
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 120)
    finally:
        writer.close()


async def test_a_client_that_never_reads(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    partition = (await client.produce(topic, [Record(value=b"x" * 50_000, key=b"k")] * 40))[0].partition
    before = clients.broker.memory_bytes
    _, stalled = await asyncio.open_connection(*clients.broker.addresses[clients.wire.name])
    try:
        stalled.write(clients.wire.opening)
        with suppress(TimeoutError, ConnectionError):  # back-pressure or a closed connection: both protect the broker
            await asyncio.wait_for(_flood(stalled, clients.wire, topic, partition), STALL_SECONDS)
        await _still_serves(clients, f"{topic}-after")
        assert clients.broker.memory_bytes - before < GROWTH_BYTES_MAX
    finally:
        stalled.transport.abort()


async def _flood(stalled: asyncio.StreamWriter, wire: Wire, topic: str, partition: int) -> None:
    for number in range(1, 100_000):
        stalled.write(wire.fetch(number, topic, partition))
        await stalled.drain()


async def _still_serves(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    async with asyncio.timeout(60):
        produced = await client.produce(topic, [Record(value=b"alive", key=b"k")])
        found = await client.fetch(topic, produced[0].partition, 0)
    assert [record.value for record in found] == [b"alive"]
