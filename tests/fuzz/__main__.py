"""``python -m tests.fuzz``: all targets in one process by turns, and how many inputs each has taken.

FUZZ_SECONDS (30) is what each target has in all, FUZZ_SEED what repeats a run. Ends at the first input that breaks something.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final

import structlog

TURN_S: Final = 5.0
TARGETS: Final = sorted(path.stem for path in Path(__file__).parent.glob("fuzz_*.py"))


def main() -> int:
    """Give every target its turns."""
    structlog.configure(processors=[_drop])  # what a broker tells its operator
    seed = int(os.environ.get("FUZZ_SEED") or random.randrange(2**32))
    left = float(os.environ.get("FUZZ_SECONDS") or 30)
    modules = {name: import_module(f"tests.fuzz.{name}") for name in TARGETS}
    rounds: Counter[str] = Counter()
    print(f"seed={seed}", flush=True)
    while left > 0:
        for name, module in modules.items():
            deadline = time.monotonic() + min(TURN_S, left)
            while time.monotonic() < deadline:
                _check(name, module.check_all, seed + rounds[name])
                rounds[name] += 1
        left -= TURN_S
        inputs = {name: rounds[name] * modules[name].INPUTS for name in rounds}
        print(f"{sum(inputs.values())} inputs", flush=True)
    for name in TARGETS:
        print(f"{name:16} {inputs[name]:>12}")
    return 0


def _drop(*_: object) -> dict[str, object]:
    raise structlog.DropEvent


def _check(name: str, check: Callable[[random.Random], object], seed: int) -> None:
    try:
        check(random.Random(seed))
    except BaseException:
        print(f"{name} failed, repeat with FUZZ_SEED={seed} python -m tests.fuzz.{name}", flush=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
