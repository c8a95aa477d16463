"""Starts that are killed at any call, followed by a power loss after records were acknowledged as synced."""

from __future__ import annotations

import pytest

from polywire.errors import BrokerError, Corrupt
from polywire.log.journal.group import GROUP_MAGIC
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.sim.chance import Chance
from tests.sim.files import Killed
from tests.sim.machine import Machine

AFTER = 12  # records of 4 KB: more than one slot holds


@pytest.mark.parametrize("written", [False, True], ids=["empty", "written"])
def test_records_acknowledged_after_a_killed_start_survive(written: bool) -> None:
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
        log = machine.open()  # reads what the killed start left in memory, and perhaps nowhere else
        if not written:
            log.open_partition(1)
        for _ in range(AFTER):
            machine.process.until(lambda log=log: not log.sealing)  # type: ignore[misc]
            machine.append(log, b"." * 4000)
        machine.process.files.faults.dead = True
        machine.disk.lose_power(machine.chance, 0.0)
        assert machine.open().partition(1).next_offset == expected + AFTER
    assert calls > 20, "a start makes many calls"


def test_a_start_rewrites_what_a_failed_sync_left_in_memory_only() -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    machine.append(log, b"kept")
    log.append(log.partition(1), from_records([Record(b"lost")]), level=Level.WRITTEN, done=None)
    log.commit()
    slots = [inode for name, inode in machine.disk.files() if name.endswith(".pwj")]
    for inode in slots:
        inode.lose(Chance(0))
    machine.disk.capacity_bytes = machine.disk.used_bytes  # recovered data is not moved
    machine.open()
    machine.process.files.faults.dead = True
    machine.disk.lose_power(machine.chance, 0.0)
    machine.disk.capacity_bytes = 1 << 24
    assert machine.open().partition(1).next_offset == 2


def test_groups_cut_off_by_a_start_do_not_replace_damaged_ones() -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    machine.append(log, b"kept")
    for change in (b"torn", b"behind it"):
        log.change(change, level=Level.WRITTEN, done=None)
        log.commit()
    _spoil(machine, b"torn")
    machine.disk.capacity_bytes = (
        machine.disk.used_bytes
    )  # nothing is sealed: the slots of each start are needed by the next
    log = machine.open()
    assert machine.process.state.changes == []
    reported: list[int | BrokerError] = []
    log.change(b"has the number of what was cut", level=Level.SYNCED, done=reported.append)
    machine.process.until(lambda: reported)
    machine.open()
    _spoil(machine, b"has the number")
    with pytest.raises(Corrupt):
        machine.open()


def test_a_start_reports_the_damaged_group_that_named_the_replaced_state() -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    seen = set[str]()
    while len(seen) < 3:
        machine.append(log, b"." * 4000)
        machine.process.until(lambda: not log.sealing and len(_snapshots(machine)) <= 1)
        seen.update(_snapshots(machine))
    _spoil(machine, _snapshots(machine)[0].encode())
    with pytest.raises(Corrupt, match="slot-"):
        machine.open()


def _snapshots(machine: Machine) -> list[str]:
    return [name.rpartition("/")[2] for name, _ in machine.disk.files() if name.endswith(".pwt")]


def _spoil(machine: Machine, content: bytes) -> None:
    """Damage the header of the group with this content."""
    [inode] = [inode for _, inode in machine.disk.files() if content in inode.data]
    place = inode.data.rfind(GROUP_MAGIC, 0, inode.data.find(content)) + 16
    for data in (inode.data, inode.durable):
        data[place] ^= 1
