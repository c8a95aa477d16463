"""Real brokers on a bucket: downtime for clients after a kill of the leader, and the cost of a log in a bucket.

Run: ``python -m benchmarks.bucket_brokers [--kills N] [--gigabytes N]``. The bucket is versitygw if
``POLYWIRE_S3_SERVER`` names it, otherwise a directory.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import polywire
from benchmarks.measure import console, fresh_broker, processor_seconds
from benchmarks.polywire_load import produce_rate, value_batch
from polywire.client import bulk
from polywire.testing.process import BrokerProcess
from tests.histories.takeovers import bucket_in

NODES: Final = ("one", "two", "three")
BETWEEN_S: Final = 3.0  # between two kills: the killed broker is a standby again
RECORD_BYTES: Final = 1000
BATCH_RECORDS: Final = 1000


@contextmanager
def bucket() -> Iterator[tuple[Path, str, str]]:
    """Return a folder, a bucket in it, and its description."""
    with tempfile.TemporaryDirectory(prefix="polywire-bench-") as name, bucket_in(Path(name)) as (url, server):
        yield Path(name), url, "a directory" if server is None else "versitygw"


def pauses_s(kills: int) -> tuple[list[float], str]:
    """Return the downtimes of a producer with all three addresses, after each ``kill -9`` of the leader."""
    with bucket() as (folder, url, kind), ExitStack() as running:
        brokers = [
            BrokerProcess(folder / name, "--bucket", url, "--node", name, "--balance-s", "0", wires=["polywire"])
            for name in NODES
        ]
        for broker in brokers:
            running.enter_context(broker)
        return asyncio.run(_killed(brokers, kills)), kind


async def _killed(brokers: list[BrokerProcess], kills: int) -> list[float]:
    loop, waited = asyncio.get_running_loop(), []
    async with polywire.connect(",".join(broker.url() for broker in brokers)) as client, client.producer() as producer:
        for _ in range(kills):
            end = loop.time() + BETWEEN_S
            while loop.time() < end:
                await producer.send_and_wait("kills", "v", key="k")
            leader = max(brokers, key=_start)
            await asyncio.to_thread(leader.kill)
            killed = time.monotonic()
            await producer.send_and_wait("kills", "v", key="k")
            waited.append(time.monotonic() - killed)
            await asyncio.to_thread(leader.start)
    return waited


def _start(broker: BrokerProcess) -> int:
    """Return its latest start as leader."""
    lines = [line for line in broker.log_text().splitlines() if "leading the shard" in line]
    return int(lines[-1].rpartition("start=")[2].split()[0]) if lines else 0


def processor_s_per_gb(gigabytes: float, rounds: int) -> tuple[list[float], list[float]]:
    """Return the processor seconds of brokers with a synced log in a directory and in a bucket, in turn."""
    beside: list[float] = []
    used: list[float] = []
    for _ in range(rounds):
        with fresh_broker("--durability", "synced") as broker:
            beside.append(_used(broker, gigabytes))
        with bucket() as (folder, url, _), BrokerProcess(folder / "one", "--bucket", url) as broker:
            used.append(_used(broker, gigabytes))
    return beside, used


def _used(broker: BrokerProcess, gigabytes: float) -> float:
    host, port = broker.addresses["polywire"]
    bulk.connect(f"{host}:{port}").create_topic("t", 1)
    batch = value_batch(BATCH_RECORDS, RECORD_BYTES)
    before = processor_seconds(broker.pid)
    batches = int(gigabytes * 1e9 / len(batch))
    produce_rate(host, port, "t", batch=batch, batch_records=BATCH_RECORDS, batches=batches)
    return (processor_seconds(broker.pid) - before) / (batches * len(batch) / 1e9)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bucket_brokers", description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    waited, kind = pauses_s(given.kills)
    console.print(
        f"kill -9 of the leader to the next acknowledgement, {kind}, {len(waited)} times:"
        f" median {statistics.median(waited):.1f} s, {min(waited):.1f} to {max(waited):.1f} s"
    )
    beside, used = processor_s_per_gb(given.gigabytes, given.rounds)
    more = statistics.median(used) - statistics.median(beside)
    console.print(
        f"processor seconds of the broker per GB produced: {_spread(used)} with the log in {kind}, {_spread(beside)} in a directory, synced;"
        f" {more:.2f} more"
    )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
