"""``kill -9`` of the Spark driver during a run loses and duplicates nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.e2e.conftest import SOURCE, Served, environment, fill

pytestmark = [pytest.mark.spark, pytest.mark.slow]

COUNTS = [4_000, 3_000, 1_000]
KILLED_AT = (0, 4)  # micro-batches that are killed between their offsets and their commit
RUN_TIMEOUT_S = 180.0


def start_driver(served: Served, topic: str, directory: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.e2e.landing_driver", served.address, topic, str(directory), *more]
    with (directory / "driver.log").open("ab") as log:
        # A separate process group, so that its JVM and Python workers die with it.
        return subprocess.Popen(
            command, cwd=SOURCE.parent, env=environment(), stdout=log, stderr=log, start_new_session=True
        )


def kill_in_batch(driver: subprocess.Popen[bytes], checkpoint: Path, number: int) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not (checkpoint / "offsets" / str(number)).exists():
        assert driver.poll() is None, "the driver ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    assert not (checkpoint / "commits" / str(number)).exists(), "the micro-batch ended before the driver did"


def kill_after(driver: subprocess.Popen[bytes], served: Served, topic: str, records: int) -> None:
    """Kill once the topic has more than ``records``: usually between the broker's commit and Spark's."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while records_of(served, topic) <= records:
        assert driver.poll() is None, "the driver ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


def records_of(served: Served, topic: str) -> int:
    return sum(part.next_offset for part in served.connection.bounds([topic]))


def test_a_killed_driver_publishes_each_record_once(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    fill(served.connection, topic, COUNTS)
    copy = f"{topic}-copy"
    served.connection.create_topic(copy, 2)
    kill_in_batch(start_driver(served, topic, tmp_path, copy), tmp_path / "checkpoint", 1)
    kill_after(start_driver(served, topic, tmp_path, copy), served, copy, records_of(served, copy) + 1_000)
    last = start_driver(served, topic, tmp_path, copy)
    assert last.wait(RUN_TIMEOUT_S) == 0, (tmp_path / "driver.log").read_text()[-2000:]
    reader = spark.read.format("polywire").options(address=served.address, subscribe=copy)
    found = sorted(row["value"] for row in reader.load().selectExpr("cast(value as string) as value").collect())
    assert found == sorted(f"{n}-{at}" for n, count in enumerate(COUNTS) for at in range(count))


def test_a_killed_driver_resumes_where_it_was(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    fill(served.connection, topic, COUNTS)
    for number in KILLED_AT:
        kill_in_batch(start_driver(served, topic, tmp_path), tmp_path / "checkpoint", number)
    last = start_driver(served, topic, tmp_path)
    assert last.wait(RUN_TIMEOUT_S) == 0, (tmp_path / "driver.log").read_text()[-2000:]
    table = spark.read.parquet(str(tmp_path / "table"))
    rows = table.selectExpr("partition", "offset", "cast(value as string) as value").collect()
    found = sorted((row["partition"], row["offset"], row["value"]) for row in rows)
    assert found == [(n, at, f"{n}-{at}") for n, count in enumerate(COUNTS) for at in range(count)]
