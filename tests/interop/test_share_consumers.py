"""Unmodified share consumers: Java's against this broker and Apache Kafka in one run, and confluent-kafka's.

``POLYWIRE_KAFKA_JAVA`` names jars of Kafka's clients and of its broker, ``POLYWIRE_KAFKA_CLIENTS`` an interpreter with confluent-kafka
(spec: kafka#clients-to-test-with). Missing ones are skipped with a reason.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any, Final

import pytest

from benchmarks.peers.kafka import JARS, Kafka
from benchmarks.peers.peer import Absent
from tests.broker_process import BrokerProcess

DRIVERS: Final = Path(__file__).parent / "kafka"
CLIENTS: Final = "POLYWIRE_KAFKA_CLIENTS"
SECONDS_MAX: Final = 240.0
COUNT: Final = 2_000
ONE_BROKER: Final = """\
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
"""
STEPS: Final = """\
explicit 0x1 1x1 2x1 3x1 4x1 5x1
committed ok
again 1x2 4x2
renewed ok
returned 1x2 4x2
accepted ok
unfinished 6x1 7x1 8x1
implicit 6x2 7x2 8x2
all ok
held 9x1
expired 9x2
late InvalidRecordStateException
in time ok
often 10x1
often 10x2
never 0
start true
state Empty
altered 3
listed 0
""".splitlines()
"""The steps that Apache Kafka 4.3.0 takes, too: offset x delivery count of each record."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", wires=["kafka"]) as process:
        yield process


def java(address: tuple[str, int]) -> list[str]:
    if which("java") is None or not os.environ.get(JARS):
        pytest.skip(f"{JARS} is not set, or java is missing: Java's share consumer was NOT run")
    command = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
    command += ["-cp", os.environ[JARS], str(DRIVERS / "Share.java"), "{}:{}".format(*address), "jobs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_share_consumer_of_java(broker: BrokerProcess) -> None:
    assert java(broker.addresses["kafka"]) == STEPS


@pytest.mark.slow
def test_the_same_steps_with_apache_kafka(tmp_path: Path) -> None:
    try:
        with Kafka(ONE_BROKER).running(tmp_path) as server:
            assert java(server.address) == STEPS
    except Absent as absent:
        pytest.skip(f"Apache Kafka was NOT run: {absent}")


def test_share_consumers_of_librdkafka(broker: BrokerProcess) -> None:
    interpreter = os.environ.get(CLIENTS)
    if not interpreter:
        pytest.skip(f"{CLIENTS} is not set: confluent-kafka's share consumers were NOT run")
    address = "{}:{}".format(*broker.addresses["kafka"])
    command = [interpreter, str(DRIVERS / "share.driver"), address, str(COUNT), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["accepted"] == list(range(COUNT))
    assert found["attempts"] == {str(n): [1, 2] if n % 10 == 0 else [1] for n in range(COUNT)}
