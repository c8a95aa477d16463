"""A simulated clock, and an event loop that runs callbacks only when a test requests it.

Callbacks run in the order of an asyncio loop. Timers run by time and then by creation. If a callback raises an
exception, the test gets it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import Any, Final

START_US: Final = 1_700_000_000_000_000  # a day in 2023; tests must not depend on the value
# more passes than any test needs; ends a test whose callbacks schedule each other without end
PASSES_MAX: Final = 10_000


class SimulatedClock:
    """A clock that a test advances. Implements ``polywire.clock.Clock``.

    ``monotonic`` never decreases. Only ``step`` sets the wall clock back.
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


@dataclass(eq=False, slots=True)
class Handle:
    """A scheduled call that can be cancelled."""

    callback: Callable[..., object]
    args: tuple[Any, ...]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualLoop:
    """An event loop over a simulated clock. Implements ``polywire.log.base.Loop``.

    Callbacks run only inside ``run_pass``, ``run_due`` and ``advance``.
    """

    __slots__ = ("_order", "_ready", "_timers", "clock")

    def __init__(self, clock: SimulatedClock | None = None) -> None:
        self.clock = clock or SimulatedClock()
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = count()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle:
        """Call ``callback`` in the next pass."""
        handle = Handle(callback, args)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Handle:
        """Call ``callback`` in the next pass. Any thread may use this."""
        return self.call_soon(callback, *args)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Call ``callback`` in the first pass after this many seconds of the simulated clock."""
        handle = Handle(callback, args)
        heapq.heappush(self._timers, (self.clock.monotonic() + delay, next(self._order), handle))
        return handle

    def run_pass(self) -> int:
        """Run the callbacks that are ready and the timers that are due. Return their number."""
        while self._timers and self._timers[0][0] <= self.clock.monotonic():
            self._ready.append(heapq.heappop(self._timers)[2])
        ran = 0
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled:
                handle.callback(*handle.args)
                ran += 1
        return ran

    def run_due(self) -> None:
        """Run passes until nothing is ready and no timer is due."""
        for _ in range(PASSES_MAX):
            self.run_pass()
            if not self._ready and not (self._timers and self._timers[0][0] <= self.clock.monotonic()):
                return
        raise AssertionError(f"callbacks schedule each other without end passes={PASSES_MAX}")

    def advance(self, seconds: float) -> None:
        """Advance the clock. Each timer that becomes due in the meantime runs at its time."""
        end = self.clock.monotonic() + seconds
        self.run_due()
        while self._timers and self._timers[0][0] <= end:
            gap_s = self._timers[0][0] - self.clock.monotonic()
            # whole microseconds, because the clock has no smaller unit
            self.clock.advance(max(0, ceil(gap_s * 1_000_000)) / 1_000_000)
            self.run_due()
        self.clock.advance(max(0.0, end - self.clock.monotonic()))
