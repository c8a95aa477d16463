"""Run the client examples and check what they print."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from polywire.testing import RunningBroker, broker
from polywire.testing.process import child_environment

EXAMPLES: Final = Path(__file__).parents[3] / "examples"
LINES_MAX: Final = 30
PRINTED: Final = {
    "client_send": "stored in partition",
    "client_consume": "records of partition",
    "client_sync": "three",
    "client_kafka": "written over the Kafka protocol",
    "client_testing": "passed",
}


@pytest.fixture(scope="module")
def running() -> Iterator[RunningBroker]:
    with broker() as started:
        yield started


@pytest.mark.parametrize("name", PRINTED)
def test_examples_run(running: RunningBroker, name: str) -> None:
    if name == "client_consume":
        run(running, "client_send")
    assert PRINTED[name] in run(running, name)


def run(running: RunningBroker, name: str) -> str:
    urls = [running.url("kafka"), running.url()] if name == "client_kafka" else [running.url()]
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *urls]
    ended = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False, timeout=180)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_examples_are_short() -> None:
    files = sorted(EXAMPLES.glob("client_*.py"))
    assert [path.stem for path in files] == sorted(PRINTED)
    assert [path.stem for path in files if len(path.read_text().splitlines()) > LINES_MAX] == []
