"""A simulated clock that moves only by ``advance`` and ``step``."""

from __future__ import annotations

from typing import Final

START_US: Final = 1_700_000_000_000_000  # a day in 2023; tests must not depend on it


class SimulatedClock:
    """Implements ``polywire.clock.Clock``.

    Invariant: ``monotonic`` never goes back; the wall clock goes back only by ``step``.
    """

    __slots__ = ("_monotonic_us", "_now_us")

    def __init__(self, now_us: int = START_US) -> None:
        self._now_us = now_us
        self._monotonic_us = 0

    def now_us(self) -> int:
        """Return the wall clock in microseconds since 1970."""
        return self._now_us

    def monotonic(self) -> float:
        """Return the seconds advanced since the clock was created."""
        return self._monotonic_us / 1_000_000

    def advance(self, seconds: float) -> None:
        """Advance both clocks."""
        passed = round(seconds * 1_000_000)
        assert passed >= 0, "time does not go back; use step for the wall clock"
        self._now_us += passed
        self._monotonic_us += passed

    def step(self, seconds: float) -> None:
        """Step the wall clock forward or back, like an operator or NTP."""
        self._now_us += round(seconds * 1_000_000)
