"""Offline repair of damage that no start accepts: it keeps what it can and reports the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polywire.clock import SystemClock
from polywire.errors import Busy, Corrupt
from polywire.log.doctor import Diagnosis, finish, open_offline, repair
from polywire.log.journal.recovery import FoundGroup, find_chain
from polywire.types import Level
from tests.crash.test_flips import read_what_is_sound
from tests.unit.log.rig import SMALL, Memory, Rig, RigLoop

PARTITION = 7
QUIET = replace(SMALL, sync_interval_ms=600_000)


def write_groups(directory: Path, count: int = 6) -> list[FoundGroup]:
    """Write groups with one record and one change each, and one that says that they are synced; return the groups.

    The broker is then killed: after a clean stop, they would be in segments.
    """
    rig = Rig(directory, QUIET)
    partition = rig.log.open_partition(PARTITION)
    for number in range(count):
        rig.append(partition, [b"value-%d" % number])
        rig.change(b"change-%d" % number)
        rig.settle()
    rig.log._mark_synced()
    rig.settle()
    rig.kill()
    with open_offline(directory, Memory, RigLoop()) as patient:
        chain = find_chain(patient.slots)
        assert chain is not None
        return list(chain.groups)[-count - 1 : -1]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def look(directory: Path) -> Diagnosis:
    with open_offline(directory, Memory, RigLoop()) as patient:
        return patient.diagnose()


def cure(directory: Path) -> Path:
    with open_offline(directory, Memory, RigLoop()) as patient:
        diagnosis = patient.diagnose()
        aside, size = repair(patient, diagnosis), patient.slots[0].size
    finish(directory, diagnosis.through, size, Memory(), RigLoop(), SystemClock())
    return aside


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_an_intact_directory_needs_no_repair(tmp_path: Path) -> None:
    write_groups(tmp_path)
    before = files(tmp_path)
    diagnosis = look(tmp_path)
    assert diagnosis.reason is None
    assert diagnosis.loss.nothing
    assert files(tmp_path) == before


def test_a_damaged_body_costs_its_batch_only(tmp_path: Path) -> None:
    group = write_groups(tmp_path)[3]
    path = group.slot.path
    flip(path, path.read_bytes().index(b"value-3"))
    with pytest.raises(Corrupt):
        Rig(tmp_path, QUIET)
    before = files(tmp_path)
    diagnosis = look(tmp_path)
    assert files(tmp_path) == before, "looking changes nothing"
    assert diagnosis.reason is not None
    assert (diagnosis.loss.groups, diagnosis.loss.damaged) == (0, {PARTITION: [(3, 4)]})
    cure(tmp_path)
    rig = Rig(tmp_path, QUIET)
    found, reported = read_what_is_sound(rig, rig.log.partition(PARTITION))
    assert reported == {3}
    assert found == {number: b"value-%d" % number for number in range(6) if number != 3}
    assert rig.memory.changes == [b"change-%d" % number for number in range(6)]
    rig.log.close()


@pytest.mark.parametrize("byte", [4, 20, 60])
def test_everything_after_a_damaged_header_is_dropped_and_reported(tmp_path: Path, byte: int) -> None:
    group = write_groups(tmp_path)[3]
    flip(group.slot.path, group.position + byte)
    with pytest.raises(Corrupt):
        Rig(tmp_path, QUIET)
    loss = look(tmp_path).loss
    assert (loss.groups, loss.unknown) == (4, 1), "three with records, and the last one"
    assert loss.records == {PARTITION: (4, 6)}
    assert loss.changes == 2
    damaged = group.slot.path.read_bytes()
    aside = cure(tmp_path)
    assert (aside / group.slot.path.name).read_bytes() == damaged
    rig = Rig(tmp_path, QUIET)
    partition = rig.log.partition(PARTITION)
    assert rig.read(partition) == [b"value-0", b"value-1", b"value-2"]
    assert rig.memory.changes == [b"change-0", b"change-1", b"change-2"]
    rig.append(partition, [b"after"], Level.SYNCED)
    rig.settle()
    rig.log.close()
    rig.open()
    assert rig.read(rig.log.partition(PARTITION))[3:] == [b"after"]
    rig.log.close()


def test_a_gap_is_repaired_by_dropping_everything_after_it(tmp_path: Path) -> None:
    """Offsets were assigned to records that never reached the journal."""
    rig = Rig(tmp_path, QUIET)
    partition = rig.log.open_partition(PARTITION)
    rig.append(partition, [b"kept"], Level.SYNCED)
    rig.settle()
    partition.next_offset += 5
    rig.append(partition, [b"behind", b"the hole"], Level.SYNCED)
    rig.settle()
    rig.kill()
    with pytest.raises(Corrupt, match="gap"):
        Rig(tmp_path, QUIET)
    diagnosis = look(tmp_path)
    assert diagnosis.loss.records == {PARTITION: (6, 8)}
    cure(tmp_path)
    rig = Rig(tmp_path, QUIET)
    assert rig.read(rig.log.partition(PARTITION)) == [b"kept"]
    rig.log.close()


def test_a_directory_in_use_cannot_be_repaired(tmp_path: Path) -> None:
    write_groups(tmp_path)
    rig = Rig(tmp_path, QUIET)
    with pytest.raises(Busy, match="in use"):
        look(tmp_path)
    rig.log.close()
    with open_offline(tmp_path, Memory, RigLoop()), pytest.raises(Busy, match="in use"):
        Rig(tmp_path, QUIET)
    Rig(tmp_path, QUIET).log.close()
