"""Polling before sleeping: for a moment after bytes came, the loop looks for more rather than sleep (decision 0008). Compiled.

Promises: no polling unless bytes have lately come quicker than three times the limit, and never for longer than it without bytes.
Must not know: connections, wires.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import cython

from polywire.clock import Clock
from polywire.log.base import Loop

PAUSES_AVERAGED: Final = 8  # a burst of that many quick requests is enough to begin, a few slow ones to end
QUICK: Final = 3  # times the limit: until polling begins, every pause has two wake-ups in it


@cython.cclass
class IdlePoll:
    """Keeps one loop awake between requests that follow each other quickly.

    Invariant: ``_polling`` is true while one call of ``_poll`` is scheduled.
    """

    __slots__ = ("_clock", "_end", "_last", "_limit_s", "_loop", "_pause_s", "_polling", "look")

    def __init__(self, loop: Loop, clock: Clock, *, limit_us: int) -> None:
        """limit_us: microseconds of polling after bytes came; 0 never polls."""
        self._loop = loop
        self._clock = clock
        self._limit_s = limit_us / 1e6
        self._pause_s = 2 * QUICK * self._limit_s
        """Average time from bytes to bytes, so far."""
        self._last = 0.0
        self._end = 0.0
        self._polling = False
        self.look: Callable[[], object] = nothing
        """Handles what has come, where somebody knows it sooner than the loop."""

    def came(self) -> None:
        """Bytes came and were handled."""
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
        """A scheduled call makes the loop ask for events without waiting."""
        self.look()
        if self._clock.monotonic() < self._end:
            self._loop.call_soon(self._poll)
        else:
            self._polling = False


def nothing() -> None:
    """The loop knows first."""
