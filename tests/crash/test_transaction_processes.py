"""``kill -9`` of one of several processes during a transaction over all of them: all or nothing.

A client counts from transaction to transaction: transaction n writes n to a topic of each process and commits n as a
group's offset in one of them. Each process is killed at each step; after every kill the client resumes from what the
brokers report.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from polywire.client.polywire import PolywireClient
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess
from tests.crash.kafka_transactor import STEPS, Counting, Transactor, nothing
from tests.crash.test_processes import has_another, pid_of

PROCESSES, TOPICS = 2, 3
WAIT_S = 60.0

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="several processes share addresses on Linux only")


async def _make_topics(broker: BrokerProcess) -> list[str]:
    names = [f"topic-{number}" for number in range(TOPICS)]
    async with await PolywireClient.open(*broker.addresses["polywire"]) as client:
        for name in names:
            await client.create_topic(name, 1)
    return names


async def _stored(broker: BrokerProcess, topics: list[str]) -> list[list[int]]:
    found = []
    async with await PolywireClient.open(*broker.addresses["polywire"]) as client:
        for topic in topics:
            records: list[Record] = []
            while some := await client.fetch(topic, 0, len(records)):
                records += some
            found.append([int(record.value or b"-1") for record in records])
    return found


def _kill_at(data_dir: Path, victim: tuple[str, int], step: str) -> None:
    """Kill a process at this step, and wait until it is replaced."""
    killed_at, shard = victim
    if step != killed_at:
        return
    pid = pid_of(data_dir, shard)
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + WAIT_S
    while not has_another(data_dir, shard, pid):
        assert time.monotonic() < end, "not restarted"
        time.sleep(0.01)


@pytest.mark.parametrize("dialect", [1, 2])
def test_each_process_is_killed_at_each_step(tmp_path: Path, dialect: int) -> None:
    data_dir = tmp_path / "data"
    with BrokerProcess(data_dir, "--processes", str(PROCESSES), wires=["kafka", "polywire"]) as broker:
        topics = asyncio.run(_make_topics(broker))
        kills = [(step, shard) for step in STEPS for shard in range(PROCESSES)]
        with closing(Transactor(broker.addresses["kafka"], "counter", dialect)) as transactor:
            counting = Counting(transactor, topics)
            counting.one(nothing)
            for victim in kills:
                counting.one(partial(_kill_at, data_dir, victim))
            counting.one(nothing)
        stored = asyncio.run(_stored(broker, topics))
        assert stored[0] == list(range(1, counting.done + 1)), "each once, none missing"
        assert stored == [stored[0]] * TOPICS
        assert counting.done > len(kills)
        assert broker.stop() == 0, broker.log_text()
