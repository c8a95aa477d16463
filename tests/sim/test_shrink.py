"""Shrinking a failed run to what is needed for its failure."""

from __future__ import annotations

import pytest

from tests.sim.mutations import LOG_MUTATIONS
from tests.sim.promises import Violation
from tests.sim.shrink import Shape, shrink


def test_a_failed_run_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    next(mutation for mutation in LOG_MUTATIONS if mutation.name == "synced-answer").take_out(monkeypatch)
    shape, broken = next(filter(None, map(_broken, range(20))))
    small = shrink(shape)
    with pytest.raises(Violation) as again:
        small.world().run()
    assert again.value.promise == broken.promise
    assert small.steps < 600
    assert len(small.without) >= 5
    assert "append" not in small.without or "change" not in small.without


def _broken(seed: int) -> tuple[Shape, Violation] | None:
    shape = Shape("log", seed, 800)
    try:
        shape.world().run()
    except Violation as violation:
        return shape, violation
    return None


def test_a_run_without_a_failure_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match="nothing to shrink"):
        shrink(Shape("log", 3, 50))
