"""Transactions of the Python client survive kills of the client and of the broker, and fence a process that was paused."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

import polywire
from tests.broker_process import BrokerProcess, child_environment
from tests.crash.copier import FENCED, GROUP

RECORDS: Final = 20_000
KILLS: Final = 8
COMMITS_MAX: Final = 200  # before a kill, so that records are left at the last one: each transaction copies seven
PARTITIONS: Final = 3
PATIENCE_S: Final = 300.0


@contextmanager
def copier(broker: BrokerProcess) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.crash.copier", broker.url("polywire")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for found in process.stdout:
        if found.strip() == line:
            return
        assert found.strip() == "committed", found
    raise AssertionError(f"the process has ended exit={process.wait()}")


async def fill(broker: BrokerProcess, count: int) -> None:
    async with polywire.connect(broker.url("polywire")) as client:
        for topic in ("in", "out"):
            await client.create_topic(topic, PARTITIONS)
        await client.create_topic("log", 1)
        async with client.producer() as producer:
            numbers = [b"%d" % number for number in range(count)]
            await producer.send_many("in", numbers, keys=numbers)


async def copied(broker: BrokerProcess) -> int:
    async with polywire.connect(broker.url("polywire"), connect_s=PATIENCE_S) as client:
        return sum([part.next_offset for part in await client.bounds("log")])


def wait_for_all(broker: BrokerProcess) -> None:
    end = time.monotonic() + PATIENCE_S
    while asyncio.run(copied(broker)) < RECORDS:
        assert time.monotonic() < end
        time.sleep(0.1)


async def counted(client: polywire.Client, topic: str) -> Counter[bytes | None]:
    seen: Counter[bytes | None] = Counter()
    async with client.consumer(topic) as consumer:
        while seen.total() < RECORDS and (records := await consumer.batch(timeout_s=PATIENCE_S)):
            seen.update([record.value for record in records])
        assert not await consumer.batch(timeout_s=0.5), "a record was copied twice"
    return seen


async def check(broker: BrokerProcess) -> None:
    """Check that each record was copied once, in the order of its partition, and that the offsets agree."""
    async with polywire.connect(broker.url("polywire")) as client:
        for topic in ("out", "log"):
            assert len(await counted(client, topic)) == RECORDS, topic
        for part in await client.bounds("in"):
            assert await client.position(GROUP, "in", part.partition) == part.next_offset


def copy_until_killed(broker: BrokerProcess, chance: random.Random, *, kills_broker: bool) -> None:
    with copier(broker) as process:
        for _ in range(chance.randint(1, COMMITS_MAX)):
            wait_for(process, "committed")
        time.sleep(chance.random() / 100)  # into the next transaction
        if kills_broker:
            broker.kill()
            broker.start()
            wait_for(process, "committed")


@pytest.mark.slow
def test_each_record_is_copied_once_through_kills(tmp_path: Path) -> None:
    chance = random.Random(20)
    with BrokerProcess(tmp_path / "data", wires=["polywire"]) as broker:
        asyncio.run(fill(broker, RECORDS))
        for number in range(KILLS):
            copy_until_killed(broker, chance, kills_broker=number % 2 == 1)
        assert asyncio.run(copied(broker)) < RECORDS, "the kills came too late to test anything"
        with copier(broker):
            wait_for_all(broker)
        asyncio.run(check(broker))
        assert broker.stop() == 0, broker.log_text()


@pytest.mark.slow
def test_a_process_that_was_paused_is_fenced(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire"]) as broker:
        asyncio.run(fill(broker, RECORDS))
        with copier(broker) as old:
            wait_for(old, "committed")
            os.kill(old.pid, signal.SIGSTOP)
            with copier(broker) as new:
                wait_for(new, "committed")
                os.kill(old.pid, signal.SIGCONT)
                wait_for(old, FENCED)
                wait_for_all(broker)
        asyncio.run(check(broker))
        assert broker.stop() == 0, broker.log_text()
