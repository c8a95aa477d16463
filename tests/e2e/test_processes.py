"""Every protocol over two processes of a directory or a bucket: each connection finds every topic."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from polywire.client.base import Ability, WireClient
from polywire.client.connect import connect
from polywire.errors import Missing
from polywire.protocols.kafka07.messages import encode_produce, encode_set
from polywire.records.columns import Record
from polywire.server.config import WIRES
from tests.broker_process import BrokerProcess
from tests.crash.kafka_transactor import Counting, Transactor, nothing

TOPICS = 4
WAIT_S = 60.0
CONNECTIONS = 6  # all of them reach the same process once in 32 runs, which then shows less

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="several processes share addresses on Linux only")


@pytest.fixture(scope="module", params=["directory", "bucket", "second machine"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Serve two processes. The second machine of a bucket leads no shard: it forwards every connection to the first."""
    folder, wires = tmp_path_factory.mktemp("processes"), (*WIRES, "http")
    bucket = () if request.param == "directory" else ("--bucket", f"file://{folder / 'bucket'}", "--balance-s", "0")
    with ExitStack() as stack:
        found = BrokerProcess(folder / "data", "--processes", "2", *bucket, "--node", "one", wires=wires)
        stack.enter_context(found)
        if request.param == "second machine":
            found = BrokerProcess(folder / "other", *bucket, "--node", "two", wires=wires)
            stack.enter_context(found)
        yield found
        assert found.stop() == 0, found.log_text()


@pytest.mark.parametrize("wire", WIRES)
def test_records_of_one_connection_are_read_by_every_other(broker: BrokerProcess, wire: str) -> None:
    asyncio.run(_write_and_read(broker, wire))


async def _write_and_read(broker: BrokerProcess, wire: str) -> None:
    names = [f"{wire}-{number}" for number in range(TOPICS)]
    clients = [await connect(broker.url(wire)) for _ in range(CONNECTIONS)]
    try:
        for number, name in enumerate(names):
            if Ability.CREATE_TOPIC in clients[0].abilities:
                await clients[number].create_topic(name, 1)
            place = 0 if Ability.CHOOSE_PARTITION in clients[0].abilities else None
            await clients[-number - 1].produce(name, [Record(value=b"%d" % number)], partition=place)
        for client in clients:
            for number, name in enumerate(names):
                assert [record.value for record in await client.fetch(name, 0, 0)] == [b"%d" % number]
    finally:
        for client in clients:
            await client.close()


def test_a_producer_that_disconnects_at_once_has_produced(broker: BrokerProcess) -> None:
    """Whichever process it reaches, although it never gets a response."""
    for number in range(CONNECTIONS):
        sets = [encode_produce(b"left-%d" % topic, 0, encode_set([b"%d" % number])) for topic in range(TOPICS)]
        with socket.create_connection(broker.addresses["kafka07"]) as peer:
            peer.sendall(b"".join(sets))
    asyncio.run(_until_stored(broker))


async def _until_stored(broker: BrokerProcess) -> None:
    client = await connect(broker.url("polywire"))
    try:
        for topic in range(TOPICS):
            found = await _fetched(client, f"left-{topic}", CONNECTIONS)
            assert sorted(found, key=str) == [b"%d" % number for number in range(CONNECTIONS)]
    finally:
        await client.close()


async def _fetched(client: WireClient, topic: str, count: int) -> list[bytes | None]:
    """Return the values of a topic, once there are that many."""
    end = time.monotonic() + WAIT_S
    found: list[bytes | None] = []
    while len(found) < count:
        assert time.monotonic() < end, (topic, found)
        with suppress(Missing):
            found = [record.value for record in await client.fetch(topic, 0, 0)]
    return found


@pytest.mark.parametrize("dialect", [1, 2])
def test_a_kafka_transaction_spans_all_processes(broker: BrokerProcess, dialect: int) -> None:
    names = [f"counted-{dialect}-{number}" for number in range(TOPICS)]
    asyncio.run(_make(broker, names))
    with closing(Transactor(broker.addresses["kafka"], f"counter-{dialect}", dialect)) as transactor:
        counting = Counting(transactor, names)
        for _ in range(3):
            counting.one(nothing)
    asyncio.run(_until_counted(broker, names, counting.done))


async def _until_counted(broker: BrokerProcess, names: list[str], count: int) -> None:
    client = await connect(broker.url("polywire"))
    try:
        for name in names:
            assert await _fetched(client, name, count) == [b"%d" % number for number in range(1, count + 1)]
    finally:
        await client.close()


def test_http_covers_all_processes(broker: BrokerProcess) -> None:
    asyncio.run(_make(broker, [f"shown-{number}" for number in range(TOPICS)]))
    for _ in range(CONNECTIONS):
        assert ask(broker, "/readyz") == b"ready\n"
        listed = [topic["name"] for topic in json.loads(ask(broker, "/api/v1/topics"))["topics"]]
        assert [f"shown-{number}" for number in range(TOPICS)] == [name for name in listed if name.startswith("shown")]
        for number in range(TOPICS):
            assert json.loads(ask(broker, f"/api/v1/topics/shown-{number}"))["partitions"] == 1
        metrics = ask(broker, "/metrics").decode()
        assert 'polywire_shard_up{shard="0000"} 1' in metrics
        assert 'polywire_shard_up{shard="0001"} 1' in metrics
        assert max(line.count('shard="') for line in metrics.splitlines()) == 1
        for number in range(TOPICS):
            assert sum(f'topic="shown-{number}"' in line for line in metrics.splitlines()) == 4


async def _make(broker: BrokerProcess, names: list[str]) -> None:
    client = await connect(broker.url("polywire"))
    try:
        for name in names:
            await client.create_topic(name, 1)
    finally:
        await client.close()


def ask(broker: BrokerProcess, path: str) -> bytes:
    with closing(http.client.HTTPConnection(*broker.addresses["http"], timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()


def test_dead_letters_are_redriven_to_topics_of_every_process(broker: BrokerProcess) -> None:
    """From dead letters in each process to topics in each, all at once or one at a time."""
    topics = [f"back-{number}" for number in range(2 * TOPICS)]
    for name in topics:
        for made in (name, f"{name}.dead"):
            assert _asked(broker, "POST", f"/api/v1/topics/{made}", {"partitions": 1})[0] == 200
    for dead in topics:
        for target in topics[:TOPICS]:
            letter = {"value": dead, "headers": {"dead.topic": target, "dead.partition": "0"}}
            assert _asked(broker, "POST", f"/api/v1/topics/{dead}.dead/records", letter)[0] == 200
        one = {"topics": topics, "partition": 0, "offset": 0}
        assert _asked(broker, "POST", f"/api/v1/topics/{dead}.dead/redrive", one)[0] == 200
        status, sent = _asked(broker, "POST", f"/api/v1/topics/{dead}.dead/redrive", {"topics": topics})
        assert (status, sent.get("letters"), sent.get("more")) == (200, TOPICS, False), sent
    for number, target in enumerate(topics[:TOPICS]):
        _, page = _asked(broker, "GET", f"/api/v1/topics/{target}/partitions/0/records")
        values = [record["value"]["text"] for record in page["records"]]
        assert sorted(values) == sorted(topics * (2 if number == 0 else 1)), "the first of each was sent alone, too"


def _asked(broker: BrokerProcess, method: str, path: str, body: object = None) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection(*broker.addresses["http"], timeout=WAIT_S)) as connection:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"X-Polywire": "1", "Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def flux(broker: BrokerProcess, *lines: str) -> list[str]:
    """Return the responses to FLUX lines over a new connection, without their ids."""
    with socket.create_connection(broker.addresses["flux"], timeout=30) as peer, peer.makefile("rb") as answers:
        peer.sendall("".join(f"V1|1|{line}\n" for line in lines).encode())
        return [answers.readline().decode().rstrip("\n").removeprefix("V1|1|") for _ in lines]


def test_flux_has_one_registry_of_brokers(broker: BrokerProcess) -> None:
    for number in range(1, CONNECTIONS):
        assert flux(broker, f"ADMIN_REGISTER_BROKER|{number} host 1")[0].startswith("OK|")
        assert f"brokers=[{' '.join(map(str, range(number + 1)))}]" in flux(broker, "ADMIN_GET_METADATA|")[0]
    assert flux(broker, "ADMIN_FENCE_BROKER|1")[0].startswith("OK|")
    for _ in range(CONNECTIONS):
        assert flux(broker, "ADMIN_GET_METADATA|")[0].endswith("fenced=[1]")


def test_flux_groups_of_all_processes_are_exported(broker: BrokerProcess) -> None:
    names = [f"exported-{number}" for number in range(TOPICS)]
    for name in names:
        assert flux(broker, f"PRODUCE|{name} k:v", f"JOIN|g-{name} {name} m")[1].startswith("OK|")
    file, end = broker.data_dir.with_name("data") / "groups.json", time.monotonic() + WAIT_S
    found: dict[str, Any] = {}
    while not {f"g-{name}" for name in names} <= found.keys():
        assert time.monotonic() < end, found
        time.sleep(0.1)
        with suppress(FileNotFoundError):
            found = json.loads(file.read_text())
    assert [found[f"g-{name}"]["topic"] for name in names] == names
