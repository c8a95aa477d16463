"""The asynchronous client, its blocking counterpart and consuming, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from polywire.client import sync
from polywire.client.connect import connect
from polywire.client.consume import LATEST
from polywire.client.listings import lags_of, total_lag
from polywire.client.polywire import BATCH_BYTES, PolywireClient
from polywire.errors import Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.records.columns import Header, HeaderKind, Record
from polywire.types import Level
from tests.unit.client.served import Served

Scenario = Callable[[PolywireClient], Coroutine[Any, Any, None]]


@pytest.fixture
def play(served: Served) -> Callable[[Scenario], None]:
    def played(scenario: Scenario) -> None:
        async def whole() -> None:
            async with await PolywireClient.open("127.0.0.1", served.port) as client:
                await asyncio.wait_for(scenario(client), 120)

        asyncio.run(whole())

    return played


def test_groups_report_their_lag(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 3)
        for partition in range(3):
            await client.produce("t", [Record(b"v")] * 10, partition=partition)
        membership = await client.join("g", "t", "m")
        await client.commit("g", "t", 0, 4)
        await client.commit("g", "t", 1, 10)
        (group,) = await client.groups()
        assert (group.topic, group.name, group.generation) == ("t", "g", membership.generation)
        assert [(member.id, member.wire, member.partitions) for member in group.members] == [
            ("m", "polywire", (0, 1, 2))
        ]
        behind, done, unknown = await lags_of(client, group)
        assert (behind.records, done.records, done.seconds) == (6, 0, 0.0)
        assert (unknown.position, unknown.records, unknown.seconds) == (None, None, None), (
            "without a committed offset it may have started at the end"
        )
        assert behind.seconds is not None
        assert 0 <= behind.seconds < 20
        assert total_lag([behind, done, unknown]) == (6, behind.seconds)
        assert total_lag([unknown]) == (None, None)
        await client.delete_topic("t")
        assert await lags_of(client, group) == []
        assert await client.groups("other") == []

    play(scenario)


def test_records_round_trip_with_all_fields(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 2)
        records = [
            Record(
                b"v",
                b"k",
                headers=(Header(b"h", None, value_kind=HeaderKind.NULL), Header(b"i", b"x")),
                origin_time_us=5,
                id=b"i" * 16,
            ),
            Record(None, None),
            Record(b"\n\x00 ", b""),
        ]
        places = await client.produce("t", records, partition=1, level=Level.SYNCED)
        assert [(place.partition, place.offset) for place in places] == [(1, 0), (1, 1), (1, 2)]
        found = await client.fetch("t", 1, 0)
        assert [(r.value, r.key, r.headers, r.origin_time_us, r.id) for r in found] == [
            (r.value, r.key, r.headers, r.origin_time_us, r.id) for r in records
        ]
        assert [r.offset for r in await client.fetch("t", 1, 1, records_max=1)] == [1]

    play(scenario)


def test_records_sent_by_key_return_their_offsets(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 3)
        records = [Record(b"%d" % n, b"k%d" % (n % 7)) for n in range(50)]
        places = await client.produce("t", records)
        for record, place in zip(records, places, strict=True):
            [found] = await client.fetch("t", place.partition, place.offset, records_max=1)
            assert (found.value, found.key) == (record.value, record.key)
        assert len({place.partition for place in places}) == 3

    play(scenario)


def test_many_records_are_split_into_batches(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 1)
        count = 3 * BATCH_BYTES // 10_000
        places = await client.produce("t", [Record(b"x" * 10_000)] * count, partition=0)
        assert [place.offset for place in places] == list(range(count))
        assert (await client.bounds("t"))[0].next_offset == count

    play(scenario)


def test_concurrent_requests_get_their_own_responses(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 1)
        waiting = asyncio.ensure_future(client.fetch("t", 0, 0, wait_ms=5000))
        await client.ping()
        assert not waiting.done()
        await client.produce("t", [Record(b"x")], partition=0)
        assert [record.value for record in await waiting] == [b"x"]
        cancelled = asyncio.ensure_future(client.fetch("t", 0, 1, wait_ms=5000))
        await client.ping()
        cancelled.cancel()
        answers = await asyncio.gather(*[client.produce("t", [Record(b"%d" % n)], partition=0) for n in range(50)])
        assert sorted(place.offset for [place] in answers) == list(range(1, 51))

    play(scenario)


def test_a_large_response_arrives_complete(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 1)
        value = b"v" * (9 << 20)
        await client.produce("t", [Record(value)], partition=0)
        [found] = await client.fetch("t", 0, 0)
        assert found.value == value

    play(scenario)


def test_errors_are_raised_with_their_type_and_code(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 1)
        with pytest.raises(Conflict) as conflict:
            await client.create_topic("t", 1)
        assert conflict.value.code is ErrorCode.TOPIC_EXISTS
        with pytest.raises(Missing):
            await client.fetch("gone", 0, 0)
        with pytest.raises(Missing):
            await client.produce("gone", [Record(b"x")], create=False)
        with pytest.raises(Invalid):
            await client.offset_at("t", 5, 0)
        assert await client.offset_at("t", 0, 0) == 0

    play(scenario)


def test_calls_in_flight_fail_when_the_connection_is_lost(served: Served, play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 1)
        waiting = asyncio.ensure_future(client.fetch("t", 0, 0, wait_ms=5000))
        await client.ping()
        await asyncio.get_running_loop().run_in_executor(None, served.drop_connections)
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable):
            await client.ping()

    play(scenario)


def test_an_unreachable_broker_is_unavailable() -> None:
    async def scenario() -> None:
        with pytest.raises(Unavailable):
            await connect("127.0.0.1:1")
        with pytest.raises(Invalid, match="scheme"):
            await connect("ftp://127.0.0.1:1")

    asyncio.run(scenario())


def test_consuming_resumes_at_the_committed_offset(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 2)
        await client.produce("t", [Record(b"%d" % n, b"k%d" % n) for n in range(20)])
        first = await taken(client.consume("t", group="g"), 20)
        assert sorted(int(delivered.value or b"") for delivered in first) == list(range(20))
        await client.produce("t", [Record(b"next")])
        assert [delivered.value for delivered in await taken(client.consume("t", group="g"), 1)] == [b"next"]

    play(scenario)


def test_members_share_a_topic(served: Served, play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 2)
        async with await PolywireClient.open("127.0.0.1", served.port) as other:
            await client.join("g", "t", "a")
            second = await other.join("g", "t", "b")
            with pytest.raises(Conflict):
                await client.heartbeat("g", "t", "a", second.generation - 1)
            first = await client.join("g", "t", "a")
            assert sorted(first.partitions + second.partitions) == [0, 1]
            await client.commit("g", "t", first.partitions[0], 7, member="a", generation=first.generation)
            assert await other.position("g", "t", first.partitions[0]) == 7
            await client.leave("g", "t", "a", first.generation)

    play(scenario)


def test_consuming_from_the_end_returns_only_new_records(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 1)
        await client.produce("t", [Record(b"old")])
        records = client.consume("t", start=LATEST)
        arriving = asyncio.ensure_future(anext(records))
        await asyncio.sleep(0.05)
        await client.produce("t", [Record(b"new")])
        delivered = await arriving
        assert (delivered.value, delivered.offset, delivered.partition) == (b"new", 1, 0)

    play(scenario)


def test_a_group_that_consumes_from_the_end_skips_nothing(play: Callable[[Scenario], None]) -> None:
    async def scenario(client: PolywireClient) -> None:
        await client.create_topic("t", 1)
        await client.produce("t", [Record(b"old")])
        records = client.consume("t", group="g", start=LATEST)
        arriving = asyncio.ensure_future(anext(records))
        await asyncio.sleep(0.05)
        await client.produce("t", [Record(b"new")])
        assert (await arriving).value == b"new"
        while await client.position("g", "t", 0) is None:
            arriving = arriving if not arriving.done() else asyncio.ensure_future(anext(records))
            await asyncio.sleep(0.05)
        assert await client.position("g", "t", 0) in (1, 2)
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)

    play(scenario)


def test_the_blocking_client_does_the_same(served: Served) -> None:
    with sync.connect(f"polywire://{served.address}") as client:
        client.create_topic("t", 1)
        assert [topic.name for topic in client.topics()] == ["t"]
        assert client.produce("t", [Record(b"a"), Record(b"b")], partition=0)[1].offset == 1
        assert [record.value for record in client.fetch("t", 0, 0)] == [b"a", b"b"]
        assert client.bounds("t")[0].next_offset == 2
        assert client.offset_at("t", 0, 0) == 0
        records = client.consume("t", group="g")
        assert [next(records).value, next(records).value] == [b"a", b"b"]
        records.close()  # type: ignore[attr-defined]
        assert client.position("g", "t", 0) == 2
        membership = client.join("g", "t", "m")
        assert client.heartbeat("g", "t", "m", membership.generation) == membership
        client.commit("g", "t", 0, 1, member="m", generation=membership.generation)
        client.leave("g", "t", "m", membership.generation)
        client.delete_topic("t")
    client.close()


async def taken(records: AsyncIterator[Any], count: int) -> list[Any]:
    found = []
    async for delivered in records:
        found.append(delivered)
        if len(found) == count:
            break
    await records.aclose()  # type: ignore[attr-defined]
    return found
