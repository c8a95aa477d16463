"""Poll for more bytes for a moment before the event loop sleeps (decision 0112). This module is compiled.

The loop polls only if bytes recently arrived at intervals shorter than three times ``limit_us``. It stops polling when
no bytes have arrived for ``limit_us``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import cython

from polywire.clock import Clock
from polywire.log.base import Loop

PAUSES_AVERAGED: Final = 8  # number of recent intervals in the average
QUICK: Final = 3  # factor on the limit; without polling, every interval includes two wake-ups of the process


@cython.cclass
class IdlePoll:
    """Keeps an event loop awake while requests arrive quickly.

    ``_polling`` is set while a call of ``_poll`` is scheduled.
    """

    __slots__ = ("_clock", "_end", "_last", "_limit_s", "_loop", "_pause_s", "_polling", "look")

    def __init__(self, loop: Loop, clock: Clock, *, limit_us: int) -> None:
        """``limit_us`` is how long to poll after bytes arrive, in microseconds; 0 disables polling."""
        self._loop = loop
        self._clock = clock
        self._limit_s = limit_us / 1e6
        self._pause_s = 2 * QUICK * self._limit_s
        """Average interval between arrivals of bytes, in seconds."""
        self._last = 0.0
        self._end = 0.0
        self._polling = False
        self.look: Callable[[], object] = nothing
        """Handles sockets that are ready. Set by a driver that can find them sooner than the loop."""

    def came(self) -> None:
        """Record that bytes arrived and were processed."""
        limit_s = self._limit_s
        now = self._clock.monotonic()
        self._pause_s += (min(now - self._last, 2 * QUICK * limit_s) - self._pause_s) / PAUSES_AVERAGED
        self._last = now
        if self._pause_s < QUICK * limit_s:
            self._end = now + limit_s
            if not self._polling:
                self._polling = True
                self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Poll once, and schedule the next call. While a call is scheduled, the loop does not sleep."""
        self.look()
        if self._clock.monotonic() < self._end:
            self._loop.call_soon(self._poll)
        else:
            self._polling = False


def nothing() -> None:
    pass
