"""A simulated clock that moves only when ``advance`` or ``step`` is called."""

from __future__ import annotations

from typing import Final

START_US: Final = 1_700_000_000_000_000  # a day in 2023; tests must not depend on the value


class SimulatedClock:
    """Implements ``polywire.clock.Clock``.

    Invariant: ``monotonic`` never decreases. The wall clock goes back only by ``step``.
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
        """Advance the wall clock and the monotonic clock."""
        passed = round(seconds * 1_000_000)
        assert passed >= 0, "time does not go back; use step for the wall clock"
        self._now_us += passed
        self._monotonic_us += passed

    def step(self, seconds: float) -> None:
        """Change the wall clock only, forward or back, as an operator or NTP may do."""
        self._now_us += round(seconds * 1_000_000)
