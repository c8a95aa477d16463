"""A short history of a work queue whose broker is killed, stopped and suspended, and what the checks must find."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.histories.queues import ATTEMPTS, History, Run

FAULTS = 5
SEED = 3


@pytest.mark.slow
def test_no_promise_is_broken(tmp_path: Path) -> None:
    run = Run(tmp_path, SEED, FAULTS)
    with run.broker:
        asyncio.run(run.run())
    assert run.wrong == []
    assert run.faults.total() == FAULTS
    assert any(record.ended for record in run.history.records.values())


@pytest.mark.parametrize(
    ("deliveries", "ended", "wrong"),
    [
        ([(1, 0), (2, 0)], "", []),
        ([(1, 0), (2, 1)], "", ["while worker 0 holds it"]),
        ([(2, 0), (2, 0)], "", ["does not ascend"]),
        ([(ATTEMPTS + 1, 0)], "", ["too often"]),
        ([(1, 0)], "accepted", ["after it was accepted"]),
    ],
)
def test_violations_are_found(deliveries: list[tuple[int, int]], ended: str, wrong: list[str]) -> None:
    history = History()
    for attempt, worker in deliveries[:-1]:
        history.delivered("a", attempt, worker, 0)
    if ended:
        history.delivered("a", 0, deliveries[-1][1], 0)
        history.records["a"].ended = ended
    attempt, worker = deliveries[-1]
    history.delivered("a", attempt, worker, 0)
    assert len(history.wrong) == len(wrong)
    assert all(part in line for part, line in zip(wrong, history.wrong, strict=True))
