"""The unmodified Java client of Cursus 0.1.1 against a real broker.

It is no part of this project and in no registry: ``POLYWIRE_CURSUS_JAVA`` is a class path with it and its dependencies.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from polywire.errors import Unavailable
from polywire.protocols.cursus.messages import frame
from polywire.spark.java import find_java
from tests.interop.test_cursus_client import stored
from tests.three_brokers import Brokers, one_or_three

WAIT_S = 40.0
_groups = count(1)


@pytest.fixture(scope="module")
def java() -> Iterator[Any]:
    class_path = os.environ.get("POLYWIRE_CURSUS_JAVA")
    if class_path is None:
        pytest.skip("POLYWIRE_CURSUS_JAVA is not set: the Cursus wire was NOT tried with its real Java client")
    gateways = pytest.importorskip("py4j.java_gateway")
    try:
        home = find_java().home
    except Unavailable as error:
        pytest.skip(f"the Cursus wire was NOT tried with its real Java client: {error.message}")
    port = gateways.launch_gateway(
        classpath=class_path, die_on_exit=True, java_path=str(home / "bin" / "java"), redirect_stderr=None
    )
    gateway = gateways.JavaGateway(
        gateway_parameters=gateways.GatewayParameters(port=port, auto_convert=True),
        callback_server_parameters=gateways.CallbackServerParameters(port=0, daemonize=True),
    )
    gateway.java_gateway_server.resetCallbackClient(
        gateway.java_gateway_server.getCallbackClient().getAddress(),
        gateway.get_callback_server().get_listening_port(),
    )
    yield gateway
    gateway.shutdown()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with one_or_three(tmp_path_factory.mktemp("cursus-java")) as process:
        yield process


class Taking:
    """A ``java.util.function.Consumer`` that collects its arguments."""

    def __init__(self) -> None:
        self.got: list[tuple[int, str]] = []
        self.lock = threading.Lock()

    def accept(self, message: Any) -> None:
        with self.lock:
            self.got.append((message.getOffset(), message.getPayload()))

    class Java:
        implements = ["java.util.function.Consumer"]  # noqa: RUF012 - py4j reads it so


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"did not happen in {WAIT_S} s: {what}"
        time.sleep(0.05)


def brokers(java: Any, broker: Brokers) -> Any:
    host, port = broker.addresses["cursus"]
    return java.jvm.java.util.List.of(f"{host}:{port}")


def produce(java: Any, broker: Brokers, topic: str, values: range, **options: Any) -> None:
    client = java.jvm.io.cursus.client
    builder = client.config.CursusProducerConfig.builder().brokers(brokers(java, broker)).topic(topic)
    builder = builder.partitions(2).autoCreateTopic(True).lingerMs(5)
    for name, value in options.items():
        builder = getattr(builder, name)(value)
    producer = client.producer.CursusProducer(builder.build())
    try:
        for value in values:
            producer.send(f"value-{value}", f"k{value % 5}")
        producer.flush()
        until(lambda: bool(producer.getUniqueAckCount() == len(values)), f"acknowledgements of {topic}")
    finally:
        producer.close()


@pytest.mark.parametrize("kind", ["plain", "none", "all", "idempotent", "gzip"])
def test_producers(java: Any, broker: Brokers, kind: str) -> None:
    acks = java.jvm.io.cursus.client.config.Acks
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "none": {"acks": acks.NONE},
        "all": {"acks": acks.ALL},
        "idempotent": {"idempotent": True},
        "gzip": {"compressionType": "gzip"},
    }
    produce(java, broker, f"java-{kind}", range(600), **options[kind])
    found = stored(broker, f"java-{kind}", 2)
    assert sorted(record.value or b"" for record in found) == sorted(b"value-%d" % n for n in range(600))


class Consuming:
    """A consumer of the Java client."""

    def __init__(self, java: Any, broker: Brokers, topic: str, mode: str, group: str) -> None:
        client = java.jvm.io.cursus.client
        builder = client.config.CursusConsumerConfig.builder().brokers(brokers(java, broker)).topic(topic)
        builder = builder.groupId(group).consumerMode(client.config.ConsumerMode.valueOf(mode)).heartbeatIntervalMs(500)
        self.taking = Taking()
        self.consumer = client.consumer.CursusConsumer(builder.build())
        self._thread = threading.Thread(target=self.consumer.start, args=(self.taking,), daemon=True)

    def __enter__(self) -> Consuming:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the consumer did not stop"


@pytest.mark.parametrize("mode", ["POLLING", "STREAMING"])
def test_consumers_get_everything_once(java: Any, broker: Brokers, mode: str) -> None:
    topic = f"java-consumer-{mode.lower()}"
    produce(java, broker, topic, range(300))
    with Consuming(java, broker, topic, mode, f"group-{next(_groups)}") as consuming:
        until(lambda: len(consuming.taking.got) >= 300, f"300 records got={len(consuming.taking.got)}")
        produce(java, broker, topic, range(300, 400))
        until(lambda: len(consuming.taking.got) >= 400, f"400 records got={len(consuming.taking.got)}")
        time.sleep(0.7)
    assert sorted(value for _, value in consuming.taking.got) == sorted(f"value-{n}" for n in range(400))


def test_two_consumers_settle_and_share_a_group(java: Any, broker: Brokers) -> None:
    topic, group = "java-group", f"group-{next(_groups)}"
    produce(java, broker, topic, range(10))
    with (
        Consuming(java, broker, topic, "POLLING", group) as one,
        Consuming(java, broker, topic, "POLLING", group) as two,
    ):
        time.sleep(3)  # both have joined, and know of each other
        produce(java, broker, topic, range(1_000, 1_200))

        def fresh(side: Consuming) -> set[str]:
            return {value for _, value in side.taking.got if int(value[6:]) >= 1_000}

        until(lambda: len(fresh(one) | fresh(two)) >= 200, f"200 records got={len(fresh(one))},{len(fresh(two))}")
        assert not fresh(one) & fresh(two)
        assert min(len(fresh(one)), len(fresh(two))) == 80  # two of five keys hash to the first, three to the other
        shown = status(broker, group)
        assert (shown["generation"], shown["member_count"]) == (2, 2)
    # A client whose last heartbeat requested a rejoin does so after its LEAVE_GROUP, and must expire.
    until(lambda: status(broker, group)["member_count"] == 0, "both have left")


def status(broker: Brokers, group: str) -> dict[str, Any]:
    with socket.create_connection(broker.addresses["cursus"], timeout=10) as peer:
        peer.sendall(frame(f"GROUP_STATUS group={group}".encode()))
        reported: dict[str, Any] = json.loads(peer.recv(65_536)[4:])
    return reported
