"""Disabled mechanisms are detected. This tests those that a few runs detect; `make sim-mutations` tries all of them.

They run uncompiled only, because functions of compiled classes cannot be replaced.
"""

from __future__ import annotations

import os

import pytest

from tests.sim.mutate import MUTATIONS, notice, recorded
from tests.sim.mutation import Mutation

SOON = 3  # mechanisms that took at most this many runs are tried here; the seed that failed then comes first
PATIENCE = 40  # more runs, because a change of the log changes all runs
RECORDED = recorded()


def test_the_page_lists_every_switch() -> None:
    assert list(RECORDED) == [mutation.name for mutation in MUTATIONS], "run `make sim-mutations`"


def _runs_before(mutation: Mutation, seed: int) -> int:
    return sum(earlier % 16 in mutation.rests for earlier in range(mutation.first, seed))


@pytest.mark.skipif(os.environ.get("POLYWIRE_PURE") != "1", reason="runs uncompiled: `make test-pure-quick`")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_disabled_mechanism_is_detected(mutation: Mutation) -> None:
    before = RECORDED[mutation.name]
    seeds = [int(before.by)] if before is not None and before.by.isdigit() else []
    if before is None or any(_runs_before(mutation, seed) > SOON for seed in seeds):
        pytest.skip("takes many runs: `make sim-mutations`")
    assert notice(mutation, PATIENCE, seeds), "run `make sim-mutations`"
