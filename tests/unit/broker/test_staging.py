"""Staging and publishing exactly once."""

from __future__ import annotations

from collections import deque

import pytest

from polywire.broker import staging
from polywire.broker.settings import BrokerSettings
from polywire.broker.staging import PublishAnswer
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid
from polywire.testing.loop import SimulatedClock
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, TopicName
from tests.unit.broker.answers import Answers, batch_by, batch_of

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def stage(memory: MemoryBroker, token: bytes, partition: int, *values: bytes) -> None:
    answers = Answers()
    topic = memory.broker.ensure_topic("orders")
    memory.broker.stage(token, topic.partitions[partition], batch_of(*values), level=Level.WRITTEN, done=answers)
    memory.run()
    assert answers.offsets == [-1]


def publish(memory: MemoryBroker, number: int, *tokens: bytes, writer: str = "query") -> PublishAnswer:
    reported: list[PublishAnswer | BrokerError] = []
    memory.broker.publish(writer, number, tokens, done=reported.append)
    assert reported == []
    memory.run()
    assert len(reported) == 1
    answer = reported[0]
    assert isinstance(answer, PublishAnswer)
    return answer


def refused(memory: MemoryBroker, number: int, *tokens: bytes, writer: str = "query") -> ErrorCode:
    with pytest.raises(BrokerError) as caught:
        memory.broker.publish(writer, number, tokens, done=None)
    return caught.value.code


def ends(memory: MemoryBroker) -> list[int]:
    return [partition.log.next_offset for partition in memory.broker.topic("orders").partitions]


def test_staged_records_appear_when_published_and_as_one_group(memory: MemoryBroker) -> None:
    stage(memory, A, 0, b"1", b"2")
    stage(memory, B, 0, b"3")
    stage(memory, B, 2, b"4")
    assert ends(memory) == [0, 0, 0]
    before = memory.log.group_count
    answer = publish(memory, 0, A, B)
    assert memory.log.group_count == before + 1
    assert ends(memory) == [3, 0, 1]
    assert not answer.duplicate
    found = [(item.partition.number, item.first_offset, item.next_offset) for item in answer.ranges]
    assert found == [(0, 0, 3), (2, 0, 1)]


def test_publishing_again_changes_nothing(memory: MemoryBroker) -> None:
    stage(memory, A, 0, b"1")
    publish(memory, 4, A)
    for number in (4, 3):
        stage(memory, B, 0, b"again")
        assert publish(memory, number, B).duplicate
        assert ends(memory) == [1, 0, 0]
        assert refused(memory, 9, B) is ErrorCode.STAGE_MISSING
    stage(memory, B, 0, b"2")
    assert not publish(memory, 5, B).duplicate
    assert ends(memory) == [2, 0, 0]


@pytest.mark.parametrize("snapshot", [False, True])
def test_publishing_again_after_a_power_loss_changes_nothing(memory: MemoryBroker, snapshot: bool) -> None:
    stage(memory, A, 0, b"1")
    publish(memory, 0, A)
    if snapshot:
        memory.log.take_snapshot()
    memory.restart(synced_only=True)
    assert publish(memory, 0, A).duplicate
    assert ends(memory) == [1, 0, 0]


def test_a_duplicate_waits_for_the_original_in_flight(memory: MemoryBroker) -> None:
    reported: list[tuple[str, PublishAnswer | BrokerError]] = []
    stage(memory, A, 0, b"1")
    memory.broker.publish("query", 0, [A], done=lambda answer: reported.append(("original", answer)))
    memory.broker.publish("query", 0, [], done=lambda answer: reported.append(("repeat", answer)))
    memory.broker.commit()
    assert reported == []
    memory.run()
    assert [name for name, _ in reported] == ["original", "repeat"]
    assert isinstance(reported[1][1], PublishAnswer)
    assert reported[1][1].duplicate


def test_one_of_two_concurrent_publishes_of_a_number_succeeds(memory: MemoryBroker) -> None:
    stage(memory, A, 0, b"1")
    stage(memory, B, 0, b"2")
    reported: list[PublishAnswer | BrokerError] = []
    under_way = [memory.broker.publishing("query", 1, [token], done=reported.append) for token in (A, B)]
    for steps in under_way:
        next(steps)
        next(steps)
    for steps in under_way:
        deque(steps, maxlen=0)
    memory.run()
    assert [isinstance(answer, PublishAnswer) and answer.duplicate for answer in reported] == [False, True]
    assert ends(memory) == [1, 0, 0]


def test_a_lost_publish_can_be_repeated(memory: MemoryBroker) -> None:
    stage(memory, A, 0, b"1")
    memory.broker.publish("query", 0, [A], done=None)
    memory.restart()
    stage(memory, B, 0, b"1")
    assert not publish(memory, 0, B).duplicate
    assert ends(memory) == [1, 0, 0]


def test_a_token_of_zeros_is_refused(memory: MemoryBroker) -> None:
    """Sealed runs use a token of zeros for batches that are not staged."""
    with pytest.raises(Invalid):
        stage(memory, bytes(16), 0, b"1")


def test_an_empty_publish_advances_the_number(memory: MemoryBroker) -> None:
    assert publish(memory, 7) == PublishAnswer(duplicate=False)
    assert publish(memory, 7).duplicate


def test_unknown_expired_and_abandoned_tokens_refuse_the_whole_publish() -> None:
    memory = MemoryBroker(BrokerSettings(stage_expiry_us=5_000_000))
    stage(memory, A, 0, b"1")
    assert refused(memory, 0, A, C) is ErrorCode.STAGE_MISSING
    assert ends(memory) == [0, 0, 0]
    stage(memory, B, 0, b"2")
    memory.broker.abandon([B, C])
    assert refused(memory, 0, B) is ErrorCode.STAGE_MISSING
    memory.advance(6)
    assert refused(memory, 0, A) is ErrorCode.STAGE_MISSING


def test_a_partition_deleted_meanwhile_is_refused(memory: MemoryBroker) -> None:
    stage(memory, A, 0, b"1")
    memory.broker.delete_topic(memory.broker.topic("orders"))
    memory.broker.create_topic(TopicName("default", "orders"))
    memory.run()
    assert refused(memory, 0, A) is ErrorCode.PARTITION_MISSING
    assert ends(memory) == [0, 0, 0]


@pytest.mark.parametrize(("writer", "number"), [("", 0), ("w" * 256, 0), ("\udc80", 0), ("w", -1), ("w", 2**63)])
def test_bad_writers_and_numbers(memory: MemoryBroker, writer: str, number: int) -> None:
    assert refused(memory, number, writer=writer) in (ErrorCode.INVALID_NAME, ErrorCode.INVALID_REQUEST)


def test_bad_tokens_and_batches(memory: MemoryBroker) -> None:
    assert refused(memory, 0, b"short") is ErrorCode.INVALID_REQUEST
    assert refused(memory, 0, A, A) is ErrorCode.INVALID_REQUEST
    partition = memory.broker.ensure_topic("orders").partitions[0]
    for token, batch in ((b"short", batch_of(b"v")), (A, batch_by(b"p", 0, 0)), (A, batch_of(b"v") + b"\0")):
        with pytest.raises(BrokerError):
            memory.broker.stage(token, partition, batch, level=Level.WRITTEN, done=None)


def test_young_writers_are_never_forgotten() -> None:
    memory = MemoryBroker(BrokerSettings(writers_max=2, writer_expiry_us=10_000_000))
    publish(memory, 0, writer="a")
    publish(memory, 0, writer="b")
    with pytest.raises(Busy):
        memory.broker.publish("c", 0, [], done=None)
    memory.advance(11)
    publish(memory, 0, writer="c")
    assert not publish(memory, 0, writer="a").duplicate
    assert publish(memory, 0, writer="c").duplicate


@pytest.mark.parametrize("restarts", [False, True])
def test_a_wall_clock_set_forward_and_back_forgets_no_writer(memory: MemoryBroker, restarts: bool) -> None:
    assert isinstance(memory.clock, SimulatedClock)
    publish(memory, 7)
    for days in (31, -62, 31):
        memory.clock.step(days * 86_400)
        if restarts:
            memory.restart()
        publish(memory, 0, writer=f"other-{days}")  # forgets writers that were idle for too long
        assert publish(memory, 7).duplicate
    assert not publish(memory, 8).duplicate


@pytest.mark.parametrize("days", [31, -31])
def test_setting_the_wall_clock_does_not_change_the_expiry_of_staged_batches(days: int) -> None:
    memory = MemoryBroker(BrokerSettings(stage_expiry_us=5_000_000))
    assert isinstance(memory.clock, SimulatedClock)
    stage(memory, A, 0, b"1")
    stage(memory, B, 0, b"2")
    memory.clock.step(days * 86_400)
    memory.advance(4)
    assert not publish(memory, 0, A).duplicate
    memory.advance(2)
    assert refused(memory, 1, B) is ErrorCode.STAGE_MISSING


def test_leftovers_of_failed_attempts_are_dropped_when_their_writer_publishes(memory: MemoryBroker) -> None:
    topic = memory.broker.ensure_topic("orders")
    meant = {A: ("query", 1), B: ("query", 1), C: ("query", 2), b"d" * 16: ("other", 1)}
    for token, write in meant.items():
        memory.broker.stage(
            token, topic.partitions[0], batch_of(b"x"), write=write, level=Level.WRITTEN, done=Answers()
        )
    memory.run()
    publish(memory, 1, A)
    assert refused(memory, 3, B) is ErrorCode.STAGE_MISSING
    assert not publish(memory, 2, C).duplicate
    assert not publish(memory, 1, b"d" * 16, writer="other").duplicate
    assert ends(memory)[0] == 3
    memory.broker.stage(B, topic.partitions[0], batch_of(b"x"), write=("query", 2), level=Level.WRITTEN, done=None)
    assert publish(memory, 2, b"e" * 16).duplicate
    assert refused(memory, 3, B) is ErrorCode.STAGE_MISSING


def test_only_so_many_writers_of_tokens_are_remembered(memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGERS_MAX", 1)
    topic = memory.broker.ensure_topic("orders")
    for token in (A, B, C):
        memory.broker.stage(
            token, topic.partitions[0], batch_of(b"x"), write=("query", 1), level=Level.WRITTEN, done=None
        )
    publish(memory, 1, A)
    assert not publish(memory, 2, B).duplicate
    assert refused(memory, 3, C) is ErrorCode.STAGE_MISSING
