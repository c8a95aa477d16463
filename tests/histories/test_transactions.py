"""A short history of transactions over a broker that is killed, with the clients that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.histories.checkers import judge
from tests.histories.history import Fault, History, Outcome, Transaction
from tests.histories.transactions import KILL, OPEN, open_at_kills, run

KILLS = 2
SEED = 1


@pytest.mark.slow
def test_no_transaction_is_broken_by_a_kill(tmp_path: Path) -> None:
    made = run(tmp_path, seed=SEED, kills=KILLS)
    assert judge(made) == []
    assert made.counts()[KILL] == KILLS
    assert any(event.outcome is Outcome.DONE for event in made.of(Transaction))


def test_kills_in_a_transaction_are_counted_by_client() -> None:
    made = History([Transaction("java", 1, 9, (), (), Outcome.UNKNOWN), Fault(KILL, 5, 6), Fault(KILL, 15, 16)])
    assert [fault.who for fault in open_at_kills(made)] == [OPEN, f"{OPEN} of java"]
