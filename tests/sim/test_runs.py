"""The log in a simulated world: a fixed number of runs keeps every promise, and one number gives one story."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from polywire.testing.sim.log.model import KeptPartition
from polywire.testing.sim.log.world import LogWorld
from polywire.testing.sim.promises import Violation

RUNS = int(os.environ.get("POLYWIRE_SIM_RUNS", "48"))
STEPS = 800


def run(seed: int, steps: int = STEPS) -> LogWorld:
    world = LogWorld(seed, steps=steps)
    world.run()
    return world


@pytest.mark.parametrize("part", range(4))
def test_runs_keep_every_promise(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part, RUNS, 4):
        counts += run(seed).story.counts
    rare = (
        "drop",
        "compact",
        "publish",
        "trim",
        "power loss",
        "killed",
        "fault",
        "short",
        "woken",
        "log failed",
        "rival",
        "rot",
    )
    assert not [event for event in rare if not counts[event]], "every kind of trouble comes up"


def test_one_number_gives_one_story() -> None:
    assert run(3).story.digest() == run(3).story.digest()
    assert run(3).story.digest() != run(4).story.digest()


def test_the_story_is_the_same_compiled_and_not() -> None:
    digests = set()
    for pure in ("", "1"):
        command = [
            sys.executable,
            "-m",
            "polywire.testing.sim",
            "--world",
            "log",
            "--seed",
            "3",
            "--steps",
            str(STEPS),
            "--quiet",
        ]
        environment = {**os.environ, "POLYWIRE_PURE": pure, "PYTHONHASHSEED": pure or "0"}
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        digests.add(told.rpartition("digest=")[2].strip())
    assert digests == {run(3).story.digest()}


def test_a_broken_promise_is_told() -> None:
    kept = KeptPartition(1, keyed=False, records=[(None, b"a"), (None, b"b")])
    with pytest.raises(Violation, match="every offset has its record"):
        kept.check_records([], 0, 2)
