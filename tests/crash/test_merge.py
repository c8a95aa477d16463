"""Segments are merged while partitions are trimmed and dropped, and the machine stops at every step.

After each stop, with and without what no sync has proved, every synced record that was not removed is at its offset.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from polywire.clock import SystemClock
from polywire.errors import ErrorCode, Unavailable
from polywire.log.partition.partition import FilePartition
from polywire.log.segments import merge
from polywire.store.file import FileBlob
from polywire.types import Level
from tests.crash.disk import JournalDisk
from tests.unit.log.rig import SMALL, Rig

STAYS, TRIMMED, DROPPED = 1, 2, 3
COPIES = count()


def numbered(values: list[bytes | None]) -> list[int]:
    return [int((value or b"").rstrip(b".")) for value in values]


def fill_slots(rig: Rig, partitions: list[FilePartition], slots: int) -> None:
    """Append to all partitions in turn until that many slots are full and sealed."""
    for _ in range(slots):
        slot = rig.log._journal.current
        while rig.log._journal.current is slot:
            for partition in partitions:
                rig.append(partition, [b"%d" % partition.next_offset + b"." * 1500])
                rig.log.commit()
        rig.settle()


def tidy(rig: Rig) -> None:
    """Start a merge if any segment is worth it."""
    rig.log._sealer.tidy(SystemClock().now_us(), merging=True)


def blobs(rig: Rig) -> set[str]:
    return {path.name for path in (rig.directory / "segments").iterdir() if not path.name.startswith(".")}


def copy_at_rest(directory: Path, copy: Path) -> None:
    """Copy a log whose thread may be deleting unneeded files."""
    while True:
        try:
            shutil.copytree(directory, copy)
        except shutil.Error:
            shutil.rmtree(copy)
        else:
            return


class Stops:
    """Stops the machine on copies: as it is, without unsynced data, and with some of it."""

    def __init__(self, rig: Rig, disk: JournalDisk) -> None:
        self._rig = rig
        self._disk = disk
        self.synced: dict[int, int] = {}
        """By partition: offsets below this were synced."""

    def settle(self) -> None:
        self._rig.settle()
        self.synced = {number: partition.next_offset for number, partition in self._rig.log._state.partitions.items()}

    def check(self, gone: dict[int, int] | None = None) -> None:
        """Check every kind of stop at this point. gone: offsets below this were removed, perhaps not durably yet."""
        for keep in (random.Random(1), random.Random(2), None, "all"):
            copy = self._rig.directory.with_name(f"copy-{next(COPIES)}")
            copy_at_rest(self._rig.directory, copy)
            if not isinstance(keep, str):
                self._disk.lose_power(copy, keep, origin=self._rig.directory)
            self._check_copy(Rig(copy, SMALL), gone or {})

    def _check_copy(self, rig: Rig, gone: dict[int, int]) -> None:
        for number, end in self.synced.items():
            partition = rig.log._state.partitions.get(number)
            if partition is None:
                assert gone.get(number, 0) >= end, "it was not dropped"
                continue
            assert partition.first_offset <= gone.get(number, 0), "nothing more was removed"
            assert partition.next_offset >= end, "synced records are there"
            first = partition.first_offset
            assert numbered(rig.read(partition, first)) == list(range(first, partition.next_offset))
        rig.log.close()
        shutil.rmtree(rig.directory)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rig, bool], None]:
    """Allow or block syncs."""
    monkeypatch.setattr(merge, "LOST_US_MAX", 0)

    def hold(rig: Rig, yes: bool) -> None:
        rig.hold_syncs(yes)

    return hold


def test_merge_trim_and_power_loss(tmp_path: Path, held: Callable[[Rig, bool], None], disk: JournalDisk) -> None:
    rig = Rig(tmp_path / "log", SMALL)
    stays, trimmed, dropped = (rig.log.open_partition(number) for number in (STAYS, TRIMMED, DROPPED))
    stops = Stops(rig, disk)
    fill_slots(rig, [stays, trimmed, dropped], 2)
    stops.settle()
    stops.check()
    gone = {DROPPED: dropped.next_offset, TRIMMED: trimmed.runs.entry(1)[0]}
    rig.log.drop_partition(DROPPED)
    rig.log.trim(TRIMMED, gone[TRIMMED])
    rig.log.commit()
    stops.check(gone)
    rig.settle()
    before = blobs(rig)
    tidy(rig)
    rig.loop.run_until(lambda: len(blobs(rig)) > len(before))
    stops.check(gone)  # written, not named
    held(rig, True)
    rig.loop.run_until(lambda: rig.log._sealer._replacing)
    stops.check(gone)  # named, not on the disk
    gone[TRIMMED] = trimmed.next_offset - 1
    rig.log.trim(TRIMMED, gone[TRIMMED])
    rig.log.commit()
    stops.check(gone)  # and its records are trimmed
    held(rig, False)
    rig.loop.run_until(lambda: not rig.log._sealer._replacing and not blobs(rig) >= before)
    stops.check(gone)  # replaced
    rig.loop.run_until(lambda: not rig.log._state.segments.dead)
    tidy(rig)
    stops.check(gone)
    fill_slots(rig, [stays, trimmed], 1)
    stops.settle()
    stops.check(gone)
    assert numbered(rig.read(stays)) == list(range(stays.next_offset))
    assert numbered(rig.read(trimmed, gone[TRIMMED])) == list(range(gone[TRIMMED], trimmed.next_offset))
    rig.kill()
    rig.open()
    assert numbered(rig.read(rig.log.partition(STAYS))) == list(range(rig.log.partition(STAYS).next_offset))
    rig.log.close()


def test_sealing_continues_while_a_merge_waits_for_its_sync(
    tmp_path: Path, held: Callable[[Rig, bool], None], disk: JournalDisk
) -> None:
    """The snapshot of the slot that is sealed meanwhile lists the new segment, and not the old one."""
    rig = Rig(tmp_path / "log", SMALL)
    stays, dropped = rig.log.open_partition(STAYS), rig.log.open_partition(DROPPED)
    stops = Stops(rig, disk)
    fill_slots(rig, [stays, dropped], 1)
    stops.settle()
    rig.log.drop_partition(DROPPED)
    rig.settle()
    gone = {DROPPED: dropped.next_offset}
    before = blobs(rig)
    tidy(rig)
    held(rig, True)
    rig.loop.run_until(lambda: rig.log._sealer._replacing)
    slot = rig.log._journal.current
    while rig.log._journal.current is slot:
        rig.append(stays, [b"%d" % stays.next_offset + b"." * 1500])
        rig.log.commit()
    stops.check(gone)
    held(rig, False)
    rig.append(stays, [b"%d" % stays.next_offset], Level.SYNCED)
    stops.settle()
    stops.check(gone)
    assert not blobs(rig) & before
    rig.log.close()


def test_small_neighbours_are_merged(tmp_path: Path, disk: JournalDisk) -> None:
    rig = Rig(tmp_path / "log", SMALL)
    partitions = [rig.log.open_partition(number) for number in range(1, 6)]
    stops = Stops(rig, disk)
    fill_slots(rig, partitions, 5)
    stops.settle()
    rig.loop.run_until(lambda: not rig.log._state.segments.dead)
    assert len(blobs(rig)) == 5
    tidy(rig)
    rig.loop.run_until(lambda: len(blobs(rig)) == 1)
    stops.check()
    for partition in partitions:
        assert len(partition.runs) == 1
        assert numbered(rig.read(partition)) == list(range(partition.next_offset))
    before = {partition.incarnation: partition.stored_bytes for partition in partitions}
    rig.kill()
    rig.open()
    for number, size in before.items():
        assert rig.log.partition(number).stored_bytes == size
    rig.log.close()


@pytest.mark.parametrize("how", ["changed", "unreadable"])
def test_a_damaged_segment_is_kept(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path / "log", SMALL)
    stays, dropped = rig.log.open_partition(STAYS), rig.log.open_partition(DROPPED)
    fill_slots(rig, [dropped, dropped, stays], 1)
    (path,) = (rig.directory / "segments").iterdir()
    if how == "changed":
        with path.open("r+b") as file:
            file.seek(300)
            file.write(b"\xff")
    else:
        failed = Unavailable(ErrorCode.STORAGE_FAILED, "storage failed: Input/output error")
        for verb in ("read_direct", "pread_into"):
            monkeypatch.setattr(FileBlob, verb, Mock(side_effect=failed))
    rig.log.drop_partition(DROPPED)
    rig.settle()
    tidy(rig)
    rig.loop.run_until(lambda: not rig.log._sealer._running)
    (sealed,) = rig.log._state.segments.by_location.values()
    assert sealed.damaged
    assert blobs(rig) == {path.name}
    tidy(rig)
    assert not rig.log._sealer._running, "it is not tried again"
    rig.append(stays, [b"more"], Level.SYNCED)
    rig.settle()
    rig.log.close()
