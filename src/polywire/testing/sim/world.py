"""The world of a run: what follows from its number, from the first event to the last.

Promises: the same number gives the same events, on any machine, compiled or not; a run ends with everything checked, closed and opened
again. Must not know: who lives there, on how many disks.
"""

from __future__ import annotations

import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Final

from polywire.records import allocation
from polywire.testing.clock import SimulatedClock
from polywire.testing.sim.chance import Chance
from polywire.testing.sim.files import Killed
from polywire.testing.sim.story import Story

STEPS: Final = 1500
MOOD_STEPS: Final = 60  # on average, until other things happen often


@contextmanager
def without_collections() -> Iterator[None]:
    """Memory is given back by counts alone, so that two runs do it at the same moments."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def in_small_pages() -> Iterator[None]:
    """Memory to read into costs what is read: a large page is 2 MiB of zeros for the few bytes that are read here, a third of a run."""
    before = allocation.LARGE_PAGE_BYTES
    try:
        allocation.LARGE_PAGE_BYTES = sys.maxsize
        yield
    finally:
        allocation.LARGE_PAGE_BYTES = before


class World(ABC):
    """One run.

    ACTS: names of what is asked for in this world. TROUBLES: what happens to it.
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
        """without: what does not happen, of ``TROUBLES`` and ``ACTS``."""
        self.seed: Final = seed
        self._without = without
        self.steps_done = 0
        self._steps = steps
        self.story = Story(show)
        self._chance = Chance(seed)
        self._clock = SimulatedClock()
        self.story.follow(self._clock.monotonic)

    def run(self) -> None:
        """Everything that this number says. Raises Violation."""
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
        """What this number leaves when divided by sixteen. What comes to a world later comes to numbers of some rests, so that the others,
        and those that once found something, go on meaning what they meant."""
        return self.seed % 16

    # What a world adds

    @abstractmethod
    def _small(self) -> AbstractContextManager[None]:
        """What must be small, or follow from chance, while this world runs."""

    @abstractmethod
    def _description(self) -> str:
        """The run in a line."""

    @abstractmethod
    def _start(self) -> None:
        """Whoever lives there comes."""

    @abstractmethod
    def _step(self) -> None:
        """Something happens. Raises Killed."""

    @abstractmethod
    def _restart(self) -> None:
        """Something has ended a process."""

    @abstractmethod
    def _end(self) -> None:
        """Everybody is answered; then everything is there, after a stop as well, and after a power loss."""
