"""Several processes on one data directory, one of which, or the parent, is killed.

Every producer has its own topic; topics are spread over the processes, and clients over their connections.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess

PROCESSES = 2
TOPICS = 8
WIRES = ("cursus", "flux", "iggy", "kafka", "polywire")  # each protocol has topics in both processes
KILLS = 3
WAIT_S = 60.0

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="several processes share addresses on Linux only")


def processes(data_dir: Path, count: int = PROCESSES, *options: str) -> BrokerProcess:
    """Return a parent with that many processes."""
    return BrokerProcess(data_dir, "--processes", str(count), *options, wires=WIRES)


def pid_of(data_dir: Path, shard: int) -> int:
    """Return the process of a shard."""
    directory = data_dir / "shards" / f"{shard:04x}" if shard else data_dir
    written = (directory / "LOCK").read_text().splitlines()
    return int(written[0]) if written else 0  # the file is being rewritten


def has_another(data_dir: Path, shard: int, pid: int) -> bool:
    """Return whether the shard has a different process."""
    return pid_of(data_dir, shard) not in (0, pid)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.02)


async def opened(broker: BrokerProcess) -> PolywireClient:
    return await PolywireClient.open(*broker.addresses["polywire"])


class Producer:
    """Sends numbered values to one topic, one request at a time, and records what was acknowledged."""

    def __init__(self, broker: BrokerProcess, topic: str, wire: str) -> None:
        self._broker = broker
        self._wire = wire
        self.topic = topic
        self.next_number = 0
        self.acknowledged: dict[int, tuple[int, int]] = {}
        self.is_running = True

    async def run(self) -> None:
        while self.is_running:
            try:
                await self._run_connected()
            except (BrokerError, OSError):
                await asyncio.sleep(0.02)

    async def _run_connected(self) -> None:
        client = await connect(self._broker.url(self._wire))
        try:
            while self.is_running:
                await self._produce_once(client)
        finally:
            await client.close()

    async def _produce_once(self, client: WireClient) -> None:
        number = self.next_number
        self.next_number += 1
        places = await client.produce(self.topic, [Record(value=b"%d" % number)])
        self.acknowledged[number] = (places[0].partition, places[0].offset)


async def _kill_and_look(data_dir: Path, producers: Sequence[Producer]) -> None:
    draw = random.Random(7)
    for _ in range(KILLS):
        shard = draw.randrange(PROCESSES)
        victim = pid_of(data_dir, shard)
        os.kill(victim, signal.SIGKILL)
        await go_on(producers, TOPICS // PROCESSES)
        await until(partial(has_another, data_dir, shard, victim), "not started again")
        await go_on(producers, TOPICS)


async def go_on(producers: Sequence[Producer], count: int) -> None:
    """Wait until that many topics have accepted more records."""
    before = [len(producer.acknowledged) for producer in producers]

    def came() -> bool:
        after = [len(producer.acknowledged) for producer in producers]
        return sum(one < other for one, other in zip(before, after, strict=True)) >= count

    await until(came, f"not {count} topics go on")


async def stored(broker: BrokerProcess, topic: str) -> dict[int, list[int]]:
    """Return the offsets of each number of a topic."""
    found: dict[int, list[int]] = {}
    async with await opened(broker) as client:
        (bounds,) = await client.bounds(topic)
        if bounds.next_offset == 0:
            return found
        async for delivered in client.consume(topic):
            found.setdefault(int(delivered.value or b""), []).append(delivered.offset)
            if delivered.offset + 1 >= bounds.next_offset:
                return found
    return found


def test_a_killed_process_does_not_stop_the_others(tmp_path: Path) -> None:
    asyncio.run(_kill_one_by_one(tmp_path / "data"))


async def _kill_one_by_one(data_dir: Path) -> None:
    with processes(data_dir) as broker:
        async with await opened(broker) as client:
            for number in range(TOPICS):
                await client.create_topic(f"topic-{number}", 1)
        producers = [
            Producer(broker, f"topic-{number}", WIRES[number // PROCESSES % len(WIRES)]) for number in range(TOPICS)
        ]
        tasks = [asyncio.create_task(producer.run()) for producer in producers]
        try:
            await _kill_and_look(data_dir, producers)
        finally:
            for producer in producers:
                producer.is_running = False
            await asyncio.gather(*tasks)
        for producer in producers:
            found = await stored(broker, producer.topic)
            assert producer.acknowledged.items() <= {n: (0, at[0]) for n, at in found.items()}.items()
            assert all(len(at) == 1 for at in found.values()), "nothing is duplicated"
            order = sorted(found, key=lambda number: found[number][0])
            assert order == sorted(order)
        assert broker.stop() == 0


def test_no_process_outlives_the_parent_and_the_next_one_has_everything(tmp_path: Path) -> None:
    broker = processes(tmp_path / "data")
    with broker:
        asyncio.run(_make_topics(broker, 3))
        children = [pid_of(tmp_path / "data", shard) for shard in range(PROCESSES)]
        broker.kill()
        asyncio.run(until(lambda: not any(map(is_alive, children)), "a process outlived its parent"))
        broker.start()
        assert asyncio.run(_topics(broker)) == ["t0", "t1", "t2"]
        children = [pid_of(tmp_path / "data", shard) for shard in range(PROCESSES)]
        assert broker.stop() == 0
        assert not any(map(is_alive, children))


def test_a_directory_can_go_from_one_process_to_two_but_not_back(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=("polywire",)) as broker:
        asyncio.run(_make_topics(broker, 2))
        assert broker.stop() == 0
    with processes(tmp_path / "data") as broker:
        assert asyncio.run(_topics(broker)) == ["t0", "t1"]
        assert broker.stop() == 0
    with pytest.raises(AssertionError, match="start with --processes 2"):
        BrokerProcess(tmp_path / "data", wires=("polywire",)).start()


def test_a_process_that_cannot_start_stops_all(tmp_path: Path) -> None:
    with processes(tmp_path / "data") as broker:
        assert broker.stop() == 0
    (tmp_path / "data" / "shards" / "0001" / "journal" / "seed").write_bytes(b"not what was there")
    (tmp_path / "data" / "shards" / "0001" / "journal" / "seed.copy").write_bytes(b"neither")
    with pytest.raises(AssertionError, match="did not get ready"):
        processes(tmp_path / "data").start()


async def _make_topics(broker: BrokerProcess, count: int) -> None:
    async with await opened(broker) as client:
        for number in range(count):
            await client.create_topic(f"t{number}", 1)
            await client.produce(f"t{number}", [Record(value=b"x")])


async def _topics(broker: BrokerProcess) -> list[str]:
    """Return the names of the topics, which have a record each."""
    async with await opened(broker) as client:
        names = [topic.name for topic in await client.topics()]
        for name in names:
            assert len(await stored_values(client, name)) == 1
        return names


async def stored_values(client: PolywireClient, topic: str) -> list[bytes | None]:
    async for delivered in client.consume(topic):
        return [delivered.value]
    return []
