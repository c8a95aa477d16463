"""Unmodified clients of today's Kafka against a real broker: each writes with every codec it has, and in transactions, the broker is killed,
and each reads what all of them wrote, as a member of a group.

The clients are not part of this project. ``POLYWIRE_KAFKA_CLIENTS`` names an interpreter that has them (spec: kafka#clients-to-test-with);
without it the tests are skipped, and said.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess

CLIENTS = {"confluent-kafka": "confluent_kafka", "kafka-python": "kafka", "aiokafka": "aiokafka"}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
RECORDS = 200
LIVES, TRANSACTIONS = 2, 8
PARTITIONS = 3
SECONDS_MAX = 90.0
DRIVER = Path(__file__).parent / "kafka" / "clients.driver"


@pytest.fixture(scope="module")
def interpreter() -> str:
    found = os.environ.get("POLYWIRE_KAFKA_CLIENTS", "")
    if not Path(found).is_file():
        pytest.skip("clients of Kafka are not here: POLYWIRE_KAFKA_CLIENTS names no interpreter")
    for client, module in CLIENTS.items():
        if subprocess.run([found, "-c", f"import {module}"], capture_output=True, check=False).returncode:
            pytest.skip(f"a client of Kafka is not here: {client}")
    return found


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("kafka") / "data", wires=["kafka"]) as process:
        yield process


def run(
    interpreter: str, broker: BrokerProcess, client: str, what: str, topic: str, codec: str, count: int = RECORDS
) -> list[list[object]]:
    host, port = broker.addresses["kafka"]
    command = [interpreter, str(DRIVER), client, what, f"{host}:{port}", topic, codec, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_client_reads_what_all_have_written_before_a_kill(interpreter: str, broker: BrokerProcess) -> None:
    topics = {f"{client}.{codec}": (client, codec) for client in CLIENTS for codec in CODECS}
    for topic, (client, codec) in topics.items():
        run(interpreter, broker, client, "write", topic, codec)
    broker.kill()
    broker.start()
    seen = {
        (reader, topic): run(interpreter, broker, reader, "read", topic, codec)
        for topic, (_, codec) in topics.items()
        for reader in CLIENTS
    }
    expected = next(iter(seen.values()))
    assert len(expected) == RECORDS
    assert {bytes.fromhex(str(value))[:1] for _, value, _, _ in expected if value} == {b"v", b"\0", b"x"}
    assert {value for _, value, _, _ in expected} >= {None, ""}
    assert not {place: len(found) for place, found in seen.items() if found != expected}


def test_every_client_reads_what_all_have_committed_and_nothing_else(interpreter: str, broker: BrokerProcess) -> None:
    for _ in range(LIVES):
        for client in CLIENTS:
            run(interpreter, broker, client, "transact", f"committed.{client}", "lz4", TRANSACTIONS)
        broker.kill()
        broker.start()
    committed = [b"%d" % number for number in range(TRANSACTIONS) if number % 3 != 2]
    wanted = sorted(value.hex() for value in committed * PARTITIONS * LIVES)
    for topic in (f"committed.{client}" for client in CLIENTS):
        for reader in CLIENTS:
            found = run(interpreter, broker, reader, "read", topic, "none", len(wanted))
            assert sorted(str(value) for _, value, _, _ in found) == wanted, (topic, reader)
