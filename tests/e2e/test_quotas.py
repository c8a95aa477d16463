"""Quotas on a real broker: every protocol is slowed to its rate, others are not, and quotas survive a kill."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import polywire
from polywire.client.connect import connect
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api
from polywire.records.columns import Record
from polywire.server.users import add_user
from tests.broker_process import WIRES, BrokerProcess, child_environment

RATE: Final = 400_000
SIZE: Final = 20_000
COUNT: Final = 40
BYTES: Final = SIZE * COUNT  # one second of the rate at once, and one that must be waited for
EXPECTED_S: Final = BYTES / RATE - 1  # the last request is answered before its part of the debt is paid
CLIENT_WIRES: Final = ("flux", "cursus", "iggy", "kafka", "kafka07", "polywire")


def command(*words: str, at: BrokerProcess, login: str = "") -> tuple[int, str]:
    environment = {**child_environment(), "POLYWIRE_HTTP": at.url("http")}
    environment["POLYWIRE_PASSWORD"] = "secret"
    if login:
        environment["POLYWIRE_HTTP"] = environment["POLYWIRE_HTTP"].replace("://", f"://{login}@")
    found = subprocess.run(
        [sys.executable, "-m", "polywire", *words], env=environment, capture_output=True, text=True, check=False
    )
    return found.returncode, found.stdout + found.stderr


async def write(url: str, topic: str) -> float:
    client = await connect(url)
    begun = time.monotonic()
    try:
        for _ in range(COUNT):
            await client.produce(topic, [Record(value=bytes(SIZE))])
        return time.monotonic() - begun
    finally:
        await client.close()


async def read(url: str, topic: str) -> float:
    client = await connect(url)
    begun = time.monotonic()
    try:
        for _ in range(2):  # all records may be in one response, after which the next request is delayed
            assert await client.fetch(topic, 0, 0)
        return time.monotonic() - begun
    finally:
        await client.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    path = tmp_path_factory.mktemp("quotas") / "data"
    with BrokerProcess(path, "--partitions", "1", wires=[*WIRES, "http"]) as process:
        yield process


@pytest.mark.parametrize("wire", CLIENT_WIRES)
def test_every_protocol_is_slowed_to_its_rate(broker: BrokerProcess, wire: str) -> None:
    url, topic = broker.url(wire), f"topic-{wire}"
    with polywire.connect_sync(broker.url()) as client:
        client.create_topic(topic, 1)
    assert asyncio.run(write(url, topic)) < EXPECTED_S
    try:
        assert command("quota", "set", "--user", "*", "--produce", str(RATE), at=broker)[0] == 0
        assert asyncio.run(write(url, topic)) > EXPECTED_S * 0.9
        assert command("quota", "set", "--user", "*", "--produce", "off", "--fetch", str(RATE), at=broker)[0] == 0
        assert asyncio.run(read(url, topic)) > EXPECTED_S * 0.9
        assert command("quota", "set", "--user", "*", "--fetch", "off", "--requests", "20", at=broker)[0] == 0
        assert asyncio.run(write(url, topic)) > EXPECTED_S * 0.9
    finally:
        assert command("quota", "remove", "--user", "*", at=broker)[0] == 0
        assert command("quota", "remove", "--user", "*", at=broker)[0] == 1, "there is none any more"


class KafkaPeer:
    def __init__(self, broker: BrokerProcess, client_id: str) -> None:
        self._socket = socket.create_connection(broker.addresses["kafka"], timeout=60)
        self._client_id = client_id

    def ask(self, api: Api, version: int, **fields: Any) -> Any:
        body = schema.request(api)(**fields)
        self._socket.sendall(encode_request(api, version, 1, body, client_id=self._client_id))
        size = int.from_bytes(self._read(4), "big")
        return decode_response(api, version, self._read(size))[1]

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            assert part, "the broker closed the connection"
            data += part
        return data

    def fetch(self, topic: str) -> Any:
        request = schema.request(Api.FETCH)
        entries = [request.Topics.Partitions(partition=0, fetch_offset=0, partition_max_bytes=BYTES)]
        return self.ask(Api.FETCH, 11, max_bytes=BYTES, topics=[request.Topics(topic=topic, partitions=entries)])


def test_kafka_clients_see_the_delay_and_others_are_not_delayed(broker: BrokerProcess) -> None:
    asyncio.run(write(broker.url("kafka"), "seen"))
    assert command("quota", "set", "--client-id", "etl", "--fetch", str(RATE), at=broker)[0] == 0
    slow, fast = KafkaPeer(broker, "etl"), KafkaPeer(broker, "other")
    first = slow.fetch("seen")
    assert 800 < first.throttle_ms < 1_500
    begun = time.monotonic()
    for _ in range(3):
        assert fast.fetch("seen").throttle_ms == 0
    assert time.monotonic() - begun < 0.8
    slow.ask(Api.API_VERSIONS, 0)
    assert time.monotonic() - begun > 0.7
    slow.close()
    fast.close()
    assert json.loads(command("quota", "list", "--output", "json", at=broker)[1]) == [
        {"user": None, "client_id": "etl", "produce": None, "fetch": RATE, "requests": None, "defined_in": "broker"}
    ]
    assert command("quota", "remove", "--client-id", "etl", at=broker)[0] == 0


def test_users_have_their_own_rates_also_after_a_kill_and_over_several_processes(tmp_path: Path) -> None:
    users = tmp_path / "users"
    for name in ("admin", "alice", "bob"):
        add_user(users, name, "secret")
    options = ("--users", str(users), "--partitions", "1", "--quotas", "user=bob requests=1000000", "--processes", "2")
    with BrokerProcess(tmp_path / "data", *options, wires=["polywire", "http"]) as broker:
        code, text = command("quota", "set", "--user", "alise", "--produce", "1MB", at=broker, login="admin")
        assert (code, "did you mean 'alice'" in text, "known=admin,alice,bob" in text) == (1, True, True), text
        assert command("quota", "set", "--user", "alice", "--produce", str(RATE), at=broker, login="admin")[0] == 0
        url = broker.url("polywire").replace("://", "://{}:secret@")
        for _ in range(2):
            assert asyncio.run(write(url.format("alice"), "shared")) > EXPECTED_S * 0.9
            assert asyncio.run(write(url.format("bob"), "shared")) < EXPECTED_S
            broker.kill()
            broker.start()
            url = broker.url("polywire").replace("://", "://{}:secret@")
        rows = json.loads(command("quota", "list", "--output", "json", at=broker, login="admin")[1])
        assert [(row["user"], row["defined_in"]) for row in rows] == [("alice", "broker"), ("bob", "configuration")]


def test_a_configured_quota_of_an_unknown_user_is_an_error(tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "alice", "secret")
    options = ["--data-dir", str(tmp_path / "data"), "--users", str(users), "--quotas", "user=bob produce=1MB"]
    found = subprocess.run(
        [sys.executable, "-m", "polywire", "serve", *options, "--http", "off"],
        env={**os.environ, **child_environment()},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode != 0
    assert "no such user user='bob' known=alice" in found.stderr
