"""The queue of batches for a log that temporarily has no capacity."""

from __future__ import annotations

import pytest

from polywire.broker.owners import Caller
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid
from polywire.log.base import Completion, PartitionLog
from polywire.protocols.runtime.append_queue import BUSY_PAUSE_S, AppendQueue
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Buffer, Level
from tests.unit.broker.answers import batch_by
from tests.unit.broker.test_owners import guard, user

WAIT_S = 1.0
TOO_LARGE = b"x" * 100


class Door:
    """A log that accepts a set number of batches, and never ``TOO_LARGE``."""

    def __init__(self) -> None:
        self.memory = MemoryBroker()
        self.broker = self.memory.broker
        self.partition = self.broker.ensure_topic("t").partitions[0]
        self.room = 0
        self.reported: list[tuple[str, int | ErrorCode]] = []
        self._append = self.broker._append
        self.broker._append = self._let_in
        self.broker._log.append = self._let_in  # type: ignore[method-assign]  # what names a producer takes the long way
        self.append_queue = AppendQueue(self.broker, WAIT_S, self._gone_on)

    def _let_in(self, partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None) -> None:
        if TOO_LARGE in bytes(batch):
            raise Invalid(ErrorCode.RECORD_TOO_LARGE, "too large")
        if not self.room:
            raise Busy(ErrorCode.BUSY, "no room", retry_after_ms=5)
        self.room -= 1
        self._append(partition, batch, level=level, done=done)

    def _gone_on(self) -> None:
        self.reported.append(("gone on", 0))

    def send(self, value: bytes) -> None:
        def done(result: int | BrokerError) -> None:
            self.reported.append((value[:1].decode(), result.code if isinstance(result, BrokerError) else result))

        self.append_queue.produce(self.partition, from_records([Record(value)]), Level.WRITTEN, done)


@pytest.fixture
def door() -> Door:
    return Door()


def test_batches_with_capacity_do_not_wait(door: Door) -> None:
    door.room = 2
    door.send(b"a")
    door.send(b"b")
    assert not door.append_queue.waiting
    door.memory.run()
    assert door.reported == [("a", 0), ("b", 1)]


def test_waiting_batches_keep_their_order() -> None:
    door = Door()
    door.send(b"a")
    door.room = 1
    door.send(b"b")
    assert len(door.append_queue.waiting) == 2, "b has capacity and waits behind a"
    door.memory.advance(2 * BUSY_PAUSE_S)
    assert door.reported == [("a", 0)]
    door.room = 9
    door.memory.advance(2 * BUSY_PAUSE_S)
    assert sorted(door.reported[1:]) == [("b", 1), ("gone on", 0)]
    door.memory.advance(WAIT_S)
    assert len(door.reported) == 3


def test_many_waiting_batches_are_appended_in_several_passes(door: Door) -> None:
    loop, let_in = door.memory.loop, door.broker._append
    assert isinstance(loop, ManualLoop)
    clock = loop.clock
    passes: list[int] = []

    def slowly(partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None) -> None:
        let_in(partition, batch, level=level, done=done)
        clock.advance(QUANTUM_S / 4)

    door.broker._append = slowly
    for number in range(40):
        door.send(b"%d" % number)
    door.room = 40
    clock.advance(BUSY_PAUSE_S)
    while door.append_queue.waiting:
        before = len(door.append_queue.waiting)
        loop.run_pass()
        passes.append(before - len(door.append_queue.waiting))
    door.memory.run()
    assert max(passes) <= 5
    assert [number for what, number in door.reported if what != "gone on"] == list(range(40))


def test_batches_without_capacity_in_time_are_refused_and_later_ones_wait_again(door: Door) -> None:
    door.send(b"a")
    door.memory.advance(WAIT_S / 2)
    door.send(b"b")
    door.memory.advance(WAIT_S / 2 - BUSY_PAUSE_S)
    assert door.reported == []
    door.memory.advance(3 * BUSY_PAUSE_S)
    assert door.reported == [("a", ErrorCode.BUSY), ("b", ErrorCode.BUSY), ("gone on", 0)]
    door.send(b"c")
    door.memory.advance(WAIT_S / 2)
    assert len(door.reported) == 3


def test_a_batch_that_the_log_never_accepts_is_refused_in_its_turn(door: Door) -> None:
    door.send(b"a")
    door.send(TOO_LARGE)
    door.send(b"b")
    door.room = 2
    door.memory.advance(2 * BUSY_PAUSE_S)
    assert door.reported[0] == ("x", ErrorCode.RECORD_TOO_LARGE)
    assert sorted(door.reported[1:]) == [("a", 0), ("b", 1), ("gone on", 0)]


def test_a_refusal_is_delivered_by_the_loop_and_delays_later_batches(door: Door) -> None:
    """Never inside the call that submitted the batch (decision 0107)."""
    door.room = 1
    door.send(TOO_LARGE)
    assert door.reported == []
    door.send(b"b")
    assert len(door.append_queue.waiting) == 2, "b has capacity and waits for the refusal"
    door.memory.run()
    assert door.reported[0] == ("x", ErrorCode.RECORD_TOO_LARGE)
    assert sorted(door.reported[1:]) == [("b", 0), ("gone on", 0)]


def test_a_batch_after_a_refusal_has_the_full_waiting_time(door: Door) -> None:
    door.send(TOO_LARGE)
    door.send(b"b")
    door.memory.advance(WAIT_S / 2)
    assert door.reported == [("x", ErrorCode.RECORD_TOO_LARGE)]
    door.room = 1
    door.memory.advance(2 * BUSY_PAUSE_S)
    assert sorted(door.reported[1:]) == [("b", 0), ("gone on", 0)]


def test_batches_are_produced_as_the_sending_user(door: Door) -> None:
    """Whether they are accepted at once or wait: a producer of one user is refused to others."""
    guard(door.memory)
    alice, bob = user(door.memory, "alice"), user(door.memory, "bob")
    reported: list[tuple[Caller, int | ErrorCode]] = []

    def send(caller: Caller, sequence: int) -> None:
        def done(result: int | BrokerError) -> None:
            reported.append((caller, result.code if isinstance(result, BrokerError) else result))

        batch = batch_by(b"p", 0, sequence, 1)
        door.append_queue.produce(door.partition, batch, Level.WRITTEN, done, by=caller)

    door.room = 1
    send(alice, 0)
    send(alice, 1)
    assert len(door.append_queue.waiting) == 1
    door.room = 9
    door.memory.advance(2 * BUSY_PAUSE_S)
    send(bob, 2)
    door.memory.run()
    assert reported == [(alice, 0), (alice, 1), (bob, ErrorCode.DENIED)]


def test_a_refusal_can_drop_the_rest(door: Door) -> None:
    """A protocol without error responses closes the connection and stores nothing after the refusal."""
    refused: list[BrokerError] = []

    def end(done: Completion[int] | None, error: BrokerError) -> None:
        refused.append(error)
        append_queue.drop()

    append_queue = AppendQueue(door.broker, WAIT_S, door._gone_on, end)
    for value in (b"a", TOO_LARGE, b"b"):
        append_queue.produce(door.partition, from_records([Record(value)]), Level.WRITTEN, None)
    door.room = 9
    door.memory.advance(WAIT_S)
    assert [error.code for error in refused] == [ErrorCode.RECORD_TOO_LARGE]
    assert not append_queue.waiting
    assert door.partition.log.next_offset == 1, "earlier batches are stored"


def test_dropped_batches_are_not_retried(door: Door) -> None:
    door.send(b"a")
    door.append_queue.drop()
    door.room = 9
    door.memory.advance(WAIT_S)
    assert door.reported == []
    assert door.room == 9
