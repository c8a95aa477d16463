"""The ``Clock`` interface and the system's clock. Modules read the time only through a ``Clock``, so that tests control
it.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

import cython


class Clock(Protocol):
    """Source of time. ``polywire.testing`` has a simulated one."""

    def now_us(self) -> int:
        """Return the wall clock in microseconds since 1970 UTC. It may jump forwards and backwards."""

    def monotonic(self) -> float:
        """Return seconds that never decrease."""


@cython.cclass
class SystemClock:
    """The machine's clocks."""

    if not cython.compiled:
        __slots__ = ()

    def now_us(self) -> int:
        return time.time_ns() // 1000

    monotonic = staticmethod(time.monotonic)


SYSTEM_CLOCK: Final = SystemClock()


class ElapsedClock:
    """Clock for expiry: it never jumps, and it does not advance while the broker is stopped.

    It continues from the last saved value, so nothing expires early even if the wall clock jumps.

    Args:
        latest_us: the last saved value; 0 for a new broker.
    """

    __slots__ = ("_clock", "_origin_us")

    def __init__(self, clock: Clock, latest_us: int) -> None:
        self._clock: Final = clock
        self._origin_us: Final = latest_us - int(clock.monotonic() * 1e6)

    def now_us(self) -> int:
        """Return microseconds. They can be compared with values that the same broker saved before a restart."""
        return self._origin_us + int(self._clock.monotonic() * 1e6)
