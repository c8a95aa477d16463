"""Format the broker's own log lines, and limit their rate.

* Every event is one line on standard error.
* The rate of lines is limited for each event. A later line reports how many were dropped.
* A line that cannot be written, for example to a closed pipe or a full disk, is dropped. Logging never raises.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TextIO, cast

import msgspec
import structlog

from polywire.clock import Clock
from polywire.escaping import escaped

LINES_MAX: Final = 20  # per event and window: enough to see what happens, and at most some 2,000 bytes per second
# limit for the length of one value; enough for a path or several names, while a record key can have megabytes
FACT_CHARS_MAX: Final = 4_000
WINDOW_S: Final = 10.0
NEVER_DROPPED: Final = "critical"

log = structlog.get_logger("polywire.server")


class _Window(msgspec.Struct):
    """Counts the lines of one event, from the first of them until ``WINDOW_S`` later."""

    begun: float
    written: int = 0
    dropped: int = 0
    level: str = "info"


def escape(logger: Any, level: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape the values of a log line (a structlog processor).

    Values from clients can contain control sequences for the terminal on which the log is read.
    """
    for name, value in line.items():
        if isinstance(value, str):
            line[name] = "\n".join(map(_shown, value.split("\n"))) if name == "exception" else _shown(value)
    return line


def _shown(text: str) -> str:
    """Return a text shortened, on one line, and without control sequences."""
    cut = escaped(text[:FACT_CHARS_MAX])
    return cut if len(text) <= FACT_CHARS_MAX else f"{cut}… characters={len(text)}"


class LineLimit:
    """Drops lines of an event after ``LINES_MAX`` of them within ``WINDOW_S`` (a structlog processor).

    Event names are constants in the code, so there are few of them. Data from clients is in the values.
    """

    __slots__ = ("_clock", "_windows")

    def __init__(self, clock: Clock) -> None:
        self._clock: Final = clock
        self._windows: dict[str, _Window] = {}

    def __call__(self, logger: Any, level: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Return the line unchanged. Raises DropEvent to drop it."""
        if level == NEVER_DROPPED:
            return line
        window = self._windows.get(line["event"])
        if window is None:
            window = self._windows[line["event"]] = _Window(self._clock.monotonic())
        if window.written >= LINES_MAX:
            window.dropped += 1
            window.level = level
            raise structlog.DropEvent
        window.written += 1
        return line

    def sweep(self, *, stopping: bool = False) -> None:
        """Log how many lines were dropped in windows that have ended. Call it once a second.

        If the process is ``stopping``, all windows end.
        """
        now = self._clock.monotonic()
        for event, window in list(self._windows.items()):
            if not stopping and now - window.begun < WINDOW_S:
                continue
            del self._windows[event]
            if window.dropped:
                getattr(log, window.level)(event, more=window.dropped, last_s=round(now - window.begun))


class _StandardError:
    """Writes lines to standard error without a buffer: after an error, a buffer would fail again when Python exits."""

    __slots__ = ("__weakref__", "_descriptor")  # structlog keeps a lock for each file

    def __init__(self) -> None:
        # Python has no sys.stderr in a process that was started without one; descriptor 2 is then some other file
        self._descriptor: Final = None if sys.stderr is None else sys.stderr.fileno()

    def write(self, text: str) -> None:
        """Write a line, or drop the rest of it at the first error."""
        if self._descriptor is None:
            return
        rest = memoryview(text.encode(errors="backslashreplace"))
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def flush(self) -> None:
        """Do nothing (a file has this method)."""


def set_up_log(limit: LineLimit, *, form: str = "logfmt", facts: Mapping[str, str] | None = None) -> None:
    """Write log lines to standard error, as ``logfmt`` or ``json``. ``facts`` are added to every line."""

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
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _StandardError())),
    )
