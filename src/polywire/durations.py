"""How long things took, as a histogram.

Promises: what was observed is counted once, whatever it stands for. Must not know: what took the time, who asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Final

WORK_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Durations:
    """How long things took. Invariant: ``_counts`` has one more than ``_bounds_s``, for what took longer than all of them."""

    def __init__(self, bounds_s: Sequence[float] = WORK_BOUNDS_S) -> None:
        self._bounds_s: Final = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, *, count: int = 1) -> None:
        """Count one, or one that stands for so many."""
        self._counts[bisect_left(self._bounds_s, seconds)] += count
        self.sum_s += seconds * count

    def copy(self) -> Durations:
        """As it is now, for another thread."""
        other = Durations(self._bounds_s)
        other._counts, other.sum_s = list(self._counts), self.sum_s
        return other

    @property
    def count(self) -> int:
        """How many were observed."""
        return sum(self._counts)

    def quantile(self, share: float) -> float:
        """What this share of them took no longer than, as a bound of the histogram, in seconds; infinite behind the last, 0.0 without any."""
        most, least = share * self.count, 0
        if not most:
            return 0.0
        for bound_s, count in zip(self._bounds_s, self._counts, strict=False):
            least += count
            if least >= most:
                return bound_s
        return inf

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bounds, as Prometheus spells them, and how many took no longer."""
        names = [*map(str, self._bounds_s), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
