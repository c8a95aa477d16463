"""Time and memory of a start with a long log of many partitions.

Run: ``python -m benchmarks.start [--gigabytes N] [--partitions N] [--slot-mib N] [--directory PATH]``

With ``--writes N``, the log instead has N journal writes of one record of 60 bytes. The starts are one after a kill, and one
after a clean stop.

The log is generated, with an equal share of every journal file for each partition. Segments have true footers and holes instead of batches,
so a hundred gigabytes take the disk space of their footers. A broker is started on it in the usual way.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure import processor_seconds, resident_bytes
from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.clock import SystemClock
from polywire.log.journal.snapshot import put_snapshot
from polywire.log.journal.steps import sealed_content
from polywire.log.log import FileLog
from polywire.log.partition.partition import FilePartition
from polywire.log.segments.format import SEGMENT_MAGIC, SEGMENT_VERSION, TRAILER
from polywire.log.segments.sealer import snapshot_name
from polywire.log.segments.sealing import Plan, collect_slots, snapshot_of
from polywire.log.segments.segment_set import segment_name
from polywire.log.settings import LogSettings
from polywire.log.state import LogState
from polywire.records.checksum import xxh64
from polywire.testing import process
from polywire.types import Level, TopicName
from tests.unit.log.rig import RigLoop, abandon, batch_of

GIGA = 1_000_000_000
TOPIC_PARTITIONS = 100
RECORD_BYTES = 100
SLOT_SECONDS = 10  # to fill a journal file
MEBI = 1024 * 1024
EPOCH = 1
READY_SECONDS_MAX = 300.0  # of a start on a busy machine
SMALL_BYTES = 60
MADE = 1_000_000  # numbers of generated segments start after those of the broker

RUN = np.dtype(
    [
        ("partition", "<u8"),
        ("token", "V16"),
        ("position", "<u8"),
        ("size", "<u8"),
        ("first_offset", "<u8"),
        ("next_offset", "<u8"),
        ("first_address", "<u8"),
        ("next_address", "<u8"),
        ("first_time_us", "<i8"),
        ("last_time_us", "<i8"),
        ("index_start", "<u4"),
        ("index_count", "<u4"),
        ("epoch_start", "<u4"),
        ("epoch_count", "<u4"),
        ("record_count", "<u8"),
    ]
)
EPOCHS = np.dtype([("epoch", "<u4"), ("zero", "<u4"), ("first_offset", "<u8")])
ENTRIES = np.dtype([("offset", "<u8"), ("position", "<u8"), ("address", "<u8"), ("time_us", "<i8")])


class Maker:
    """Generates segments one after the other. Guards: runs of a partition are consecutive."""

    def __init__(self, incarnations: list[int], slot_bytes: int, now_us: int) -> None:
        self._incarnations = np.array(sorted(incarnations), dtype="<u8")
        self._mean = slot_bytes // len(incarnations)
        self._random = np.random.default_rng(1)
        self.offsets = np.zeros(len(incarnations), dtype="<u8")
        self.addresses = np.zeros(len(incarnations), dtype="<u8")
        self.time_us = now_us - 86_400_000_000

    def footer(self) -> tuple[int, bytes]:
        """Return the size of the batches, and the bytes that follow them."""
        count = len(self._incarnations)
        records = np.maximum(1, self._random.poisson(self._mean / RECORD_BYTES, count)).astype("<u8")
        runs = np.zeros(count, dtype=RUN)
        runs["partition"] = self._incarnations
        runs["size"] = (records * RECORD_BYTES + 104 + 7) // 8 * 8
        runs["position"] = np.concatenate(([0], np.cumsum(runs["size"])[:-1]))
        runs["first_offset"], runs["first_address"] = self.offsets, self.addresses
        self.offsets = self.offsets + records
        self.addresses = self.addresses + records * (RECORD_BYTES + 10)
        runs["next_offset"], runs["next_address"] = self.offsets, self.addresses
        runs["first_time_us"] = self.time_us + self._random.integers(0, SLOT_SECONDS * 500_000, count)
        self.time_us += SLOT_SECONDS * 1_000_000
        runs["last_time_us"] = self.time_us - 1
        runs["index_start"] = runs["epoch_start"] = np.arange(count)
        runs["index_count"] = runs["epoch_count"] = 1
        runs["record_count"] = records
        epochs = np.zeros(count, dtype=EPOCHS)
        epochs["epoch"], epochs["first_offset"] = EPOCH, runs["first_offset"]
        entries = np.zeros(count, dtype=ENTRIES)
        for field, of in (
            ("offset", "first_offset"),
            ("position", "position"),
            ("address", "first_address"),
            ("time_us", "first_time_us"),
        ):
            entries[field] = runs[of]
        footer = runs.tobytes() + epochs.tobytes() + entries.tobytes()
        data = int(runs["size"].sum())
        head = TRAILER.pack(
            SEGMENT_MAGIC, SEGMENT_VERSION, data, len(footer), count, count, count, xxh64(footer), 0, 0
        )[:-8]
        return data, 2 * (footer + head + xxh64(head).to_bytes(8, "little"))


def make_up(directory: Path, size: int, partitions: int, slot_bytes: int) -> int:
    """Create a data directory with such a log; return its number of segments."""
    loop, clock = RigLoop(), SystemClock()
    broker = Broker.open(directory, BrokerSettings(), loop, clock, log_settings=LogSettings())
    for number in range(-(-partitions // TOPIC_PARTITIONS)):
        broker.create_topic(
            TopicName("made", f"up-{number}"), min(TOPIC_PARTITIONS, partitions - number * TOPIC_PARTITIONS)
        )
    broker.commit()
    log = broker._log
    assert isinstance(log, FileLog), "it was opened on files"
    state: LogState = log._state
    maker = Maker(list(state.partitions), slot_bytes, clock.now_us())
    (directory / "segments").mkdir(exist_ok=True)
    written = count = 0
    numbers = []
    while written < size:
        data, footer = maker.footer()
        numbers.append(EPOCH << 32 | (MADE + count))
        with (directory / segment_name(numbers[-1])).open("wb") as file:
            file.truncate(data)
            file.seek(data)
            file.write(footer)
        written += data
        count += 1
    for number, (_, partition) in enumerate(sorted(state.partitions.items())):
        _set(partition, int(maker.offsets[number]), int(maker.addresses[number]), maker.time_us)
    image = state.image(log._writer.sequence, state.partitions.values())
    taken = collect_slots(state, state.contents, log._journal.views, image, strict=True)
    encoding, sequence = log.broker_state()
    for _ in encoding.encode_rest():
        """All of it at once."""
    made = snapshot_of(taken, Plan([], {}), [], (encoding.pieces, sequence))
    name = snapshot_name(EPOCH, MADE)
    made.segments[:] = [*made.segments, *numbers]  # type: ignore[index]
    put_snapshot(log._disk.store, name, made)
    done: list[None] = []
    log._name(sealed_content([], []), log._writer.sequence, lambda: done.append(None), (name, log._writer.sequence))
    loop.run_until(lambda: done)
    abandon(log)  # if it was closed, it would seal a state without these segments
    return count


def write_small(directory: Path, writes: int) -> None:
    """Create a data directory with so many journal writes of one record, as a killed broker leaves it."""
    loop = RigLoop()
    broker = Broker.open(directory, BrokerSettings(), loop, SystemClock(), log_settings=LogSettings())
    broker.create_topic(TopicName("made", "small"), 1)
    broker.commit()
    log = broker._log
    assert isinstance(log, FileLog), "it was opened on files"
    (partition,) = log._state.partitions.values()
    batch = batch_of([bytes(SMALL_BYTES)])
    for number in range(writes):
        while log.congested:
            loop.run_pass(0.01)
        log.append(partition, batch, level=Level.WRITTEN, done=None)
        log.commit()
        if number % 1000 == 0:
            loop.run_pass()
    loop.run_until(lambda: not log.sealing)
    abandon(log)


def _set(partition: FilePartition, next_offset: int, next_address: int, time_us: int) -> None:
    partition.begin_epoch(EPOCH)
    partition.next_offset = partition.synced_offset = next_offset
    partition.next_address = next_address
    partition.last_append_time_us = time_us


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a broker: its time until the first response, processor time and ``resident_bytes``."""

    seconds: float
    processor_s: float
    memory: Mapping[str, int]

    def __str__(self) -> str:
        mebi = {name: size / MEBI for name, size in self.memory.items()}
        return (
            f"{self.seconds:.1f} s, {self.processor_s:.1f} s of a processor, peak {mebi['VmHWM']:.0f} MiB, "
            f"then {mebi['VmRSS']:.0f} MiB, {mebi['RssAnon']:.0f} of them not of files; load {os.getloadavg()[0]:.1f}"
        )


def started(directory: Path, *, then_kill: bool = True) -> Start:
    """Start a broker on a data directory, and kill or stop it once it has responded."""
    setattr(process, "READY_SECONDS_MAX", READY_SECONDS_MAX)  # noqa: B010 (it is Final to everybody else)
    begun = time.monotonic()
    broker = process.BrokerProcess(directory)
    try:
        broker.start()
        return Start(time.monotonic() - begun, processor_seconds(broker.pid), resident_bytes(broker.pid))
    finally:
        if then_kill:
            broker.kill()
        else:
            broker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=100.0)
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--slot-mib", type=int, default=64)
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the log is made; the system's folder for such files if not"
    )
    parser.add_argument("--writes", type=int, default=0, help="small journal writes, instead of a long log")
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="start-", dir=arguments.directory))
    try:
        if arguments.writes:
            write_small(place / "data", arguments.writes)
            print(f"after a kill: {started(place / 'data', then_kill=False)}")
            print(f"after a stop: {started(place / 'data')}")
            return
        begun = time.monotonic()
        count = make_up(
            place / "data", int(arguments.gigabytes * GIGA), arguments.partitions, arguments.slot_mib * MEBI
        )
        os.sync()
        print(
            f"{arguments.gigabytes:.0f} GB, {arguments.partitions} partitions, {count} segments; made up in {time.monotonic() - begun:.0f} s"
        )
        for state in ("first start", "second start"):
            print(f"{state}: {started(place / 'data')}")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
