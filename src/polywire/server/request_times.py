"""Request latencies by protocol, measured on a weighted sample of requests. This module is compiled.

A latency is the time from receiving a request to writing its response. A busy server measures about a hundred requests
a second. An idle server measures all requests. For a request that is not measured, the cost is one comparison.
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
    """A sample of request latencies.

    * ``skip``: number of reads to skip before the next one is timed.
    * ``weight``: number of reads that a timed read represents.
    * ``_taken``: reads timed in this second.
    * ``appended``: the broker's count of batches before the current read, to detect produce requests; -1 if the read is
      not timed.
    """

    __slots__ = ("_taken", "appended", "by_kind", "skip", "weight")

    def __init__(self) -> None:
        self.skip = 0
        self.weight = 1
        self._taken = 0
        self.appended = -1
        self.by_kind: Final[dict[tuple[str, str], Durations]] = {}
        """Latencies by protocol and by kind of request: ``PRODUCE`` or ``OTHER``."""

    def begin(self) -> None:
        """Measure this read. If too many reads were measured in this second, double the number of reads to skip."""
        self._taken += 1
        if self._taken % SAMPLES_PER_S == 0:
            self.weight *= 2
        self.skip = self.weight - 1

    def observe(self, wire: str, seconds: float, *, produced: bool) -> None:
        key = wire, PRODUCE if produced else OTHER
        durations = self.by_kind.get(key)
        if durations is None:
            durations = self.by_kind[key] = Durations(BOUNDS_S)
        durations.observe(seconds, count=self.weight)

    def sweep(self) -> None:
        """Adapt the sampling rate to the last second; call it once a second."""
        if self._taken < SAMPLES_PER_S // 2:
            self.weight = max(1, self.weight // 2)
        self.skip = min(self.skip, self.weight - 1)
        self._taken = 0
