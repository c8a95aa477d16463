"""The group that names a sealed state, and the groups before it that a power loss may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from polywire.errors import Busy
from polywire.log.base import Encoding, Read
from polywire.log.journal.group import GROUP_MAGIC
from polywire.log.log import FileLog
from polywire.log.segments import sealer
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.sim.machine import SETTINGS, Machine
from tests.sim.schedule import SimulatedWorker

UNHURRIED = replace(SETTINGS, slot_count_max=4, sync_interval_ms=60_000)
LONG = b"." * 4000
SEGMENTS = 8  # each removal takes a page, together more than the reserve beside the naming group


def test_a_state_does_not_count_without_the_groups_it_depends_on() -> None:
    machine = Machine(UNHURRIED)
    log = _with_partition(machine)
    _fill_slot(machine, log)
    machine.process.state.changes.append(b"late")  # before the state is encoded, and after the slot
    log.change(b"late", level=Level.WRITTEN, done=None)
    log.commit()
    _see_named(machine, log)
    _lose(machine, b"late")
    machine.open()
    assert machine.process.state.changes == []


def test_records_removed_during_encoding_exist_if_their_removal_is_lost() -> None:
    machine = Machine(UNHURRIED)
    log = _with_partition(machine)
    log.open_partition(2)
    log.append(log.partition(2), from_records([Record(b"kept")]), level=Level.WRITTEN, done=None)
    machine.process.state.encoding = lambda: Encoding(_slowly(log))  # type: ignore[method-assign]
    _fill_slot(machine, log)
    _see_named(machine, log)
    _lose(machine, b"removed")
    log = machine.open()
    assert log.partition(2).next_offset == 1
    found = machine.process.read(2, 0)
    assert isinstance(found, Read)
    assert found.chunks


def _with_partition(machine: Machine) -> FileLog:
    log = machine.open()
    log.open_partition(1)
    log.commit()
    return log


def _slowly(log: FileLog) -> Iterator[bytes]:
    """Encode a state so slowly that a partition is dropped meanwhile."""
    yield b""
    log.drop_partition(2)
    log.change(b"removed", level=Level.WRITTEN, done=None)
    log.commit()
    yield b""


def _fill_slot(machine: Machine, log: FileLog) -> None:
    """Append until the next slot has begun; nothing of the previous slot is sealed yet."""
    while log._sealer.waiting == 0:
        log.append(log.partition(1), from_records([Record(LONG)]), level=Level.WRITTEN, done=None)
        log.commit()


def _sync(machine: Machine) -> None:
    """Sync everything, so that the next group starts on a new page; nothing is sealed meanwhile."""
    [worker] = [one for one in machine.process.loop.workers if isinstance(one, SimulatedWorker) and one.name == "sync"]
    while not worker.idle or machine.process.loop._ready:
        if worker.idle:
            machine.process.loop._call()
        else:
            worker.step(machine.chance)


def _see_named(machine: Machine, log: FileLog) -> None:
    """Wait until the state is named in a group that is written and not synced."""
    named = log._sealer.named
    machine.process.until(lambda: log._sealer.named > named)


def _lose(machine: Machine, content: bytes) -> None:
    """Lose power with the group of this content; later groups were written before."""
    machine.process.files.faults.dead = True
    [inode] = [inode for name, inode in machine.disk.files() if name.endswith(".pwj") and content in inode.data]
    place = inode.data.rfind(GROUP_MAGIC, 0, inode.data.find(content))
    for data in (inode.data, inode.durable):
        data[place : place + 64] = bytes(64)


def test_removals_leave_the_space_for_naming_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealer, "REMOVED_MAX", 1)  # each is a separate group
    machine = Machine(replace(SETTINGS, slot_count_max=2))
    log = _with_partition(machine)
    for _ in range(SEGMENTS):
        _fill_slot(machine, log)
        machine.process.until(lambda: log._sealer.waiting == 0)
    _fill_slot(machine, log)
    with suppress(Busy):
        while True:
            log.append(log.partition(1), from_records([Record(LONG)]), level=Level.WRITTEN, done=None)
    log.trim(1, log.partition(1).next_offset)
    log.commit()
    log._sealer.remove_unneeded_soon()
    for _ in range(SEGMENTS):  # the log's timer fires that often before the slot is sealed
        log._sealer.remove()
        _sync(machine)
    machine.process.until(lambda: log._sealer.waiting == 0)
    machine.append(log, b"goes on")
