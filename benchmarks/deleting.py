"""The delay of syncs and producers while topics of many gigabytes are deleted.

Run: ``python -m benchmarks.deleting [--gigabytes N] [--times N] [--partitions N] [--directory PATH]``

The log alone, without a protocol, on real files: it is filled, sealed and synced. Then all its partitions are dropped
at once, while another one is appended to at a steady rate. Every written group is timed until the log reports that it
is on disk, and so is every turn of the loop. With ``--times`` the same log is filled and emptied again, so that more
can be deleted than the disk holds. The files are deleted at the end of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from collections import deque
from pathlib import Path

import uvloop

from polywire.clock import SystemClock
from polywire.errors import Busy
from polywire.log.base import Encoding
from polywire.log.log import FileLog
from polywire.log.opening import open_log
from polywire.log.settings import LogSettings
from polywire.records.columns import BatchHeader, Record
from polywire.records.rows import from_records
from polywire.types import Level

GIGA = 1_000_000_000
FIRST = 1000  # incarnation of the first deleted partition
STEADY_BYTES = 50_000_000  # a second, during the deletion
BATCH_BYTES = 1_000_000
TURN_S = 0.002  # between two checks
LIST_S = 0.25  # between two listings of the files
QUIET_S = 3.0  # before the deletion; the time after it is as long as the deletion


class NoState:
    """A broker without state."""

    def restore(self, snapshot: bytes) -> None:
        """Do nothing: nothing is stored."""

    def apply(self, change: bytes) -> None:
        """Do nothing: nothing is stored."""

    def replayed(self, header: BatchHeader, producer_id: bytes) -> None:
        """Do nothing: nothing is stored."""

    def snapshot(self) -> bytes:
        return b""

    def encoding(self) -> Encoding:
        return Encoding(iter((self.snapshot(),)))


class Watch:
    """The longest waits since its creation, in seconds."""

    def __init__(self, log: FileLog) -> None:
        self._log = log
        self._unsynced: deque[tuple[int, float]] = deque()
        self._last = time.monotonic()
        self._refused: float | None = None
        self._used = time.thread_time()
        self.sync = self.turn = self.work = self.produce = 0.0

    def wrote(self) -> None:
        self._unsynced.append((self._log._writer.sequence, time.monotonic()))

    def look(self) -> None:
        now = time.monotonic()
        used = time.thread_time()
        self.turn = max(self.turn, now - self._last - TURN_S)
        self.work = max(self.work, used - self._used)
        self._last, self._used = now, used
        while self._unsynced and self._unsynced[0][0] <= self._log.synced_sequence:
            self.sync = max(self.sync, now - self._unsynced.popleft()[1])
        if self._unsynced:
            self.sync = max(self.sync, now - self._unsynced[0][1])

    def refused(self, is_so: bool) -> None:
        """Note that the log refuses batches, or accepts them again."""
        now = time.monotonic()
        if is_so:
            self._refused = self._refused or now
        elif self._refused is not None:
            self.produce = max(self.produce, now - self._refused)
            self._refused = None

    def __str__(self) -> str:
        waits = (
            ("written until synced", self.sync),
            ("loop held", self.turn),
            ("longest work of the loop", self.work),
            ("produce refused", self.produce),
        )
        return ", ".join(f"{name} {seconds * 1e3:4.0f} ms" for name, seconds in waits)


def append(log: FileLog, incarnation: int, batch: bytes) -> bool:
    """Append a batch; return whether the log accepted it."""
    if log.congested:
        return False
    try:
        log.append(log.partition(incarnation), bytearray(batch), level=Level.WRITTEN, done=None)
    except Busy:
        return False
    log.commit()
    return True


async def fill(log: FileLog, size: int, partitions: range) -> None:
    """Append until that many bytes are stored, all sealed except those in the last slots."""
    for number in partitions:
        log.open_partition(number)
    log.commit()
    records = 1000
    batch = bytes(from_records([Record(bytes(BATCH_BYTES // len(partitions) // records or 10))] * records))
    written = 0
    while written < size:
        for number in partitions:
            if append(log, number, batch):
                written += len(batch)
        await asyncio.sleep(TURN_S if log.congested else 0)
    while log.sealing:  # noqa: ASYNC110 (the log sends no event)
        await asyncio.sleep(TURN_S)


async def beside(
    log: FileLog, watch: Watch, seconds: float, steady: int, directory: Path, gone: frozenset[str]
) -> float:
    """Append to a partition for that long, or until these segments are deleted; return the duration."""
    batch = bytes(from_records([Record(bytes(1000))] * (BATCH_BYTES // 10_000)))
    begun = looked = time.monotonic()
    written = 0
    while time.monotonic() - begun < seconds:
        while written < (time.monotonic() - begun) * STEADY_BYTES:
            taken = append(log, steady, batch)
            watch.refused(not taken)
            if not taken:
                break
            watch.wrote()
            written += len(batch)
        watch.look()
        await asyncio.sleep(TURN_S)
        watch.look()
        if gone and time.monotonic() - looked > LIST_S:
            looked = time.monotonic()
            if not gone & segments(directory):
                break
    return time.monotonic() - begun


def segments(directory: Path) -> frozenset[str]:
    place = directory / "segments"
    return frozenset(os.listdir(place) if place.exists() else ())


async def measure(directory: Path, size: int, times: int, partitions: int) -> None:
    loop = asyncio.get_running_loop()
    log = open_log(directory, settings=LogSettings(), loop=loop, clock=SystemClock(), replay=NoState())
    for number in range(times):
        steady, first = 1 + number, FIRST + number * partitions
        await fill_and_delete(log, directory, size, steady, range(first, first + partitions))
        log.drop_partition(steady)
        log.commit()
    log.close()


async def fill_and_delete(log: FileLog, directory: Path, size: int, steady: int, partitions: range) -> None:
    """Print how long others wait before, during and after the deletion."""
    log.open_partition(steady)
    kept = segments(directory)
    begun = time.monotonic()
    await fill(log, size, partitions)
    made = segments(directory) - kept
    print(
        f"{size / GIGA:.0f} GB of {len(partitions)} partitions in {len(made)} segments, made in {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    before = Watch(log)
    await beside(log, before, QUIET_S, steady, directory, frozenset())
    print(f"before:   {before}")
    during = Watch(log)
    for number in partitions:
        log.drop_partition(number)
    log.commit()
    seconds = await beside(log, during, 600, steady, directory, made)
    left = len(made & segments(directory))
    print(f"deleting: {during}; {size / GIGA:.0f} GB in {seconds:.1f} s, {left} of these segments left")
    after = Watch(log)  # for the same duration, because the longest of many waits is longer than of few
    await beside(log, after, seconds, steady, directory, frozenset())
    print(f"after:    {after}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=24.0)
    parser.add_argument("--times", type=int, default=1, help="that so much is stored and deleted")
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument(
        "--directory",
        type=Path,
        default=None,
        help="on the disk to be measured; the system's folder for such files if not",
    )
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="deleting-", dir=arguments.directory))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            size = int(arguments.gigabytes * GIGA)
            runner.run(measure(directory, size, arguments.times, arguments.partitions))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
