"""The audit log: one line for every login, every refused request and every administrative change.

Lines go to the process's log, and to a separate file if one is configured.

* A line says what happened, when, to which user and from which address. It contains no secret.
* Only the owner can read the file. Lines are appended, and the file is reopened on SIGHUP.
* If the same event repeats too often, further lines are counted instead of written.
* A failure to write the file is logged once and does not stop the broker.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from polywire.broker.authorization import AuditEvent, Outcome
from polywire.clock import Clock
from polywire.types import host_of

LINES_MAX: Final = 1_000  # lines per window, action, outcome and user (or address); more than a person causes
WINDOW_S: Final = 10.0
KEYS_MAX: Final = 4_096  # separate counters per window; events beyond this number share one counter
_PRIVATE: Final = 0o600

log = structlog.get_logger("polywire.audit")


class AuditLog:
    """Writes audit events as log lines."""

    __slots__ = ("_begun", "_clock", "_failed", "_file", "_path", "_written")

    def __init__(self, clock: Clock, path: Path | None = None) -> None:
        """Open the file, if there is one. Raises OSError if it cannot be opened."""
        self._clock: Final = clock
        self._path: Final = path
        self._file = -1
        self._failed = False
        # number of lines by action, outcome and actor since ``_begun``; includes dropped ones
        self._written: dict[tuple[str, str, str], int] = {}
        self._begun = clock.monotonic()
        self.reopen()

    def reopen(self) -> None:
        """Open the file again by its name, because log rotation may have renamed the old file.

        Raises OSError if it cannot be opened.
        """
        if self._path is not None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            opened = os.open(self._path, flags, _PRIVATE)
            self.close()
            self._file = opened

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def record(self, event: AuditEvent) -> None:
        """Write an event, unless too many lines with its action, outcome and user were written recently."""
        # Denied requests are counted by address, because a client can send any user name.
        actor = event.user if event.outcome is Outcome.ALLOWED else host_of(event.peer)
        kind = event.action, event.outcome.value, actor
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
        """Log how many lines were dropped, if the window has ended. Call it once a second."""
        now = self._clock.monotonic()
        if now - self._begun < WINDOW_S and not stopping:
            return
        self._begun = now
        written, self._written = self._written, {}
        for (action, outcome, actor), count in written.items():
            if count > LINES_MAX:
                self._write(action=action or "others", outcome=outcome, by=actor, left_out=count - LINES_MAX)

    def _write(self, **facts: object) -> None:
        present = {name: value for name, value in facts.items() if value != ""}
        log.info("audit", logger="polywire.audit", **present)
        if self._file < 0:
            return
        at = datetime.fromtimestamp(self._clock.now_us() / 1e6, UTC).isoformat(timespec="microseconds")
        line = json.dumps({"timestamp": at, **present}) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            if not self._failed:
                log.critical("audit log cannot be written", file=str(self._path), reason=error.strerror)
            self._failed = True
        else:
            self._failed = False
