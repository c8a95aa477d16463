"""Spark on two cores over a topic, next to Spark over the same records as Parquet files: its own fastest path.

Each round is a whole action in a warm session; the first action of a fresh JVM is the warm-up and does not count.
Ratios are rates over the topic divided by rates over the Parquet files. Each rate has the processor time of its
records: of Spark's JVM, of its Python workers, and of the broker.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from benchmarks import polywire_load
from benchmarks.measure import Figure, descendants, figure_of, fresh_broker, processor_seconds
from polywire.client import bulk
from polywire.client.address import split_address
from polywire.client.bulk import BulkConnection
from polywire.spark import session

BATCH_RECORDS = 1_000
READ_RECORDS = 10_000_000
WRITE_RECORDS = 4_000_000  # staged batches stay below the broker's limit of 1 GiB
PARTITIONS = 4
VALUE_BYTES = 100


@dataclass(frozen=True)
class Bench:
    """A session, a separate broker and a folder for files; ``address`` is that of `polywire`, ``pid`` the broker's."""

    spark: SparkSession
    address: str
    pid: int
    place: Path

    @property
    def connection(self) -> BulkConnection:
        return bulk.connect(self.address)

    def fill(self, topic: str, records: int) -> None:
        """Create a topic of values of 100 bytes in stored batches of 1,000."""
        self.connection.create_topic(topic, PARTITIONS)
        self.append(topic, records)

    def append(self, topic: str, records: int) -> None:
        """Append values of 100 bytes in stored batches of 1,000."""
        host, port = split_address(self.address)
        polywire_load.produce_rate(
            host,
            port,
            topic,
            batch=polywire_load.value_batch(BATCH_RECORDS, VALUE_BYTES),
            batch_records=BATCH_RECORDS,
            batches=records // BATCH_RECORDS,
            partitions=PARTITIONS,
        )

    def figure(
        self,
        name: str,
        work: Callable[[], float],
        *,
        rounds: int,
        records: int,
        aim: float | None = None,
        remark: str = "",
    ) -> Figure:
        """Return rows per second of an action on that many records, with the processor time in its remark."""
        rates: list[float] = []
        shares: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            before = self.seconds()
            rate = work()
            if number:
                rates.append(rate)
                for process, seconds in self.seconds().items():
                    shares.setdefault(process, []).append(seconds - before.get(process, 0.0))
        reported = ", ".join(f"{process} {statistics.median(share):.2g}" for process, share in shares.items())
        remark = "; ".join(filter(None, (remark, f"processor s for {records / 1e6:.0f} million: {reported}")))
        return figure_of(name, "rows/s", rates, aim=aim, remark=remark)

    def seconds(self) -> dict[str, float]:
        """Return the processor time so far of all processes involved."""
        found = {"Java": 0.0, "Python workers": 0.0, "broker": processor_seconds(self.pid)}
        for pid, name in descendants(os.getpid()).items():
            if name != "java":
                continue
            found["Java"] += processor_seconds(pid)
            for worker in descendants(pid):
                with suppress(FileNotFoundError):  # it has ended meanwhile, and its time is its parent's
                    found["Python workers"] += processor_seconds(worker, with_children=True)
        return found

    def topic(self, name: str, schema: str | None = None, **options: str) -> DataFrame:
        """Return a topic as a batch read."""
        reader = self.spark.read.format("polywire").options(address=self.address, subscribe=name, **options)
        return (reader if schema is None else reader.schema(schema)).load()


@contextmanager
def bench() -> Iterator[Bench]:
    """Provide all that a workload needs, and delete it afterwards."""
    spark = session("benchmarks", master="local[2]")
    try:
        with fresh_broker() as broker, tempfile.TemporaryDirectory(prefix="polywire-bench-") as place:
            host, port = broker.addresses["polywire"]
            yield Bench(spark, f"{host}:{port}", broker.pid, Path(place))
    finally:
        spark.stop()


def read_figures(rounds: int) -> list[Figure]:
    """Measure rows per second of batch reads: counted, scanned, written as Parquet."""
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
            made.figure(
                "Spark batch read, count of offsets alone",
                _counted(made.topic("scan", "offset bigint")),
                rounds=rounds,
                records=READ_RECORDS,
                remark="schema 'offset bigint': no value moves",
            )
        ]
        for name, work, aim in kinds:
            of_parquet = f"Spark reading the same as Parquet, {name}"
            ours = made.figure(f"Spark batch read, {name}", work(frame), aim=aim, rounds=rounds, records=READ_RECORDS)
            theirs = made.figure(of_parquet, work(parquet), rounds=rounds, records=READ_RECORDS)
            found += [ours, theirs, ratio(f"Spark batch read, {name}, as a ratio of Parquet", ours, theirs)]
        return found


def local_figures(rounds: int) -> list[Figure]:
    """Measure batch reads of the same sealed records from files and from the broker, in turn, and the broker's cost."""
    with bench() as made:
        made.fill("scan", READ_RECORDS)
        found = []
        for name, kind in (("count", _counted), ("every column", _scanned)):
            ways = {"from files": "auto", "over the wire": "off"}
            works = {said: kind(made.topic("scan", localSegments=way)) for said, way in ways.items()}
            rates, shares = _in_turn(works, made.pid, rounds)
            for said in ways:
                found.append(figure_of(f"Spark batch read, {name}, {said}", "rows/s", rates[said]))
                of_broker = f"broker's part in 10 million rows, {name}, {said}"
                found.append(figure_of(of_broker, "processor s", shares[said], more_is_better=False))
        return found


def _in_turn(
    works: Mapping[str, Callable[[], float]], pid: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return what each work returned, and the processor seconds of a process; a first round is the warm-up."""
    values: dict[str, list[float]] = {name: [] for name in works}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            before = processor_seconds(pid)
            value = work()
            if number:
                values[name].append(value)
                seconds[name].append(processor_seconds(pid) - before)
    return values, seconds


def write_figures(rounds: int) -> list[Figure]:
    """Measure rows per second of exactly-once batch writes into a topic, next to writing Parquet."""
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

        def measured(name: str, work: Callable[[], float], aim: float | None = None) -> Figure:
            return made.figure(name, work, aim=aim, rounds=rounds, records=WRITE_RECORDS)

        values = rows.select("value")
        ours = measured("Spark sink, values, exactly once", sink(values, "true"), 1e6)
        theirs = measured("Spark writing the same as Parquet", _written(values, made.place, WRITE_RECORDS))
        return [
            ours,
            measured("Spark sink, keys and values, exactly once", sink(rows, "true"), 1e6),
            measured("Spark sink, values, at least once", sink(values, "false")),
            theirs,
            ratio("Spark sink as a ratio of Parquet", ours, theirs),
        ]


def ratio(name: str, ours: Figure, theirs: Figure) -> Figure:
    """Return one median as a share of another."""
    return Figure(name, "x", ours.median / theirs.median, ours.low / theirs.high, ours.high / theirs.low, None, True)


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
