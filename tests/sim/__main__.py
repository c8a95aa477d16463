"""``python -m tests.sim``: run simulations and print their events.

It stops with exit code 1 at the first run with a violation. The output contains the seed that reproduces the run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import structlog

from tests.ledger import Command, Ledger
from tests.sim.promises import BROKEN, Violation
from tests.sim.shrink import Shape, shrink
from tests.sim.world import STEPS
from tests.sim.worlds import WORLDS

LINES_SHOWN = 60  # of a failed run
PROGRESS_RUNS = 25  # between two lines of progress
LEDGER_FIRST = 20_000_000  # smaller seeds ran before the ledger began
LEDGER_EVENTS = ("killed", "power loss", "takeover")


def main() -> int:
    """Print the events of one run, or count runs until one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--world", choices=WORLDS, default=None, help="run only this world (default: all)")
    parser.add_argument("--seed", type=int, default=None, help="run this seed and print its events")
    parser.add_argument("--steps", type=int, default=STEPS, help="length of a run")
    parser.add_argument("--without", default="", help="exclude these faults and requests, as a failed run names them")
    parser.add_argument("--first", type=int, default=0, help="without --seed: the first seed")
    parser.add_argument("--count", type=int, default=0, help="without --seed: number of runs; 0: until stopped")
    parser.add_argument("--ledger", action="store_true", help="begin with the next seed of the ledger, and add to it")
    parser.add_argument("--quiet", action="store_true", help="with --seed: print only the result")
    given = parser.parse_args()
    structlog.configure(processors=[_drop])  # log lines for operators are not events
    gc.freeze()  # modules stay: later collections skip them
    kinds = list(WORLDS) if given.world is None else [given.world]
    if given.seed is not None:
        without = frozenset(filter(None, given.without.split(",")))
        return max(_tell(Shape(kind, given.seed, given.steps, without), quiet=given.quiet) for kind in kinds)
    if given.ledger:
        return count(kinds, first=given.first, runs=given.count, steps=STEPS, ledger=Ledger())
    return count(kinds, first=given.first, runs=given.count, steps=given.steps)


def _drop(*_: object) -> dict[str, object]:
    raise structlog.DropEvent


def _tell(shape: Shape, *, quiet: bool) -> int:
    world = shape.world(show=None if quiet else _say)
    try:
        world.run()
    except Violation as violation:
        _say(f"{shape.kind} {shape.seed} broke a promise: {violation}")
        return 1
    finally:
        _say(f"{shape.kind} {shape.seed} steps={shape.steps} events={world.story.number} digest={world.story.digest()}")
    return 0


def _command(kind: str) -> Command:
    return Command(f"tests.sim --world {kind}", "simulation")


def count(kinds: Sequence[str], *, first: int, runs: int, steps: int, ledger: Ledger | None = None) -> int:
    """Run consecutive seeds until one fails; ``runs`` of them, or any number if it is 0. Return the exit code."""
    totals: Counter[str] = Counter()
    if ledger is not None:
        first = max(ledger.next_seed(_command(kind), LEDGER_FIRST) for kind in kinds)
    seed, begun = first, time.monotonic()
    while not runs or seed < first + runs:
        for kind in kinds:
            shape = Shape(kind, seed, steps)
            try:
                totals += _run(shape, ledger)
            except BROKEN as error:
                _say(f"{kind} {seed} broke a promise: {error!r}")
                _tell_shortly(shape)
                return 1
        seed += 1
        done = seed - first
        rate = done / (time.monotonic() - begun)
        if done % PROGRESS_RUNS and done != runs:
            continue
        _say(f"{done} runs, {totals.total()} events, {totals['killed']} kills, {rate:.1f} runs/s")
    for event, number in sorted(totals.items()):
        _say(f"{event:14} {number}")
    return 0


def _run(shape: Shape, ledger: Ledger | None) -> Counter[str]:
    """Run a simulation, and add it to the ledger. Return its number of events by kind."""
    world = shape.world()
    find: Exception | None = None
    try:
        world.run()
    except BROKEN as error:
        find = error
    if ledger is not None:
        counts = {event: world.story.counts[event] for event in LEDGER_EVENTS}
        ledger.add(
            _command(shape.kind),
            shape.seed,
            {**counts, "events": world.story.number},
            "" if find is None else repr(find),
        )
    if find is not None:
        raise find
    return world.story.counts


def _tell_shortly(shape: Shape) -> None:
    """Print the events of a failed run after shrinking it."""
    small = shrink(shape)
    world = small.world()
    with suppress(*BROKEN):
        world.run()
    _say("\n".join(list(world.story.lines)[-LINES_SHOWN:]))
    _say(f"replay: python -m tests.sim {small.arguments}")
    _say(f"all of it: python -m tests.sim {shape.arguments}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
