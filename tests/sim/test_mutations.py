"""Disabled mechanisms are detected. This tests those that a few runs detect; `make sim-mutations` tries all of them."""

from __future__ import annotations

import pytest

from tests.sim.mutate import MUTATIONS, notice, recorded
from tests.sim.mutation import Compiled, Mutation

SOON = 3  # mechanisms that take at most this many runs are tried here
PATIENCE = 40  # runs, because a change of the log changes all runs


def test_the_page_lists_every_switch() -> None:
    assert list(recorded()) == [mutation.name for mutation in MUTATIONS], "run `make sim-mutations`"


def _runs_before(mutation: Mutation, seed: int) -> int:
    return sum(earlier % 16 in mutation.rests for earlier in range(mutation.first, seed))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_disabled_mechanism_is_detected(mutation: Mutation) -> None:
    before = recorded()[mutation.name]
    if before is None or (before.by.isdigit() and _runs_before(mutation, int(before.by)) > SOON):
        pytest.skip("takes many runs: `make sim-mutations`")
    try:
        assert notice(mutation, PATIENCE), "run `make sim-mutations`"
    except Compiled as compiled:
        pytest.skip(f"runs from sources only: `make test-pure` class={compiled}")
