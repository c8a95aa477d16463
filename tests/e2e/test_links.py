"""Links between two brokers: the command line, restarts, users, and several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import polywire
from polywire.testing.process import BrokerProcess, child_environment
from tests.histories import links as histories

RECORDS = 500
WAIT_S = 120.0


@pytest.fixture
def source(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "source", wires=["polywire", "kafka"]) as broker:
        with polywire.connect_sync(broker.url()) as client:
            client.create_topic("orders", 3)
            client.create_topic("other", 1)
        fill(broker)
        yield broker


def fill(broker: BrokerProcess) -> None:
    with polywire.connect_sync(broker.url()) as client, client.producer() as producer:
        producer.send_many("orders", [b"%d" % number for number in range(RECORDS)])


def command(*words: str, at: BrokerProcess) -> tuple[int, str]:
    environment = {**child_environment(), "POLYWIRE_HTTP": at.url("http")}
    found = subprocess.run(
        [sys.executable, "-m", "polywire", *words], env=environment, capture_output=True, text=True, check=False
    )
    return found.returncode, found.stdout + found.stderr


def wait_for(broker: BrokerProcess, count: int) -> None:
    """Wait until the topic has that many records."""
    end = time.monotonic() + WAIT_S
    found = 0
    while time.monotonic() < end:
        with polywire.connect_sync(broker.url()) as client:
            if "orders" in [topic.name for topic in client.topics()]:
                found = sum(part.next_offset for part in client.bounds("orders"))
        if found == count:
            return
        time.sleep(0.1)
    raise AssertionError(f"found={found} expected={count}\n{broker.log_text()}")


def test_the_commands_and_a_restart(source: BrokerProcess, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire", "http"]) as broker:
        new = ("link", "create", "old", "--from", source.url("kafka"), "--topics")
        code, text = command(*new, "ordrs", at=broker)
        assert (code, "did you mean 'orders'" in text) == (1, True), text
        code, text = command(*new, "none*", at=broker)
        assert (code, "known=orders,other" in text) == (1, True), text
        code, text = command(*new, "ord*", "--dry-run", at=broker)
        assert (code, f"would create link=old topics=1 records={RECORDS}" in text) == (0, True), text
        assert "old" not in command("link", "list", at=broker)[1]
        code, text = command(*new, "ord*", at=broker)
        assert code == 0, text
        wait_for(broker, RECORDS)
        for pid in histories.workers(broker):
            os.kill(pid, signal.SIGKILL)
        fill(source)
        wait_for(broker, 2 * RECORDS)
        code, text = command("link", "compare", "old", "--address", broker.url(), at=broker)
        assert (code, f"equal topics=1 partitions=3 records={2 * RECORDS} missing=0" in text) == (0, True), text
        code, text = command("link", "compare", "old", "--topics", "ordrs", "--address", broker.url(), at=broker)
        assert (code, "did you mean 'orders'" in text) == (1, True), text
        code, text = command("link", "compare", "odl", "--address", broker.url(), at=broker)
        assert (code, "did you mean 'old'" in text) == (1, True), text
        assert command("link", "pause", "old", at=broker)[0] == 0
        broker.kill()
        broker.start()
        fill(source)
        assert "state=paused" in command("link", "status", "old", at=broker)[1]
        assert command("link", "resume", "old", at=broker)[0] == 0
        wait_for(broker, 3 * RECORDS)
        assert command("link", "delete", "old", at=broker)[0] == 0
        code, text = command("link", "status", "old", at=broker)
        assert (code, "no such link" in text) == (1, True), text
        # a link with the same name continues
        fill(source)
        assert command(*new, "ord*", at=broker)[0] == 0
        wait_for(broker, 4 * RECORDS)


def test_a_broker_of_several_processes(source: BrokerProcess, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--processes", "2", wires=["polywire", "http"]) as broker:
        code, text = command("link", "create", "old", "--from", source.url(), "--topics", "*", at=broker)
        assert code == 0, text
        wait_for(broker, RECORDS)
        fill(source)
        wait_for(broker, 2 * RECORDS)
        for _ in range(4):  # whichever process answers
            assert "state=running" in command("link", "status", "old", at=broker)[1]


def test_a_history_of_kills(tmp_path: Path) -> None:
    counts = histories.run(tmp_path, seed=3, faults=5, report=lambda _: None)
    assert counts["records"]
