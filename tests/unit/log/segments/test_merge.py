"""Merging segments: the sealer's thread reads the footers, and a missing segment does not stop it."""

from __future__ import annotations

from pathlib import Path

import pytest

from polywire.clock import SystemClock
from polywire.log.partition.partition import FilePartition
from polywire.log.segments import format, merge, segment
from polywire.log.segments.format import SegmentInfo
from polywire.log.segments.segment_set import Sealed
from polywire.log.worker import Job, attempt
from polywire.store.base import Store
from tests.unit.log.rig import SMALL
from tests.unit.log.schedule import ManualRig, ManualWorker

FOREVER_US = -1


class Tidied(ManualRig):
    """A rig that records whether a worker or the loop reads footers. No footer is cached."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.in_job = False
        self.read_on_loop = 0
        self.read_by_worker = 0
        read_info = format.read_info

        def noted(store: Store, name: str, block: memoryview | None = None) -> SegmentInfo:
            if self.in_job:
                self.read_by_worker += 1
            else:
                self.read_on_loop += 1
            return read_info(store, name, block)

        def step(worker: ManualWorker) -> None:
            job, reported = worker.jobs.popleft()
            worker._loop.call_soon_threadsafe(reported, attempt(lambda: self._in_job(job)))

        patch.setattr(ManualWorker, "step", step)
        patch.setattr(segment, "read_info", noted)
        patch.setattr(merge, "GROUPS_MAX", 1)
        super().__init__(directory, patch, SMALL)

    def _in_job(self, job: Job) -> object:
        self.in_job = True
        try:
            return job()
        finally:
            self.in_job = False

    def seal(self, partitions: list[FilePartition], slots: int) -> list[Sealed]:
        for _ in range(slots):
            slot = self.log._journal.current
            while self.log._journal.current is slot:
                for partition in partitions:
                    self.append(partition, [b"%d" % partition.next_offset + b"." * 1500])
                    self.log.commit()
            while self.log.sealing:
                self.drain()
                self.passes()
        items = list(self.log._state.segments.by_location.values())
        for item in items:
            self.log._state.segments._cache.drop(item.segment.name)
        self.log._state.segments._cache.runs.clear()
        return items

    def tidy(self) -> None:
        self.log._sealer.tidy(SystemClock().now_us(), merging=True)
        for _ in range(10):
            self.drain()
            self.passes()


def test_small_segments_are_merged_by_footers_read_in_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Tidied(tmp_path, monkeypatch)
    partition = rig.log.open_partition(1)
    rig.seal([partition], 4)
    rig.tidy()
    assert len(partition.runs) == 1
    assert rig.read_by_worker == 4
    assert rig.read_on_loop == 0
    assert len(rig.read(partition)) == partition.next_offset
    rig.kill()


def test_a_segment_without_a_footer_is_kept_and_the_others_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = Tidied(tmp_path, monkeypatch)
    partition = rig.log.open_partition(1)
    missing, *others = rig.seal([partition], 5)
    (tmp_path / missing.segment.name).unlink()
    rig.tidy()
    assert missing.damaged
    assert "will not be merged" in capsys.readouterr().out
    rig.tidy()
    assert len(partition.runs) == 2, "other segments are not affected"
    assert not any(item.damaged for item in others)
    rig.append(partition, [b"it goes on"])
    rig.log.commit()
    rig.kill()


def test_compaction_finds_its_runs_in_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Tidied(tmp_path, monkeypatch)
    monkeypatch.setattr(merge, "MERGE_COUNT_MIN", 99)
    partition = rig.log.open_partition(1)
    rig.seal([partition], 3)
    sealer = rig.log._sealer
    sealer._to_compact[partition] = FOREVER_US
    while sealer._to_compact or sealer._compaction is not None:
        rig.tidy()
    assert rig.read_by_worker >= 3
    assert rig.read_on_loop == 0
    assert partition.clean_offset > 0
    rig.kill()


def test_compaction_stops_at_a_missing_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Tidied(tmp_path, monkeypatch)
    monkeypatch.setattr(merge, "MERGE_COUNT_MIN", 99)
    partition = rig.log.open_partition(1)
    missing, *_ = rig.seal([partition], 3)
    (tmp_path / missing.segment.name).unlink()
    sealer = rig.log._sealer
    sealer._to_compact[partition] = FOREVER_US
    rig.tidy()
    assert sealer._compaction is None
    assert not sealer._running
    rig.append(partition, [b"it goes on"])
    rig.log.commit()
    rig.kill()
