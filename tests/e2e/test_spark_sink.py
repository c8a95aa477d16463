"""The sink on real Spark against a real broker: contents, routing, and exactly-once writes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.broker_process import BrokerProcess
from tests.e2e.conftest import Reached, Served, fill

pytestmark = pytest.mark.spark


def read(spark: SparkSession, served: Reached, topic: str) -> DataFrame:
    return spark.read.format("polywire").options(address=served.address, subscribe=topic, includeHeaders="true").load()


def write(frame: DataFrame, served: Reached, **options: str) -> None:
    frame.write.format("polywire").options(address=served.address, **options).mode("append").save()


def stream(spark: SparkSession, served: Reached, topic: str, **options: str) -> DataFrame:
    reader = spark.readStream.format("polywire").options(address=served.address, subscribe=topic)
    return reader.options(startingOffsets="earliest", **options).load()


def run(frame: DataFrame, served: Reached, checkpoint: Path, **options: str) -> None:
    writer = frame.writeStream.format("polywire").options(address=served.address, **options)
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


def values(spark: SparkSession, served: Reached, topic: str) -> list[str]:
    rows = read(spark, served, topic).selectExpr("cast(value as string) as value").collect()
    return sorted(row["value"] for row in rows)


def test_every_column_arrives(spark: SparkSession, served: Served, topic: str) -> None:
    frame = spark.range(0, 1000, 1, 3).selectExpr(
        "concat('k', id % 7) as key",
        "if(id % 10 = 0, null, cast(cast(id as string) as binary)) as value",
        "if(id % 2 = 0, array(named_struct('key', 'n', 'value', cast(cast(id as string) as binary))), null) as headers",
    )
    served.connection.create_topic(topic, 4)
    write(frame, served, topic=topic)
    found = (
        read(spark, served, topic)
        .selectExpr(
            "cast(key as string) as key",
            "cast(value as string) as value",
            "partition",
            "cast(headers[0].value as string) as h",
        )
        .collect()
    )
    assert len(found) == 1000
    assert sum(row["value"] is None for row in found) == 100
    for row in found:
        if row["value"] is not None:
            assert row["key"] == f"k{int(row['value']) % 7}"
            assert row["h"] == (row["value"] if int(row["value"]) % 2 == 0 else None)
    assert len({(row["key"], row["partition"]) for row in found}) == 7


def test_columns_and_options_choose_topic_and_partition(spark: SparkSession, served: Served, topic: str) -> None:
    served.connection.create_topic(f"{topic}-a", 2)
    frame = spark.range(100).selectExpr(
        f"if(id < 60, '{topic}-a', '{topic}-b') as topic",
        "cast(if(id % 3 = 0, null, 1) as int) as partition",
        "cast(id as string) as value",
        "'same' as key",
    )
    write(frame, served)
    in_a = read(spark, served, f"{topic}-a").groupBy("partition").count().collect()
    assert sum(row["count"] for row in in_a) == 60
    assert {row["partition"] for row in in_a} >= {1}
    assert values(spark, served, f"{topic}-b") == sorted(str(n) for n in range(60, 100))
    write(frame, served, topic=topic)
    assert len(values(spark, served, topic)) == 100


def test_a_stream_copies_a_topic_exactly_once(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    fill(served.connection, topic, [300, 200])
    frame = stream(spark, served, topic, maxOffsetsPerTrigger="200")
    run(frame, served, tmp_path / "checkpoint", topic=f"{topic}-copy")
    assert values(spark, served, f"{topic}-copy") == values(spark, served, topic)
    fill(served.connection, topic, [10, 0])
    run(frame, served, tmp_path / "checkpoint", topic=f"{topic}-copy")
    assert values(spark, served, f"{topic}-copy") == values(spark, served, topic)


@pytest.mark.parametrize(("guarantee", "copies"), [("true", 1), ("sequence", 1), ("false", 2)])
def test_a_repeated_micro_batch(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path, guarantee: str, copies: int
) -> None:
    fill(served.connection, topic, [300, 200])
    frame = stream(spark, served, topic)
    options = {"topic": f"{topic}-copy", "exactlyOnce": guarantee}
    run(frame, served, tmp_path / "checkpoint", **options)
    # Like a driver killed between the broker's commit and Spark's: its offsets are recorded, its end is not.
    for log in (tmp_path / "checkpoint" / "commits").iterdir():
        log.unlink()
    run(frame, served, tmp_path / "checkpoint", **options)
    assert values(spark, served, f"{topic}-copy") == sorted(values(spark, served, topic) * copies)


def test_a_named_batch_write_is_applied_once(spark: SparkSession, served: Served, topic: str) -> None:
    def frame(count: int) -> DataFrame:
        return spark.range(count).selectExpr("cast(id as string) as value")

    for number in ("4", "4", "3", "5"):
        write(frame(10), served, topic=topic, txnAppId="job", txnId=number)
    assert len(values(spark, served, topic)) == 20
    for _ in range(2):
        write(frame(5), served, topic=topic, txnAppId="numbers", txnId="1", exactlyOnce="sequence")
    assert len(values(spark, served, topic)) == 25


def test_a_failed_write_leaves_nothing_visible(spark: SparkSession, served: Served, topic: str) -> None:
    frame = spark.range(0, 1000, 1, 2).selectExpr("if(id = 999, raise_error('stop'), cast(id as string)) as value")
    served.connection.create_topic(topic, 2)
    with pytest.raises(PySparkException, match="stop"):
        write(frame, served, topic=topic)
    assert values(spark, served, topic) == []


def test_errors_say_what_to_do(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    frame = spark.range(3).selectExpr("cast(id as string) as value")
    served.connection.create_topic(topic, 2)
    with pytest.raises(PySparkException, match="set the option topic"):
        write(frame, served)
    with pytest.raises(PySparkException, match=r"to_json\(struct\(\*\)\) as value"):
        write(spark.range(3), served, topic=topic)
    with pytest.raises(PySparkException, match="records do not have"):
        write(frame.selectExpr("*", "1 as other"), served, topic=topic)
    with pytest.raises(PySparkException, match="a partition that does not exist"):
        write(frame.selectExpr("*", "7 as partition"), served, topic=topic)
    with pytest.raises(PySparkException, match="topic is null"):
        write(frame.selectExpr("*", "cast(null as string) as topic"), served)
    with pytest.raises(PySparkException, match="does not exist"):
        write(frame, served, topic=f"{topic}-missing", createTopics="false")
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        frame.write.format("polywire").options(address=served.address, topic=topic).mode("overwrite").save()
    assert json.dumps(values(spark, served, topic)) == "[]"


@pytest.mark.slow
def test_a_broker_killed_during_a_write_has_each_record_once(spark: SparkSession, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        host, port = broker.addresses["polywire"]
        served = Reached(f"{host}:{port}")
        fill(served.connection, "source", [30_000, 20_000])
        served.connection.create_topic("copy", 3)
        frame = stream(spark, served, "source", maxOffsetsPerTrigger="2000")
        writer = frame.writeStream.format("polywire").options(address=served.address, topic="copy")
        query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
        for batch in (2, 7, 12):
            while query.isActive and (query.lastProgress is None or query.lastProgress.batchId < batch):
                time.sleep(0.01)
            broker.kill()
            broker.start()
        query.awaitTermination()
        assert values(spark, served, "copy") == sorted(
            f"{n}-{at}" for n, c in ((0, 30_000), (1, 20_000)) for at in range(c)
        )


def totals_by_key(spark: SparkSession, served: Reached, topic: str) -> DataFrame:
    frame = stream(spark, served, topic, maxOffsetsPerTrigger="300")
    return frame.groupBy("key").count().selectExpr("key", "cast(count as string) as value")


def test_update_mode_works_through_foreach_batch_once(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    fill(served.connection, topic, [300, 200])
    totals = f"{topic}-totals"
    batches: list[int] = []

    def each(frame: DataFrame, batch_id: int) -> None:
        batches.append(batch_id)
        write(frame, served, topic=totals, txnAppId=totals, txnId=str(batch_id))

    def run_totals() -> None:
        query = totals_by_key(spark, served, topic).writeStream.outputMode("update").foreachBatch(each)
        checkpoint = query.option("checkpointLocation", str(tmp_path / "checkpoint"))
        checkpoint.trigger(availableNow=True).start().awaitTermination()

    run_totals()
    written = values(spark, served, totals)
    latest = read(spark, served, totals).selectExpr("cast(key as string) key", "cast(cast(value as string) as int) n")
    assert len(written) > 2, "a total was updated by more than one micro-batch"
    # Like a driver killed between the broker's commit and Spark's: the last micro-batch is repeated.
    max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name)).unlink()
    run_totals()
    assert batches[-1] == batches[-2]
    assert values(spark, served, totals) == written
    assert {row["key"]: row["max(n)"] for row in latest.groupBy("key").max("n").collect()} == {"k0": 300, "k1": 200}


def test_unsupported_output_modes(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    """Spark refuses update mode for all Python sources: if that changes, change docs/spark/sink.md."""
    fill(served.connection, topic, [3])
    for mode, message in (
        ("update", "does not support Update mode"),
        ("complete", "in update mode through foreachBatch"),
    ):
        writer = totals_by_key(spark, served, topic).writeStream.format("polywire").outputMode(mode)
        writer = writer.options(address=served.address, topic=f"{topic}-no", checkpointLocation=str(tmp_path / mode))
        with pytest.raises(PySparkException, match=message):
            writer.trigger(availableNow=True).start().awaitTermination()
