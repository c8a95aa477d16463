"""Sealing a slot of many partitions: planned in a thread and installed in several passes of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polywire.log.base import Encoding
from polywire.log.log import FileLog
from polywire.log.partition.partition import FilePartition
from polywire.log.segments import sealing
from polywire.log.segments.writer import RunSource
from polywire.types import Level
from tests.unit.log.rig import Rig, batch_of
from tests.unit.log.schedule import ManualRig
from tests.unit.log.segments.test_sealer import SETTINGS

PARTITIONS = 10
AT_ONCE = 3
TOKEN = b"0123456789abcdef"
NEVER_US = 2**62

Kept = dict[FilePartition, list[bytes]]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ManualRig:
    monkeypatch.setattr(sealing, "INSTALLED_MAX", AT_ONCE)
    return ManualRig(tmp_path, monkeypatch, SETTINGS)


def opened(log: FileLog, count: int = PARTITIONS) -> Kept:
    kept: Kept = {log.open_partition(number): [] for number in range(1, count + 1)}
    log.commit()
    return kept


def fill(rig: Rig, kept: Kept) -> None:
    """Append to all partitions in turn until another slot is written; each has records in both slots."""
    slot = rig.log._journal.current
    rounds = 0
    while rig.log._journal.current is slot or not rounds:
        rounds = rig.log._journal.current is not slot
        for partition, values in kept.items():
            values.append(b"%d" % len(values) + b"." * 700)
            rig.append(partition, values[-1:])
            rig.log.commit()


def seal(rig: ManualRig) -> None:
    """Run until the full slot's segments are named on disk; installing then takes several passes."""
    rig.passes()
    rig.workers["seal"].step()
    rig.loop.run_pass()
    rig.workers["sync"].step()


def finish(rig: ManualRig) -> None:
    """Run until every full slot is free."""
    for _ in range(5 * PARTITIONS):
        rig.drain()
        rig.passes()
    assert not rig.log.sealing


def sealed(kept: Kept) -> int:
    return sum(len(partition.runs) > 0 for partition in kept)


def check(rig: Rig, kept: Kept) -> None:
    for partition, values in kept.items():
        assert rig.read(partition, partition.first_offset) == values[partition.first_offset :]


def test_the_loop_plans_nothing(rig: ManualRig, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []

    def source(*args: Any, **more: Any) -> RunSource:
        made.append(None)
        return RunSource(*args, **more)

    monkeypatch.setattr(sealing, "RunSource", source)
    kept = opened(rig.log)
    fill(rig, kept)
    rig.passes()
    assert rig.workers["seal"].jobs
    assert not made
    rig.workers["seal"].step()
    assert len(made) == PARTITIONS
    rig.kill()


def test_a_pass_installs_a_bounded_number_of_runs(rig: ManualRig) -> None:
    kept = opened(rig.log)
    fill(rig, kept)
    seal(rig)
    seen: list[int] = []
    while not seen or seen[-1] < PARTITIONS:
        seen.append(sealed(kept))
        assert len(seen) < 3 * PARTITIONS, "it continues by itself"
        for partition, values in kept.items():
            held = {entry[0] for entry in map(partition.runs.entry, range(len(partition.runs)))}
            assert bool(held) == (partition.tail_offset > 0), "sealed batches are no longer in the tail"
            assert partition.next_offset == len(values)
        rig.loop.run_pass()
    assert max(after - before for before, after in pairwise(seen)) == AT_ONCE
    finish(rig)
    check(rig, kept)
    rig.kill()


def test_a_slot_is_free_when_the_last_run_is_installed(rig: ManualRig) -> None:
    kept = opened(rig.log)
    fill(rig, kept)
    free = len(rig.log._journal.free)
    seal(rig)
    while sealed(kept) < PARTITIONS:
        assert len(rig.log._journal.free) == free
        assert rig.log.sealing
        rig.loop.run_pass()
    rig.passes()
    assert len(rig.log._journal.free) == free + 1
    rig.kill()


def in_the_middle(rig: ManualRig, kept: Kept) -> None:
    seal(rig)
    while not sealed(kept):
        rig.loop.run_pass()
    assert sealed(kept) < PARTITIONS


def test_a_stop_during_installation_loses_nothing(rig: ManualRig) -> None:
    kept = opened(rig.log)
    fill(rig, kept)
    in_the_middle(rig, kept)
    rig.kill()
    rig.open()
    check(rig, {rig.log.partition(partition.incarnation): values for partition, values in kept.items()})
    rig.kill()


def planned(rig: ManualRig, _: Kept) -> None:
    rig.passes()


@pytest.mark.parametrize("reached", [planned, in_the_middle])
def test_records_dropped_or_trimmed_during_sealing_stay_removed(
    rig: ManualRig, reached: Callable[[ManualRig, Kept], None]
) -> None:
    kept = opened(rig.log)
    fill(rig, kept)
    reached(rig, kept)
    dropped, trimmed, *_ = (partition for partition in reversed(kept) if not len(partition.runs))
    rig.log.drop_partition(dropped.incarnation)
    rig.log.trim(trimmed.incarnation, 2)
    rig.log.commit()
    del kept[dropped]
    finish(rig)
    assert dropped.first_offset == dropped.next_offset
    assert trimmed.first_offset == 2
    check(rig, kept)
    rig.kill()
    rig.open()
    check(rig, {rig.log.partition(partition.incarnation): values for partition, values in kept.items()})
    rig.kill()


def test_published_batches_trimmed_after_planning_started_are_not_sealed(rig: ManualRig) -> None:
    partition = rig.log.open_partition(1)
    kept: Kept = {partition: [b"a", b"b", b"c"]}
    for value in (b"a", b"b"):
        rig.log.stage(TOKEN, partition, batch_of([value]), expires_at_us=NEVER_US, level=Level.WRITTEN, done=None)
    rig.log.publish([TOKEN], b"published", level=Level.WRITTEN, done=lambda _: None)
    rig.append(partition, [b"c"])
    rig.log.commit()
    fill(rig, kept)
    rig.passes()
    rig.log.trim(1, 1)
    rig.log.commit()
    finish(rig)
    assert [partition.runs.entry(number)[0] for number in range(len(partition.runs))] == [1]
    check(rig, kept)
    rig.kill()


def test_a_segment_whose_first_runs_are_trimmed_during_installation_survives(rig: ManualRig) -> None:
    kept = opened(rig.log)
    fill(rig, kept)
    in_the_middle(rig, kept)
    for partition in [partition for partition in kept if len(partition.runs)]:
        rig.log.drop_partition(partition.incarnation)
        del kept[partition]
    rig.log.commit()
    rig.log._sealer.remove_unneeded_soon()
    assert not rig.log._state.segments.dead
    finish(rig)
    (item,) = rig.log._state.segments.by_location.values()
    assert item.live == len(kept)
    check(rig, kept)
    rig.kill()


def test_the_state_is_encoded_in_passes_as_of_the_start_of_sealing(
    rig: ManualRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = opened(rig.log)
    for number in range(5):
        rig.change(b"%d" % number)
    taken = [0]

    def encoding() -> Encoding:
        begun = list(rig.memory.changes)

        def pieces() -> Iterator[bytes]:
            for change in begun:
                taken[0] += 1
                yield change + b"\n"

        return Encoding(pieces())

    monkeypatch.setattr(rig.memory, "encoding", encoding)
    fill(rig, kept)
    while not rig.workers["seal"].jobs:
        before = taken[0]
        rig.loop.run_pass()
        assert taken[0] <= before + 1
        rig.change(b"meanwhile")
        rig.log.commit()
    assert taken[0] == 5
    finish(rig)
    expected = list(rig.memory.changes)
    rig.kill()
    rig.open()
    assert rig.memory.restored
    assert rig.memory.changes == expected
    rig.kill()


def test_an_unchanged_state_is_encoded_once(rig: ManualRig, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = opened(rig.log)
    rig.change(b"change")
    begun: list[Encoding] = []
    encoding = rig.memory.encoding

    def counted() -> Encoding:
        begun.append(encoding())
        return begun[-1]

    monkeypatch.setattr(rig.memory, "encoding", counted)
    for _ in range(3):
        fill(rig, kept)
        finish(rig)
    assert len(begun) == 1
    check(rig, kept)
    rig.kill()
