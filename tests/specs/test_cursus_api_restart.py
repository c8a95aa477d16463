"""A client written from Cursus' API reference alone, through repeated kills of its broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.cursus_api_client import PATIENCE_S, Client, Refused
from tests.specs.steady_producer import SteadyProducer

KILLS = 2
BETWEEN = 50  # messages acknowledged before each kill of the broker
PARTITIONS = 2


@pytest.mark.parametrize("port", ["cursus", "any"])
def test_a_client_of_the_page_survives_kills_of_its_broker(tmp_path: Path, port: str) -> None:
    with BrokerProcess(tmp_path / "data", wires=["cursus", "any"]) as broker:
        reader = Reader(Client(broker.addresses[port]))
        reader.client.create("orders", PARTITIONS)
        client = Client(broker.addresses[port])
        producer = SteadyProducer(lambda number: client.publish("orders", f"v{number:06}"), PATIENCE_S)
        producer.start()
        for kills in range(KILLS + 1):
            producer.reach((kills + 1) * BETWEEN)
            reader.read_all()
            if kills < KILLS:
                broker.kill()
                broker.start()
        producer.ending.set()
        producer.join(PATIENCE_S)
        reader.read_all()
        assert sorted(set(reader.received)) == [f"v{number:06}" for number in range(1, producer.acknowledged + 1)]
        assert len(reader.received) <= producer.acknowledged + KILLS, "one may be duplicated for each broken connection"
        assert all(received == sorted(received) for received in reader.by_partition)
        assert reader.client.topics() == ["orders"]
        reader.client.delete("orders")
        with pytest.raises(Refused, match="topic 'orders' does not exist"):
            client.publish("orders", "late")
        client.close()
        reader.client.close()


class Reader:
    """Reads every partition from its last byte offset on."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.by_partition: list[list[str]] = [[] for _ in range(PARTITIONS)]
        self._offsets = [0] * PARTITIONS

    @property
    def received(self) -> list[str]:
        return [message for received in self.by_partition for message in received]

    def read_all(self) -> None:
        for partition, received in enumerate(self.by_partition):
            for message, following in self.client.read_all("orders", partition, self._offsets[partition]):
                received.append(message)
                self._offsets[partition] = following
