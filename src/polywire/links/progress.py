"""The progress of the copy of one topic, and its recent speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from polywire.link_orders import LinkReport

RATE_S: Final = 5.0  # seconds over which the rate is averaged


class Progress:
    """Counts copied records."""

    def __init__(self) -> None:
        self._copied = 0
        self._newest_us = 0
        self._rates: Final[list[tuple[float, int]]] = []

    def add(self, records: int, newest_us: int) -> None:
        """Count copied records. ``newest_us`` is the time of the newest one."""
        self._copied += records
        self._newest_us = max(self._newest_us, newest_us)

    def report(self, link: str, topic: str, ends: Sequence[int], locations: Sequence[int]) -> LinkReport:
        """Return the state of a topic. The partitions end at ``ends``, and were read up to ``locations``."""
        now = time.monotonic()
        self._rates.append((now, self._copied))
        while self._rates[0][0] < now - RATE_S and len(self._rates) > 2:
            del self._rates[0]
        (since, before), (until, after) = self._rates[0], self._rates[-1]
        lag = sum([max(0, end - location) for end, location in zip(ends, locations, strict=False)])
        return LinkReport(
            link=link,
            topic=topic,
            copied=self._copied,
            lag=lag,
            lag_s=max(0.0, time.time() - self._newest_us / 1e6) if lag and self._newest_us else 0.0,
            rate=(after - before) / (until - since) if until > since else 0.0,
        )


def is_complete(ends: Sequence[int], locations: Sequence[int]) -> bool:
    """Return whether everything was copied, as far as the ends are known."""
    return all(location >= end for location, end in zip(locations, ends, strict=True))
