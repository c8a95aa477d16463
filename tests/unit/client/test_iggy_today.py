"""The client of Iggy's current dialect over real sockets: logins, records, groups, invalid responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

import polywire
from polywire.broker.permissions import parse_grants
from polywire.broker.users import User
from polywire.client import iggy_today
from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.iggy_today import IggyTodayClient
from polywire.errors import BrokerError, Busy, Denied, ErrorCode, Invalid, Missing, Unavailable
from polywire.protocols.iggy import vsr
from polywire.protocols.iggy.context import IggySettings
from polywire.protocols.iggy.factory import IggyFactory
from polywire.records.columns import Header, HeaderKind, Record
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Assignor, Level
from tests.unit.client.peers import answering, serving

DIALECTS = ("auto", "vsr-0.12", "vsr-0.12.2")  # of servers: of any protocol, of 0.12.0 and 0.12.1, of 0.12.2 only


@asynccontextmanager
async def served(count: int = 0, dialect: str = "auto") -> AsyncIterator[tuple[MemoryBroker, str, list[WireClient]]]:
    """Serve a broker in memory; return it, its address, and clients of it."""
    async with serving("iggy", partial(IggyFactory, settings=IggySettings(dialect=dialect))) as reached:
        clients = [await connect(f"iggy://iggy:iggy@{reached.place}") for _ in range(count)]
        try:
            yield reached.memory, reached.place, clients
        finally:
            for client in clients:
                await client.close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_written_records_are_read_back(dialect: str) -> None:
    async def run() -> None:
        async with served(1, dialect) as (_, _, [client]):
            assert isinstance(client, IggyTodayClient)
            headers = (Header(b"n", bytes(8), value_kind=HeaderKind.INT64), Header(b"s", b"x"))
            records = [Record(b"value-%d" % number, b"key", headers) for number in range(5)]
            places = await client.produce("shop.orders", records)
            assert [place.offset for place in places] == [0, 1, 2, 3, 4]
            [partition] = {place.partition for place in places}
            found = await client.fetch("shop.orders", partition, 1, records_max=3)
            assert [(record.offset, record.value, record.headers) for record in found] == [
                (number, b"value-%d" % number, headers) for number in (1, 2, 3)
            ]
            [kept] = [info for info in await client.topics() if info.name == "shop.orders"]
            assert kept.partition_count == 3
            assert await client.extent("shop.orders", partition) == (0, 5)
            assert await client.offset_at("shop.orders", partition, 0) == 0
            assert (await client.produce("shop.orders", [Record(b"x")], partition=2))[0].partition == 2
            await client.delete_topic("shop.orders")
            with pytest.raises(Missing):
                await client.fetch("shop.orders", 0, 0)

    asyncio.run(run())


def test_records_that_iggy_cannot_encode_are_refused() -> None:
    async def run() -> None:
        async with served(1) as (_, _, [client]):
            for record in (Record(None), Record(b""), Record(b"x", origin_time_us=1), Record(b"x", b"k" * 256)):
                with pytest.raises(Invalid):
                    await client.produce("t", [record])
            with pytest.raises(Invalid):
                await client.produce("t", [Record(b"x")], level=Level.SYNCED)
            with pytest.raises(Invalid):
                await client.join("g", "t", "m", assignor=Assignor.RANGE)
            with pytest.raises(Invalid):
                await client.commit("g", "t", 0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_members_share_partitions_and_offsets_persist(dialect: str) -> None:
    async def run() -> None:
        async with served(2, dialect) as (_, _, [first, second]):
            await first.create_topic("t", 4)
            alone = await first.join("workers", "t", "a")
            assert alone.partitions == (0, 1, 2, 3)
            other = await second.join("workers", "t", "b")
            shared = await first.heartbeat("workers", "t", "a", alone.generation)
            assert sorted(shared.partitions + other.partitions) == [0, 1, 2, 3]
            assert shared.generation > alone.generation
            await first.produce("t", [Record(b"x"), Record(b"y")], partition=shared.partitions[0])
            assert await first.position("workers", "t", shared.partitions[0]) is None
            await first.commit("workers", "t", shared.partitions[0], 2, member="a", generation=shared.generation)
            assert await second.position("workers", "t", shared.partitions[0]) == 2
            assert await second.position("unknown", "t", 0) is None
            await first.leave("workers", "t", "a", shared.generation)
            with pytest.raises(Missing):
                await first.heartbeat("workers", "t", "a", shared.generation)
            left = await second.heartbeat("workers", "t", "b", other.generation)
            assert left.partitions == (0, 1, 2, 3)

    asyncio.run(run())


def test_recreated_partitions_are_looked_up_again() -> None:
    """The client requests the history of a partition once, and again after the partition was re-created."""

    async def run() -> None:
        async with served(1, "vsr-0.12.2") as (_, _, [client]):
            await client.create_topic("t", 1)
            assert (await client.produce("t", [Record(b"x"), Record(b"y")], partition=0))[1].offset == 1
            await client.delete_topic("t")
            await client.create_topic("t", 1)
            assert (await client.produce("t", [Record(b"z")], partition=0))[0].offset == 0
            assert [record.value for record in await client.fetch("t", 0, 0)] == [b"z"]
            with pytest.raises(Missing):
                await client.produce("t", [Record(b"z")], partition=7)

    asyncio.run(run())


def test_an_idle_connection_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with served(1) as (_, _, [client]):
            assert isinstance(client, IggyTodayClient)
            asked: list[object] = []
            connection = client._connection
            real = connection.ask

            async def ask(code: object, body: bytes = b"") -> bytes:
                asked.append(code)
                return await real(code, body)  # type: ignore[arg-type]  # a code it is

            monkeypatch.setattr(connection, "ask", ask)
            while len(asked) < 3:  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0)

    monkeypatch.setattr(iggy_today, "PING_S", 0.001)
    asyncio.run(run())


async def refusal(answer: bytes, secret: str = "secret") -> tuple[int, BrokerError]:
    """Return how often a server was asked to log in that responds with this, and the error that is raised."""
    async with answering(answer) as visited:
        with pytest.raises(BrokerError) as raised:
            await polywire.connect(f"iggy://me:{secret}@{visited.place}", connect_s=0)
    return visited.count, raised.value


@pytest.mark.parametrize(
    ("answer", "kind", "code", "asked"),
    [
        (vsr.eviction(bytes(16), vsr.EVICT_CREDENTIALS), Denied, ErrorCode.LOGIN_FAILED, 1),
        (vsr.eviction(bytes(16), vsr.EVICT_BUSY), Busy, ErrorCode.BUSY, 1),
        (vsr.eviction(bytes(16), vsr.EVICT_VERSION), Invalid, ErrorCode.INVALID_REQUEST, 1),
        (vsr.eviction(bytes(16), 99), Unavailable, ErrorCode.STOPPING, 1),
        (bytes(256), Unavailable, ErrorCode.UNREACHABLE, 1),
        (bytes(48) + b"\x00\x01\x00\x00" + bytes(204), Invalid, ErrorCode.INVALID_REQUEST, 1),
    ],
)
def test_responses_to_a_login(answer: bytes, kind: type[BrokerError], code: ErrorCode, asked: int) -> None:
    count, error = asyncio.run(refusal(answer))
    assert (count, type(error), error.code) == (asked, kind, code)
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("secret", "asked"),
    [("a" * 64, 2), ("QUJD" * 16 + "QUI%3D", 2), ("a" * 39, 1), ("correct horse battery staple, and one more", 1)],
)
def test_only_a_possible_token_is_tried_as_a_token(secret: str, asked: int) -> None:
    """Servers count failures, and lock out addresses with too many."""
    count, error = asyncio.run(refusal(vsr.eviction(bytes(16), vsr.EVICT_CREDENTIALS), secret))
    assert (count, error.code) == (asked, ErrorCode.LOGIN_FAILED)


def test_the_high_level_producer_and_consumer() -> None:
    async def run() -> None:
        async with served() as (_, place, _), polywire.connect(f"iggy://iggy:iggy@{place}") as client:
            async with client.producer() as producer:
                await producer.send_many("t", [b"%d" % number for number in range(100)])
            values: set[bytes | None] = set()
            async with client.consumer("t", group="g") as consumer:
                while len(values) < 100:
                    values |= {record.value for record in await consumer.batch(timeout_s=30)}
            async with client.consumer("t", group="g") as consumer:
                await client.send("t", b"last")
                assert [record.value for record in await consumer.batch(timeout_s=30)] == [b"last"]

    asyncio.run(run())


def test_users_and_their_tokens() -> None:
    async def run() -> None:
        async with served(1) as (memory, place, [anybody]):
            await anybody.create_topic("shop.t", 1)
            made: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            grants = parse_grants(["produce@shop", "read_topics@shop"])
            memory.broker.access.create_user("shop", "pass", grants, done=made.set_result)
            user = await made
            assert isinstance(user, User)
            token = memory.broker.access.create_token(user, "ci", None)
            long = "b" * 64  # it looks like a token but is a password
            memory.broker.access.create_user("long", long, grants, done=lambda _: None)
            for name, secret in (("shop", "pass"), ("shop", token), ("long", long)):
                client = await polywire.connect(f"iggy://{name}:{secret}@{place}")
                await client.send("shop.t", b"x")
                with pytest.raises(Denied) as refused:
                    await client.send("other", b"x")
                assert refused.value.code is ErrorCode.DENIED
                await client.close()
            with pytest.raises(Denied) as refused:
                await polywire.connect(f"iggy://shop:wrong@{place}")
            assert refused.value.code is ErrorCode.LOGIN_FAILED

    asyncio.run(run())
