"""``polywire.Client.transaction``: commits, aborts, fencing, lost responses, and the offsets of its consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import polywire
from polywire import Client, Consumer
from polywire.client.polywire import PolywireClient
from polywire.errors import Busy, Conflict, ErrorCode, Invalid, Missing, Unavailable
from tests.unit.client.served import Play, Served
from tests.unit.client.test_consumer import fill, numbers, take

PATIENT_S = 60.0


class Boom(Exception):
    pass


def member(client: Client, **options: Any) -> Consumer:
    return client.consumer("in", group="g", auto_commit=False, **options)


async def texts(client: Client, topic: str) -> list[str]:
    """Return the values of a topic's records, by partition."""
    found = []
    for part in await client.bounds(topic):
        if part.next_offset:
            found += [record.text for record in await client.fetch(topic, part.partition, part.first_offset)]
    return found


async def copy(
    client: Client,
    consumer: Consumer,
    count: int,
    *,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
    timeout_s: float = PATIENT_S,
) -> None:
    """Copy that many records from ``in`` to ``out`` in one transaction. Before the commit, do something else."""
    async with client.transaction("t", consumer=consumer, timeout_s=timeout_s) as transaction:
        for text in await take(consumer, count):
            await transaction.send("out", text, partition=0)
        if meanwhile is not None:
            await meanwhile()


async def take_over(client: Client, partitions: list[int]) -> None:
    """Join the group, and commit the offsets of the partitions that its other member loses."""
    async with member(client, member="b") as consumer:
        partitions += [partition for _, partition in consumer.positions]
        await take(consumer, 10)
        await consumer.commit()


def test_records_and_offsets_are_committed_together(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "in", 5)
        await client.create_topic("out", 2)
        async with member(client) as consumer:
            async with client.transaction("t", consumer=consumer) as transaction:
                for text in await take(consumer, 3):
                    await transaction.send("out", text, partition=1)
                    await transaction.send("log", f"read {text}", key=text, headers={"of": text})
                assert await client.position("g", "in", 0) is None
                assert await texts(client, "out") == []
            assert await client.position("g", "in", 0) == 3
            assert await texts(client, "out") == numbers(0, 3)
            assert sorted(await texts(client, "log")) == ["read 0", "read 1", "read 2"]
            await copy(client, consumer, 2)
        assert await client.position("g", "in", 0) == 5
        assert await texts(client, "out") == [*numbers(3, 5), *numbers(0, 3)]

    play(scenario)


def test_a_failed_block_aborts_and_its_records_are_returned_again(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "in", 5)
        await client.create_topic("out", 1)
        async with member(client) as consumer:
            with pytest.raises(Boom):  # noqa: PT012 - the block is what fails
                async with client.transaction("t", consumer=consumer) as transaction:
                    await transaction.send("out", "lost")
                    assert await take(consumer, 3) == numbers(0, 3)
                    raise Boom
            async with client.transaction("t", consumer=consumer) as transaction:
                await transaction.send("out", "lost, too")
                assert await take(consumer, 2) == numbers(0, 2)
                await transaction.abort()
            await copy(client, consumer, 4)
            assert await take(consumer, 1) == ["4"]
        assert await texts(client, "out") == numbers(0, 4)
        assert await client.position("g", "in", 0) == 4

    play(scenario)


async def write(client: Client, text: str, *, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
    """Write a record in a transaction. Before the commit, do something else."""
    async with client.transaction("t") as transaction:
        await transaction.send("out", text)
        if meanwhile is not None:
            await meanwhile()


def test_a_second_client_fences_the_first(served: Served) -> None:
    async def scenario() -> None:
        async with polywire.connect(served.address) as first, polywire.connect(served.address) as second:
            await first.create_topic("out", 1)
            await write(first, "a")
            with pytest.raises(Conflict, match="was not committed: another process has taken over") as caught:
                await write(first, "zombie", meanwhile=lambda: write(second, "b"))
            assert caught.value.code is ErrorCode.PRODUCER_FENCED
            with pytest.raises(Conflict, match="another process has taken over"):
                await first.transaction("t").__aenter__()
            await write(second, "c")
            assert await texts(second, "out") == ["a", "b", "c"]

    asyncio.run(scenario())


def lose(
    monkeypatch: pytest.MonkeyPatch, verb: str, times: int, *, executes: bool, hangs: bool = False
) -> Callable[[], int]:
    """Lose the responses to some requests, or the requests themselves. Return a function that counts all attempts."""
    original = getattr(PolywireClient, verb)
    attempts = 0

    async def lossy(wire: PolywireClient, *args: Any, **options: Any) -> Any:
        nonlocal attempts
        attempts += 1
        lost = attempts <= times
        if executes or not lost:
            answer = await original(wire, *args, **options)
            if not lost:
                return answer
        if hangs:
            await asyncio.sleep(PATIENT_S)
        raise Unavailable(ErrorCode.UNREACHABLE, "lost by a test")

    monkeypatch.setattr(PolywireClient, verb, lossy)
    return lambda: attempts


@pytest.mark.parametrize("executes", [True, False])
def test_a_commit_without_a_response_is_repeated_and_executed_once(
    play: Play, monkeypatch: pytest.MonkeyPatch, executes: bool
) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "in", 3)
        async with member(client) as consumer:
            attempts = lose(monkeypatch, "publish", 3, executes=executes)
            await copy(client, consumer, 2)
            await copy(client, consumer, 1)
            assert attempts() == 5
        assert await texts(client, "out") == numbers(0, 3)
        assert await client.position("g", "in", 0) == 3

    play(scenario)


@pytest.mark.parametrize("executes", [True, False])
def test_records_that_were_sent_again_without_a_response_are_stored_once(
    play: Play, monkeypatch: pytest.MonkeyPatch, executes: bool
) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("out", 2)
        attempts = lose(monkeypatch, "stage", 3, executes=executes)
        async with client.transaction("t") as transaction:
            await transaction.send_many("out", ["a", "b"], partition=0)
            await transaction.send("out", "c", partition=1)
        assert attempts() >= 5  # a lost response may also fail the other request of its connection
        assert await texts(client, "out") == ["a", "b", "c"]

    play(scenario)


@pytest.mark.parametrize("executes", [True, False])
def test_the_next_transaction_finds_out_an_unknown_outcome(
    play: Play, monkeypatch: pytest.MonkeyPatch, executes: bool
) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "in", 5)
        async with member(client) as consumer:
            lose(monkeypatch, "publish", 1, executes=executes, hangs=True)
            with pytest.raises(Unavailable, match="whether the transaction was committed is unknown"):
                await copy(client, consumer, 2, timeout_s=2.0)
            await copy(client, consumer, 3)
        written = 5 if executes else 3
        assert await texts(client, "out") == numbers(0, written)
        assert await client.position("g", "in", 0) == written

    play(scenario)


def test_a_cancelled_commit_is_found_out_by_the_next_transaction(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "in", 5)
        async with member(client) as consumer:
            attempts = lose(monkeypatch, "publish", 1, executes=True, hangs=True)
            task = asyncio.ensure_future(copy(client, consumer, 2))
            while not attempts() or await client.position("g", "in", 0) is None:  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await copy(client, consumer, 3)
        assert await texts(client, "out") == numbers(0, 5)

    play(scenario)


def test_records_that_a_crash_lost_before_the_commit_are_sent_again(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PolywireClient.publish

    async def without(wire: PolywireClient, writer: str, number: int, tokens: Any, **options: Any) -> Any:
        nonlocal original
        monkeypatch.setattr(PolywireClient, "publish", original)
        await wire.abandon(tokens[:1])
        return await original(wire, writer, number, tokens, **options)

    async def scenario(client: Client) -> None:
        await client.create_topic("out", 1)
        monkeypatch.setattr(PolywireClient, "publish", without)
        async with client.transaction("t") as transaction:
            await transaction.send_many("out", ["a", "b"], partition=0)
            await transaction.send("out", "c", key="k")
        assert await texts(client, "out") == ["a", "b", "c"]

    play(scenario)


def test_a_busy_broker_is_asked_again(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    original, left = PolywireClient.stage, 2

    async def full(wire: PolywireClient, *args: Any, **options: Any) -> int:
        nonlocal left
        left -= 1
        if left >= 0:
            raise Busy(ErrorCode.STAGE_FULL, "full", retry_after_ms=1)
        return await original(wire, *args, **options)

    async def scenario(client: Client) -> None:
        nonlocal left
        monkeypatch.setattr(PolywireClient, "stage", full)
        async with client.transaction("t") as transaction:
            await transaction.send("out", "a")
        assert await texts(client, "out") == ["a"]
        left = 1_000
        with pytest.raises(Busy, match="was not committed: full"):
            async with client.transaction("t", timeout_s=0.3) as transaction:
                await transaction.send("out", "b")
        left = 0
        async with client.transaction("t") as transaction:
            await transaction.send("out", "c")
        assert sorted(await texts(client, "out")) == ["a", "c"]

    play(scenario)


def test_a_member_that_lost_its_partitions_cannot_commit(served: Served) -> None:
    async def scenario() -> None:
        async with polywire.connect(served.address) as client, polywire.connect(served.address) as other:
            await client.create_topic("in", 2)
            for partition in range(2):
                await fill(client, "in", 10, first=10 * partition, partition=partition)
            moved: list[int] = []
            async with member(client, member="a") as consumer:
                with pytest.raises(Conflict, match="was not committed") as caught:
                    await copy(client, consumer, 20, meanwhile=lambda: take_over(other, moved))
                assert caught.value.code is ErrorCode.PARTITION_NOT_ASSIGNED
                assert await client.position("g", "in", moved[0]) == 10
                await copy(client, consumer, 10)
            assert await texts(client, "out") == numbers(10 - moved[0] * 10, 20 - moved[0] * 10)
            assert [await client.position("g", "in", number) for number in range(2)] == [10, 10]

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_what_a_transaction_does_not_accept(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("out", 1)
        with pytest.raises(Invalid, match="auto_commit=False"):
            client.transaction("t", consumer=client.consumer("in", group="g"))
        with pytest.raises(Invalid, match="must be a str"):
            client.transaction(7)  # type: ignore[arg-type]
        with pytest.raises(Invalid, match="buffer_bytes"):
            client.transaction("t", buffer_bytes=0)
        with pytest.raises(Invalid, match="has not begun"):
            await client.transaction("t").send("out", "a")
        async with client.transaction("t", buffer_bytes=1_000) as transaction:
            with pytest.raises(Invalid, match="has an open transaction"):
                await client.transaction("t").__aenter__()
            await transaction.send("out", "a")
            rejected: list[tuple[Any, Any, int | None]] = [
                ("out", b"x" * 1_000, None),
                ("out", 5, None),
                (5, "a", None),
                ("out", "a", -1),
            ]
            for topic, value, partition in rejected:
                with pytest.raises(Invalid):
                    await transaction.send(topic, value, partition=partition)
            with pytest.raises(Invalid, match="must be a list"):
                await transaction.send_many("out", "abc")
        with pytest.raises(Invalid, match="has ended"):
            await transaction.commit()
        cases: list[tuple[dict[str, Any], str, int | None, ErrorCode]] = [
            ({"create": False}, "gone", None, ErrorCode.TOPIC_MISSING),
            ({}, "out", 7, ErrorCode.PARTITION_MISSING),
        ]
        for options, topic, partition, code in cases:
            with pytest.raises(Missing, match="was not committed") as caught:  # noqa: PT012 - the block is what fails
                async with client.transaction("t", **options) as transaction:
                    await transaction.send("out", "b")
                    await transaction.send(topic, "b", partition=partition)
            assert caught.value.code is code
        assert await texts(client, "out") == ["a"]

    play(scenario)


def test_many_records_are_one_transaction(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("out", 3)
        async with client.transaction("t") as transaction:
            await transaction.send_many("out", [polywire.Record(b"x" * 10_000, key=f"k{n}") for n in range(1_000)])
        assert sum(part.next_offset for part in await client.bounds("out")) == 1_000

    play(scenario)


def test_a_lost_connection_before_the_commit_does_no_harm(served: Served) -> None:
    async def scenario() -> None:
        async with polywire.connect(served.address) as client:
            await fill(client, "in", 5)
            async with member(client) as consumer:
                await copy(client, consumer, 3, meanwhile=lambda: asyncio.to_thread(served.drop_connections))
                await asyncio.to_thread(served.drop_connections)
                await copy(client, consumer, 2)
            assert await texts(client, "out") == numbers(0, 5)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_blocking_transactions(served: Served) -> None:
    with polywire.connect_sync(served.address) as client:
        client.create_topic("in", 1)
        with client.producer() as producer:
            producer.send_many("in", ["1", "2", "3"])
        with client.consumer("in", group="g", auto_commit=False) as consumer:
            with suppress(Boom), client.transaction("t", consumer=consumer):
                assert len(consumer.batch(2)) == 2
                raise Boom
            with client.transaction("t", consumer=consumer) as transaction:
                transaction.send_many("out", [record.text for record in consumer.batch(2)], partition=0)
                transaction.send_json("out", {"n": 1}, partition=0)
        assert client.position("g", "in", 0) == 2
        assert [record.text for record in client.fetch("out", 0, 0)] == ["1", "2", '{"n":1}']
