"""Processor time of a broker by thread, at full produce speed: how much of it moves records from the journal to segments.

Run: ``python -m benchmarks.sealing [--records N] [--rounds N] [--trees DIRECTORY ...]``

Batches of 1,000 records of 100 B, eight unconfirmed, over ``kafka`` and ``polywire``, to 1 and to 100 partitions. The
sealing share is that of the threads that copy, write and delete segments. With several working trees, their brokers
take turns, so that a change can be compared with the tree before it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks import polywire_load
from benchmarks.measure import console
from benchmarks.peers.kafka import KafkaWire
from benchmarks.peers.ours import Polywire
from benchmarks.peers.peer import RECEIVE_BYTES, Server
from benchmarks.peers.workloads import BATCH, VALUE, WINDOW
from benchmarks.threads import ENDED, LOOP, Times, thread_times
from polywire.client import bulk
from polywire.testing.process import BrokerProcess

WIRES: Final = ("kafka", "polywire")
PARTITIONS: Final = (1, 100)
WARMING: Final = 4_000_000  # records sent before the clock starts, repeated until the cache of recent segments is full
WARM_BYTES: Final = 508 * 1024 * 1024  # by which a broker's memory grows until that cache is full (``cache_mib``)
WARMINGS_MAX: Final = 20
GB: Final = 1e9
RECORD_BYTES: Final = 116  # as stored
GROUPS: Final = (("seal", ("seal",)), ("write", ("write", ENDED)), ("delete", ("delete",)), ("sync", ("sync",)))


def requests_of(wire: str, topic: str, partitions: int) -> Sequence[bytes]:
    """Return one produce request for each partition."""
    if wire == "kafka":
        return [KafkaWire().request(topic, [VALUE] * BATCH, partition) for partition in range(partitions)]
    batch = polywire_load.value_batch(BATCH, len(VALUE))
    return [polywire_load.produce_frame(topic, partition, batch) for partition in range(partitions)]


def send(speaker: KafkaWire | Polywire, server: Server, topic: str, requests: Sequence[bytes], records: int) -> None:
    """Send that many records in turns to the partitions, and wait for all confirmations."""
    confirmed: Callable[[memoryview], int] = speaker.confirmations()
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    sent = done = 0
    with closing(speaker.producer(server.address, topic)) as connection:
        while done < records:
            while sent < records and sent - done <= (WINDOW - 1) * BATCH:
                connection.sendall(requests[sent // BATCH % len(requests)])
                sent += BATCH
            done += confirmed(buffer[: connection.recv_into(buffer)])


def used(tree: Path, wire: str, partitions: int, records: int) -> tuple[Times, float]:
    """Return the processor seconds by thread of a fresh broker of a tree for that many records, and records/s."""
    speaker = KafkaWire() if wire == "kafka" else Polywire()
    place = tempfile.TemporaryDirectory(prefix="polywire-bench-", dir=os.environ.get("POLYWIRE_BENCH_DIR"))
    wires = tuple(dict.fromkeys((wire, "polywire")))
    with (
        place as path,
        BrokerProcess(
            Path(path) / "data",
            wires=wires,
            module="benchmarks.threads",
            environment={"PYTHONPATH": f"{tree.resolve()}/src"},
        ) as broker,
    ):
        with closing(bulk.connect(broker.url())) as connection:
            connection.create_topic("t", partitions)
        server = Server(broker.addresses[wire], broker.pid)
        requests = requests_of(wire, "t", partitions)
        empty_bytes = broker.memory_bytes
        for _ in range(WARMINGS_MAX):
            send(speaker, server, "t", requests, WARMING)
            if broker.memory_bytes - empty_bytes > WARM_BYTES:
                break
        before, begun = thread_times(broker.pid), time.perf_counter()
        send(speaker, server, "t", requests, records)
        took = time.perf_counter() - begun
        after = thread_times(broker.pid)
    after.subtract(before)
    return after, records / took


def row(times: Times, records: int) -> dict[str, float]:
    """Return processor seconds per GB stored: of the loop and of each group of threads; and the sealing share."""
    gigabytes = records * RECORD_BYTES / GB
    found: dict[str, float] = {}
    for name, threads in ((LOOP, (LOOP,)), *GROUPS):
        for kind in ("user", "system"):
            found[f"{name} {kind}"] = sum(times[thread, kind] for thread in threads) / gigabytes
    counted = {LOOP, *(thread for _, threads in GROUPS for thread in threads)}
    found["other"] = sum(value for (thread, _), value in times.items() if thread not in counted) / gigabytes
    found["all"] = sum(times.values()) / gigabytes
    parts = sum(value for name, value in found.items() if name.split()[0] in ("seal", "write", "delete"))
    found["sealing, %"] = 100 * parts / found["all"]
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=30_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wires", nargs="*", default=WIRES)
    parser.add_argument("--partitions", nargs="*", type=int, default=PARTITIONS)
    parser.add_argument("--trees", nargs="*", type=Path, default=[Path.cwd()])
    given = parser.parse_args()
    for wire, partitions in product(given.wires, given.partitions):
        rows: dict[Path, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for _, tree in product(range(given.rounds), given.trees):
            times, rate = used(tree, wire, partitions, given.records)
            for name, value in (row(times, given.records) | {"million records/s": rate / 1e6}).items():
                rows[tree][name].append(value)
        for tree, columns in rows.items():
            show(f"{wire}, {partitions} partitions, {tree.name}", columns)


def show(title: str, columns: Mapping[str, Sequence[float]]) -> None:
    """Print the median of each column, and all its values."""
    console.print(f"{title}: processor seconds per GB", highlight=False)
    for name, values in columns.items():
        spread = " ".join(f"{value:.3f}" for value in values)
        console.print(f"  {name:18} {statistics.median(values):7.3f}  ({spread})", highlight=False)


if __name__ == "__main__":
    main()
