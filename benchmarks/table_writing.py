"""Writing topics as tables: freshness at a steady rate, cost of a commit, rows per core-second, and the effect on producers.

Run: ``python -m benchmarks.table_writing [--seconds N] [--rate N]``

* Freshness is the time from the append of a record to the commit that has it. It is computed from the Delta log, for all
  rows, as if the rows of a file were appended evenly.
* The processor time of a commit is measured on a table in memory with that many versions.
* Producers run in pairs, with and without a table, in turns.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks import polywire_load
from benchmarks.measure import console
from polywire.client import bulk
from polywire.client.bulk import BulkConnection
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.store.url import open_bucket
from polywire.table_columns import INFER
from polywire.tables.delta_log import LOG, DataFile, DeltaLog, PartitionKey, TableState, offset_action
from polywire.tables.parquet import Bounds, Measure, time_of
from polywire.tables.writer import TopicTable
from polywire.testing.memory_objects import MemoryObjects
from polywire.testing.process import BrokerProcess

BATCH_RECORDS: Final = 1000
VALUE_BYTES: Final = 100
ROUNDS: Final = 5
COMMITS: Final = 10_000
PRODUCED_BATCHES: Final = 6_000
BACKLOG_BATCHES: Final = 5_000
PAUSE_S: Final = 0.002
AT: Final = "2026-11-27T03:00:00Z"
LISTED: Final = "id long, customer string, total double, paid boolean, at timestamp"
POINTS: Final = 200  # of a file's rows, to compute percentiles


@contextmanager
def fresh(*options: str) -> Iterator[tuple[BrokerProcess, BulkConnection]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        BrokerProcess(Path(folder) / "data", *options, wires=["polywire"]) as broker,
    ):
        yield broker, bulk.connect(broker.url())


def freshness_s(seconds: int, rate: int, bucket: str | None) -> list[float]:
    """Return the freshness of rows that were produced at a steady rate, as 99 percentiles."""
    options = ["--table", "delta", "--table-freshness-s", "1", *(("--bucket", bucket) if bucket else ())]
    with fresh(*options) as (_, connection):
        connection.create_topic("orders", 3)
        batch, begun, sent = polywire_load.value_batch(BATCH_RECORDS, VALUE_BYTES), time.monotonic(), 0
        while (passed := time.monotonic() - begun) < seconds:
            due = int(passed * rate / BATCH_RECORDS) - sent  # several batches if the last request took long
            if due:
                connection.produce("orders", sent % 3, [batch] * due)
                sent += due
            else:
                time.sleep(PAUSE_S)
        time.sleep(3)
        objects = open_bucket(connection.describe("orders").table)
        found = [
            age for name in objects.list(LOG) if name.endswith(".json") for age in _ages(objects.read(name).content)
        ]
    return statistics.quantiles(found, n=100)


def _ages(commit: bytes) -> Iterator[float]:
    actions = [json.loads(line) for line in commit.splitlines()]
    committed_us = next(action["commitInfo"]["timestamp"] for action in actions if "commitInfo" in action) * 1000
    for action in actions:
        if "add" in action and action["add"]["dataChange"]:
            stats = json.loads(action["add"]["stats"])
            first, last = time_of(stats["minValues"]["timestamp"]), time_of(stats["maxValues"]["timestamp"])
            for point in range(POINTS):
                yield (committed_us - (first + (last - first) * point / POINTS)) / 1e6


def commit_ms() -> float:
    """Return the processor time of a commit after ``COMMITS`` commits, with 16 files, in milliseconds."""
    log, state = DeltaLog(MemoryObjects()), TableState()
    key, used = PartitionKey(b"0" * 16, 0, 1), 0.0
    for number in range(COMMITS):
        bounds = {
            "offset": Bounds(number, number),
            "timestamp": Bounds(number, number, Measure.TIME),
            "partition": Bounds(0, 0),
        }
        file = DataFile(f"data/{number:020}.parquet", 1000, number, 1, bounds)
        removed = [old.remove(0, data_change=False) for old in list(state.files.values())[:-16]]
        begun = time.process_time()
        log.commit(state, [offset_action(key, number), file.add(data_change=True), *removed], operation="WRITE")
        if number >= COMMITS - 100:
            used += time.process_time() - begun
        state.removed.clear()
    return used * 10


def rows_per_core_s(columns: str = "") -> float:
    """Return the rows per second of processor time that the writer writes of a backlog, of JSON with typed columns."""
    with fresh() as (broker, connection):
        host, port = broker.addresses["polywire"]
        batch = _json_batch() if columns else polywire_load.value_batch(BATCH_RECORDS, VALUE_BYTES)
        connection.create_topic("orders", 3)
        polywire_load.produce_rate(
            host, port, "orders", batch=batch, batch_records=BATCH_RECORDS, batches=BACKLOG_BATCHES, partitions=3
        )
        table = TopicTable("orders", MemoryObjects(), connection, columns=columns)
        begun = time.process_time()
        while table.append().behind:
            pass
        return table.state.row_count / (time.process_time() - begun)


def _json_batch() -> bytes:
    """Return a batch of orders with five fields, each about as large as the other values."""
    rows = [
        {"id": number, "customer": f"customer {number % 97}", "total": number * 1.25, "paid": number % 2 == 0, "at": AT}
        for number in range(BATCH_RECORDS)
    ]
    return bytes(from_records([Record(json.dumps(row).encode()) for row in rows]))


def produce_ratio(freshness_s: int) -> list[float]:
    """Return the ratios of produce rates with and without a table, pair by pair."""
    batch = polywire_load.value_batch(BATCH_RECORDS, VALUE_BYTES)
    with fresh("--table-freshness-s", str(freshness_s)) as (broker, connection):
        host, port = broker.addresses["polywire"]
        connection.create_topic("plain", 3)
        ratios = []
        for number in range(ROUNDS + 1):
            connection.create_topic(f"tabled{number}", 3, {"table": "delta"})
            rates = [
                polywire_load.produce_rate(
                    host, port, topic, batch=batch, batch_records=BATCH_RECORDS, batches=PRODUCED_BATCHES, partitions=3
                )
                for topic in ("plain", f"tabled{number}")
            ]
            connection.delete_topic(f"tabled{number}")
            ratios.append(rates[1] / rates[0])
        return ratios[1:]


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m benchmarks.table_writing", description=__doc__)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--rate", type=int, default=100_000, help="records per second, for freshness")
    parser.add_argument("--bucket", help="URL of a bucket, for freshness")
    given = parser.parse_args()
    at = freshness_s(given.seconds, given.rate, given.bucket)
    console.print(
        f"freshness with table_freshness_s=1 at {given.rate:,} records/s: p50 {at[49]:.2f} s, p99 {at[98]:.2f} s"
    )
    console.print(f"commit {COMMITS:,}: {commit_ms():.2f} ms of processor time")
    console.print(f"rows per core-second: {rows_per_core_s():,.0f}")
    for columns in (LISTED, INFER):
        console.print(
            f"rows of five fields per core-second, table_columns={columns!r}: {rows_per_core_s(columns):,.0f}"
        )
    for freshness in (60, 1):
        ratios = produce_ratio(freshness)
        console.print(
            f"produce rate with a table, freshness {freshness} s, to that without: median {statistics.median(ratios):.2f}, "
            f"lowest {min(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
