"""``kill -9`` of a writer and power losses: nothing acknowledged is lost, duplicated or reordered."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from polywire.errors import Missing
from polywire.log.partition.partition import FilePartition
from polywire.types import Level
from tests.crash.disk import PAGE, JournalDisk
from tests.crash.journal_writer import PARTITIONS
from tests.crash.test_merge import copy_at_rest, fill_slots, numbered
from tests.unit.log.rig import SMALL, Rig, batch_of

KILLS = 10
RUN_SECONDS = (0.05, 0.7)
LINES_MIN = 30  # of a run, however slow a busy machine is


def run_writer(directory: Path, seed: int, seconds: float) -> list[str]:
    """Return what was acknowledged to a writer before it was killed."""
    command = [sys.executable, "-m", "tests.crash.journal_writer", str(directory), str(seed)]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paths) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        timer = time.monotonic() + seconds
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if time.monotonic() > timer and len(lines) > LINES_MIN:
                process.send_signal(signal.SIGKILL)
                break
        lines += process.stdout.readlines()
    return [line.strip() for line in lines if line.endswith("\n")]


def test_nothing_acknowledged_is_lost_by_a_kill(tmp_path: Path) -> None:
    chosen = random.Random(4)
    acknowledged: list[list[tuple[int, int, int]]] = [[] for _ in range(PARTITIONS)]
    changes = 0
    for kill in range(KILLS):
        for line in run_writer(tmp_path, kill, chosen.uniform(*RUN_SECONDS)):
            what, *numbers = line.split()
            if what == "c":
                changes = max(changes, int(numbers[0]) + 1)
            else:
                which, offset, number, count = map(int, numbers)
                acknowledged[which].append((offset, number, count))
    rig = Rig(tmp_path, SMALL)
    assert rig.log.epoch == KILLS + 1
    kept = [change for change in rig.memory.changes if change != b"published"]
    assert kept == [b"%d" % number for number in range(len(kept))]
    assert len(kept) >= changes
    for which in range(PARTITIONS):
        values = rig.read(rig.log.partition(which + 1))
        assert values == [b"%d:%d" % (which, number) for number in range(len(values))], (
            "neither duplicated nor reordered"
        )
        for offset, number, count in acknowledged[which]:
            assert offset == number, "the acknowledged offset is right"
            assert offset + count <= len(values), "nothing acknowledged is missing"
    assert sum(map(len, acknowledged)) > 100, "the writers had time to write"
    rig.log.close()


@pytest.mark.parametrize("interval_ms", [2, 600_000])
def test_power_loss_drops_only_unsynced_records(tmp_path: Path, disk: JournalDisk, interval_ms: int) -> None:
    for seed in range(8):
        directory = tmp_path / str(seed)
        chosen = random.Random(seed)
        rig = Rig(directory, replace(SMALL, sync_interval_ms=interval_ms))
        partition = rig.log.open_partition(1)
        rig.settle()
        synced: list[list[int]] = []
        for number in range(chosen.randrange(50, 1500)):
            level = Level.SYNCED if chosen.random() < 0.02 else Level.WRITTEN
            reported = rig.append(partition, [b"%d" % number + b"." * chosen.choice((0, 300))], level)
            if level is Level.SYNCED:
                synced.append(reported)
            rig.loop.run_pass()
            if rig.log.congested:
                rig.loop.run_until(partial(_is_relieved, rig))
        seen, epoch = partition.readable_offset, rig.log.epoch
        rig.kill()
        disk.lose_power(directory, None if seed % 2 else chosen)
        rig.open()
        partition = rig.log.partition(1)
        values = numbered(rig.read(partition))
        assert values == list(range(len(values)))
        for reported in synced:
            assert not reported or reported[0] < len(values), "records acknowledged as synced survive"
        assert partition.epoch_end(epoch) == len(values)
        rig.append(partition, [b"of the next epoch"] * (seen - len(values) + 2), Level.SYNCED)
        rig.settle()
        assert partition.epoch_end(epoch) == len(values), "a reader that had read further learns where its epoch ended"
        rig.log.close()


def test_slots_are_sealed_without_being_synced(tmp_path: Path, disk: JournalDisk) -> None:
    """Of slots that hold only records, one small group of the journal is flushed, and that is enough."""
    rig = Rig(tmp_path / "log", replace(SMALL, sync_interval_ms=600_000))
    partition = rig.log.open_partition(1)
    rig.settle()
    fill_slots(rig, [partition], 1)
    lost = 0
    for slots in range(1, 6):
        flushed = disk.flushed_bytes
        slot = rig.log._journal.current
        while rig.log._journal.current is slot:
            rig.append(partition, [b"%d" % partition.next_offset + b"." * 1500])
            rig.log.commit()
        sealed = partition.next_offset - 1
        rig.loop.run_until(lambda: not rig.log.sealing)
        assert disk.flushed_bytes - flushed < PAGE
        assert slot is not None
        assert rig.log.synced_sequence == slot.last
        copy = tmp_path / f"copy-{slots}"
        copy_at_rest(rig.directory, copy)
        lost += disk.lose_power(copy, random.Random(slots) if slots % 2 else None, origin=rig.directory)
        other = Rig(copy, SMALL)
        values = numbered(other.read(other.log.partition(1)))
        assert values == list(range(len(values)))
        assert len(values) >= sealed, "sealed records are there"
        other.log.close()
    assert lost > 16, "reused slots never reached the disk"
    rig.log.close()


@pytest.mark.parametrize("interval_ms", [2, 600_000])
def test_power_loss_among_changes(tmp_path: Path, disk: JournalDisk, interval_ms: int) -> None:
    """Changes, trims, drops, stages and publishes beside records: what is left is the state after some group."""
    for seed in range(6):
        chosen = random.Random(seed)
        rig = Rig(tmp_path / f"log-{seed}", replace(SMALL, sync_interval_ms=interval_ms))
        kept, trimmed = rig.log.open_partition(1), rig.log.open_partition(2)
        rig.settle()
        synced = 0
        for step in range(chosen.randrange(200, 500)):
            for partition in (kept, trimmed):
                rig.append(partition, [b"%d" % partition.next_offset + b"." * 900])
                rig.log.commit()
            if chosen.random() < 0.1:
                rig.change(b"%d" % kept.next_offset)
                rig.log.commit()
            if chosen.random() < 0.05:
                rig.log.trim(2, chosen.randrange(trimmed.first_offset, trimmed.next_offset + 1))
                rig.log.commit()
                rig.log._sealer.remove()
            if chosen.random() < 0.05:
                publish_one(rig, kept, bytes([step % 255 + 1]) * 16)
            rig.loop.run_pass()
            if rig.log.congested:
                rig.loop.run_until(partial(_is_relieved, rig))
            if chosen.random() < 0.02:
                rig.settle()
                synced = kept.next_offset
        trimmed_at = trimmed.first_offset
        rig.kill()
        disk.lose_power(rig.directory, None if seed % 2 else chosen)
        rig.open()
        kept, trimmed = rig.log.partition(1), rig.log.partition(2)
        values = numbered(rig.read(kept))
        assert values == list(range(len(values)))
        assert len(values) >= synced
        changes = [int(change) for change in rig.memory.changes if change != b"published"]
        assert changes == sorted(changes)
        assert all(at <= len(values) for at in changes), "a change survives only with everything before it"
        assert trimmed.first_offset <= trimmed_at
        first = trimmed.first_offset
        assert numbered(rig.read(trimmed, first)) == list(range(first, trimmed.next_offset))
        rig.log.close()


def publish_one(rig: Rig, partition: FilePartition, token: bytes) -> None:
    """Stage the partition's next record and publish it at once."""
    rig.log.commit()
    value = b"%d" % partition.next_offset
    rig.log.stage(token, partition, batch_of([value]), expires_at_us=2**62, level=Level.WRITTEN, done=None)
    rig.log.publish([token], b"published", level=Level.WRITTEN, done=lambda _: None)
    rig.memory.apply(b"published")
    rig.log.commit()


def test_power_loss_without_new_records_is_an_offset_out_of_range(tmp_path: Path, disk: JournalDisk) -> None:
    rig = Rig(tmp_path, SMALL)
    partition = rig.log.open_partition(1)
    rig.append(partition, [b"kept"], Level.SYNCED)
    rig.settle()
    rig.append(partition, [b"lost"])
    rig.log.commit()
    assert partition.readable_offset == 2
    rig.kill()
    disk.lose_power(tmp_path, None)
    rig.open()
    with pytest.raises(Missing):
        rig.read_once(rig.log.partition(1), 2)
    rig.log.close()


def _is_relieved(rig: Rig) -> bool:
    return not rig.log.congested
