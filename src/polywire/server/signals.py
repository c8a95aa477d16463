"""Signals that tell a process to stop or to look at its files anew, for as long as it lives.

Promises: one that comes while nobody listens is kept for who does next; behind the first ``Signals`` none ends the process by itself.
Must not know: what is done about them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

STOPPING: Final = (signal.SIGTERM, signal.SIGINT)

Told = Callable[[signal.Signals], object]
"""Called on the loop."""


class Signals:
    """Make it in the main thread. Guards: ``_kept`` has what came while nobody listened. A loop's own handlers would not do where one loop
    follows another: what a loop that has ended gives a signal back is its usual meaning, which is death."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Told | None = None
        self._reload: Callable[[], object] | None = None
        self._kept: signal.Signals | None = None
        self._before = {number: signal.signal(number, self._came) for number in (*STOPPING, signal.SIGHUP)}

    def listen(self, stop: Told, reload: Callable[[], object] | None = None) -> None:
        """Have these called on the running loop from now on; stop at once when a signal has come meanwhile, reload for SIGHUP."""
        self._loop, self._stop, self._reload = asyncio.get_running_loop(), stop, reload
        kept, self._kept = self._kept, None
        if kept is not None:
            stop(kept)

    def keep(self) -> None:
        """Nobody listens until ``listen`` is called again."""
        self._loop = self._stop = self._reload = None

    def end(self) -> None:
        """Give signals back the meaning they had."""
        self.keep()
        for number, before in self._before.items():
            signal.signal(number, before)

    def _came(self, number: int, _: FrameType | None) -> None:
        """Between two instructions of whatever runs: told on the loop, which may not be in a state to be told now."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, signal.Signals(number))
        elif number in STOPPING:
            self._kept = signal.Signals(number)

    def _tell(self, number: signal.Signals) -> None:
        if number in STOPPING:
            if self._stop is None:
                self._kept = number
            else:
                self._stop(number)
        elif self._reload is not None:
            self._reload()
