"""The small client written from the pages on Kafka 0.7 alone works, through the broker's death and its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.kafka07_page_client import Client

TOPIC = b"flights"
MESSAGES = 600


def consumes(client: Client, found: list[bytes], until: int) -> None:
    """Consume until that many were found, or there are no more."""
    while len(found) < until:
        brought = client.consume(TOPIC, 0, 500)
        if not brought:
            return
        found += brought


@pytest.mark.parametrize("port", ["kafka07", "any"])
def test_the_small_client_survives_the_brokers_death_and_its_own(tmp_path: Path, port: str) -> None:
    kept = tmp_path / "offsets.json"
    with BrokerProcess(tmp_path / "data", wires=("kafka07", "any")) as broker:
        consuming, producing = Client(broker.addresses[port], kept), Client(broker.addresses[port])
        acknowledged, some = list[bytes](), threading.Event()

        def produces() -> None:
            for number in range(MESSAGES):
                payload = b"message %d" % number + b"." * (number % 70) * 10
                producing.produce(TOPIC, 0, payload)
                acknowledged.append(payload)
                if number == MESSAGES // 3:
                    some.set()

        found = list[bytes]()
        producer = threading.Thread(target=produces)
        producer.start()
        assert some.wait(60)
        consumes(consuming, found, 100)
        broker.kill()
        broker.start()
        producer.join()
        consumes(consuming, found, 300)
        consuming.socket.close()
        again = Client(broker.addresses[port], kept)
        consumes(again, found, 2 * MESSAGES)
        assert list(dict.fromkeys(found)) == acknowledged
        assert len(found) <= MESSAGES + 1, "one may be duplicated: the one in flight"
        for client in (again, producing):
            client.socket.close()
