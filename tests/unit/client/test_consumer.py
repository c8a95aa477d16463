"""``polywire.Consumer``: start positions, groups, commits, lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import polywire
from polywire import Client, Consumer
from polywire.client import consumer as consumer_module
from polywire.client.consumer import FETCHES_MAX
from polywire.client.polywire import PolywireClient
from polywire.errors import Conflict, ErrorCode, Invalid, Missing, Unavailable
from tests.unit.client.served import Play, Served


async def fill(client: Client, topic: str, count: int, *, first: int = 0, partition: int | None = 0) -> None:
    async with client.producer() as producer:
        await producer.send_many(topic, [b"%d" % n for n in range(first, first + count)], partition=partition)


async def take(consumer: Consumer, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        found += [record.text for record in await consumer.batch(count - len(found))]
    return found


async def until(ask: Callable[[], Awaitable[Any]], expected: object) -> None:
    """Wait until the result is as expected; the scenario's own timeout ends it."""
    while await ask() != expected:  # noqa: ASYNC110 - looking is the point
        await asyncio.sleep(0.01)


async def counted(*consumers: Consumer) -> list[int]:
    return [len(consumer.positions) for consumer in consumers]


def numbers(first: int, stop: int) -> list[str]:
    return [str(n) for n in range(first, stop)]


def test_records_arrive_one_by_one_and_in_batches(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "t", 10)
        async with client.consumer("t") as consumer:
            found = []
            async for record in consumer:
                found.append(record.text)
                if len(found) == 4:
                    break
            assert found == numbers(0, 4)
            assert consumer.positions["t", 0] == 4
            assert [record.text for record in await consumer.batch(3)] == numbers(4, 7)
            async for records in consumer.batches(2):
                assert [record.text for record in records] == numbers(7, 9)
                break
            assert await take(consumer, 1) == ["9"]
            assert await consumer.batch(timeout_s=0.05) == ()
            await fill(client, "t", 1, first=10)
            assert await take(consumer, 1) == ["10"]

    play(scenario)


def test_what_another_member_has_committed_in_between_is_not_committed_again(served: Served) -> None:
    async def scenario() -> None:
        async with polywire.connect(served.address) as client, polywire.connect(served.address) as other:
            await client.create_topic("t", 2)
            for partition in range(2):
                await fill(client, "t", 10, first=10 * partition, partition=partition)
            async with client.consumer("t", group="g", member="a", auto_commit=False) as consumer:
                await take(consumer, 20)
                moved = await _commit_meanwhile(other, 4)
                with pytest.raises(Conflict, match="another member"):
                    await consumer.commit()
                assert await client.position("g", "t", moved) == 4
                assert await take(consumer, 6) == numbers(10 * moved + 4, 10 * moved + 10)
                await consumer.commit()
            assert [await client.position("g", "t", number) for number in range(2)] == [10, 10]

    asyncio.run(asyncio.wait_for(scenario(), 120))


async def _commit_meanwhile(client: Client, offset: int) -> int:
    """Let another member own a partition, commit an offset and leave, before the first one notices."""
    async with client.consumer("t", group="g", member="b", auto_commit=False) as consumer:
        [(_, partition)] = consumer.positions
        await take(consumer, offset)
        await consumer.commit()
        return partition


def test_start_positions(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "t", 5)
        [*_, last] = await client.fetch("t", 0, 0)
        await fill(client, "t", 5, first=5)

        async def begun(start: Any) -> str:
            async with client.consumer("t", start=start) as consumer:
                return (await take(consumer, 1))[0]

        assert await begun("earliest") == "0"
        assert await begun(0) == "0"
        assert int(await begun(last.time)) <= 4
        async with client.consumer("t", start="latest") as consumer:
            await fill(client, "t", 1, first=10)
            assert await take(consumer, 1) == ["10"]

    play(scenario)


@pytest.mark.parametrize(
    "start", ["first", "EARLIEST", -1, True, 1.5, None, datetime(2024, 1, 1), b"earliest"], ids=repr
)
def test_invalid_start_positions_are_refused(start: Any) -> None:
    with pytest.raises(Invalid, match='start must be "earliest", "latest", an offset') as caught:
        polywire.Consumer("127.0.0.1:1", "t", start=start)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("topics", "options"), [((), {}), ((5,), {}), (("t",), {"group": 5}), (("t",), {"commit_interval_s": 0})]
)
def test_wrong_arguments_are_refused(topics: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        polywire.Consumer("127.0.0.1:1", *topics, **options)


def test_offsets_are_committed_when_the_application_requests_more(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "t", 10)
        async with client.consumer("t", group="g") as consumer:
            assert await take(consumer, 4) == numbers(0, 4)
        assert await client.position("g", "t", 0) == 4
        # An application that crashes has not finished its last record.
        with pytest.raises(ZeroDivisionError):
            await fall_over(client)
        assert await client.position("g", "t", 0) == 6
        async with client.consumer("t", group="g") as consumer:
            assert await take(consumer, 1) == ["6"]

    async def fall_over(client: Client) -> None:
        async with client.consumer("t", group="g") as consumer:
            async for record in consumer:
                if record.text == "6":
                    raise ZeroDivisionError

    play(scenario)


def test_offsets_are_committed_periodically(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "t", 10)
        async with client.consumer("t", group="g", commit_interval_s=0.01) as consumer:
            await take(consumer, 4)
            assert await client.position("g", "t", 0) in (None, 0)
            await consumer.batch(2)
            await until(lambda: client.position("g", "t", 0), 4)

    play(scenario)


def test_offsets_are_committed_explicitly(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "t", 10)
        async with client.consumer("t", group="g", auto_commit=False) as consumer:
            records = await consumer.batch(5)
            await consumer.commit(records[1])
            assert await client.position("g", "t", 0) == 2
            await consumer.commit()
            assert await client.position("g", "t", 0) == 5
            await consumer.batch(2)
        assert await client.position("g", "t", 0) == 5
        async with client.consumer("t") as alone:
            with pytest.raises(Invalid, match="committing needs a group"):
                await alone.commit()

    play(scenario)


def test_members_share_and_take_over(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 2)
        first = client.consumer("t", group="g")
        await first.start()
        second = client.consumer("t", group="g")
        await second.start()
        await until(lambda: counted(first, second), [1, 1])
        assert {*first.positions, *second.positions} == {("t", 0), ("t", 1)}
        for partition in range(2):
            await fill(client, "t", 10, partition=partition)
        found = await take(first, 4) + await take(second, 3)
        with pytest.raises(Conflict) as caught:
            await first.commit((await second.batch(1))[0])
        assert caught.value.code is ErrorCode.PARTITION_NOT_ASSIGNED
        await second.close()
        await until(lambda: counted(first), [2])
        rest = await take(first, 20 - 4 - 4)
        assert sorted(found + rest + ["3"]) == sorted(numbers(0, 10) * 2)

    play(scenario)


def test_a_commit_fails_once_for_lost_partitions(play: Play) -> None:
    """An application that counts records once a commit succeeded counts each once, whichever members join meanwhile."""

    async def scenario(client: Client) -> None:
        await client.create_topic("t", 2)
        for partition in range(2):
            await fill(client, "t", 10, partition=partition)
        first = client.consumer("t", group="g", auto_commit=False)
        handed = {record.partition for record in [*await first.batch(5), *await first.batch(6)]}
        while len(handed) < 2:
            handed |= {record.partition for record in await first.batch(5)}
        second = client.consumer("t", group="g", auto_commit=False)
        await second.start()
        await until(lambda: counted(first, second), [1, 1])
        [(_, kept)], [(_, gone)] = first.positions, second.positions
        with pytest.raises(Conflict, match=f"topic=t partition={gone}") as caught:
            await first.commit()
        assert caught.value.code is ErrorCode.PARTITION_NOT_ASSIGNED
        assert await client.position("g", "t", kept) == first.positions["t", kept]
        assert await client.position("g", "t", gone) is None
        await first.commit()
        await first.close()
        await second.close()

    play(scenario)


@pytest.mark.parametrize("auto_commit", [False, True])
def test_members_that_close_at_the_same_time_all_leave(play: Play, *, auto_commit: bool) -> None:
    """Each leaves with a generation that the previous one ended, and must not wait until sessions expire."""

    async def scenario(client: Client) -> None:
        await client.create_topic("t", 4)
        members = [client.consumer("t", group="g", auto_commit=auto_commit) for _ in range(3)]
        for member in members:
            await member.start()
        await fill(client, "t", 10)

        async def shares() -> list[int]:
            return sorted(await counted(*members))

        await until(shares, [1, 1, 2])
        await asyncio.gather(*(member.close() for member in members))
        wire = await client._link.wire()
        assert isinstance(wire, PolywireClient)
        assert [group.members for group in await wire.groups("g")] in ([()], [])

    play(scenario)


def test_a_commit_does_not_fail_for_partitions_without_delivered_records(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 2)
        await fill(client, "t", 10, partition=0)
        first = client.consumer("t", group="g", auto_commit=False)
        await first.batch(5)
        behind = f"{first._member}-behind"  # partitions are assigned in the order of names
        second = client.consumer("t", group="g", auto_commit=False, member=behind)
        await second.start()
        await first.commit()
        assert await client.position("g", "t", 0) == 5
        assert await counted(first, second) == [1, 1]
        await first.close()
        await second.close()

    play(scenario)


def test_a_lost_connection_causes_no_duplicates(served: Served, play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "t", 2000)
        loop = asyncio.get_running_loop()
        async with client.consumer("t", group="g", commit_interval_s=0.01, buffer_bytes=100) as consumer:
            found: list[str] = []
            async for record in consumer:
                found.append(record.text)
                if len(found) % 300 == 0:
                    await loop.run_in_executor(None, served.drop_connections)
                    await consumer.commit()
                    assert await client.position("g", "t", 0) == len(found)
                if len(found) == 2000:
                    break
            assert found == numbers(0, 2000)

    play(scenario)


def test_an_older_committed_offset_does_not_move_a_consumer_back(served: Served, play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "t", 10)
        async with client.consumer("t", group="g", auto_commit=False) as consumer:
            await take(consumer, 2)
            await (await client._link.wire()).commit("g", "t", 0, 7)
            await asyncio.get_running_loop().run_in_executor(None, served.drop_connections)
            await asyncio.sleep(0.1)
            await fill(client, "t", 1, first=10)
            found = await take(consumer, 1)
            while found[-1] != "10":
                found += await take(consumer, 1)
            assert found == numbers(7, 11)

    play(scenario)


def test_seeking(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "t", 10)
        async with client.consumer("t") as consumer:
            assert await take(consumer, 5) == numbers(0, 5)
            consumer.seek("t", 0, 1)
            assert await take(consumer, 9) == numbers(1, 10)
            consumer.seek("t", 0, 8)
            assert await take(consumer, 2) == numbers(8, 10)
            with pytest.raises(Missing):
                consumer.seek("t", 3, 0)

    play(scenario)


def test_more_partitions_than_fetches(play: Play) -> None:
    async def scenario(client: Client) -> None:
        count = 3 * FETCHES_MAX
        await client.create_topic("t", count)
        async with client.producer() as producer:
            for partition in range(count):
                await producer.send("t", str(partition), partition=partition)
        async with client.consumer("t") as consumer:
            assert sorted(await take(consumer, count), key=int) == numbers(0, count)

    play(scenario)


def test_several_topics(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "a", 3)
        await fill(client, "b", 3, first=3)
        async with client.consumer("a", "b", group="g") as consumer:
            assert sorted(await take(consumer, 6)) == numbers(0, 6)
        assert [await client.position("g", topic, 0) for topic in ("a", "b")] == [3, 3]

    play(scenario)


def test_errors_are_raised(served: Served, play: Play) -> None:
    async def scenario(client: Client) -> None:
        with pytest.raises(Missing):
            await client.consumer("t").start()
        await client.create_topic("t", 1)
        consumer = client.consumer("t", start=50)
        with pytest.raises(Missing) as caught:
            await consumer.batch()
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
        gone = client.consumer("t", reconnect_s=0.2)
        await gone.start()
        served.stop_listening()
        served.drop_connections()
        with pytest.raises(Unavailable):
            await gone.batch()

    play(scenario)


def test_an_unforeseen_exception_is_raised(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unforeseen(*_: object, **__: object) -> None:
        raise ZeroDivisionError("unforeseen")

    async def scenario(client: Client) -> None:
        await fill(client, "t", 1)
        with monkeypatch.context() as patch:
            patch.setattr(PolywireClient, "position", unforeseen)
            consumer = client.consumer("t", group="g")
            for call in (consumer.start, consumer.batch, consumer.__anext__):
                with pytest.raises(Unavailable, match="the consumer stopped reason=ZeroDivisionError") as caught:
                    await asyncio.wait_for(call(), 60)
                assert isinstance(caught.value.__cause__, ZeroDivisionError)
            await consumer.close()
        with pytest.raises(Invalid, match="an argument cannot be encoded"):
            await client.consumer("t", group="\udc80").start()
        async with client.consumer("t", group="h") as other:
            assert len(await other.batch(timeout_s=60)) == 1

    play(scenario)


@pytest.mark.parametrize("start", ["earliest", "latest", 5])
def test_partitions_that_are_added_are_read_from_their_beginning(
    play: Play, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    monkeypatch.setattr(consumer_module, "PARTITIONS_S", 0.05)
    monkeypatch.setattr(consumer_module, "HEARTBEAT_S", 0.05)

    async def scenario(client: Client) -> None:
        await client.create_topic("t", 1)
        await fill(client, "t", 5)
        async with client.consumer("t", start=start) as consumer:
            await fill(client, "t", 1, first=5)
            assert await take(consumer, 1 if start != "earliest" else 6) == numbers(5 if start != "earliest" else 0, 6)
            await client.alter_topic("t", partitions=3)
            await fill(client, "t", 2, first=6, partition=2)
            assert await take(consumer, 2) == ["6", "7"]
            assert consumer.positions == {("t", 0): 6, ("t", 1): 0, ("t", 2): 2}

    play(scenario)


@pytest.mark.parametrize("auto_commit", [True, False])
def test_a_start_at_the_end_is_committed(play: Play, *, auto_commit: bool) -> None:
    """Otherwise another member would begin at the new end, after records that the first one has not committed."""

    async def scenario(client: Client) -> None:
        await client.create_topic("t", 1)
        await fill(client, "t", 3)
        first = client.consumer("t", group="g", start="latest", auto_commit=auto_commit)
        await first.start()
        assert await client.position("g", "t", 0) == 3
        await fill(client, "t", 2, first=3)
        assert await take(first, 1) == ["3"]
        await first.close(commit_last=False)
        async with client.consumer("t", group="g", start="latest") as second:
            assert await take(second, 2) == ["3", "4"]

    play(scenario)


def test_a_start_that_was_sought_is_committed(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 1)
        await fill(client, "t", 5)
        first = client.consumer("t", group="g", start="latest")
        first.seek("t", 0, 2)
        await first.start()
        await first.close()
        async with client.consumer("t", group="g", start="latest") as second:
            assert await take(second, 3) == ["2", "3", "4"]

    play(scenario)


@pytest.mark.parametrize("group", [None, "g"])
def test_seeking_continues_after_records_were_deleted(play: Play, group: str | None) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 2)
        await fill(client, "t", 5)
        async with client.consumer("t", group=group, start=9) as consumer:
            for _ in range(2):
                with pytest.raises(Missing) as caught:
                    await consumer.batch(timeout_s=60)
                assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
            consumer.seek("t", 1, 0)
            consumer.seek("t", 0, 3)
            assert await take(consumer, 2) == ["3", "4"]
            await fill(client, "t", 1, first=5, partition=1)
            assert await take(consumer, 1) == ["5"]

    play(scenario)


def test_the_other_partitions_are_read_while_one_has_failed(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 2)
        await fill(client, "t", 3, partition=0)
        await fill(client, "t", 12, partition=1)
        found: list[str] = []
        errors = 0
        async with client.consumer("t", group="g", start=9) as consumer:
            while len(found) < 3 or not errors:
                try:
                    found += [record.text for record in await consumer.batch(1)]
                except Missing:
                    errors += 1
            consumer.pause("t", 0)
            assert await consumer.batch(timeout_s=0.05) == ()
        assert found == ["9", "10", "11"]
        assert await client.position("g", "t", 1) == 12

    play(scenario)


def test_only_one_task_at_a_time_waits_for_records(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 1)
        async with client.consumer("t", group="g") as consumer:
            waiting = asyncio.ensure_future(consumer.batch())
            await asyncio.sleep(0)
            for read in (consumer.batch, consumer.__anext__):
                with pytest.raises(Invalid, match="another task or thread already waits"):
                    await read()
            await fill(client, "t", 2)
            assert len(await waiting) == 2
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(consumer.batch(), 0.01)
            assert await consumer.batch(timeout_s=0.01) == ()

    play(scenario)


def test_a_closed_consumer_stops(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 1)
        consumer = client.consumer("t")
        await consumer.start()
        waiting = asyncio.ensure_future(anext(consumer))
        await asyncio.sleep(0)
        await consumer.close()
        with pytest.raises(StopAsyncIteration):
            await waiting
        await consumer.close()

    play(scenario)


@pytest.mark.parametrize("auto_commit", [True, False])
def test_closing_without_a_broker_raises_only_if_offsets_are_uncommitted(
    served: Served, play: Play, *, auto_commit: bool
) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "t", 4)
        loop = asyncio.get_running_loop()
        committed = client.consumer("t", group="g", auto_commit=auto_commit)
        assert await take(committed, 2) == numbers(0, 2)
        await committed.commit()
        uncommitted = client.consumer("t", group="h", commit_interval_s=3600)
        assert await take(uncommitted, 2) == numbers(0, 2)
        await loop.run_in_executor(None, served.stop_listening)
        await loop.run_in_executor(None, served.drop_connections)
        await committed.close()
        with pytest.raises(Unavailable):
            await uncommitted.close()
        served.listen_again()

    play(scenario)


def test_times_need_a_zone(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await fill(client, "t", 1)
        async with client.consumer("t", start=datetime.now(UTC) + timedelta(days=1)) as consumer:
            await fill(client, "t", 1, first=1)
            assert await take(consumer, 1) == ["1"]

    play(scenario)


def test_a_position_can_be_set_before_the_start(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 2)
        await fill(client, "t", 10)
        consumer = client.consumer("t", group="g")
        consumer.seek("t", 0, 7)
        async with consumer:
            assert await take(consumer, 3) == numbers(7, 10)
            assert consumer.positions == {("t", 0): 10, ("t", 1): 0}

    play(scenario)


def test_a_paused_partition_is_not_delivered(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 2)
        await fill(client, "t", 10)
        await fill(client, "t", 3, first=100, partition=1)
        async with client.consumer("t", group="g", auto_commit=False) as consumer:
            consumer.pause("t", 0)
            assert await take(consumer, 3) == numbers(100, 103)
            assert await consumer.batch(timeout_s=0.2) == ()
            consumer.resume("t", 0)
            assert await take(consumer, 4) == numbers(0, 4)
            consumer.pause("t")
            assert consumer.paused == [("t", 0), ("t", 1)]
            assert await consumer.batch(timeout_s=0.2) == ()
            await consumer.commit()
            assert await client.position("g", "t", 0) == 4
            consumer.resume("t")
            assert await take(consumer, 6) == numbers(4, 10)
            with pytest.raises(Missing, match="topics=t"):
                consumer.pause("u")

    play(scenario)


def test_pausing_while_iterating_stops_at_once(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 1)
        await fill(client, "t", 10)
        async with client.consumer("t", group="g") as consumer:
            found = []
            async for record in consumer:
                found.append(record.text)
                if record.text == "3":
                    consumer.pause("t")
                    asyncio.get_running_loop().call_later(0.2, consumer.resume, "t")
                    paused_at = asyncio.get_running_loop().time()
                if record.text == "4":
                    assert asyncio.get_running_loop().time() - paused_at >= 0.15
                if len(found) == 10:
                    break
            assert found == numbers(0, 10)

    play(scenario)
