"""The clock of a process that jumps, and a short history of a broker with such a clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.histories.checkers import judge
from tests.histories.clocks import JUMP, SkewedClock, has_clocks
from tests.histories.nemesis import SmallDisk
from tests.histories.run import run

DEEDS = 2
SEED = 36  # the clock is set 30 days ahead, and the broker is killed
TIMES = "import json, time; print(json.dumps([time.time(), time.monotonic()]))"
HOUR_S = 3600

pytestmark = pytest.mark.skipif(not has_clocks(), reason="NO LIBFAKETIME: the clocks of brokers did not jump")


def test_the_wall_clock_jumps_and_the_monotonic_clock_does_not(tmp_path: Path) -> None:
    clock = SkewedClock(tmp_path / "clock")
    clock.set("-7h")
    before = time.monotonic()
    command = [sys.executable, "-c", TIMES]
    printed = subprocess.run(command, env={**os.environ, **clock.environment}, capture_output=True, check=True).stdout
    wall, monotonic = json.loads(printed)
    assert wall < time.time() - 6 * HOUR_S
    assert before <= monotonic <= time.monotonic()


@pytest.mark.slow
def test_no_promise_is_broken_by_a_clock_that_jumps(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "data") as disk:
        history = run(disk, seed=SEED, deeds=DEEDS, clock=SkewedClock(tmp_path / "clock"))
    assert judge(history) == []
    assert history.counts()[JUMP] > 0
