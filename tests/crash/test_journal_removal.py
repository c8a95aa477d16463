"""Stops after segments were removed: records dropped since the snapshot are not missed, and the rest is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from polywire.errors import Corrupt
from polywire.log.partition.partition import FilePartition
from polywire.types import Level
from tests.unit.log.rig import SMALL, Rig, batch_of

NEVER = 2**62
TOKEN = b"t" * 16


def fill_slot(rig: Rig, partition: FilePartition) -> None:
    """Append until the current slot is full, sealed and freed."""
    slot = rig.log._journal.current
    while rig.log._journal.current is slot:
        rig.append(partition, [b"%d" % partition.next_offset + b"." * 2000])
        rig.log.commit()
    rig.settle()


def blobs(rig: Rig) -> set[str]:
    return {path.name for path in (rig.directory / "segments").iterdir()}


def until_removed(rig: Rig, count: int = 1) -> None:
    """Wait until that many segments have been removed."""
    before = len(blobs(rig))
    rig.loop.run_until(lambda: len(blobs(rig)) <= before - count)


def numbered(values: list[bytes | None]) -> list[int]:
    return [int((value or b"").rstrip(b".")) for value in values]


@pytest.mark.parametrize("how", ["drop", "trim"])
def test_segment_removed_after_the_snapshot(tmp_path: Path, how: str) -> None:
    rig = Rig(tmp_path, SMALL)
    shared, other = rig.log.open_partition(1), rig.log.open_partition(2)
    rig.append(other, [b"0"])
    fill_slot(rig, shared)  # a segment of both partitions
    fill_slot(rig, shared)  # a segment of one partition
    if how == "drop":
        rig.log.drop_partition(1)
    else:
        rig.log.trim(1, shared.next_offset)
        rig.append(shared, [b"%d" % shared.next_offset])
        rig.log.commit()
    first = shared.first_offset
    until_removed(rig)
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(2)) == [b"0"]
    if how == "trim":
        assert numbered(rig.read(rig.log.partition(1), first)) == [first]
    rig.log.close()
    rig.open()
    assert rig.read(rig.log.partition(2)) == [b"0"]
    rig.log.close()


@pytest.mark.parametrize("how", ["drop", "trim"])
@pytest.mark.parametrize("sealed", [True, False])
def test_published_and_removed_after_the_snapshot(tmp_path: Path, how: str, *, sealed: bool) -> None:
    rig = Rig(tmp_path, SMALL)
    first, second = rig.log.open_partition(1), rig.log.open_partition(2)
    rig.log.stage(TOKEN, first, batch_of([b"staged"]), expires_at_us=NEVER, level=Level.SYNCED, done=None)
    rig.log.stage(TOKEN, second, batch_of([b"kept"]), expires_at_us=NEVER, level=Level.SYNCED, done=None)
    if sealed:
        fill_slot(rig, second)
    else:  # the slot is full, and not planned yet
        slot = rig.log._journal.current
        while rig.log._journal.current is slot:
            rig.append(second, [b"%d" % second.next_offset + b"." * 2000])
            rig.log.commit()
    kept = second.next_offset
    rig.log.publish([TOKEN], b"", level=Level.WRITTEN, done=lambda _: None)
    rig.append(first, [b"behind"])
    rig.log.commit()
    if how == "drop":
        rig.log.drop_partition(1)
    else:
        rig.log.trim(1, 1)
    rig.settle()
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(2), kept) == [b"kept"]
    if how == "trim":
        assert rig.log.partition(1).first_offset == 1
        assert rig.read(rig.log.partition(1), 1) == [b"behind"]
    rig.log.close()


def test_a_staged_segment_removed_after_the_snapshot(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SMALL)
    partition, filler = rig.log.open_partition(1), rig.log.open_partition(2)
    for number in range(3):
        rig.log.stage(TOKEN, partition, batch_of([b"%d" % number]), expires_at_us=NEVER, level=Level.SYNCED, done=None)
        fill_slot(rig, filler)
    rig.log.trim(2, filler.next_offset)
    rig.log.commit()
    rig.log.publish([TOKEN], b"", level=Level.WRITTEN, done=lambda _: None)
    rig.append(partition, [b"3"])
    rig.log.commit()
    rig.log.trim(1, 2)
    until_removed(rig, 2)
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1), 2) == [b"2", b"3"]
    fill_slot(rig, rig.log.partition(1))
    rig.kill()
    rig.open()
    assert numbered(rig.read(rig.log.partition(1), 2)[:2]) == [2, 3]
    rig.log.close()


def test_a_removal_synced_together_with_the_end_of_its_slot(tmp_path: Path) -> None:
    """The snapshot of a slot must not list segments whose removal is journalled in that slot."""
    rig = Rig(tmp_path, SMALL)
    gone, kept = rig.log.open_partition(1), rig.log.open_partition(2)
    fill_slot(rig, gone)
    rig.append(kept, [b"0"], Level.SYNCED)
    rig.settle()
    rig.log.drop_partition(1)
    rig.log.commit()
    slot = rig.log._journal.current
    rig.hold_syncs(True)  # no sync begins, so that one sync covers removal and slot together
    rig.log._sealer.remove()
    while rig.log._journal.current is slot:
        rig.append(kept, [b"%d" % kept.next_offset + b"." * 2000])
        rig.log.commit()
    rig.hold_syncs(False)
    rig.settle()
    rig.loop.run_until(lambda: not rig.log._state.segments.dead and len(blobs(rig)) == 1)
    rig.kill()
    rig.open()
    assert numbered(rig.read(rig.log.partition(2))) == list(range(rig.log.partition(2).next_offset))
    rig.log.close()


@pytest.mark.parametrize("folder", ["segments", "snapshots"])
def test_a_missing_segment_is_corrupt(tmp_path: Path, folder: str) -> None:
    rig = Rig(tmp_path, SMALL)
    fill_slot(rig, rig.log.open_partition(1))
    rig.log.close()
    for path in (tmp_path / folder).iterdir():
        path.unlink()
    with pytest.raises(Corrupt):
        rig.open()
