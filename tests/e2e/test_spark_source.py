"""The data source on real Spark against a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from polywire.client import sync
from polywire.records.columns import Header, HeaderKind, Record
from polywire.records.rows import from_records
from polywire.spark.listener import QueryProgress, watch
from polywire.spark.pipelines.land import land
from polywire.spark.pipelines.queries import Ran
from polywire.spark.progress import BatchProgress
from tests.e2e.conftest import Served, environment, fill, start_broker, stop_broker

pytestmark = pytest.mark.spark


def read(spark: SparkSession, served: Served, schema: str | None = None, **options: str) -> DataFrame:
    reader = spark.read.format("polywire").options(address=served.address, **options)
    return (reader if schema is None else reader.schema(schema)).load()


def values(frame: DataFrame) -> list[tuple[int, int, str]]:
    rows = frame.selectExpr("partition", "offset", "cast(value as string) as value").collect()
    return sorted((row["partition"], row["offset"], row["value"]) for row in rows)


def expected(counts: list[int], first: int = 0) -> list[tuple[int, int, str]]:
    return [(n, at, f"{n}-{at}") for n, count in enumerate(counts) for at in range(first, count)]


def test_a_batch_read_has_every_column(spark: SparkSession, served: Served, topic: str) -> None:
    before_s = time.time()
    fill(served.connection, topic, [300, 0, 7])
    frame = read(spark, served, subscribe=topic)
    assert values(frame) == expected([300, 0, 7])
    rows = frame.where("partition = 2").orderBy("offset").selectExpr("*", "unix_micros(timestamp) as us").collect()
    assert {(row["topic"], bytes(row["key"]), row["timestampType"]) for row in rows} == {(topic, b"k2", 1)}
    assert all(before_s - 1 <= row["us"] / 1e6 <= time.time() + 1 for row in rows)
    assert frame.rdd.getNumPartitions() == 1
    assert read(spark, served, subscribe=topic, minPartitions="4").rdd.getNumPartitions() >= 4


def test_many_small_batches_and_an_empty_topic(spark: SparkSession, served: Served, topic: str) -> None:
    served.connection.create_topic(topic, 2)
    assert read(spark, served, subscribe=topic).count() == 0
    for _ in range(20):
        fill(served.connection, topic, [1, 2])
    assert values(read(spark, served, subscribe=topic)) == expected([20, 40])


def test_offset_ranges_topic_patterns_and_assignments(spark: SparkSession, served: Served, topic: str) -> None:
    fill(served.connection, topic, [100, 50])
    fill(served.connection, f"{topic}-more", [5])
    starting, ending = f'{{"{topic}":{{"0":90,"1":-2}}}}', f'{{"{topic}":{{"0":95,"1":-1}}}}'
    part = read(spark, served, subscribe=topic, startingOffsets=starting, endingOffsets=ending)
    assert values(part) == expected([95], 90) + [(1, at, f"1-{at}") for at in range(50)]
    assert read(spark, served, subscribePattern=f"{topic}.*").groupBy("topic").count().count() == 2
    assigned = read(spark, served, assign=f'{{"{topic}":[1]}}')
    assert values(assigned) == [(1, at, f"1-{at}") for at in range(50)]


def test_times_select_records(spark: SparkSession, served: Served, topic: str) -> None:
    fill(served.connection, topic, [10])
    time.sleep(0.02)
    middle_ms = str(int(time.time() * 1000))
    time.sleep(0.02)
    fill(served.connection, topic, [10])
    assert values(read(spark, served, subscribe=topic, startingTimestamp=middle_ms)) == expected([20], 10)
    assert values(read(spark, served, subscribe=topic, endingTimestamp=middle_ms)) == expected([10])
    with pytest.raises(PySparkException, match="no record is at or after the starting time"):
        read(spark, served, subscribe=topic, startingTimestamp="99999999999999").count()


def test_a_schema_selects_columns(spark: SparkSession, served: Served, topic: str) -> None:
    fill(served.connection, topic, [30], headers=True)
    frame = read(spark, served, "offset bigint, value binary", subscribe=topic)
    assert frame.columns == ["offset", "value"]
    assert sorted(bytes(row["value"]) for row in frame.collect()) == sorted(f"0-{at}".encode() for at in range(30))
    with_headers = read(spark, served, subscribe=topic, includeHeaders="true")
    assert with_headers.columns[-1] == "headers"
    reported = with_headers.selectExpr(
        "offset", "headers[0].key as k", "cast(headers[0].value as string) as v"
    ).collect()
    assert sorted(reported) == [(at, "n", str(at)) for at in range(30)]


def test_typed_headers_have_their_types(spark: SparkSession, served: Served, topic: str) -> None:
    kinds = [(HeaderKind.INT32, (7).to_bytes(4, "little")), (HeaderKind.STRING, b"s"), (HeaderKind.NULL, None)]
    headers = tuple(Header(b"h%d" % n, value, value_kind=kind) for n, (kind, value) in enumerate(kinds))
    served.connection.create_topic(topic, 1)
    served.connection.produce(topic, 0, [from_records([Record(b"v", headers=headers), Record(b"w")])])
    rows = read(spark, served, subscribe=topic, includeHeaders="typed").orderBy("offset").collect()
    reported = [(header["key"], header["type"], header["value"]) for header in rows[0]["typedHeaders"]]
    assert reported == [("h0", "int32", b"\x07\0\0\0"), ("h1", "string", b"s"), ("h2", "null", None)]
    assert rows[1]["typedHeaders"] is None
    copied = read(spark, served, subscribe=topic, includeHeaders="typed")
    options = {"address": served.address, "topic": f"{topic}-copy"}
    copied.drop("partition").write.format("polywire").mode("append").options(**options).save()
    again = read(spark, served, subscribe=f"{topic}-copy", includeHeaders="typed")
    assert [row["typedHeaders"] for row in again.orderBy("offset").collect()] == [row["typedHeaders"] for row in rows]


def test_offsets_and_times_need_no_values(spark: SparkSession, served: Served, topic: str) -> None:
    fill(served.connection, topic, [3000, 20])
    ending = f'{{"{topic}":{{"0":2990,"1":-1}}}}'
    frame = read(
        spark, served, "partition int, offset bigint, timestamp timestamp", subscribe=topic, endingOffsets=ending
    )
    assert frame.count() == 3010
    assert [
        (row[0], row[1]) for row in frame.groupBy("partition").agg({"offset": "max"}).orderBy("partition").collect()
    ] == [
        (0, 2989),
        (1, 19),
    ]
    assert all(row["timestamp"].year > 2000 for row in frame.where("offset < 5").collect())


def test_filters_are_pushed_down_if_enabled(spark: SparkSession, served: Served, topic: str) -> None:
    fill(served.connection, topic, [100, 100, 100])

    def filtered(condition: str) -> DataFrame:
        options = {"subscribe": topic, "pushFilters": "oneQueryPerLoad", "minPartitions": "30"}
        return read(spark, served, **options).where(condition)

    switch = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(switch, "true")
    try:
        wanted = filtered("partition in (1, 2) and offset >= 90 and timestamp > timestamp'2020-01-01'")
        assert values(wanted) == [(n, at, f"{n}-{at}") for n in (1, 2) for at in range(90, 100)]
        assert wanted.rdd.getNumPartitions() == 20
        assert filtered("key is not null").rdd.getNumPartitions() == 30
        assert filtered("timestamp < timestamp'2020-01-01'").count() == 0
        assert filtered(f"topic = '{topic}-other'").count() == 0
    finally:
        spark.conf.unset(switch)
    with pytest.raises(PySparkException, match="load one for each query"):
        read(spark, served, subscribe=topic, pushFilters="true").count()


def test_errors_reach_the_user(spark: SparkSession, served: Served, topic: str) -> None:
    with pytest.raises(PySparkException, match=f"{topic}"):
        read(spark, served, subscribe=topic).count()
    with pytest.raises(PySparkException, match="did you mean 'startingOffsets'"):
        read(spark, served, subscribe=topic, startingOfsets="earliest").count()
    with pytest.raises(PySparkException, match="did you mean 'offset'"):
        read(spark, served, "ofset bigint", subscribe=topic).count()


def landing(
    spark: SparkSession, served: Served, topic: str, directory: Path, most: int
) -> tuple[Ran, list[BatchProgress]]:
    reported: list[BatchProgress] = []
    landed = land(
        spark, served.address, topic, directory / "table", directory / "checkpoint", ["partition"],
        parse=lambda records: records.selectExpr("partition", "offset", "cast(value as string) as value"),
        batch_records_max=most, on_progress=reported.append,
    )  # fmt: skip
    return landed, reported


def test_a_stream_lands_everything_once_in_limited_batches(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    fill(served.connection, topic, [400, 100, 0])
    landed, reported = landing(spark, served, topic, tmp_path, most=200)
    assert (landed.records, landed.batches) == (500, 3)
    assert [batch.records for batch in reported] == [200, 200, 100]
    assert [batch.lag for batch in reported] == [300, 100, 0]
    fill(served.connection, topic, [50, 0, 50])
    again, _ = landing(spark, served, topic, tmp_path, most=200)
    assert again.records == 100
    assert values(spark.read.parquet(str(tmp_path / "table"))) == expected([450, 100, 50])


def test_a_stateful_stream_has_a_partition_per_core(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    fill(served.connection, topic, [3, 2])
    stream = spark.readStream.format("polywire").options(address=served.address, subscribe=topic)
    counts = stream.option("startingOffsets", "earliest").load().groupBy("partition").count()
    writer = counts.writeStream.format("memory").queryName("counts").outputMode("complete")
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    query.awaitTermination()
    assert sorted(spark.table("counts").collect()) == [(0, 3), (1, 2)]
    assert {one.numShufflePartitions for batch in query.recentProgress for one in batch.stateOperators} == {2}


def test_a_stream_resumes_after_the_broker_was_killed(spark: SparkSession, topic: str, tmp_path: Path) -> None:
    broker = start_broker(tmp_path / "broker")
    fill(broker.connection, topic, [40, 20])
    assert landing(spark, broker, topic, tmp_path, most=1000)[0].records == 60
    broker.process.kill()
    broker.process.wait()
    again = start_broker(tmp_path / "broker")
    try:
        assert landing(spark, again, topic, tmp_path, most=1000)[0].records == 0
        fill(again.connection, topic, [0, 10])
        assert landing(spark, again, topic, tmp_path, most=1000)[0].records == 10
    finally:
        stop_broker(again)
    assert values(spark.read.parquet(str(tmp_path / "table"))) == expected([40, 30])


@pytest.mark.parametrize("trigger", [{"continuous": "1 second"}, {"realTime": "10 seconds"}])
def test_spark_does_not_support_python_sources_in_its_other_modes(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path, trigger: dict[str, str]
) -> None:
    fill(served.connection, topic, [3])
    stream = spark.readStream.format("polywire").options(address=served.address, subscribe=topic).load()
    writer = stream.writeStream.format("console").option("checkpointLocation", str(tmp_path)).outputMode("update")
    with pytest.raises(PySparkException, match=r"continuous|REAL_TIME_MODE"):
        writer.trigger(**trigger).start().awaitTermination(60)


def test_a_stream_commits_its_progress_to_a_group(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    fill(served.connection, topic, [30])
    stream = spark.readStream.format("polywire").options(address=served.address, subscribe=topic)
    frame = stream.options(startingOffsets="earliest", commitGroup="shown", maxOffsetsPerTrigger="10").load()
    reported: list[QueryProgress] = []
    listener = watch(spark, reported.append)
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.queryName("watched").trigger(availableNow=True).start().awaitTermination()
    deadline = time.monotonic() + 60
    while not (reported and reported[-1].ended) and time.monotonic() < deadline:
        time.sleep(0.05)  # Spark notifies listeners on another thread
    spark.streams.removeListener(listener)
    batches = [progress.batch for progress in reported if progress.batch is not None and not progress.ended]
    assert [(batch.records, batch.lag) for batch in batches] == [(10, 20), (10, 10), (10, 0)]
    assert (reported[-1].name, reported[-1].records, reported[-1].error) == ("watched", 30, None)
    assert listener.queries == {}
    with sync.connect(f"polywire://{served.address}") as client:
        assert client.position("shown", topic, 0) == 20
    command = [sys.executable, "-m", "polywire", "group", "list", "--output", "jsonl"]
    listed = subprocess.run(
        [*command, "--address", f"polywire://{served.address}"], capture_output=True, check=True, env=environment()
    )
    listed_groups = [json.loads(line) for line in listed.stdout.splitlines()]
    mine = [row for row in listed_groups if row["topic"] == topic]
    assert [(row["group"], row["lag_records"]) for row in mine] == [("shown", 10)]
    assert 0 < mine[0]["lag_seconds"] < 180


def test_a_stream_detects_that_its_topic_was_re_created(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    fill(served.connection, topic, [100])
    stream = spark.readStream.format("polywire").options(
        address=served.address, subscribe=topic, startingOffsets="earliest"
    )

    def run(fail_on_data_loss: str) -> None:
        frame = stream.option("failOnDataLoss", fail_on_data_loss).schema("offset bigint, value binary").load()
        writer = frame.writeStream.format("parquet").option("path", str(tmp_path / "table"))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()

    run("true")
    served.connection.delete_topic(topic)
    fill(served.connection, topic, [30])
    with pytest.raises(PySparkException, match="deleted and created again"):
        run("true")
    run("false")
    assert spark.read.parquet(str(tmp_path / "table")).count() == 130
