"""Producing and reading: admission, levels, idempotence, waits and bounds of one and of many partitions."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from polywire.broker.record_verbs import Bounds
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SLICE_S
from polywire.broker.state import State
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Unavailable
from polywire.log.base import Completion, Read
from polywire.records import batch as batches
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.loop import SimulatedClock
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, TopicName
from tests.unit.broker.answers import Answers, batch_by, batch_of

ORDERS = TopicName("default", "orders")


def partition_of(memory: MemoryBroker) -> Partition:
    return memory.broker.ensure_topic("orders").partitions[0]


def produced(memory: MemoryBroker, batch: bytearray, level: Level = Level.WRITTEN) -> int:
    """Produce and run until the acknowledgement."""
    answers = Answers()
    memory.broker.produce(partition_of(memory), batch, level=level, done=answers)
    memory.run()
    assert answers.errors == []
    return answers.offsets[0]


def refused(memory: MemoryBroker, batch: bytearray) -> ErrorCode:
    with pytest.raises(BrokerError) as caught:
        memory.broker.produce(partition_of(memory), batch, level=Level.WRITTEN, done=None)
    return caught.value.code


def test_records_get_consecutive_offsets_and_are_read_back(memory: MemoryBroker) -> None:
    assert [produced(memory, batch_of(b"a", b"b")), produced(memory, batch_of(b"c"))] == [0, 2]
    read = memory.broker.fetch(partition_of(memory), 1, bytes_max=10_000, then=lambda _: None)
    assert isinstance(read, Read)
    assert [batches.read_header(chunk).base_offset for chunk in read.chunks] == [0, 2]
    assert (read.next_offset, read.readable_offset) == (3, 3)


def test_levels_are_acknowledged_when_they_are_reached(memory: MemoryBroker) -> None:
    answers = {level: Answers() for level in Level}
    for level, answer in answers.items():
        memory.broker.produce(partition_of(memory), batch_of(b"v"), level=level, done=answer)
    assert not any(answer.offsets for answer in answers.values())
    memory.broker.commit()
    assert [len(answers[level].offsets) for level in Level] == [1, 1, 0, 0]
    memory.run()
    assert [answers[level].offsets for level in Level] == [[0], [1], [2], [3]]


def test_power_loss_drops_only_unsynced_records(memory: MemoryBroker) -> None:
    produced(memory, batch_of(b"synced"), Level.SYNCED)
    produced(memory, batch_of(b"written"), Level.WRITTEN)
    assert partition_of(memory).log.next_offset == 2
    memory.restart(synced_only=True)
    partition = partition_of(memory)
    assert partition.log.next_offset == 1
    assert partition.log.epoch_at(0) == 1
    assert partition.log.epoch_end(1) == 1


def test_synced_durability_hides_unsynced_records() -> None:
    memory = MemoryBroker(BrokerSettings(durability=Level.SYNCED))
    answers = Answers()
    partition = partition_of(memory)
    memory.broker.produce(partition, batch_of(b"v"), level=Level.MEMORY, done=answers)
    memory.broker.commit()
    assert (answers.offsets, partition.log.readable_offset) == ([], 0)
    memory.run()
    assert (answers.offsets, partition.log.readable_offset) == ([0], 1)


def test_batches_must_be_complete_and_within_limits() -> None:
    memory = MemoryBroker(BrokerSettings(record_bytes_max=1000, batch_bytes_max=4000))
    assert refused(memory, batch_of(b"v") + b"\0") is ErrorCode.INVALID_BATCH
    assert refused(memory, batch_of(b"v" * 1001)) is ErrorCode.RECORD_TOO_LARGE
    assert refused(memory, batch_of(*[b"v" * 1000] * 5)) is ErrorCode.RECORD_TOO_LARGE
    assert produced(memory, batch_of(*[b"v" * 1000] * 3)) == 0


def test_a_full_disk_refuses_and_recovers(memory: MemoryBroker) -> None:
    partition = partition_of(memory)
    memory.run()
    memory.log.disk_full = True
    with pytest.raises(Busy) as caught:
        memory.broker.produce(partition, batch_by(b"p", 0, 0), level=Level.WRITTEN, done=None)
    assert caught.value.code is ErrorCode.DISK_FULL
    with pytest.raises(Busy):
        memory.broker.create_topic(TopicName("default", "b"))
    assert memory.broker.find_topic("b") is None
    memory.log.disk_full = False
    assert produced(memory, batch_by(b"p", 0, 0)) == 0


def test_a_failed_disk_is_reported_to_every_waiting_producer(memory: MemoryBroker) -> None:
    original, repeat = Answers(), Answers()
    memory.broker.produce(partition_of(memory), batch_by(b"p", 0, 0), level=Level.WRITTEN, done=original)
    memory.broker.produce(partition_of(memory), batch_by(b"p", 0, 0), level=Level.WRITTEN, done=repeat)
    memory.log.fail()
    assert [type(error) for error in original.errors + repeat.errors] == [Unavailable, Unavailable]
    assert refused(memory, batch_of(b"v")) is ErrorCode.STORAGE_FAILED


def test_a_duplicate_gets_the_original_offset(memory: MemoryBroker) -> None:
    produced(memory, batch_of(b"before"))
    assert produced(memory, batch_by(b"p", 0, 0, 3)) == 1
    assert produced(memory, batch_by(b"p", 0, 3, 2)) == 4
    assert produced(memory, batch_by(b"p", 0, 0, 3)) == 1
    assert produced(memory, batch_by(b"p", 0, 1, 2)) == 2
    assert partition_of(memory).log.next_offset == 6


def test_a_duplicate_in_the_same_turn_waits_for_the_original(memory: MemoryBroker) -> None:
    original, repeat = Answers(), Answers()
    memory.broker.produce(partition_of(memory), batch_by(b"p", 0, 7), level=Level.WRITTEN, done=original)
    memory.broker.produce(partition_of(memory), batch_by(b"p", 0, 7), level=Level.SYNCED, done=repeat)
    memory.broker.commit()
    assert (original.offsets, repeat.offsets) == ([0], [])
    memory.run()
    assert repeat.offsets == [0]
    assert partition_of(memory).log.next_offset == 1


def test_a_duplicate_waits_for_the_level_it_requests(memory: MemoryBroker) -> None:
    produced(memory, batch_by(b"p", 0, 0), Level.WRITTEN)
    repeat = Answers()
    memory.broker.produce(partition_of(memory), batch_by(b"p", 0, 0), level=Level.SYNCED, done=repeat)
    memory.run()
    assert repeat.offsets == [0]
    assert memory.restart(synced_only=True).topic("orders").partitions[0].log.next_offset == 1


def test_gaps_overlaps_and_unseen_sequences_are_refused(memory: MemoryBroker) -> None:
    produced(memory, batch_by(b"p", 0, 5, 3))
    assert refused(memory, batch_by(b"p", 0, 9)) is ErrorCode.SEQUENCE_GAP
    assert refused(memory, batch_by(b"p", 0, 7, 2)) is ErrorCode.SEQUENCE_GAP
    assert refused(memory, batch_by(b"p", 0, 4)) is ErrorCode.SEQUENCE_GAP
    assert produced(memory, batch_by(b"p", 0, 8)) == 3


def test_epochs_fence(memory: MemoryBroker) -> None:
    produced(memory, batch_by(b"p", 3, 0))
    assert produced(memory, batch_by(b"p", 4, 0)) == 1
    with pytest.raises(Conflict) as caught:
        memory.broker.produce(partition_of(memory), batch_by(b"p", 3, 1), level=Level.WRITTEN, done=None)
    assert caught.value.code is ErrorCode.PRODUCER_FENCED
    assert produced(memory, batch_by(b"p", 4, 1)) == 2


def test_a_duplicate_outside_the_window_is_still_detected() -> None:
    memory = MemoryBroker(BrokerSettings(producer_window=2))
    for sequence in range(5):
        produced(memory, batch_by(b"p", 0, sequence))
    assert produced(memory, batch_by(b"p", 0, 0)) == -1
    assert produced(memory, batch_by(b"p", 0, 4)) == 4
    assert partition_of(memory).log.next_offset == 5


@pytest.mark.parametrize("snapshot", [False, True])
def test_producers_are_known_after_a_restart(memory: MemoryBroker, snapshot: bool) -> None:
    produced(memory, batch_by(b"p", 2, 0, 2))
    if snapshot:
        memory.log.take_snapshot()
    produced(memory, batch_by(b"p", 2, 2))
    memory.restart()
    assert produced(memory, batch_by(b"p", 2, 0, 2)) == 0
    assert produced(memory, batch_by(b"p", 2, 2)) == 2
    assert refused(memory, batch_by(b"p", 2, 4)) is ErrorCode.SEQUENCE_GAP
    assert refused(memory, batch_by(b"p", 1, 3)) is ErrorCode.PRODUCER_FENCED
    assert produced(memory, batch_by(b"p", 2, 3)) == 3


def test_a_snapshot_between_write_and_sync_has_the_sequence_but_not_the_offset(memory: MemoryBroker) -> None:
    answers = Answers()
    memory.broker.produce(partition_of(memory), batch_by(b"p", 0, 0), level=Level.SYNCED, done=answers)
    memory.log.take_snapshot()
    assert answers.offsets == []
    memory.restart()
    assert produced(memory, batch_by(b"p", 0, 0)) == -1
    assert partition_of(memory).log.next_offset == 1


def test_idle_producers_are_forgotten_and_their_number_is_bounded() -> None:
    memory = MemoryBroker(BrokerSettings(producers_max=2, producer_expiry_us=1_000_000))
    for producer in (b"a", b"b", b"c"):
        produced(memory, batch_by(producer, 5, 0))
    assert produced(memory, batch_by(b"a", 0, 0)) == 3
    assert refused(memory, batch_by(b"c", 0, 0)) is ErrorCode.PRODUCER_FENCED
    memory.advance(1.1)
    assert produced(memory, batch_by(b"c", 0, 0)) == 4
    assert produced(memory, batch_by(b"c", 0, 1)) == 5


def step(memory: MemoryBroker, days: float) -> None:
    """Set the wall clock, as an operator may."""
    assert isinstance(memory.clock, SimulatedClock)
    memory.clock.step(days * 86_400)


def test_a_wall_clock_set_forward_and_back_forgets_no_producer(memory: MemoryBroker) -> None:
    produced(memory, batch_by(b"p", 0, 0))
    for days in (31, -31, -31, 31):
        step(memory, days)
        assert produced(memory, batch_by(b"p", 0, 0)) == 0
        memory.restart()
        assert produced(memory, batch_by(b"p", 0, 0)) == 0
    step(memory, -31)
    produced(memory, batch_by(b"p", 0, 1))  # stored in the past
    step(memory, 31)
    memory.restart()
    assert [produced(memory, batch_by(b"p", 0, number)) for number in (0, 1, 2)] == [0, 1, 2]


def test_a_forgotten_producer_that_restarted_is_known_after_a_restart() -> None:
    memory = MemoryBroker(BrokerSettings(producer_expiry_us=1_000_000))
    for number in range(3):
        produced(memory, batch_by(b"p", 0, number))
    memory.advance(1.1)
    assert produced(memory, batch_by(b"p", 0, 0)) == 3
    memory.restart()
    assert produced(memory, batch_by(b"p", 0, 0)) == 3
    assert produced(memory, batch_by(b"p", 0, 1)) == 4


def test_producer_expiry_counts_elapsed_time_across_restarts() -> None:
    memory = MemoryBroker(BrokerSettings(producer_expiry_us=10_000_000))
    produced(memory, batch_by(b"p", 5, 0))
    memory.advance(6)
    produced(memory, batch_by(b"q", 5, 0))
    memory.restart()
    memory.advance(11)
    assert [produced(memory, batch_by(producer, 0, 0)) for producer in (b"p", b"q")] == [2, 3]


def test_a_producer_without_an_epoch_is_only_recorded(memory: MemoryBroker) -> None:
    assert [produced(memory, batch_by(b"p", -1, 4)) for _ in range(2)] == [0, 1]


def test_waits_wake_once_when_there_is_something(memory: MemoryBroker) -> None:
    woken: list[int] = []
    partition = partition_of(memory)
    memory.broker.wait(partition, 1, lambda: woken.append(1))
    produced(memory, batch_of(b"a"))
    assert woken == []
    produced(memory, batch_of(b"b"))
    produced(memory, batch_of(b"c"))
    assert woken == [1]


def test_reading_bounds_syncs_first(memory: MemoryBroker) -> None:
    reported: list[Bounds | BrokerError] = []
    produced(memory, batch_of(b"ab", b"c"), Level.WRITTEN)
    memory.broker.bounds(partition_of(memory), then=reported.append)
    assert reported == []
    memory.run()
    assert reported == [Bounds(first_offset=0, next_offset=2, epoch=1, next_address=23)]
    assert memory.restart(synced_only=True).topic("orders").partitions[0].log.next_offset == 2


def test_replaying_a_batch_twice_changes_nothing(memory: MemoryBroker) -> None:
    gone = memory.broker.ensure_topic("gone")
    ended = gone.partitions[0]
    memory.broker.produce(ended, batch_by(b"p", 0, 0), level=Level.WRITTEN, done=None)
    for epoch, base in ((0, 0), (0, 1), (3, 0), (3, 1)):
        produced(memory, batch_by(b"p", epoch, base))
    memory.broker.delete_topic(gone)
    memory.run()
    state = memory.log.state()
    recovered = State(memory.settings)
    recovered.restore(state)
    read = memory.broker.fetch(partition_of(memory), 0, bytes_max=10_000, then=lambda _: None)
    assert isinstance(read, Read)
    headers = [batches.read_header(chunk) for chunk in read.chunks]
    for header in (replace(headers[0], partition=ended.incarnation), *headers):
        recovered.replayed(header, b"p")
    assert recovered.snapshot() == state


WIDE_COUNT = 500


def wide_memory() -> MemoryBroker:
    memory = MemoryBroker()
    memory.broker.create_topic(TopicName("default", "wide"), WIDE_COUNT)
    memory.run()
    return memory


def test_one_sync_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = wide_memory()
    broker, partitions = memory.broker, memory.broker.topic("wide").partitions
    broker.produce(partitions[7], from_records([Record(b"v")] * 3), level=Level.WRITTEN, done=None)
    broker.commit()
    log = broker._log
    asked: list[Level] = []
    barrier = log.barrier

    def counted(level: Level, done: Completion[int]) -> None:
        asked.append(level)
        barrier(level, done)

    monkeypatch.setattr(type(log), "barrier", lambda _, level, done: counted(level, done))
    reported: list[list[Bounds] | BrokerError] = []
    broker.many_bounds(partitions, then=reported.append)
    assert not reported, "the callback ran inside the call"
    memory.run()
    assert asked == [Level.SYNCED]
    (found,) = reported
    assert isinstance(found, list)
    assert [bounds.next_offset for bounds in found] == [3 if number == 7 else 0 for number in range(WIDE_COUNT)]


def test_bounds_of_a_topic_deleted_meanwhile_are_an_error() -> None:
    memory = wide_memory()
    broker, topic = memory.broker, memory.broker.topic("wide")
    reported: list[list[Bounds] | BrokerError] = []
    broker.many_bounds(topic.partitions, then=reported.append)
    broker.delete_topic(topic, done=None)
    memory.run()
    (error,) = reported
    assert isinstance(error, BrokerError)
    assert error.code is ErrorCode.PARTITION_MISSING


def test_slices_stay_small() -> None:
    assert SLICE_S <= 0.005, "twenty milliseconds are what everybody else may wait for all of a pass"
