"""``python -m benchmarks.tables``: read a topic as a table, next to the same files as plain Parquet and next to its log.

Spark, DuckDB and Polars each read every column, and run a query that needs two columns of few rows. Ways take turns in
each round, and the first round is a warm-up. A ratio is plain Parquet's time divided by that of a way, so more is better.
Processor time is that of this process, Spark's processes and the broker. It depends less on other load of the machine.
"""

from __future__ import annotations

import statistics
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb
import polars
from pyspark.sql import DataFrame
from rich.table import Table

import polywire
from benchmarks.measure import console
from benchmarks.spark_load import BATCH_RECORDS, PARTITIONS, VALUE_BYTES, Bench, bench
from polywire.spark import table as spark_table
from polywire.store.url import open_bucket
from polywire.tables.delta_log import NEW
from polywire.tables.reading import Snapshot, snapshot
from polywire.tables.writer import TopicTable

RECORDS = 5_000_000
TAIL_SHARE = 100  # one in so many records is only in the log
ROUNDS = 5
AGES = 30
APPEND_S = 0.005  # between two records while ages are measured
MEASURABLE_S = 0.01  # processor time is counted in ticks of this length
PLAIN = "plain Parquet"
WHERE = 'partition = 1 AND "offset" >= {0} AND "offset" < {1}'
Ways = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Topic:
    """A topic whose table has all its records, and one with the same table and newer records."""

    made: Bench
    complete: str
    growing: str
    records: int

    @property
    def found(self) -> Snapshot:
        return snapshot(self.made.connection, self.complete)

    @property
    def some_offsets(self) -> tuple[int, int]:
        """Offsets of the rows that the query with a condition reads: a hundredth of a partition."""
        each = self.records // PARTITIONS
        return each // 2, each // 2 + each // 100


def fill(made: Bench, topic: str, records: int) -> None:
    """Append records of 100 bytes to a topic with a table."""
    if topic not in {known.name for known in made.connection.topics()}:
        made.connection.create_topic(topic, PARTITIONS, {"table": "delta", "table_freshness_s": 86_400})
        while snapshot(made.connection, topic).version == NEW:  # then the broker does not write the tail
            time.sleep(0.1)
    made.append(topic, records)


def write_table(made: Bench, topic: str) -> None:
    """Write the table of a topic up to the end of its log, as the broker's worker process does."""
    url = made.connection.describe(topic).table
    table = TopicTable(topic, open_bucket(url), made.connection)
    while table.append().behind:
        pass


def filled(made: Bench, records: int) -> Topic:
    """Create both topics."""
    for name in ("complete", "growing"):
        fill(made, name, records)
        write_table(made, name)
    fill(made, "growing", max(BATCH_RECORDS * PARTITIONS, records // TAIL_SHARE))
    return Topic(made, "complete", "growing", records)


def _spark_ways(topic: Topic, action: Callable[[DataFrame], object]) -> Ways:
    made = topic.made
    frames: Mapping[str, Callable[[], DataFrame]] = {
        PLAIN: lambda: made.spark.read.parquet(*topic.found.paths),
        "spark.table": lambda: spark_table(made.spark, topic.complete, address=made.address),
        "spark.table with a tail": lambda: spark_table(made.spark, topic.growing, address=made.address),
        "log: format('polywire')": lambda: made.topic(topic.complete),
    }
    return {name: lambda frame=frame: action(frame()) for name, frame in frames.items()}  # type: ignore[misc]


def _scanned(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _duckdb_ways(topic: Topic, statement: str) -> Ways:
    """Return ways to run a statement, in which ``{}`` stands for the rows."""
    made = topic.made

    def plain() -> object:
        return duckdb.connect().execute(statement.format(f"read_parquet({topic.found.paths})")).fetchall()

    def log() -> object:
        engine = duckdb.connect()
        polywire.to_duckdb(engine, made.address, topic.complete, columns=["partition", "offset", "key", "value"])
        return engine.execute(statement.format(topic.complete)).fetchall()

    return {
        PLAIN: plain,
        "polywire.sql": lambda: polywire.sql(statement.format(topic.complete), address=made.address),
        "polywire.sql with a tail": lambda: polywire.sql(statement.format(topic.growing), address=made.address),
        "log: to_duckdb": log,
    }


def _polars_ways(topic: Topic, action: Callable[[Any], Any]) -> Ways:
    made = topic.made
    names = ["key", "value", "partition", "offset", "timestamp"]
    return {
        PLAIN: lambda: action(polars.scan_parquet(topic.found.paths).select(names)).collect(),
        "scan_polars(table=True)": lambda: action(
            polywire.scan_polars(made.address, topic.complete, table=True)
        ).collect(),
        "scan_polars(table=True) with a tail": lambda: action(
            polywire.scan_polars(made.address, topic.growing, table=True)
        ).collect(),
        "log: scan_polars": lambda: action(polywire.scan_polars(made.address, topic.complete)).collect(),
    }


def workloads(topic: Topic) -> Mapping[str, Ways]:
    """Return the ways of each workload."""
    first, end = topic.some_offsets
    where = WHERE.format(first, end)
    every = 'SELECT count(*), sum(partition), sum("offset"), sum(octet_length(key)), sum(octet_length(value)) FROM {}'
    in_range = (polars.col("partition") == 1) & polars.col("offset").is_between(first, end, closed="left")
    sizes = [polars.col("partition", "offset").sum(), polars.col("key", "value").bin.size().sum()]
    return {
        "Spark, every column": _spark_ways(topic, _scanned),
        "Spark, count": _spark_ways(topic, DataFrame.count),
        "Spark, two columns of few rows": _spark_ways(
            topic, lambda frame: frame.where(where.replace('"', "`")).selectExpr("sum(length(value))").collect()
        ),
        "DuckDB, every column": _duckdb_ways(topic, every),
        "DuckDB, two columns of few rows": _duckdb_ways(
            topic, f"SELECT sum(octet_length(value)) FROM {{}} WHERE {where}"
        ),
        "Polars, every column": _polars_ways(topic, lambda frame: frame.select(sizes)),
        "Polars, two columns of few rows": _polars_ways(
            topic, lambda frame: frame.filter(in_range).select(polars.col("value").bin.size().sum())
        ),
    }


@dataclass(frozen=True)
class Cost:
    """Medians of all rounds of one way, in seconds."""

    elapsed_s: float
    processor_s: float


def measured(made: Bench, ways: Ways, rounds: int) -> dict[str, Cost]:
    """Return the cost of each way. They take turns, and a first round is the warm-up."""
    elapsed: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            begun, used = time.perf_counter(), _processor_s(made)
            work()
            if number:
                elapsed[name].append(time.perf_counter() - begun)
                processor[name].append(_processor_s(made) - used)
    return {name: Cost(statistics.median(elapsed[name]), statistics.median(processor[name])) for name in ways}


def ages_s(made: Bench, topic: str, count: int) -> list[float]:
    """Return how old the newest row of ``spark.table`` was when it was called, in seconds, while records are appended."""
    appended, ending = threading.Event(), threading.Event()

    def append() -> None:
        with polywire.connect_sync(made.address) as client, client.producer() as producer:
            while not ending.wait(APPEND_S):
                producer.send(topic, b"v")
                producer.flush()
                appended.set()

    thread = threading.Thread(target=append)
    thread.start()
    ages = []
    try:
        appended.wait()
        for _ in range(count):
            time.sleep(2 * APPEND_S)
            begun = time.time()
            newest = spark_table(made.spark, topic, address=made.address).selectExpr("unix_micros(max(timestamp))")
            ages.append(begun - newest.collect()[0][0] / 1e6)
    finally:
        ending.set()
        thread.join()
    return sorted(ages)


def _processor_s(made: Bench) -> float:
    return time.process_time() + sum(made.seconds().values())


def main() -> None:
    """Measure and print all ratios."""
    parser = ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--records", type=int, default=RECORDS, help="records of 100 bytes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    report = Table(title=f"{chosen.records:,} records of {VALUE_BYTES} bytes in {PARTITIONS} partitions")
    for name in ("workload", "way", "seconds", "processor seconds", "ratio", "ratio of processor time"):
        report.add_column(name, justify="left" if name in ("workload", "way") else "right")
    with bench() as made:
        topic = filled(made, chosen.records)
        for workload, ways in workloads(topic).items():
            found = measured(made, ways, chosen.rounds)
            for way, cost in found.items():
                ratios = (
                    found[PLAIN].elapsed_s / cost.elapsed_s,
                    found[PLAIN].processor_s / max(cost.processor_s, MEASURABLE_S),
                )
                figures = (f"{cost.elapsed_s:.3f}", f"{cost.processor_s:.3f}", *(f"{ratio:.2f}" for ratio in ratios))
                report.add_row(workload, way, *figures)
        ages = ages_s(made, topic.growing, AGES)
    console.print(report)
    console.print(
        f"age of the newest row of spark.table: median {statistics.median(ages):.3f} s, longest {ages[-1]:.3f} s"
    )


if __name__ == "__main__":
    main()
