"""``polywire cluster import``, killed repeatedly: a broker on the bucket has everything acknowledged."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from base64 import b64encode
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from polywire.client.connect import connect
from polywire.errors import Denied
from polywire.records.columns import Record
from polywire.server.users import add_user
from polywire.types import Level
from tests.broker_process import BrokerProcess, child_environment
from tests.crash.test_broker_kill import TOPIC, Producer, check, end

START_S = 0.4  # before which no process does anything
STEP_S = 0.3
USED = ("polywire", "http")
STEP_FACTOR = 1.25  # a busy machine takes long for an import: steps grow, or there would be very many


def run_import(source: Path, bucket: str, seconds: float) -> int | None:
    """Return its exit code, or None if it was killed first."""
    command = [sys.executable, "-m", "polywire", "cluster", "import", str(source), bucket]
    process = subprocess.Popen(command, env=child_environment(), stderr=subprocess.PIPE)
    try:
        _, reported = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    assert process.returncode == 0, reported.decode()
    assert b"next: polywire serve --bucket" in reported
    return process.returncode


def test_a_broker_on_the_bucket_resumes_where_the_directory_ended(tmp_path: Path) -> None:
    bucket = f"file://{tmp_path / 'bucket'}"
    producers: list[Producer] = []
    with BrokerProcess(tmp_path / "data", "--slot-mib", "17", wires=("polywire", "cursus")) as broker:
        producers += [
            Producer(lambda: broker.url("polywire"), b"p-one", Level.WRITTEN, batch=200),
            Producer(lambda: broker.url("cursus"), b"p-two", Level.WRITTEN, batch=3),
        ]
        before = asyncio.run(_produce(broker, producers))
        broker.kill()
    waited = START_S
    while run_import(tmp_path / "data", bucket, waited) is None:
        waited = max(waited + STEP_S, waited * STEP_FACTOR)
    with BrokerProcess(tmp_path / "cache", "--bucket", bucket, wires=("polywire", "cursus")) as broker:
        assert asyncio.run(check(broker.url("polywire"), producers)) > 0
        assert asyncio.run(_positions(broker)) == before
        acknowledged = sum(len(producer.acknowledged) for producer in producers)
        asyncio.run(_produce(broker, producers))
        assert sum(len(producer.acknowledged) for producer in producers) > acknowledged
        assert asyncio.run(check(broker.url("polywire"), producers)) > 0
        assert broker.stop() == 0, broker.log_text()


def test_users_permissions_and_tokens_are_imported(tmp_path: Path) -> None:
    """Users of the file, users created at run time, and tokens; a login is required throughout."""
    users, bucket = tmp_path / "users", f"file://{tmp_path / 'bucket'}"
    add_user(users, "boss", "of-file", "all")
    with BrokerProcess(tmp_path / "data", "--users", str(users), wires=USED) as broker:
        made = {"password": "made", "permissions": ["consume@shop"]}
        assert ask(broker, "POST", "/users/reader", "boss:of-file", made)[0] == 200
        assert asyncio.run(_may(broker, "boss:of-file")) == (True, True)
        status, answer = ask(broker, "POST", "/tokens/own", "reader:made", {})
        assert status == 200
        before = ask(broker, "GET", "/users", "boss:of-file")
        assert asyncio.run(_may(broker, "reader:made")) == (True, False)
        broker.kill()
    assert run_import(tmp_path / "data", bucket, 60.0) == 0
    with BrokerProcess(tmp_path / "cache", "--bucket", bucket, wires=USED) as broker:
        assert ask(broker, "GET", "/users", "boss:of-file") == before
        assert asyncio.run(_may(broker, "reader:made")) == (True, False)
        assert asyncio.run(_may(broker, f"reader:{answer['token']}")) == (True, False)
        assert ask(broker, "GET", "/users", "boss:another")[0] == 401
        with pytest.raises(Denied):
            asyncio.run(_may(broker, ""))
        assert broker.stop() == 0, broker.log_text()


def ask(broker: BrokerProcess, verb: str, path: str, login: str, body: Any = None) -> tuple[int, Any]:
    """Return the HTTP response to this login."""
    connection = HTTPConnection(*broker.addresses["http"], timeout=60)
    try:
        headers = {"Authorization": "Basic " + b64encode(login.encode()).decode()}
        content = None if body is None else json.dumps(body)
        connection.request(
            verb, "/api/v1" + path, content, headers | {"Content-Type": "application/json", "X-Polywire": "1"}
        )
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


async def _may(broker: BrokerProcess, login: str) -> tuple[bool, bool]:
    """Return whether a login may read a topic, and write to it."""
    host, port = broker.addresses["polywire"]
    client = await connect(f"polywire://{login}@{host}:{port}" if login else f"polywire://{host}:{port}")
    try:
        try:
            await client.produce("shop.orders", [Record(b"x")])
            writes = True
        except Denied:
            writes = False
        return bool(await client.fetch("shop.orders", 0, 0)), writes
    finally:
        await client.close()


async def _produce(broker: BrokerProcess, producers: list[Producer]) -> list[int | None]:
    """Produce for a while, and commit offsets of a group; return the offsets."""
    for producer in producers:
        producer.running = True
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    before = min(producer.done for producer in producers)
    await asyncio.sleep(2)
    await end(producers, tasks, beyond=before)
    client = await connect(broker.url("polywire"))
    chance = random.Random(3)
    for bounds in await client.bounds(TOPIC):
        await client.commit("readers", TOPIC, bounds.partition, chance.randrange(bounds.next_offset + 1))
    await client.close()
    return await _positions(broker)


async def _positions(broker: BrokerProcess) -> list[int | None]:
    client = await connect(broker.url("polywire"))
    found = [await client.position("readers", TOPIC, bounds.partition) for bounds in await client.bounds(TOPIC)]
    await client.close()
    return found
