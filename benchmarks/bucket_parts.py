"""The cost of a bucket for the broker by part: processor seconds per gigabyte, with kernel and library.

Run: ``python -m benchmarks.bucket_parts [--rounds N]``. The bucket is versitygw if ``POLYWIRE_S3_SERVER`` names it,
otherwise a directory.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.bucket_brokers import bucket
from benchmarks.measure import console
from polywire.cluster.bucket_store import BucketStore
from polywire.store.file import FileStore
from polywire.store.system_files import SYSTEM_FILES
from polywire.store.url import open_bucket

MEBI: Final = 1 << 20
SLOT_BYTES: Final = 64 * MEBI
ROUND_BYTES: Final = 4 * SLOT_BYTES
TIMEOUT_S: Final = 120.0


class Parts:
    """The parts of a broker's writes with a bucket.

    Stores and their memory are reused in every round, as in a broker.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._objects = open_bucket(url, timeout_s=TIMEOUT_S)
        for name in ("cache", "files"):
            (folder / name).mkdir()
        memory = 2 * SLOT_BYTES
        self._store = BucketStore(
            self._objects, folder / "cache", SYSTEM_FILES, cache_bytes=2 * ROUND_BYTES, memory_bytes=memory
        )
        self._files = FileStore(folder / "files", files=SYSTEM_FILES, kept_bytes=memory)
        with (folder / "slot").open("w+b") as file:
            file.truncate(SLOT_BYTES)
            mapped = mmap.mmap(file.fileno(), SLOT_BYTES)
        mapped[:] = os.urandom(SLOT_BYTES)
        self._slot = memoryview(mapped)

    def of_round(self, number: int) -> dict[str, Callable[[], None]]:
        """Return the work of ``ROUND_BYTES`` by name."""
        return {
            "journal objects of 8 MiB, from a mapped slot": lambda: self._put(number, 8 * MEBI),
            "journal objects of 1 MiB, from a mapped slot": lambda: self._put(number, MEBI),
            "segments of 64 MiB, mapped": lambda: self._put(number, SLOT_BYTES),
            "segments, written to the cache and put": lambda: self._seal(number, self._store),
            "segments, written to a directory and synced": lambda: self._seal(number, self._files),
        }

    def _put(self, number: int, size: int) -> None:
        for at in range(0, ROUND_BYTES, size):
            start = at % SLOT_BYTES
            self._objects.create(f"{number}/{size}/{at}", [self._slot[start : start + size]])

    def _seal(self, number: int, whole: BucketStore | FileStore) -> None:
        pieces = [self._slot[start : start + MEBI] for start in range(0, SLOT_BYTES, MEBI)]
        for segment in range(ROUND_BYTES // SLOT_BYTES):
            whole.put_new(f"segments/{number:016x}-{segment:08x}.pws", pieces)


def measure(parts: Parts, number: int) -> dict[str, float]:
    """Run a round; return processor seconds per GB by work."""
    used: dict[str, float] = {}
    for name, work in parts.of_round(number).items():
        begun = time.process_time()
        work()
        used[name] = (time.process_time() - begun) / (ROUND_BYTES / 1e9)
    return used


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bucket_parts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[float]] = {}
    with bucket() as (folder, url, kind):
        open_bucket(url).put("warm", b"-")
        parts = Parts(folder, url)
        measure(parts, 0)  # allocates memory
        for number in range(1, 1 + given.rounds):
            for name, used in measure(parts, number).items():
                found.setdefault(name, []).append(used)
    console.print(f"processor seconds per GB, {kind}, {given.rounds} rounds: median (least to most)")
    for name, rounds in found.items():
        console.print(f"{name}: {statistics.median(rounds):.2f} ({min(rounds):.2f} to {max(rounds):.2f})")


if __name__ == "__main__":
    main()
