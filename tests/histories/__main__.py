"""``python -m tests.histories``: make histories for a given time, check them, and count their events.

It exits with 1 if a promise was broken, names the promise, and keeps the data directory.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from tests.histories.clocks import SkewedClock
from tests.histories.history import History
from tests.histories.nemesis import SmallDisk
from tests.histories.outside import judges
from tests.histories.repeat import Histories, parser_of, repeat
from tests.histories.run import run
from tests.ledger import Command

PART_S: Final = 60.0  # of one history, which is kept in memory


def main() -> int:
    """Make one history after the other until the time is up."""
    parser = parser_of("tests.histories", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long clients work, in all")
    parser.add_argument("--keep", type=Path, help="directory in which every history is stored")
    parser.add_argument("--clocks", action="store_true", help="let the broker's clock jump (needs libfaketime)")
    given = parser.parse_args()
    print(f"judges: {', '.join(judges())}")
    part_s = PART_S if given.ledger else min(given.seconds, PART_S)
    histories = Histories(
        Command(f"tests.histories --seconds {part_s:.0f}{' --clocks' if given.clocks else ''}"),
        partial(_make, part_s, given.clocks),
    )
    end = time.monotonic() + given.seconds
    return repeat(
        histories,
        seed=given.seed,
        is_enough=lambda _: time.monotonic() >= end,
        is_recorded=given.ledger,
        stored=given.keep,
    )


def _make(seconds: float, has_clock: bool, folder: Path, seed: int, running: ExitStack) -> History:
    clock = SkewedClock(folder / "clock") if has_clock else None
    return run(running.enter_context(SmallDisk(folder / "data")), seconds=seconds, seed=seed, clock=clock)


if __name__ == "__main__":
    sys.exit(main())
