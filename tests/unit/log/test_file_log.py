"""The log at its limits: full write batches, full disks, pinned slots, cold segments, appends from callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from polywire.clock import ElapsedClock
from polywire.errors import BrokerError, Busy, ErrorCode, Unavailable
from polywire.log.base import Completion
from polywire.log.journal.group import GROUP_HEADER_BYTES
from polywire.log.log import FileLog
from polywire.log.partition.partition import FilePartition
from polywire.testing.loop import SimulatedClock
from polywire.types import Buffer, Level
from tests.unit.log.rig import SMALL, Rig, batch_of

NEVER = 2**62
TOKEN = b"t" * 16
BIG = replace(SMALL, group_bytes_max=16 * 1024)


def fill_slot(rig: Rig, partition: FilePartition) -> None:
    """Append until another slot is written."""
    slot = rig.log._journal.current
    while rig.log._journal.current is slot:
        rig.append(partition, [b"%d" % partition.next_offset + b"." * 2000])
        rig.log.commit()


def test_naming_segments_never_makes_a_group_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, BIG)
    partition = rig.log.open_partition(1)
    fill_slot(rig, partition)
    rig.log.commit()
    limit = rig.log.settings.group_limit
    while (capacity := rig.log._writer.capacities[0] - rig.log._writer.write_batch.size) > 4096:
        rig.log.change(bytes(min(capacity - 32, 4096)), level=Level.WRITTEN, done=None)
    rig.log.change(bytes(capacity - 32), level=Level.WRITTEN, done=None)
    assert rig.log._writer.write_batch.size + GROUP_HEADER_BYTES == limit
    sizes: list[int] = []
    write = rig.log._journal.write

    def note(parts: Sequence[Buffer], size: int, sequence: int) -> int:
        sizes.append(size)
        return write(parts, size, sequence)

    monkeypatch.setattr(rig.log._journal, "write", note)
    rig.log.name_sealed(0, [1], [], lambda: None)
    assert len(sizes) == 2
    assert max(sizes) <= limit
    rig.kill()


def test_a_full_disk_lets_waiting_producers_continue_and_be_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(SMALL, slot_count_min=4))
    partition = rig.log.open_partition(1)
    rig.log._sealer._stopped = True
    while not rig.log.congested or rig.log._writer.capacities[0] > 4000:
        rig.append(partition, [b"." * 2000])
        rig.log.commit()
    reported: list[int] = []
    rig.log.barrier(Level.SYNCED, lambda _: reported.append(0))
    rig.loop.run_until(lambda: reported)
    reported.clear()
    rig.log.on_relief(lambda: reported.append(1))
    rig.loop.run_pass()
    assert not reported
    rig.log.seal_failed(Busy(ErrorCode.DISK_FULL, "disk is full"))
    rig.loop.run_until(lambda: reported)
    with pytest.raises(Busy) as refused:
        rig.append(partition, [b"refused"])
    assert refused.value.code is ErrorCode.DISK_FULL
    rig.log.close()


def test_expiry_is_retried_when_the_journal_has_no_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, SMALL)
    partition = rig.log.open_partition(1)
    rig.log.stage(TOKEN, partition, batch_of([b"staged"]), expires_at_us=0, level=Level.WRITTEN, done=None)
    rig.log.expire_by(ElapsedClock(SimulatedClock(), 0), age_us_max=0)
    rig.log.commit()
    rig.log._writer.capacities = (1, 1, 1)
    monkeypatch.setattr(rig.log, "_refresh", lambda: None)
    timers = len(rig.loop._timers)
    rig.log._expire_timer()
    assert len(rig.loop._timers) == timers + 1
    assert rig.log._state.staging.get(TOKEN) is not None
    monkeypatch.undo()
    rig.log._refresh()
    rig.log._expire_timer()
    rig.log.commit()
    assert rig.log._state.staging.get(TOKEN) is None
    rig.log.close()


def test_no_callback_runs_inside_an_append(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SMALL)
    partition = rig.log.open_partition(1)
    rig.log.stage(TOKEN, partition, batch_of([b"first"]), expires_at_us=NEVER, level=Level.WRITTEN, done=None)
    reported: list[str] = []

    def publish(result: int | BrokerError) -> None:
        assert not isinstance(result, BrokerError), result
        reported.append("written")
        rig.log.publish([TOKEN], b"published", level=Level.WRITTEN, done=lambda _: reported.append("published"))

    rig.log.change(
        bytes(rig.log._writer.capacities[0] - rig.log._writer.write_batch.size - 5000),
        level=Level.WRITTEN,
        done=publish,
    )
    second = batch_of([b"." * 6000])
    rig.log.stage(TOKEN, partition, second, expires_at_us=NEVER, level=Level.WRITTEN, done=None)
    assert reported == [], "writing the first batch for the second must not run its callback inside the call"
    rig.settle()
    assert reported == ["written", "published"]
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1)) == [b"first", b"." * 6000]
    rig.log.close()


@pytest.mark.parametrize("how", ["restarts", "slots"])
def test_a_token_staged_into_several_segments_keeps_its_order(tmp_path: Path, how: str) -> None:
    rig = Rig(tmp_path, SMALL)
    wanted: list[bytes] = []
    rig.log.open_partition(1)
    for size in (3, 4000, 50):
        partition = rig.log.partition(1)
        wanted.append(b"." * size)
        rig.log.stage(TOKEN, partition, batch_of(wanted[-1:]), expires_at_us=NEVER, level=Level.WRITTEN, done=None)
        rig.log.commit()
        if how == "slots":
            fill_slot(rig, rig.log.open_partition(10 + size))
            rig.loop.run_until(lambda: not rig.log.sealing)
        else:
            rig.kill()
            rig.open()
    rig.kill()
    rig.open()
    rig.log.publish([TOKEN], b"published", level=Level.SYNCED, done=lambda _: None)
    rig.settle()
    assert rig.read(rig.log.partition(1)) == wanted
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1)) == wanted
    rig.log.close()


def test_slots_after_a_pinned_one_are_sealed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(SMALL, slot_count_min=4))
    partition = rig.log.open_partition(1)
    rig.log.stage(TOKEN, partition, batch_of([b"staged"]), expires_at_us=NEVER, level=Level.WRITTEN, done=None)
    rig.append(partition, [b"0"])
    rig.log.commit()
    found = rig.read_once(partition, 0)
    fill_slot(rig, partition)
    fill_slot(rig, partition)
    rig.loop.run_until(lambda: rig.log.sealing == 1 and len(rig.log._sealer._parked) == 1)
    found.pin.release()
    rig.loop.run_until(lambda: not rig.log.sealing)
    rig.log.close()


def test_callbacks_during_close_cannot_append(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SMALL)
    partition = rig.log.open_partition(1)
    rig.log.commit()
    reported: list[str] = []

    def more(log: FileLog, level: Level) -> Completion[int]:
        def done(result: int | BrokerError) -> None:
            assert not isinstance(result, BrokerError), result
            try:
                log.append(partition, batch_of([b"more"]), level=level, done=lambda _: reported.append("answered"))
            except Unavailable:
                reported.append("refused")

        return done

    rig.log.append(partition, batch_of([b"one"]), level=Level.WRITTEN, done=more(rig.log, Level.SYNCED))
    rig.log.append(partition, batch_of([b"two"]), level=Level.SYNCED, done=more(rig.log, Level.WRITTEN))
    rig.log.close()
    assert sorted(reported) == ["answered", "refused"]
    rig.loop.run_pass()
    rig.open()
    assert rig.read(rig.log.partition(1)) == [b"one", b"two", b"more"]
    rig.log.close()


def test_holding_the_log_suppresses_the_scheduled_commit(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    rig.settle()
    rig.log.hold(True)
    reported = rig.append(partition, [b"held"])
    rig.loop.run_pass()
    assert rig.log.uncommitted
    rig.log.commit()
    assert reported == [0]
    reported = rig.append(partition, [b"still held"])
    rig.loop.run_pass()
    assert not reported, "a commit does not end it"
    rig.log.hold(False)
    rig.log.commit()
    assert reported == [1]
    reported = rig.append(partition, [b"behind it"])
    rig.loop.run_pass()
    assert reported == [2], "the log is not held any more"
    reported = rig.append(partition, [b"before it is held"])
    rig.log.hold(True)
    rig.loop.run_pass()
    assert reported == [3], "a commit that is scheduled already stays"
    rig.log.close()
