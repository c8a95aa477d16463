"""Producers whose sequences wrap around: Kafka's rules, and producer ids (spec: kafka#idempotent-producers)."""

from __future__ import annotations

import pytest

from polywire.broker.producers import OFFSET_UNKNOWN, WRAP
from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, ErrorCode
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level
from tests.unit.broker.answers import Answers, batch_by

ID = b"k" + (7).to_bytes(8, "big")


def partition_of(memory: MemoryBroker, number: int = 0) -> Partition:
    return memory.broker.ensure_topic("orders").partitions[number]


def begin(memory: MemoryBroker, epoch: int, sequence: int, count: int = 1, number: int = 0) -> Answers:
    """Produce as a protocol with wrapping sequences does, without waiting for the acknowledgement."""
    partition, answers = partition_of(memory, number), Answers()
    base = memory.broker.producer_sequence(partition, ID, epoch=epoch, sequence=sequence)
    memory.broker.produce(partition, batch_by(ID, epoch, base, count), level=Level.WRITTEN, done=answers)
    return answers


def produced(memory: MemoryBroker, epoch: int, sequence: int, count: int = 1, number: int = 0) -> int:
    """Return the offset of the batch's first record."""
    answers = begin(memory, epoch, sequence, count, number)
    memory.run()
    assert answers.errors == []
    return answers.offsets[0]


def refused(memory: MemoryBroker, epoch: int, sequence: int, count: int = 1) -> ErrorCode:
    with pytest.raises(BrokerError) as caught:
        begin(memory, epoch, sequence, count)
    return caught.value.code


def test_producer_ids_are_never_reused(memory: MemoryBroker) -> None:
    given = [memory.broker.new_producer_id() for _ in range(3)]
    for synced_only in (False, True):
        memory.restart(synced_only=synced_only)
        given += [memory.broker.new_producer_id() for _ in range(3)]
    assert len(set(given)) == len(given)
    assert all(0 <= id_ < 2**63 for id_ in given)


def test_an_unknown_producer_may_start_at_any_sequence(memory: MemoryBroker) -> None:
    assert produced(memory, 3, 1000) == 0
    assert produced(memory, 3, 1001) == 1


def test_the_last_five_batches_are_acknowledged_again_with_their_offsets(memory: MemoryBroker) -> None:
    offsets = [produced(memory, 0, 2 * at, 2) for at in range(9)]
    assert offsets == [2 * at for at in range(9)]
    for at in range(4, 9):
        assert produced(memory, 0, 2 * at, 2) == 2 * at
    assert produced(memory, 0, 18) == 18


def test_duplicates_in_flight_wait_for_the_original(memory: MemoryBroker) -> None:
    flight = [begin(memory, 0, at) for at in range(5)] + [begin(memory, 0, at) for at in range(5)]
    memory.run()
    assert [answers.offsets for answers in flight] == [[at] for at in range(5)] * 2


def test_a_duplicate_outside_the_window_is_detected_without_an_offset() -> None:
    memory = MemoryBroker(BrokerSettings(producer_window=5))
    for at in range(7):
        produced(memory, 0, at)
    assert produced(memory, 0, 0) == OFFSET_UNKNOWN
    assert produced(memory, 0, 1, 2) == OFFSET_UNKNOWN
    assert produced(memory, 0, 7) == 7


def test_gaps_and_partial_duplicates_are_refused(memory: MemoryBroker) -> None:
    produced(memory, 0, 0, 3)
    assert refused(memory, 0, 4) is ErrorCode.SEQUENCE_GAP
    assert refused(memory, 0, 2, 2) is ErrorCode.SEQUENCE_GAP
    assert produced(memory, 0, 3) == 3


def test_a_new_epoch_starts_at_0_and_fences_older_ones(memory: MemoryBroker) -> None:
    produced(memory, 4, 0, 5)
    for sequence in (1, 5):
        assert refused(memory, 5, sequence) is ErrorCode.SEQUENCE_GAP
    assert produced(memory, 5, 0) == 5
    for sequence in (0, 5):
        assert refused(memory, 4, sequence) is ErrorCode.PRODUCER_FENCED
    assert produced(memory, 5, 1) == 6


def test_partitions_have_separate_sequences(memory: MemoryBroker) -> None:
    for number in range(3):
        assert produced(memory, 0, 0, number=number) == 0


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_sequences_wrap_around(memory: MemoryBroker, cut: int) -> None:
    """The end of the sequence range lies inside one batch of five or between two."""
    sequence, offset = WRAP - cut - 5, 0
    sent = []
    for _ in range(4):
        assert produced(memory, 0, sequence, 5) == offset
        sent.append((sequence, offset))
        sequence, offset = (sequence + 5) % WRAP, offset + 5
    for again, place in sent:
        assert produced(memory, 0, again, 5) == place
    assert refused(memory, 0, (sequence + 1) % WRAP) is ErrorCode.SEQUENCE_GAP


@pytest.mark.parametrize("snapshot", [False, True])
def test_sequences_and_offsets_survive_a_kill(memory: MemoryBroker, snapshot: bool) -> None:
    produced(memory, 1, WRAP - 2, 2)
    produced(memory, 1, 0, 3)
    if snapshot:
        memory.log.take_snapshot()
    memory.restart()
    assert produced(memory, 1, WRAP - 2, 2) == 0
    assert produced(memory, 1, 0, 3) == 2
    assert refused(memory, 0, 3) is ErrorCode.PRODUCER_FENCED
    assert refused(memory, 1, 4) is ErrorCode.SEQUENCE_GAP
    assert produced(memory, 1, 3) == 5


def test_an_idle_producer_is_forgotten_after_its_expiry() -> None:
    memory = MemoryBroker(BrokerSettings(producer_expiry_us=10_000_000))
    produced(memory, 0, 0, 3)
    memory.advance(9)
    assert produced(memory, 0, 0, 3) == 0
    assert refused(memory, 0, 9) is ErrorCode.SEQUENCE_GAP
    memory.advance(11)
    assert produced(memory, 0, 9) == 3
