"""The quickstart of the README on a fresh checkout while both processors are busy; brokers in the background."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from polywire.cli.detached import beside, running
from polywire.testing.process import lasting_port
from tests.broker_process import child_environment, silenced
from tests.e2e.followed_page import ROOT, follow
from tests.e2e.installation import copy_checkout

HOGS: Final = 3
DONE: Final = (".made", ".base", ".built", ".installed", ".demo")  # what make would download and compile
SECONDS_MAX: Final = 120.0
SPARK_STEP: Final = "```sh\nmake spark\n"
END_OF_BLOCK: Final = "\n```\n"
SHOWN: Final = """\
+---+-----+
|key|value|
+---+-----+
|  a|hello|
+---+-----+
"""


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Run other programs that would use all processors."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def follow_quickstart(python: Path, tmp_path: Path, *, with_spark: bool) -> list[str]:
    """Follow the README's quickstart on a fresh checkout; return the output of each block."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    copy_checkout(folder)
    (folder / ".venv").symlink_to(python.parents[1])
    for name in DONE:
        (folder / ".venv" / name).touch()
        time.sleep(0.01)  # each depends on those before it
    readme = (ROOT / "README.md").read_text("utf-8")
    text = readme[readme.index("## Quickstart") : readme.index("## See it work")]
    if not with_spark:
        start = text.index(SPARK_STEP)
        text = text[:start] + text[text.index(END_OF_BLOCK, start) + len(END_OF_BLOCK) :]
    page = tmp_path / "README.md"
    page.write_text(text, "utf-8")
    return [printed for _, printed in follow(page, python, folder)]


@pytest.mark.slow
def test_the_quickstart_on_a_busy_machine(python: Path, tmp_path: Path) -> None:
    with hogs(HOGS):
        setup, first, query = follow_quickstart(python, tmp_path, with_spark=False)
    assert setup.startswith("polywire 0.1.0 (")
    *sample, produced, record = first.splitlines()
    assert [json.loads(line)["topic"] for line in sample] == ["sample"] * 3
    assert produced == "produced topic=orders records=1"
    assert '"key": "a", "value": "hello"' in record
    assert "│ a       │       1 │" in query


@pytest.mark.slow
@pytest.mark.spark
def test_the_quickstart_with_spark(python: Path, tmp_path: Path) -> None:
    *_, spark = follow_quickstart(python, tmp_path, with_spark=True)
    assert SHOWN in spark
    assert "Traceback" not in spark


# Brokers in the background


def polywire(*words: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output."""
    command = [sys.executable, "-m", "polywire", *words]
    return subprocess.run(
        command,
        cwd=cwd,
        env=child_environment() | extra,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def served(port: str) -> list[str]:
    """Return options of a broker with one listener."""
    return [*silenced("polywire"), "--polywire", f"127.0.0.1:{port}"]


def test_a_detached_broker_is_ready_and_can_be_stopped(tmp_path: Path) -> None:
    port = str(lasting_port())
    started = polywire("serve", "--detach", *served(port), cwd=tmp_path)
    assert started.returncode == 0, started.stderr
    pid = running(tmp_path / "polywire-data")
    try:
        assert started.stderr == f"ready pid={pid} log='polywire-data.log'; end it with: polywire stop\n"
        listed = polywire("topic", "list", "-a", f"127.0.0.1:{port}", cwd=tmp_path, POLYWIRE_CONNECT_S="0")
        assert listed.returncode == 0, listed.stderr
        again = polywire("serve", "--detach", *served(port), cwd=tmp_path)
        assert (again.returncode, "already running" in again.stderr) == (1, True)
    finally:
        stopped = polywire("stop", cwd=tmp_path)
    assert (stopped.returncode, stopped.stderr) == (0, f"stopped pid={pid}\n")
    assert running(tmp_path / "polywire-data") is None
    missing = polywire("stop", cwd=tmp_path)
    assert (missing.returncode, "no detached broker is running" in missing.stderr) == (1, True)
    for name in ("polywire-data.log", "polywire-data.pid"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0, "other users cannot read it"


def test_a_detached_broker_that_was_killed_is_not_running(tmp_path: Path) -> None:
    port = str(lasting_port())
    data = tmp_path / "data"
    for _ in range(2):
        started = polywire("serve", "--detach", "--data-dir", str(data), *served(port), cwd=tmp_path)
        assert started.returncode == 0, started.stderr
        assert f"polywire stop --data-dir {data}" in started.stderr
        pid = running(data)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while running(data) is not None:
            time.sleep(0.01)
    assert beside(data, ".ready").exists(), "a stale file did not make the second start return early"


def test_a_detached_broker_that_cannot_start_reports_why(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        started = polywire("serve", "--detach", *served(str(taken.getsockname()[1])), cwd=tmp_path)
    assert started.returncode == 1
    assert started.stderr.startswith("error: the broker did not start: ")
    assert "the address is in use" in started.stderr
    assert started.stderr.count("\n") == 1


def test_a_command_waits_for_a_broker_that_starts_later(tmp_path: Path) -> None:
    port = str(lasting_port())
    listed: list[subprocess.CompletedProcess[str]] = []
    asking = threading.Thread(
        target=lambda: listed.append(
            polywire("topic", "list", "-a", f"127.0.0.1:{port}", cwd=tmp_path, POLYWIRE_CONNECT_S="60")
        )
    )
    asking.start()
    time.sleep(3)  # until it has reported that it waits, on most machines
    started = polywire("serve", "--detach", *served(port), cwd=tmp_path)
    try:
        asking.join(SECONDS_MAX)
        assert started.returncode == 0, started.stderr
        assert listed[0].returncode == 0, listed[0].stderr
    finally:
        polywire("stop", cwd=tmp_path)
