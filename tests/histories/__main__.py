"""``python -m tests.histories``: make histories for a given time, check them, and count their events.

It exits with 1 if a promise was broken, names the promise, and keeps the data directory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.histories.history import History, save
from tests.histories.nemesis import SmallDisk
from tests.histories.outside import judge_everything, judges
from tests.histories.run import run

PART_S: Final = 60.0  # of one history, which is kept in memory
SHOWN_MAX: Final = 20
KEPT: Final = Path("build/histories")


def main() -> int:
    """Make one history after the other until the time is up."""
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long clients work, in all")
    parser.add_argument("--seed", type=int, default=1, help="what is done to the broker, and when")
    parser.add_argument("--keep", type=Path, help="directory in which every history is stored")
    given = parser.parse_args()
    print(f"judges: {', '.join(judges())}")
    totals: Counter[str] = Counter()
    try:
        return _judge_many(given.seconds, given.seed, totals, given.keep)
    finally:
        for name, number in sorted(totals.items()):
            print(f"{name:28} {number}")


def _judge_many(seconds: float, seed: int, totals: Counter[str], kept: Path | None) -> int:
    """Make histories until the time is up, or one of them is wrong."""
    begun = time.monotonic()
    while seconds > 0:
        history, wrong = _make(seconds=min(seconds, PART_S), seed=seed, kept=kept)
        totals += history.counts()
        passed = time.monotonic() - begun
        print(f"{passed:.0f} s, {totals['kill -9']} kills, {totals['records stored']} records", flush=True)
        if wrong:
            print("\n".join(wrong[:SHOWN_MAX]), f"{len(wrong)} broken promises: seed={seed}", sep="\n")
            return 1
        seconds, seed = seconds - PART_S, seed + 1
    return 0


def _make(*, seconds: float, seed: int, kept: Path | None) -> tuple[History, list[str]]:
    """Make a history and return what is wrong with it; then keep its data directory."""
    with TemporaryDirectory() as folder, SmallDisk(Path(folder) / "data") as disk:
        try:
            history = run(disk, seconds=seconds, seed=seed)
        except BaseException:
            _keep(disk.folder, seed)
            raise
        if kept is not None:
            save(history, kept / f"seed-{seed}.jsonl.gz")
        wrong = judge_everything(history)
        if wrong:
            _keep(disk.folder, seed)
        return history, wrong


def _keep(data: Path, seed: int) -> None:
    target = KEPT / f"seed-{seed}"
    shutil.copytree(data.parent, target, dirs_exist_ok=True)
    print(f"kept in {target}: the data directory, and what the broker logged", flush=True)


if __name__ == "__main__":
    sys.exit(main())
