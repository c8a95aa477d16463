"""Throughput of unmodified Kafka clients with any broker: the Java performance tools, and librdkafka.

A client that is not installed is listed with its source.

By default librdkafka pauses fetching for a second once 100,000 records are in its queue. How often that happens in one round is random. So
its consumer gets a queue that holds all of a round.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.peers.kafka import JARS
from benchmarks.peers.peer import Absent, Address, find

PYTHON: Final = "POLYWIRE_KAFKA_CLIENTS"
RECORD_BYTES: Final = 100
BATCH_BYTES: Final = 110_000  # a thousand records and their headers
TIMEOUT_S: Final = 300.0

_LIBRDKAFKA: Final = """
import json, sys, time
from confluent_kafka import Consumer, Producer
servers, topic, records = sys.argv[1], sys.argv[2], int(sys.argv[3])
producer = Producer({"bootstrap.servers": servers, "acks": 1, "batch.size": 110000, "linger.ms": 5,
                     "queue.buffering.max.messages": 1000000, "compression.type": "none"})
producer.list_topics(topic, timeout=30)
value, begun = b"x" * 100, time.perf_counter()
for _ in range(records):
    while True:
        try:
            producer.produce(topic, value)
            break
        except BufferError:
            producer.poll(0.01)
left = producer.flush(60)
assert not left, left
produced = records / (time.perf_counter() - begun)
consumer = Consumer({"bootstrap.servers": servers, "group.id": "bench-" + topic, "auto.offset.reset": "earliest",
                     "enable.auto.commit": False, "fetch.wait.max.ms": 100,
                     "queued.min.messages": 1000000, "fetch.queue.backoff.ms": 5})
consumer.subscribe([topic])
found = 0
while not found:
    found = len(consumer.consume(1, 60))
begun, first = time.perf_counter(), found
while found < records:
    found += len(consumer.consume(10000, 0.1))
print(json.dumps([produced, (found - first) / (time.perf_counter() - begun)]))
consumer.close()
"""


def librdkafka(address: Address, topic: str, records: int) -> tuple[float, float]:
    """Return (produced, consumed) records per second of one confluent-kafka process. Raises Absent."""
    python = os.environ.get(PYTHON, "")
    if not Path(python).is_file():
        raise Absent(f"set {PYTHON} to a Python that has confluent-kafka")
    done = _run([python, "-c", _LIBRDKAFKA, f"{address[0]}:{address[1]}", topic, str(records)])
    produced, consumed = json.loads(done.splitlines()[-1])
    return produced, consumed


def java(address: Address, topic: str, records: int) -> tuple[float, float]:
    """Return (produced, consumed) records per second of Kafka's performance tools. Raises Absent."""
    jars = os.environ.get(JARS, "")
    if not jars:
        raise Absent(f"set {JARS}='directory/*' to jars of org.apache.kafka:kafka-tools and what it depends on (Maven)")
    server = f"{address[0]}:{address[1]}"
    run = [find("java", "openjdk-17-jre-headless"), "-Xmx512m", "-cp", jars]
    asked = ["--topic", topic, "--num-records", str(records), "--record-size", str(RECORD_BYTES), "--throughput", "-1"]
    asked += ["--command-property", f"bootstrap.servers={server}", "acks=1", f"batch.size={BATCH_BYTES}", "linger.ms=5"]
    said = _run([*run, "org.apache.kafka.tools.ProducerPerformance", *asked]).splitlines()[-1]
    produced = float(said.partition("records sent, ")[2].split()[0])
    asked = ["--bootstrap-server", server, "--topic", topic, "--num-records", str(records), "--timeout", "60000"]
    table = [
        line for line in _run([*run, "org.apache.kafka.tools.ConsumerPerformance", *asked]).splitlines() if "," in line
    ]
    figures = dict(zip(_cells(table[-2]), _cells(table[-1]), strict=True))
    return produced, float(figures["fetch.nMsg.sec"])


def _cells(line: str) -> Sequence[str]:
    return [cell.strip() for cell in line.split(",")]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise AssertionError(f"{command[-1]!r} failed\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout
