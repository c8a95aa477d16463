"""Producers and consumers over every protocol, also while the broker is killed and restarted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import polywire
from polywire import Client
from polywire.client.base import Ability, fetch_wait_ms
from polywire.errors import Invalid
from polywire.testing.process import WIRES
from polywire.testing.thread import BrokerThread

RECORDS = 300
RECORDS_OF_A_BATCH = 5000
COUNTING = ("cursus", "iggy")  # protocols whose client reports how many records a response holds


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def running(wire: str) -> Iterator[BrokerThread]:
    with BrokerThread(wires=[wire]) as started:
        yield started


async def read(client: Client, count: int, group: str | None) -> Counter[str]:
    found: Counter[str] = Counter()
    async with client.consumer("orders", group=group) as consumer:
        while len(found) < count:
            found.update(record.text for record in await consumer.batch())
    return found


async def write(client: Client, running: BrokerThread) -> None:
    """Send the records, and kill the broker three times meanwhile."""
    loop = asyncio.get_running_loop()
    async with client.producer() as producer:
        for n in range(RECORDS):
            await producer.send("orders", str(n))
            if n % 100 == 50:
                await asyncio.sleep(0)
                await loop.run_in_executor(None, running.kill)
                await loop.run_in_executor(None, running.start)


def test_a_kill_loses_nothing(running: BrokerThread, wire: str) -> None:
    """Both sides resume after a kill; only the protocol with idempotent producers promises no duplicates."""

    async def scenario() -> None:
        async with polywire.connect(running.url(wire)) as client:
            if Ability.CREATE_TOPIC in await client.abilities():
                await client.create_topic("orders", 2)
            else:
                await client.send("orders", "0")
            reading = asyncio.ensure_future(read(client, RECORDS, None))
            await write(client, running)
            found = await asyncio.wait_for(reading, 120)
        assert set(found) == {str(n) for n in range(RECORDS)}
        if wire == "polywire":
            assert set(found.values()) == {1}

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_fetched_records_are_not_fetched_again(
    running: BrokerThread, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of a large batch are delivered in parts, without fetching or decoding the batch again."""
    fetches = 0

    async def scenario() -> None:
        nonlocal fetches
        async with polywire.connect(running.url(wire)) as client, client.producer() as producer:
            await (await producer.send_many("orders", ["."] * RECORDS_OF_A_BATCH, keys=["k"] * RECORDS_OF_A_BATCH))
            opened = type(await client._link.wire())
            fetch = opened.fetch

            async def counted(*args: Any, **kept: Any) -> Any:
                nonlocal fetches
                found = await fetch(*args, **kept)
                fetches += bool(found)
                return found

            monkeypatch.setattr(opened, "fetch", counted)
            async with client.consumer("orders") as consumer:
                left = RECORDS_OF_A_BATCH
                while left:
                    left -= len(await consumer.batch())

    asyncio.run(asyncio.wait_for(scenario(), 120))
    assert fetches <= (RECORDS_OF_A_BATCH // 1000 if wire in COUNTING else 2)


def test_groups_on_protocols_that_have_them(running: BrokerThread, wire: str) -> None:
    async def scenario() -> None:
        async with polywire.connect(running.url(wire)) as client:
            abilities = await client.abilities()
            for value in ("one", "two"):  # an Iggy client cannot distinguish one consumed record from none
                await client.send("orders", value, key="k")
            if not {Ability.GROUPS, Ability.POSITIONS} & abilities:
                with pytest.raises(Invalid, match="this protocol has no consumer groups"):
                    await client.consumer("orders", group="g").start()
                return
            assert await asyncio.wait_for(read(client, 2, "g"), 120) == {"one": 1, "two": 1}
            await client.send("orders", "three", key="k")
            again = await asyncio.wait_for(read(client, 1, "g"), 120)
            assert again == {"three": 1}, "the group resumes at its offset"

    asyncio.run(scenario())


def test_a_group_that_starts_at_the_end_skips_nothing(running: BrokerThread, wire: str) -> None:
    """The end is committed at once, so the next member begins there, too. Other protocols begin at 0."""
    expected = ["after"] if wire in ("polywire", "kafka") else ["before", "after"]

    async def scenario() -> None:
        async with polywire.connect(running.url(wire)) as client:
            abilities = await client.abilities()
            await client.send("orders", "before", key="k")
            if not {Ability.GROUPS, Ability.POSITIONS} & abilities:
                return
            first = client.consumer("orders", group="g", start="latest")
            await first.start()
            await client.send("orders", "after", key="k")
            assert await anext(first)
            await first.close(commit_last=False)
            async with client.consumer("orders", group="g", start="latest") as second:
                assert [(await anext(second)).text for _ in expected] == expected

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("abilities", "partition_count", "expected"),
    [
        (set(), 1, 0),
        ({Ability.LONG_POLL, Ability.CONCURRENT_POLLS}, 50, 1000),
        ({Ability.LONG_POLL}, 1, 100),
        ({Ability.LONG_POLL}, 4, 25),
        ({Ability.LONG_POLL}, 500, 10),
    ],
)
def test_a_long_poll_is_short_if_other_requests_wait_for_it(
    abilities: set[Ability], partition_count: int, expected: int
) -> None:
    assert fetch_wait_ms(abilities, partition_count, 1000) == expected


def test_only_one_protocol_is_idempotent(running: BrokerThread, wire: str) -> None:
    async def scenario() -> None:
        async with polywire.connect(running.url(wire)) as client, client.producer(idempotent=True) as producer:
            if wire == "polywire":
                await producer.send_and_wait("orders", "one")
                return
            with pytest.raises(Invalid, match="this protocol has no idempotent producers"):
                await producer.send("orders", "one")

    asyncio.run(scenario())
