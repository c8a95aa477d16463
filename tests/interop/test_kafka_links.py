"""Links from Apache Kafka: the copy has every committed record once, with the same offset, key, headers and timestamp.

``POLYWIRE_KAFKA_JAVA`` is a class path with Kafka's broker and client (spec: kafka#clients-to-test-with). Kafka's own
client fills the topics, and reads both sides.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from benchmarks.peers.kafka import JARS, Kafka
from benchmarks.peers.peer import Absent
from polywire.cli.admin import AdminApi
from tests.broker_process import BrokerProcess

DRIVER = Path(__file__).parent / "kafka" / "Linked.java"
QUIET = ("-Xmx384m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error")
WAIT_S = 120.0
RECORDS = 3_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
CLEANER = "log.cleaner.backoff.ms=500\nlog.segment.delete.delay.ms=1000\n"


COMPILED: list[Path] = []


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of Apache Kafka."""
    try:
        with Kafka(CLEANER).running(tmp_path_factory.mktemp("kafka")) as server:
            if which("javac") is None:
                raise Absent("javac is missing")
            COMPILED[:] = [tmp_path_factory.mktemp("driver")]
            command = ["javac", "-cp", os.environ[JARS], "-d", str(COMPILED[0]), str(DRIVER)]
            subprocess.run(command, check=True, timeout=300)
            yield f"{server.address[0]}:{server.address[1]}"
    except Absent as error:
        pytest.skip(f"links were NOT tried with Apache Kafka, see {JARS}: {error}")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("data"), wires=["polywire", "kafka", "http"]) as process:
        yield process


def drive(address: str, *words: object) -> list[str]:
    """Run the driver, and return the lines of its output."""
    classes = f"{COMPILED[0]}:{os.environ[JARS]}"
    command = ["java", *QUIET, "-XX:TieredStopAtLevel=1", "-cp", classes, "Linked", address, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.splitlines()


def rows_of(address: str, topic: str) -> tuple[dict[int, list[Any]], list[int]]:
    """Return the committed records of each partition, and the end offsets, as Kafka's client reads them."""
    *lines, ends = drive(address, "read", topic)
    rows: dict[int, list[Any]] = {number: [] for number in range(3)}
    for line in lines:
        partition, *fields = json.loads(line)
        rows[partition].append(fields)
    return rows, json.loads(ends)


def follow(broker: BrokerProcess, kafka: str, topic: str, **options: Any) -> None:
    body = {"source": f"kafka://{kafka}", "topics": [topic], **options}
    AdminApi(broker.url("http")).request("POST", f"links/{topic}", body)


def report(broker: BrokerProcess, topic: str) -> Any:
    found = AdminApi(broker.url("http")).request("GET", f"links/{topic}")
    assert isinstance(found, dict)
    return found


def caught_up(broker: BrokerProcess, topic: str, copied: int) -> Any:
    """Wait until so many records were copied, and return the report on the topic."""
    end = time.monotonic() + WAIT_S
    found: Any = None
    while time.monotonic() < end:
        found = report(broker, topic)
        topics = found["topic_reports"]
        if topics and topics[0]["copied"] >= copied and topics[0]["lag"] == 0:
            return topics[0]
        time.sleep(0.2)
    raise AssertionError(f"not copied copied={copied} link={found}\n{broker.log_text()}")


def compare(broker: BrokerProcess, kafka: str, topic: str, *, ends: bool = True) -> int:
    """Compare both sides, and return the number of records."""
    original, stops = rows_of(kafka, topic)
    count = sum(map(len, original.values()))
    found = caught_up(broker, topic, count)
    copy, copy_stops = rows_of(broker.address("kafka"), topic)
    assert copy == original
    assert copy_stops == stops or not ends
    assert (found["shifted"], found["skipped"]) == (0, 0)
    return count


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_topics(kafka: str, broker: BrokerProcess, codec: str) -> None:
    topic = f"codec-{codec}"
    drive(kafka, "create", topic)
    drive(kafka, "codec", topic, codec, RECORDS)
    follow(broker, kafka, topic)
    assert compare(broker, kafka, topic) == RECORDS


def test_append_times(kafka: str, broker: BrokerProcess) -> None:
    drive(kafka, "create", "times", "message.timestamp.type=LogAppendTime")
    drive(kafka, "codec", "times", "lz4", 100)
    follow(broker, kafka, "times")
    assert compare(broker, kafka, "times") == 100


def test_transactions(kafka: str, broker: BrokerProcess) -> None:
    drive(kafka, "create", "transactions")
    follow(broker, kafka, "transactions")
    drive(kafka, "transactions", "transactions", 1_000)
    drive(kafka, "transactions", "transactions", 1_000)
    assert 0 < compare(broker, kafka, "transactions", ends=False) < 2_000
    drive(kafka, "codec", "transactions", "none", 3)  # a record after the markers of the last transactions
    compare(broker, kafka, "transactions")


def test_a_compacted_topic(kafka: str, broker: BrokerProcess) -> None:
    settings = "cleanup.policy=compact,segment.ms=200,min.cleanable.dirty.ratio=0.001,min.compaction.lag.ms=0"
    drive(kafka, "create", "compacted", settings)
    drive(kafka, "compacted", "compacted")
    follow(broker, kafka, "compacted")
    assert compare(broker, kafka, "compacted") > 200


def test_a_topic_whose_first_records_are_gone(kafka: str, broker: BrokerProcess) -> None:
    drive(kafka, "create", "trimmed")
    drive(kafka, "codec", "trimmed", "lz4", RECORDS)
    drive(kafka, "trim", "trimmed", 400)
    follow(broker, kafka, "trimmed")
    assert compare(broker, kafka, "trimmed") == RECORDS - 3 * 400


def test_latest(kafka: str, broker: BrokerProcess) -> None:
    drive(kafka, "create", "latest")
    drive(kafka, "codec", "latest", "lz4", RECORDS)
    follow(broker, kafka, "latest", start="latest")
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and not report(broker, "latest")["topic_reports"]:
        time.sleep(0.2)
    drive(kafka, "codec", "latest", "lz4", 30)
    found = caught_up(broker, "latest", 30)
    copy, stops = rows_of(broker.address("kafka"), "latest")
    original, original_stops = rows_of(kafka, "latest")
    assert (copy, stops) == ({number: rows[RECORDS // 3 :] for number, rows in original.items()}, original_stops)
    assert found["shifted"] == 0


def test_a_topic_that_was_created_again(kafka: str, broker: BrokerProcess) -> None:
    drive(kafka, "create", "again")
    drive(kafka, "codec", "again", "lz4", 30)
    follow(broker, kafka, "again")
    compare(broker, kafka, "again")
    drive(kafka, "delete", "again")
    drive(kafka, "create", "again")
    drive(kafka, "codec", "again", "lz4", 300)
    end = time.monotonic() + WAIT_S
    while "created again" not in (error := report(broker, "again")["topic_reports"][0]["error"]):
        assert time.monotonic() < end, error
        time.sleep(0.2)
    copy, _ = rows_of(broker.address("kafka"), "again")
    assert sum(map(len, copy.values())) == 30
