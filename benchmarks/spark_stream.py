"""Spark's streaming queries over a topic: fastest landing, a nearly empty micro-batch, and latency to a table."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks import polywire_load
from benchmarks.measure import Figure, figure
from benchmarks.spark_load import Bench, bench
from polywire.spark.pipelines.land import land
from polywire.spark.progress import BatchProgress

LAND_RECORDS = 6_000_000
LAND_BATCH_RECORDS = 1_000_000
LONE_BATCHES = 30
STEADY_RATE = 20_000  # records per second
STEADY_SECONDS = 15.0
STEADY_WARM_UP_S = 5.0
STEADY_BATCH = 100
PROGRESS_SECONDS_MAX = 60.0


def stream_figures(rounds: int) -> list[Figure]:
    """Measure streaming queries."""
    with bench() as made:
        made.fill("land", LAND_RECORDS)
        numbers = count()
        return [
            made.figure(
                "Spark streaming land into Parquet, sustained",
                lambda: _land_rate(made, made.place / f"land-{next(numbers)}"),
                aim=500_000,
                rounds=rounds,
                records=LAND_RECORDS,
                remark="from the end of the first micro-batch to the end of the last",
            ),
            figure(
                "Spark micro-batch of one record, source to noop",
                "ms",
                lambda: _lone_batch_ms(made, f"lone-{next(numbers)}"),
                aim=100,
                more_is_better=False,
                rounds=rounds,
                remark="median triggerExecution of a round",
            ),
            figure(
                "Spark micro-batch of one record, topic to topic exactly once",
                "ms",
                lambda: _lone_batch_ms(made, f"lone-{next(numbers)}", into="polywire"),
                more_is_better=False,
                rounds=rounds,
                remark="median triggerExecution of a round",
            ),
            figure(
                "produce to Parquet visible, 20,000 records/s, p50",
                "ms",
                lambda: _visible_ms(made, f"steady-{next(numbers)}"),
                aim=500,
                more_is_better=False,
                rounds=min(rounds, 3),
                remark="from the broker's append time to Spark's list of the table's files",
            ),
        ]


def _stream(made: Bench, topic: str) -> DataFrame:
    reader = made.spark.readStream.format("polywire").option("address", made.address).option("subscribe", topic)
    return reader.option("startingOffsets", "earliest").load()


def _land_rate(made: Bench, place: Path) -> float:
    ends: list[tuple[float, int]] = []

    def reported(batch: BatchProgress) -> None:
        ends.append((time.perf_counter(), batch.records))

    begun = time.perf_counter()
    landed = land(
        made.spark, made.address, "land", place / "table", place / "checkpoint", [],
        batch_records_max=LAND_BATCH_RECORDS, on_progress=reported,
    )  # fmt: skip
    if landed.records != LAND_RECORDS:
        raise AssertionError(
            f"a wrong count landed={landed.records} expected={LAND_RECORDS} seconds={time.perf_counter() - begun}"
        )
    (first, _), (last, _) = ends[0], ends[-1]
    return sum(records for _, records in ends[1:]) / (last - first)


@contextmanager
def _running(writer: DataStreamWriter) -> Iterator[StreamingQuery]:
    query = writer.start()
    try:
        yield query
    finally:
        query.stop()


def _lone_batch_ms(made: Bench, topic: str, into: str = "noop") -> float:
    made.connection.create_topic(topic, 1)
    batch = polywire_load.value_batch(1, 100)
    writer = _stream(made, topic).select("value").writeStream.format(into)
    writer = writer.option("checkpointLocation", str(made.place / f"{topic}.checkpoint"))
    if into == "polywire":
        writer = writer.options(address=made.address, topic=f"{topic}-copy")
    with _running(writer) as query:
        for number in range(LONE_BATCHES):
            made.connection.produce(topic, 0, [batch])
            _wait_for_batch(query, number)
        reports = [json.loads(report.json) for report in query.recentProgress]
    took = [report["durationMs"]["triggerExecution"] for report in reports if report["numInputRows"]]
    return float(statistics.median(took[len(took) // 3 :]))


def _wait_for_batch(query: StreamingQuery, number: int) -> None:
    deadline = time.monotonic() + PROGRESS_SECONDS_MAX
    while query.lastProgress is None or query.lastProgress.batchId < number:
        if time.monotonic() > deadline or not query.isActive:
            raise AssertionError(f"no micro-batch number={number} exception={query.exception()}")
        time.sleep(0.005)


def _visible_ms(made: Bench, topic: str) -> float:
    made.connection.create_topic(topic, 1)
    table = made.place / topic
    writer = _stream(made, topic).select("timestamp", "value").writeStream.format("parquet")
    writer = writer.option("path", str(table)).option("checkpointLocation", f"{table}.checkpoint")
    with _running(writer) as query:
        made.connection.produce(topic, 0, [polywire_load.value_batch(1, 100)])
        _wait_for_batch(query, 0)
        begun_us = time.time() * 1e6
        producer = threading.Thread(target=_produce_steadily, args=(made, topic))
        producer.start()
        producer.join()
        query.processAllAvailable()
    return _median_age_ms(table, since_us=begun_us + STEADY_WARM_UP_S * 1e6)


def _produce_steadily(made: Bench, topic: str) -> None:
    batch = polywire_load.value_batch(STEADY_BATCH, 100)
    pause = STEADY_BATCH / STEADY_RATE
    due = time.monotonic()
    end = due + STEADY_SECONDS
    while due < end:
        made.connection.produce(topic, 0, [batch])
        due += pause
        time.sleep(max(0.0, due - time.monotonic()))


def _median_age_ms(table: Path, *, since_us: float) -> float:
    """Return the median age of records when the file list that names them was written."""
    seen: set[str] = set()
    ages: list[float] = []
    logs = (table / "_spark_metadata").glob("[0-9]*")
    for log in sorted(logs, key=lambda log: log.stat().st_mtime):
        visible_us = log.stat().st_mtime * 1e6
        files = {json.loads(line)["path"] for line in log.read_text().splitlines()[1:]}
        for file in sorted(files - seen):
            times = pq.read_table(file.removeprefix("file:").replace("///", "/"), columns=["timestamp"])["timestamp"]
            stored = times.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
            ages += [(visible_us - at) / 1000 for at in stored if at is not None and at >= since_us]
        seen |= files
    return statistics.median(ages)
