"""The Iggy client over real sockets: refused arguments, offsets of its own records, and invalid responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from polywire.client.iggy import IggyClient
from polywire.errors import Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.protocols.iggy.factory import IggyFactory
from polywire.records.columns import Header, HeaderKind, Record
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Assignor, KeyHash, Level
from tests.unit.client.peers import serving


@asynccontextmanager
async def served(count: int = 1) -> AsyncIterator[tuple[MemoryBroker, list[IggyClient]]]:
    """Serve a broker in memory and return clients of it."""
    async with serving("iggy", IggyFactory) as reached:
        clients = [await IggyClient.open(reached.host, reached.port) for _ in range(count)]
        try:
            yield reached.memory, clients
        finally:
            for client in clients:
                await client.close()


def test_ids_round_trip_and_are_generated() -> None:
    async def run() -> None:
        async with served() as (_, (client,)):
            await client.produce("t", [Record(b"a", b"k", id=bytes(range(16))), Record(b"b", b"k")])
            found = [record for number in range(3) for record in await client.fetch("t", number, 0)]
            assert [record.value for record in found] == [b"a", b"b"]
            assert found[0].id == bytes(range(16))
            assert found[1].id not in (None, bytes(16))

    asyncio.run(run())


def test_offsets_are_found_while_other_clients_write() -> None:
    async def run() -> None:
        async with served(4) as (_, clients):
            await clients[0].create_topic("t", 2)

            async def write(number: int) -> None:
                for turn in range(10):
                    values = [b"%d-%d-%d" % (number, turn, index) for index in range(30)]
                    places = await clients[number].produce("t", [Record(value, b"key-%d" % turn) for value in values])
                    for value, place in zip(values, places, strict=True):
                        (record,) = await clients[number].fetch("t", place.partition, place.offset, records_max=1)
                        assert record.value == value

            await asyncio.gather(*map(write, range(4)))

    asyncio.run(run())


def test_offsets_are_found_in_a_topic_with_another_key_hash() -> None:
    async def run() -> None:
        async with served() as (memory, (client,)):
            await client.create_topic("t", 5)
            topic = memory.broker.topic("t")
            memory.broker.configure_topic(topic, replace(topic.settings, key_hash=KeyHash.MURMUR3))
            places = await client.produce("t", [Record(b"v", b"key-%d" % number) for number in range(20)])
            for number, place in enumerate(places):
                home = memory.broker.partition_of_key(topic, b"key-%d" % number, KeyHash.XXH32)
                assert place.partition == home.number

    asyncio.run(run())


def test_a_stream_is_the_first_part_of_a_full_name() -> None:
    async def run() -> None:
        async with served() as (memory, (client,)):
            await client.create_topic("shop.eu.orders", 2)
            await client.create_topic("plain", 1)
            assert memory.broker.topic("shop.eu.orders").name.stream == "shop"
            assert [info.name for info in await client.topics()] == ["plain", "shop.eu.orders"]
            with pytest.raises(Conflict) as caught:
                await client.create_topic("plain", 1)
            assert caught.value.code is ErrorCode.TOPIC_EXISTS

    asyncio.run(run())


def test_records_that_iggy_cannot_encode_are_refused_before_sending() -> None:
    async def run() -> None:
        async with served() as (_, (client,)):
            await client.create_topic("t", 1)
            refused = [
                Record(b""),
                Record(None),
                Record(b"v", b"k" * 256),
                Record(b"v", headers=(Header(b"k", b""),)),
                Record(b"v", headers=(Header(b"k", None, value_kind=HeaderKind.NULL),)),
                Record(b"v", headers=(Header(b"k", b"v", key_kind=HeaderKind.RAW),)),
                Record(b"v", origin_time_us=1),
            ]
            for record in refused:
                with pytest.raises(Invalid):
                    await client.produce("t", [record])
            with pytest.raises(Invalid):
                await client.produce("t", [Record(b"v")], level=Level.SYNCED)
            with pytest.raises(Invalid):
                await client.join("g", "t", "m", assignor=Assignor.RANGE)
            assert await client.fetch("t", 0, 0) == []

    asyncio.run(run())


def test_missing_topics_and_partitions() -> None:
    async def run() -> None:
        async with served() as (_, (client,)):
            for missing in (client.fetch("none", 0, 0), client.delete_topic("none")):
                with pytest.raises(Missing) as caught:
                    await missing
                assert caught.value.code is ErrorCode.TOPIC_MISSING
            await client.create_topic("t", 1)
            with pytest.raises(Missing) as caught:
                await client.fetch("t", 1, 0)
            assert caught.value.code is ErrorCode.PARTITION_MISSING
            assert await client.position("g", "t", 0) is None
            with pytest.raises(Missing):
                await client.heartbeat("g", "t", "m", 0)

    asyncio.run(run())


def test_a_broker_with_invalid_responses() -> None:
    async def run() -> None:
        async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(8)
            writer.write(b"\xff" * 64)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        client = await IggyClient.open(*server.sockets[0].getsockname())
        with pytest.raises(Unavailable):
            await client.topics()
        with pytest.raises(Unavailable):
            await client.topics()
        server.close()
        await asyncio.sleep(0.05)  # so that the other side sees the end

    asyncio.run(run())
