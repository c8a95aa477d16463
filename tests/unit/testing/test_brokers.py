"""Brokers for tests: in a thread, in a process, behind ``memory://``, and as pytest fixtures."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import polywire
from polywire.errors import Invalid, Unavailable
from polywire.testing import broker, process
from polywire.testing.process import WIRES, child_environment
from polywire.testing.thread import BrokerThread, forget_memory
from tests.installed_clients import installed
from tests.processor import processor_used


@pytest.mark.parametrize("wire", WIRES)
def test_every_protocol_responds(wire: str) -> None:
    async def sent(url: str) -> list[polywire.Record]:
        async with polywire.connect(url) as client:
            place = await client.send("orders", "hello")
            return await client.fetch("orders", place.partition, 0)

    with broker(wires=[wire]) as running:
        assert list(running.addresses) == [wire]
        assert [record.text for record in asyncio.run(sent(running.url(wire)))] == ["hello"]


def test_it_is_ready_at_once() -> None:
    with broker():
        pass  # modules that are loaded for the first time
    with ExitStack() as stack:
        with processor_used() as used:
            running = stack.enter_context(broker())
        assert set(running.addresses) == set(WIRES)
        assert used.seconds < 0.25


def test_a_killed_broker_restarts_with_its_records() -> None:
    with broker(wires=["polywire"]) as running, polywire.connect_sync(running.url(), reconnect_s=10) as client:
        before = running.addresses
        client.send("orders", "hello", partition=0)
        running.kill()
        running.start()
        assert running.addresses == before
        assert client.send("orders", "again", partition=0).offset == 1


def test_stopping_with_connected_clients_logs_nothing() -> None:
    async def leave() -> None:
        with broker(wires=["polywire"]) as running:
            async with polywire.connect(running.url()) as client:
                await client.send("orders", "hello")
                await asyncio.to_thread(running.kill)

    with capture_logs() as logged:
        asyncio.run(leave())
    assert not [entry for entry in logged if entry["event"] == "connection dropped"]


def test_a_stopped_broker_is_unreachable() -> None:
    running = BrokerThread(wires=["polywire"]).start()
    url = running.url()
    running.stop()
    running.stop()
    with pytest.raises(Unavailable):
        polywire.connect_sync(url)


@pytest.mark.parametrize("wires", [[], ["http"]])
def test_unknown_protocols_are_refused(wires: list[str]) -> None:
    with pytest.raises(Invalid, match="unknown protocols, or none"):
        BrokerThread(wires=wires)


def test_a_broker_in_a_process_can_be_killed(tmp_path: Path) -> None:
    with (
        broker(process=True, wires=["polywire"], data_dir=tmp_path / "data") as running,
        polywire.connect_sync(running.url()) as client,
    ):
        client.send("orders", "hello", partition=0)
        running.kill()
        running.start()
        assert [record.text for record in client.fetch("orders", 0, 0)] == ["hello"]


def test_a_data_directory_may_be_text_and_needs_a_process(tmp_path: Path) -> None:
    with broker(process=True, wires=["polywire"], data_dir=str(tmp_path / "data")) as running:
        assert (tmp_path / "data").is_dir()
        with pytest.raises(Invalid, match="already running"):
            running.start()
    with pytest.raises(Invalid, match="data_dir needs process=True"), broker(data_dir=tmp_path):
        pass


def test_misuse_is_explained() -> None:
    for is_process in (False, True):
        with pytest.raises(Invalid, match=r"wires must be a list of protocols \(use wires=\['kafka'\]\)"):
            broker(process=is_process, wires="kafka").__enter__()
    with broker(wires=["kafka"]) as running:
        with pytest.raises(Invalid, match="already running"):
            running.start()
        with pytest.raises(Invalid, match=r"does not serve this protocol .* protocol='polywire' served=kafka"):
            running.url()
        assert running.url("kafka") == f"kafka://{running.address('kafka')}"
        assert running.address("kafka") == "{}:{}".format(*running.addresses["kafka"])


def test_memory_is_shared_by_name() -> None:
    with polywire.connect_sync("memory://one") as first, polywire.connect_sync("memory://one") as second:
        first.send("orders", "hello", partition=0)
        assert [record.text for record in second.fetch("orders", 0, 0)] == ["hello"]
        with polywire.connect_sync("memory://") as other:
            assert other.topics() == []
    forget_memory("one")
    forget_memory()
    with polywire.connect_sync("memory://one") as fresh:
        assert fresh.topics() == []
    forget_memory("one")


TESTS = """
def test_fixtures(polywire_broker, polywire_client, polywire_topic):
    assert "kafka" in polywire_broker.addresses
    polywire_client.send(polywire_topic, "hello", partition=0)
    assert [record.text for record in polywire_client.fetch(polywire_topic, 0, 0)] == ["hello"]


def test_topics_are_their_own(polywire_client, polywire_topic):
    assert [topic.name for topic in polywire_client.topics()] == [polywire_topic]
    polywire_client.delete_topic(polywire_topic)
"""


ASYNC_TESTS = """
import pytest

pytestmark = pytest.mark.MARKER


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_an_async_client(polywire_async_client, polywire_topic):
    await polywire_async_client.send(polywire_topic, "hello", partition=0)
    assert [record.text for record in await polywire_async_client.fetch(polywire_topic, 0, 0)] == ["hello"]


async def test_a_fresh_broker(polywire_fresh_broker, polywire_broker):
    assert polywire_fresh_broker.addresses != polywire_broker.addresses
"""


def run_pytest(folder: Path, *plugins: str, path: str = "", setting: str = "") -> str:
    options = [word for plugin in ("polywire.testing.plugin", *plugins) for word in ("-p", plugin)]
    command = [sys.executable, "-m", "pytest", "-q", *options, "-W", "error"]
    command += ["-o", setting] if setting else []
    environment = {**child_environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], *filter(None, [path])])
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_pytest_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_application.py").write_text(TESTS)
    assert "2 passed" in run_pytest(tmp_path)


def test_fixtures_of_async_tests_with_anyio(tmp_path: Path) -> None:
    (tmp_path / "test_application.py").write_text(ASYNC_TESTS.replace("MARKER", "anyio"))
    assert "2 passed" in run_pytest(tmp_path, "anyio")


def test_fixtures_of_async_tests_with_pytest_asyncio(tmp_path: Path) -> None:
    (tmp_path / "test_application.py").write_text(ASYNC_TESTS.replace("MARKER", "asyncio"))
    path, setting = installed("pytest-asyncio-1.5.0"), "asyncio_default_fixture_loop_scope=function"
    assert "2 passed" in run_pytest(tmp_path, "asyncio", path=path, setting=setting)


def test_threads_get_distinct_ports() -> None:
    with ThreadPoolExecutor(16) as threads:
        ports = list(threads.map(lambda _: process.lasting_port(), range(400)))
    assert len(set(ports)) == len(ports)
