"""A client written from the Java client's protocol page alone, through repeated kills of its broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.cursus_java_client import PATIENCE_S, Batch, Client, Message
from tests.specs.steady_producer import SteadyProducer

KILLS = 2
BETWEEN = 50  # messages acknowledged before each kill of the broker


@pytest.mark.parametrize("port", ["cursus", "any"])
def test_a_client_of_the_page_survives_kills_of_its_broker(tmp_path: Path, port: str) -> None:
    with BrokerProcess(tmp_path / "data", wires=["cursus", "any"]) as broker:
        reader = Reader(Client(broker.addresses[port]))
        client = Client(broker.addresses[port])
        producer = SteadyProducer(lambda number: produce(client, number), PATIENCE_S)
        producer.start()
        for _ in range(KILLS):
            producer.reach(len(reader.received) + BETWEEN)
            reader.read_all()
            broker.kill()
            broker.start()
            reader.live()
        producer.reach(len(reader.received) + BETWEEN)
        producer.ending.set()
        producer.join(PATIENCE_S)
        reader.read_all()
        assert reader.received == [f"v{n}" for n in range(1, producer.acknowledged + 1)]
        reader.live()
        assert reader.generation > 0
        client.close()
        reader.client.close()


def produce(client: Client, number: int) -> None:
    """Store the message of this number, which is the next."""
    message = Message(sequence=number, producer="p", epoch=1, payload=f"v{number}")
    reported = client.produce(Batch("orders", 0, [message], acks="-1", idempotent=True))
    assert (reported["status"], reported["last_offset"]) == ("OK", number - 1), reported


class Reader:
    """A member of a group that reads and commits."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.received: list[str] = []
        assert not client.ask("CREATE orders 1").startswith("ERROR:")
        self._join()

    def _join(self) -> None:
        """Send JOIN_GROUP, then SYNC_GROUP for the partitions."""
        self.member, self.generation = self._place(self.client.ask("JOIN_GROUP orders workers c1"))
        answer = self.client.ask(f"SYNC_GROUP orders workers {self.member} {self.generation}")
        assert (self._place(answer), answer.partition("assignments=")[2]) == ((self.member, self.generation), "[0]")

    @staticmethod
    def _place(answer: str) -> tuple[str, int]:
        assert answer.startswith("OK "), answer
        reported = dict(word.partition("=")[::2] for word in answer.split())
        return reported["member"], int(reported["generation"])

    def live(self) -> None:
        """Send a heartbeat; rejoin if the member is unknown."""
        answer = self.client.ask(f"HEARTBEAT orders workers c1 {self.member} {self.generation}")
        if "REBALANCE_REQUIRED" in answer:
            self._join()
        else:
            assert answer.startswith("OK"), answer

    def read_all(self) -> None:
        """Read everything from where it stopped, and commit it."""
        while messages := self.client.consume("orders", 0, len(self.received)).messages:
            self.received += [message.payload for message in messages]
        assert self.client.ask(f"COMMIT orders workers 0 {len(self.received)}") == "OK"
        pairs = f"P0:{len(self.received)}"
        reported = self.client.ask(f"BATCH_COMMIT orders workers {self.member} {self.generation} {pairs}")
        if "REBALANCE_REQUIRED" in reported:
            self.live()
        else:
            assert reported == "OK batched=1"
