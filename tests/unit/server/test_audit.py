"""The audit log: its lines, its rate limit, and rotation of its file."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from polywire.broker.authorization import AuditEvent, Outcome
from polywire.server.audit import LINES_MAX, WINDOW_S, AuditLog
from polywire.testing.loop import SimulatedClock

REFUSED = AuditEvent("login", Outcome.REFUSED, "eve\x1b", "10.0.0.1:5", reason="wrong user or password")


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    usual = structlog.get_config()
    capture = LogCapture()
    structlog.configure(processors=[capture])
    yield capture.entries
    structlog.configure(**usual)


def reported(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_a_line(tmp_path: Path, lines: list[Any]) -> None:
    path = tmp_path / "audit"
    audit = AuditLog(SimulatedClock(), path)
    audit.record(REFUSED)
    audit.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (line,) = reported(path)
    facts = {"action": "login", "outcome": "refused", "user": "eve\x1b", "peer": "10.0.0.1:5"}
    assert facts.items() <= line.items()
    assert "\x1b" not in path.read_text()
    assert facts.items() <= lines[0].items()
    assert lines[0]["logger"] == "polywire.audit"


def test_repeated_events_are_counted_instead_of_written(tmp_path: Path, lines: list[Any]) -> None:
    clock = SimulatedClock()
    audit = AuditLog(clock, tmp_path / "audit")
    for port in range(LINES_MAX + 5):
        audit.record(AuditEvent("login", Outcome.REFUSED, "eve", f"10.0.0.1:{port}"))
    audit.record(AuditEvent("login", Outcome.REFUSED, "eve", "10.0.0.2:1"))
    clock.advance(WINDOW_S)
    audit.sweep()
    audit.close()
    kept = reported(tmp_path / "audit")
    assert len(kept) == LINES_MAX + 2, "another address has its own line"
    assert kept[-1]["left_out"] == 5
    assert kept[-1]["by"] == "10.0.0.1"


def test_reopen_creates_the_file_again_after_rotation(tmp_path: Path, lines: list[Any]) -> None:
    path = tmp_path / "audit"
    audit = AuditLog(SimulatedClock(), path)
    audit.record(REFUSED)
    path.rename(tmp_path / "audit.1")
    audit.record(REFUSED)
    audit.reopen()
    audit.record(REFUSED)
    audit.close()
    assert (len(reported(tmp_path / "audit.1")), len(reported(path))) == (2, 1)


def test_a_write_error_is_logged_and_does_not_raise(lines: list[Any]) -> None:
    audit = AuditLog(SimulatedClock(), Path("/dev/full"))
    for _ in range(3):
        audit.record(REFUSED)
    audit.close()
    assert [line["log_level"] for line in lines].count("critical") == 1
