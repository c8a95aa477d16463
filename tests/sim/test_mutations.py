"""What a promise rests on is missed when it is taken out: the switches that few runs notice; `make sim-mutations` tries all of them."""

from __future__ import annotations

import pytest

from tests.sim.mutate import MUTATIONS, notice, recorded
from tests.sim.mutation import Compiled, Mutation

SOON = 3  # runs: those that take so few are tried here
PATIENCE = 40  # runs, for a change of the log changes every story


def test_the_page_tells_of_every_switch() -> None:
    assert list(recorded()) == [mutation.name for mutation in MUTATIONS], "run `make sim-mutations`"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_missing_mechanism_is_noticed(mutation: Mutation) -> None:
    before = recorded()[mutation.name]
    if before is None or (before.by.isdigit() and int(before.by) > SOON):
        pytest.skip("takes many runs: `make sim-mutations`")
    try:
        assert notice(mutation, PATIENCE), "run `make sim-mutations`"
    except Compiled as compiled:
        pytest.skip(f"runs from sources only: `make test-pure` class={compiled}")
