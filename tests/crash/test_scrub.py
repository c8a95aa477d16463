"""The scrub finds damage before a reader does, and a pass covers everything sealed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from polywire.log.segments.damage import Damage
from polywire.log.segments.scrub import PAUSE_S_MAX, PAUSE_S_MIN, Scrub
from polywire.log.segments.segment import Segment
from polywire.log.worker import ThreadWorker
from polywire.store.system_files import SYSTEM_FILES
from tests.crash.test_damage import flip, place_of, sealed_rig, segment_of
from tests.unit.log.rig import SMALL, Rig


def scrubbed(rig: Rig) -> Scrub:
    """Run one whole pass."""
    scrub = Scrub(rig.log._state.segments, rig.loop, hours=1e-9, make_worker=ThreadWorker, token=SYSTEM_FILES.token)
    scrub.start()
    rig.loop.run_until(lambda: scrub.passes)
    scrub.stop()
    return scrub


def test_a_pass_records_every_damage_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rig, partition = sealed_rig(tmp_path)
    places = [place_of(rig, partition, offset) for offset in (20, partition.runs.entry(1)[0] + 3)]
    scrubbed(rig)
    assert rig.log._state.segments.notes.found == []
    for path, at in places:
        flip(path, at + 900)
    scrubbed(rig)
    found = rig.log._state.segments.notes.found
    assert sorted(damage.first_offset for damage in found) == [20, partition.runs.entry(1)[0] + 3]
    scrubbed(rig)
    assert capsys.readouterr().out.count("stored records are damaged") == 2, "each is logged once"
    rig.log.close()


def test_segments_deleted_during_a_pass_are_skipped(tmp_path: Path) -> None:
    rig, partition = sealed_rig(tmp_path)
    path, _ = place_of(rig, partition, 20)
    path.unlink()
    rig.log._disk.store._open.drop(f"segments/{path.name}")  # type: ignore[attr-defined]
    scrubbed(rig)
    assert rig.log._state.segments.notes.found == []
    rig.log.close()


def test_a_segment_without_an_index_does_not_end_the_pass(tmp_path: Path) -> None:
    rig, partition = sealed_rig(tmp_path)
    first, _ = place_of(rig, partition, 20)
    second, at = place_of(rig, partition, partition.runs.entry(1)[0] + 3)
    flip(second, at + 900)
    content = first.read_bytes()
    first.write_bytes(content[: segment_of(rig, partition, 20).info.data_bytes].ljust(len(content), b"x"))
    rig.log._state.segments._cache.drop(f"segments/{first.name}")
    scrubbed(rig)
    assert [damage.segment for damage in rig.log._state.segments.notes.found] == [f"segments/{second.name}"]
    rig.log.close()


def test_windows_of_a_run_cover_all_of_it(tmp_path: Path) -> None:
    rig, _ = sealed_rig(tmp_path)
    for sealed in rig.log._state.segments.by_location.values():
        for run in sealed.segment.info:
            windows = list(sealed.segment.windows(run.partition, 1))
            assert windows[0][0] == run.position
            assert windows[-1][1] == run.stop
            assert all(one[1] == other[0] for one, other in pairwise(windows))
            assert list(sealed.segment.windows(run.partition, 1 << 30)) == [(run.position, run.stop)]
    rig.log.close()


def test_the_pace_fits_the_period_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _ = sealed_rig(tmp_path)
    waits: list[float] = []
    monkeypatch.setattr(rig.loop, "call_later", lambda delay, *_: waits.append(delay))
    for hours in (0, 1e-9, 1e9):
        Scrub(
            rig.log._state.segments, rig.loop, hours=hours, make_worker=ThreadWorker, token=SYSTEM_FILES.token
        ).start()
    assert waits == [PAUSE_S_MIN, PAUSE_S_MAX]
    monkeypatch.undo()
    rig.log.close()


def test_a_log_stops_its_scrub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.log.segments.scrub.PAUSE_S_MIN", 0.0)
    looked: list[int] = []
    verify = Segment.verify_uncached

    def verify_uncached(segment: Segment, block: memoryview, partition: int, start: int, stop: int) -> list[Damage]:
        looked.append(start)
        return verify(segment, block, partition, start, stop)

    monkeypatch.setattr(Segment, "verify_uncached", verify_uncached)
    sealed_rig(tmp_path)[0].log.close()
    rig = Rig(tmp_path, replace(SMALL, scrub_hours=1e-9))
    rig.loop.run_until(lambda: len(looked) > 5)
    rig.log.close()
    seen = len(looked)
    rig.loop.run_pass(0.05)
    assert len(looked) == seen
