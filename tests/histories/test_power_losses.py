"""A short history of power losses, and one of a broker that acknowledges records before they are synced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.histories.checkers import acknowledged_is_there, judge, only_the_end_is_lost
from tests.histories.history import POWER_LOSS, Fault, Outcome, Produce
from tests.histories.power_losses import CHECKERS_OF_WRITTEN, WRITTEN, run
from tests.histories.test_checkers import history, produce

LOSSES = 2
SEED = 6  # nothing that was not synced survives the first power loss
LOSS = Fault(POWER_LOSS, 10, 11)


@pytest.mark.slow
def test_no_promise_is_broken_by_a_power_loss(tmp_path: Path) -> None:
    made = run(tmp_path, seed=SEED, losses=LOSSES)
    assert judge(made) == []
    assert made.counts()[POWER_LOSS] == LOSSES
    assert any(event.outcome is Outcome.DONE for event in made.of(Produce))


@pytest.mark.slow
def test_a_broker_that_does_not_wait_for_the_sync_is_detected(tmp_path: Path) -> None:
    made = run(tmp_path, seed=SEED, losses=1, durability=WRITTEN, is_impatient=True)
    assert {line.partition(":")[0] for line in judge(made, CHECKERS_OF_WRITTEN)} == {acknowledged_is_there.__name__}


def test_records_may_be_lost_from_the_end() -> None:
    events = [produce(1, "a"), produce(3, "b"), produce(5, "c"), LOSS, produce(13, "d")]
    assert list(only_the_end_is_lost(history(events, "abd"))) == []
    assert list(only_the_end_is_lost(history(events, "d"))) == []


def test_a_record_that_survives_an_earlier_one_is_detected() -> None:
    events = [produce(1, "a"), produce(3, "b"), produce(5, "c"), LOSS]
    assert len(list(only_the_end_is_lost(history(events, "ac")))) == 1
    assert list(only_the_end_is_lost(history([*events[:2], LOSS, produce(13, "c")], "c"))) == []
