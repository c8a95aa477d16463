"""The audit log: a line for every login, refusal and administration, in the process's log and, where one is named, in a file of its own.

Promises: a line holds what happened, when, to whom and from where, and no secret; the file is its owner's alone, only ever appended to, and
opened anew when the broker is told to reload; what repeats without end is counted instead of written; a file that cannot be written
stops nobody, and is told of. Must not know: what the actions are.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from polywire.broker.audit import AuditEvent, Outcome
from polywire.clock import Clock
from polywire.types import host_of

LINES_MAX: Final = 1_000  # in a window, of one user's (or address's) doing the same: a hundred a second are no person's
WINDOW_S: Final = 10.0
KEYS_MAX: Final = 4_096  # kinds of lines that are counted apart in a window; the others share one count
_PRIVATE: Final = 0o600  # who logs in from where is nobody else's business

log = structlog.get_logger("polywire.audit")


class AuditLog:
    """Where audit events go.

    Invariant: ``_written`` counts the lines of each kind in the window that began at ``_begun``, those left out as well.
    """

    __slots__ = ("_begun", "_clock", "_failed", "_file", "_path", "_written")

    def __init__(self, clock: Clock, path: Path | None = None) -> None:
        """path: the file, None for none. Raises OSError when it cannot be opened."""
        self._clock: Final = clock
        self._path: Final = path
        self._file = -1
        self._failed = False
        self._written: dict[tuple[str, str, str], int] = {}
        self._begun = clock.monotonic()
        self.reopen()

    def reopen(self) -> None:
        """Write into the file of that name from now on: the one before may have been moved away. Raises OSError."""
        if self._path is not None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            opened = os.open(self._path, flags, _PRIVATE)
            self.close()
            self._file = opened

    def close(self) -> None:
        """Write no more into the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def record(self, event: AuditEvent) -> None:
        """Keep an event."""
        who = event.user if event.outcome is Outcome.ALLOWED else host_of(event.peer)
        kind = event.action, event.outcome.value, who
        if kind not in self._written and len(self._written) >= KEYS_MAX:
            kind = "", "", ""
        count = self._written[kind] = self._written.get(kind, 0) + 1
        if count <= LINES_MAX:
            self._write(
                action=event.action,
                outcome=event.outcome.value,
                user=event.user,
                peer=event.peer,
                resource=event.resource,
                reason=event.reason,
            )

    def sweep(self, *, stopping: bool = False) -> None:
        """Tell how many lines were left out of a window that has ended; to be called once a second."""
        now = self._clock.monotonic()
        if now - self._begun < WINDOW_S and not stopping:
            return
        self._begun = now
        written, self._written = self._written, {}
        for (action, outcome, who), count in written.items():
            if count > LINES_MAX:
                self._write(action=action or "others", outcome=outcome, by=who, left_out=count - LINES_MAX)

    def _write(self, **facts: object) -> None:
        told = {name: value for name, value in facts.items() if value != ""}
        log.info("audit", logger="polywire.audit", **told)
        if self._file < 0:
            return
        at = datetime.fromtimestamp(self._clock.now_us() / 1e6, UTC).isoformat(timespec="microseconds")
        line = json.dumps({"timestamp": at, **told}) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            if not self._failed:
                log.critical("audit log cannot be written", file=str(self._path), reason=error.strerror)
            self._failed = True
        else:
            self._failed = False
