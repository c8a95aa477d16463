"""Time as an argument: the Clock port and the system's clock.

Promises: nothing in the package reads the time but through a ``Clock``. Must not know: an event loop.
"""

from __future__ import annotations

import time
from typing import Final, Protocol


class Clock(Protocol):
    """Where time comes from; the simulated one lives in ``polywire.testing``."""

    def now_us(self) -> int:
        """Wall clock, microseconds since 1970 UTC; may step."""

    def monotonic(self) -> float:
        """Seconds that never go back."""


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    def now_us(self) -> int:
        return time.time_ns() // 1000

    monotonic = staticmethod(time.monotonic)


SYSTEM_CLOCK: Final = SystemClock()


class ElapsedClock:
    """Time that only ever passes, and only while somebody is there: for what expires and must not expire early, whatever the wall clock does.

    It goes on from the latest time that was kept of it, so time between a stop and a start does not count.
    """

    __slots__ = ("_clock", "_origin_us")

    def __init__(self, clock: Clock, latest_us: int) -> None:
        """latest_us: where it stood when it was last read, as far as that is known; 0 when it never was."""
        self._clock: Final = clock
        self._origin_us: Final = latest_us - int(clock.monotonic() * 1e6)

    def now_us(self) -> int:
        """Microseconds; comparable with what any start of the same broker has kept."""
        return self._origin_us + int(self._clock.monotonic() * 1e6)
