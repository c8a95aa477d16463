"""Starts that are killed at any call, each followed by a power loss after something was acknowledged as synced."""

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
            machine.process.until(lambda log=log: not log.sealing)  # type: ignore[misc]
            machine.append(log, b"." * 4000)
        machine.process.files.faults.dead = True
        machine.disk.lose_power(machine.chance, 0.0)
        assert machine.open().partition(1).next_offset == expected + AFTER
    assert calls > 20, "a start makes many calls"


def test_a_start_writes_anew_what_a_failed_sync_has_left_in_memory_alone() -> None:
    machine = Machine()
    log = machine.open()
    log.open_partition(1)
    machine.append(log, b"kept")
    log.append(log.partition(1), from_records([Record(b"lost")]), level=Level.WRITTEN, done=None)
    log.commit()
    slots = [inode for name, inode in machine.disk.files() if name.endswith(".pwj")]
    for inode in slots:
        inode.lose(Chance(0))
    machine.disk.capacity_bytes = machine.disk.used_bytes  # what is found stays where it is
    machine.open()
    machine.process.files.faults.dead = True
    machine.disk.lose_power(machine.chance, 0.0)
    machine.disk.capacity_bytes = 1 << 24
    assert machine.open().partition(1).next_offset == 2


def test_what_a_start_has_cut_does_not_come_back_in_the_place_of_what_is_damaged() -> None:
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


def test_a_start_says_where_the_damaged_group_was_that_named_the_state_in_place_of_one_that_is_gone() -> None:
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
    """Damage the head of the group that has this content."""
    [inode] = [inode for _, inode in machine.disk.files() if content in inode.data]
    place = inode.data.rfind(GROUP_MAGIC, 0, inode.data.find(content)) + 16
    for data in (inode.data, inode.durable):
        data[place] ^= 1
