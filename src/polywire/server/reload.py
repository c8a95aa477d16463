"""SIGHUP: take up the users file, the certificate and the audit log's file anew, while everybody is served.

Promises: what cannot be taken up is told of and stays as it was; a broker that has users keeps some; nobody but whose user changed is
disconnected. Must not know: any wire, signals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import structlog

from polywire.broker.access import Access
from polywire.errors import BrokerError
from polywire.server.users import load_users

log = structlog.get_logger("polywire.server")


Take = Callable[[], object]
"""Takes a file up. Raises BrokerError, OSError; then what was there before goes on."""


class Reload:
    """What a process takes up anew when it is told to."""

    __slots__ = ("_files",)

    def __init__(self, files: Mapping[str, Take | None]) -> None:
        """files: what each is, in this order; None where there is none."""
        self._files: Final = files

    def __call__(self) -> None:
        """Take up what has changed."""
        for what, take in self._files.items():
            if take is not None:
                self._try(what, take)
        log.info("reloaded")

    def _try(self, what: str, take: Take) -> None:
        try:
            take()
        except BrokerError as error:
            log.error("reload failed: the previous state remains in use", what=what, reason=error.message)
        except OSError as error:
            log.error(
                "reload failed: the previous state remains in use",
                what=what,
                reason=error.strerror,
                file=error.filename,
            )


def users_taken(access: Access, users: Path | None) -> Take | None:
    """Takes up the file of users, where there is one."""
    return None if users is None else lambda: access.configure(load_users(users))
