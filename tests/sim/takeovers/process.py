"""A broker process over a bucket, opened as the server does it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from polywire.broker.groups import delay_index
from polywire.broker.settings import BrokerSettings
from polywire.cluster.opening import ShardConfig, ShardOpening
from polywire.log.base import Replay
from polywire.log.log import FileLog
from polywire.log.settings import LogSettings
from polywire.testing.loop import SimulatedClock
from tests.sim.broker.process import BrokerProcess
from tests.sim.broker.queue_index import IndexDisk
from tests.sim.chance import Chance
from tests.sim.disk import SimulatedDisk
from tests.sim.process import DIRECTORY
from tests.sim.schedule import Schedule
from tests.sim.story import Story
from tests.sim.takeovers.bucket import ARRIVES, ARRIVES_OFTEN, BucketEnd, SimulatedBucket
from tests.sim.takeovers.worker import BucketSchedule

CACHE_BYTES: Final = 64 * 1024
GRACE_S: Final = 2.0


def index_path(machine: int) -> Path:
    """Return where a machine has its index of delayed records."""
    return DIRECTORY / f"m{machine}" / delay_index.FILE


class TakeoversProcess(BrokerProcess):
    """Guards: ``cut_until`` is when it reaches the bucket again."""

    def __init__(
        self,
        machine: int,
        disk: SimulatedDisk,
        bucket: SimulatedBucket,
        log_settings: LogSettings,
        settings: BrokerSettings,
        clock: SimulatedClock,
        chance: Chance,
        story: Story,
        index: IndexDisk,
    ) -> None:
        self.cut_until = 0.0
        super().__init__(disk, log_settings, settings, clock, chance, story, index)
        self.machine: Final = machine
        self.end: Final = BucketEnd(bucket, self.files, self.is_cut, chance, story)

    def _make_loop(self, clock: SimulatedClock, chance: Chance, story: Story) -> Schedule:
        return BucketSchedule(clock, chance, story, self.is_cut)

    def is_cut(self) -> bool:
        """Return whether it cannot reach the bucket."""
        return self._clock.monotonic() < self.cut_until

    def _recover(self, replay: Replay) -> FileLog:
        opening = ShardOpening(
            ShardConfig(
                self.end, self.end, DIRECTORY, f"m{self.machine}", cache_bytes=CACHE_BYTES, delete_grace_s=GRACE_S
            ),
            settings=self._log_settings,
            loop=self.loop,
            clock=self._clock,
            replay=replay,
            files=self.files,
            make_worker=self.loop.make_worker,
        )
        self.end.arrives = self.files.chance.one_of((ARRIVES, ARRIVES_OFTEN))
        opening.recover()
        self.end.arrives = ARRIVES
        self.log = opening.begin()
        self._opening = opening
        delay_index.delete(index_path(self.machine))
        return self.log

    def close(self) -> None:
        if self.is_cut():
            self._opening.interrupt()  # the last requests get no response in time
        super().close()
