"""``python -m tests.histories.broken``: make a history of a broker that breaks one promise, for each promise.

It prints which checkers notice it, and exits with 1 if one is not noticed at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest.mock import patch

from tests.histories.broken_broker import BREAKS, VARIABLE
from tests.histories.nemesis import SmallDisk
from tests.histories.outside import judge_everything, judges
from tests.histories.run import run

MODULE: Final = "tests.histories.broken_broker"


def main() -> int:
    """Judge a history of each broken broker."""
    parser = argparse.ArgumentParser(prog="python -m tests.histories.broken", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long clients work, for each promise")
    parser.add_argument("--seed", type=int, default=1, help="what is done to the broker, and when")
    parser.add_argument("--only", choices=BREAKS, help="break this promise only")
    given = parser.parse_args()
    print(f"judges: {', '.join(judges())}")
    unnoticed = 0
    for promise in [given.only] if given.only else BREAKS:
        found = noticed(promise, seconds=given.seconds, seed=given.seed)
        unnoticed += not found
        print(f"{promise}: {', '.join(f'{name} {number}' for name, number in found.items()) or 'NOT NOTICED'}")
        sys.stdout.flush()
    return min(unnoticed, 1)


def noticed(promise: str, *, seconds: float, seed: int) -> Counter[str]:
    """Return how much each checker finds wrong if this promise is broken."""
    environment = {VARIABLE: promise, "POLYWIRE_PURE": "1"}
    with TemporaryDirectory() as folder, SmallDisk(Path(folder) / "data") as disk, patch.dict(os.environ, environment):
        history = run(disk, seconds=seconds, seed=seed, module=MODULE)
    return Counter(text.partition(":")[0] for text in judge_everything(history))


if __name__ == "__main__":
    sys.exit(main())
