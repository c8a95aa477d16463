"""Share the event loop between connections: decide which are served in this pass, and when the loop may sleep.

This module is compiled.

The loop reads every ready socket before it does anything else. One request can take milliseconds, so many of them in
one pass would block timers and other clients for seconds. When heavy requests have taken ``PASS_S`` in a pass,
connections whose last request was heavy wait for a later pass. They are served in order, before the loop reads again. A
connection with light requests is delayed only by unexpected heavy requests: those of connections whose last request was
light.

Before the loop sleeps, it polls for more bytes for a moment (decision 0112). It polls only if bytes recently arrived at
intervals shorter than three times ``limit_us``. It stops polling when no bytes have arrived for ``limit_us``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import cython

from polywire.clock import Clock
from polywire.log.base import Loop

# a read that takes longer to process is heavy; a light one can contain some hundred small requests
HEAVY_S: Final = 0.0005
# limit for the heavy reads of one pass, after which heavy connections wait. It is also the limit for unexpected heavy
# reads, after which all connections wait.
PASS_S: Final = 0.005


class Waiting(Protocol):
    """A connection whose received bytes wait for a later pass of the event loop."""

    def take_turn(self) -> None:
        """Process the bytes that waited, in this pass."""


@cython.cclass
class RunQueue:
    """The connections whose received bytes wait for a later pass of the event loop.

    Attributes:
        now: function that returns the time in seconds.
        spent_s: time of heavy reads in this pass.
        current: the waiting connection that is being served.
    """

    __slots__ = ("_is_due", "_soon", "_unexpected_s", "_waiting", "current", "now", "spent_s")

    def __init__(self, clock: Clock, soon: Callable[[Callable[[], None]], object]) -> None:
        """``soon`` calls a function in the loop's next pass."""
        self._soon: Final = soon
        self._waiting: Final[deque[Waiting]] = deque()
        self._is_due = False  # whether ``_run`` is scheduled
        self.now: Final = clock.monotonic
        self.spent_s = 0.0
        self._unexpected_s = 0.0  # the part of ``spent_s`` by connections whose previous read was light
        self.current: Waiting | None = None

    def has_time(self, *, heavy: bool) -> bool:
        """Return whether a connection may be served in this pass. ``heavy`` is whether its last read was heavy."""
        return (self.spent_s if heavy else self._unexpected_s) < PASS_S

    def spend(self, seconds: float, *, heavy: bool) -> None:
        """Count the time of a heavy read. ``heavy`` is whether the connection's previous read was heavy, too."""
        self.spent_s += seconds
        if not heavy:
            self._unexpected_s += seconds
        self._call()

    def put(self, connection: Waiting) -> None:
        self._waiting.append(connection)
        self._call()

    def _call(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._soon(self._run)

    def _run(self) -> None:
        now, waiting = self.now, self._waiting
        begun = now()
        self.spent_s = self._unexpected_s = 0.0
        self._is_due = False
        try:
            while waiting and now() - begun < PASS_S:
                self.current = waiting.popleft()
                self.current.take_turn()
        finally:
            self.current = None
            self._unexpected_s = 0.0  # reads of the connections that waited were expected to be heavy
            if waiting:
                self._call()


PAUSES_AVERAGED: Final = 8  # number of recent intervals in the average
QUICK: Final = 3  # factor on the limit; without polling, every interval includes two wake-ups of the process
_PAUSES_AVERAGED = cython.declare(cython.double, PAUSES_AVERAGED)
_QUICK = cython.declare(cython.double, QUICK)


@cython.cclass
class IdlePoll:
    """Keeps an event loop from sleeping while requests arrive quickly."""

    __slots__ = ("_clock", "_end", "_last", "_limit_s", "_loop", "_pause_s", "_polling", "poll")

    def __init__(self, loop: Loop, clock: Clock, *, limit_us: int) -> None:
        """``limit_us`` is how long to poll after bytes arrive, in microseconds; 0 disables polling."""
        self._loop = loop
        self._clock = clock
        self._limit_s = limit_us / 1e6
        self._pause_s = 2 * QUICK * self._limit_s
        """Average interval between arrivals of bytes, in seconds."""
        self._last = 0.0
        self._end = 0.0
        self._polling = False  # whether a call of ``_poll`` is scheduled
        self.poll: Callable[[], object] = nothing
        """Handles sockets that are ready. Set by a driver that can find them sooner than the loop."""

    @cython.ccall
    def bytes_arrived(self) -> None:
        """Record that bytes arrived and were processed."""
        limit_s: cython.double = self._limit_s
        now: cython.double = self._clock.monotonic()
        pause_s: cython.double = now - self._last
        if pause_s > 2 * _QUICK * limit_s:
            pause_s = 2 * _QUICK * limit_s
        self._pause_s += (pause_s - self._pause_s) / _PAUSES_AVERAGED
        self._last = now
        if self._pause_s < _QUICK * limit_s:
            self._end = now + limit_s
            if not self._polling:
                self._polling = True
                self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Poll once, and schedule the next poll. The loop does not sleep while one is scheduled."""
        self.poll()
        if self._clock.monotonic() < self._end:
            self._loop.call_soon(self._poll)
        else:
            self._polling = False


def nothing() -> None:
    pass
