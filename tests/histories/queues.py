"""Histories of a work queue: a broker and its workers are killed, suspended and disconnected under load.

``python -m tests.histories.queues --count 100 --seed 7``. The seed determines the order of faults. Workers of the Python
client acknowledge, release with and without a delay, and reject jobs. Some jobs are sent with a delay or a time limit.
A second group delivers records with the same key one at a time. The checks, for each group:

* A record whose acknowledgement was answered is not delivered again.
* The delivery counts of a record ascend, and are exact when no response was lost.
* A record is not given to a worker while another one holds its lock.
* A record is not given to a worker before it is due.
* In the second group, no worker gets a record while another one with its key is held, or while an earlier one is not
  finished.
* At the end, every stored record was accepted, or is a dead letter, and not both.

With ``--clocks``, the broker's clock jumps, too. Records are due by this clock, so the fourth check is omitted.
"""

from __future__ import annotations

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
from polywire.broker.groups.dead_letters import LAPSED
from polywire.client.polywire import PolywireClient
from polywire.client.queue_calls import QueueCalls
from polywire.errors import BrokerError, Conflict
from polywire.protocols.polywire.messages import AcknowledgedRun
from polywire.share_settings import AUTO_OFFSET_RESET, DEAD_LETTERS, DELIVERIES, LOCK_DURATION, ORDER
from polywire.types import Outcome
from tests.broker_process import BrokerProcess
from tests.histories.clocks import JUMP, JUMPED_S, JUMPS, SkewedClock
from tests.histories.repeat import parser_of
from tests.ledger import Command, recorded

TOPIC: Final = "jobs"
GROUP: Final = "workers"
ORDERED: Final = "ordered"
KEYS: Final = 40
PARTITIONS: Final = 3
WORKERS: Final = 6
ATTEMPTS: Final = 8
LOCK_S: Final = 3.0
SURE_S: Final = 2.0  # a lock surely lasts so long after a worker has received its records
CALM_S: Final = (0.1, 1.2)  # between two faults
RATE: Final = 300  # records per second
FINISHED_S: Final = 120.0  # for the last records
ALL_DUE: Final = "+60d"  # later than any jump, so that all records are due at the end
EARLY_S: Final = 0.005  # difference of rounded times
EVENTS: Final = {"kill": "kill -9", "suspend": "pause", "stop": "clean stop", JUMP: JUMP}
"""Names of the faults in the ledger."""
SETTINGS: Final = {
    AUTO_OFFSET_RESET: "earliest",
    DELIVERIES: str(ATTEMPTS),
    LOCK_DURATION: str(int(LOCK_S * 1000)),
}


def dead_of(group: str) -> str:
    """Return the dead-letter topic of a group."""
    return f"{group}.dead"


@dataclass
class Job:
    """A record as it was sent: its number, and its times in seconds since 1970."""

    number: int
    key: str
    due: float = 0.0
    expires: float = 0.0


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
    """All records of a group, and the violations that were found.

    Attributes:
        jobs: what was sent, by name.
        sent: names of the jobs whose storage was acknowledged.
        is_ordered: whether records with the same key are delivered one at a time.
        is_timed: whether the broker has the clock of this process.
    """

    jobs: dict[str, Job] = field(default_factory=dict)
    is_ordered: bool = False
    is_timed: bool = True
    records: dict[str, Record] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    deliveries: int = 0
    lapsed: int = 0
    open: dict[str, list[str]] = field(default_factory=dict)

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
        if name in self.jobs:
            self.check_job(name, self.jobs[name], start, now)
        record.attempts.append(attempt)
        record.holder, record.until, record.start = worker, now + SURE_S, start

    def check_job(self, name: str, job: Job, start: int, now: float) -> None:
        """Check that a job is due, and that the order of its key is kept."""
        if self.is_timed and time.time() < job.due - EARLY_S:
            self.wrong.append(f"delivered {job.due - time.time():.3f} s too early: {name}")
        if not self.is_ordered:
            return
        for other in self.of_key(job.key):
            record = self.records.get(other)
            if other == name or record is None:
                continue
            if record.holder != -1 and now < record.until and record.start == start:
                facts = f"{job} {self.jobs[other]} {record} left_s={record.until - now:.2f}"
                self.wrong.append(f"{name} is delivered while {other} of the same key is held {facts}")
            is_open = not record.ended and not record.may_have_ended and len(record.attempts) < ATTEMPTS
            if is_open and self.jobs[other].number < job.number and not self.jobs[other].expires:
                self.wrong.append(f"{name} is delivered before the earlier {other} of the same key is finished")

    def of_key(self, key: str) -> list[str]:
        """Return the names of the jobs with a key that are not known to be finished."""
        names = self.open.setdefault(key, [])
        names[:] = [name for name in names if name not in self.records or not self.records[name].ended]
        return names


class Run:
    """One run: a broker process, workers, a producer and faults."""

    def __init__(self, place: Path, seed: int, count: int, clock: SkewedClock | None = None) -> None:
        self.random = random.Random(seed)
        self.count = count
        jobs: dict[str, Job] = {}
        sent: set[str] = set()
        self.histories = {
            GROUP: History(jobs, is_timed=clock is None, sent=sent),
            ORDERED: History(jobs, is_ordered=True, is_timed=clock is None, sent=sent),
        }
        self.history = self.histories[GROUP]
        self.clock = clock
        environment = {} if clock is None else clock.environment
        self.broker = BrokerProcess(place / "data", wires=["polywire"], environment=environment)
        self.starts = 0
        self.faults: Counter[str] = Counter()
        self.is_over = False

    async def run(self) -> None:
        async with polywire.connect(self.broker.url(), reconnect_s=60) as client:
            await client.create_topic(TOPIC, PARTITIONS)
            calls = await self.calls()
            for name in self.histories:
                order = "key" if name == ORDERED else "none"
                await calls.configure(name, TOPIC, SETTINGS | {DEAD_LETTERS: dead_of(name), ORDER: order})
            await calls.close()
            async with asyncio.TaskGroup() as group:
                producer = group.create_task(self.produce())
                workers = [
                    group.create_task(self.work(name, number)) for name in self.histories for number in range(WORKERS)
                ]
                await self.disturb()
                self.is_over = True
                await producer
                if self.clock is not None:
                    self.clock.set(ALL_DUE)
                await self.settle()
                for worker in workers:
                    worker.cancel()
            for name, history in self.histories.items():
                await self.check(client, name, history)

    async def calls(self) -> QueueCalls:
        host, port = self.broker.addresses["polywire"]
        return QueueCalls(await PolywireClient.open(host, port))

    # Load

    async def produce(self) -> None:
        number = 0
        async with polywire.connect(self.broker.url(), reconnect_s=60) as client:
            while not self.is_over:
                name = f"job {number}"
                delay_s = self.random.choice((None, None, None, self.random.uniform(0, 4)))
                ttl_s = self.random.uniform(0.1, 6) if self.random.random() < 0.1 else None
                now, key = time.time(), str(number % KEYS)
                self.history.jobs[name] = Job(
                    number, key, 0.0 if delay_s is None else now + delay_s, 0.0 if ttl_s is None else now + ttl_s
                )
                for history in self.histories.values():
                    history.open.setdefault(key, []).append(name)
                try:
                    await client.send(TOPIC, name, key=key, delay_s=delay_s, ttl_s=ttl_s)
                    self.history.sent.add(name)
                except BrokerError:
                    await asyncio.sleep(0.05)
                number += 1
                await asyncio.sleep(1 / RATE)

    async def work(self, group: str, worker: int) -> None:
        while True:
            try:
                await self.work_for_a_while(group, worker)
            except BrokerError:
                await asyncio.sleep(0.05)
            for record in self.histories[group].records.values():  # its connection has ended
                if record.holder == worker:
                    record.holder = -1

    async def work_for_a_while(self, group: str, worker: int) -> None:
        """Use one connection until it is lost, or for some requests."""
        calls = await self.calls()
        try:
            for _ in range(self.random.randint(20, 200)):
                await self.take(calls, group, worker)
        finally:
            await calls.close()

    async def take(self, calls: QueueCalls, group: str, worker: int) -> None:
        """Acquire some records and report an outcome for most of them."""
        start, history = self.starts, self.histories[group]
        found = await calls.acquire(group, TOPIC, f"worker-{worker}", records_max=20, wait_ms=300)
        runs: list[AcknowledgedRun] = []
        names: list[str] = []
        for record, attempt in found.records:
            history.delivered(record.text, attempt, worker, start)
            outcome, delay_ms = self.choose()
            if outcome is not None:
                runs.append(AcknowledgedRun(record.partition, record.offset, record.offset, outcome, delay_ms))
                names.append(record.text)
        received_at = time.monotonic()
        if self.random.random() < 0.1:
            await asyncio.sleep(self.random.uniform(0.0, 2 * LOCK_S))
        if runs:
            await self.acknowledge(calls, group, worker, runs, names, received_at)

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
        self,
        calls: QueueCalls,
        group: str,
        worker: int,
        runs: Sequence[AcknowledgedRun],
        names: Sequence[str],
        received_at: float,
    ) -> None:
        history = self.histories[group]
        records = [history.records[name] for name in names]
        for record, run in zip(records, runs, strict=True):
            if record.holder == worker:  # another worker may get it as soon as the broker has the request
                record.holder = -1
            record.may_have_ended |= run.outcome != Outcome.RELEASE
        refused = await calls.acknowledge(group, TOPIC, f"worker-{worker}", runs)
        in_time = time.monotonic() - received_at < SURE_S
        for index, (name, record, run) in enumerate(zip(names, records, runs, strict=True)):
            if index in refused:
                record.may_have_ended = False
                if not isinstance(refused[index], Conflict) or in_time:
                    history.wrong.append(f"refused inside the lock: {name} {refused[index]}")
            elif run.outcome != Outcome.RELEASE:
                record.ended = "accepted" if run.outcome == Outcome.ACCEPT else "rejected"

    # Faults

    async def disturb(self) -> None:
        for number in range(self.count):
            await asyncio.sleep(self.random.uniform(*CALM_S))
            jumps = () if self.clock is None else (JUMP, JUMP)
            fault = self.random.choice(("kill", "kill", "kill", "suspend", "stop", *jumps))
            self.faults[fault] += 1
            if self.clock is not None and fault == JUMP:
                self.clock.set(self.random.choice(JUMPS))
                await asyncio.sleep(JUMPED_S)
            elif fault == "suspend":
                os.kill(self.broker.pid, signal.SIGSTOP)
                await asyncio.sleep(self.random.uniform(0.05, 1.0))
                os.kill(self.broker.pid, signal.SIGCONT)
            else:
                self.starts += 1
                await asyncio.to_thread(self.broker.kill if fault == "kill" else self.broker.stop)
                await asyncio.to_thread(self.broker.start)
                self.starts += 1  # what the old process delivered meanwhile belongs to no start
            if self.wrong:
                return
            if (number + 1) % 25 == 0:
                print(
                    f"faults={number + 1} sent={len(self.history.sent)} deliveries={self.history.deliveries}",
                    flush=True,
                )

    # The end

    @property
    def wrong(self) -> list[str]:
        """Return the violations of both groups."""
        return [f"{name}: {line}" for name, history in self.histories.items() for line in history.wrong]

    async def left(self, calls: QueueCalls) -> int:
        """Return the number of unfinished records."""
        queues = [entry for entry in await calls.entries() if entry.name == TOPIC]
        parts = [part for queue in queues for part in queue.partitions]
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

    async def check(self, client: Client, group: str, history: History) -> None:
        """Compare what workers saw with the dead letters."""
        dead = Counter[str]()
        for part in await client.bounds(dead_of(group)):
            offset = part.first_offset
            while offset < part.next_offset:
                found = await client.fetch(dead_of(group), part.partition, offset)
                dead.update(record.text for record in found)
                history.lapsed += sum(record.headers["dead.reason"] == LAPSED.encode() for record in found)
                offset = found[-1].offset + 1
        for name, copies in dead.items():
            ended = history.records.get(name, Record()).ended
            if copies > 1 or ended == "accepted":
                history.wrong.append(f"{copies} dead letters of {name}, which was {ended or 'open'}")
        for name in sorted(history.sent):
            record = history.records.get(name, Record())
            if name not in dead and record.ended != "accepted" and not record.may_have_ended:
                history.wrong.append(f"neither accepted nor a dead letter: {name} {record}")


def main() -> None:
    parser = parser_of("tests.histories.queues", __doc__)
    parser.add_argument("--count", type=int, default=100, help="number of faults")
    parser.add_argument("--clocks", action="store_true", help="let the broker's clock jump (needs libfaketime)")
    chosen = parser.parse_args()
    command = Command(f"tests.histories.queues --count {chosen.count}{' --clocks' if chosen.clocks else ''}")
    with recorded(command, chosen.seed, is_recorded=chosen.ledger) as recording, TemporaryDirectory() as place:
        clock = SkewedClock(Path(place) / "clock") if chosen.clocks else None
        run = Run(Path(place), recording.seed, chosen.count, clock)
        with run.broker:
            asyncio.run(run.run())
        faults = {EVENTS[fault]: number for fault, number in run.faults.items()}
        recording.counts = {**faults, "records stored": len(run.history.sent)}
        recording.find = "\n".join(run.wrong)
    history = run.history
    lapsed = sum(history.lapsed for history in run.histories.values())
    print(
        f"seed={recording.seed} faults={dict(run.faults)} sent={len(history.sent)} deliveries={history.deliveries}"
        f" ended={sum(bool(record.ended) for record in history.records.values())} lapsed={lapsed} wrong={len(run.wrong)}"
    )
    for line in run.wrong[:20]:
        print("WRONG", line)
    sys.exit(bool(run.wrong))


if __name__ == "__main__":
    main()
