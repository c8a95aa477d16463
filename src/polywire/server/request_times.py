"""How long requests take from being received to being answered, by wire: a sample of them, weighed by what it stands for. Compiled.

Promises: a busy server times some hundred requests a second, a quiet one all; whoever is not timed pays a look at one number. Must not know:
sockets, sessions, what requests mean.
"""

from __future__ import annotations

from typing import Final

import cython

from polywire.durations import Durations

SAMPLES_PER_S: Final = 100
BOUNDS_S: Final = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
PRODUCE: Final = "produce"
OTHER: Final = "other"


@cython.cclass
class RequestTimes:
    """Invariant: ``skip`` reads are let pass before the next is timed; each that was timed stands for ``weight`` of them. ``_taken``: how
    many were timed since the last second began. ``appended``: batches there were when the read in hand was offered, -1 without one."""

    __slots__ = ("_taken", "appended", "by_kind", "skip", "weight")

    def __init__(self) -> None:
        self.skip = 0
        self.weight = 1
        self._taken = 0
        self.appended = -1
        self.by_kind: Final[dict[tuple[str, str], Durations]] = {}
        """By wire and by what was asked for: ``PRODUCE`` or ``OTHER``."""

    def begin(self) -> None:
        """A read is timed: skip the next ones. More often than it should be, fewer are."""
        self._taken += 1
        if self._taken % SAMPLES_PER_S == 0:
            self.weight *= 2
        self.skip = self.weight - 1

    def observe(self, wire: str, seconds: float, *, produced: bool) -> None:
        """A request was answered."""
        key = wire, PRODUCE if produced else OTHER
        durations = self.by_kind.get(key)
        if durations is None:
            durations = self.by_kind[key] = Durations(BOUNDS_S)
        durations.observe(seconds, count=self.weight)

    def sweep(self) -> None:
        """A second has passed: time as many of the next second's reads as there should be, if they are as many."""
        if self._taken < SAMPLES_PER_S // 2:
            self.weight = max(1, self.weight // 2)
        self.skip = min(self.skip, self.weight - 1)
        self._taken = 0
