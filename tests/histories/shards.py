"""Machines on one bucket of several shards, with faults: kills, stops, moved shards, and a killed bucket server.

``python -m tests.histories.shards --count 30 --seed 7``. The bucket is versitygw if ``POLYWIRE_S3_SERVER`` names it,
otherwise a directory. ``--only kill_leader`` limits the faults to one kind.

The seed determines the order. Killed processes are restarted, and after each fault every topic must accept records
again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

from polywire.server.placement import directory_of
from tests import fork_server
from tests.broker_process import BrokerProcess, child_environment
from tests.crash.test_processes import Producer
from tests.crash.test_shards import check_all, children
from tests.histories.repeat import parser_of
from tests.ledger import Command, recorded
from tests.s3_server import BUCKET, S3Server, bucket_kind, s3_binary

MACHINES: Final = ("a", "b", "c")
WIRES: Final = ("polywire", "flux", "cursus")
TOPICS: Final = 6
CALM_S: Final = (0.0, 3.0)  # between two faults
ANSWERED_S: Final = 90.0  # in which every topic accepts records again
LED: Final = "leading the shard"
EVENTS: Final = {"takeovers": "takeover", "stop_leader": "pause", "acknowledged": "records stored"}
"""Names of counts in the ledger that are not those of this module."""


class Stuck(Exception):
    """A topic no longer accepts records."""


@dataclass(frozen=True)
class Cluster:
    """Machines, and the bucket's server if there is one."""

    url: str
    shards: int
    machines: Sequence[BrokerProcess]
    server: S3Server | None
    chance: random.Random

    def leaders(self) -> list[int]:
        """Return the processes that lead, or did when last seen."""
        found = []
        for machine in self.machines:
            for shard in range(self.shards):
                with suppress(OSError, IndexError, ValueError):
                    pid = int((directory_of(machine.data_dir, shard) / "LOCK").read_text().split()[0])
                    found += [pid] if pid in children(machine) else []
        return found

    def takeovers(self) -> int:
        """Return how often a shard was taken over."""
        return sum(machine.log_text().count(LED) for machine in self.machines)

    def _pause(self, longest: float) -> Awaitable[None]:
        return asyncio.sleep(self.chance.uniform(0, longest))

    # Faults

    async def kill_leader(self) -> None:
        """Kill one process, which its parent restarts."""
        for pid in self.leaders()[:1]:
            os.kill(pid, signal.SIGKILL)

    async def stop_leader(self) -> None:
        """Suspend one process, for too long or not."""
        leaders = self.leaders()
        if not leaders:
            return
        asleep = self.chance.choice(leaders)
        os.kill(asleep, signal.SIGSTOP)
        await self._pause(12)
        os.kill(asleep, signal.SIGCONT)

    async def kill_machine(self) -> None:
        """Kill all its processes at once; it returns at some time."""
        machine = self.chance.choice(self.machines)
        for pid in children(machine):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        machine.kill()
        await self._pause(10)
        await asyncio.to_thread(machine.start)

    async def kill_parent(self) -> None:
        """Kill the parent: its processes end cleanly."""
        machine = self.chance.choice(self.machines)
        machine.kill()
        await self._pause(2)
        await asyncio.to_thread(machine.start)

    async def end_machine(self) -> None:
        """Stop a machine, which hands over what it leads."""
        machine = self.chance.choice(self.machines)
        assert await asyncio.to_thread(machine.stop) == 0, machine.log_text()
        await asyncio.to_thread(machine.start)

    async def move_shard(self) -> None:
        """Hand a shard to a standby, if there is one."""
        shard = str(self.chance.randrange(self.shards))
        command = [sys.executable, "-m", "polywire", "cluster", "takeover", self.url, "--shard", shard]
        await asyncio.to_thread(fork_server.run, command, env=child_environment())

    async def kill_bucket(self) -> None:
        """Make the bucket unavailable for a while."""
        if self.server is not None:
            self.server.kill()
            await self._pause(9)
            self.server.start()


Deed: TypeAlias = Callable[[Cluster], Awaitable[None]]
DEEDS: Final[Sequence[Deed]] = (
    Cluster.kill_leader,
    Cluster.stop_leader,
    Cluster.kill_machine,
    Cluster.kill_parent,
    Cluster.end_machine,
    Cluster.move_shard,
    Cluster.kill_bucket,
)


def run(folder: Path, *, seed: int, count: int, shards: int = 2, only: str = "") -> Counter[str]:
    """Run that many faults, and check acknowledged records through every machine; return the counts.

    only: the name of the only kind of fault, or an empty string for all kinds.

    Raises Stuck, AssertionError.
    """
    with cluster(folder, random.Random(seed), shards) as found:
        for machine in found.machines:
            machine.start()
        done = asyncio.run(_produced(found, count, [deed for deed in DEEDS if only in ("", deed.__name__)]))
        done["takeovers"] = found.takeovers()
        for machine in found.machines:
            assert machine.stop() == 0, machine.log_text()
        return done


@contextmanager
def cluster(folder: Path, chance: random.Random, shards: int) -> Iterator[Cluster]:
    """Return machines that are not started yet; none outlives the block."""
    binary, server, url = s3_binary(), None, f"file://{folder / 'bucket'}"
    if binary is not None:
        server, url = S3Server(binary, folder / "s3"), f"s3://{BUCKET}/log"
        server.start()
        os.environ.update(server.environment)
    options = "--bucket", url, "--processes", str(shards), "--balance-s", "2"
    machines = [BrokerProcess(folder / name, *options, "--node", name, wires=WIRES) for name in MACHINES]
    try:
        yield Cluster(url, shards, machines, server, chance)
    finally:
        for machine in machines:
            if not machine.stopped:
                machine.kill()
        if server is not None:
            server.kill()


async def _produced(found: Cluster, count: int, deeds: Sequence[Deed]) -> Counter[str]:
    producers = [
        Producer(found.machines[number % len(MACHINES)], f"topic-{number}", WIRES[number // 2 % len(WIRES)])
        for number in range(TOPICS)
    ]
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    done = Counter[str]()
    try:
        await _answered(producers, "begin")
        for _ in range(count):
            await asyncio.sleep(found.chance.uniform(*CALM_S))
            deed = found.chance.choice(deeds)
            await deed(found)
            await _answered(producers, deed.__name__)
            done[deed.__name__] += 1
    finally:
        for producer in producers:
            producer.is_running = False
        await asyncio.gather(*tasks)
    await check_all(found.machines, producers)
    done["acknowledged"] = sum(len(producer.acknowledged) for producer in producers)
    return done


async def _answered(producers: Sequence[Producer], deed: str) -> None:
    """Wait until every topic has accepted another record. Raises Stuck."""
    before, end = [len(producer.acknowledged) for producer in producers], time.monotonic() + ANSWERED_S
    while waiting := [
        one.topic for one, count in zip(producers, before, strict=True) if len(one.acknowledged) == count
    ]:
        if time.monotonic() > end:
            raise Stuck(f"no leader for {waiting} after {deed}")
        await asyncio.sleep(0.05)


def main() -> int:
    """Run one history; the exit code is 0 if nothing is wrong."""
    parser = parser_of("tests.histories.shards", __doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--only", choices=[deed.__name__ for deed in DEEDS], default="")
    given = parser.parse_args()
    only = f" --only {given.only}" if given.only else ""
    command = Command(f"tests.histories.shards --count {given.count} --shards {given.shards}{only}", bucket_kind())
    with recorded(command, given.seed, is_recorded=given.ledger) as recording, TemporaryDirectory() as folder:
        done = run(Path(folder), seed=recording.seed, count=given.count, shards=given.shards, only=given.only)
        recording.counts = {EVENTS.get(name, name): number for name, number in done.items()}
    for name, number in sorted(done.items()):
        print(f"{name:16} {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
