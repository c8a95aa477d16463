"""Shrink a failed run: find fewer steps and fewer kinds of events with the same violation.

Every result was run and has that violation. The number of runs is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from tests.sim.promises import BROKEN, Violation
from tests.sim.world import World
from tests.sim.worlds import WORLDS

RUNS_MAX: Final = 150


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of a run: its world, its seed, its length, and the excluded kinds of events."""

    kind: str
    seed: int
    steps: int
    without: frozenset[str] = frozenset()

    def world(self, *, show: Callable[[str], None] | None = None) -> World:
        """Return the world of the run."""
        return WORLDS[self.kind](self.seed, steps=self.steps, without=self.without, show=show)

    @property
    def arguments(self) -> str:
        """Return the arguments that repeat it."""
        found = f"--world {self.kind} --seed {self.seed} --steps {self.steps}"
        return f"{found} --without {','.join(sorted(self.without))}" if self.without else found


def shrink(shape: Shape) -> Shape:
    """Return a smaller run with the same violation, or the run itself. Raises ValueError if it has no violation."""
    failed = _failed(shape)
    if failed is None:
        raise ValueError("nothing to shrink: no promise is broken")
    promise, best = failed
    for runs, smaller in enumerate(_smaller(best)):
        if runs >= RUNS_MAX:
            break
        found = _failed(replace(smaller, without=smaller.without | best.without, steps=min(smaller.steps, best.steps)))
        if found is not None and found[0] == promise:
            best = found[1]
    return best


def _smaller(shape: Shape) -> Iterable[Shape]:
    """Yield the smaller runs to try."""
    world = WORLDS[shape.kind]
    kinds = (*world.TROUBLES, *world.ACTS)
    for kind in kinds:
        yield replace(shape, without=frozenset((kind,)))
    steps = shape.steps
    while steps > 1:
        steps = steps * 3 // 4
        yield replace(shape, steps=steps)
    for kind in kinds:
        yield replace(shape, without=frozenset((kind,)))


def _failed(shape: Shape) -> tuple[str, Shape] | None:
    """Return the violated property and the run up to it, None if there is no violation."""
    world = shape.world()
    try:
        world.run()
    except Violation as violation:
        return violation.promise, replace(shape, steps=min(world.steps_done + 1, shape.steps))
    except BROKEN as error:
        return repr(error), replace(shape, steps=min(world.steps_done + 1, shape.steps))
    return None
