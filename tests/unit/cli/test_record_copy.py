"""``polywire record copy`` from the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polywire.cli.main import run
from polywire.cli.record import endpoint_of
from polywire.client.copying import End
from polywire.errors import Invalid
from polywire.testing.thread import BrokerThread


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire", "iggy"]) as running:
        monkeypatch.setenv("POLYWIRE_ADDRESS", running.url())
        yield running


@pytest.fixture
def orders(broker: BrokerThread, tmp_path: Path) -> str:
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{number}\n" for number in range(9)))
    with lines.open() as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", stream)
        assert run(["record", "produce", "orders", "--format", "raw", "--key", "k"]) == 0
    return "orders"


def test_copy_reports_the_fields_that_the_target_cannot_store(
    broker: BrokerThread, orders: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    state = tmp_path / "state"
    assert run(["group", "reset", "billing", orders, "--to", "4"]) == 0
    capfdbinary.readouterr()
    words = ["record", "copy", orders, f"{broker.url('iggy')}/copied", "--state", str(state), "--group", "billing"]
    assert run(words) == 0
    lines = capfdbinary.readouterr().err.decode().splitlines()
    assert lines[-1] == "copied records=9 lost_keys=9 lost_times=9"
    assert any(line.endswith("position=4 new_position=4") for line in lines)
    assert state.exists()
    assert run(words) == 0
    assert capfdbinary.readouterr().err.decode().splitlines()[-1] == "copied records=0"
    assert run(["record", "consume", "copied", "--format", "raw"]) == 0
    assert capfdbinary.readouterr().out == b"".join(b"%d\n" % number for number in range(9))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere", "b"], "code=topic_missing (list topics with: polywire topic list)"),
        (["orders", "polywire://127.0.0.1:1"], "topic is missing (use scheme://host:port/topic)"),
        (["orders", "polywire://127.0.0.1:1/b"], "cannot connect: connection refused"),
        (["orders", "orders"], "source and target are the same topic"),
        (["orders", "b", "--from", "soon"], "start position is invalid"),
        (["orders", "b", "--from", "latest"], "no records to copy from='latest'"),
        (
            ["orders", "b", "--follow", "--until", "5"],
            "--follow has no end, so it cannot be used with --until until='5'",
        ),
        (["orders", "b", "-p", "9"], "code=partition_missing"),
        (["orders", "b", "--state", "pyproject.toml"], "not the state of a copy"),
    ],
)
def test_copy_reports_invalid_arguments(
    words: list[str], reason: str, orders: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["record", "copy", *words]) == 1
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_endpoints() -> None:
    assert endpoint_of("orders", "kafka://h:1") == End("kafka://h:1", "orders")
    assert endpoint_of("iggy+tls://h:1/a/b.c", "") == End("iggy+tls://h:1", "a/b.c")
    assert str(endpoint_of("polywire://me:secret@h:1/orders", "")) == "polywire://h:1/orders"
    with pytest.raises(Invalid):
        endpoint_of("kafka://h:1/", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_copy_that_follows_ends_with_a_summary(
    broker: BrokerThread, orders: str, tmp_path: Path, number: int
) -> None:
    words = ["record", "copy", orders, "followed", "--follow", "--state", str(tmp_path / "state")]
    program = [sys.executable, "-m", "polywire", *words]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while time.monotonic() < end and run(["record", "consume", "followed", "--count", "9"]) != 0:
            time.sleep(0.2)
        time.sleep(1)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err.splitlines()[-1] == "copied records=9 lag=0"
