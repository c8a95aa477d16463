"""A start must recover the state of one moment, not earlier than the last acknowledged one."""

from __future__ import annotations

import pytest

from polywire.types import Level
from tests.sim.broker.history import History, Key
from tests.sim.promises import Violation

TOPIC: Key = ("topic", "a")
POSITION: Key = ("position", "a", "group", 0)


def _history() -> History:
    history = History()
    history.begin({})
    history.note({TOPIC: 1})
    history.note({TOPIC: 1, POSITION: 5})
    history.note({TOPIC: 2, POSITION: 5})
    return history


@pytest.mark.parametrize(
    ("found", "moment"), [({}, 0), ({TOPIC: 1}, 1), ({TOPIC: 1, POSITION: 5}, 2), ({TOPIC: 2, POSITION: 5}, 3)]
)
def test_every_moment_is_recognized(found: dict[Key, object], moment: int) -> None:
    assert _history().settle(found, powerless=False) == moment


@pytest.mark.parametrize("found", [{POSITION: 5}, {TOPIC: 2}, {TOPIC: 3, POSITION: 5}])
def test_a_mixed_state_is_a_violation(found: dict[Key, object]) -> None:
    with pytest.raises(Violation, match="a start finds one moment"):
        _history().settle(found, powerless=False)


def test_a_state_before_the_acknowledged_one_is_a_violation() -> None:
    history = _history()
    history.acknowledge(1, Level.SYNCED)
    history.acknowledge(2, Level.WRITTEN)
    assert history.settle({TOPIC: 1}, powerless=True) == 1
    history = _history()
    history.acknowledge(2, Level.WRITTEN)
    with pytest.raises(Violation, match="what was acknowledged is there"):
        history.settle({TOPIC: 1}, powerless=False)


def test_a_repeated_value_counts_as_its_latest_moment() -> None:
    history = _history()
    history.note({TOPIC: 1, POSITION: 5})
    assert history.settle({TOPIC: 1, POSITION: 5}, powerless=False) == 4
