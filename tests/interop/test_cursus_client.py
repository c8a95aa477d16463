"""The unmodified Python SDK of Cursus (PyPI cursus-client 0.1.1) against a real broker: producers of every kind.

It is no part of this project; ``make dev`` installs it beside the tests, ``POLYWIRE_INTEROP`` names another folder of
such packages.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polywire.client.connect import connect
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess
from tests.three_brokers import Brokers, one_or_three, through

PACKAGE = "cursus-client-0.1.1"
WAIT_S = 20.0
PARTS = 4  # a process is killed between two of them


@pytest.fixture(scope="module")
def sdk() -> Iterator[Any]:
    usual = Path(__file__).resolve().parents[2] / ".venv" / "interop"
    place = Path(os.environ.get("POLYWIRE_INTEROP", str(usual))) / PACKAGE
    if not (place / "cursus").exists():
        pytest.skip(f"{place} is not there: the Cursus wire was NOT tried with its real Python SDK")
    sys.path.insert(0, str(place))
    try:
        yield importlib.import_module("cursus")
    finally:
        sys.path.remove(str(place))


@pytest.fixture(scope="module", params=[(), ("--processes", "2")], ids=["one process", "two processes"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    if request.param and through() is not None:
        pytest.skip("three brokers of one process each")
    with one_or_three(tmp_path_factory.mktemp("cursus"), *request.param, wires=("cursus", "polywire")) as process:
        yield process


def address(broker: Brokers) -> str:
    host, port = broker.addresses["cursus"]
    return f"{host}:{port}"


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"did not happen in {WAIT_S} s: {what}"
        time.sleep(0.02)


def stored(broker: Brokers, topic: str, partitions: int) -> list[Record]:
    """Return every record of a topic, read over another protocol."""

    async def read() -> list[Record]:
        client = await connect(broker.url("polywire"))
        try:
            return [record for number in range(partitions) for record in await client.fetch(topic, number, 0)]
        finally:
            await client.close()

    return asyncio.run(read())


def produce(sdk: Any, broker: Brokers, topic: str, count: int, **options: Any) -> Any:
    config = sdk.ProducerConfig(topic=topic, brokers=[address(broker)], partitions=2, linger_ms=5, **options)
    with sdk.Producer(config) as producer:
        for number in range(count):
            producer.send(f"value-{number}", key=f"k{number % 5}")
        producer.flush()
        until(lambda: producer.unique_ack_count == count, f"acknowledgements of {topic}")
    return producer


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("acks-none", {"acks": "0"}),
        ("acks-all", {"acks": "-1"}),
        ("idempotent", {"idempotent": True}),
        ("gzip", {"compression_type": "gzip"}),
        ("gzip-idempotent", {"compression_type": "gzip", "idempotent": True}),
    ],
)
def test_producers(sdk: Any, broker: Brokers, name: str, options: dict[str, Any]) -> None:
    if "acks" in options:
        options = {**options, "acks": sdk.Acks(options["acks"])}
    produce(sdk, broker, f"producer-{name}", 1_200, **options)
    found = stored(broker, f"producer-{name}", 2)
    assert sorted(record.value or b"" for record in found) == sorted(b"value-%d" % n for n in range(1_200))
    assert {record.key for record in found} == {b"k%d" % n for n in range(5)}


class Consuming:
    """A consumer of the SDK in its own thread, and its records."""

    def __init__(self, sdk: Any, broker: Brokers, topic: str, mode: str, **options: Any) -> None:
        self.got: list[Any] = []
        config = sdk.ConsumerConfig(topic=topic, brokers=[address(broker)], mode=sdk.ConsumerMode(mode), **options)
        self.consumer = sdk.Consumer(config)
        self._thread = threading.Thread(target=self.consumer.start, args=(self.got.append,), daemon=True)

    def __enter__(self) -> Consuming:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the consumer did not stop"


@pytest.mark.parametrize("mode", ["polling", "streaming"])
def test_consumers_get_everything_once_and_in_order(sdk: Any, broker: Brokers, mode: str) -> None:
    topic = f"consumer-{mode}"
    produce(sdk, broker, topic, 500)
    with Consuming(sdk, broker, topic, mode, group_id=f"g-{mode}") as consuming:
        until(lambda: len(consuming.got) >= 500, f"500 records got={len(consuming.got)}")
        produce(sdk, broker, topic, 100)
        until(lambda: len(consuming.got) >= 600, f"600 records got={len(consuming.got)}")
        time.sleep(0.7)  # one more poll: there are no duplicates
    places = [(message.partition, message.offset) for message in consuming.got]
    assert len(set(places)) == len(places) == 600
    for partition in range(2):
        offsets = [offset for place, offset in places if place == partition]
        assert offsets == sorted(offsets)
    assert {message.key for message in consuming.got} == {f"k{n}" for n in range(5)}


def test_a_producer_continues_while_processes_are_killed(sdk: Any, tmp_path: Path) -> None:
    """Whichever process it connects to, and whichever owns the topic."""
    data_dir, count = tmp_path / "data", 4_000
    with BrokerProcess(data_dir, "--processes", "2", wires=("cursus", "polywire")) as broker:
        config = sdk.ProducerConfig(
            topic="lasting", brokers=[address(broker)], partitions=2, linger_ms=5, idempotent=True
        )
        with sdk.Producer(config) as producer:
            for part in range(PARTS):
                kill_between(data_dir, part)
                send(producer, range(count * part // PARTS, count * (part + 1) // PARTS))
            producer.flush()
            until(lambda: producer.unique_ack_count == count, "acknowledgements")
        found = stored(broker, "lasting", 2)
    assert sorted(record.value or b"" for record in found) == sorted(b"value-%d" % n for n in range(count))


def send(producer: Any, numbers: range) -> None:
    """Send one value after the other, as an application would."""
    for number in numbers:
        producer.send(f"value-{number}", key=f"k{number % 5}")
        time.sleep(0.001)


def kill_between(data_dir: Path, part: int) -> None:
    """Kill one process before every part but the first, in turns; its parent restarts it."""
    if part == 0:
        return
    lock = (data_dir / "shards" / "0001" if part % 2 else data_dir) / "LOCK"
    os.kill(int(lock.read_text().split()[0]), signal.SIGKILL)
