"""A simulated process with a broker over the log."""

from __future__ import annotations

from functools import partial

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.log.base import Replay
from polywire.log.log import FileLog
from polywire.log.opening import open_log
from polywire.log.settings import LogSettings
from polywire.testing.loop import SimulatedClock
from tests.sim.broker.queue_index import IndexDisk, IndexStore
from tests.sim.chance import Chance
from tests.sim.disk import SimulatedDisk
from tests.sim.process import DIRECTORY, Process
from tests.sim.story import Story


class BrokerProcess(Process):
    """Guards: ``log`` and ``broker`` exist once ``open`` has returned."""

    broker: Broker

    def __init__(
        self,
        disk: SimulatedDisk,
        log_settings: LogSettings,
        settings: BrokerSettings,
        clock: SimulatedClock,
        chance: Chance,
        story: Story,
        index: IndexDisk | None = None,
    ) -> None:
        """index: where the index of delayed records is stored, in memory by default."""
        super().__init__(disk, clock, chance, story)
        self._index = index
        self._log_settings = log_settings
        self._settings = settings

    def open(self) -> None:
        over = partial(Broker.over, self._recover, settings=self._settings, loop=self.loop, clock=self._clock)
        if self._index is None:
            self.broker = over()
            return
        self.broker = over(make_worker=self.loop.make_worker)
        self.broker._delays._store = IndexStore(self._index)  # type: ignore[misc]

    def _recover(self, replay: Replay) -> FileLog:
        self.log = open_log(
            DIRECTORY,
            settings=self._log_settings,
            loop=self.loop,
            clock=self._clock,
            replay=replay,
            files=self.files,
            make_worker=self.loop.make_worker,
        )
        return self.log

    def close(self) -> None:
        self.broker.close()
