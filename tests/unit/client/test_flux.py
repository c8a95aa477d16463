"""The FLUX client over real sockets: refused arguments, reads, and invalid responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from polywire.client.base import Membership, Produced
from polywire.client.flux import FluxClient
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, NotOwner, Unavailable
from polywire.protocols.flux.context import FluxSettings
from polywire.protocols.flux.factory import FluxFactory
from polywire.records.columns import Header, Record
from polywire.types import Assignor, Level
from tests.unit.client.peers import serving


@asynccontextmanager
async def served() -> AsyncIterator[FluxClient]:
    """Return a client of a broker in memory."""
    settings = FluxSettings(ack_all_timeout_ms=20)
    async with serving("flux", lambda broker: FluxFactory(broker, settings)) as reached:
        client = await FluxClient.open(reached.host, reached.port)
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def answered(*replies: bytes) -> AsyncIterator[FluxClient]:
    """Return a client of a peer that sends these responses, one per request, then closes."""
    owed = list(replies)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while owed and await reader.readline():
            writer.write(owed.pop(0))
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = await FluxClient.open(host, port)
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


def test_many_records_are_pipelined_and_acknowledged_in_order() -> None:
    async def scene() -> None:
        async with served() as client:
            places = await client.produce("t", [Record(b"v%d" % n, key=b"k%d" % n) for n in range(5_000)])
            assert len(places) == 5_000
            read = [record for partition in range(3) for record in await client.fetch("t", partition, 0)]
            assert sorted(record.value or b"" for record in read) == sorted(b"v%d" % n for n in range(5_000))
            assert [info.partition_count for info in await client.topics()] == [3]

    asyncio.run(scene())


def test_ambiguous_values_round_trip() -> None:
    values = [b"x,1:evil", b'{"a":1,"b":2}', b"", b",3:", b"5:,5:,6:", b",", b"end,7:"]

    async def scene() -> None:
        async with served() as client:
            assert (await client.produce("t", [Record(value, key=b"a") for value in values]))[0] == Produced(1, 0)
            read: list[Record] = []
            while len(read) < len(values):
                read += await client.fetch("t", 1, len(read))
            assert [record.value for record in read] == values
            assert [record.offset for record in read] == list(range(len(values)))
            assert len(await client.fetch("t", 1, 0, records_max=2)) == 2
            assert await client.fetch("t", 1, 7) == []

    asyncio.run(scene())


def test_groups() -> None:
    async def scene() -> None:
        async with served() as client:
            await client.create_topic("six", 6)
            member = await client.join("g", "six", "m", assignor=Assignor.RANGE)
            assert member == Membership(2, (0, 1, 2, 3, 4, 5))
            assert await client.heartbeat("g", "six", "m", 2) == member
            await client.commit("g", "six", 4, 17, member="m", generation=2)
            assert await client.position("g", "six", 4) == 17
            assert await client.position("g", "six", 5) == 0
            await client.leave("g", "six", "m", 2)
            with pytest.raises(Conflict) as stale:
                await client.heartbeat("g", "six", "m", 2)
            assert stale.value.code is ErrorCode.GENERATION_STALE

    asyncio.run(scene())


def test_synced_requests_replicas() -> None:
    async def scene() -> None:
        async with served() as client:
            with pytest.raises(Unavailable) as late:
                await client.produce("t", [Record(b"v", key=b"a")], level=Level.SYNCED)
            assert late.value.code is ErrorCode.REPLICATION_TIMEOUT
            assert [record.value for record in await client.fetch("t", 1, 0)] == [b"v"]

    asyncio.run(scene())


Act = Callable[[FluxClient], Awaitable[object]]
REFUSED: dict[str, Act] = {
    "white space in a value": lambda client: client.produce("t", [Record(b"two words")]),
    "white space beyond ASCII": lambda client: client.produce("t", [Record(b"a\xc2\xa0b")]),
    "a colon in a key": lambda client: client.produce("t", [Record(b"v", key=b"a:b")]),
    "a null value": lambda client: client.produce("t", [Record(None)]),
    "headers": lambda client: client.produce("t", [Record(b"v", headers=(Header(b"h", b"x"),))]),
    "a partition": lambda client: client.produce("t", [Record(b"v")], partition=0),
    "a long record": lambda client: client.produce("t", [Record(b"v" * 65_536)]),
    "a topic": lambda client: client.produce("a\nb", [Record(b"v")]),
    "a group of two words": lambda client: client.join("a b", "t", "m"),
    "deleting": lambda client: client.delete_topic("t"),
    "bounds": lambda client: client.bounds("t"),
    "times": lambda client: client.offset_at("t", 0, 0),
    "a position without a member": lambda client: client.commit("g", "t", 0, 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_records_that_flux_cannot_encode_are_refused_before_sending(name: str) -> None:
    async def scene() -> None:
        async with answered() as client:
            with pytest.raises(Invalid):
                await REFUSED[name](client)

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"V1|1|ERR|NOT_LEADER|elsewhere\n", NotOwner),
        (b"V1|1|ERR|REPLICATION_TIMEOUT|late\n", Unavailable),
        (b"V1|1|ERR|GENERATION_MISMATCH|stale\n", Conflict),
        (b"V1|1|ERR|UNKNOWN_COMMAND|what\n", Invalid),
        (b"V1|0|ERR|BAD_REQUEST|a|b\n", Invalid),
        (b"V1|2|OK|offset=0\n", Unavailable),
        (b"V1|1|OK|offset=\n", Unavailable),
        (b"V1|1|OK|position=1\n", Unavailable),
        (b"V2|1|OK|offset=0\n", Unavailable),
        (b"HTTP/1.1 200 OK\r\n", Unavailable),
        (b"V1|1|OK|off", Unavailable),
        (b"", Unavailable),
    ],
)
def test_errors_and_invalid_responses(reply: bytes, kind: type[BrokerError]) -> None:
    async def scene() -> None:
        async with answered(reply) as client:
            with pytest.raises(kind):
                await client.position("g", "t", 0)

    asyncio.run(scene())


def test_a_lost_connection_fails_current_and_later_calls() -> None:
    async def scene() -> None:
        async with answered(b"V1|1|OK|offset=1\n") as client:
            first, second = await asyncio.gather(
                client.position("g", "t", 0), client.position("g", "t", 1), return_exceptions=True
            )
            assert first == 1
            assert isinstance(second, Unavailable)
            with pytest.raises(Unavailable):
                await client.topics()

    asyncio.run(scene())
