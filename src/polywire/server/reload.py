"""Reload the users file, the certificate and the audit log's file on SIGHUP, without interrupting service.

* If a file cannot be loaded, the error is logged and the previous content remains in use.
* Reloading never turns authentication off.
* Only the connections of users who were changed or removed are closed.
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


Load = Callable[[], object]
"""Loads a file. If it raises BrokerError or OSError, the previous content remains in use."""


class Reload:
    """Reloads the files of a process."""

    __slots__ = ("_files",)

    def __init__(self, files: Mapping[str, Load | None]) -> None:
        """Store how to load each file, by its description.

        They are loaded in this order; None stands for a file that is not configured.
        """
        self._files: Final = files

    def __call__(self) -> None:
        """Reload all files."""
        for what, load in self._files.items():
            if load is not None:
                self._try(what, load)
        log.info("reloaded")

    def _try(self, what: str, load: Load) -> None:
        try:
            load()
        except BrokerError as error:
            log.error("reload failed: the previous state remains in use", what=what, reason=error.message)
        except OSError as error:
            log.error(
                "reload failed: the previous state remains in use",
                what=what,
                reason=error.strerror,
                file=error.filename,
            )


def users_loader(access: Access, users: Path | None) -> Load | None:
    """Return a function that loads the users file, or None if none is configured."""
    return None if users is None else lambda: access.configure(load_users(users))
