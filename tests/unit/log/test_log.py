"""The log on files: levels, limits, failures and readers. It needs a disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb

import pytest

from polywire.clock import ElapsedClock
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid, Missing, Unavailable
from polywire.log.base import Read
from polywire.log.partition.partition import FilePartition
from polywire.log.worker import Pending
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.loop import SimulatedClock
from polywire.types import Level
from tests.unit.log.rig import SMALL, Memory, Rig, batch_of, expecting, records_of

QUIET = replace(SMALL, sync_interval_ms=600_000)
FAR = 2**62
TOKEN = b"t" * 16


def fill_slot(rig: Rig, partition: FilePartition) -> None:
    """Append until one more slot is full."""
    before = rig.log._journal.current
    while rig.log._journal.current is before:
        rig.append(partition, [b"x" * 1000])
        rig.log.commit()


# Write batches


def test_the_loop_writes_a_turn(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    reported = rig.append(partition, [b"a", b"b"])
    more = rig.append(partition, [b"c"])
    assert (reported, more, partition.next_offset) == ([], [], 0)
    rig.loop.run_pass()
    assert (reported, more, partition.next_offset) == ([0], [2], 3)
    assert rig.read(partition) == [b"a", b"b", b"c"]
    rig.log.close()


def test_small_batches_of_a_turn_are_merged(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition, other = rig.log.open_partition(1), rig.log.open_partition(2)
    reported = [rig.append(which, [b"%d" % number]) for number in range(50) for which in (partition, other)]
    keyed: list[int] = []
    rig.log.append(partition, from_records([Record(b"v", key=b"k")]), level=Level.WRITTEN, done=expecting(keyed))
    large = rig.append(partition, [b"x" * 5000])
    rig.log.commit()
    assert [offset for (offset,) in reported[::2]] == [offset for (offset,) in reported[1::2]] == list(range(50))
    assert (keyed, large) == ([50], [51])
    assert (len(partition.tail), len(other.tail)) == (3, 1)
    assert rig.read(partition)[:51] == [*(b"%d" % number for number in range(50)), b"v"]
    rig.log.close()


def test_read_only_batches_are_not_changed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    batch = bytes(batch_of([b"x" * 5000]))
    for _ in range(2):
        rig.log.append(partition, batch, level=Level.MEMORY, done=None)
    rig.log.commit()
    assert batch == bytes(batch_of([b"x" * 5000]))
    assert rig.read(partition) == [b"x" * 5000] * 2
    rig.log.close()


def test_callbacks_may_append_and_commit(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    order: list[int] = []

    def again(offset: int | BrokerError) -> None:
        assert not isinstance(offset, BrokerError), offset
        order.append(offset)
        if offset < 5:
            rig.log.append(partition, batch_of([b"v"]), level=Level.WRITTEN, done=again)
            rig.log.commit()

    rig.log.append(partition, batch_of([b"v"]), level=Level.WRITTEN, done=again)
    second = rig.append(partition, [b"w"])
    rig.log.commit()
    assert order == [0, 2, 3, 4, 5]
    assert second == [1]
    rig.log.close()


def test_reserve_puts_several_appends_into_one_group(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    limit = rig.settings.group_limit
    first = rig.append(partition, [b"x" * (limit // 2)])
    rig.log.reserve(limit // 2)
    assert not rig.log.uncommitted, "the write batch was written to free space"
    assert not first, "no callback ran inside the call"
    rig.loop.run_pass()
    assert first == [0]
    with pytest.raises(Invalid) as refused:
        rig.log.reserve(limit + 1)
    assert refused.value.code is ErrorCode.RECORD_TOO_LARGE
    rig.log.close()


# Levels


def test_synced_waits_for_the_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path, QUIET)
    partition = rig.log.open_partition(1)
    written, synced = rig.append(partition, [b"a"]), rig.append(partition, [b"b"], Level.SYNCED)
    rig.log.commit()
    assert (written, synced) == ([0], [])
    rig.loop.run_until(lambda: synced)
    assert rig.log.synced_sequence == rig.log._writer.sequence
    rig.log.close()


def test_durability_synced_raises_every_level(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(QUIET, durability=Level.SYNCED))
    partition = rig.log.open_partition(1)
    woken: list[int] = []
    rig.log.wait(partition, 0, lambda: woken.append(partition.readable_offset))
    reported = rig.append(partition, [b"a"], Level.MEMORY)
    rig.log.commit()
    assert (reported, partition.readable_offset, partition.next_offset) == ([], 0, 1)
    assert not rig.read_once(partition, 0).chunks
    rig.loop.run_until(lambda: reported)
    rig.loop.run_until(lambda: woken)
    assert (partition.readable_offset, woken) == (1, [1])
    rig.log.close()


def test_a_sync_acknowledges_only_the_writes_before_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(QUIET, durability=Level.SYNCED))
    partition = rig.log.open_partition(1)
    rig.hold_syncs(True)
    rig.log.append(partition, batch_of([b"a"]), level=Level.WRITTEN, done=None)
    rig.log.commit()
    first = rig.log._writer.sequence
    later = rig.append(partition, [b"b"])
    rig.log.commit()
    rig.synced(first)
    assert (later, rig.read(partition)) == ([], [b"a"])
    rig.synced(rig.log._writer.sequence)
    assert (later, rig.read(partition)) == ([1], [b"a", b"b"])
    rig.hold_syncs(False)
    rig.log.close()


def test_a_disk_that_became_full_during_a_write_is_noticed_after_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, QUIET)
    partition = rig.log.open_partition(1)
    rig.append(partition, [b"a"])
    rig.log._disk.full = True  # as the check of the free space at the start of a journal file finds
    rig.log.commit()
    with pytest.raises(Busy) as refused:
        rig.append(partition, [b"b"])
    assert refused.value.code is ErrorCode.DISK_FULL
    assert rig.read(partition) == [b"a"]
    rig.log.close()


def test_written_is_synced_soon(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SMALL)
    rig.append(rig.log.open_partition(1), [b"a"])
    rig.log.commit()
    rig.loop.run_until(lambda: rig.log.synced_sequence == rig.log._writer.sequence)
    rig.log.close()


def test_barrier_covers_earlier_commits(tmp_path: Path) -> None:
    rig = Rig(tmp_path, QUIET)
    partition = rig.log.open_partition(1)
    rig.append(partition, [b"a"])
    reported: list[int] = []
    rig.log.barrier(Level.SYNCED, expecting(reported))
    rig.loop.run_until(lambda: reported)
    again: list[int] = []
    rig.log.barrier(Level.SYNCED, expecting(again))
    rig.log.commit()
    assert again == [-1], "nothing was written since"
    rig.log.close()


# Limits


def test_a_full_journal_is_busy_until_slots_are_free(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(SMALL, slot_count_max=2))
    partition = rig.log.open_partition(1)
    reported: list[list[int]] = []

    def append_for_ever() -> None:
        while True:
            reported.append(rig.append(partition, [b"x" * 1000]))
            rig.log.commit()

    with pytest.raises(Busy) as refused:
        append_for_ever()
    assert refused.value.retry_after_ms
    assert rig.log.congested
    rig.change(b"changes still have room")
    relieved: list[bool] = []
    rig.log.on_relief(lambda: relieved.append(True))
    rig.loop.run_until(lambda: relieved)
    rig.append(partition, [b"y"])
    rig.settle()
    assert len(rig.read(partition)) == len(reported) + 1
    rig.log.close()


def test_a_full_disk_refuses_only_appends(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(SMALL, disk_reserve_bytes=1 << 62))
    partition = rig.log.open_partition(1)
    with pytest.raises(Busy) as refused:
        rig.append(partition, [b"x"])
    assert refused.value.code is ErrorCode.DISK_FULL
    reported = rig.change(b"still possible")
    rig.log.commit()
    assert reported == [-1]
    rig.log.close()


def test_staging_has_a_limit(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(SMALL, staged_bytes_max=2000))
    partition = rig.log.open_partition(1)
    stage(rig, partition, TOKEN, [b"x" * 1000])
    with pytest.raises(Busy) as refused:
        stage(rig, partition, TOKEN, [b"x" * 1000])
    assert refused.value.code is ErrorCode.STAGE_FULL
    rig.log.abandon([TOKEN])
    rig.log.commit()
    stage(rig, partition, TOKEN, [b"x" * 1000])
    rig.log.close()


def test_a_pinned_slot_is_not_overwritten(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(SMALL, slot_count_max=2))
    partition = rig.log.open_partition(1)
    rig.append(partition, [b"first" * 10])
    rig.log.commit()
    found = rig.read_once(partition, 0)
    before = bytes(found.chunks[0])
    fill_slot(rig, partition)
    rig.loop.run_until(lambda: not rig.log._sealer._queue and len(partition.runs))
    assert rig.log.sealing == 1
    assert not rig.log._journal.free
    assert bytes(found.chunks[0]) == before
    found.pin.release()
    found.pin.release()
    rig.loop.run_until(lambda: rig.log._journal.free)
    rig.log.close()


# Staging


def stage(rig: Rig, partition: FilePartition, token: bytes, values: list[bytes], expires_at_us: int = FAR) -> None:
    rig.log.stage(token, partition, batch_of(values), expires_at_us=expires_at_us, level=Level.WRITTEN, done=None)


def publish(rig: Rig, tokens: Sequence[bytes]) -> list[Sequence[tuple[int, int, int]]]:
    reported: list[Sequence[tuple[int, int, int]]] = []

    def done(ranges: Sequence[tuple[int, int, int]] | BrokerError) -> None:
        assert not isinstance(ranges, BrokerError), ranges
        reported.append(ranges)

    rig.log.publish(tokens, b"published", level=Level.WRITTEN, done=done)
    return reported


def test_publish_numbers_in_token_order(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    one, two = rig.log.open_partition(1), rig.log.open_partition(2)
    other = b"o" * 16
    stage(rig, one, TOKEN, [b"t1"])
    stage(rig, one, other, [b"o1", b"o2"])
    stage(rig, two, other, [b"o3"])
    rig.append(one, [b"before"])
    assert rig.log.staged_partitions([other]) == {1, 2}
    reported = publish(rig, [other, TOKEN])
    rig.append(one, [b"after"])
    rig.log.commit()
    assert reported == [[(1, 1, 4), (2, 0, 1)]]
    assert rig.read(one) == [b"before", b"o1", b"o2", b"t1", b"after"]
    assert rig.read(two) == [b"o3"]
    with pytest.raises(Missing):
        rig.log.staged_partitions([TOKEN])
    rig.log.close()


@pytest.mark.parametrize("number", [10, 11])
def test_a_start_after_a_kill_replays_a_limited_number_of_changes(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polywire.log.log.CHANGES_MAX", 10)
    rig = Rig(tmp_path)
    changes = [b"%d" % change for change in range(number)]
    for change in changes:
        rig.change(change)
        rig.log._expire()
    rig.settle()
    rig.change(b"last")
    rig.settle()
    rig.kill()
    replayed: list[bytes] = []
    apply = Memory.apply

    def recorded(memory: Memory, change: bytes) -> None:
        replayed.append(change)
        apply(memory, change)

    monkeypatch.setattr(Memory, "apply", recorded)
    rig.open()
    assert rig.memory.changes == [*changes, b"last"]
    assert replayed == ([b"last"] if number > 10 else rig.memory.changes)
    rig.log.close()


def test_a_large_state_is_not_encoded_after_few_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.log.log.CHANGES_MAX", 3)
    rig = Rig(tmp_path)
    rig.memory.apply(bytes(64 * 9))
    sealed = []
    for number in range(25):
        rig.change(b"x")
        current = rig.log._journal.current
        rig.log._expire()
        rig.settle()
        if rig.log._journal.current is not current:
            sealed.append(number + 1)
    assert sealed == [4, 14, 24], "the state has nine times the bytes of a change"
    rig.log.close()


def test_expired_tokens_cannot_be_published(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    clock = SimulatedClock()
    stage(rig, rig.log.open_partition(1), TOKEN, [b"t"], expires_at_us=5_000_000)
    rig.log.expire_by(ElapsedClock(clock, 0), age_us_max=5_000_000)
    clock.step(1_000_000)
    rig.log._expire()
    assert rig.log.staged_partitions([TOKEN]) == {1}, "the wall clock was set"
    clock.step(-2_000_000)
    clock.advance(5)
    with pytest.raises(Missing) as refused:
        publish(rig, [TOKEN])
    assert refused.value.code is ErrorCode.STAGE_MISSING
    rig.log._expire()
    rig.log.commit()
    assert len(rig.log._state.staging) == 0
    rig.log.close()


def test_batches_staged_before_a_restart_expire_whatever_the_wall_clock_was(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    stage(rig, rig.log.open_partition(1), TOKEN, [b"t"], expires_at_us=FAR)
    rig.log.close()
    rig.open()
    clock = SimulatedClock()
    rig.log.expire_by(ElapsedClock(clock, 0), age_us_max=5_000_000)
    clock.advance(4)
    assert rig.log.staged_partitions([TOKEN]) == {1}
    clock.advance(1)
    with pytest.raises(Missing):
        rig.log.staged_partitions([TOKEN])
    rig.log.close()


def test_staged_bytes_survive_their_slot_and_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    stage(rig, partition, TOKEN, [b"staged"])
    fill_slot(rig, partition)
    rig.settle()
    rig.kill()
    rig.open()
    partition = rig.log.partition(1)
    before = partition.next_offset
    reported = publish(rig, [TOKEN])
    rig.log.commit()
    assert reported == [[(1, before, before + 1)]]
    fill_slot(rig, partition)
    rig.settle()
    assert rig.read(partition, before)[0] == b"staged"
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1), before)[0] == b"staged"
    rig.log.close()


# Segments


def test_fully_trimmed_segments_are_deleted(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    for _ in range(3):
        fill_slot(rig, partition)
        rig.settle()
    files = list((tmp_path / "segments").iterdir())
    assert len(files) == 3
    rig.loop.run_until(lambda: len(list((tmp_path / "snapshots").iterdir())) == 1)
    rig.log.trim(1, partition.next_offset)
    rig.log.commit()
    rig.log._sealer.remove()
    rig.loop.run_until(lambda: not list((tmp_path / "segments").iterdir()))
    assert partition.stored_bytes == 0
    rig.kill()
    rig.open()
    assert rig.log.partition(1).first_offset == rig.log.partition(1).next_offset == partition.next_offset
    rig.log.close()


@pytest.mark.parametrize("purged", [False, True])
@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("begin", [1 << 40, 1 << 62])
def test_an_empty_partition_begins_at_another_offset(tmp_path: Path, purged: bool, is_clean: bool, begin: int) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    if purged:
        fill_slot(rig, partition)
        rig.settle()
        rig.log.trim(1, partition.next_offset)
    rig.log.begin(1, begin)
    rig.log.commit()
    assert partition.first_offset == partition.next_offset == partition.readable_offset == begin
    for _ in range(2):
        rig.log.begin(1, 5)  # not above the present one
        rig.log.commit()
        if is_clean:
            rig.log.close()
        else:
            rig.kill()
        rig.open()
        partition = rig.log.partition(1)
        assert partition.first_offset == partition.next_offset == begin
    fill_slot(rig, partition)
    rig.settle()
    rig.log.append(partition, batch_of([b"last"]), level=Level.MEMORY, done=None)
    rig.log.commit()
    end = partition.next_offset
    rig.kill()
    rig.open()
    partition = rig.log.partition(1)
    assert (partition.first_offset, partition.next_offset) == (begin, end)
    assert records_of(rig.read_once(partition, begin))[0].offset == begin
    assert records_of(rig.read_once(partition, end - 1))[0].value == b"last"
    with pytest.raises(Missing):
        rig.read_once(partition, begin - 1)
    rig.log.close()


def test_unreferenced_segments_are_deleted(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    fill_slot(rig, partition)
    rig.settle()
    rig.log.close()
    named = sorted((tmp_path / "segments").iterdir())
    (tmp_path / "segments" / "00000001-000000ff.pws").write_bytes(b"left")
    (tmp_path / "segments" / ".00000001-000000fe.pws.abc").write_bytes(b"left")
    (tmp_path / "snapshots" / "00000001-000000ff.pwt").write_bytes(b"left")
    rig.open()
    rig.loop.run_until(lambda: not rig.log._disk.deleter._running)
    assert set(named) == set((tmp_path / "segments").iterdir())
    assert not [path for path in (tmp_path / "segments").iterdir() if path.read_bytes() == b"left"]
    assert len(list((tmp_path / "snapshots").iterdir())) == 1
    rig.log.close()


def test_reads_continue_from_segments_into_the_tail(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    fill_slot(rig, partition)
    rig.settle()
    rig.append(partition, [b"tail"])
    rig.log.commit()
    found = rig.read_once(partition, 0, 1 << 30)
    assert found.next_offset == partition.next_offset
    assert records_of(found)[-1].value == b"tail"
    found.pin.release()
    with pytest.raises(Missing) as refused:
        rig.read_once(partition, partition.next_offset + 1)
    assert refused.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
    rig.log.close()


def test_a_cold_read_completes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    fill_slot(rig, partition)
    rig.settle()
    monkeypatch.setattr("polywire.store.file.FileBlob.read_now", lambda *_: False)
    answers: list[Read | BrokerError] = []
    assert isinstance(partition.read(0, bytes_max=5000, then=answers.append), Pending)
    assert not answers
    rig.loop.run_until(lambda: answers)
    assert isinstance(answers[0], Read)
    assert records_of(answers[0])[0].offset == 0
    rig.log._state.reader.forget(partition)
    assert isinstance(partition.read(0, bytes_max=6000, then=answers.append), Pending), (
        "what was read before is not cached"
    )
    rig.log.drop_partition(1)
    rig.log.commit()
    rig.loop.run_until(lambda: len(answers) == 2)
    assert isinstance(answers[1], Missing), "the partition was dropped while its bytes were fetched"
    rig.log.close()


def test_dropped_partitions_use_no_memory(tmp_path: Path) -> None:
    """A journal file has space for the creation and deletion of hundreds of thousands of partitions."""
    rig = Rig(tmp_path)
    for incarnation in range(1, 4):
        partition = rig.log.open_partition(incarnation)
        rig.append(partition, [b"a"])
        rig.log.commit()
        if incarnation > 1:
            rig.log.drop_partition(incarnation)
            rig.log.commit()
    (contents,) = rig.log._state.contents.values()
    assert [partition.incarnation for partition in contents.partitions] == [1]
    rig.log.close()


# Waits and closing


def test_waits_wake_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    woken: list[str] = []
    rig.log.wait(partition, 0, lambda: woken.append("first"))
    rig.log.wait(partition, 1, lambda: woken.append("second"))
    rig.log.wait(partition, 0, lambda: woken.append("cancelled")).cancel()
    rig.append(partition, [b"a"])
    rig.log.commit()
    assert woken == ["first"]
    rig.log.wait(partition, 0, lambda: woken.append("late"))
    assert woken == ["first"], "the callback ran inside the call"
    rig.loop.run_pass()
    assert woken == ["first", "late"]
    rig.log.drop_partition(1)
    rig.loop.run_pass()
    assert woken == ["first", "late", "second"], "the partition was dropped"
    with pytest.raises(Missing):
        rig.append(partition, [b"b"])
    assert rig.log._waits.count == 0
    rig.log.close()


def test_a_failed_write_stops_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, QUIET)
    partition = rig.log.open_partition(1)
    synced = rig.append(partition, [b"kept"], Level.SYNCED)
    failures: list[BrokerError] = []
    refused: list[int | BrokerError] = []
    rig.log.on_failure(failures.append)
    rig.loop.run_until(lambda: synced)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "pwritev", broken)
    rig.log.append(partition, batch_of([b"lost"]), level=Level.WRITTEN, done=refused.append)
    rig.log.commit()
    rig.loop.run_pass()
    assert [type(error) for error in refused] == [Unavailable]
    assert len(failures) == 1
    monkeypatch.undo()
    for _ in range(30):
        with pytest.raises(Unavailable) as after:
            rig.append(partition, [b"never again"])
        assert after.value.code is ErrorCode.STORAGE_FAILED
    assert len([*walk_tb(after.value.__traceback__)]) < 10, "it does not grow with each request"
    rig.log.close()
    rig.open()
    assert rig.read(rig.log.partition(1)) == [b"kept"]
    rig.log.close()


def test_a_failed_sync_is_never_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, QUIET)
    partition = rig.log.open_partition(1)
    calls: list[int] = []

    def broken(_: object, start: int, __: int) -> None:
        calls.append(start)
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr("polywire.store.system_files.SystemMapping.flush", broken)
    refused: list[int | BrokerError] = []
    failures: list[BrokerError] = []
    rig.log.on_failure(failures.append)
    rig.log.append(partition, batch_of([b"v"]), level=Level.SYNCED, done=refused.append)
    rig.loop.run_until(lambda: failures)
    assert [type(error) for error in refused] == [Unavailable]
    rig.log.close()
    assert len(calls) == 1
    monkeypatch.undo()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    rig.settle()
    whole = os.pwritev

    def short(descriptor: int, parts: Sequence[bytes], position: int) -> int:
        joined = b"".join(parts)
        return whole(descriptor, [joined[: max(len(joined) // 3, 1)]], position)

    monkeypatch.setattr(os, "pwritev", short)
    for number in range(5):
        rig.append(partition, [b"%d" % number * 500])
        rig.log.commit()
    monkeypatch.undo()
    values = [b"%d" % number * 500 for number in range(5)]
    assert rig.read(partition) == values
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1)) == values
    rig.log.close()


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(Busy, match=f"pid={os.getpid()}"):
        Rig(tmp_path)
    rig.log.close()
    Rig(tmp_path).log.close()


def test_a_closed_log_refuses(tmp_path: Path) -> None:
    rig = Rig(tmp_path, QUIET)
    partition = rig.log.open_partition(1)
    reported = rig.append(partition, [b"v"], Level.SYNCED)
    rig.log.close()
    assert reported == [0], "closing syncs and completes appends"
    rig.log.close()
    answers: list[object] = []
    for request in (
        lambda: rig.append(partition, [b"w"]),
        lambda: partition.read(0, bytes_max=1000, then=answers.append),
        lambda: partition.offset_of_address(0, answers.append, covering=True),
    ):
        with pytest.raises(Unavailable) as refused:
            request()
        assert refused.value.code is ErrorCode.STOPPING


def test_producers_are_replayed_and_the_snapshot_is_restored(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    for number in range(3):
        batch = from_records([Record(b"v")], producer_id=b"me", producer_epoch=0, base_sequence=number)
        rig.log.append(partition, batch, level=Level.WRITTEN, done=None)
        rig.change(b"%d" % number)
    rig.log.commit()
    rig.kill()
    rig.open()
    assert rig.memory.producers == [(b"me", 0), (b"me", 1), (b"me", 2)]
    assert rig.memory.changes == [b"0", b"1", b"2"]
    assert rig.memory.restored == 0
    rig.kill()
    rig.open()
    assert rig.memory.producers == [], "producers are in the snapshot"
    assert (rig.memory.changes, rig.memory.restored) == ([b"0", b"1", b"2"], 1)
    rig.log.close()


def test_memory_of_epochs_and_times(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for _ in range(3):
        try:
            partition = rig.log.partition(1)
        except Missing:
            partition = rig.log.open_partition(1)
        rig.append(partition, [b"a", b"b"])
        rig.log.commit()
        rig.kill()
        rig.open()
    partition = rig.log.partition(1)
    assert [partition.epoch_at(offset) for offset in range(7)] == [1, 1, 2, 2, 3, 3, 4]
    assert [partition.epoch_end(epoch) for epoch in (1, 2, 3, 4)] == [2, 4, 6, 6]
    for epoch in (0, 5):
        with pytest.raises(Missing):
            partition.epoch_end(epoch)
    times = [records_of(rig.read_once(partition, offset))[0].append_time_us for offset in (0, 2, 4)]
    assert [rig.look_up(partition.offset_at, time) for time in times] == [0, 2, 4]
    assert rig.look_up(partition.offset_at, times[0] + 1) == 2
    now = partition.last_append_time_us
    assert partition.retention_offset(age_us_max=now - times[1], bytes_max=None, now_us=now) == 2
    assert partition.retention_offset(age_us_max=None, bytes_max=1, now_us=now) == 6
    rig.log.trim(1, 2)
    rig.log.commit()
    assert partition.epoch_end(1) == 2
    rig.log.close()
