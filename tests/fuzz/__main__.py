"""``python -m tests.fuzz``: all targets in one process by turns, and how many inputs each has taken; ``fuzz_http`` and others by name.

FUZZ_SECONDS (30) is what each target has in all, FUZZ_SEED what repeats a run. Ends at the first input that breaks something.
``--keep`` adds what was taken to the table of docs/operate/reliability.md.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

import structlog

TURN_S: Final = 5.0
TARGETS: Final = sorted(path.stem for path in Path(__file__).parent.glob("fuzz_*.py"))
PAGE: Final = Path(__file__).parents[2] / "docs/operate/reliability.md"
BEGIN: Final = "<!-- made by `python -m tests.fuzz --keep` -->"
END: Final = "<!-- end of fuzz -->"


def main() -> int:
    """Give every target its turns."""
    structlog.configure(processors=[_drop])  # what a broker tells its operator
    seed = int(os.environ.get("FUZZ_SEED") or random.randrange(2**32))
    left = float(os.environ.get("FUZZ_SECONDS") or 30)
    chosen = [name for name in sys.argv[1:] if name in TARGETS] or TARGETS
    modules = {name: import_module(f"tests.fuzz.{name}") for name in chosen}
    rounds: Counter[str] = Counter()
    spent_s: dict[str, float] = dict.fromkeys(modules, 0.0)
    print(f"seed={seed}", flush=True)
    while left > 0:
        for name, module in modules.items():
            begun, deadline = time.process_time(), time.monotonic() + min(TURN_S, left)
            while time.monotonic() < deadline:
                _check(name, module.check_all, seed + rounds[name])
                rounds[name] += 1
            spent_s[name] += time.process_time() - begun
        left -= TURN_S
        inputs = {name: rounds[name] * modules[name].INPUTS for name in rounds}
        print(f"{sum(inputs.values())} inputs", flush=True)
    for name in chosen:
        print(f"{name:16} {inputs[name]:>12} {inputs[name] / spent_s[name]:>9.0f}/s of a processor")
    if "--keep" in sys.argv:
        keep(inputs, {name: inputs[name] / spent_s[name] for name in chosen})
    return 0


def keep(inputs: Mapping[str, int], rates: Mapping[str, float]) -> None:
    """Add to the page what was taken, with how much a second of a processor takes of each target."""
    head, _, behind = PAGE.read_text().partition(BEGIN)
    table, _, rest = behind.partition(END)
    known = {}
    for line in table.strip().splitlines()[2:-1]:
        name, taken, rate = [cell.strip(" `").replace(",", "") for cell in line.strip("|").split("|")]
        known[name] = int(taken), float(rate)
    for name in inputs:
        known[name] = known.get(name, (0, 0.0))[0] + inputs[name], rates[name]
    total = sum(taken for name, (taken, _) in known.items() if name in TARGETS)
    lines = [BEGIN, "| target | inputs | a second |", "|---|---|---|"]
    lines += [f"| `{name}` | {known[name][0]:,} | {known[name][1]:,.0f} |" for name in TARGETS if name in known]
    lines += [f"| all | {total:,} | |", END]
    PAGE.write_text(head + "\n".join(lines) + rest)


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
