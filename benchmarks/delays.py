"""Delayed records of a queue: time to pass them, start time and memory with them, and the rate when many are due at once.

Run: ``python -m benchmarks.delays [--waiting N] [--due N] [--workers N] [--directory PATH]``

Most records are due at random times of the next month. After a restart, further ones are sent that are due together.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.measure import processor_seconds, resident_bytes
from polywire.client.polywire import PolywireClient
from polywire.client.queue_calls import Acquisition, QueueCalls
from polywire.delivery_times import DELIVER_AT
from polywire.protocols.polywire.messages import AcknowledgedRun
from polywire.records.build import from_columns
from polywire.records.columns import Column, HeaderKind
from polywire.share_settings import AUTO_OFFSET_RESET, UNFINISHED
from polywire.testing.process import BrokerProcess
from polywire.types import Buffer, Outcome

TOPIC: Final = "jobs"
GROUP: Final = "workers"
PARTITIONS: Final = 3
BATCH: Final = 5_000
VALUE_BYTES: Final = 100
DIGITS: Final = 13
HOUR_MS: Final = 3_600_000
SETTINGS: Final = {AUTO_OFFSET_RESET: "earliest", UNFINISHED: "10000"}
MEBI: Final = 1024 * 1024


def batch(due_ms: np.ndarray) -> bytearray:
    """Return a batch with one record for each due time."""
    count, key = len(due_ms), DELIVER_AT.encode()
    kinds = bytes([HeaderKind.STRING]) * count
    columns: dict[int, Buffer] = {
        Column.VALUE_OFFSETS: _ends(count, VALUE_BYTES),
        Column.VALUE_BYTES: b"x" * (count * VALUE_BYTES),
        Column.HEADER_COUNTS: _ends(count, 1),
        Column.HEADER_KEY_KINDS: kinds,
        Column.HEADER_KEY_OFFSETS: _ends(count, len(key)),
        Column.HEADER_KEY_BYTES: key * count,
        Column.HEADER_VALUE_KINDS: kinds,
        Column.HEADER_VALUE_OFFSETS: _ends(count, DIGITS),
        Column.HEADER_VALUE_BYTES: "".join(map(str, due_ms.tolist())).encode(),
    }
    return from_columns(columns, count)


def _ends(count: int, size: int) -> bytes:
    return (np.arange(count + 1, dtype="<i4") * size).tobytes()


def runs_of(found: Acquisition) -> list[AcknowledgedRun]:
    """Return the acknowledgements of all records, as few as possible."""
    runs: list[AcknowledgedRun] = []
    for record, _ in found.records:
        first = record.offset
        if runs and (runs[-1].partition, runs[-1].last + 1) == (record.partition, record.offset):
            first = runs.pop().first
        runs.append(AcknowledgedRun(record.partition, first, record.offset, Outcome.ACCEPT))
    return runs


class Bench:
    """One broker process with one queue."""

    def __init__(self, place: Path, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.broker = BrokerProcess(place / "data", wires=["polywire"])
        self.random = np.random.default_rng(1)

    async def client(self) -> PolywireClient:
        host, port = self.broker.addresses["polywire"]
        return await PolywireClient.open(host, port)

    def say(self, what: str, count: int, begun: float) -> None:
        taken = time.monotonic() - begun
        memory = " ".join(f"{name}={size // MEBI}MiB" for name, size in resident_bytes(self.broker.pid).items())
        print(f"{what}: {taken:.1f} s, {count / taken:,.0f} records/s, {memory}", flush=True)

    async def send(self, client: PolywireClient, count: int, first_ms: int, last_ms: int) -> None:
        begun = time.monotonic()
        for number in range(count // BATCH):
            due_ms = self.random.integers(first_ms, last_ms + 1, BATCH)
            await client.append_batch(TOPIC, number % PARTITIONS, batch(due_ms))
        self.say("sent", count, begun)

    async def delayed(self, calls: QueueCalls) -> Mapping[str, int]:
        [queue] = await calls.entries(GROUP)
        return {
            "delayed": sum(part.delayed for part in queue.partitions),
            "new": sum(max(part.next_offset - part.end, 0) for part in queue.partitions),
        }

    async def passed(self, calls: QueueCalls, count: int) -> None:
        """Wait until the queue has passed all records that are not due."""
        begun = time.monotonic()
        while (await self.delayed(calls))["new"]:
            found = await calls.acquire(GROUP, TOPIC, "scan", records_max=1, wait_ms=500)
            assert not found.records, "nothing is due"
        self.say("passed", count, begun)

    async def work(self, worker: int, total: list[int], count: int) -> None:
        calls = QueueCalls(await self.client())
        while total[0] < count:
            found = await calls.acquire(GROUP, TOPIC, f"worker {worker}", records_max=1_000, wait_ms=1_000)
            if found.records:
                refused = await calls.acknowledge(GROUP, TOPIC, f"worker {worker}", runs_of(found))
                assert not refused
            total[0] += len(found.records)
        await calls.close()

    async def run(self) -> None:
        waiting, due = self.chosen.waiting, self.chosen.due
        client = await self.client()
        calls = QueueCalls(client)
        await client.create_topic(TOPIC, PARTITIONS)
        await calls.configure(GROUP, TOPIC, SETTINGS)
        now_ms = time.time_ns() // 1_000_000
        await self.send(client, waiting, now_ms + HOUR_MS, now_ms + 30 * 24 * HOUR_MS)
        await self.passed(calls, waiting)
        await client.close()
        for stop in (self.broker.stop, self.broker.kill):
            stop()
            begun = time.monotonic()
            self.broker.start()
            client = await self.client()
            calls = QueueCalls(client)
            found = await calls.acquire(GROUP, TOPIC, "first", records_max=1, wait_ms=0)
            assert not found.records
            self.say(f"start after {stop.__name__}, and first request", 0, begun)
            await asyncio.sleep(3)
            self.say("memory after 3 s", 0, time.monotonic() - 3)
            print(await self.delayed(calls))
            if stop is self.broker.stop:
                await client.close()
        now_ms = time.time_ns() // 1_000_000
        due_ms = now_ms + self.chosen.within_s * 1000
        await self.send(client, due, due_ms, due_ms)
        await self.passed(calls, due)
        await asyncio.sleep(max(due_ms / 1000 - time.time(), 0))
        begun, used, total = time.monotonic(), processor_seconds(self.broker.pid), [0]
        await asyncio.gather(*(self.work(number, total, due) for number in range(self.chosen.workers)))
        self.say("delivered and acknowledged", total[0], begun)
        print(f"processor time of the broker: {processor_seconds(self.broker.pid) - used:.1f} s")
        print(await self.delayed(calls))
        sizes = {path.name: path.stat().st_size // MEBI for path in self.broker.data_dir.glob("delayed.db*")}
        print(f"index: {sizes} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delays")
    parser.add_argument("--waiting", type=int, default=10_000_000, help="records of the next month")
    parser.add_argument("--due", type=int, default=1_000_000, help="records that are due together")
    parser.add_argument("--within-s", type=int, default=60, help="seconds until these are due")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--directory", type=Path, default=None)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polywire-bench-", dir=chosen.directory) as place:
        bench = Bench(Path(place), chosen)
        with bench.broker:
            asyncio.run(bench.run())


if __name__ == "__main__":
    main()
