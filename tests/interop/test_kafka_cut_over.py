"""Clients of Apache Kafka move to a copy and back, while brokers and the process that runs links are killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.peers.kafka import JARS
from tests.histories.cut_overs import ApacheKafka, run

CLIENTS = "POLYWIRE_KAFKA_CLIENTS"  # an interpreter with confluent-kafka


@pytest.mark.skipif(not os.environ.get(JARS), reason=f"needs Apache Kafka in {JARS}")
def test_clients_move_from_apache_kafka_and_back(tmp_path: Path) -> None:
    with ApacheKafka(tmp_path) as source:
        world = run(tmp_path, seed=1, rounds=3, wire="kafka", source=source, report=lambda _: None)
    assert world.records


@pytest.mark.skipif(not os.environ.get(JARS), reason=f"needs Apache Kafka in {JARS}")
@pytest.mark.skipif(not os.environ.get(CLIENTS), reason=f"{CLIENTS} is not set: confluent-kafka was NOT moved")
def test_unmodified_clients_move_from_apache_kafka_and_back(tmp_path: Path) -> None:
    with ApacheKafka(tmp_path) as source:
        confluent = os.environ[CLIENTS]
        world = run(tmp_path, seed=1, rounds=3, wire="kafka", source=source, confluent=confluent, report=lambda _: None)
    assert world.records


@pytest.mark.skipif(not os.environ.get(CLIENTS), reason=f"{CLIENTS} is not set: confluent-kafka was NOT moved")
def test_unmodified_clients_move_between_brokers(tmp_path: Path) -> None:
    world = run(tmp_path, seed=2, rounds=3, confluent=os.environ[CLIENTS], report=lambda _: None)
    assert world.records
