"""``polywire.Producer``: batches, limits, delivery reports, lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import polywire
from polywire import Client, Producer, Record
from polywire.client.base import Produced
from polywire.client.lane import Delivery
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Invalid, Missing, Unavailable
from polywire.records.columns import BATCH_BYTES_MAX
from tests.unit.client.served import Play, Served


async def values_of(client: Client, topic: str) -> dict[int, list[bytes | None]]:
    """Return all values of a topic, by partition."""
    found: dict[int, list[bytes | None]] = {}
    for bounds in await client.bounds(topic):
        records: list[Record] = []
        while bounds.first_offset + len(records) < bounds.next_offset:
            records += await client.fetch(topic, bounds.partition, bounds.first_offset + len(records))
        found[bounds.partition] = [record.value for record in records]
    return found


def test_a_receipt_has_the_partition_and_offset(play: Play) -> None:
    async def scenario(client: Client) -> None:
        async with client.producer() as producer:
            receipts = [await producer.send("t", f"v{n}", partition=1, headers={"n": n}) for n in range(3)]
            assert not receipts[0].done
            assert [await receipt for receipt in receipts] == [Produced(1, n) for n in range(3)]
        assert [(r.text, r.headers) for r in await client.fetch("t", 1, 0)] == [(f"v{n}", {"n": n}) for n in range(3)]

    play(scenario)


def test_a_record_that_was_not_sent_in_time_is_not_stored(play: Play) -> None:
    async def scenario(client: Client) -> None:
        deliveries: list[Delivery] = []
        async with client.producer(linger_ms=100_000, on_delivery=deliveries.append) as producer:
            first = await producer.send("t", "a", partition=0)
            late = [
                await producer.send("t", f"late {n}", partition=0, headers={"n": n}, timeout_s=0.05) for n in (1, 2)
            ]
            kept = await producer.send("t", "b", partition=0, headers={"n": 3}, timeout_s=100)
            many = await producer.send_many("t", ["c", "d"], partition=0)
            alone = await producer.send("t", "late 3", partition=1, timeout_s=0.05)
            for receipt in (late[0], alone):
                with pytest.raises(Unavailable, match="was not sent and will not be stored"):
                    await receipt
                assert receipt.done
            with pytest.raises(Unavailable, match="not acknowledged in time"):
                await producer.flush()
            with pytest.raises(Unavailable, match="was not sent and will not be stored"):
                await late[1]
            assert [await first, await kept] == [Produced(0, 0), Produced(0, 1)]
            assert [(part.base_offset, part.record_count) for part in await many] == [(2, 2)]
        assert [record.text for record in await client.fetch("t", 0, 0)] == ["a", "b", "c", "d"]
        assert (await client.fetch("t", 0, 1))[0].headers == {"n": 3}
        assert await client.fetch("t", 1, 0) == []
        assert [delivery.record_count for delivery in deliveries] == [4]

    play(scenario)


def test_a_record_that_was_sent_and_not_acknowledged_in_time_may_be_stored(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, answers = PolywireClient.append_batch, asyncio.Event()

    async def slow(wire: PolywireClient, *args: Any, **options: Any) -> int:
        offset = await original(wire, *args, **options)
        await answers.wait()
        return offset

    async def scenario(client: Client) -> None:
        async with client.producer(linger_ms=0) as producer:
            await producer.send_and_wait("t", "a", partition=0)
            monkeypatch.setattr(PolywireClient, "append_batch", slow)
            with pytest.raises(Unavailable, match="may be stored"):
                await producer.send_and_wait("t", "b", partition=0, timeout_s=0.3)
            answers.set()
            assert await producer.send_and_wait("t", "c", partition=0, timeout_s=100) == Produced(0, 2)
        assert [record.text for record in await client.fetch("t", 0, 0)] == ["a", "b", "c"]
        with pytest.raises(Invalid, match="above 0"):
            await client.send("t", "d", timeout_s=0)

    play(scenario)


def test_a_record_has_a_time_limit_without_a_broker(served: Served) -> None:
    async def scenario() -> None:
        async with polywire.connect(served.address) as client:
            await client.send("t", "a", partition=0)
            await asyncio.to_thread(served.stop_listening)
            await asyncio.to_thread(served.drop_connections)
            with pytest.raises(Unavailable, match="in time"):  # the batch could not be sent again
                await client.send("t", "b", partition=0, timeout_s=0.3)
            with pytest.raises(Unavailable, match="was not sent"):  # a topic whose partitions are unknown
                await client.send("u", "c", timeout_s=0.3)
            async with client.producer(buffer_bytes=1_000, batch_bytes=1_000) as producer:
                with pytest.raises(Unavailable, match="was not sent"):
                    await producer.send("t", "d", timeout_s=0.3)
            await asyncio.to_thread(served.listen_again)
            assert (await client.send("t", "e", partition=0)).offset >= 1

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_single_record_does_not_linger(play: Play) -> None:
    async def scenario(client: Client) -> None:
        async with client.producer(linger_ms=100_000) as producer:
            assert await producer.send_and_wait("t", "v", partition=2) == Produced(2, 0)
        assert await client.send("t", "w", partition=2) == Produced(2, 1)

    play(scenario)


def test_a_lingering_record_is_sent_after_linger_ms(play: Play) -> None:
    async def scenario(client: Client) -> None:
        async with client.producer(linger_ms=1) as producer:
            assert (await (await producer.send("t", "v"))).offset == 0

    play(scenario)


def test_keys_map_to_the_same_partition_as_with_other_clients(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 7)
        keys = [b"", *(b"%d" % n for n in range(50))]
        plain = await (await client._link.wire()).produce("t", [polywire_record(key) for key in keys])
        async with client.producer() as producer:
            receipts = [await producer.send("t", b"v", key=key) for key in keys]
            many = await producer.send_many("t", [b"w"] * len(keys), keys=keys)
            assert [(await receipt).partition for receipt in receipts] == [place.partition for place in plain]
            ranges = await many
            assert sum(one.record_count for one in ranges) == len(keys)
        found = await values_of(client, "t")
        assert {number: values.count(b"w") for number, values in found.items()} == {
            number: values.count(b"v") for number, values in found.items()
        }

    def polywire_record(key: bytes) -> Any:
        from polywire.records.columns import Record as StoredRecord

        return StoredRecord(b"p", key)

    play(scenario)


def test_many_records_keep_their_order(play: Play) -> None:
    async def scenario(client: Client) -> None:
        values: list[Any] = [b"%d" % n for n in range(1000)]
        values[7] = Record("7", key="k", headers={"a": 1})
        async with client.producer(batch_bytes=4096, buffer_bytes=16384) as producer:
            ranges = await (await producer.send_many("t", values, partition=0))
            assert [one.base_offset for one in ranges] == sorted(one.base_offset for one in ranges)
            assert sum(one.record_count for one in ranges) == 1000
        assert (await values_of(client, "t"))[0] == [b"%d" % n for n in range(1000)]
        [record] = await client.fetch("t", 0, 7, records_max=1)
        assert (record.key, record.headers) == (b"k", {"a": 1})

    play(scenario)


def test_records_without_keys_use_all_partitions(play: Play) -> None:
    async def scenario(client: Client) -> None:
        async with client.producer(batch_bytes=1000, buffer_bytes=100_000) as producer:
            for _ in range(100):
                await producer.send("t", bytes(100))
        assert all(len(values) > 10 for values in (await values_of(client, "t")).values())

    play(scenario)


def test_memory_is_bounded(play: Play) -> None:
    async def scenario(client: Client) -> None:
        highest = 0
        async with client.producer(linger_ms=100_000, batch_bytes=10_000, buffer_bytes=50_000) as producer:
            for _ in range(500):
                await producer.send("t", bytes(1000))
                highest = max(highest, producer.buffered_bytes)
            await producer.flush()
            assert producer.buffered_bytes == 0
        assert 10_000 <= highest <= 50_000

    play(scenario)


def test_deliveries_are_reported(play: Play) -> None:
    async def scenario(client: Client) -> None:
        reports: list[Delivery] = []
        async with client.producer(on_delivery=reports.append) as producer:
            await producer.send_many("t", ["a", "b"], partition=0)
            await producer.flush()
            await producer.send("t", "c", partition=9)
            with pytest.raises(Missing):
                await producer.flush()
        assert [(one.partition, one.base_offset, one.record_count) for one in reports] == [(0, 0, 2), (9, -1, 1)]
        assert isinstance(reports[1].error, BrokerError)

    play(scenario)


def test_an_awaited_delivery_error_is_not_raised_again(play: Play) -> None:
    """Leaving the ``async with`` raises only delivery errors that the application has not awaited."""

    async def scenario(client: Client) -> None:
        async with client.producer(linger_ms=100_000) as producer:
            sends = [producer.send_and_wait("t", "v", partition=9) for _ in range(2)]
            assert [type(error) for error in await asyncio.gather(*sends, return_exceptions=True)] == [Missing] * 2
            one = await producer.send("t", "v", partition=9)
            many = await producer.send_many("t", ["v"] * 3, partition=9)
            late = await producer.send("t", "v", partition=8, timeout_s=0.001)
            with suppress(BrokerError):
                await producer.send_and_wait("t", "v", partition=9)  # sends the others, too
            for receipt in (one, one, many, many, late, late):
                with pytest.raises(BrokerError):
                    await receipt
        producer = client.producer()
        await producer.send("t", "v", partition=9)
        with pytest.raises(Missing):
            await producer.send_and_wait("t", "v", partition=9)
        with pytest.raises(Missing):
            await producer.close()

    play(scenario)


def test_a_record_that_is_late_and_then_fails_is_reported_once(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    append = PolywireClient.append_batch

    async def append_later(*arguments: Any, **options: Any) -> int:
        await asyncio.sleep(0.1)
        return await append(*arguments, **options)

    monkeypatch.setattr(PolywireClient, "append_batch", append_later)

    async def scenario(client: Client) -> None:
        async with client.producer() as producer:
            late = await producer.send("t", "v", partition=9, timeout_s=0.05)
            with pytest.raises(Unavailable, match="not acknowledged in time"):
                await late
            await producer.flush()

    play(scenario)


def test_an_awaited_delivery_error_does_not_hide_another(play: Play) -> None:
    async def scenario(client: Client) -> None:
        async with client.producer() as producer:
            for first, second in ((8, 9), (9, 8)):
                await producer.send("t", "v", partition=first)
                with pytest.raises(Missing):
                    await producer.send_and_wait("t", "v", partition=second)
                with pytest.raises(Missing, match=f"partition={first}"):
                    await producer.flush()
                await producer.flush()

    play(scenario)


def test_a_refused_record_leaves_no_gap(play: Play) -> None:
    """A record too large fails; later records, sent before its response arrived, are stored in order."""

    async def scenario(client: Client) -> None:
        producer = client.producer(batch_bytes=100, buffer_bytes=100 << 20)
        before = [await producer.send("t", f"a{n}" * 30, partition=0) for n in range(3)]
        bad = await producer.send("t", bytes(BATCH_BYTES_MAX), partition=0)
        behind = [await producer.send("t", f"b{n}" * 30, partition=0) for n in range(3)]
        with pytest.raises(Invalid):
            await bad
        assert [(await receipt).offset for receipt in before + behind] == list(range(6))
        await producer.close()

    play(scenario)


@pytest.mark.parametrize("kind", ["one", "many"])
def test_a_lost_connection_stores_nothing_twice(served: Served, play: Play, kind: str) -> None:
    async def sent(producer: Producer, values: list[bytes]) -> None:
        if kind == "many":
            await producer.send_many("t", values, partition=0)
            return
        for value in values:
            await producer.send("t", value, partition=0)

    async def scenario(client: Client) -> None:
        loop = asyncio.get_running_loop()
        async with client.producer(batch_bytes=2_000, buffer_bytes=20_000) as producer:
            for n in range(0, 3000, 10):
                await sent(producer, [b"%05d" % number for number in range(n, n + 10)])
                if n % 500 == 250:
                    await loop.run_in_executor(None, served.drop_connections)
        assert (await values_of(client, "t"))[0] == [b"%05d" % n for n in range(3000)]

    play(scenario)


def test_records_fail_in_the_end(served: Served) -> None:
    async def scenario() -> None:
        client = await polywire.connect(served.address, reconnect_s=0.2)
        producer = client.producer(reconnect_s=0.2)
        await producer.send_and_wait("t", "v")
        served.stop_listening()
        served.drop_connections()
        await producer.send("t", "w")
        with pytest.raises(Unavailable):
            await client.topics()
        with pytest.raises(Unavailable):
            await producer.close()
        with pytest.raises(Unavailable, match="closed"):
            await producer.send("t", "x")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda p: p.send("t", 5), "a value must be str, bytes or None got=int"),
        (lambda p: p.send("t", "v", key=5), "a key must be str, bytes or None got=int"),
        (lambda p: p.send("t", Record("v"), key="k"), "key, headers, timestamp and times must be set in the Record"),
        (lambda p: p.send(5, "v"), "topic must be a str got=int"),
        (lambda p: p.send("t", "v", partition="1"), "partition must be an int of 0 or more got='1'"),
        (lambda p: p.send("t", "v", partition=-1), "partition must be an int of 0 or more got=-1"),
        (lambda p: p.send_many("t", "abc"), "values must be a list with one for each record got=str"),
        (lambda p: p.send_many("t", ["a", 5]), "a value must be str, bytes or None got=int"),
        (
            lambda p: p.send_many("t", ["a", "b"], keys=["k"]),
            "keys and values must have the same length values=2 keys=1",
        ),
    ],
)
def test_errors_name_the_wrong_argument(play: Play, call: Callable[[Any], Awaitable[Any]], expected: str) -> None:
    async def scenario(client: Client) -> None:
        async with client.producer() as producer:
            with pytest.raises(Invalid) as caught:
                await call(producer)
            assert caught.value.message == expected

    play(scenario)


@pytest.mark.parametrize("options", [{"linger_ms": -1}, {"batch_bytes": 0}, {"batch_bytes": 10, "buffer_bytes": 9}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="linger_ms must be 0 or more"):
        polywire.Producer("127.0.0.1:1", **options)


def test_missing_topics_are_not_created_by_default(play: Play) -> None:
    async def scenario(client: Client) -> None:
        async with client.producer(create=False) as producer:
            with pytest.raises(Missing):
                await producer.send("t", "v")
        assert await client.topics() == []

    play(scenario)
