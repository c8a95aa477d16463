"""Records that are sent with a delay or a time limit, in share groups."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest

from polywire.broker.changes import DELAYED_VERSION, SHARED_VERSION, ShareStored, decode_change, decode_snapshot
from polywire.broker.groups import delay_index, share_delays
from polywire.broker.groups.dead_letters import LAPSED
from polywire.delivery_times import DELAY_MS_MAX, DELIVER_AT, EXPIRES_AT
from polywire.log.base import Read
from polywire.records.columns import Header, HeaderKind, Record
from polywire.records.rows import from_records
from polywire.share_settings import AUTO_OFFSET_RESET, DEAD_LETTERS, UNFINISHED
from polywire.types import Level, Outcome
from tests.unit.broker.test_share_groups import ANYBODY, Queue

EAST: Final = timezone(timedelta(hours=1))


def header(name: str, value: str) -> Header:
    return Header(name.encode(), value.encode(), HeaderKind.STRING, HeaderKind.STRING)


class DelayedQueue(Queue):
    """One group that reads one partition, whose records have times."""

    def __init__(self, settings: dict[str, str] | None = None, delays: Path | None = None) -> None:
        super().__init__(settings, count=0, delays=delays)

    @property
    def now_ms(self) -> int:
        return self.memory.clock.now_us() // 1000

    def send(self, *times: float | str | None, header_name: str = DELIVER_AT) -> None:
        """Send one record for each time: seconds from now, the header's text, or None for no header."""
        records = []
        for time in times:
            text = str(self.now_ms + round(time * 1000)) if isinstance(time, int | float) else time
            records.append(Record(b"v", headers=() if text is None else (header(header_name, text),)))
        self.memory.broker.produce(self.partition, from_records(records), level=Level.WRITTEN, done=None)
        self.memory.run()

    def take(self, member: str = "m", count_max: int = 100, group: str = "g") -> list[int]:
        """Acquire all available records and return their offsets."""
        found: list[int] = []
        for _ in range(1000):
            assert self.shares.begin(group, self.partition, lambda _: None, by=ANYBODY) is None
            self.memory.run()
            if self.shares.next_offset(group, self.partition) is None:
                self.memory.run()  # keys are read from the log
            offset = self.shares.next_offset(group, self.partition)
            if offset is None or len(found) >= count_max:
                return found
            read = self.memory.broker.fetch(self.partition, offset, bytes_max=4096, then=lambda _: None)
            assert isinstance(read, Read)
            runs = self.shares.acquire(
                group,
                self.partition,
                member,
                offset,
                read.next_offset,
                count_max=count_max - len(found),
                done=lambda _: None,
                chunks=read.chunks,
            )
            self.memory.run()
            found += [at for first, last, _ in runs for at in range(first, last + 1)]
        raise AssertionError("acquiring does not end")

    def accept(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            assert self.acknowledge(offset) is None

    def waiting(self, group: str = "g") -> int:
        return int(self.shares.offsets(group, self.partition).scheduled)


def test_a_delayed_record_is_delivered_when_it_is_due_and_once() -> None:
    queue = DelayedQueue()
    queue.send(None, 10, None, 5)
    assert queue.take() == [0, 2]
    assert queue.waiting() == 2
    queue.accept([0, 2])
    queue.memory.advance(4)
    assert queue.take() == []
    queue.memory.advance(2)
    assert queue.take() == [3]
    assert queue.shares.offsets("g", queue.partition).start == 3
    queue.memory.advance(5)
    assert queue.take() == [1]
    assert queue.shares.offsets("g", queue.partition).start == 1, "a delayed record may be below the others"
    queue.accept([3, 1])
    assert queue.shares.offsets("g", queue.partition)[:3] == (4, 4, 0)
    assert queue.waiting() == 0
    queue.memory.advance(1000)
    assert queue.take() == []


def test_a_waiting_worker_is_woken_when_a_record_is_due() -> None:
    queue = DelayedQueue()
    queue.send(10)
    assert queue.take() == []
    woken: list[bool] = []
    queue.shares.wait("g", queue.partition, "m", lambda: woken.append(True))
    queue.memory.run()
    queue.memory.advance(9)
    assert not woken
    queue.memory.advance(2)
    assert woken
    assert queue.take() == [0]


@pytest.mark.parametrize("restarts", ["kill", "power loss", "snapshot"])
def test_delays_survive_a_restart(restarts: str) -> None:
    queue = DelayedQueue()
    queue.send(10, None, 20, None)
    assert queue.take() == [1, 3]
    queue.accept([1, 3])
    queue.memory.advance(11)
    assert queue.take() == [0]
    queue.accept([0])
    if restarts == "snapshot":
        snapshot = queue.memory.broker._state.snapshot()
        assert decode_snapshot(snapshot).version == DELAYED_VERSION
    queue.memory.advance(0.5)
    queue.memory.restart(synced_only=restarts == "power loss")
    assert queue.take() == []
    assert queue.waiting() == 1
    queue.memory.advance(10)
    assert queue.take() == [2]
    assert queue.waiting() == 0


def test_a_queue_without_delays_has_the_older_snapshot() -> None:
    queue = DelayedQueue()
    queue.send(None, -5)
    assert queue.take() == [0, 1]
    assert decode_snapshot(queue.memory.broker._state.snapshot()).version == SHARED_VERSION


def test_a_record_that_is_already_due_is_like_any_other() -> None:
    queue = DelayedQueue()
    queue.send(-10, 0, None)
    assert queue.take() == [0, 1, 2]


@pytest.mark.parametrize("text", ["", "soon", "-5", "2026-01-01T00:00:00", "9" * 30, "1e99", "\x00", "x" * 100])
def test_a_malformed_time_has_no_effect(text: str) -> None:
    queue = DelayedQueue()
    queue.send(text)
    assert queue.take() == [0]


def test_a_time_beyond_the_limit_has_no_effect() -> None:
    queue = DelayedQueue()
    queue.send(DELAY_MS_MAX / 1000 + 5, DELAY_MS_MAX / 1000 - 5)
    assert queue.take() == [0]


def test_a_time_may_be_text_of_rfc_3339_or_a_number() -> None:
    queue = DelayedQueue()
    due = datetime.fromtimestamp(queue.now_ms / 1000 + 60, UTC)
    queue.send(due.isoformat().replace("+00:00", "Z"), (due + timedelta(seconds=1)).astimezone(EAST).isoformat())
    number = Header(
        DELIVER_AT.encode(), (queue.now_ms + 60_000).to_bytes(8, "little"), HeaderKind.STRING, HeaderKind.INT64
    )
    queue.memory.broker.produce(
        queue.partition, from_records([Record(b"v", headers=(number,))]), level=Level.WRITTEN, done=None
    )
    assert queue.take() == []
    queue.memory.advance(60.1)
    assert queue.take() == [0, 2]
    queue.memory.advance(1)
    assert queue.take() == [1]


def test_each_group_gets_the_delayed_records() -> None:
    queue = DelayedQueue()
    queue.shares.directory.configure("h", {AUTO_OFFSET_RESET: "earliest"})
    queue.shares.directory.configure("late", {AUTO_OFFSET_RESET: "latest"})
    queue.send(10, None, 20)
    assert queue.take() == [1]
    assert queue.take(group="late") == []
    queue.memory.advance(11)
    assert queue.take() == [0]
    assert queue.take(group="h") == [0, 1]
    queue.send(3)
    assert queue.take(group="late") == []
    queue.memory.advance(4)
    assert queue.take() == [3]
    assert queue.take(group="late") == [3]
    assert queue.take(group="h") == [3]
    queue.memory.advance(10)
    assert queue.take() == queue.take(group="h") == [2]
    assert queue.take(group="late") == []


def test_records_that_are_due_wait_for_space_and_come_before_new_ones() -> None:
    queue = DelayedQueue({UNFINISHED: "100"})
    queue.send(*[10] * 150)
    queue.send(*[None] * 80)
    assert queue.take(count_max=1000) == list(range(150, 230))
    queue.send(*[None] * 200)
    queue.memory.advance(11)
    assert queue.take(count_max=1000) == list(range(20))
    queue.accept(range(150, 230))
    assert queue.take(count_max=1000) == list(range(20, 100))
    queue.accept(range(100))
    assert queue.take(count_max=1000) == [*range(100, 150), *range(230, 280)]
    queue.accept([*range(100, 150), *range(230, 280)])
    assert queue.take(count_max=1000) == list(range(280, 380))


def test_many_records_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_delays, "DUE_MAX", 7)
    monkeypatch.setattr(delay_index, "BACKLOG_MAX", 5)
    monkeypatch.setattr("polywire.broker.groups.delivery_marks.MARKS_MAX", 3)
    queue = DelayedQueue()
    queue.send(*[5 + number % 3 for number in range(40)])
    assert queue.take() == []
    queue.memory.advance(8)
    assert sorted(queue.take()) == list(range(40))


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    queue = DelayedQueue()
    queue.send(10, None)
    assert queue.take() == [1]
    queue.memory.clock.step(-3600)  # type: ignore[attr-defined]
    queue.send(5, 3700)
    assert queue.take() == [2], "an earlier record waits, so the cursor cannot move back"
    queue.accept([1, 2])
    queue.memory.advance(3_750)
    assert sorted(queue.take()) == [0, 3]
    queue.accept([0, 3])
    queue.memory.clock.step(-3600)  # type: ignore[attr-defined]
    queue.send(5)
    assert queue.take() == []
    queue.memory.advance(6)
    assert queue.take() == [4]


def test_records_that_retention_removed_are_not_delivered() -> None:
    queue = DelayedQueue()
    queue.send(10)
    queue.send(20)
    queue.send(None)
    assert queue.take() == [2]
    queue.accept([2])
    queue.memory.broker._log.trim(queue.partition.incarnation, 1)
    queue.memory.run()
    queue.memory.advance(30)
    assert queue.take() == [1]
    assert queue.waiting() == 0


def test_a_reset_skips_delayed_records_or_delivers_them_again() -> None:
    queue = DelayedQueue()
    queue.send(10, None)
    assert queue.take() == [1]
    queue.accept([1])
    queue.shares.alter_offsets("g", {queue.partition: 2}, done=lambda _: None)
    queue.memory.run()
    queue.memory.advance(11)
    assert queue.take() == []
    queue.send(10)
    assert queue.take() == []
    queue.shares.alter_offsets("g", {queue.partition: 0}, done=lambda _: None)
    assert queue.take() == [0, 1]
    queue.accept([0, 1])
    queue.memory.advance(10)
    assert queue.take() == [2]


def test_the_time_of_a_record_may_be_over() -> None:
    queue = DelayedQueue({DEAD_LETTERS: "dead"})
    queue.send(5, 100, header_name=EXPIRES_AT)
    queue.send(None)
    queue.memory.advance(6)
    assert queue.take() == [1, 2]
    queue.memory.run()
    assert queue.shares.counts("g", "t").lapsed == 1
    assert queue.shares.counts("g", "t").rejected == 0
    [letter] = queue.values("dead")
    facts: dict[str, Any] = {found.key.decode(): found.value for found in letter.headers}
    assert facts["dead.reason"] == LAPSED.encode()
    assert facts["dead.deliveries"] == b"0"
    assert EXPIRES_AT not in facts
    assert f"dead.{EXPIRES_AT}" in facts
    assert queue.acknowledge(1, outcome=Outcome.RELEASE) is None
    assert queue.take() == [1]
    assert queue.acknowledge(1, outcome=Outcome.RELEASE) is None
    queue.memory.advance(100)
    assert queue.take() == [2]
    assert queue.shares.counts("g", "t").lapsed == 2
    assert queue.shares.offsets("g", queue.partition)[:3] == (2, 3, 1)


def test_records_whose_time_is_over_need_no_dead_letter_topic() -> None:
    queue = DelayedQueue()
    queue.send(*[5] * 50, header_name=EXPIRES_AT)
    queue.memory.advance(6)
    assert queue.take() == []
    assert queue.shares.offsets("g", queue.partition)[:3] == (50, 50, 0)


def test_a_group_that_is_ahead_hides_no_record_from_one_that_is_behind(tmp_path: Path) -> None:
    """The index knows a span of offsets only with all of its delayed records, also those that are due for one group."""
    queue = DelayedQueue(delays=tmp_path / "delayed.db")
    queue.shares.directory.configure("late", {AUTO_OFFSET_RESET: "earliest"}, by=ANYBODY)
    queue.send(100, 5)
    assert queue.take(group="late") == []
    queue.memory.restart()  # before the index has the records
    queue.memory.advance(6)
    assert queue.take() == [1], "one is due, and this group has passed the other"
    queue.memory.advance(1)
    assert queue.take(group="late") == [1]


def test_the_index_is_never_ahead_of_the_log(tmp_path: Path) -> None:
    queue = DelayedQueue(delays=tmp_path / "delayed.db")
    queue.send(None)
    queue.memory.broker.settle(Level.SYNCED, lambda _: None)
    queue.send(5)
    syncs: list[Any] = []
    queue.memory.broker.shares._delay_index._sync = syncs.append  # type: ignore[misc]
    assert queue.take() == [0]
    queue.memory.advance(1)
    [synced] = syncs
    database = sqlite3.connect(tmp_path / "delayed.db")
    assert not database.execute("SELECT name FROM sqlite_master").fetchall(), "the record may be lost"
    synced(0)
    queue.memory.run()
    assert database.execute("SELECT offset FROM delayed").fetchall() == [(1,)]
    database.close()


def test_an_index_that_cannot_be_written_is_retried_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = DelayedQueue()
    queue.send(10, 20)
    assert queue.take() == []
    queue.memory.restart()
    puts = 0

    def put(*_: object) -> None:
        nonlocal puts
        puts += 1
        assert puts < 100, "it is retried without a pause"
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(delay_index, "_put", put)
        assert queue.take() == []
        queue.memory.advance(12)
        assert queue.take() == []
        assert 5 < puts < 30
    queue.memory.advance(2)
    assert queue.take() == [0]


def test_the_scan_waits_while_the_index_is_read() -> None:
    queue = DelayedQueue()
    queue.send(5, 10)
    assert queue.take() == []
    jobs: list[Any] = []
    queue.memory.broker.shares._delay_index._worker = SimpleNamespace(run=lambda *job: jobs.append(job))  # type: ignore[misc]
    queue.memory.advance(6)
    assert jobs, "the index is being read"
    queue.memory.clock.step(-3)  # type: ignore[attr-defined]
    queue.send(None)
    assert queue.take() == [], "the result would lack what is passed now"


def test_progress_that_an_older_broker_wrote_can_be_read() -> None:
    fields: list[Any] = [38, "g", 7, 1, 3, [1, 1, 2], {1: 5}]
    stored = decode_change(msgspec.msgpack.encode(fields))
    assert isinstance(stored, ShareStored)
    assert stored.cursor == ()


def test_records_before_the_new_beginning_of_a_group_stay_skipped() -> None:
    queue = DelayedQueue()
    queue.send(20)
    assert queue.take() == []
    queue.shares.alter_offsets("g", {queue.partition: 1}, done=lambda _: None)
    queue.send(5, 60)
    assert queue.take() == []
    queue.memory.advance(6)
    assert queue.take() == [1]
    queue.accept([1])
    queue.memory.advance(20)
    assert queue.take() == []
    queue.memory.advance(40)
    assert queue.take() == [2]


def test_a_group_that_is_behind_another_one_skips_nothing() -> None:
    queue = DelayedQueue()
    queue.shares.directory.configure("h", {AUTO_OFFSET_RESET: "earliest"})
    queue.send(5, None, None, 5)
    assert queue.take(count_max=1) == [1]
    assert queue.take(group="h") == [1, 2]
    queue.memory.advance(6)
    assert queue.take() == [0, 2, 3]


def test_the_cursor_does_not_pass_records_that_are_due_and_have_no_space() -> None:
    queue = DelayedQueue({UNFINISHED: "100"})
    queue.send(5)
    queue.send(*[None] * 100)
    assert queue.take(count_max=1000) == list(range(1, 101))
    queue.memory.advance(6)
    assert queue.acknowledge(100, outcome=Outcome.RELEASE) is None
    queue.send(3)
    assert queue.take() == [100]
    queue.accept(range(1, 101))
    assert queue.take() == [0]
    queue.memory.advance(4)
    assert queue.take() == [101]


def test_a_clock_that_is_set_ahead_does_not_hold_up_new_records() -> None:
    queue = DelayedQueue()
    queue.send(1800)
    assert queue.take() == []
    queue.memory.clock.step(3600)  # type: ignore[attr-defined]
    queue.send(None)
    assert sorted(queue.take()) == [0, 1]


def test_space_from_removed_records_is_used_for_delayed_ones() -> None:
    queue = DelayedQueue({UNFINISHED: "100"})
    queue.send(*(None,) * 99, 5, None, None)
    assert len(queue.take()) == 100
    queue.memory.advance(6)
    queue.memory.broker.trim_partition(queue.partition, 99, level=Level.WRITTEN)
    queue.memory.run()
    assert sorted(queue.take()) == [99, 101]
