"""A clock that stands still until it is told to go on.

Promises: both times move only by ``advance`` and ``step``. Must not know: loops.
"""

from __future__ import annotations

from typing import Final

START_US: Final = 1_700_000_000_000_000  # some day in 2023: tests must not depend on which


class SimulatedClock:
    """Implements ``polywire.clock.Clock``.

    Invariant: ``monotonic`` never goes back; wall time does only by ``step``.
    """

    __slots__ = ("_monotonic_us", "_now_us")

    def __init__(self, now_us: int = START_US) -> None:
        self._now_us = now_us
        self._monotonic_us = 0

    def now_us(self) -> int:
        """Wall clock, microseconds since 1970."""
        return self._now_us

    def monotonic(self) -> float:
        """Seconds since the clock was made, as far as it was advanced."""
        return self._monotonic_us / 1_000_000

    def advance(self, seconds: float) -> None:
        """Let time pass, on both clocks."""
        passed = round(seconds * 1_000_000)
        assert passed >= 0, "time does not go back; use step for the wall clock"
        self._now_us += passed
        self._monotonic_us += passed

    def step(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP may."""
        self._now_us += round(seconds * 1_000_000)
