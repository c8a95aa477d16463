"""Spark reads sealed records from the bucket on a real S3 server, without the broker once a read is planned."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from polywire.server.placement import shard_by_hash
from polywire.tables.sealed import RANGE_RECORDS_MIN
from tests.broker_process import BrokerProcess
from tests.e2e.conftest import Reached
from tests.e2e.test_spark_local_segments import LOGGING, append, digest, reach, wait_until_sealed
from tests.s3_server import BUCKET, s3_server

pytestmark = pytest.mark.spark

RECORDS = 4 * RANGE_RECORDS_MIN  # of each partition


@dataclass(frozen=True)
class InBucket:
    """A broker with a mostly sealed topic of two partitions, and the access of Spark's tasks to its bucket."""

    broker: BrokerProcess
    reached: Reached
    topic: str
    options: Mapping[str, str]

    def read(self, spark: SparkSession, **options: str) -> DataFrame:
        given = {**self.options, "address": self.reached.address, "subscribe": self.topic, **options}
        return spark.read.format("polywire").options(**given).load()

    def sealed_end(self) -> str:
        """Return the option that ends a read at the end of the sealed records."""
        runs = [self.reached.connection.locate(self.topic, partition).runs for partition in range(2)]
        return json.dumps({self.topic: {str(n): found[-1].next_offset for n, found in enumerate(runs)}})

    def sent_bytes(self) -> int:
        """Return the bytes that the broker has sent over its protocol since its start."""
        connection = HTTPConnection(*self.broker.addresses["http"], timeout=60)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        found = re.search(r'^polywire_sent_bytes_total\{wire="polywire"\} (\S+)$', text, re.MULTILINE)
        assert found is not None
        return int(float(found[1]))


@pytest.fixture
def in_bucket(tmp_path: Path, topic: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[InBucket]:
    with s3_server(tmp_path / "s3") as environment:
        with monkeypatch.context() as context:  # the broker's; Spark's workers have options
            for name, value in environment.items():
                context.setenv(name, value)
            broker = BrokerProcess(
                tmp_path / "cache", "--bucket", f"s3://{BUCKET}/log", "--slot-mib", "17", wires=("polywire", "http")
            ).start()
        try:
            reached = reach(broker)
            reached.connection.create_topic(topic, 2)
            append(reached, topic, 0, RECORDS)
            wait_until_sealed(reached, topic)
            yield InBucket(broker, reached, topic, reader_options(environment))
        finally:
            if not broker.stopped:
                broker.kill()


def reader_options(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options for the access of Spark's tasks to the bucket."""
    return {
        "bucket.endpoint": environment["AWS_ENDPOINT_URL"],
        "bucket.access_key_id": environment["AWS_ACCESS_KEY_ID"],
        "bucket.secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
        "bucket.region": environment["AWS_REGION"],
    }


def test_the_bucket_is_read_and_the_broker_is_not(spark: SparkSession, in_bucket: InBucket) -> None:
    sealed = {"endingOffsets": in_bucket.sealed_end()}
    rows = digest(in_bucket.read(spark, **sealed, localSegments="off"))
    before = in_bucket.sent_bytes()
    assert before > 10_000_000
    spark.conf.set(LOGGING, "true")
    try:
        assert digest(in_bucket.read(spark, **sealed)) == rows
        lines = [row["msg"] for row in spark.tvf.python_worker_logs().collect()]
    finally:
        spark.conf.unset(LOGGING)
    assert in_bucket.sent_bytes() - before < 100_000, "only locations are requested"
    reported = [re.search(r"file_bytes=0 wire_bytes=0 bucket_bytes=(\d+)", line) for line in lines]
    assert sum(int(match[1]) for match in reported if match) > 10_000_000
    # The broker may stop once a read is planned.
    planned = in_bucket.read(spark, **sealed, localSegments="required").rdd
    assert planned.getNumPartitions() > 1
    in_bucket.broker.kill()
    assert planned.count() == sum(int(str(row[1])) for row in rows)


def count_of(spark: SparkSession, in_bucket: InBucket) -> int:
    """Count the sealed records, which are the same from the bucket and from the broker."""
    sealed = {"endingOffsets": in_bucket.sealed_end()}
    rows = digest(in_bucket.read(spark, **sealed, localSegments="required"))
    assert rows == digest(in_bucket.read(spark, **sealed, localSegments="off"))
    return sum(int(str(row[1])) for row in rows)


def test_topics_of_several_shards_through_any_machine(
    spark: SparkSession, tmp_path: Path, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is in a different shard; the second machine leads none."""
    names = [
        next(name for name in map(f"{topic}-{{}}".format, range(99)) if shard_by_hash(name, 2) == home)
        for home in (0, 1)
    ]
    with s3_server(tmp_path / "s3") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        bucket = "--bucket", f"s3://{BUCKET}/log", "--slot-mib", "17", "--balance-s", "0"
        one = BrokerProcess(tmp_path / "one", *bucket, "--processes", "2", "--node", "one", wires=("polywire",))
        two = BrokerProcess(tmp_path / "two", *bucket, "--node", "two", wires=("polywire",))
        with one, two:
            for name in names:
                reach(two).connection.create_topic(name, 2)
                append(reach(two), name, 0, RECORDS)
                wait_until_sealed(reach(one), name)
            roots = [reach(two).connection.locate(name, 0).runs[0].blob.split("segments/")[0] for name in names]
            assert roots == ["shards/0000/", "shards/0001/"]
            for broker in (one, two):
                found = [InBucket(broker, reach(broker), name, reader_options(environment)) for name in names]
                assert [count_of(spark, one) >= 1.5 * RECORDS for one in found] == [True, True]
