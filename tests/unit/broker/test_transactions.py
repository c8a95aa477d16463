"""Transactions below any protocol: commits are laid out in steps (decision 0111)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polywire.broker import transactions as verbs
from polywire.broker.changes import TransactionState
from polywire.broker.topics import Topic
from polywire.broker.transaction_state import Scope, Transaction
from polywire.errors import BrokerError, Conflict, ErrorCode, Missing
from polywire.testing.memory_broker import MemoryBroker
from tests.unit.broker.answers import batch_of

Reported = list[int | BrokerError]


@pytest.fixture(autouse=True)
def every_commit_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "BATCHES_AT_ONCE_MAX", 0)


@pytest.fixture
def memory() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def topic(memory: MemoryBroker) -> Topic:
    return memory.broker.ensure_topic("t")


def opened(memory: MemoryBroker, topic: Topic, *, numbered: bool = False) -> Transaction:
    transactions = memory.broker.transactions
    if numbered:
        held = transactions.number_producer("T", asks_again=False, timeout_us=1_000_000, done=None)
    else:
        held = transactions.begin_epoch("T", done=None)
    held = transactions.begin(held, done=None)
    for number in range(3):
        first = number if numbered else number + 1
        transactions.stage(held, topic.partitions[0], batch_of(b"v%d" % number), first=first, last=first, done=None)
    memory.run()
    return held


def codes(reported: Reported) -> list[object]:
    return [result.code if isinstance(result, BrokerError) else "committed" for result in reported]


def count(topic: Topic) -> int:
    return topic.partitions[0].log.next_offset


@pytest.mark.parametrize("numbered", [False, True])
def test_repeated_commits_wait_for_the_same_end(memory: MemoryBroker, topic: Topic, *, numbered: bool) -> None:
    held, reported = opened(memory, topic, numbered=numbered), Reported()
    memory.broker.transactions.commit(held, done=reported.append)
    memory.broker.transactions.commit(held, done=reported.append)
    assert memory.broker.transactions.is_ending(held)
    assert (reported, count(topic)) == ([], 0)
    memory.run()
    assert codes(reported) == ["committed"] * 2
    assert count(topic) == 3
    assert not memory.broker.transactions.is_ending(held)
    assert held.state is TransactionState.COMMITTED


ABORTS: dict[str, Callable[[MemoryBroker, Transaction], object]] = {
    "an abort": lambda memory, held: memory.broker.transactions.abort(held, done=None),
    "a new holder": lambda memory, _: memory.broker.transactions.begin_epoch("T", done=None),
    "its end": lambda memory, _: memory.broker.transactions.delete("T"),
}


@pytest.mark.parametrize("what", ABORTS)
@pytest.mark.parametrize("begun", [False, True])
def test_an_abort_cancels_a_commit_in_progress(memory: MemoryBroker, topic: Topic, what: str, *, begun: bool) -> None:
    held, reported = opened(memory, topic), Reported()
    memory.broker.transactions.commit(held, done=reported.append)
    if begun:  # its token is claimed, and nothing is published yet
        (steps,) = memory.broker.publish_work._waiting
        next(steps)
    ABORTS[what](memory, held)
    memory.run()
    assert codes(reported) == [ErrorCode.PRODUCER_FENCED]
    assert count(topic) == 0
    assert not memory.log._staged, "the staged batches are gone"
    memory.restart()
    assert topic.partitions[0].log.next_offset == 0


def test_nothing_is_added_to_a_transaction_that_is_being_committed(memory: MemoryBroker, topic: Topic) -> None:
    held, reported = opened(memory, topic), Reported()
    memory.broker.transactions.commit(held, done=reported.append)
    with pytest.raises(Conflict):
        memory.broker.transactions.stage(held, topic.partitions[0], batch_of(b"late"), first=9, last=9, done=None)
    with pytest.raises(Conflict):
        memory.broker.transactions.put_offsets(held, Scope("t", "g", "m", 1), {0: 1}, done=None)
    memory.advance(memory.settings.stage_expiry_us / 1e6 - 1)
    assert codes(reported) == ["committed"]
    assert count(topic) == 3


@pytest.mark.parametrize("numbered", [False, True])
def test_a_topic_deleted_during_a_commit(memory: MemoryBroker, topic: Topic, *, numbered: bool) -> None:
    kept = memory.broker.ensure_topic("u")
    held, reported = opened(memory, topic, numbered=numbered), Reported()
    memory.broker.transactions.stage(
        held, kept.partitions[0], batch_of(b"v"), first=int(not numbered), last=1, done=None
    )
    memory.run()
    memory.broker.transactions.commit(held, done=reported.append)
    memory.broker.delete_topic(topic)
    memory.run()
    assert codes(reported) == (["committed"] if numbered else [ErrorCode.PARTITION_MISSING])
    assert count(kept) == int(numbered)
    assert held.is_open is not numbered


def test_a_commit_that_is_refused_at_the_end_leaves_the_transaction_open(memory: MemoryBroker, topic: Topic) -> None:
    held, reported = opened(memory, topic), Reported()

    def refuse() -> None:
        raise Missing(ErrorCode.MEMBER_MISSING, "gone meanwhile")

    memory.broker.transactions.commit(held, confirm=refuse, done=reported.append)
    memory.run()
    memory.log.disk_full = True
    memory.broker.transactions.commit(held, done=reported.append)
    memory.run()
    assert codes(reported) == [ErrorCode.MEMBER_MISSING, ErrorCode.DISK_FULL]
    memory.log.disk_full = False
    memory.broker.transactions.commit(held, done=reported.append)
    memory.run()
    assert codes(reported[2:]) == ["committed"]
    assert count(topic) == 3


@pytest.mark.parametrize("numbered", [False, True])
def test_offsets_of_every_group_survive_a_snapshot(memory: MemoryBroker, topic: Topic, *, numbered: bool) -> None:
    held = opened(memory, topic, numbered=numbered)
    for group in ("g", "h"):
        memory.broker.transactions.put_offsets(held, Scope("t", group, "m", 1), {0: 1}, done=None)
    memory.run()
    memory.log.take_snapshot()
    memory.restart()
    found = memory.broker.transactions.find("T")
    assert found is not None
    assert {scope.group for scope in found.positions} == {"g", "h"}
