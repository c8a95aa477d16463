"""A simulated process that has only the log open."""

from __future__ import annotations

from polywire.log.opening import open_log
from polywire.log.settings import LogSettings
from polywire.testing.loop import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.disk import SimulatedDisk
from tests.sim.log.client import BrokerState
from tests.sim.process import DIRECTORY, Process
from tests.sim.story import Story


class LogProcess(Process):
    """Guards: ``log`` and ``state`` exist once ``open`` has returned."""

    state: BrokerState

    def __init__(
        self, disk: SimulatedDisk, settings: LogSettings, clock: SimulatedClock, chance: Chance, story: Story
    ) -> None:
        super().__init__(disk, clock, chance, story)
        self._settings = settings

    def open(self) -> None:
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

    def close(self) -> None:
        self.log.close()
