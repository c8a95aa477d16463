"""The coordinator of a transaction over several shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polywire.broker.changes import TransactionDecided
from polywire.broker.owners import ITSELF
from polywire.broker.transaction_state import Transaction
from polywire.testing.memory_broker import MemoryBroker


class Others:
    """The other shards. ``decided`` has the decisions that were sent to them."""

    def __init__(self) -> None:
        self.decided: list[tuple[int, bool]] = []

    def end_participant(self, shard: int, decided: TransactionDecided, then: Callable[[bool], None]) -> None:
        self.decided.append((shard, decided.commits))

    def ask_coordinator(self, participant: Transaction, then: Callable[[bool | None], None]) -> None:
        raise AssertionError("this shard has no participants")


@pytest.mark.parametrize("fails", [True, False])
def test_a_decision_is_sent_once_it_is_stored(fails: bool) -> None:
    memory, others = MemoryBroker(), Others()
    participants, transactions = memory.broker.participants, memory.broker.transactions
    participants.begin(others, lambda _: True)
    held = transactions.begin(transactions.begin_epoch("T", done=None), done=None)
    participants.join(held, (1, 2), done=lambda _: None)
    memory.run()
    found = transactions.find("T", by=ITSELF)
    assert found is not None
    transactions.commit(found, done=lambda _: None)
    if fails:
        memory.log.fail()
    memory.run()
    assert others.decided == ([] if fails else [(1, True), (2, True)])
    participants.stop()
