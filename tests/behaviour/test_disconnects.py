"""A peer that floods, stalls, breaks off or sends noise harms nobody else."""

from __future__ import annotations

import asyncio
import os

from polywire.records.columns import Record
from tests.behaviour.conftest import WireClients


async def test_breaking_off_in_mid_request(clients: WireClients, topic: str) -> None:
    host, port = clients.broker.addresses[clients.wire.name]
    for _ in range(20):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"V1|1|PRODUCE|half a request without its end")
        await writer.drain()
        writer.close()
    await _still_serves(clients, topic)


async def test_noise(clients: WireClients, topic: str) -> None:
    host, port = clients.broker.addresses[clients.wire.name]
    for size in (1, 7, 64, 1_000, 200_000):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(os.urandom(size))
        try:
            await writer.drain()
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 10)
        except OSError:
            pass  # the broker closed on us: allowed
        writer.close()
    await _still_serves(clients, topic)


async def test_a_peer_that_never_reads(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    value = b"x" * 50_000
    partition = (await client.produce(topic, [Record(value=value, key=b"k")] * 40))[0].partition
    host, port = clients.broker.addresses[clients.wire.name]
    _, stalled = await asyncio.open_connection(host, port)
    request = f"V1|1|CONSUME|{topic} {partition} 0\n".encode()
    try:
        async with asyncio.timeout(2):
            for _ in range(500):
                stalled.write(request)
                await stalled.drain()
    except (TimeoutError, ConnectionError):
        pass  # back-pressure stopped us, or the broker hung up: both protect it
    await _still_serves(clients, f"{topic}-after")
    stalled.transport.abort()


async def _still_serves(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    async with asyncio.timeout(5):
        produced = await client.produce(topic, [Record(value=b"alive", key=b"k")])
        found = await client.fetch(topic, produced[0].partition, 0)
    assert [record.value for record in found] == [b"alive"]
