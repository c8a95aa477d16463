"""``kill -9`` of one of several processes during a transaction over all of them: all or nothing.

A client of Kafka, and one of Cursus, count from transaction to transaction: transaction n writes n to a topic of each
process and commits n as a group's offset in one of them. Each process is killed at each step; after every kill the
client resumes from what the brokers report.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from polywire.client.polywire import PolywireClient
from polywire.protocols.cursus.transactions import producer_of
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess
from tests.crash.cursus_peer import Gone, Peer
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


CURSUS_STEPS = ("second", "offsets", "ending", "ended")


class CursusCounter:
    """A Cursus client that counts. After an error or a lost connection, it begins a new epoch."""

    def __init__(self, broker: BrokerProcess, topics: list[str]) -> None:
        self._broker = broker
        self._topics = topics
        self._member = ""
        self.done = 0

    def count(self, step: Callable[[str], None]) -> None:
        """Commit the next number, in as many attempts as that takes. Call ``step`` after each step."""
        goal, end = self.done + 1, time.monotonic() + WAIT_S
        while self.done < goal:
            assert time.monotonic() < end, "no transaction was committed"
            try:
                with Peer(self._broker) as peer:
                    self._attempt(peer, step)
            except (AssertionError, Gone, OSError):
                time.sleep(0.05)

    def _attempt(self, peer: Peer, step: Callable[[str], None]) -> None:
        epoch = peer.sure("INIT_PRODUCER_ID transactional_id=counter").rpartition("=")[2]
        who = f"transactional_id=counter producerId={producer_of('counter')} epoch={epoch}"
        group = f"topic={self._topics[0]} group=counters"
        stored = peer.ask(f"FETCH_OFFSET {group} partition=0")
        if not stored.startswith("OK"):
            assert "offset_not_found" in stored or "group" in stored, stored
        found = re.search(r"offset=(\d+)", stored)
        self.done = max(self.done, int(found[1]) if found else 0)
        number = self.done + 1
        if self._member:
            peer.ask(f"LEAVE_GROUP {group} {self._member}")
        joined = peer.sure(f"JOIN_GROUP {group} member=counter")
        member = self._member = " ".join(word for word in joined.split() if word.startswith(("member=", "generation=")))
        peer.sure(f"SYNC_GROUP {group} {member}")
        peer.sure(f"BEGIN_TXN {who}")
        step("begun")
        for topic, name in zip(self._topics, ("first", "second", "third"), strict=True):
            peer.sure(f"TXN_PUBLISH {who} topic={topic} seqNum=1 message={number}")
            step(name)
        peer.sure(f"SEND_OFFSETS_TO_TXN {who} {group} {member} P0:{number}")
        step("offsets")
        peer.send(f"END_TXN {who}")
        step("ending")
        answer = peer.read().decode()
        assert answer == f"OK transactional_id=counter state=committed messages={len(self._topics)} offsets=1", answer
        self.done = number
        step("ended")


def test_each_process_is_killed_at_each_step_of_a_cursus_transaction(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with BrokerProcess(data_dir, "--processes", str(PROCESSES), wires=["cursus", "polywire"]) as broker:
        topics = asyncio.run(_make_topics(broker))
        kills = [(step, shard) for step in CURSUS_STEPS for shard in range(PROCESSES)]
        counter = CursusCounter(broker, topics)
        counter.count(nothing)
        for victim in kills:
            killed: list[str] = []

            def step(name: str, victim: tuple[str, int] = victim, killed: list[str] = killed) -> None:
                if not killed and name == victim[0]:
                    killed.append(name)
                    _kill_at(data_dir, victim, name)

            counter.count(step)
            assert killed
        counter.count(nothing)
        stored = asyncio.run(_stored(broker, topics))
        assert stored[0] == list(range(1, counter.done + 1)), "each once, none missing"
        assert stored == [stored[0]] * TOPICS
        assert counter.done >= len(kills)
        assert broker.stop() == 0, broker.log_text()
