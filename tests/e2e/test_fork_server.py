"""Forks of the fork server behave as processes that ``subprocess`` starts, and its faults are reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.testing.process import BrokerProcess as StartedBroker
from tests import fork_server
from tests.broker_process import BrokerProcess, child_environment

COMMAND: Final = (sys.executable, "-m", "polywire")
SECONDS_MAX: Final = 60.0
# Starts a command that waits for its input, prints the id of its fork server, and does with both what the test wants.
OWNER: Final = """
import os, signal, subprocess, sys
from tests import fork_server
command = [sys.executable, "-m", "polywire", "user", "add", "alice", "--users", sys.argv[1]]
options = {"env": fork_server.child_environment(), "stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
process = fork_server.popen(command, **options)
[server] = map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())
print(server, flush=True)
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no fork server: the system lacks pidfd_open")


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["--version"], ""),
        (["--help"], ""),
        (["topic"], ""),
        (["topic", "list", "--nothing"], ""),
        (["topic", "list", "--address", "127.0.0.1:1"], ""),
        (["user", "add", "alice", "--users", "users"], "secret\n"),
        (["config", "check"], ""),
    ],
    ids=" ".join,
)
def test_output_exit_code_input_and_directory_are_the_same(words: list[str], typed: str, tmp_path: Path) -> None:
    (tmp_path / "polywire.toml").write_text("[serve]\nnothing = 1\n")
    environment = child_environment() | {"POLYWIRE_CONNECT_S": "0.1", "COLUMNS": "100"}
    found = []
    for run in (fork_server.run, subprocess.run):
        options: dict[str, Any] = {"capture_output": True} if run is subprocess.run else {}
        done = run([*COMMAND, *words], input=typed, text=True, cwd=tmp_path, env=environment, **options)
        found.append((done.returncode, done.stdout, done.stderr))
        (tmp_path / "users").unlink(missing_ok=True)
    assert found[0] == found[1]


def test_a_broker_has_the_descriptors_and_signals_of_a_started_one(tmp_path: Path) -> None:
    found = []
    for kind in (StartedBroker, BrokerProcess):
        with kind(tmp_path / "data", "--slot-mib", "17", wires=["polywire"]) as broker:
            opened = [os.readlink(path).split(":")[0] for path in Path(f"/proc/{broker.pid}/fd").iterdir()]
            status = Path(f"/proc/{broker.pid}/status").read_text().splitlines()
            signals = [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt", "Threads"))]
            group = os.getpgid(broker.pid), os.getsid(broker.pid)
            limits = Path(f"/proc/{broker.pid}/limits").read_text()
            assert (b"fork_server" in command_line(broker.pid)) is (kind is BrokerProcess)
            found.append((sorted(opened[:3]), len(opened), signals, group, limits))
            assert broker.stop() == 0, broker.log_text()
    assert found[0] == found[1]


def test_a_fork_is_made_after_a_spark_session_has_set_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/java")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", child_environment()["PYTHONPATH"])
    with fork_server.popen([*COMMAND, "--version"], env=child_environment(), stdout=subprocess.DEVNULL) as process:
        assert type(process) is not subprocess.Popen


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_broker_itself(number: signal.Signals, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire"]) as broker:
        os.kill(broker.pid, number)
        code = broker._end(signal.SIGCONT)
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        assert ("event=stopped" in broker.log_text()) is (number != signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "changed", "options"),
    [
        ("-m polywire", {"POLYWIRE_PURE": "1"}, {}),
        ("-m polywire", {"LD_PRELOAD": "no-such-library"}, {}),
        ("-m polywire", {"PYTHONHASHSEED": "1"}, {}),
        ("-m polywire", {"PYTHONPATH": "/nothing"}, {}),
        ("-m polywire", {"TZ": "Asia/Kolkata"}, {}),
        ("-m polywire", {}, {"start_new_session": True}),
        ("-X dev -m polywire", {}, {}),
        ("-m polywire.links", {}, {}),
    ],
)
def test_a_process_that_would_differ_is_started(
    words: str, changed: dict[str, str], options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, *words.split(), "--version"]
    with fork_server.popen(command, env=child_environment(), **quiet, **options) as process:
        assert type(process) is subprocess.Popen


def owner(rest: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", OWNER + rest, folder / "users"], capture_output=True, text=True, env=child_environment(), check=False,
        timeout=SECONDS_MAX, cwd=Path(__file__).parents[2],
    )  # fmt: skip


def state_of(pid: int) -> str:
    """Return the letter of a process's state: Z for a zombie, which has ended; none if there is no such process."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def wait_for(pid: int, *states: str) -> None:
    """Wait until a process is in one of these states."""
    end = time.monotonic() + SECONDS_MAX
    while (state := state_of(pid)) not in states:
        assert time.monotonic() < end, state
        time.sleep(0.01)


def test_the_id_of_a_process_is_not_used_again_before_its_end_is_known() -> None:
    options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = fork_server.popen([*COMMAND, "--version"], env=child_environment(), **options)
    wait_for(process.pid, "Z")
    assert process.wait() == 0
    wait_for(process.pid, "")


@pytest.mark.parametrize("end", ["process.communicate(b'secret')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_server_ends_with_its_owner(end: str, tmp_path: Path) -> None:
    done = owner(end, tmp_path)
    assert not done.stderr
    wait_for(int(done.stdout), "Z", "")


@pytest.mark.parametrize(
    "use",
    [
        "process.wait()",
        # until the new process has closed what it inherited from the server
        "while process.poll() is None: os.sched_yield()",
        "fork_server.popen(command, **options)",
    ],
)
def test_the_end_of_the_server_is_reported(use: str, tmp_path: Path) -> None:
    done = owner(f"os.kill(server, signal.SIGKILL)\nos.wait()\n{use}\n", tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("AssertionError: the fork server ended\n")
