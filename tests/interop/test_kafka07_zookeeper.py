"""The Kafka 0.7 protocol registered in a real ZooKeeper, and an unmodified client that finds it there.

``POLYWIRE_ZOOKEEPER`` is HOST:PORT of a running ZooKeeper; everything happens below a unique name. For the client see
``test_kafka07_clients``.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polywire.client.sync import connect
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess

WAIT_S = 20.0
DRIVER = Path(__file__).parent / "kafka07" / "samsa-zookeeper.py2"


@pytest.fixture
def place() -> str:
    address = os.environ.get("POLYWIRE_ZOOKEEPER")
    if address is None:
        pytest.skip("POLYWIRE_ZOOKEEPER is not set: registration was NOT tried with a real ZooKeeper")
    return f"{address}/polywire-{secrets.token_hex(6)}"


@pytest.fixture
def keeper(place: str) -> Iterator[Any]:
    from kazoo.client import KazooClient

    address, _, chroot = place.partition("/")
    client = KazooClient(hosts=address, timeout=6.0)
    client.start(10)
    client.ensure_path(f"/{chroot}")
    client.chroot = f"/{chroot}"
    try:
        yield client
    finally:
        client.chroot = ""
        client.delete(f"/{chroot}", recursive=True)
        client.stop()
        client.close()


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"did not happen in {WAIT_S} s: {what}"
        time.sleep(0.05)


def content(keeper: Any, path: str) -> bytes | None:
    """Return the content of a node, or None."""
    from kazoo.exceptions import NoNodeError

    try:
        found: bytes = keeper.get(path)[0]
    except NoNodeError:
        return None
    return found


def test_broker_and_topics_are_registered(place: str, keeper: Any, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--kafka07-zookeeper", place) as broker:
        until(lambda: keeper.exists("/brokers/ids/0") is not None, "the broker is registered")
        host, port = broker.addresses["kafka07"]
        data, stat = keeper.get("/brokers/ids/0")
        creator, advertised_host, advertised_port = data.decode().split(":")
        assert (advertised_host, int(advertised_port)) == (host, port)
        assert creator.startswith(f"{host}-")
        assert stat.ephemeralOwner != 0
        with connect(broker.url("polywire")) as client:
            client.create_topic("wide", 5)
            client.create_topic("gone", 1)
            places = [f"/brokers/topics/{name}/0" for name in ("wide", "gone")]
            until(lambda: all(keeper.exists(place) is not None for place in places), "topics are registered")
            assert keeper.get("/brokers/topics/wide/0")[0] == b"5"
            client.delete_topic("gone")
            until(lambda: keeper.exists("/brokers/topics/gone/0") is None, "a deleted topic goes")
        broker.kill()
        broker.start()
        until(
            lambda: content(keeper, "/brokers/ids/0") not in (None, data), "a restarted broker waits its old self out"
        )
        until(lambda: keeper.exists("/brokers/topics/wide/0") is not None, "its topics come back")
        assert broker.stop() == 0
        assert keeper.exists("/brokers/ids/0") is None
        assert keeper.exists("/brokers/topics/wide/0") is None


def test_each_process_is_registered_as_a_broker_of_its_topics(place: str, keeper: Any, tmp_path: Path) -> None:
    """Its id is the number of its shard and does not change; all have one address."""
    with BrokerProcess(tmp_path / "data", "--processes", "2", "--kafka07-zookeeper", place) as broker:
        until(lambda: keeper.exists("/brokers/ids/1") is not None, "both are registered")
        until(lambda: keeper.exists("/brokers/ids/0") is not None, "both are registered")
        addresses = {keeper.get(f"/brokers/ids/{number}")[0].decode().partition(":")[2] for number in range(2)}
        assert addresses == {"{}:{}".format(*broker.addresses["kafka07"])}
        with connect(broker.url("polywire")) as client:
            for name in ("one", "two"):
                client.create_topic(name, 3)
        until(lambda: all(ids_of(keeper, name) for name in ("one", "two")), "topics are registered")
        assert ids_of(keeper, "one") != ids_of(keeper, "two")
        assert all(len(ids_of(keeper, name)) == 1 for name in ("one", "two")), "by the broker that owns them"
        assert broker.stop() == 0
        assert keeper.exists("/brokers/ids/1") is None


def ids_of(keeper: Any, topic: str) -> list[int]:
    """Return the brokers of a topic."""
    return [number for number in range(2) if keeper.exists(f"/brokers/topics/{topic}/{number}") is not None]


def test_the_broker_serves_without_zookeeper(place: str, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--kafka07-zookeeper", "127.0.0.1:1/missing") as broker:
        with connect(broker.url("kafka07")) as client:
            client.produce("t", [Record(b"v")], partition=0)
            assert [record.value for record in client.fetch("t", 0, 0)] == [b"v"]
        assert broker.stop() == 0


def test_a_client_that_finds_the_broker_there(place: str, keeper: Any, tmp_path: Path) -> None:
    clients = os.environ.get("POLYWIRE_KAFKA07_CLIENTS")
    library = Path(clients or "") / "py2" / "samsa"
    if clients is None or not (library / "kazoo").exists():
        pytest.skip(
            "POLYWIRE_KAFKA07_CLIENTS has no samsa with kazoo: finding brokers in ZooKeeper was NOT tried with a real client"
        )
    with BrokerProcess(tmp_path / "data", "--kafka07-zookeeper", place) as broker:
        until(lambda: keeper.exists("/brokers/ids/0") is not None, "the broker is registered")
        with connect(broker.url("polywire")) as client:
            client.create_topic("found", 4)
        until(lambda: keeper.exists("/brokers/topics/found/0") is not None, "the topic is registered")
        done = subprocess.run(
            [str(Path(clients) / "python2"), str(DRIVER), place, "found", "200"],
            env={**os.environ, "PYTHONPATH": str(library)},
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert sorted(done.stdout.split()) == [f"record-{number:03d}" for number in range(200)]
