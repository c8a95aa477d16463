"""Whose bytes are offered in this pass of the loop, and whose in a later one. Compiled.

The loop reads every socket that is ready before it does anything else, and one offer may take some milliseconds: many of them in one pass
hold the loop for as long as all together, though none is long by itself.

Promises: once offers have taken so long in one pass, connections whose last offer was heavy wait for a later pass; whoever waits goes on in
the order of waiting, before the loop reads again. Who has asked for little so far waits for those only that were read before it in the same
pass, had asked for little as well, and turned out to ask for much. Must not know: connections, sessions, wires.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import cython

from polywire.clock import Clock

HEAVY_S: Final = 0.0005  # an offer that takes longer is heavy: some hundred small requests
PASS_S: Final = 0.005  # of heavy offers in one pass, after which heavy connections wait; and of those of light ones, after which all do


class Waiting(Protocol):
    """A connection, as far as it waits for a later pass."""

    def take_turn(self) -> None:
        """Go on now."""


@cython.cclass
class RunQueue:
    """Invariant: ``spent_s`` is what heavy offers have taken since ``_run`` was last called, ``_unexpected_s`` what those of them took whose
    connections had been light; it is called in the next pass as long as that is not 0 or somebody waits. ``current`` is who goes on just now.
    """

    __slots__ = ("_is_due", "_soon", "_unexpected_s", "_waiting", "current", "now", "spent_s")

    def __init__(self, clock: Clock, soon: Callable[[Callable[[], None]], object]) -> None:
        """soon: calls back in the loop's next pass."""
        self._soon: Final = soon
        self._waiting: Final[deque[Waiting]] = deque()
        self._is_due = False
        self.now: Final = clock.monotonic
        self.spent_s = 0.0
        self._unexpected_s = 0.0
        self.current: Waiting | None = None

    def has_time(self, *, heavy: bool) -> bool:
        """Whether something more may be offered in this pass, of a connection whose last offer was heavy or not."""
        return (self.spent_s if heavy else self._unexpected_s) < PASS_S

    def spend(self, seconds: float, *, heavy: bool) -> None:
        """An offer was heavy; whether the one before was, too."""
        self.spent_s += seconds
        if not heavy:
            self._unexpected_s += seconds
        self._call()

    def put(self, connection: Waiting) -> None:
        """Have a connection go on in a later pass."""
        self._waiting.append(connection)
        self._call()

    def _call(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._soon(self._run)

    def _run(self) -> None:
        """A pass begins."""
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
            self._unexpected_s = 0.0  # whoever has waited was expected
            if waiting:
                self._call()
