"""A bucket of two shards and two machines with a process for each: every shard has one leader, through kills and stops.

Any machine serves every topic, and producers stay with one machine, whichever machine leads.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from polywire.client.polywire import PolywireClient
from polywire.cluster.nodes import interval_s
from polywire.errors import Unavailable
from polywire.server.placement import directory_of, shard_by_hash
from polywire.store.url import open_bucket
from polywire.types import NODE_TIMEOUT_S
from tests import fork_server
from tests.broker_process import BrokerProcess, child_environment
from tests.crash.test_processes import WAIT_S, Producer, go_on, opened, until
from tests.crash.test_standby import _cluster
from tests.s3_server import BUCKET, s3_server

SHARDS: Final = 2
WIRES: Final = ("flux", "kafka", "polywire", "cursus")
TOPICS: Final = {
    shard: [name for name in map("topic-{}".format, range(12)) if shard_by_hash(name, SHARDS) == shard][:2]
    for shard in range(SHARDS)
}

NOTICED_S: Final = (
    interval_s(NODE_TIMEOUT_S) + 1.0
)  # a shard with a new leader may be reported as of the last refresh (decision 0125)

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="several processes share addresses on Linux only")


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return buckets of every available kind."""
    if request.param == "file":
        yield url_of(tmp_path)
        return
    with s3_server(tmp_path / "s3") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/log"


def machine(tmp_path: Path, node: str, *options: str, url: str = "", data_dir: str = "") -> BrokerProcess:
    bucket = "--bucket", url or url_of(tmp_path)
    return BrokerProcess(tmp_path / (data_dir or node), *bucket, "--node", node, *options, wires=WIRES)


def url_of(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'bucket'}"


def leaders(url: str) -> list[str | None]:
    rows = json.loads(_cluster("shards", url, "-o", "json"))
    return [row["leader"] for row in rows]


def leader_pid(tmp_path: Path, node: str, shard: int) -> int:
    """Return the process of a machine that leads a shard."""
    return int((directory_of(tmp_path / node, shard) / "LOCK").read_text().split()[0])


def children(broker: BrokerProcess) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text().split()]


def counts(broker: BrokerProcess, words: str, shard: int) -> int:
    """Return how often one process of a machine has logged a message."""
    return sum(words in line and f"shard=000{shard}" in line for line in broker.log_text().splitlines())


async def produced(
    brokers: Sequence[BrokerProcess], work: Callable[[list[Producer]], Awaitable[None]]
) -> list[Producer]:
    """Produce to two topics of every shard through every machine during some work; then check everything."""
    names = [name for names in TOPICS.values() for name in names]
    producers = [
        Producer(brokers[number // len(WIRES) % len(brokers)], name, WIRES[number % len(WIRES)])
        for number, name in enumerate(names)
    ]
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    try:
        await go_on(producers, len(producers))
        await work(producers)
        await go_on(producers, len(producers))
    finally:
        for producer in producers:
            producer.is_running = False
        await asyncio.gather(*tasks)
    await check_all(brokers, producers)
    return producers


async def check_all(brokers: Sequence[BrokerProcess], producers: Sequence[Producer]) -> None:
    await asyncio.sleep(NOTICED_S)
    for broker in brokers:
        for producer in producers:
            await check(broker, producer)


async def check(broker: BrokerProcess, producer: Producer) -> None:
    """Through any machine: acknowledged records are at their offsets, once and in order."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            found = await all_of(broker, producer.topic)
            break
        except Unavailable:  # a shard may still be moving back to its machine, which closes connections
            if time.monotonic() > end:
                raise
    assert producer.acknowledged.items() <= found.items()
    for partition in {place[0] for place in found.values()}:
        placed = sorted((place, number) for number, place in producer.acknowledged.items() if place[0] == partition)
        numbers = [number for _, number in placed]
        assert numbers == sorted(numbers), "unacknowledged records may arrive late"


async def all_of(broker: BrokerProcess, topic: str) -> dict[int, tuple[int, int]]:
    """Return where each number of a topic is."""
    found: dict[int, tuple[int, int]] = {}
    async with await opened(broker) as client:
        for bounds in await client.bounds(topic):
            for number, offset in await numbers_of(client, topic, bounds.partition, bounds.next_offset):
                assert number not in found, "nothing is duplicated"
                found[number] = bounds.partition, offset
    return found


async def numbers_of(client: PolywireClient, topic: str, partition: int, next_offset: int) -> list[tuple[int, int]]:
    """Return what a producer wrote to one partition, with offsets."""
    found: list[tuple[int, int]] = []
    while not found or found[-1][1] + 1 < next_offset:
        page = await client.fetch(topic, partition, found[-1][1] + 1 if found else 0)
        found += [(int(record.value or b""), record.offset) for record in page]
        if not page:
            break
    return found


def test_machines_lead_one_shard_each_and_serve_all(tmp_path: Path) -> None:
    """The second machine is handed its shard, and returns it on request; the other shard does not move."""
    url = url_of(tmp_path)
    _cluster("init", url, "--shards", str(SHARDS))
    with machine(tmp_path, "one", "--balance-s", "1") as one:
        assert leaders(url) == ["one-0000", "one-0001"]
        with machine(tmp_path, "two", "--balance-s", "1") as two:

            async def work(producers: list[Producer]) -> None:
                await until(lambda: leaders(url) == ["one-0000", "two-0001"], "nothing was handed over")
                await go_on(producers, len(producers))
                words = "takeover", url, "--shard", "1", "--node", "one"
                assert "one-0001 is now the leader" in await asyncio.to_thread(_cluster, *words)

            asyncio.run(produced([one, two], work))
            doctor = [sys.executable, "-m", "polywire", "doctor", "--bucket", url, "-o", "json"]
            rows = json.loads(fork_server.run(doctor, env=child_environment()).stdout)
            assert {"shards/0000/journal", "shards/0001/journal", "nodes/two-0001"} <= {row["path"] for row in rows}
            assert "another number of shards" in _cluster("init", url, "--shards", "3", code=1)
            assert "shard number is required" in _cluster("takeover", url, code=1)
            assert counts(one, "leading the shard", 0) == 1, "the other shard did not move"
            assert counts(two, "leading the shard", 0) == 0
            assert two.stop() == 0, two.log_text()
        assert leaders(url) == ["one-0000", "one-0001"]
        assert one.stop() == 0, one.log_text()
    assert open_bucket(url).list("nodes/") == [], "a stopping leader announces it"


def test_a_machine_is_drained(tmp_path: Path, url: str) -> None:
    """It hands over its shards and forwards; it leads again when undrained, or when no other machine is left."""
    options = "--processes", str(SHARDS), "--balance-s", "0"
    with machine(tmp_path, "one", *options, url=url) as one, machine(tmp_path, "two", *options, url=url) as two:

        async def work(producers: list[Producer]) -> None:
            output = await asyncio.to_thread(_cluster, "drain", url, "one")
            assert all(f"two-000{shard} is now the leader of shard 000{shard}" in output for shard in range(SHARDS))
            assert "one leads no shard and forwards connections" in output
            await go_on(producers, len(producers))
            words = "takeover", url, "--shard", "0", "--node", "one"
            assert "or is drained" in await asyncio.to_thread(_cluster, *words, code=1)
            assert leaders(url) == ["two-0000", "two-0001"]

        asyncio.run(produced([one, two], work))
        rows = json.loads(_cluster("status", url, "-o", "json"))
        assert {row["node"]: row["drained"] for row in rows} == {
            f"{name}-000{shard}": name == "one" for name in ("one", "two") for shard in range(SHARDS)
        }
        left = _cluster("drain", url, "two", "--timeout-s", "1", code=3)
        assert "there is no other broker" in left
        assert "two still leads shards: 0000, 0001" in left
        assert two.stop() == 0, two.log_text()
        asyncio.run(until(lambda: leaders(url) == ["one-0000", "one-0001"], "a shard needs a leader"))
        assert "one can lead again" in _cluster("drain", url, "one", "--undo")
        assert "no such node" in _cluster("drain", url, "three", code=1)
        _cluster("drain", url, "one", "--no-wait")
        one.kill()
        one.start()
        assert not any(row["drained"] for row in json.loads(_cluster("status", url, "-o", "json"))), "it is another run"
        assert one.stop() == 0, one.log_text()
    assert open_bucket(url).list("nodes/") == []


def test_processes_and_machines_are_killed(tmp_path: Path, url: str) -> None:
    with (
        machine(tmp_path, "one", "--processes", str(SHARDS), "--balance-s", "1", url=url) as one,
        machine(tmp_path, "two", "--balance-s", "1", url=url) as two,
    ):

        async def work(producers: list[Producer]) -> None:
            await until(lambda: leaders(url) == ["one-0000", "two-0001"], "nothing was handed over")
            os.kill(leader_pid(tmp_path, "one", 0), signal.SIGKILL)
            await go_on(producers, len(producers))
            for pid in children(two):  # the machine is gone
                os.kill(pid, signal.SIGKILL)
            two.kill()
            here = [producer for producer in producers if producer._broker is one]
            await go_on(here, len(here))
            await asyncio.to_thread(two.start)
            await go_on(producers, len(producers))
            one.kill()  # its processes hand over and end
            here = [producer for producer in producers if producer._broker is two]
            await go_on(here, len(here))
            await asyncio.to_thread(one.start)

        asyncio.run(produced([one, two], work))
        assert one.stop() == 0, one.log_text()
        assert two.stop() == 0, two.log_text()


def test_a_process_that_was_suspended_becomes_a_standby(tmp_path: Path, url: str) -> None:
    with (
        machine(tmp_path, "one", "--processes", str(SHARDS), "--balance-s", "0", url=url) as one,
        machine(tmp_path, "two", "--balance-s", "0", url=url) as two,
    ):

        async def work(producers: list[Producer]) -> None:
            asleep = leader_pid(tmp_path, "one", 1)
            os.kill(asleep, signal.SIGSTOP)
            await until(lambda: counts(two, "leading the shard", 1) == 1, "no takeover")
            os.kill(asleep, signal.SIGCONT)
            await until(lambda: counts(one, "standby: forwarding connections", 1) == 1, "it does not know")
            await go_on(producers, len(producers))
            os.kill(one.pid, signal.SIGHUP)  # makes all processes reload, leaders or not
            await asyncio.sleep(1.5)
            assert "a process has ended" not in one.log_text()

        asyncio.run(produced([one, two], work))
        assert leaders(url) == ["one-0000", "two-0001"]
        assert one.stop() == 0, one.log_text()
        assert two.stop() == 0, two.log_text()


def test_a_single_machine_restarts_its_processes(tmp_path: Path) -> None:
    with machine(tmp_path, "one", "--processes", str(SHARDS)) as one:

        async def work(producers: list[Producer]) -> None:
            for shard in range(SHARDS):
                victim = leader_pid(tmp_path, "one", shard)
                os.kill(victim, signal.SIGKILL)
                await go_on([one for one in producers if one.topic not in TOPICS[shard]], len(TOPICS[1 - shard]))
                await go_on(producers, len(producers))
                assert leader_pid(tmp_path, "one", shard) != victim

        producers = asyncio.run(produced([one], work))
        one.kill()
        one.start()
        asyncio.run(check_all([one], producers))
        assert one.stop() == 0, one.log_text()


@pytest.mark.parametrize(
    ("shards", "options", "reason"),
    [
        (1, ("--processes", "2"), r"has 1 shard \(use --processes 1, or remove"),
        (2, ("--processes", "1"), r"has 2 shards \(use --processes 2, or remove"),
        (2, ("--processes", "3"), r"has 2 shards \(use --processes 2, or remove"),
    ],
)
def test_another_number_of_processes_is_refused(
    tmp_path: Path, shards: int, options: tuple[str, ...], reason: str
) -> None:
    _cluster("init", url_of(tmp_path), "--shards", str(shards))
    with pytest.raises(AssertionError, match=reason):
        machine(tmp_path, "one", *options).start()


def test_two_machines_of_the_same_name_are_refused(tmp_path: Path) -> None:
    with machine(tmp_path, "one", "--processes", str(SHARDS)) as one:
        with pytest.raises(AssertionError, match="another machine with this name"):
            machine(tmp_path, "one", data_dir="other").start()
        assert leaders(url_of(tmp_path)) == ["one-0000", "one-0001"]
        one.kill()
        one.start()
        assert one.stop() == 0, one.log_text()
