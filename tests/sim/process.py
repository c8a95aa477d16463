"""One process of a run: its files, its loop and its workers.

Waiting for a response runs only the steps that are necessary for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from polywire.errors import BrokerError, Missing
from polywire.log.base import Read
from polywire.log.log import FileLog
from polywire.testing.loop import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.disk import SimulatedDisk
from tests.sim.files import SimulatedFiles
from tests.sim.promises import require
from tests.sim.schedule import Schedule
from tests.sim.story import Story

DIRECTORY: Final = Path("/polywire-simulated/data")
ANSWER_STEPS_MAX: Final = 20_000
ANSWER_SECONDS_MAX: Final = (
    7200.0  # and a check of the disk, one file at a time, may take that long while others step often
)
SPINNING_STEPS_MAX: Final = 10 * ANSWER_STEPS_MAX


class Turns(Protocol):
    """Runs one step of the parts after the other."""

    def step(self) -> bool:
        """Run a step; return False if only time can help."""

    def pass_to_timer(self) -> bool:
        """Advance time to the next timer; return False if there is none."""


class Process(ABC):
    """Guards: ``log`` exists once ``open`` has returned."""

    log: FileLog
    turns: Turns
    """The parts that step during a wait: this process alone, unless it waits for others."""

    def __init__(self, disk: SimulatedDisk, clock: SimulatedClock, chance: Chance, story: Story) -> None:
        self.files: Final = SimulatedFiles(disk, chance, story)
        self.loop: Final = self._make_loop(clock, chance, story)
        self.turns = self.loop
        self._clock = clock
        self._faults_before: Final = story.counts["fault"]

    def _make_loop(self, clock: SimulatedClock, chance: Chance, story: Story) -> Schedule:
        return Schedule(clock, chance, story)

    @property
    def had_faults(self) -> bool:
        """Whether any call has failed since its start."""
        return self.files.story.counts["fault"] > self._faults_before

    @abstractmethod
    def open(self) -> None:
        """Start. Raises as ``open_log``."""

    @abstractmethod
    def close(self) -> None:
        """Stop cleanly."""

    def read(self, incarnation: int, offset: int) -> Read | BrokerError:
        """Return the final answer to a read."""
        answers: list[Read | BrokerError] = []
        try:
            found = self.log.partition(incarnation).read(offset, bytes_max=1 << 16, then=answers.append)
        except BrokerError as error:
            return error
        if isinstance(found, Read):
            return found
        self.until(lambda: answers)
        return answers[0]

    def is_staged(self, token: bytes) -> bool:
        """Return whether the log has a staged batch of this token."""
        try:
            return bool(self.log.staged_partitions([token]))
        except Missing:
            return False

    def until(self, reached: Callable[[], object]) -> None:
        """Run steps, without clients, until the condition is true."""
        drive(self.turns, self._clock, reached)


def drive(turns: Turns, clock: SimulatedClock, reached: Callable[[], object]) -> None:
    """Run steps until a condition is true."""
    steps, begun = 0, clock.monotonic()
    while not reached():
        steps += 1
        is_late = clock.monotonic() - begun > ANSWER_SECONDS_MAX or steps > SPINNING_STEPS_MAX
        require(steps <= ANSWER_STEPS_MAX or not is_late, "the condition becomes true", steps=steps)
        if not turns.step():
            require(turns.pass_to_timer(), "a part has work")
