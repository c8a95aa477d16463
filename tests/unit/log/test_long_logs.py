"""Long logs of many partitions: small memory per run, footers on demand, and dropping millions of runs in slices."""

from __future__ import annotations

import tracemalloc
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.start import make_up
from polywire.log import state
from polywire.log.partition.partition import FilePartition
from polywire.log.segments import merge, sealer
from polywire.records.batch import read_header
from tests.unit.log.rig import Rig, RigLoop, batch_of
from tests.unit.log.test_file_log import fill_slot

NEVER = 2**62


def filled(directory: Path, slots: int = 4) -> Rig:
    """Return a reopened log of two partitions, with nothing of its segments cached."""
    rig = Rig(directory)
    for incarnation in (1, 2):
        rig.log.open_partition(incarnation)
    for _ in range(slots):
        rig.append(rig.log.partition(2), [b"beside"])
        rig.log.commit()
        fill_slot(rig, rig.log.partition(1))
        rig.settle()
    rig.log.close()
    rig.open()
    return rig


def times(rig: Rig, partition: FilePartition) -> dict[int, int]:
    """Return the append time of each batch, by its first offset."""
    found, offset = {}, partition.first_offset
    while offset < partition.next_offset:
        read = rig.read_once(partition, offset, bytes_max=1)
        header = read_header(read.chunks[0])
        found[header.base_offset] = header.append_time_us
        offset = read.next_offset
    return found


def test_a_start_uses_little_memory_per_run(tmp_path: Path) -> None:
    partitions, segments = 400, 100
    made = make_up(tmp_path, segments * partitions * 1000, partitions, 1000 * partitions)
    tracemalloc.start()
    try:
        rig = Rig(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    found = rig.log._state.partitions.values()
    assert sum(len(partition.runs) for partition in found) == made * partitions
    assert peak < 300 * made * partitions, "about 10 bytes a run, and the footers in the bounded cache"
    rig.log.close()


def test_lookups_read_the_footers_they_need(tmp_path: Path) -> None:
    rig = filled(tmp_path)
    wanted = times(rig, rig.log.partition(1))
    first = {time_us: offset for offset, time_us in sorted(wanted.items(), reverse=True)}
    rig.log.close()
    for time_us, offset in (*first.items(), (max(first) + 1, rig.log.partition(1).next_offset)):
        rig.open()
        partition = rig.log.partition(1)
        assert rig.look_up(partition.offset_at, time_us) == offset
        at = min(offset, partition.next_offset - 1)
        located = rig.answered(partial(partition.locate, at))
        assert at >= partition.tail_offset or located.runs[0].first_offset == at
        rig.log.close()


def test_retention_by_age_waits_for_the_footers_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MERGE_COUNT_MIN", 99)
    rig = filled(tmp_path)
    partition = rig.log.partition(1)
    firsts = [partition.runs.entry(number)[0] for number in range(len(partition.runs))]
    wanted = times(rig, partition)
    rig.log.close()
    for first, following in pairwise(firsts):
        rig.open()
        partition = rig.log.partition(1)
        last_us = max(time_us for offset, time_us in wanted.items() if offset < following)
        assert partition.retention_offset(age_us_max=0, bytes_max=None, now_us=last_us + 1) in (first, following)
        rig.loop.run_until(lambda: rig.log._state.reader._fetching == 0)
        assert partition.retention_offset(age_us_max=0, bytes_max=None, now_us=last_us + 1) == following
        rig.log.close()


@pytest.mark.parametrize("how", ["drop", "trim"])
def test_dropped_runs_are_counted_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(state, "LOST_AT_ONCE_MAX", 0)
    monkeypatch.setattr(sealer, "LOST_MAX", 1)
    rig = filled(tmp_path, slots=6)
    partition, kept = rig.log.partition(1), rig.read(rig.log.partition(2))
    before = len(list((tmp_path / "segments").iterdir()))
    if how == "drop":
        rig.log.drop_partition(1)
    else:
        rig.log.trim(1, partition.next_offset)
    rig.log.commit()
    assert len(partition.runs) == 0
    assert rig.log._state.has_released
    rig.log._sealer.tidy(NEVER, merging=True)  # with a merge running
    rig.log._sealer.remove_unneeded_soon()
    rig.loop.run_until(lambda: not rig.log._state.has_released)
    rig.loop.run_until(lambda: len(list((tmp_path / "segments").iterdir())) < before)
    assert rig.read(rig.log.partition(2)) == kept
    rig.log.close()
    rig.open()
    assert rig.read(rig.log.partition(2)) == kept
    rig.log.close()


def test_other_partitions_are_served_while_many_runs_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealer, "LOST_MAX", 7)
    monkeypatch.setattr(state, "LOST_AT_ONCE_MAX", 0)
    partitions = 40
    make_up(tmp_path, 30 * partitions * 1000, partitions, 1000 * partitions)
    rig = Rig(tmp_path)
    found = list(rig.log._state.partitions.values())
    runs = sum(len(partition.runs) for partition in found[1:])
    for partition in found[1:]:
        rig.log.drop_partition(partition.incarnation)
    rig.log.commit()
    passes = 0
    subtract_released = state.LogState.subtract_released

    def count(self: state.LogState, count_max: int) -> None:
        nonlocal passes
        passes += 1
        assert count_max == 7
        subtract_released(self, count_max)

    monkeypatch.setattr(state.LogState, "subtract_released", count)
    assert isinstance(rig.loop, RigLoop)
    rig.log._sealer.remove_unneeded_soon()
    rig.log.append(found[0], batch_of([b"x"]), level=1, done=None)  # type: ignore[arg-type]
    rig.log.commit()
    assert passes == 1
    rig.loop.run_until(lambda: not rig.log._state.has_released)
    assert passes >= runs // 7
    assert {sealed.live for sealed in rig.log._state.segments.by_location.values()} == {1}
    rig.log.close()
