"""Histories of a work queue: a broker and its workers are killed, suspended and disconnected under load.

``python -m tests.histories.queues --count 100 --seed 7``. The seed determines the order of faults. Workers of the Python
client acknowledge, release with and without a delay, and reject jobs. The checks:

* A record whose acknowledgement was answered is not delivered again.
* The delivery counts of a record ascend, and are exact when no response was lost.
* A record is not given to a worker while another one holds its lock.
* At the end, every stored record was accepted, or is a dead letter, and not both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import polywire
from polywire import Client
from polywire.client.polywire import PolywireClient
from polywire.client.queue_calls import QueueCalls
from polywire.errors import BrokerError, Conflict
from polywire.protocols.polywire.messages import AcknowledgedRun
from polywire.share_settings import AUTO_OFFSET_RESET, DEAD_LETTERS, DELIVERIES, LOCK_DURATION
from polywire.testing.process import BrokerProcess
from polywire.types import Outcome

TOPIC: Final = "jobs"
DEAD: Final = "jobs.dead"
GROUP: Final = "workers"
PARTITIONS: Final = 3
WORKERS: Final = 6
ATTEMPTS: Final = 8
LOCK_S: Final = 3.0
SURE_S: Final = 2.0  # a lock surely lasts so long after a worker has received its records
CALM_S: Final = (0.1, 1.2)  # between two faults
RATE: Final = 300  # records per second
FINISHED_S: Final = 120.0  # for the last records
SETTINGS: Final = {
    AUTO_OFFSET_RESET: "earliest",
    DELIVERIES: str(ATTEMPTS),
    DEAD_LETTERS: DEAD,
    LOCK_DURATION: str(int(LOCK_S * 1000)),
}


@dataclass
class Record:
    """The history of one record.

    Attributes:
        attempts: delivery counts, in the order in which workers saw them.
        ended: accepted or rejected, if this was answered.
        may_have_ended: whether the response to a final acknowledgement was lost.
        holder: worker of the last delivery, while its lock surely lasts.
        until: when that is over.
        start: number of the broker's start at the last delivery.
    """

    attempts: list[int] = field(default_factory=list)
    ended: str = ""
    may_have_ended: bool = False
    holder: int = -1
    until: float = 0.0
    start: int = 0


@dataclass
class History:
    """All records, and the violations that were found."""

    records: dict[str, Record] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    deliveries: int = 0

    def delivered(self, name: str, attempt: int, worker: int, start: int) -> None:
        record, now = self.records.setdefault(name, Record()), time.monotonic()
        self.deliveries += 1
        if record.ended:
            self.wrong.append(f"delivered after it was {record.ended}: {name} attempt={attempt}")
        if record.attempts and attempt <= record.attempts[-1]:
            self.wrong.append(f"delivery count does not ascend: {name} {[*record.attempts, attempt]}")
        if attempt > ATTEMPTS:
            self.wrong.append(f"delivered too often: {name} attempt={attempt}")
        if record.holder not in (-1, worker) and now < record.until and record.start == start:
            self.wrong.append(f"worker {worker} gets {name} while worker {record.holder} holds it")
        record.attempts.append(attempt)
        record.holder, record.until, record.start = worker, now + SURE_S, start


class Run:
    """One run: a broker process, workers, a producer and faults."""

    def __init__(self, place: Path, seed: int, count: int) -> None:
        self.random = random.Random(seed)
        self.count = count
        self.history = History()
        self.broker = BrokerProcess(place / "data", wires=["polywire"])
        self.starts = 0
        self.faults: Counter[str] = Counter()
        self.is_over = False

    async def run(self) -> None:
        async with polywire.connect(self.broker.url(), reconnect_s=60) as client:
            await client.create_topic(TOPIC, PARTITIONS)
            calls = await self.calls()
            await calls.configure(GROUP, TOPIC, SETTINGS)
            await calls.close()
            async with asyncio.TaskGroup() as group:
                producer = group.create_task(self.produce())
                workers = [group.create_task(self.work(number)) for number in range(WORKERS)]
                await self.disturb()
                self.is_over = True
                await producer
                await self.settle()
                for worker in workers:
                    worker.cancel()
            await self.check(client)

    async def calls(self) -> QueueCalls:
        host, port = self.broker.addresses["polywire"]
        return QueueCalls(await PolywireClient.open(host, port))

    # Load

    async def produce(self) -> None:
        number = 0
        async with polywire.connect(self.broker.url(), reconnect_s=60) as client:
            while not self.is_over:
                name = f"job {number}"
                try:
                    await client.send(TOPIC, name, key=str(number % 7))
                    self.history.sent.add(name)
                except BrokerError:
                    await asyncio.sleep(0.05)
                number += 1
                await asyncio.sleep(1 / RATE)

    async def work(self, worker: int) -> None:
        while True:
            try:
                await self.work_for_a_while(worker)
            except BrokerError:
                await asyncio.sleep(0.05)
            for record in self.history.records.values():  # its connection has ended
                if record.holder == worker:
                    record.holder = -1

    async def work_for_a_while(self, worker: int) -> None:
        """Use one connection until it is lost, or for some requests."""
        calls = await self.calls()
        try:
            for _ in range(self.random.randint(20, 200)):
                await self.take(calls, worker)
        finally:
            await calls.close()

    async def take(self, calls: QueueCalls, worker: int) -> None:
        """Acquire some records and report an outcome for most of them."""
        start = self.starts
        found = await calls.acquire(GROUP, TOPIC, f"worker-{worker}", records_max=20, wait_ms=300)
        runs: list[AcknowledgedRun] = []
        names: list[str] = []
        for record, attempt in found.records:
            self.history.delivered(record.text, attempt, worker, start)
            outcome, delay_ms = self.choose()
            if outcome is not None:
                runs.append(AcknowledgedRun(record.partition, record.offset, record.offset, outcome, delay_ms))
                names.append(record.text)
        received_at = time.monotonic()
        if self.random.random() < 0.1:
            await asyncio.sleep(self.random.uniform(0.0, 2 * LOCK_S))
        if runs:
            await self.acknowledge(calls, worker, runs, names, received_at)

    def choose(self) -> tuple[Outcome | None, int]:
        """Return the outcome of a record, or None if the worker forgets it, and a delay."""
        choice = self.random.random()
        if choice < 0.75:
            return Outcome.ACCEPT, 0
        if choice < 0.85:
            return Outcome.RELEASE, 0
        if choice < 0.93:
            return Outcome.RELEASE, self.random.randint(1, 800)
        return (Outcome.REJECT, 0) if choice < 0.96 else (None, 0)

    async def acknowledge(
        self, calls: QueueCalls, worker: int, runs: Sequence[AcknowledgedRun], names: Sequence[str], received_at: float
    ) -> None:
        records = [self.history.records[name] for name in names]
        for record, run in zip(records, runs, strict=True):
            if record.holder == worker:  # another worker may get it as soon as the broker has the request
                record.holder = -1
            record.may_have_ended |= run.outcome != Outcome.RELEASE
        refused = await calls.acknowledge(GROUP, TOPIC, f"worker-{worker}", runs)
        in_time = time.monotonic() - received_at < SURE_S
        for index, (name, record, run) in enumerate(zip(names, records, runs, strict=True)):
            if index in refused:
                record.may_have_ended = False
                if not isinstance(refused[index], Conflict) or in_time:
                    self.history.wrong.append(f"refused inside the lock: {name} {refused[index]}")
            elif run.outcome != Outcome.RELEASE:
                record.ended = "accepted" if run.outcome == Outcome.ACCEPT else "rejected"

    # Faults

    async def disturb(self) -> None:
        for number in range(self.count):
            await asyncio.sleep(self.random.uniform(*CALM_S))
            fault = self.random.choice(("kill", "kill", "kill", "suspend", "stop"))
            self.faults[fault] += 1
            if fault == "suspend":
                os.kill(self.broker.pid, signal.SIGSTOP)
                await asyncio.sleep(self.random.uniform(0.05, 1.0))
                os.kill(self.broker.pid, signal.SIGCONT)
            else:
                self.starts += 1
                await asyncio.to_thread(self.broker.kill if fault == "kill" else self.broker.stop)
                await asyncio.to_thread(self.broker.start)
            if self.history.wrong:
                return
            if (number + 1) % 25 == 0:
                print(
                    f"faults={number + 1} sent={len(self.history.sent)} deliveries={self.history.deliveries}",
                    flush=True,
                )

    # The end

    async def left(self, calls: QueueCalls) -> int:
        """Return the number of unfinished records."""
        [queue] = [entry for entry in await calls.entries(GROUP) if entry.name == TOPIC]
        parts = queue.partitions
        return sum(part.next_offset - part.end + part.available + part.delayed + part.held for part in parts)

    async def settle(self) -> None:
        """Wait until no record is unfinished."""
        calls = await self.calls()
        left = 1
        for _ in range(int(FINISHED_S / 0.5)):
            left = await self.left(calls)
            if not left:
                break
            await asyncio.sleep(0.5)
        await calls.close()
        if left:
            self.history.wrong.append(f"{left} records are unfinished at the end")

    async def check(self, client: Client) -> None:
        """Compare what workers saw with the dead letters."""
        history, dead = self.history, Counter[str]()
        for part in await client.bounds(DEAD):
            offset = part.first_offset
            while offset < part.next_offset:
                found = await client.fetch(DEAD, part.partition, offset)
                dead.update(record.text for record in found)
                offset = found[-1].offset + 1
        for name, copies in dead.items():
            if copies > 1 or history.records[name].ended == "accepted":
                history.wrong.append(
                    f"{copies} dead letters of {name}, which was {history.records[name].ended or 'open'}"
                )
        for name in sorted(history.sent):
            record = history.records.get(name, Record())
            if name not in dead and record.ended != "accepted" and not record.may_have_ended:
                history.wrong.append(f"neither accepted nor a dead letter: {name} {record}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.histories.queues")
    parser.add_argument("--count", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with TemporaryDirectory() as place:
        run = Run(Path(place), chosen.seed, chosen.count)
        with run.broker:
            asyncio.run(run.run())
    history = run.history
    print(
        f"seed={chosen.seed} faults={dict(run.faults)} sent={len(history.sent)} deliveries={history.deliveries}"
        f" ended={sum(bool(record.ended) for record in history.records.values())} wrong={len(history.wrong)}"
    )
    for line in history.wrong[:20]:
        print("WRONG", line)
    sys.exit(bool(history.wrong))


if __name__ == "__main__":
    main()
