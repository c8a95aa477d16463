"""Handle the signals that stop a process or make it reload its files.

* A broker on a bucket runs one event loop after another. The signal handlers of an event loop are removed when it ends,
  so a signal between two loops would kill the process. The handlers of this module remain.
* SIGHUP reloads the users file, the quotas, the certificate and the audit log's file without interrupting service. If a file cannot
  be loaded, the error is logged and the previous content remains in use.
* Reloading never turns authentication off.
* Only the connections of users who were changed or removed are closed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

import structlog

from polywire.broker.access import Access
from polywire.broker.client_quotas import parse_quotas
from polywire.errors import BrokerError
from polywire.server.users import load_users

STOPPING: Final = (signal.SIGTERM, signal.SIGINT)

OnStop = Callable[[signal.Signals], object]
"""Called on the event loop with the signal."""
log = structlog.get_logger("polywire.server")
Load = Callable[[], object]
"""Loads a file. If it raises BrokerError or OSError, the previous content remains in use."""


class Signals:
    """The signals of a process. Create it in the main thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: OnStop | None = None
        self._reload: Callable[[], object] | None = None
        self._pending: signal.Signals | None = None  # a stop signal that arrived while no functions were set
        self._before = {number: signal.signal(number, self._received) for number in (*STOPPING, signal.SIGHUP)}

    def listen(self, stop: OnStop, reload: Callable[[], object] | None = None) -> None:
        """Call ``stop`` or, for SIGHUP, ``reload`` on the running loop from now on.

        A pending stop signal is handled at once.
        """
        self._loop, self._stop, self._reload = asyncio.get_running_loop(), stop, reload
        pending, self._pending = self._pending, None
        if pending is not None:
            stop(pending)

    def keep(self) -> None:
        """Remove the functions that ``listen`` set. Until ``listen`` is called again, a stop signal stays pending."""
        self._loop = self._stop = self._reload = None

    def end(self) -> None:
        self.keep()
        for number, before in self._before.items():
            signal.signal(number, before)

    def _received(self, number: int, _: FrameType | None) -> None:
        """Pass the signal to the event loop, because Python may call this during any code."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._handle, signal.Signals(number))
        elif number in STOPPING:
            self._pending = signal.Signals(number)

    def _handle(self, number: signal.Signals) -> None:
        if number in STOPPING:
            if self._stop is None:
                self._pending = number
            else:
                self._stop(number)
        elif self._reload is not None:
            self._reload()


class Reload:
    """Reloads the files of a process."""

    __slots__ = ("_files",)

    def __init__(self, files: Mapping[str, Load | None]) -> None:
        """``files`` has a description and a loading function for each file, in the order in which they are loaded.

        The function is None for a file that is not configured.
        """
        self._files: Final = files

    def __call__(self) -> None:
        for what in self._files:
            self.load(what)
        log.info("reloaded")

    def load(self, what: str) -> None:
        """Load one file, if it is configured."""
        load = self._files[what]
        if load is not None:
            self._try(what, load)

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
    """Return a function that loads the users file; None if no file is configured."""
    return None if users is None else lambda: access.configure(load_users(users))


def quotas_loader(access: Access, read: Callable[[], str] | None) -> Load | None:
    """Return a function that applies the quotas of the settings file; None if they are not in the file."""
    return None if read is None else lambda: access.configure_quotas(parse_quotas(read()))
