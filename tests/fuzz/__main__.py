"""``python -m tests.fuzz``: run all fuzz targets in turns and count their inputs; ``fuzz_http`` and others select targets.

FUZZ_SECONDS (30) is the processor time of each target and FUZZ_SEED repeats a run. The run ends at the first failure.

* ``--on COUNTS`` continues after failures until it is stopped. It stores its counts in that file and failing inputs
  beside it.
* ``--keep`` adds the counts to the table of benchmarks/results/reliability-2026-11.md. ``--keep COUNTS ...`` adds the
  counts of those files and removes them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

import structlog

TURN_S: Final = 5.0
ROUNDS: Final = 8  # between two checks of the clock
TARGETS: Final = sorted(path.stem for path in Path(__file__).parent.glob("fuzz_*.py"))
PAGE: Final = Path(__file__).parents[2] / "benchmarks/results/reliability-2026-11.md"
BEGIN: Final = "<!-- made by `python -m tests.fuzz --keep` -->"
END: Final = "<!-- end of fuzz -->"


@dataclass(slots=True)
class Taken:
    """The inputs of a target, and the processor time they took."""

    inputs: int = 0
    seconds: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class Target:
    """A target and its next round."""

    name: str
    check: Callable[[random.Random], object]
    inputs: int  # of a round
    seed: int
    taken: Taken

    def turn(self, seconds: float) -> None:
        """Run rounds for that long. Raises the error of one that fails."""
        begun = time.process_time()
        try:
            while time.process_time() - begun < seconds:
                self._rounds()
        finally:
            self.taken.seconds += time.process_time() - begun

    def _rounds(self) -> None:
        for _ in range(ROUNDS):
            seed, self.seed = self.seed, self.seed + 1
            self.taken.inputs += self.inputs
            try:
                self.check(random.Random(seed))
            except BaseException as error:
                error.add_note(f"{self.name} failed, repeat with FUZZ_SEED={seed} python -m tests.fuzz.{self.name}")
                raise


def main() -> int:
    """Give every target its turns."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--on", type=Path, metavar="COUNTS", help="go on until stopped, and keep counts in this file")
    parser.add_argument("--keep", type=Path, nargs="*", metavar="COUNTS", help="add counts to the table of the page")
    chosen = parser.parse_args()
    if chosen.keep:
        for path in chosen.keep:
            keep(read_counts(path))
            path.unlink()
        return 0
    structlog.configure(processors=[_drop])  # log lines for operators
    seed = int(os.environ.get("FUZZ_SEED") or random.randrange(2**32))
    print(f"seed={seed}", flush=True)
    targets = targets_of([name for name in chosen.targets if name in TARGETS] or TARGETS, seed)
    if chosen.on is not None:
        go_on(targets, chosen.on)
    run(targets, float(os.environ.get("FUZZ_SECONDS") or 30))
    counts = {target.name: target.taken for target in targets}
    for name, taken in counts.items():
        print(f"{name:16} {taken.inputs:>12} {taken.inputs / taken.seconds:>9.0f}/s of a processor")
    if chosen.keep is not None:
        keep(counts)
    return 0


def targets_of(names: Iterable[str], seed: int) -> list[Target]:
    """Return these targets, starting at one seed."""
    modules = {name: import_module(f"tests.fuzz.{name}") for name in names}
    return [Target(name, module.check_all, module.INPUTS, seed, Taken()) for name, module in modules.items()]


def run(targets: list[Target], left_s: float) -> None:
    """Run turns until each target has had that long; the first failure ends it."""
    while left_s > 0:
        for target in targets:
            target.turn(min(TURN_S, left_s))
        left_s -= TURN_S
        print(f"{sum(target.taken.inputs for target in targets)} inputs", flush=True)


def go_on(targets: list[Target], path: Path) -> None:
    """Run turns without end, with counts in a file, to which those of an earlier run are added."""
    before = read_counts(path) if path.exists() else {}
    for target in targets:
        target.taken = before.get(target.name, target.taken)
    while True:
        for target in targets:
            try:
                target.turn(TURN_S)
            except Exception as error:
                target.taken.failures += 1
                note_failure(path, error)
            write_counts(path, {**before, **{each.name: each.taken for each in targets}})


def note_failure(path: Path, error: Exception) -> None:
    """Write a failure next to the counts."""
    with path.with_suffix(".failed").open("a") as file:
        file.write(f"{error!r} {' '.join(error.__notes__)}\n")


def read_counts(path: Path) -> dict[str, Taken]:
    """Return the counts of earlier runs."""
    return {name: Taken(**fields) for name, fields in json.loads(path.read_text()).items()}


def write_counts(path: Path, counts: Mapping[str, Taken]) -> None:
    """Write all counts, or the previous ones."""
    fields = {name: asdict(t) for name, t in counts.items()}
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(fields))
    beside.replace(path)


def keep(counts: Mapping[str, Taken]) -> None:
    """Add the counts to the page, with the inputs per processor second of each target."""
    head, _, behind = PAGE.read_text().partition(BEGIN)
    table, _, rest = behind.partition(END)
    known = {}
    for line in table.strip().splitlines()[2:-1]:
        name, taken, rate = [cell.strip(" `").replace(",", "") for cell in line.strip("|").split("|")]
        known[name] = int(taken), float(rate)
    for name, more in counts.items():
        if not more.inputs:  # stopped before its first turn
            continue
        known[name] = known.get(name, (0, 0.0))[0] + more.inputs, more.inputs / more.seconds
    total = sum(taken for name, (taken, _) in known.items() if name in TARGETS)
    lines = [BEGIN, "| target | inputs | a second |", "|---|---|---|"]
    lines += [f"| `{name}` | {known[name][0]:,} | {known[name][1]:,.0f} |" for name in TARGETS if name in known]
    lines += [f"| all | {total:,} | |", END]
    PAGE.write_text(head + "\n".join(lines) + rest)


def _drop(*_: object) -> dict[str, object]:
    raise structlog.DropEvent


if __name__ == "__main__":
    sys.exit(main())
