"""Changes of topics with thousands of partitions: one at a time, in the order they were asked for, a slice of the loop's time at a time.

Promises: between two slices everybody else has had a turn; at most one such change is half done in the log, and what waits is a number per
partition. Must not know: what a change is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from polywire.broker.sliced import SlicedWork
from polywire.clock import Clock
from polywire.errors import Busy, ErrorCode
from polywire.log.base import Loop

AT_ONCE_MAX: Final = 500  # partitions that one turn opens, trims or drops, in up to 7 ms; more go in slices
BUSY_PAUSE_S: Final = 0.005  # before the log is asked again when it has no room

Steps = Iterator[bool]
"""A change, step by step: each yields whether the log has to be given time before the next."""


class TopicWork:
    """What is to be done. Invariant: unless nothing waits, ``_work`` is in ``sliced`` or a timer is about to put it there."""

    __slots__ = ("_clock", "_loop", "_sliced", "_waiting")

    def __init__(self, sliced: SlicedWork, loop: Loop, clock: Clock) -> None:
        self._sliced: Final = sliced
        self._loop: Final = loop
        self._clock: Final = clock
        self._waiting: Final[deque[Steps]] = deque()

    def put(self, steps: Steps) -> None:
        """Have this done when everything put here before is done. It must raise nothing."""
        self._waiting.append(steps)
        if len(self._waiting) == 1:
            self._sliced.put(self._work)

    def _work(self, end: float) -> bool:
        """Do a slice; whether there is more to do in the loop's next pass."""
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


def when_there_is_room(addition: Callable[[], None]) -> Steps:
    """Add something to the log, as soon as it takes it. Raises what it refuses for another reason than that it has no room now."""
    while True:
        try:
            addition()
        except Busy as error:
            if error.code is not ErrorCode.BUSY:
                raise
            yield True
        else:
            return
