"""Tasks on the broker's machine read its sealed files and get the same rows; metrics show how they were read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

from polywire.client import bulk
from polywire.client.arrow import arrow_to_batches
from polywire.store.data_directory import MARK_FILE
from polywire.tables.sealed import RANGE_RECORDS_MIN
from tests.broker_process import BrokerProcess
from tests.e2e.conftest import Reached

pytestmark = pytest.mark.spark

RECORDS = 4 * RANGE_RECORDS_MIN  # of each partition
LOGGING = "spark.sql.pyspark.worker.logging.enabled"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", "--slot-mib", "17") as process:
        yield process


@pytest.fixture
def reached(broker: BrokerProcess, topic: str) -> Reached:
    """Return the broker, with a mostly sealed topic of two partitions."""
    made = reach(broker)
    made.connection.create_topic(topic, 2)
    append(made, topic, 0, RECORDS)
    wait_until_sealed(made, topic)
    return made


def wait_until_sealed(reached: Reached, topic: str) -> None:
    """Wait until most of what ``append`` wrote is sealed."""
    deadline = monotonic() + 60
    while sealed_records(reached, topic) < 1.5 * RECORDS:
        assert monotonic() < deadline, "nothing was sealed"
        sleep(0.05)


def reach(broker: BrokerProcess) -> Reached:
    host, port = broker.addresses["polywire"]
    return Reached(f"{host}:{port}")


def append(reached: Reached, topic: str, first: int, count: int) -> None:
    for partition in range(2):
        for start in range(first, first + count, 10_000):
            numbers = range(start, start + 10_000)
            values = pa.array([b"%d-%0120d" % (partition, number) for number in numbers], pa.binary())
            keys = pa.array([b"k%d" % (number % 7) for number in numbers], pa.binary())
            batch = pa.record_batch({"key": keys, "value": values})
            reached.connection.produce(topic, partition, arrow_to_batches(batch))


def sealed_records(reached: Reached, topic: str) -> int:
    located = [reached.connection.locate(topic, partition) for partition in range(2)]
    return sum(run.next_offset - run.first_offset for found in located for run in found.runs)


def read(spark: SparkSession, reached: Reached, topic: str, **options: str) -> DataFrame:
    return spark.read.format("polywire").options(address=reached.address, subscribe=topic, **options).load()


def digest(frame: DataFrame) -> list[tuple[object, ...]]:
    """Return what shows whether two reads gave the same rows, each once."""
    wrong = "value != encode(format_string('%d-%0120d', partition, offset), 'utf-8')"
    hashed = "bit_xor(xxhash64(key, value, topic, partition, offset, timestamp))"
    facts = ["count(*)", "count(distinct offset)", f"count_if({wrong})", hashed]
    rows = sorted(tuple(row) for row in frame.groupBy("partition").agg(*map(expr, facts)).collect())
    assert [(row[1] == row[2], row[3]) for row in rows] == [(True, 0)] * len(rows)
    return rows


def bytes_read(spark: SparkSession, frame: DataFrame) -> tuple[int, int]:
    """Return the bytes of files and of the protocol that the tasks of one read reported."""
    spark.conf.set(LOGGING, "true")
    try:
        before = _reported(spark)
        frame.write.format("noop").mode("overwrite").save()
        after = _reported(spark)
    finally:
        spark.conf.unset(LOGGING)
    return after[0] - before[0], after[1] - before[1]


def _reported(spark: SparkSession) -> tuple[int, int]:
    lines = [row["msg"] for row in spark.tvf.python_worker_logs().collect()]
    found = [re.search(r"file_bytes=(\d+) wire_bytes=(\d+)", line) for line in lines]
    pairs = [(int(match[1]), int(match[2])) for match in found if match]
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


def test_files_and_broker_give_the_same_rows(spark: SparkSession, reached: Reached, topic: str) -> None:
    auto, off = read(spark, reached, topic), read(spark, reached, topic, localSegments="off")
    rows = digest(auto)
    assert [row[0] for row in rows] == [0, 1]
    assert rows == digest(off)
    assert auto.count() == off.count() == 2 * RECORDS
    file_bytes, wire_bytes = bytes_read(spark, auto)
    assert file_bytes > 2 * wire_bytes > 0, "the unsealed end comes from the broker"
    file_bytes, wire_bytes = bytes_read(spark, off)
    assert file_bytes == 0 < wire_bytes


def test_a_stream_reads_sealed_and_unsealed_records(
    spark: SparkSession, reached: Reached, topic: str, tmp_path: Path
) -> None:
    stream = (
        spark.readStream.format("polywire")
        .options(address=reached.address, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="150000")
        .load()
    )
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    for _ in range(2):
        writer.trigger(availableNow=True).start(str(tmp_path / "rows")).awaitTermination()
        append(reached, topic, RECORDS, 10_000)
    found = spark.read.parquet(str(tmp_path / "rows"))
    ends = f'{{"{topic}":{{"0":{RECORDS + 10_000},"1":{RECORDS + 10_000}}}}}'
    assert digest(found) == digest(read(spark, reached, topic, endingOffsets=ends, localSegments="off"))


def test_another_directory_under_the_same_path_is_not_read(
    spark: SparkSession, broker: BrokerProcess, reached: Reached, topic: str
) -> None:
    rows = digest(read(spark, reached, topic, localSegments="off"))
    (broker.data_dir / MARK_FILE).write_text("1\n00000000000000000000000000000000\n")
    frame = read(spark, reached, topic)
    assert bytes_read(spark, frame)[0] == 0
    assert digest(frame) == rows


def test_files_of_an_earlier_start_are_read(
    spark: SparkSession, broker: BrokerProcess, reached: Reached, topic: str
) -> None:
    rows = digest(read(spark, reached, topic))
    broker.kill()
    broker.start()
    bulk.connect(reached.address).ping()
    frame = read(spark, reached, topic)
    file_bytes, wire_bytes = bytes_read(spark, frame)
    assert file_bytes > 2 * wire_bytes
    assert digest(frame) == rows
