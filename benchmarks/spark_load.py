"""Spark on two cores over a topic, beside Spark over the same records as Parquet files: its own fastest path.

Each round is a whole action in a warm session; the first action of a fresh Java machine is the warm-up and does not count. Ratios are
rates over the topic divided by rates over the Parquet files.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from benchmarks import polywire_load
from benchmarks.measure import Figure, figure, fresh_broker, processor_seconds
from polywire.client import bulk
from polywire.client.bulk import BulkConnection
from polywire.spark import session

BATCH_RECORDS = 1_000
READ_RECORDS = 10_000_000
WRITE_RECORDS = 4_000_000  # what is staged stays below the broker's limit of 1 GiB
PARTITIONS = 4
VALUE_BYTES = 100


@dataclass(frozen=True)
class Bench:
    """A session, a broker of its own and a place for files; ``address`` is that of the polywire wire, ``pid`` the broker's."""

    spark: SparkSession
    address: str
    pid: int
    place: Path

    @property
    def connection(self) -> BulkConnection:
        return bulk.connect(self.address)

    def fill(self, topic: str, records: int) -> None:
        """Make a topic of values of 100 bytes in stored batches of 1,000."""
        self.connection.create_topic(topic, PARTITIONS)
        host, port = bulk.split_address(self.address)
        polywire_load.produce_rate(
            host,
            port,
            topic,
            batch=polywire_load.value_batch(BATCH_RECORDS, VALUE_BYTES),
            batch_records=BATCH_RECORDS,
            batches=records // BATCH_RECORDS,
            partitions=PARTITIONS,
        )

    def topic(self, name: str, schema: str | None = None, **options: str) -> DataFrame:
        """A topic as a batch read."""
        reader = self.spark.read.format("polywire").options(address=self.address, subscribe=name, **options)
        return (reader if schema is None else reader.schema(schema)).load()


@contextmanager
def bench() -> Iterator[Bench]:
    """All that a workload needs, gone afterwards."""
    spark = session("benchmarks", master="local[2]")
    try:
        with fresh_broker() as broker, tempfile.TemporaryDirectory(prefix="polywire-bench-") as place:
            host, port = broker.addresses["polywire"]
            yield Bench(spark, f"{host}:{port}", broker.pid, Path(place))
    finally:
        spark.stop()


def read_figures(rounds: int) -> list[Figure]:
    """Rows per second of batch reads: counted, scanned, written as Parquet."""
    with bench() as made:
        made.fill("scan", READ_RECORDS)
        frame = made.topic("scan")
        frame.write.parquet(f"{made.place}/parquet")
        parquet = made.spark.read.parquet(f"{made.place}/parquet")
        kinds: list[tuple[str, Callable[[DataFrame], Callable[[], float]], float | None]] = [
            ("count", _counted, 3e6),
            ("every column", _scanned, 1e6),
            ("to Parquet", lambda read: _written(read, made.place), 1e6),
        ]
        found = [
            figure(
                "Spark batch read, count of offsets alone",
                "rows/s",
                _counted(made.topic("scan", "offset bigint")),
                rounds=rounds,
                remark="schema 'offset bigint': no value moves",
            )
        ]
        for name, work, aim in kinds:
            ours = figure(f"Spark batch read, {name}", "rows/s", work(frame), aim=aim, rounds=rounds)
            theirs = figure(f"Spark reading the same as Parquet, {name}", "rows/s", work(parquet), rounds=rounds)
            found += [ours, theirs, ratio(f"Spark batch read, {name}, as a ratio of Parquet", ours, theirs)]
        return found


def local_figures(rounds: int) -> list[Figure]:
    """Batch reads of the same sealed records by way of files and of the wire, and what each takes of the broker."""
    with bench() as made:
        made.fill("scan", READ_RECORDS)
        found = []
        for name, kind in (("count", _counted), ("every column", _scanned)):
            ways = {"auto": "from files", "off": "over the wire"}
            for way, said in ways.items():
                work = kind(made.topic("scan", localSegments=way))
                found += [
                    figure(f"Spark batch read, {name}, {said}", "rows/s", work, rounds=rounds),
                    figure(
                        f"broker's share of 10 million rows, {name}, {said}",
                        "processor s",
                        _broker_seconds(made, work),
                        more_is_better=False,
                        rounds=rounds,
                    ),
                ]
        return found


def write_figures(rounds: int) -> list[Figure]:
    """Rows per second of batch writes into a topic, exactly once, beside writing Parquet."""
    with bench() as made:
        made.fill("source", WRITE_RECORDS)
        made.topic("source").selectExpr("value", "cast(offset as string) as key").write.option(
            "compression", "lz4"
        ).parquet(f"{made.place}/rows")
        rows = made.spark.read.parquet(f"{made.place}/rows")
        names = (f"written-{number}" for number in count())

        def sink(frame: DataFrame, guarantee: str) -> Callable[[], float]:
            def one_round() -> float:
                topic = next(names)
                made.connection.create_topic(topic, PARTITIONS)
                writer = frame.write.format("polywire").mode("append")
                writer = writer.options(address=made.address, topic=topic, exactlyOnce=guarantee)
                begun = time.perf_counter()
                writer.save()
                took = time.perf_counter() - begun
                stored = sum(part.next_offset for part in made.connection.bounds([topic]))
                if stored != WRITE_RECORDS:
                    raise AssertionError(f"a wrong count stored={stored} expected={WRITE_RECORDS}")
                made.connection.delete_topic(topic)
                return WRITE_RECORDS / took

            return one_round

        values = rows.select("value")
        ours = figure("Spark sink, values, exactly once", "rows/s", sink(values, "true"), aim=1e6, rounds=rounds)
        theirs = figure(
            "Spark writing the same as Parquet", "rows/s", _written(values, made.place, WRITE_RECORDS), rounds=rounds
        )
        return [
            ours,
            figure("Spark sink, keys and values, exactly once", "rows/s", sink(rows, "true"), aim=1e6, rounds=rounds),
            figure("Spark sink, values, at least once", "rows/s", sink(values, "false"), rounds=rounds),
            theirs,
            ratio("Spark sink as a ratio of Parquet", ours, theirs),
        ]


def ratio(name: str, ours: Figure, theirs: Figure) -> Figure:
    """One median as a part of another."""
    return Figure(name, "x", ours.median / theirs.median, ours.low / theirs.high, ours.high / theirs.low, None, True)


def _broker_seconds(made: Bench, work: Callable[[], float]) -> Callable[[], float]:
    def one_round() -> float:
        before = processor_seconds(made.pid)
        work()
        return processor_seconds(made.pid) - before

    return one_round


def _scanned(frame: DataFrame) -> Callable[[], float]:
    return _timed(lambda: frame.write.format("noop").mode("overwrite").save(), READ_RECORDS)


def _counted(frame: DataFrame) -> Callable[[], float]:
    def work() -> None:
        found = frame.count()
        if found != READ_RECORDS:
            raise AssertionError(f"a wrong count found={found} expected={READ_RECORDS}")

    return _timed(work, READ_RECORDS)


def _written(frame: DataFrame, place: Path, records: int = READ_RECORDS) -> Callable[[], float]:
    return _timed(lambda: frame.write.mode("overwrite").parquet(f"{place}/written"), records)


def _timed(work: Callable[[], None], records: int) -> Callable[[], float]:
    def one_round() -> float:
        begun = time.perf_counter()
        work()
        return records / (time.perf_counter() - begun)

    return one_round
