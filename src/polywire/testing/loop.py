"""An event loop that runs callbacks only when a test requests it.

Callbacks run in the order of an asyncio loop. Timers run by time and then by creation. An exception of a callback is
raised in the test.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from math import ceil
from typing import Any, Final

from polywire.testing.clock import SimulatedClock

# more passes than any test needs; ends a test whose callbacks schedule each other without end
PASSES_MAX: Final = 10_000


class Handle:
    """A scheduled call that can be cancelled."""

    __slots__ = ("args", "callback", "cancelled")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualLoop:
    """Implements ``polywire.log.base.Loop`` over a simulated clock.

    Invariant: callbacks run only inside ``run_pass``, ``run_due`` and ``advance``.
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
        """Call ``callback`` in the next pass. Other threads may use this, too."""
        return self.call_soon(callback, *args)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Call ``callback`` in the first pass after this many seconds of the simulated clock."""
        handle = Handle(callback, args)
        heapq.heappush(self._timers, (self.clock.monotonic() + delay, next(self._order), handle))
        return handle

    def run_pass(self) -> int:
        """Run the callbacks that are ready now and the timers that are due. Return the number of calls."""
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
        """Advance the clock, and run every timer that becomes due at its own time."""
        end = self.clock.monotonic() + seconds
        self.run_due()
        while self._timers and self._timers[0][0] <= end:
            gap_s = self._timers[0][0] - self.clock.monotonic()
            # whole microseconds, because the clock has no smaller unit
            self.clock.advance(max(0, ceil(gap_s * 1_000_000)) / 1_000_000)
            self.run_due()
        self.clock.advance(max(0.0, end - self.clock.monotonic()))
