"""Share consumers: Java's and the queues of our client against this broker and Apache Kafka, and confluent-kafka's.

``POLYWIRE_KAFKA_JAVA`` names jars of Kafka's clients and of its broker, ``POLYWIRE_KAFKA_CLIENTS`` an interpreter with confluent-kafka
(spec: kafka#clients-to-test-with). Missing ones are skipped with a reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any, Final

import pytest

import polywire
from benchmarks.peers.kafka import JARS, Kafka
from benchmarks.peers.peer import Absent
from polywire.client.kafka import KafkaClient
from polywire.client.queue_worker import queue_worker
from polywire.errors import ErrorCode, Invalid
from polywire.protocols.polywire.messages import AcknowledgedRun
from polywire.types import Outcome
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


LOCK_S: Final = 15  # the shortest that Apache Kafka permits
WAIT_S: Final = 60.0


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


async def work(address: tuple[str, int]) -> dict[str, object]:
    """Accept, release, reject, delay and renew records, and let one lock expire."""
    found: dict[str, object] = {}
    async with polywire.connect("kafka://{}:{}".format(*address), reconnect_s=WAIT_S) as client:
        await client.create_topic("work", 1)
        async with client.queue("work", group="g", lock_s=LOCK_S, attempts=3) as queue:
            for number in range(4):
                await client.send("work", str(number))
            accepted, released, rejected, delayed = [await job_of(queue) for _ in range(4)]
            await asyncio.gather(accepted.ack(), released.retry(), rejected.reject(), delayed.retry(delay_s=2))
            again = [await job_of(queue) for _ in range(2)]
            found["again"] = [(job.text, job.attempt) for job in again]
            await asyncio.gather(*(job.ack() for job in again))
        async with client.queue("work", group="g", prefetch=1, start=None) as queue:
            await client.send("work", "renewed")
            renewed = await job_of(queue)
            await client.send("work", "expired")  # for the other worker, because this one is full
            wire = await KafkaClient.open(*address)
            silent = queue_worker(wire, group="g", topic="work", worker="silent")
            records: list[tuple[polywire.Record, int]] = []
            while not records:
                records = (await silent.acquire(records_max=1, wait_ms=500)).records
            [(record, attempt)] = records
            await asyncio.sleep(LOCK_S + 3)
            await renewed.ack()
            expired = await job_of(queue)
            found["expired"] = [(record.text, attempt), (expired.text, expired.attempt)]
            refused = await silent.acknowledge([AcknowledgedRun(0, record.offset, record.offset, Outcome.ACCEPT)])
            found["late"] = refused[0].code
            await expired.ack()
            found["rest"] = await queue.get(timeout_s=1)
            await silent.leave()
            await wire.close()
        with pytest.raises(Invalid) as invalid:
            await client.queue("work", group="g", lock_s=0.5).start()
        found["lock"] = invalid.value.code
    return found


async def job_of(queue: polywire.Queue) -> polywire.Job:
    job = await queue.get(timeout_s=WAIT_S)
    assert job is not None
    return job


WORKED: Final = {
    "again": [("1", 2), ("3", 2)],
    "expired": [("expired", 1), ("expired", 2)],
    "late": ErrorCode.RECORD_NOT_ACQUIRED,
    "rest": None,
    "lock": ErrorCode.INVALID_REQUEST,
}


@pytest.mark.slow
def test_a_queue_of_our_client(broker: BrokerProcess) -> None:
    assert asyncio.run(work(broker.addresses["kafka"])) == WORKED


@pytest.mark.slow
def test_a_queue_of_our_client_with_apache_kafka(tmp_path: Path) -> None:
    async def order(address: tuple[str, int]) -> None:
        async with polywire.connect("kafka://{}:{}".format(*address)) as client:
            with pytest.raises(Invalid, match="only Polywire brokers have"):
                await client.queue("work", group="g", order="key").start()

    try:
        with Kafka(ONE_BROKER).running(tmp_path) as server:
            assert asyncio.run(work(server.address)) == WORKED
            asyncio.run(order(server.address))
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
