"""Run long work on the event loop in slices, one slice in each pass of the loop.

Other callbacks run between two slices. If several clients request work, the loop alternates between their work, slice
by slice, in the order of the requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from polywire.clock import Clock
from polywire.log.base import Loop

SLICE_S: Final = 0.002  # longest time per pass of the loop; other responses are hardly delayed

BUSY_PAUSE_S: Final = 0.005  # seconds until a retry when the log was busy

Steps = Iterator[bool]
"""A change in steps. Each step yields whether the log needs time before the next step."""

Step = Callable[[float], bool]
"""A function that works until the given monotonic time, or until done; it returns whether more work is left."""


class SlicedWork:
    """Runs long work in short steps, one in each pass of the event loop, so that connections are served in between."""

    __slots__ = ("_clock", "_is_due", "_loop", "_waiting")

    def __init__(self, loop: Loop, clock: Clock) -> None:
        self._loop: Final = loop
        self._clock: Final = clock
        self._waiting: Final[deque[Step]] = deque()
        # whether a call of ``_run`` is scheduled or running
        self._is_due = False

    def put(self, step: Step) -> None:
        """Queue a function.

        It is called in each pass of the loop, with the time at which to pause, until it returns False.
        """
        self._waiting.append(step)
        self._call()

    def _call(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        now = self._clock.monotonic
        end = now() + SLICE_S
        waiting = self._waiting
        try:
            for _ in range(len(waiting)):
                step = waiting.popleft()
                if step(end):
                    waiting.append(step)
                if now() >= end:
                    break
        finally:
            self._is_due = False
            if waiting:
                self._call()


class OrderedWork:
    """Queue of long requests, such as deletions of many topics.

    They run in short steps of the event loop, one request at a time, in the order received.
    """

    __slots__ = ("_clock", "_loop", "_sliced", "_waiting")

    def __init__(self, sliced: SlicedWork, loop: Loop, clock: Clock) -> None:
        self._sliced: Final = sliced
        self._loop: Final = loop
        self._clock: Final = clock
        self._waiting: Final[deque[Steps]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def put(self, steps: Steps) -> None:
        """Queue a request as an iterator that pauses at each ``yield``. It must not raise."""
        self._waiting.append(steps)
        if len(self._waiting) == 1:
            self._sliced.put(self._work)

    def _work(self, end: float) -> bool:
        """Run queued requests until the time ``end``. Return whether work is left for the loop's next pass."""
        now = self._clock.monotonic
        while self._waiting:
            for needs_time in self._waiting[0]:
                if needs_time:
                    self._loop.call_later(BUSY_PAUSE_S, partial(self._sliced.put, self._work))
                    return False
                if now() >= end:
                    return True
            self._waiting.popleft()
        return False
