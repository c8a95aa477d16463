"""Share groups: acquire, acknowledge, locks, restarts, dead letters and administration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polywire.broker.changes import SHARED_VERSION, decode_snapshot
from polywire.broker.groups.share import NO_MEMBER, Batch, Run, SharePartition, ShareProgress
from polywire.broker.groups.share_members import LEAVING, READ_MAX, ShareBeat, assigned
from polywire.broker.owners import Caller, caller_of
from polywire.broker.settings import BrokerSettings
from polywire.broker.state import State
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Read
from polywire.records.columns import Record
from polywire.records.rows import from_records, to_records
from polywire.share_settings import (
    AUTO_OFFSET_RESET,
    DEAD_LETTERS,
    DELIVERIES,
    LOCK_DURATION,
    SESSION_TIMEOUT,
    UNFINISHED,
    decoded,
)
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, Outcome, TopicName

EARLIEST = {AUTO_OFFSET_RESET: "earliest"}


class Queue:
    """One group that reads one partition of a memory broker."""

    def __init__(
        self,
        settings: dict[str, str] | None = None,
        *,
        count: int = 5,
        broker_settings: BrokerSettings | None = None,
        delays: Path | None = None,
    ) -> None:
        self.memory = MemoryBroker(broker_settings, delays=delays)
        self.memory.broker.create_topic(TopicName.parse("t"), 2)
        self.shares.directory.configure("g", EARLIEST | (settings or {}))
        self.produce(count)

    @property
    def shares(self) -> Any:
        return self.memory.broker.shares

    @property
    def partition(self) -> Partition:
        return self.memory.broker.topic("t").partitions[0]

    def produce(self, count: int) -> None:
        if not count:
            return
        first = self.partition.log.next_offset
        records = [Record(f"v{first + number}".encode()) for number in range(count)]
        self.memory.broker.produce(self.partition, from_records(records), level=Level.WRITTEN, done=None)
        self.memory.run()

    def acquire(self, member: str = "m", count_max: int = 100) -> list[tuple[int, int, int]]:
        assert self.shares.begin("g", self.partition, lambda _: None, by=ANYBODY) is None
        offset = self.shares.next_offset("g", self.partition)
        if offset is None:
            return []
        done: list[Any] = []
        end = self.partition.log.next_offset
        runs = self.shares.acquire("g", self.partition, member, offset, end, count_max=count_max, done=done.append)
        self.memory.run()
        assert len(done) == bool(runs)
        return [tuple(run) for run in runs]

    def acknowledge(
        self,
        first: int,
        last: int | None = None,
        outcome: Outcome = Outcome.ACCEPT,
        member: str = "m",
        delay_s: float = 0.0,
    ) -> ErrorCode | None:
        done: list[Any] = []
        batches = [Batch(first, first if last is None else last, [outcome], delay_s)]
        try:
            self.shares.acknowledge("g", self.partition, member, batches, done=done.append)
        except BrokerError as error:
            return error.code
        self.memory.run()
        assert len(done) == 1
        assert not isinstance(done[0], BrokerError)
        return None

    def values(self, topic: str, partition: int = 0) -> list[Record]:
        log = self.memory.broker.topic(topic).partitions[partition].log
        read = log.read(log.first_offset, bytes_max=1 << 20, then=lambda _: None)
        assert isinstance(read, Read)
        return [record for chunk in read.chunks for record in records_of(chunk)]


def records_of(chunk: memoryview) -> list[Record]:
    found, at = [], 0
    while at < len(chunk):
        found += to_records(chunk, at)
        at += int.from_bytes(chunk[at + 4 : at + 8], "little")
    return found


ANYBODY: Caller = caller_of(None, "127.0.0.1:5000")


def code_of(call: Callable[[], object]) -> ErrorCode:
    with pytest.raises(BrokerError) as caught:
        call()
    return caught.value.code


def test_records_are_acquired_once_and_acknowledged() -> None:
    queue = Queue()
    assert queue.acquire("a", 2) == [(0, 1, 1)]
    assert queue.acquire("b") == [(2, 4, 1)]
    assert queue.acquire("a") == []
    assert queue.acknowledge(0, member="b") is ErrorCode.RECORD_NOT_ACQUIRED
    assert queue.acknowledge(2, 4, member="b") is None
    assert queue.shares.offsets("g", queue.partition)[:3] == (0, 5, 2)
    assert queue.acknowledge(0, 1, member="a") is None
    assert queue.shares.offsets("g", queue.partition)[:6] == (5, 5, 0, {}, 0, 5)
    assert queue.acknowledge(0, member="a") is ErrorCode.RECORD_NOT_ACQUIRED


def test_released_records_come_first_and_count_deliveries() -> None:
    queue = Queue(count=3)
    assert queue.acquire(count_max=2) == [(0, 1, 1)]
    assert queue.acknowledge(1, outcome=Outcome.RELEASE) is None
    assert queue.acquire("b") == [(1, 1, 2), (2, 2, 1)]


def test_a_lock_expires_unless_it_is_renewed() -> None:
    queue = Queue({LOCK_DURATION: "10000"}, count=2)
    assert queue.acquire("a") == [(0, 1, 1)]
    queue.memory.advance(6)
    assert queue.acknowledge(0, outcome=Outcome.RENEW, member="a") is None
    queue.memory.advance(6)
    assert queue.acquire("b") == [(1, 1, 2)]
    assert queue.acknowledge(1, member="a") is ErrorCode.RECORD_NOT_ACQUIRED
    assert queue.acknowledge(0, member="a") is None


@pytest.mark.parametrize("restart", [False, True])
def test_a_record_is_released_with_a_delay(restart: bool) -> None:
    queue = Queue(count=2)
    queue.acquire()
    assert queue.acknowledge(0, outcome=Outcome.RELEASE, delay_s=90) is None
    assert queue.acknowledge(1, outcome=Outcome.RELEASE) is None
    if restart:
        queue.memory.restart()
    assert queue.shares.offsets("g", queue.partition)[:6] == (0, 2, 2, {}, 1, 1), (
        "the delay is known before a member reads"
    )
    assert queue.acquire() == [(1, 1, 2)]
    assert queue.acknowledge(1) is None
    assert queue.shares.offsets("g", queue.partition)[:6] == (0, 2, 1, {}, 1, 2)
    queue.memory.advance(89)
    assert queue.acquire() == []
    queue.memory.advance(2)
    assert queue.acquire() == [(0, 0, 2)]


def test_a_delay_that_is_over_is_no_lock_after_a_restart() -> None:
    share = SharePartition(ShareProgress(0, 2, [Run(0, 1, 1)], {0: 1_000, 1: 1_001}), now=5.0, now_ms=1_000)
    assert share.holders() == {NO_MEMBER: 1}
    assert share.next_offset(100) == 0


def test_delivery_counts_survive_a_restart_and_locks_do_not() -> None:
    queue = Queue()
    assert queue.acquire("a", 3) == [(0, 2, 1)]
    assert queue.acknowledge(1, member="a") is None
    queue.memory.restart()
    assert queue.acquire("b") == [(0, 0, 2), (2, 2, 2), (3, 4, 1)]


@pytest.mark.parametrize("letters", ["", "dead"])
def test_a_full_disk_at_a_restart_gives_no_record_another_delivery(letters: str) -> None:
    queue = Queue({DELIVERIES: "2", DEAD_LETTERS: letters} if letters else {DELIVERIES: "2"}, count=1)
    queue.acquire("a")
    queue.memory.restart()
    assert queue.acquire("a") == [(0, 0, 2)]
    queue.memory.restart()
    queue.memory.log.disk_full = True
    if not letters:  # otherwise the copy waits, and nothing is stored now
        for _ in range(2):
            assert code_of(lambda: queue.acquire("a")) is ErrorCode.DISK_FULL
    queue.memory.log.disk_full = False
    assert queue.acquire("a") == []


def test_a_snapshot_has_the_whole_progress() -> None:
    queue = Queue()
    queue.acquire("a", 3)
    queue.acknowledge(1, member="a")
    state = queue.memory.broker._state
    snapshot = state.snapshot()
    assert decode_snapshot(snapshot).version == SHARED_VERSION
    restored = State(queue.memory.settings)
    restored.restore(snapshot)
    found = restored.shares.find("g", queue.partition.incarnation)
    assert found is not None
    assert (found.start, found.end, found.counts) == (0, 3, {0: 1, 2: 1})
    assert restored.shares.groups == state.shares.groups
    assert restored.usage.owners() == state.usage.owners()


def test_a_record_that_is_released_too_often_is_finished() -> None:
    queue = Queue({DELIVERIES: "2"}, count=1)
    for count in (1, 2):
        assert queue.acquire() == [(0, 0, count)]
        assert queue.acknowledge(0, outcome=Outcome.RELEASE) is None
    assert queue.acquire() == []
    assert queue.shares.offsets("g", queue.partition)[:6] == (1, 1, 0, {}, 0, 1)


def test_rejected_records_are_copied_to_the_dead_letter_topic() -> None:
    queue = Queue({DEAD_LETTERS: "t.dead", DELIVERIES: "2"}, count=3)
    queue.acquire()
    assert queue.acknowledge(0) is None
    assert queue.acknowledge(1, outcome=Outcome.REJECT) is None
    assert queue.acknowledge(2, outcome=Outcome.RELEASE) is None
    queue.acquire()
    assert queue.acknowledge(2, outcome=Outcome.RELEASE) is None
    letters = queue.values("t.dead")
    assert [letter.value for letter in letters] == [b"v1", b"v2"]
    headers = [{header.key: header.value for header in letter.headers} for letter in letters]
    assert headers[0] == {
        b"dead.reason": b"rejected by the consumer",
        b"dead.topic": b"t",
        b"dead.partition": b"0",
        b"dead.offset": b"1",
        b"dead.group": b"g",
        b"dead.deliveries": b"1",
    }
    assert (headers[1][b"dead.reason"], headers[1][b"dead.deliveries"]) == (b"delivered too often", b"2")
    assert queue.shares.offsets("g", queue.partition)[:6] == (3, 3, 0, {}, 0, 3)


def test_a_dead_letter_topic_that_cannot_be_written_does_not_hold_up_others() -> None:
    queue = Queue(count=2, broker_settings=BrokerSettings(auto_create=False))
    broker = queue.memory.broker
    for name in ("lost", "dead"):
        broker.create_topic(TopicName.parse(name), 1)
    queue.shares.directory.configure("g", EARLIEST | {DEAD_LETTERS: "lost"})
    queue.acquire(count_max=1)
    broker.delete_topic(broker.topic("lost"))
    done: list[Any] = []
    queue.shares.acknowledge("g", queue.partition, "m", [Batch(0, 0, [Outcome.REJECT], 0.0)], done=done.append)
    queue.memory.run()
    assert done == []
    queue.shares.directory.configure("g", EARLIEST | {DEAD_LETTERS: "dead"})
    queue.acquire()
    assert queue.acknowledge(1, outcome=Outcome.REJECT) is None
    assert [letter.value for letter in queue.values("dead")] == [b"v1"]
    broker.create_topic(TopicName.parse("lost"), 1)
    queue.memory.advance(1)
    assert [letter.value for letter in queue.values("lost")] == [b"v0"]
    assert len(done) == 1


def _with_stuck_letter() -> tuple[Queue, list[Any]]:
    """Return a queue whose first record was rejected, while its dead-letter topic is missing."""
    queue = Queue({}, count=0, broker_settings=BrokerSettings(auto_create=False))
    broker = queue.memory.broker
    broker.create_topic(TopicName.parse("dead"), 1)
    queue.shares.directory.configure("g", EARLIEST | {DEAD_LETTERS: "dead", DELIVERIES: "2"})
    queue.produce(5)
    queue.acquire(count_max=1)
    broker.delete_topic(broker.topic("dead"))
    done: list[Any] = []
    queue.shares.acknowledge("g", queue.partition, "m", [Batch(0, 0, [Outcome.REJECT], 0.0)], done=done.append)
    queue.memory.run()
    assert done == []
    return queue, done


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_rejection_of_a_record_that_is_deleted_is_answered(is_deleted: bool) -> None:
    queue, done = _with_stuck_letter()
    broker, partition = queue.memory.broker, queue.partition
    if is_deleted:
        broker.delete_topic(broker.topic("t"))
    else:
        broker.trim_partition(partition, 1, level=Level.WRITTEN)
    queue.memory.advance(2)
    assert len(done) == 1
    assert not isinstance(done[0], BrokerError)


@pytest.mark.parametrize("change", ["reset", "delete", "delete topic"])
def test_a_group_that_is_reset_forgets_its_rejected_records(change: str) -> None:
    queue, done = _with_stuck_letter()
    reported: list[Any] = []
    if change == "reset":
        queue.shares.alter_offsets("g", {queue.partition: 0}, done=reported.append)
    elif change == "delete":
        queue.shares.delete_offsets("g", [queue.partition], done=reported.append)
    else:
        queue.shares.delete_topic("g", queue.memory.broker.topic("t"), done=reported.append)
        queue.shares.directory.configure("g", EARLIEST)
    queue.memory.run()
    assert len(reported) == 1
    queue.memory.broker.create_topic(TopicName.parse("dead"), 1)
    queue.memory.advance(2)
    assert len(done) == 1
    assert queue.values("dead") == []
    assert queue.acquire() == [(0, 4, 1)]


def test_a_rejection_that_cannot_be_stored_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue({DEAD_LETTERS: "dead"}, count=2)
    queue.acquire()
    batches = [Batch(0, 0, [Outcome.REJECT]), Batch(1, 1, [Outcome.ACCEPT])]
    with monkeypatch.context() as patch:

        def busy(*_: Any, **__: Any) -> None:
            raise Busy(ErrorCode.DISK_FULL, "disk is full")

        patch.setattr(type(queue.memory.broker), "change_all", busy)
        with pytest.raises(Busy):
            queue.shares.acknowledge("g", queue.partition, "m", batches, done=lambda _: None)
    assert queue.shares.offsets("g", queue.partition).acquired == {"m": 2}
    queue.shares.acknowledge("g", queue.partition, "m", batches, done=lambda _: None)
    queue.memory.run()
    assert [letter.value for letter in queue.values("dead")] == [b"v0"]


def test_a_copy_and_the_end_of_its_record_are_one_write() -> None:
    queue = Queue({DEAD_LETTERS: "dead"}, count=2)
    queue.acquire()
    assert queue.acknowledge(0) is None
    log, steps = queue.memory.log, []
    for name in ("reserve", "append", "change"):
        verb = getattr(log, name)

        def noted(*args: Any, name: str = name, verb: Any = verb, **named: Any) -> Any:
            steps.append((name, args))
            return verb(*args, **named)

        setattr(log, name, noted)
    queue.memory.broker._append = log.append
    assert queue.acknowledge(1, outcome=Outcome.REJECT) is None
    assert [name for name, _ in steps] == ["reserve", "append", "change"]
    size, batch, change = steps[0][1][0], steps[1][1][1], steps[2][1][0]
    assert size >= len(batch) + len(change) + 2 * 40


def test_a_record_that_is_too_large_to_copy_does_not_hold_up_others() -> None:
    queue = Queue(count=0, broker_settings=BrokerSettings(batch_bytes_max=2_000, record_bytes_max=2_000))
    queue.shares.directory.configure("g", EARLIEST | {DEAD_LETTERS: "dead"})
    small = from_records([Record(b"small")])
    large = from_records([Record(b"." * (2_000 - len(from_records([Record(b"." * 1_000)])) + 1_000))])
    assert len(large) <= 2_000
    for batch in (large, small):
        queue.memory.broker.produce(queue.partition, batch, level=Level.WRITTEN, done=None)
    queue.memory.run()
    queue.acquire()
    batches = [Batch(0, 1, [Outcome.REJECT], 0.0)]
    queue.shares.acknowledge("g", queue.partition, "m", batches, done=lambda _: None)
    queue.memory.advance(2)
    assert [letter.value for letter in queue.values("dead")] == [b"small"]
    assert queue.shares.offsets("g", queue.partition)[:6] == (0, 2, 1, {}, 1, 2)


@pytest.mark.parametrize("ahead_s", [-3600, 7200])
def test_a_delay_ends_when_the_clock_is_corrected_after_a_restart(ahead_s: int) -> None:
    queue = Queue(count=1)
    queue.acquire()
    assert queue.acknowledge(0, outcome=Outcome.RELEASE, delay_s=600.0) is None
    queue.memory.clock.step(ahead_s)  # type: ignore[attr-defined]
    queue.memory.restart()
    if ahead_s < 0:
        assert queue.acquire() == []
        queue.memory.advance(650)
        assert queue.acquire() == []
        queue.memory.clock.step(-ahead_s)  # type: ignore[attr-defined]
        queue.memory.advance(61)
    assert queue.acquire() == [(0, 0, 2)]


def test_a_record_delivered_too_often_before_a_restart_is_not_delivered_again() -> None:
    queue = Queue({DEAD_LETTERS: "dead", DELIVERIES: "1"}, count=2)
    queue.acquire()
    queue.memory.restart()
    assert queue.acquire() == []
    queue.memory.run()
    assert [letter.value for letter in queue.values("dead")] == [b"v0", b"v1"]


def test_a_new_group_begins_at_the_end_or_at_a_time() -> None:
    queue = Queue({AUTO_OFFSET_RESET: "latest"})
    assert queue.acquire() == []
    queue.produce(1)
    assert queue.acquire() == [(5, 5, 1)]
    timed = Queue({AUTO_OFFSET_RESET: "by_duration:PT10S"}, count=2)
    timed.memory.advance(60)
    timed.produce(1)
    assert timed.acquire() == [(2, 2, 1)]


def test_trimmed_records_are_finished() -> None:
    queue = Queue()
    queue.acquire("a", 3)
    queue.memory.broker.trim_partition(queue.partition, 2, done=None)
    queue.memory.run()
    assert queue.acquire("b") == [(3, 4, 1)]
    assert queue.acknowledge(1, member="a") is ErrorCode.RECORD_NOT_ACQUIRED
    assert queue.shares.offsets("g", queue.partition)[0] == 2


def test_unfinished_records_are_limited() -> None:
    queue = Queue({UNFINISHED: "100"}, count=150)
    assert queue.acquire(count_max=1000) == [(0, 99, 1)]
    assert queue.acquire(count_max=1000) == []
    assert queue.acknowledge(50) is None
    assert queue.acquire(count_max=1000) == [(100, 100, 1)]


def test_members_that_wait_are_notified_one_after_another() -> None:
    queue = Queue(count=0)
    queue.acquire()
    woken: list[str] = []

    def take(name: str) -> None:
        woken.append(name)
        offset = queue.shares.next_offset("g", queue.partition)
        queue.shares.acquire("g", queue.partition, name, offset, offset + 1, count_max=1, done=None)

    def wait(name: str) -> None:
        queue.shares.wait("g", queue.partition, name, lambda: take(name))

    for name in "abc":
        wait(name)
    queue.memory.run()
    assert woken == []
    queue.produce(2)
    assert woken == ["a", "b"]
    assert queue.acknowledge(0, outcome=Outcome.RELEASE, member="a") is None
    assert woken == ["a", "b", "c"]


def test_heartbeats_join_stay_and_leave() -> None:
    queue = Queue()
    joined = queue.shares.members.beat("g", ShareBeat("a", 0, frozenset({"t"})))
    topic = queue.memory.broker.topic("t").id
    assert (joined.epoch > 0, dict(joined.assignment)) == (True, {topic: [0, 1]})
    assert queue.shares.members.beat("g", ShareBeat("a", joined.epoch)).assignment is None
    assert code_of(lambda: queue.shares.members.beat("g", ShareBeat("a", 99))) is ErrorCode.GENERATION_STALE
    assert code_of(lambda: queue.shares.members.beat("g", ShareBeat("b", 1))) is ErrorCode.MEMBER_MISSING
    queue.acquire("a")
    queue.shares.members.beat("g", ShareBeat("a", LEAVING))
    assert queue.acquire("b") == [(0, 4, 2)]
    assert queue.shares.members.view("g").members == ()


def test_a_silent_member_is_removed() -> None:
    queue = Queue({SESSION_TIMEOUT: "10000"})
    queue.shares.members.beat("g", ShareBeat("a", 0, frozenset({"t"})))
    queue.memory.advance(9)
    assert len(queue.shares.members.view("g").members) == 1
    queue.memory.advance(9)
    assert queue.shares.members.view("g").members == ()


@pytest.mark.parametrize(("members", "partitions"), [(1, 1), (1, 100), (3, 100), (50, 100), (7, 3), (1000, 40)])
def test_every_partition_and_every_member_is_assigned(members: int, partitions: int) -> None:
    found = [assigned(number, members, partitions) for number in range(members)]
    assert set().union(*found) == set(range(partitions))
    assert all(0 < len(one) <= max(READ_MAX, -(-partitions // members)) for one in found)
    assert all(len(set(one)) == len(one) for one in found)


def test_offsets_are_changed_only_without_members() -> None:
    queue = Queue()
    queue.acquire()
    queue.acknowledge(0, 4)
    done: list[Any] = []
    queue.shares.members.beat("g", ShareBeat("a", 0, frozenset({"t"})))
    change = {queue.partition: 1}
    assert code_of(lambda: queue.shares.alter_offsets("g", change, done=done.append)) is ErrorCode.GROUP_NOT_EMPTY
    queue.shares.members.beat("g", ShareBeat("a", LEAVING))
    queue.shares.alter_offsets("g", change, done=done.append)
    assert queue.acquire() == [(1, 4, 1)]
    assert code_of(lambda: queue.shares.delete("g")) is ErrorCode.GROUP_NOT_EMPTY
    queue.acknowledge(1, 4)
    queue.shares.delete_offsets("g", [queue.partition], done=done.append)
    assert queue.shares.offsets("g", queue.partition) is None
    queue.shares.delete("g")
    assert queue.shares.directory.names() == []
    assert code_of(lambda: queue.shares.delete("g")) is ErrorCode.GROUP_MISSING
    assert queue.memory.broker._state.usage.owners().keys() <= {0, -1}


def test_groups_of_other_kinds_keep_their_names() -> None:
    queue = Queue()
    queue.memory.broker.groups.join("c", "t", "m", wire="flux")
    beat = ShareBeat("a", 0, frozenset({"t"}))
    assert code_of(lambda: queue.shares.members.beat("c", beat)) is ErrorCode.GROUP_PROTOCOL_MISMATCH
    queue.shares.members.beat("s", beat)
    join = queue.memory.broker.groups.join
    assert code_of(lambda: join("s", "t", "m", wire="flux")) is ErrorCode.GROUP_PROTOCOL_MISMATCH


def test_a_deleted_topic_takes_its_progress_along() -> None:
    queue = Queue()
    queue.acquire()
    woken: list[int] = []
    queue.shares.wait("g", queue.partition, "m", lambda: woken.append(1))
    queue.memory.broker.delete_topic(queue.memory.broker.topic("t"))
    queue.memory.run()
    assert woken == [1]
    assert queue.shares.partitions("g") == []
    queue.shares.delete("g")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unknown", "1"),
        (DELIVERIES, "0"),
        (DELIVERIES, "1001"),
        (DELIVERIES, "x"),
        (LOCK_DURATION, "-1"),
        (AUTO_OFFSET_RESET, "never"),
        (AUTO_OFFSET_RESET, "by_duration:10"),
        (AUTO_OFFSET_RESET, "by_duration:P"),
        (DEAD_LETTERS, "a\n"),
    ],
)
def test_invalid_settings(name: str, value: str) -> None:
    queue = Queue()
    refused = code_of(lambda: queue.shares.directory.configure("g", {name: value}))
    assert refused in (ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_TOPIC)


def counts_of(queue: Queue) -> tuple[int, ...]:
    counts = queue.shares.counts("g", "t")
    return counts.accepted, counts.released, counts.rejected, counts.expired


@pytest.mark.parametrize("dead_letters", ["", "t.dead"])
def test_what_happens_to_records_is_counted(dead_letters: str) -> None:
    queue = Queue({LOCK_DURATION: "10000", DELIVERIES: "2", DEAD_LETTERS: dead_letters}, count=8)
    assert counts_of(queue) == (0, 0, 0, 0)
    queue.acquire()
    queue.acknowledge(0, 1)
    queue.acknowledge(2, outcome=Outcome.REJECT)
    queue.acknowledge(3, outcome=Outcome.RELEASE)
    queue.acknowledge(4, outcome=Outcome.RELEASE, delay_s=1)
    queue.acknowledge(5, outcome=Outcome.RENEW)
    assert counts_of(queue) == (2, 2, 1, 0)
    queue.memory.advance(11)
    assert counts_of(queue) == (2, 2, 1, 3), "the end of a delay is no expiry"
    queue.acquire("b")
    queue.shares.release_member("g", "b")
    queue.memory.run()
    assert counts_of(queue) == (2, 2, 6, 3), "all were delivered twice"
    queue.shares.delete("g")
    assert counts_of(queue) == (0, 0, 0, 0)


def test_a_failed_acknowledgement_counts_nothing() -> None:
    queue = Queue(count=2)
    queue.acquire("a", 1)
    assert queue.acknowledge(0, member="b") is ErrorCode.RECORD_NOT_ACQUIRED
    assert counts_of(queue) == (0, 0, 0, 0)


def test_counts_of_deleted_topics_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.broker.groups.share_groups.PRUNE_MIN", 4)
    queue = Queue(count=1)
    queue.shares._prune_above = 4
    broker = queue.memory.broker
    for number in range(40):
        broker.create_topic(TopicName.parse(f"t{number}"), 1)
        topic = broker.topic(f"t{number}")
        queue.shares.begin("g", topic.partitions[0], lambda _: None, by=ANYBODY)
        queue.shares.next_offset("g", topic.partitions[0])
        broker.delete_topic(topic, done=None)
    assert len(queue.shares._counts) < 10


def test_the_duration_of_locks_is_exact() -> None:
    assert [decoded({LOCK_DURATION: str(ms)}).lock_ms for ms in (1_001, 15_011, 30_000)] == [1_001, 15_011, 30_000]
    wrong = [ms for ms in range(1_000, 60_001) if decoded({LOCK_DURATION: str(ms)}).lock_ms != ms]
    assert wrong == []
