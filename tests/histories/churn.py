"""Days of use in minutes: topics, groups, producers, queues and transactions come and go, and nothing of them remains.

``python -m tests.histories.churn --rounds 200``, or ``--seconds 3600``. In each round, visitors of every protocol create a
topic, write to it, join a group, commit, and disconnect, every other one without leaving its group. Visitors of `polywire` also use a queue
and a transaction, and visitors of Kafka an idempotent producer. Then everything is deleted. After some rounds the
broker is restarted, with SIGTERM and SIGKILL in turn. The checks:

* Memory, file descriptors, the size of the data directory and the processor time of a start are those of the first rounds.
  Each start is compared with one in an empty directory at the same time, because a busy machine needs more processor time.
* The broker knows no topic, group, writer or transactional id any more, and has logged no error.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from polywire import Client
from polywire.client.base import Ability, WireClient
from polywire.client.connect import connect
from polywire.client.kafka import KafkaClient
from polywire.client.polywire import PolywireClient
from polywire.client.queue_calls import QueueCalls
from polywire.errors import Conflict
from polywire.records.columns import Record
from polywire.types import Level
from tests.broker_process import BrokerProcess

WIRES: Final = ("cursus", "flux", "iggy", "kafka", "polywire")
ROUNDS: Final = 200
VISITORS: Final = 20  # per round, at the same time
RECORDS: Final = [Record(b"%d" % number * 50, b"key") for number in range(50)]
SETTLED_S: Final = 120.0  # until deleted data has left the disk
SETTLE_ROUNDS: Final = 10  # rounds until buffers and caches have their usual sizes
MEMORY_MB_MAX: Final = 8  # growth of the process's own memory after these rounds
START_CPU_S_MAX: Final = 0.5  # growth of the processor time of a start
DISK_MB_MAX: Final = 4  # growth of the data directory: snapshots and the list of segments
SESSION: Final = "--offsets-retention-hours", "0.01"


class State(msgspec.Struct):
    """Memory, disk space and descriptors of the broker after a round.

    Attributes:
        memory_mb, disk_mb: megabytes of its own memory, and of the data directory without journal files.
        descriptors: open file descriptors.
    """

    memory_mb: float
    disk_mb: float
    descriptors: int


class Churn:
    """The rounds against one broker."""

    def __init__(self, folder: Path, *, rounds: int, restart_rounds: int, seconds: float = math.inf) -> None:
        self.broker = BrokerProcess(folder / "data", *SESSION, wires=WIRES)
        self.states: list[State] = []
        self.starts_s: list[float] = []
        self.empty_starts_s: list[float] = []
        self._empty: Final = folder / "empty"
        self.wrong: list[str] = []
        self._rounds = rounds
        self._seconds = seconds
        self._restart_rounds = restart_rounds

    def run(self) -> None:
        """Run all rounds, and append to ``wrong`` what has not returned to where it was."""
        self._start()
        end = time.monotonic() + self._seconds
        for number in range(self._rounds):
            if time.monotonic() >= end:
                break
            if number and number % self._restart_rounds == 0:
                (self.broker.kill if number // self._restart_rounds % 2 else self.broker.stop)()
                self._start()
            asyncio.run(self._round(number))
            self.states.append(self._state())
        self._settle()
        asyncio.run(self._check_lists())
        self._check_states()
        self.wrong += [
            line for line in self.broker.log_text().splitlines() if "level=error" in line or "Traceback" in line
        ]
        if self.broker.stop():
            self.wrong.append("the broker did not end properly")

    def _start(self) -> None:
        self.broker.start()
        self.starts_s.append(_processor_s(self.broker.pid))
        self._empty.mkdir()
        with BrokerProcess(self._empty / "data", *SESSION, wires=WIRES) as empty:
            self.empty_starts_s.append(_processor_s(empty.pid))
        shutil.rmtree(self._empty)
        print(
            f"round={len(self.states)} start_cpu_s={self.starts_s[-1]:.2f} empty={self.empty_starts_s[-1]:.2f}",
            flush=True,
        )

    def _state(self) -> State:
        files = [path for path in self.broker.data_dir.rglob("*") if path.is_file() and path.suffix != ".pwj"]
        sizes = [_size(path) for path in files]
        return State(self.broker.memory_bytes / 1e6, sum(sizes) / 1e6, len(os.listdir(f"/proc/{self.broker.pid}/fd")))

    async def _round(self, number: int) -> None:
        names = [f"churn.{number}-{visitor}" for visitor in range(VISITORS)]
        await asyncio.gather(
            *[self._visit(WIRES[index % len(WIRES)], name, leaves=index % 2 == 0) for index, name in enumerate(names)]
        )
        client, queues = await self._open()
        for queue in await queues.entries():  # if only the topic were deleted, the settings would remain, as in Kafka
            await queues.delete(queue.group, queue.name)
        for group in (await client.groups())[::2]:
            await client.delete_group(group.name, group.topic)
        for transaction in await client.transactions():
            await client.delete_transaction(transaction.id)
        for writer in await client.writers():
            await client.delete_writer(writer.writer)
        for topic in await client.topics():
            await client.delete_topic(topic.name)
        await client.close()

    async def _open(self) -> tuple[PolywireClient, QueueCalls]:
        client = await PolywireClient.open(*self.broker.addresses["polywire"])
        return client, QueueCalls(client)

    async def _visit(self, wire: str, topic: str, *, leaves: bool) -> None:
        client = await connect(self.broker.url(wire))
        await client.create_topic(topic, 2)
        partition = 0 if Ability.CHOOSE_PARTITION in client.abilities else None
        await client.produce(topic, RECORDS, partition=partition, level=Level.WRITTEN)
        group = f"group-{topic}"
        membership = await client.join(group, topic, "member")
        with suppress(Conflict):  # its session has expired, on a busy machine
            await client.commit(group, topic, 0, 10, member="member", generation=membership.generation)
        await client.fetch(topic, 0, 0)
        further: dict[str, Callable[[WireClient, str], Awaitable[None]]] = {
            "kafka": self._produce_idempotently,
            "polywire": self._use_queue,
        }
        if wire in further:
            await further[wire](client, topic)
        if leaves:
            with suppress(Conflict):
                await client.leave(group, topic, "member", membership.generation)
        await client.close()

    async def _produce_idempotently(self, client: WireClient, topic: str) -> None:
        assert isinstance(client, KafkaClient)
        producer = await client.new_producer()
        for sequence in (0, len(RECORDS)):
            await client.append_next(topic, 1, RECORDS, producer=producer, sequence=sequence)

    async def _use_queue(self, client: WireClient, topic: str) -> None:
        assert isinstance(client, PolywireClient)
        async with Client(self.broker.url()) as own:
            async with own.transaction(f"id-{topic}") as transaction:
                await transaction.send(topic, b"in a transaction")
            async with own.queue(topic, group=f"workers-{topic}") as queue:
                for _ in RECORDS[::2]:
                    job = await queue.get(timeout_s=SETTLED_S)
                    assert job is not None, topic
                    await job.ack()

    def _settle(self) -> None:
        """Wait until the broker has removed what was deleted."""
        end = time.monotonic() + SETTLED_S
        while self._state().disk_mb > self._usual.disk_mb + DISK_MB_MAX and time.monotonic() < end:
            time.sleep(1)
        self.states.append(self._state())

    @property
    def _usual(self) -> State:
        """The state of the first rounds, after the settling ones."""
        first = self.states[SETTLE_ROUNDS : max(SETTLE_ROUNDS * 2, SETTLE_ROUNDS + 1)] or self.states[:1]
        return State(
            median(state.memory_mb for state in first),
            median(state.disk_mb for state in first),
            int(median(state.descriptors for state in first)),
        )

    @property
    def _more_s(self) -> list[float]:
        """How much longer each start took than the one in an empty directory."""
        return [start - empty for start, empty in zip(self.starts_s, self.empty_starts_s, strict=True)]

    @property
    def _usual_more_s(self) -> float:
        """The longest start of the first half. Starts take longer until the first journal files are full."""
        return max(self._more_s[: len(self.starts_s) // 2 + 1])

    async def _check_lists(self) -> None:
        client, queues = await self._open()
        for what, found in (
            ("queues", await queues.entries()),
            ("topics", await client.topics()),
            ("groups", await client.groups()),
            ("writers", await client.writers()),
            ("transactional ids", await client.transactions()),
        ):
            if found:
                self.wrong.append(f"{len(found)} {what} remain, for example {found[0]}")
        await client.close()

    def _check_states(self) -> None:
        usual, last = self._usual, self.states[-1]
        for what, before, after, growth in (
            ("MB of memory", usual.memory_mb, last.memory_mb, MEMORY_MB_MAX),
            ("MB on disk", usual.disk_mb, last.disk_mb, DISK_MB_MAX),
            ("more seconds of processor time to start", self._usual_more_s, self._more_s[-1], START_CPU_S_MAX),
            ("file descriptors", usual.descriptors, last.descriptors, len(WIRES)),
        ):
            if after > before + growth:
                self.wrong.append(f"{what}: {before:.1f} at first, {after:.1f} at the end")


def _processor_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted meanwhile
        return 0


def summary(churn: Churn) -> Sequence[str]:
    """Return the state of every tenth part of the rounds, as lines."""
    step = max(1, len(churn.states) // 10)
    lines = [
        f"round={number} memory_mb={state.memory_mb:.1f} disk_mb={state.disk_mb:.1f} descriptors={state.descriptors}"
        for number, state in enumerate(churn.states)
        if number % step == 0 or number == len(churn.states) - 1
    ]
    starts = zip(churn.starts_s, churn.empty_starts_s, strict=True)
    compared = ", ".join(f"{start:.2f} (empty: {empty:.2f})" for start, empty in starts)
    return [*lines, f"starts_cpu_s={compared} wrong={len(churn.wrong)}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.histories.churn")
    parser.add_argument("--rounds", type=int, help=f"without --seconds, {ROUNDS}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after this time, if before the last round")
    parser.add_argument("--restart-rounds", type=int, default=40, help="rounds between two restarts")
    chosen = parser.parse_args()
    rounds = chosen.rounds or (ROUNDS if chosen.seconds == math.inf else sys.maxsize)
    with TemporaryDirectory() as place:
        churn = Churn(Path(place), rounds=rounds, restart_rounds=chosen.restart_rounds, seconds=chosen.seconds)
        churn.run()
    for line in summary(churn):
        print(line)
    for line in churn.wrong[:20]:
        print("WRONG", line)
    sys.exit(bool(churn.wrong))


if __name__ == "__main__":
    main()
