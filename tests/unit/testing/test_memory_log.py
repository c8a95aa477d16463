"""The log in memory keeps those promises of the log port that the broker's tests do not check."""

from __future__ import annotations

import pytest

from polywire.errors import BrokerError, ErrorCode
from polywire.log.base import NO_OFFSET, Encoding
from polywire.records.columns import BatchHeader
from polywire.testing.loop import ManualLoop, SimulatedClock
from polywire.testing.memory_log import MemoryLog, MemoryPartition
from polywire.types import Level
from tests.unit.broker.answers import Answers, batch_by, batch_of


class Kept:
    """A ``Replay`` that records its calls."""

    def __init__(self) -> None:
        self.reported: list[object] = []

    def restore(self, snapshot: bytes) -> None:
        self.reported.append(("restore", snapshot))

    def apply(self, change: bytes) -> None:
        self.reported.append(change)

    def replayed(self, header: BatchHeader, producer_id: bytes) -> None:
        self.reported.append((producer_id, header.base_offset))

    def snapshot(self) -> bytes:
        return b"everything"

    def encoding(self) -> Encoding:
        return Encoding(iter((self.snapshot(),)))


@pytest.fixture
def loop() -> ManualLoop:
    return ManualLoop()


@pytest.fixture
def log(loop: ManualLoop) -> MemoryLog:
    return MemoryLog(loop, loop.clock, Kept())


def append(log: MemoryLog, partition: MemoryPartition, *values: bytes) -> None:
    log.append(partition, batch_of(*values), level=Level.WRITTEN, done=None)
    log.commit()


def refusal(log: MemoryLog, partition: MemoryPartition, offset: int) -> ErrorCode:
    with pytest.raises(BrokerError) as caught:
        partition.read(offset, bytes_max=10, then=lambda _: None)
    return caught.value.code


def test_reads_are_bounded_but_not_empty_if_there_are_records(log: MemoryLog) -> None:
    partition = log.open_partition(1)
    for value in (b"a", b"b", b"c"):
        append(log, partition, value, value)
    reads = [
        partition.read(1, bytes_max=1, then=lambda _: None),
        partition.read(1, bytes_max=10_000, then=lambda _: None, offset_end=3),
        partition.read(6, bytes_max=10_000, then=lambda _: None),
    ]
    assert [(len(read.chunks), read.next_offset) for read in reads] == [(1, 2), (2, 4), (0, 6)]
    assert refusal(log, partition, 7) is ErrorCode.OFFSET_OUT_OF_RANGE


def test_trimming_hides_earlier_records(log: MemoryLog) -> None:
    partition = log.open_partition(1)
    append(log, partition, b"a", b"b")
    append(log, partition, b"c")
    log.trim(1, 2)
    log.commit()
    assert (partition.first_offset, partition.next_offset) == (2, 3)
    assert refusal(log, partition, 1) is ErrorCode.OFFSET_OUT_OF_RANGE
    assert partition.address_of_offset(2, at_hand) == 22


def at_hand(_: object) -> None:
    raise AssertionError("memory needs no second call")


def test_lookups_by_time_and_address(log: MemoryLog, loop: ManualLoop) -> None:
    partition = log.open_partition(1)
    start = loop.clock.now_us()
    append(log, partition, b"a", b"bcd")
    loop.clock.advance(1)
    append(log, partition, b"e")
    loop.clock.step(-5)
    append(log, partition, b"f")
    assert [partition.offset_at(start + second * 1_000_000, at_hand) for second in (-1, 0, 1, 2)] == [0, 0, 2, 4]
    assert [partition.address_of_offset(offset, at_hand) for offset in range(5)] == [0, 11, 24, 35, 46]
    found = [partition.offset_of_address(address, at_hand) for address in (0, 11, 12, 24, 46, 47)]
    assert found == [0, 1, NO_OFFSET, 2, 4, NO_OFFSET]
    assert partition.last_append_time_us == start + 1_000_000


def test_epochs_identify_the_writer(log: MemoryLog) -> None:
    append(log, log.open_partition(1), b"a", b"b")
    again = log.reopen(Kept())
    partition = again.partition(1)
    append(again, partition, b"c")
    assert [partition.epoch_at(offset) for offset in range(4)] == [1, 1, 2, 2]
    assert [partition.epoch_end(epoch) for epoch in (1, 2)] == [2, 3]
    with pytest.raises(BrokerError):
        partition.epoch_end(3)


def test_recovery_replays_in_order_from_the_snapshot(log: MemoryLog) -> None:
    partition = log.open_partition(1)
    log.change(b"one", level=Level.WRITTEN, done=None)
    log.append(partition, batch_by(b"p", 0, 0, 2), level=Level.WRITTEN, done=None)
    log.commit()
    whole, rest = Kept(), Kept()
    again = log.reopen(whole)
    again.take_snapshot()
    again.change(b"two", level=Level.WRITTEN, done=None)
    again.append(again.partition(1), batch_by(b"p", 0, 2), level=Level.WRITTEN, done=None)
    again.commit()
    again.reopen(rest)
    assert whole.reported == [b"one", (b"p", 0)]
    assert rest.reported == [("restore", b"everything"), b"two", (b"p", 2)]


def test_a_group_has_a_limit_and_reserve_starts_a_new_one(log: MemoryLog) -> None:
    answers = Answers()
    log.change(b"x" * 10_000_000, level=Level.WRITTEN, done=answers)
    log.reserve(1000)
    assert log.group_count == 0
    log.reserve(10_000_000)
    assert (log.group_count, answers.offsets) == (1, []), "no callback runs inside the call"
    log.commit()
    assert answers.offsets == [-1]
    with pytest.raises(BrokerError) as caught:
        log.reserve(17_000_000)
    assert caught.value.code is ErrorCode.RECORD_TOO_LARGE


def test_barriers_cover_the_turn_they_are_added_to(log: MemoryLog, loop: ManualLoop) -> None:
    answers = Answers()
    partition = log.open_partition(1)
    log.append(partition, batch_of(b"v"), level=Level.MEMORY, done=None)
    log.barrier(Level.SYNCED, answers)
    log.commit()
    assert answers.offsets == []
    loop.run_due()
    assert answers.offsets == [-1]
    assert log.reopen(Kept(), synced_only=True).partition(1).next_offset == 1


def test_timers_run_in_order_of_their_times() -> None:
    ran: list[tuple[str, float]] = []
    loop = ManualLoop(SimulatedClock())

    def note(name: str) -> None:
        ran.append((name, loop.clock.monotonic()))

    loop.call_later(2, note, "late")
    loop.call_later(1, note, "early")
    loop.call_later(1, note, "never").cancel()
    loop.call_soon(note, "soon")
    loop.advance(1.5)
    assert ran == [("soon", 0.0), ("early", 1.0)]
    loop.advance(1)
    assert ran[-1] == ("late", 2.0)
    assert loop.clock.monotonic() == 2.5


def test_callbacks_that_never_end_are_detected() -> None:
    loop = ManualLoop()

    def again() -> None:
        loop.call_soon(again)

    loop.call_soon(again)
    with pytest.raises(AssertionError, match="without end"):
        loop.run_due()
