"""Signals that stop a process or make it reload its files, across several event loops.

A broker of a bucket runs one event loop after another, and must not lose a signal that arrives between two of them. The
signal handlers of an event loop are not enough: when the loop ends, they are removed, and a signal would kill the
process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

STOPPING: Final = (signal.SIGTERM, signal.SIGINT)

OnStop = Callable[[signal.Signals], object]
"""Called on the event loop with the signal."""


class Signals:
    """The signals of a process. Create it in the main thread.

    ``_pending`` is a stop signal that arrived while no handler was set.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: OnStop | None = None
        self._reload: Callable[[], object] | None = None
        self._pending: signal.Signals | None = None
        self._before = {number: signal.signal(number, self._received) for number in (*STOPPING, signal.SIGHUP)}

    def listen(self, stop: OnStop, reload: Callable[[], object] | None = None) -> None:
        """Call ``stop`` or ``reload`` (for SIGHUP) on the running loop from now on. A pending stop signal is handled at once."""
        self._loop, self._stop, self._reload = asyncio.get_running_loop(), stop, reload
        pending, self._pending = self._pending, None
        if pending is not None:
            stop(pending)

    def keep(self) -> None:
        """Remove the handlers. A stop signal then stays pending until ``listen`` is called again."""
        self._loop = self._stop = self._reload = None

    def end(self) -> None:
        """Restore the previous signal handlers."""
        self.keep()
        for number, before in self._before.items():
            signal.signal(number, before)

    def _received(self, number: int, _: FrameType | None) -> None:
        """Receive a signal.

        Python may call this during any code, so the handler itself is called later, on the loop.
        """
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
