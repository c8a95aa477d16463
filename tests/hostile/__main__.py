"""Run hostile conversations with a broker: ``python -m tests.hostile --conversations 100000 --wire flux``."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.broker_process import BrokerProcess
from tests.hostile.conversations import converse
from tests.hostile.exchanges import STREAMS

STEP = 10_000  # conversations between two lines of output


def main() -> int:
    """Run, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("--conversations", type=int, default=100_000, help="of each wire")
    parser.add_argument("--wire", choices=tuple(STREAMS), action="append")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--visitors", type=int, default=1, help="how many are held at once")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    asked = parser.parse_args()
    print(f"seed={asked.seed}", flush=True)
    for wire in asked.wire or STREAMS:
        with (
            tempfile.TemporaryDirectory() as directory,
            BrokerProcess(Path(directory) / "data", wires=tuple(STREAMS)) as broker,
        ):
            end = asked.first + asked.conversations
            for start in range(asked.first, end, STEP):
                numbers = range(start, min(start + STEP, end))
                print(f"{wire:>9}: {converse(broker, wire, numbers, asked.seed, visitors=asked.visitors)}", flush=True)
            assert broker.stop() == 0, broker.log_text()[-5000:]
            errors = [line for line in broker.log_text().splitlines() if "level=error" in line or "Traceback" in line]
            print(f"{wire:>9}: {len(errors)} errors logged", *errors[:5], sep="\n  ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
