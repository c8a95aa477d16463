"""What HTTP may see of the process around the broker.

Promises: values. Must not know: sockets, pages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class ConnectionView:
    """A connection, as lists show it."""

    wire: str
    dialect: str
    peer: str
    user: str
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What connections of one wire have moved since the start, those that are gone included."""

    connections: int = 0
    accepted: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


WORK_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Durations:
    """How long things took, as a histogram. Invariant: ``_counts`` has one more than ``_bounds_s``, for what took longer than all of them."""

    def __init__(self, bounds_s: Sequence[float] = WORK_BOUNDS_S) -> None:
        self._bounds_s: Final = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, *, count: int = 1) -> None:
        """Count one, or one that stands for so many."""
        self._counts[bisect_left(self._bounds_s, seconds)] += count
        self.sum_s += seconds * count

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bounds, as Prometheus spells them, and how many took no longer."""
        names = [*map(str, self._bounds_s), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


class Process(Protocol):
    """The process that serves; ``server.overview`` is one."""

    @property
    def stopping(self) -> bool:
        """Whether no further request is taken."""

    @property
    def refused(self) -> int:
        """Connections turned away since the start."""

    @property
    def connections_max(self) -> int:
        """How many may be open at once."""

    @property
    def receive_buffer_bytes(self) -> int:
        """Memory in which unfinished requests lie."""

    def connections(self) -> Iterable[ConnectionView]:
        """Those that are open."""

    def traffic(self) -> Mapping[str, Traffic]:
        """By wire."""

    def work(self) -> Mapping[str, Durations]:
        """What the log's threads did, by name."""

    def requests(self) -> Mapping[tuple[str, str], Durations]:
        """What requests took until they were answered, by wire and by what they asked for."""

    def listeners(self) -> Mapping[str, str]:
        """Addresses by name of the listener."""

    def settings(self) -> Sequence[tuple[str, object]]:
        """How the process was started: names and values."""
