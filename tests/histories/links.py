"""Histories of a link: the broker, the process that runs links, and the source are killed and suspended.

``python -m tests.histories.links --count 100 --seed 7``. The seed determines the order. At the end, and after every
``CHECK_EVERY`` faults, the copy must be a prefix of the source: each record once, in order, with its key, header, time
and offset. At the end it must be complete.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from subprocess import run as run_command
from tempfile import TemporaryDirectory
from typing import Any, Final

from polywire.cli.admin import AdminApi
from polywire.client.base import WireClient
from polywire.client.copying import connected
from polywire.errors import BrokerError
from polywire.records.columns import Header, HeaderKind, Record
from tests.broker_process import BrokerProcess

TOPIC: Final = "orders"
LINK: Final = "old"
PARTITIONS: Final = 3
CHECK_EVERY: Final = 25
CALM_S: Final = (0.1, 2.5)  # between two faults
CAUGHT_UP_S: Final = 300.0
BATCH: Final = 100
PAUSE_S: Final = 0.05  # between batches: copies must keep up on a busy machine

Row = tuple[int, bytes | None, bytes | None, tuple[Any, ...], int | None]


class Wrong(Exception):
    """The copy differs from the source, or does not catch up."""


@dataclass
class World:
    """A source, a broker that follows it, and what was done to them."""

    source: BrokerProcess
    broker: BrokerProcess
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    stopped: list[int] = field(default_factory=list)

    def inject(self) -> None:
        """Wait, and inject one fault."""
        time.sleep(self.chance.uniform(*CALM_S))
        (name,) = self.chance.choices(list(FAULTS), WEIGHTS)
        FAULTS[name](self)
        self.counts[name] += 1

    def kill_worker(self) -> None:
        for pid in workers(self.broker):
            os.kill(pid, signal.SIGKILL)

    def kill_broker(self) -> None:
        self.broker.kill()
        self.broker.start()

    def kill_both(self) -> None:
        pids = [*workers(self.broker), self.broker.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.broker.kill()
        self.broker.start()

    def outlive(self) -> None:
        """Suspend the worker, kill the broker, and continue the old worker while the next one runs."""
        pids = workers(self.broker)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self.stopped += pids
        self.broker.kill()
        self.broker.start()
        time.sleep(self.chance.uniform(0, 2.0))
        self.close()

    def close(self) -> None:
        """Continue suspended processes."""
        for pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()

    def stop_broker(self) -> None:
        assert self.broker.stop() == 0, self.broker.log_text()
        self.broker.start()

    def kill_source(self) -> None:
        self.source.kill()
        self.source.start()

    def pause(self) -> None:
        admin = AdminApi(self.broker.url("http"))
        admin.request("POST", f"links/{LINK}/paused", {"paused": True})
        time.sleep(self.chance.uniform(0, 0.5))
        admin.request("POST", f"links/{LINK}/paused", {"paused": False})


FAULTS: Final[Mapping[str, Callable[[World], None]]] = {
    "kill worker": World.kill_worker,
    "kill broker": World.kill_broker,
    "kill both": World.kill_both,
    "worker outlives broker": World.outlive,
    "stop": World.stop_broker,
    "kill source": World.kill_source,
    "pause and resume": World.pause,
}
WEIGHTS: Final = (5, 3, 3, 2, 1, 2, 3)


def workers(broker: BrokerProcess) -> list[int]:
    """Return the ids of the processes that run links for a broker that runs now."""
    found = run_command(["pgrep", "-P", str(broker.pid)], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in found.split() if b"polywire.links" in _command_line(int(pid))]


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextmanager
def producing(url: str) -> Iterator[None]:
    """Send records to the source until the block ends. Records that are sent twice are two records."""
    ending = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(_produce(url, ending),))
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


async def _produce(url: str, ending: threading.Event) -> None:
    numbers = count(step=BATCH)
    while not ending.is_set():
        with suppress(BrokerError):
            async with connected(url) as client:
                await _produce_to(client, ending, numbers)
        await asyncio.sleep(0.05)


async def _produce_to(client: WireClient, ending: threading.Event, numbers: Iterator[int]) -> None:
    while not ending.is_set():
        first = next(numbers)
        await client.produce(TOPIC, [_record(number) for number in range(first, first + BATCH)])
        await asyncio.sleep(PAUSE_S)


def _record(number: int) -> Record:
    header = Header(b"number", b"%d" % number, HeaderKind.STRING, HeaderKind.RAW)
    value = None if number % 50 == 7 else b"%0*d" % (100, number)
    return Record(value, b"%d" % (number % 97), (header,), origin_time_us=1_700_000_000_000_000 + number * 1000)


async def _rows(client: WireClient, partition: int) -> list[Row]:
    found: list[Row] = []
    while True:
        records = await client.fetch(TOPIC, partition, found[-1][0] + 1 if found else 0)
        if not records:
            return found
        for record in records:
            headers = tuple((header.key, header.value) for header in record.headers)
            found.append((record.offset, record.key, record.value, headers, record.origin_time_us))


async def _compare(source: str, target: str) -> tuple[int, int]:
    async with connected(source) as old, connected(target) as new:
        if TOPIC not in {topic.name for topic in await new.topics()}:  # the link has not created it yet
            return 0, 1
        found = [await _compare_partition(old, new, partition) for partition in range(PARTITIONS)]
        return sum(copied for copied, _ in found), sum(missing for _, missing in found)


async def _compare_partition(old: WireClient, new: WireClient, partition: int) -> tuple[int, int]:
    copy = await _rows(new, partition)
    original = await _rows(old, partition)
    for ours, theirs in zip(copy, original, strict=False):
        if ours != theirs:
            raise Wrong(f"a record differs partition={partition} copy={ours} source={theirs}")
    if len(copy) > len(original):
        raise Wrong(f"the copy has more records partition={partition} extra={copy[len(original) :][:3]}")
    return len(copy), len(original) - len(copy)


def check(world: World) -> tuple[int, int]:
    """Return how many records the copy has, and how many are missing. Raises Wrong."""
    return asyncio.run(_compare(world.source.url(), world.broker.url()))


def catch_up(world: World) -> int:
    """Wait until the copy is complete. Raises Wrong."""
    end = time.monotonic() + CAUGHT_UP_S
    while time.monotonic() < end:
        time.sleep(0.5)
        copied, missing = check(world)
        if not missing:
            return copied
    state = AdminApi(world.broker.url("http")).request("GET", f"links/{LINK}")
    raise Wrong(f"the copy does not catch up missing={missing} link={state}\n{world.broker.log_text()}")


def run(
    folder: Path,
    *,
    seed: int,
    faults: int,
    wire: str = "polywire",
    in_bucket: bool = False,
    report: Callable[[str], object] = print,
) -> Counter[str]:
    """Run that many faults, and return the counts. Raises Wrong, AssertionError."""
    options = ("--bucket", (folder / "bucket").as_uri()) if in_bucket else ()
    with (
        BrokerProcess(folder / "source", wires=sorted({"polywire", wire})) as source,
        BrokerProcess(folder / "data", *options, wires=["polywire", "http"]) as broker,
    ):
        asyncio.run(_create(source.url()))
        world = World(source, broker, random.Random(seed))
        body = {"source": source.url(wire), "topics": ["ord*"]}
        AdminApi(broker.url("http")).request("POST", f"links/{LINK}", body)
        with producing(source.url()), closing(world):
            _inject(world, faults, report)
        world.counts["records"] = catch_up(world)
        return world.counts


def _inject(world: World, faults: int, report: Callable[[str], object]) -> None:
    for number in range(1, faults + 1):
        world.inject()
        if number % CHECK_EVERY == 0:
            report(f"{number} faults, {check(world)[0]} records")


async def _create(url: str) -> None:
    async with connected(url) as client:
        await client.create_topic(TOPIC, PARTITIONS)


def main() -> int:
    """Run one history; the exit code is 0 if nothing is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wire", default="polywire", choices=["polywire", "kafka"], help="protocol of the source")
    parser.add_argument("--bucket", action="store_true", help="store the log of the copy in a bucket (a directory)")
    given = parser.parse_args()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        counts = run(Path(folder), seed=given.seed, faults=given.count, wire=given.wire, in_bucket=given.bucket)
    for name, number in sorted(counts.items()):
        print(f"{name:24} {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
