"""The cost of forwarding to another process: single requests with and without it, over one connection in one run.

Run: ``python -m benchmarks.carried [--requests N] [--connections N]``

A connection reaches one of two processes, and each of two topics belongs to one of them: the local one responds faster.
On a busy machine the first decile says more than the median.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.lone_requests import MADE, ask_all, connected, create
from benchmarks.measure import console
from polywire.testing.process import BrokerProcess

WIRES: Final = ("cursus", "flux", "polywire")
TOPICS: Final = ("here", "there")
WARMING: Final = 50
MEDIAN: Final = 4  # its index in the deciles


def deciles_us(address: tuple[str, int], wire: str, requests: int) -> tuple[list[float], list[float]]:
    """Return deciles of the time of one request: for the local topic and for the other one, in turns."""
    lone = {topic: MADE[wire](topic) for topic in TOPICS}
    times: Mapping[str, list[int]] = {topic: [] for topic in TOPICS}
    with connected(address, lone[TOPICS[0]], 1) as peers:
        for _, topic in product(range(WARMING + requests), TOPICS):
            begun = time.perf_counter_ns()
            ask_all(peers, lone[topic])
            times[topic].append(time.perf_counter_ns() - begun)
    here, there = sorted(
        ([value / 1000 for value in statistics.quantiles(times[topic][WARMING:], n=10)] for topic in TOPICS),
        key=lambda deciles: deciles[MEDIAN],
    )
    return here, there


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=5)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        BrokerProcess(Path(directory) / "data", "--processes", "2", wires=WIRES) as broker,
    ):
        for topic in TOPICS:
            create(broker.addresses, "polywire", topic)
        for wire in WIRES:
            found = [deciles_us(broker.addresses[wire], wire, given.requests) for _ in range(given.connections)]
            for name, decile in (("median", MEDIAN), ("first decile", 0)):
                own, carried = (statistics.median(one[decile] for one in column) for column in zip(*found, strict=True))
                console.print(
                    f"{wire}, {name}: own {own:.0f} µs, carried {carried:.0f} µs, more {carried - own:.0f} µs"
                )


if __name__ == "__main__":
    main()
