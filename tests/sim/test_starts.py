"""Starts that are killed at any call, each followed by a power loss after something was acknowledged as synced."""

from __future__ import annotations

import pytest

from polywire.errors import BrokerError
from polywire.log.log import FileLog
from polywire.log.opening import open_log
from polywire.log.settings import LogSettings
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.clock import SimulatedClock
from polywire.testing.sim.chance import Chance
from polywire.testing.sim.client import BrokerState
from polywire.testing.sim.disk import SimulatedDisk
from polywire.testing.sim.files import Killed, SimulatedFiles
from polywire.testing.sim.schedule import Schedule
from polywire.testing.sim.story import Story
from polywire.testing.sim.world import DIRECTORY
from polywire.types import Level

SETTINGS = LogSettings(slot_bytes=48 * 1024, slot_count_max=2, disk_reserve_bytes=0, scrub_hours=0)
AFTER = 12  # records of 4 KB: more than one slot holds


class Machine:
    """A disk, and one process after another on it."""

    def __init__(self) -> None:
        self.chance, self.story = Chance(1), Story()
        self.disk = SimulatedDisk(1 << 24)
        self.clock = SimulatedClock()

    def open(self, calls: int = -1) -> FileLog:
        """Open the log; the process is killed at this call, if there are so many."""
        self.disk.close_all()
        self.files = SimulatedFiles(self.disk, self.chance, self.story)
        self.files.faults.calls_left = calls
        self.loop = Schedule(self.clock, self.chance, self.story)
        self.state = BrokerState()
        return open_log(
            DIRECTORY,
            settings=SETTINGS,
            loop=self.loop,
            clock=self.clock,
            replay=self.state,
            files=self.files,
            make_worker=self.loop.make_worker,
        )

    def append(self, log: FileLog, value: bytes) -> None:
        """Append a record, and see it acknowledged as synced."""
        told: list[int | BrokerError] = []
        batch = from_records([Record(value)])
        while log.congested:
            assert self.loop.step() or self.loop.pass_to_timer(), "a slot becomes free"
        log.append(log.partition(1), batch, level=Level.SYNCED, done=told.append)
        while not told:
            assert self.loop.step(), "somebody answers"
        assert not isinstance(told[0], BrokerError)


@pytest.mark.parametrize("written", [False, True], ids=["empty", "written"])
def test_what_is_acknowledged_behind_a_killed_start_survives(written: bool) -> None:
    calls = 1
    while True:
        machine = Machine()
        expected = 0
        if written:
            log = machine.open()
            log.open_partition(1)
            machine.append(log, b"before")
            expected = 1
        try:
            machine.open(calls)
            break
        except Killed:
            calls += 1
        log = machine.open()  # finds what the killed one left in memory, and perhaps nowhere else
        if not written:
            log.open_partition(1)
        for _ in range(AFTER):
            machine.append(log, b"." * 4000)
        machine.files.faults.dead = True
        machine.disk.lose_power(machine.chance, 0.0)
        assert machine.open().partition(1).next_offset == expected + AFTER
    assert calls > 20, "a start makes many calls"
