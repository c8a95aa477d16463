"""Time as an argument: the Clock port and the system's clock.

Promises: nothing in the package reads the time but through a ``Clock``. Must not know: an event loop.
"""

from __future__ import annotations

import time
from typing import Protocol


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

    def monotonic(self) -> float:
        return time.monotonic()
