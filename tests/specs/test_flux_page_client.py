"""The small client written from the FLUX pages alone works, through the broker's death."""

from __future__ import annotations

import threading
from itertools import chain
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.flux_page_client import Client, Consumer, Refused

TOPIC, GROUP = "orders", "workers"
RECORDS = 600
POLLS_MAX = 2_000


@pytest.mark.parametrize("port", ["flux", "any"])
def test_the_small_client_survives_the_brokers_death(tmp_path: Path, port: str) -> None:
    with BrokerProcess(tmp_path / "data", wires=("flux", "any")) as broker:
        clients = [Client(broker.addresses[port]) for _ in range(3)]
        acknowledged: dict[tuple[int, int], str] = {}
        some = threading.Event()

        def produces() -> None:
            for number in range(RECORDS):
                value = f"value-{number}"
                acknowledged[clients[0].produce(TOPIC, f"order-{number}", value)] = value
                if number == RECORDS // 3:
                    some.set()

        found: dict[tuple[int, int], str] = {}

        def handle(partition: int, offset: int, value: str) -> None:
            assert found.setdefault((partition, offset), value) == value, "an offset does not change"

        members = [Consumer(clients[1], GROUP, TOPIC, "c1"), Consumer(clients[2], GROUP, TOPIC, "c2")]
        producer = threading.Thread(target=produces)
        producer.start()
        assert some.wait(60)
        for member in members:
            member.poll(handle)
        broker.kill()
        broker.start()
        producer.join()
        for _ in range(POLLS_MAX):
            for member in members:
                member.poll(handle)
            shared = sorted(chain(*(member.partitions for member in members)))
            if acknowledged.keys() <= found.keys() and shared == [0, 1, 2]:
                break
        assert acknowledged.items() <= found.items(), "nothing acknowledged is lost"
        assert len(found) <= RECORDS + 1, "one may be duplicated: the one in flight"
        assert all(client.reopened for client in clients)
        assert shared == [0, 1, 2]
        members[1].leave()
        with pytest.raises(Refused, match="GENERATION_MISMATCH"):
            clients[1].ask("SYNC", GROUP, TOPIC, "c1", members[0].generation)
        members[0].poll(handle)
        assert members[0].partitions == [0, 1, 2]
        for client in clients:
            client.close()


def test_the_small_client_reads_a_partition_and_gets_errors(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=("flux",)) as broker:
        client = Client(broker.addresses["flux"])
        partition, offset = client.produce(TOPIC, "user1", "created", acks="0")
        assert client.consume(TOPIC, partition, offset) == [(0, "created")]
        assert client.consume(TOPIC, partition, offset + 1) == []
        for code, command, arguments in (
            ("UNKNOWN_COMMAND", "NOPE", ("x",)),
            ("BAD_REQUEST", "CONSUME", (TOPIC, "bad", 0)),
            ("REPLICATION_TIMEOUT", "PRODUCE", (TOPIC, "user1:paid", "acks=all")),
        ):
            with pytest.raises(Refused) as refused:
                client.ask(command, *arguments)
            assert refused.value.code == code
        client.close()
