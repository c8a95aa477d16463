"""Worker jobs that finish in any order: slots are installed in order, and a flush covers its own group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from polywire.errors import BrokerError
from polywire.log.partition.partition import FilePartition
from polywire.log.settings import LogSettings
from polywire.log.worker import attempt
from polywire.store.system_files import SystemMapping
from polywire.types import Buffer, Level
from tests.crash.disk import JournalDisk
from tests.unit.log.rig import SMALL, batch_of
from tests.unit.log.schedule import ManualRig

SETTINGS: LogSettings = replace(SMALL, slot_count_min=4, sync_interval_ms=10_000)


def fill_slot(rig: ManualRig, partition: FilePartition, values: list[bytes]) -> None:
    """Append until another slot is written."""
    slot = rig.log._journal.current
    while rig.log._journal.current is slot:
        values.append(b"%d" % len(values) + b"." * 2000)
        rig.append(partition, values[-1:])
        rig.log.commit()
    rig.passes()


def test_a_later_slot_waits_for_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = ManualRig(tmp_path, monkeypatch, SETTINGS)
    partition, values = rig.log.open_partition(1), list[bytes]()
    rig.log.commit()
    seal, sync = rig.workers["seal"], rig.workers["sync"]
    slot = rig.log._journal.current
    while rig.log._journal.current is slot:  # the first slot; its snapshot will depend on a later change
        values.append(b"%d" % len(values) + b"." * 2000)
        rig.append(partition, values[-1:])
        rig.log.commit()
    rig.change(b"change")
    fill_slot(rig, partition, values)
    rig.log.barrier(Level.SYNCED, lambda _: None)
    rig.log.commit()
    assert len(sync.jobs) == 1, "a flush is running"
    rig.step("seal")
    assert len(sync.jobs) == 1, "naming the first slot's segments waits for it"
    rig.step("seal")
    assert len(sync.jobs) == 2, "naming the second slot's segments is flushed alone"
    rig.step("sync")
    assert len(sync.jobs) == 2, "the first slot's comes last"
    rig.step("sync")
    assert rig.read(partition) == values
    rig.drain()
    assert not rig.log.sealing
    assert not seal.jobs
    firsts = [partition.runs.entry(number)[0] for number in range(len(partition.runs))]
    assert len(firsts) == 2
    assert firsts == sorted(firsts)
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1)) == values
    rig.kill()


def test_a_flush_covers_the_group_that_frees_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[int, int]] = []

    flush = SystemMapping.flush

    def note(mapping: SystemMapping, start: int, stop: int) -> None:
        flush(mapping, start, stop)
        flushed.append((start, stop))

    monkeypatch.setattr(SystemMapping, "flush", note)
    rig = ManualRig(tmp_path, monkeypatch, SETTINGS)
    partition, values = rig.log.open_partition(1), list[bytes]()
    fill_slot(rig, partition, values)
    positions: list[int] = []
    write, reported = rig.log._journal.write, list[int]()

    def write_and_note(parts: Sequence[Buffer], size: int, sequence: int) -> int:
        positions.append(write(parts, size, sequence))
        return positions[-1]

    monkeypatch.setattr(rig.log._journal, "write", write_and_note)

    def go_on(offset: int | BrokerError) -> None:
        assert not isinstance(offset, BrokerError), offset
        reported.append(offset)
        rig.append(partition, [b"another group"])
        rig.log.commit()

    rig.log.append(partition, batch_of([b"reported"]), level=Level.WRITTEN, done=go_on)
    job, sealed = rig.workers["seal"].jobs.popleft()
    sealed(attempt(job))
    rig.passes()
    assert len(rig.workers["sync"].jobs) == 1
    assert len(positions) == 3, "the write batch, the segment names, and the callback's append"
    assert reported
    rig.step("sync")
    assert flushed[0][0] <= positions[1] < flushed[0][1]
    rig.kill()


def test_segments_without_trimmed_records_are_installed_after_the_trim_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss that undoes a trim also undoes the segments that were written after it."""
    disk = JournalDisk(monkeypatch)
    rig = ManualRig(tmp_path, monkeypatch, SETTINGS)
    partition, values = rig.log.open_partition(1), list[bytes]()
    slot = rig.log._journal.current
    while rig.log._journal.current is slot:
        values.append(b"%d" % len(values) + b"." * 2000)
        rig.append(partition, values[-1:])
        rig.log.commit()
    rig.passes(1)  # the sealer encodes the broker's state and has not listed the batches to seal
    rig.log.trim(1, len(values) - 2)
    rig.log.commit()
    values.append(b"." * 6000)  # so that the change that names the segments is on another page than the trim
    rig.append(partition, values[-1:])
    rig.log.commit()
    rig.passes()
    rig.step("seal")
    rig.workers["sync"].step()
    rig.kill()
    disk.lose_power(tmp_path, None)
    rig.open()
    found = rig.log.partition(1)
    assert rig.read(found, found.first_offset) == values[found.first_offset : found.next_offset]
    rig.kill()


def test_a_partition_dropped_during_compaction_is_in_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = ManualRig(tmp_path, monkeypatch, SETTINGS)
    ended, kept = rig.log.open_partition(1), rig.log.open_partition(2)
    rig.log.commit()
    rig.log.drop_partition(1)
    rig.log.commit()
    rig.log._state.cleaned(ended, 7)  # as the running compaction pass does
    assert not rig.log._state.clean
    rig.log._state.clean[1] = 7  # as in snapshots of earlier versions
    values = list[bytes]()
    fill_slot(rig, kept, values)
    rig.drain()
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(2)) == values
    rig.kill()
