"""An unmodified Kafka console: kaskade in a terminal shows topics, records, groups and their lag.

It is not part of this project. ``POLYWIRE_KAFKA_CONSOLE`` names the program (kaskade of the Python package index);
without it the test is skipped with a reason.
"""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from polywire.client.sync import connect
from polywire.records.columns import Record
from tests.three_brokers import Brokers, one_or_three

VARIABLE: Final = "POLYWIRE_KAFKA_CONSOLE"
SECONDS_MAX: Final = 60.0
ROWS, COLUMNS = 40, 150
CONTROL: Final = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|[@-Z\\-_]|[()][A-Z0-9])")


@pytest.fixture(scope="module")
def console() -> str:
    return os.environ.get(VARIABLE) or pytest.skip(
        f"{VARIABLE} is not set: the Kafka wire was NOT tried with a console"
    )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Brokers]:
    with one_or_three(tmp_path, wires=["kafka", "polywire"]) as process:
        yield process


def shown(home: Path, words: list[str], *expected: str, key: bytes = b"") -> None:
    """Run a program in a terminal until it has printed all of this; key: typed after the first of it."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (ROWS, COLUMNS))
    environment = os.environ | {"TERM": "xterm-256color", "HOME": str(home)}
    with subprocess.Popen(words, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True) as process:
        os.close(its)
        try:
            read_until(ours, expected[:1])
            os.write(ours, key)
            read_until(ours, expected[1:])
        finally:
            process.kill()
            os.close(ours)


def read_until(terminal: int, expected: Sequence[str]) -> None:
    """Read output until all of this was printed."""
    seen, end = b"", time.monotonic() + SECONDS_MAX
    while not all(word in text_of(seen) for word in expected):
        assert time.monotonic() < end, text_of(seen)[-3000:]
        if select.select([terminal], [], [], 0.5)[0]:
            seen += os.read(terminal, 65_536)


def text_of(written: bytes) -> str:
    """Return the words that a terminal shows."""
    return CONTROL.sub(b"", written).decode("utf-8", "replace")


def test_a_console_shows_topics_records_and_lag(console: str, broker: Brokers, tmp_path: Path) -> None:
    with connect(broker.url()) as client:
        client.create_topic("orders", 1)
        client.produce("orders", [Record(b"value-%d" % number, key=b"k") for number in range(30)], partition=0)
    with connect(broker.url("kafka")) as client:
        client.commit("billing", "orders", 0, 23)
    servers = ["-b", "{}:{}".format(*broker.addresses["kafka"])]
    shown(tmp_path, [console, "admin", *servers], "≈7", "Configurations", "[28]", key=b"\r")
    records = ["-t", "orders", "-k", "string", "-v", "string", "--earliest"]
    shown(tmp_path, [console, "consumer", *servers, *records], "val", "0.009 KB")  # values are truncated
