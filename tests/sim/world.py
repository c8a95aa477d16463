"""A simulation: all its events follow from its seed.

* The same seed gives the same events on any machine, compiled or not.
* A run ends with all checks, a clean stop and a restart.
"""

from __future__ import annotations

import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Final

from polywire.records import allocation
from polywire.testing.loop import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.files import Killed
from tests.sim.story import Story

STEPS: Final = 1500
MOOD_STEPS: Final = 60  # average steps until the probabilities change


@contextmanager
def without_collections() -> Iterator[None]:
    """Free memory by reference counts alone, so that two runs do it at the same moments."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def in_small_pages() -> Iterator[None]:
    """Use small pages for read buffers: a huge page zeroes 2 MiB for the few bytes read here, a third of a run's time."""
    before = allocation.LARGE_PAGE_BYTES
    try:
        allocation.LARGE_PAGE_BYTES = sys.maxsize
        yield
    finally:
        allocation.LARGE_PAGE_BYTES = before


class World(ABC):
    """One run.

    ACTS: names of the requests in this world. TROUBLES: its faults.
    """

    NAME: ClassVar[str]
    ACTS: ClassVar[Collection[str]]
    TROUBLES: ClassVar[Mapping[str, float]]

    def __init__(
        self,
        seed: int,
        *,
        steps: int = STEPS,
        without: Collection[str] = (),
        show: Callable[[str], None] | None = None,
    ) -> None:
        """without: excluded ``TROUBLES`` and ``ACTS``."""
        self.seed: Final = seed
        self._without = without
        self.steps_done = 0
        self._steps = steps
        self.story = Story(show)
        self._chance = Chance(seed)
        self._clock = SimulatedClock()
        self.story.follow(self._clock.monotonic)

    def run(self) -> None:
        """Run everything. Raises Violation."""
        with without_collections(), in_small_pages(), self._small():
            self.story.tell("world", self._description())
            self._start()
            while self.steps_done < self._steps:
                try:
                    self._step()
                except Killed:
                    self._restart()
                self.steps_done += 1
            self._end()

    @property
    def rest(self) -> int:
        """The seed modulo sixteen. New workloads are enabled for some remainders only, so that older seeds keep their
        meaning.
        """
        return self.seed % 16

    # What a world implements

    @abstractmethod
    def _small(self) -> AbstractContextManager[None]:
        """Return a context in which sizes are small and random numbers come from the seed."""

    @abstractmethod
    def _description(self) -> str:
        """Return one line that describes the run."""

    @abstractmethod
    def _start(self) -> None:
        """Start the parts of the world."""

    @abstractmethod
    def _step(self) -> None:
        """Run one step. Raises Killed."""

    @abstractmethod
    def _restart(self) -> None:
        """Restart after a process has ended."""

    @abstractmethod
    def _end(self) -> None:
        """End the run: every request gets an answer; all data must exist after a stop and after a power loss."""
