"""An unmodified schema registry with its storage in a topic: Apicurio Registry, through kills.

It is not part of this project. ``POLYWIRE_KAFKA_REGISTRY`` names the runner of its application from Maven
(``io.apicurio:apicurio-registry-app``, ``all.tar.gz``, 3.0.9); without it the test is skipped with a reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any, Final
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from polywire.client.sync import connect
from polywire.testing.process import lasting_port
from tests.three_brokers import Brokers, one_or_three

VARIABLE: Final = "POLYWIRE_KAFKA_REGISTRY"
TOPIC: Final = "_schemas"
SECONDS_MAX: Final = 180.0  # it starts in ten seconds on a free processor
VERSIONS: Final = "/apis/ccompat/v7/subjects/orders-value/versions"


@pytest.fixture(scope="module")
def runner() -> str:
    if which("java") is None:
        pytest.skip("java is missing: the Kafka wire was NOT tried with a registry")
    return os.environ.get(VARIABLE) or pytest.skip(
        f"{VARIABLE} is not set: the Kafka wire was NOT tried with a registry"
    )


class Registry:
    """A running registry."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: object = None) -> Any:
        """Return the response to a GET, or to a POST of this; retry while it is unreachable."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._base + path, data, {"Content-Type": "application/json"})
        end = time.monotonic() + SECONDS_MAX
        while True:
            try:
                with urlopen(request, timeout=SECONDS_MAX) as answer:
                    return json.load(answer)
            except URLError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def register(self, schema: str) -> int:
        """Register a schema; return its id."""
        return int(self.ask(VERSIONS, {"schema": schema})["id"])

    def latest(self) -> tuple[int, str]:
        """Return id and schema."""
        reported = self.ask(f"{VERSIONS}/latest")
        return reported["id"], reported["schema"]


@contextmanager
def registry(runner: str, broker: Brokers, place: Path) -> Iterator[Registry]:
    """Start a registry that knows only the broker's address; kill it at the end."""
    port = lasting_port()
    given = {
        "APICURIO_STORAGE_KIND": "kafkasql",
        "APICURIO_KAFKASQL_BOOTSTRAP_SERVERS": "{}:{}".format(*broker.addresses["kafka"]),
        "APICURIO_KAFKASQL_TOPIC": TOPIC,
        "QUARKUS_HTTP_HOST": "127.0.0.1",
        "QUARKUS_HTTP_PORT": str(port),
    }
    with (place / "registry.log").open("ab") as log:
        process = subprocess.Popen(
            ["java", "-Xmx384m", "-jar", runner], cwd=place, env=os.environ | given, stdout=log, stderr=log
        )
    try:
        started = Registry(port)
        started.ask("/apis/registry/v3/system/info")
        yield started
    finally:
        process.kill()
        process.wait()


def schema(*fields: str) -> str:
    named = [{"name": field, "type": "int", "default": 0} for field in fields]
    return json.dumps({"type": "record", "name": "order", "fields": named}, separators=(",", ":"))


def test_a_registry_stores_its_schemas(runner: str, tmp_path: Path) -> None:
    with one_or_three(tmp_path, wires=["kafka", "polywire"]) as broker:
        with registry(runner, broker, tmp_path) as first:
            one = first.register(schema("a"))
            broker.kill()
            broker.start()
            two = first.register(schema("a", "b"))
            assert one != two
            assert first.latest() == (two, schema("a", "b"))
        with connect(broker.url("polywire")) as client:
            assert [topic.partition_count for topic in client.topics() if topic.name == TOPIC] == [1]
        with registry(runner, broker, tmp_path) as second:
            assert second.latest() == (two, schema("a", "b"))
            assert second.register(schema("a")) == one
