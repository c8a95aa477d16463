"""The log over a slow bucket: time of a start on an empty disk, latency of acknowledgements, and throughput.

Run: ``python -m benchmarks.bucket [--segments N] [--objects N] [--seconds N]``

The bucket is in memory and delays every request like a cloud's; there is one connection per thread and no limit of
bytes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks.measure import console
from polywire.clock import SystemClock
from polywire.cluster import uploader
from polywire.cluster.opening import ShardConfig, open_shard
from polywire.errors import BrokerError
from polywire.log.log import FileLog
from polywire.log.segments import sealer
from polywire.log.settings import LogSettings
from polywire.store.objects import FIRST, Stored, shard_root
from polywire.testing.memory_objects import MemoryObjects
from polywire.types import Buffer, Level
from tests.unit.log.rig import Memory, RigLoop, abandon, batch_of

SHARD = shard_root(FIRST)

MEBI: Final = 1 << 20
START_REQUEST_S: Final = 0.04
PUT_S: Final = 0.035  # of a small object
FULL_PUT_S: Final = 0.12  # of 8 MiB; larger ones take longer
FULL_BYTES: Final = 8 * MEBI
RECORDS_PER_S: Final = 1000
SMALL: Final = LogSettings(slot_bytes=64 * 1024, disk_reserve_bytes=0, durability=Level.STORED)
USUAL: Final = LogSettings(disk_reserve_bytes=0, durability=Level.STORED)


class SlowObjects(MemoryObjects):
    """A bucket that delays every request."""

    def __init__(self) -> None:
        super().__init__()
        self.request_s = 0.0
        self.byte_s = 0.0
        """Additional delay per written byte."""
        self.created = 0

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        time.sleep(self.request_s + self.byte_s * sum(map(len, parts)))
        self.created += 1
        super().create(name, parts)

    def read(self, name: str) -> Stored:
        time.sleep(self.request_s)
        return super().read(name)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        time.sleep(self.request_s)
        return super().read_range(name, start, stop)

    def size(self, name: str) -> int:
        time.sleep(self.request_s)
        return super().size(name)

    def delete(self, name: str) -> None:
        time.sleep(self.request_s)
        super().delete(name)


class Shard:
    """One log over one bucket, opened in one empty directory after the other."""

    def __init__(self, objects: SlowObjects, folder: Path) -> None:
        self._objects: Final = objects
        self._directories: Final = (folder / str(number) for number in count())

    def open(self, settings: LogSettings) -> tuple[FileLog, RigLoop]:
        """Open the log as leader."""
        loop = RigLoop()
        place = ShardConfig(self._objects, self._objects, next(self._directories), "bench", cache_bytes=1 << 30)
        return open_shard(place, settings=settings, loop=loop, clock=SystemClock(), replay=Memory()), loop


def start_s(folder: Path, *, segments: int, objects: int) -> tuple[float, int, int]:
    """Return the seconds until a broker without local files leads, and the objects above the floor."""
    vars(sealer)["choose"] = lambda *_, **__: []  # small segments are not merged
    uploader.PUT_INTERVAL_S = 0.0  # type: ignore[misc]
    bucket = SlowObjects()
    shard = Shard(bucket, folder)
    log, loop = shard.open(SMALL)
    partition = log.open_partition(1)
    answers: list[int | BrokerError] = []

    def append(size: int) -> None:
        loop.run_until(lambda: not log.congested)
        log.append(partition, batch_of([bytes(size)]), level=Level.STORED, done=answers.append)
        wanted = len(answers) + 1
        log.commit()
        loop.run_until(lambda: len(answers) >= wanted)

    while len(bucket.list(f"{SHARD}segments/")) < segments:
        append(40_000)
    loop.run_until(lambda: not log.sealing)
    abandon(log)
    log, loop = shard.open(USUAL)  # whose slot takes long to fill
    loop.run_until(lambda: not log.sealing)
    partition = log.partition(1)
    for _ in range(objects):
        append(100)
    abandon(log)
    bucket.request_s = START_REQUEST_S
    there = len(bucket.list(f"{SHARD}segments/")), len(bucket.list(f"{SHARD}journal/"))
    begun = time.monotonic()
    log, _ = shard.open(USUAL)
    passed = time.monotonic() - begun
    abandon(log)
    return passed, *there


def acknowledged_ms(folder: Path, seconds: float) -> tuple[list[float], float]:
    """Return the latency of evenly spread records, and puts per second."""
    uploader.PUT_INTERVAL_S = 0.1  # type: ignore[misc]
    bucket = SlowObjects()
    log, loop = Shard(bucket, folder).open(USUAL)
    partition = log.open_partition(1)
    loop.run_until(lambda: not log.sealing)
    bucket.request_s, bucket.created = PUT_S, 0
    waited: list[float] = []
    begun = time.monotonic()
    sent = 0
    while (now := time.monotonic()) - begun < seconds:
        while sent < (now - begun) * RECORDS_PER_S:
            log.append(
                partition,
                batch_of([bytes(100)]),
                level=Level.STORED,
                done=lambda _, at=now: waited.append(time.monotonic() - at),  # type: ignore[misc]
            )
            sent += 1
        log.commit()
        loop.run_pass(0.001)
    puts = bucket.created / seconds
    loop.run_until(lambda: len(waited) == sent)
    abandon(log)
    return [1000 * one for one in waited], puts


def stored_mb_per_s(folder: Path, seconds: float) -> tuple[float, float]:
    """Return acknowledged megabytes per second, and processor seconds per gigabyte of everything involved."""
    bucket = SlowObjects()
    log, loop = Shard(bucket, folder).open(USUAL)
    partition = log.open_partition(1)
    loop.run_until(lambda: not log.sealing)
    bucket.request_s, bucket.byte_s = PUT_S, (FULL_PUT_S - PUT_S) / FULL_BYTES
    batch, stored = bytes(batch_of([bytes(MEBI)])), 0

    def done(offset: int | BrokerError) -> None:
        nonlocal stored
        assert not isinstance(offset, BrokerError), offset
        stored += len(batch)

    begun, used = time.monotonic(), time.process_time()
    sent = 0
    while time.monotonic() - begun < seconds:
        while not log.congested and sent - stored < 64 * MEBI:
            log.append(partition, bytearray(batch), level=Level.STORED, done=done)
            sent += len(batch)
            log.commit()
        loop.run_pass(0.001)
    passed, used = time.monotonic() - begun, time.process_time() - used
    rate = stored / passed / 1e6
    loop.run_until(lambda: stored == sent)
    abandon(log)
    return rate, used / (stored / 1e9)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bucket", description=__doc__)
    parser.add_argument("--segments", type=int, default=1000)
    parser.add_argument("--objects", type=int, default=990, help="above the floor; a slot is sealed at 1,000")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds, segments, objects = start_s(folder / "start", segments=given.segments, objects=given.objects)
        console.print(
            f"start on an empty disk, {segments} segments, {objects} journal objects,"
            f" {1000 * START_REQUEST_S:g} ms a request: {seconds:.2f} s"
        )
        waited, puts = acknowledged_ms(folder / "waits", given.seconds)
        cuts = statistics.quantiles(waited, n=100)
        console.print(
            f"acknowledgement, {RECORDS_PER_S} records/s, {1000 * PUT_S:g} ms a put:"
            f" p50 {cuts[49]:.0f} ms, p99 {cuts[98]:.0f} ms, {puts:.1f} puts/s"
        )
        rate, used = stored_mb_per_s(folder / "load", given.seconds)
        console.print(
            f"stored, {1000 * FULL_PUT_S:g} ms a put of 8 MiB: {rate:.0f} MB/s, {used:.2f} processor seconds/GB with the memory's copy"
        )


if __name__ == "__main__":
    main()
