"""A short history of real processes: clients of five protocols, and a broker that is killed, paused and starved.

``make histories SECONDS=600 SEED=7`` makes long ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.histories.checkers import judge
from tests.histories.history import Assignment, Outcome, Produce
from tests.histories.nemesis import SmallDisk
from tests.histories.run import GROUP_WIRES, WIRES, run

DEEDS = 6
SEED = 3


@pytest.mark.slow
def test_no_promise_is_broken(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "data") as disk:
        history = run(disk, seed=SEED, deeds=DEEDS)
    assert judge(history) == []
    assert history.counts()["kill -9"] >= DEEDS // 2
    acknowledged = {produce.who for produce in history.of(Produce) if produce.outcome is Outcome.DONE}
    assert acknowledged >= {f"p-{wire}" for wire in WIRES}
    members = {reported.who.partition(".")[0] for reported in history.of(Assignment)}
    assert members == {f"g-{wire}" for wire in GROUP_WIRES}
