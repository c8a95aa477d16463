"""The gain of a second process with a bucket: one shard and two in turn, and the ratio of their throughput.

Run: ``python -m benchmarks.bucket_shards [--gigabytes N] [--rounds N]``. Two producers write to two topics, each to the
leading process, as clients do. The bucket is versitygw if ``POLYWIRE_S3_SERVER`` names it, otherwise a directory.
Producers and the bucket's server use processor time, too: a ratio is only meaningful if they have separate cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Final

from benchmarks.bucket_brokers import BATCH_RECORDS, RECORD_BYTES, bucket
from benchmarks.measure import console, descendants, processor_seconds
from benchmarks.polywire_load import produce_rate, value_batch
from polywire.client import bulk
from polywire.cluster.nodes import Nodes
from polywire.server.placement import shard_by_hash
from polywire.store.url import open_bucket
from polywire.testing.process import BrokerProcess

SHARDS: Final = 2
TOPICS: Final = tuple(
    next(name for name in map("t{}".format, range(64)) if shard_by_hash(name, SHARDS) == shard)
    for shard in range(SHARDS)
)
WIRE: Final = "polywire"
POLL_S: Final = 0.1
TARGET: Final = 1.7


def stored(shards: int, gigabytes: float) -> tuple[float, float]:
    """Return megabytes per second of both producers, and processor seconds of the broker per gigabyte."""
    with bucket() as (folder, url, _):
        options = "--bucket", url, "--processes", str(shards)
        with BrokerProcess(folder / "one", *options, wires=[WIRE]) as broker:
            places = _places(url, shards)
            host, port = broker.addresses["polywire"]
            for topic in TOPICS:
                bulk.connect(f"{host}:{port}").create_topic(topic, 1)
            before = _used(broker.pid)
            with ProcessPoolExecutor(SHARDS, get_context("spawn")) as producers:
                list(producers.map(abs, range(SHARDS)))  # starts the processes
                begun = time.monotonic()
                work = partial(_produce, gigabytes=gigabytes / SHARDS)
                sent = sum(producers.map(work, places, TOPICS))
                passed = time.monotonic() - begun
            used = _used(broker.pid) - before
    return sent / passed / 1e6, used / (sent / 1e9)


def _used(pid: int) -> float:
    """Return the processor seconds of a broker and its processes."""
    return sum(processor_seconds(one) for one in (pid, *descendants(pid)))


def _places(url: str, shards: int) -> list[tuple[str, int]]:
    """Return the address of each topic's leading process, once all brokers agree."""
    nodes = Nodes(open_bucket(url))
    while True:
        found = {node.shard: node.addresses[WIRE] for node in nodes.read() if node.start > 0 and WIRE in node.addresses}
        if len(found) == shards:
            return [found[shard % shards] for shard in range(SHARDS)]
        time.sleep(POLL_S)


def _produce(place: tuple[str, int], topic: str, *, gigabytes: float) -> int:
    """Return the acknowledged bytes."""
    batch = value_batch(BATCH_RECORDS, RECORD_BYTES)
    batches = int(gigabytes * 1e9 / len(batch))
    produce_rate(*place, topic, batch=batch, batch_records=BATCH_RECORDS, batches=batches)
    return batches * len(batch)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bucket_shards", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    pairs = [(stored(1, given.gigabytes), stored(SHARDS, given.gigabytes)) for _ in range(given.rounds)]
    for shards, column in zip((1, SHARDS), zip(*pairs, strict=True), strict=True):
        rate, used = (statistics.median(values) for values in zip(*column, strict=True))
        console.print(f"{shards} processes: {rate:.0f} MB/s, {used:.2f} processor seconds of theirs per GB")
    ratios = [two[0] / one[0] for one, two in pairs]
    console.print(
        f"ratio, pair by pair: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), target {TARGET}"
    )


if __name__ == "__main__":
    main()
