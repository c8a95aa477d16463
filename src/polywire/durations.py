"""Histograms of durations, for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Final

WORK_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Durations:
    """Histogram of durations. A last bucket counts those above the highest bound."""

    def __init__(self, bounds_s: Sequence[float] = WORK_BOUNDS_S) -> None:
        self._bounds_s: Final = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, *, count: int = 1) -> None:
        """Add ``count`` durations of this length."""
        self._counts[bisect_left(self._bounds_s, seconds)] += count
        self.sum_s += seconds * count

    def copy(self) -> Durations:
        """Return a copy, for use in another thread."""
        other = Durations(self._bounds_s)
        other._counts, other.sum_s = list(self._counts), self.sum_s
        return other

    @property
    def count(self) -> int:
        """Number of durations observed."""
        return sum(self._counts)

    def quantile(self, share: float) -> float:
        """Return the quantile for ``share`` (0 to 1) in seconds, rounded up to a bucket's upper bound.

        The result is infinite if it exceeds the last bound, and 0.0 without observations.
        """
        rank, seen = share * self.count, 0
        if not rank:
            return 0.0
        for bound_s, count in zip(self._bounds_s, self._counts, strict=False):
            seen += count
            if seen >= rank:
                return bound_s
        return inf

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound in Prometheus' notation, cumulative count) of each bucket."""
        names = [*map(str, self._bounds_s), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
