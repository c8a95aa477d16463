"""A machine for tests of the simulation: a disk, and one process after another on it."""

from __future__ import annotations

from polywire.errors import BrokerError
from polywire.log.log import FileLog
from polywire.log.settings import LogSettings
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.loop import SimulatedClock
from polywire.types import Level
from tests.sim.chance import Chance
from tests.sim.disk import SimulatedDisk
from tests.sim.log.process import LogProcess
from tests.sim.story import Story

SETTINGS = LogSettings(slot_bytes=48 * 1024, slot_count_max=2, disk_reserve_bytes=0, scrub_hours=0)


class Machine:
    """Guards: ``process`` is the latest one."""

    process: LogProcess

    def __init__(self, settings: LogSettings = SETTINGS) -> None:
        self._settings = settings
        self.chance, self.story = Chance(1), Story()
        self.disk = SimulatedDisk(1 << 24)
        self.clock = SimulatedClock()

    def open(self, calls: int = -1) -> FileLog:
        """Open the log; kill the process at this call, if there are that many."""
        self.disk.close_all()
        self.process = LogProcess(self.disk, self._settings, self.clock, self.chance, self.story)
        self.process.files.faults.calls_left = calls
        self.process.open()
        return self.process.log

    def append(self, log: FileLog, value: bytes) -> None:
        """Append a record and wait until it is acknowledged as synced."""
        reported: list[int | BrokerError] = []
        batch = from_records([Record(value)])
        self.process.until(lambda: not log.congested)
        log.append(log.partition(1), batch, level=Level.SYNCED, done=reported.append)
        self.process.until(lambda: reported)
        assert not isinstance(reported[0], BrokerError)
