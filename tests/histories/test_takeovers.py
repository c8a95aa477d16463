"""A short history of three brokers on one bucket, whose leader is killed, suspended and raced.

``make takeovers COUNT=500 SEED=7`` makes long ones.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polywire.errors import ErrorCode, Unavailable
from tests.histories import clients
from tests.histories.checkers import judge
from tests.histories.history import Assignment, History, Outcome, Produce
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


class _Resigning:
    """A client whose leader resigns during its first read."""

    reads = 0

    async def fetch(self, topic: str, partition: int, offset: int) -> list[object]:
        _Resigning.reads += 1
        if _Resigning.reads == 1:
            raise Unavailable(ErrorCode.STORAGE_FAILED, "connection lost")
        return []

    async def close(self) -> None:
        pass


def test_the_final_read_is_repeated_when_the_leader_resigns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(_url: str) -> _Resigning:
        return _Resigning()

    monkeypatch.setattr(clients, "connect", connect)
    monkeypatch.setattr(clients, "READ_AGAIN_S", 0.0)
    history = History()
    asyncio.run(clients.read_everything("", {"topic": 1}, {}, history))
    assert (history.stored, _Resigning.reads) == ({("topic", 0): []}, 2)
