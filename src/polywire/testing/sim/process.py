"""One process of a run: the files, the loop and the workers it sees, and the log it has open.

Promises: whatever has to happen for an answer happens, and nothing else. Must not know: who asks, what is right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.log.log import FileLog
from polywire.log.opening import open_log
from polywire.log.settings import LogSettings
from polywire.testing.clock import SimulatedClock
from polywire.testing.sim.chance import Chance
from polywire.testing.sim.client import BrokerState
from polywire.testing.sim.disk import SimulatedDisk
from polywire.testing.sim.files import SimulatedFiles
from polywire.testing.sim.model import require
from polywire.testing.sim.schedule import Schedule
from polywire.testing.sim.story import Story

DIRECTORY: Final = Path("/polywire-simulated/data")
ANSWER_STEPS_MAX: Final = 20_000


class Process:
    """Guards: ``log`` and ``state`` are there once ``open`` has returned."""

    log: FileLog
    state: BrokerState

    def __init__(
        self, disk: SimulatedDisk, settings: LogSettings, clock: SimulatedClock, chance: Chance, story: Story
    ) -> None:
        self.files: Final = SimulatedFiles(disk, chance, story)
        self.loop: Final = Schedule(clock, chance, story)
        self._settings = settings
        self._clock = clock

    def open(self) -> None:
        """Start. Raises what ``open_log`` raises."""
        self.state = BrokerState()
        self.log = open_log(
            DIRECTORY,
            settings=self._settings,
            loop=self.loop,
            clock=self._clock,
            replay=self.state,
            files=self.files,
            make_worker=self.loop.make_worker,
        )

    def read(self, incarnation: int, offset: int) -> Read | BrokerError:
        """What a reader is answered in the end."""
        answers: list[Read | BrokerError] = []
        try:
            found = self.log.partition(incarnation).read(offset, bytes_max=1 << 16, then=answers.append)
        except BrokerError as error:
            return error
        if isinstance(found, Read):
            return found
        self.until(lambda: answers)
        return answers[0]

    def until(self, reached: Callable[[], object]) -> None:
        """Whatever has to happen for this, without any client."""
        for _ in range(ANSWER_STEPS_MAX):
            if reached():
                return
            if not self.loop.step():
                require(self.loop.pass_to_timer(), "somebody has something to do")
        require(False, "it happens in the end", steps=ANSWER_STEPS_MAX)
