"""A short history of power losses, and what they do to files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.histories.checkers import judge, only_the_end_is_lost
from tests.histories.history import POWER_LOSS, Fault, Outcome, Produce
from tests.histories.power_losses import CHECKERS_OF_WRITTEN, SYNCED, WRITTEN, run
from tests.histories.test_checkers import history, produce

LOSSES = 2
SEED = 4


@pytest.mark.slow
@pytest.mark.parametrize("durability", [SYNCED, WRITTEN])
def test_no_promise_is_broken_by_a_power_loss(tmp_path: Path, durability: str) -> None:
    made = run(tmp_path, seed=SEED, losses=LOSSES, durability=durability)
    assert (judge(made) if durability == SYNCED else judge(made, CHECKERS_OF_WRITTEN)) == []
    assert made.counts()[POWER_LOSS] == LOSSES
    assert any(event.outcome is Outcome.DONE for event in made.of(Produce))


LOSS = Fault(POWER_LOSS, 10, 11)


def test_records_may_be_lost_from_the_end() -> None:
    events = [produce(1, "a"), produce(3, "b"), produce(5, "c"), LOSS, produce(13, "d")]
    assert list(only_the_end_is_lost(history(events, "abd"))) == []
    assert list(only_the_end_is_lost(history(events, "d"))) == []


def test_a_record_that_survives_an_earlier_one_is_detected() -> None:
    events = [produce(1, "a"), produce(3, "b"), produce(5, "c"), LOSS]
    assert len(list(only_the_end_is_lost(history(events, "ac")))) == 1
    assert list(only_the_end_is_lost(history([*events[:2], LOSS, produce(13, "c")], "c"))) == []
