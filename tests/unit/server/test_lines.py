"""Repeated log lines are counted instead of written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from polywire.server.lines import FACT_CHARS_MAX, LINES_MAX, WINDOW_S, LineLimit, escape, set_up_log
from polywire.testing.loop import SimulatedClock


class Lines:
    """Log lines behind a rate limit."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.limit = LineLimit(self.clock)
        self.capture = LogCapture()
        self.log = structlog.get_logger()

    def sweep(self, *, stopping: bool = False) -> list[Any]:
        """Return the line about dropped lines."""
        before = len(self.capture.entries)
        self.limit.sweep(stopping=stopping)
        return self.capture.entries[before:]


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines = Lines()
    usual = structlog.get_config()
    structlog.configure(processors=[lines.limit, lines.capture])
    try:
        yield lines
    finally:
        structlog.configure(**usual)


def test_dropped_lines_are_counted_in_one_line(lines: Lines) -> None:
    for number in range(1_000):
        lines.log.info("connection dropped", peer=number)
    lines.log.info("something else")
    assert [line.get("peer") for line in lines.capture.entries] == [*range(LINES_MAX), None]
    lines.clock.advance(WINDOW_S / 2)
    assert not lines.sweep()
    lines.clock.advance(WINDOW_S / 2 + 1)
    lines.log.info("connection dropped", peer=1_000)  # late, but not reported yet
    assert lines.sweep() == [{"event": "connection dropped", "log_level": "info", "more": 981, "last_s": 11}]
    assert not lines.sweep()


def test_the_next_window_has_lines_again(lines: Lines) -> None:
    for _ in range(LINES_MAX):
        lines.log.warning("far away")
    lines.clock.advance(WINDOW_S)
    assert not lines.sweep()
    for _ in range(LINES_MAX + 1):
        lines.log.warning("far away")
    assert len(lines.capture.entries) == 2 * LINES_MAX
    (reported,) = lines.sweep(stopping=True)
    assert (reported["log_level"], reported["more"]) == ("warning", 1)


def test_critical_lines_are_always_written(lines: Lines) -> None:
    for _ in range(LINES_MAX + 1):
        lines.log.critical("storage failed")
    assert len(lines.capture.entries) == LINES_MAX + 1


def test_client_data_does_not_control_the_terminal() -> None:
    line = {"event": "x", "reason": "a\x1b[2J\nb", "exception": "Traceback\n  a\x1b", "count": 1}
    assert escape(None, "info", line) == {
        "event": "x",
        "reason": r"a\x1b[2J\x0ab",
        "exception": "Traceback\n  a\\x1b",
        "count": 1,
    }


def test_long_facts_are_shortened() -> None:
    line = escape(None, "info", {"event": "x", "reason": "k" * 1_000_000, "exception": "Traceback\n" + "k" * 1_000_000})
    assert line["reason"] == "k" * FACT_CHARS_MAX + "… characters=1000000"
    assert line["exception"] == f"Traceback\n{line['reason']}"


def test_lines_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    usual = structlog.get_config()
    try:
        set_up_log(LineLimit(SimulatedClock()), form="json")
        structlog.get_logger().warning("far away", peer="a\x1b[2J", count=3)
    finally:
        structlog.configure(**usual)
    line = json.loads(capfd.readouterr().err)
    assert line.pop("timestamp")
    assert line == {"event": "far away", "level": "warning", "peer": "a\\x1b[2J", "count": 3}
