"""Histories without faults are judged more strictly than others."""

from __future__ import annotations

import pytest

from tests.histories.healthy import judge_healthy
from tests.histories.history import History, Outcome, Place, Produce


@pytest.mark.parametrize("outcome", Outcome)
def test_each_request_must_be_acknowledged(outcome: Outcome) -> None:
    history = History()
    is_done = outcome is Outcome.DONE
    places = (Place("topic", 0, 0),) if is_done else ()
    history.events.append(Produce("p", 1, 2, "topic", (b"value",), outcome, places))
    history.stored["topic", 0] = [(0, b"value")] if is_done else []
    assert judge_healthy(history) == ([] if is_done else [f"p: {outcome.value} without a fault"])
