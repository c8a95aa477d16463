"""Log lines: how they look, and how many there may be.

Promises: one line per event on standard error; whatever peers do, lines of one kind come at a bounded rate, and what was left out is
counted in a line of its own. Must not know: who logs what.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import structlog

from polywire.clock import Clock
from polywire.escaping import escaped

LINES_MAX: Final = 20  # of one event in a window: enough to see what happens; some 2,000 bytes a second at the worst
FACT_CHARS_MAX: Final = 4_000  # of one fact: a path or several names; the key of a record may have megabytes
WINDOW_S: Final = 10.0
NEVER_DROPPED: Final = "critical"

log = structlog.get_logger("polywire.server")


class _Window:
    """Lines of one event since the first of them."""

    __slots__ = ("begun", "left_out", "level", "written")

    def __init__(self, begun: float) -> None:
        self.begun: Final = begun
        self.written = 0
        self.left_out = 0
        self.level = "info"


def escape(logger: Any, level: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: facts may be words of peers, and a log is read on terminals."""
    for name, value in line.items():
        if isinstance(value, str):
            line[name] = "\n".join(map(_shown, value.split("\n"))) if name == "exception" else _shown(value)
    return line


def _shown(text: str) -> str:
    """A text on one line that is not too long, and that no terminal obeys."""
    cut = escaped(text[:FACT_CHARS_MAX])
    return cut if len(text) <= FACT_CHARS_MAX else f"{cut}… characters={len(text)}"


class LineLimit:
    """A processor of structlog that drops lines of events which repeat too often.

    Invariant: of one event at most ``LINES_MAX`` lines are written per ``WINDOW_S``. Events are constants of our code, so there are few;
    what a peer has sent stands in their facts.
    """

    __slots__ = ("_clock", "_windows")

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._windows: dict[str, _Window] = {}

    def __call__(self, logger: Any, level: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Let a line pass. Raises DropEvent for one too many."""
        if level == NEVER_DROPPED:
            return line
        window = self._windows.get(line["event"])
        if window is None:
            window = self._windows[line["event"]] = _Window(self._clock.monotonic())
        if window.written >= LINES_MAX:
            window.left_out += 1
            window.level = level
            raise structlog.DropEvent
        window.written += 1
        return line

    def sweep(self, *, stopping: bool = False) -> None:
        """Tell what was left out of the windows that have ended, of all when the process stops; to be called once a second."""
        now = self._clock.monotonic()
        for event, window in list(self._windows.items()):
            if not stopping and now - window.begun < WINDOW_S:
                continue
            del self._windows[event]
            if window.left_out:
                getattr(log, window.level)(event, more=window.left_out, last_s=round(now - window.begun))


def set_up_log(limit: LineLimit, *, form: str = "logfmt", facts: Mapping[str, str] | None = None) -> None:
    """One line per event, to standard error, as ``logfmt`` or ``json``. facts: that every line tells."""

    def add_facts(logger: Any, level: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        line.update(facts or {})
        return line

    renderer: Any = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    if form == "json":
        renderer = structlog.processors.JSONRenderer(sort_keys=False)
    structlog.configure(
        processors=[
            limit,
            add_facts,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            escape,
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
