"""The small client written from Iggy's page of 2023 alone works, through the broker's death."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.iggy_page_client import (
    CREATE_GROUP,
    CREATE_STREAM,
    CREATE_TOPIC,
    GROUP,
    JOIN_GROUP,
    NEXT,
    POLL,
    SEND,
    Client,
    consumer,
    identifier,
    message,
    name,
    polled,
    strategy,
    u32,
)

AT = identifier(1) + identifier("paid")
MESSAGES = 600
PARTITIONS = 3


def polls(client: Client, found: dict[int, bytes], until: int) -> None:
    """Consume as a member of the group until there are that many messages, or every partition is exhausted."""
    poll = consumer(GROUP, 5) + AT + u32(0) + strategy(NEXT) + u32(20) + b"\1"
    in_vain = 0
    while len(found) < until and in_vain < PARTITIONS:
        brought = polled(client.command(POLL, poll)).messages
        in_vain = 0 if brought else in_vain + 1
        for one in brought:
            assert found.setdefault(one.id, one.payload) == one.payload


@pytest.mark.parametrize("port", ["iggy", "any"])
def test_the_small_client_survives_the_brokers_death(tmp_path: Path, port: str) -> None:
    with BrokerProcess(tmp_path / "data", wires=("iggy", "any")) as broker:
        consuming, producing = (Client(broker.addresses[port]) for _ in range(2))
        producing.command(CREATE_STREAM, u32(1) + name("orders"))
        producing.command(CREATE_TOPIC, identifier(1) + u32(1) + u32(PARTITIONS) + u32(0) + name("paid"))
        consuming.command(CREATE_GROUP, AT + u32(5))
        consuming.command(JOIN_GROUP, AT + u32(5))
        acknowledged, some = list[int](), threading.Event()

        def produces() -> None:
            for number in range(1, MESSAGES + 1):
                key = b"\3\1%d" % (number % 5)
                producing.command(SEND, AT + key + message(b"message %d" % number, number))
                acknowledged.append(number)
                if number == MESSAGES // 3:
                    some.set()

        found: dict[int, bytes] = {}
        producer = threading.Thread(target=produces)
        producer.start()
        assert some.wait(60)
        polls(consuming, found, 100)
        broker.kill()
        broker.start()
        producer.join()
        polls(consuming, found, MESSAGES)
        assert found == {number: b"message %d" % number for number in acknowledged}
        assert len(acknowledged) == MESSAGES
        for client in (consuming, producing):
            client.socket.close()
