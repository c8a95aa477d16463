"""A short history of three brokers on one bucket, whose leader is killed, suspended and raced.

``make takeovers COUNT=500 SEED=7`` makes long ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.histories.checkers import judge
from tests.histories.history import Assignment, Outcome, Produce
from tests.histories.run import GROUP_WIRES, WIRES
from tests.histories.takeovers import run

TAKEOVERS = 3
SEED = 2


@pytest.mark.slow
def test_no_promise_is_broken_by_a_takeover(tmp_path: Path) -> None:
    """Each takes seconds: a new leader waits until the previous one is surely gone."""
    history = run(tmp_path, seed=SEED, count=TAKEOVERS)
    assert judge(history) == []
    assert history.counts()["takeover"] >= TAKEOVERS
    acknowledged = {produce.who for produce in history.of(Produce) if produce.outcome is Outcome.DONE}
    assert acknowledged >= {f"p-{wire}" for wire in WIRES}
    members = {reported.who.partition(".")[0] for reported in history.of(Assignment)}
    assert members == {f"g-{wire}" for wire in GROUP_WIRES}
