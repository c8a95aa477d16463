"""Time of a start on an empty data directory, and of its imports.

Run: ``python -m benchmarks.empty_start [--rounds N]``

A warm start finds all its files in the page cache. Before a cold one the cache is emptied, if this user may do so. Packages
are sorted by the time of their own modules, which is longer than without the interpreter's report.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Final

from benchmarks.measure import processor_seconds, resident_bytes
from polywire.testing.process import BrokerProcess

DROPPED: Final = Path("/proc/sys/vm/drop_caches")
ALL_CACHES: Final = "3"
SHOWN: Final = 15
MEBI: Final = 1024 * 1024
MODULE: Final = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", re.MULTILINE)
DEPTH: Final = 3  # names of our own packages are shown to this depth


def started(directory: Path, environment: dict[str, str]) -> tuple[float, float, float, str]:
    """Start and stop a broker; return seconds until it was ready, processor seconds, MiB of memory, and its log."""
    broker = BrokerProcess(directory / "data", environment=environment)
    begun = monotonic()
    broker.start()
    seconds = monotonic() - begun
    figures = processor_seconds(broker.pid), resident_bytes(broker.pid)["VmRSS"] / MEBI
    broker.stop()
    return seconds, *figures, broker.log_text()


def measured(*, rounds: int, is_cold: bool) -> str:
    """Return the medians of several starts."""
    taken: list[Sequence[float]] = []
    for _ in range(rounds):
        if is_cold:
            os.sync()
            DROPPED.write_text(ALL_CACHES)
        with tempfile.TemporaryDirectory() as directory:
            taken.append(started(Path(directory), {})[:3])
    seconds, processor_s, mebi = (statistics.median(column) for column in zip(*taken, strict=True))
    return f"{seconds:.2f} s, {processor_s:.2f} s of a processor, {mebi:.0f} MiB"


def imports() -> Counter[str]:
    """Return the microseconds that each package took in one start."""
    with tempfile.TemporaryDirectory() as directory:
        log = started(Path(directory), {"PYTHONPROFILEIMPORTTIME": "1"})[3]
    found = Counter[str]()
    for micros, module in MODULE.findall(log):
        parts = module.split(".")
        found[".".join(parts[: DEPTH if parts[0] == "polywire" else 1])] += int(micros)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    measured(rounds=1, is_cold=False)
    print(f"warm: {measured(rounds=rounds, is_cold=False)}; load {os.getloadavg()[0]:.1f}")
    if os.access(DROPPED, os.W_OK):
        print(f"cold: {measured(rounds=rounds, is_cold=True)}")
    found = imports()
    print(f"imports: {found.total() / 1e6:.2f} s with the interpreter's report")
    for package, micros in found.most_common(SHOWN):
        print(f"  {micros / 1000:6.1f} ms  {package}")


if __name__ == "__main__":
    main()
