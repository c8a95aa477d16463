"""Brokers in the background: `polywire serve --detach` and `polywire stop`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from polywire.cli.detached import beside, running
from polywire.testing.process import lasting_port
from tests.broker_process import child_environment, silenced

SECONDS_MAX: Final = 120.0


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
        assert started.stderr.endswith(f"ready pid={pid} log='polywire-data.log'; end it with: polywire stop\n")
        listed = polywire("topic", "list", "-a", f"127.0.0.1:{port}", cwd=tmp_path, POLYWIRE_CONNECT_S="0")
        assert listed.returncode == 0, listed.stderr
        again = polywire("serve", "--detach", *served(port), cwd=tmp_path)
        assert (again.returncode, "already running" in again.stderr) == (1, True)
    finally:
        stopped = polywire("stop", cwd=tmp_path)
    assert stopped.returncode == 0
    assert stopped.stderr.endswith(f"stopped pid={pid}\n")
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
