"""Poll for more bytes for a moment before the event loop sleeps (decision 0112). Compiled.

The loop polls only if the recent intervals between bytes were shorter than three times the limit. It polls no longer
than the limit without bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import cython

from polywire.clock import Clock
from polywire.log.base import Loop

PAUSES_AVERAGED: Final = 8  # this many quick requests start polling, and a few slow ones stop it
QUICK: Final = 3  # times the limit; before polling starts, every interval includes two wake-ups of the process


@cython.cclass
class IdlePoll:
    """Keeps an event loop awake between quick requests. ``_polling`` is true while a call of ``_poll`` is scheduled."""

    __slots__ = ("_clock", "_end", "_last", "_limit_s", "_loop", "_pause_s", "_polling", "look")

    def __init__(self, loop: Loop, clock: Clock, *, limit_us: int) -> None:
        """limit_us: microseconds of polling after bytes arrive; 0 disables polling."""
        self._loop = loop
        self._clock = clock
        self._limit_s = limit_us / 1e6
        self._pause_s = 2 * QUICK * self._limit_s
        """Average interval between arrivals of bytes."""
        self._last = 0.0
        self._end = 0.0
        self._polling = False
        self.look: Callable[[], object] = nothing
        """Handles sockets that are ready, if the driver can find them sooner than the loop."""

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
        """Poll once. A scheduled call keeps the loop from sleeping."""
        self.look()
        if self._clock.monotonic() < self._end:
            self._loop.call_soon(self._poll)
        else:
            self._polling = False


def nothing() -> None:
    """Do nothing: the loop itself finds sockets that are ready."""
