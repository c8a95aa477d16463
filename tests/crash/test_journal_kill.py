"""``kill -9`` of a writer at random moments, and a power loss behind it: nothing acknowledged is missing, doubled or reordered."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from polywire.errors import Missing
from polywire.log.journal_file import Slot, read_seed
from polywire.log.recovery import find_chain
from polywire.log.snapshot import get_snapshot
from polywire.store.file import FileStore
from polywire.types import Level
from tests.crash.journal_writer import PARTITIONS
from tests.unit.log.rig import SMALL, Rig

KILLS = 10
RUN_SECONDS = (0.05, 0.7)


def run_writer(directory: Path, seed: int, seconds: float) -> list[str]:
    """What a writer was told before it was killed."""
    command = [sys.executable, "-m", "tests.crash.journal_writer", str(directory), str(seed)]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paths) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        timer = time.monotonic() + seconds
        lines = []
        for line in process.stdout:
            lines.append(line)
            if time.monotonic() > timer:
                process.send_signal(signal.SIGKILL)
                break
        lines += process.stdout.readlines()
    return [line.strip() for line in lines if line.endswith("\n")]


@pytest.mark.timeout(120)
def test_nothing_acknowledged_is_lost_by_kill(tmp_path: Path) -> None:
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
        assert values == [b"%d:%d" % (which, number) for number in range(len(values))], "neither doubled nor reordered"
        for offset, number, count in acknowledged[which]:
            assert offset == number, "an acknowledgement tells the place"
            assert offset + count <= len(values), "nothing acknowledged is missing"
    assert sum(map(len, acknowledged)) > 100, "the writers had time to write"
    rig.log.close()


def test_power_loss_takes_only_what_was_not_synced(tmp_path: Path) -> None:
    for seed in range(8):
        directory = tmp_path / str(seed)
        chosen = random.Random(seed)
        rig = Rig(directory, SMALL)
        partition = rig.log.open_partition(1)
        rig.settle()
        synced: list[list[int]] = []
        for number in range(chosen.randrange(50, 1500)):
            level = Level.SYNCED if chosen.random() < 0.02 else Level.WRITTEN
            told = rig.append(partition, [b"%d" % number], level)
            if level is Level.SYNCED:
                synced.append(told)
            rig.loop.run_pass()
            if rig.log.congested:
                rig.loop.run_until(partial(_is_relieved, rig))
        seen, epoch = partition.readable_offset, rig.log.epoch
        floor = rig.log.synced_sequence
        rig.kill()
        lose_power(directory, floor)
        rig.open()
        partition = rig.log.partition(1)
        values = rig.read(partition)
        assert values == [b"%d" % number for number in range(len(values))]
        for told in synced:
            assert not told or told[0] < len(values), "what was acknowledged as synced survives"
        assert partition.epoch_end(epoch) == len(values)
        rig.append(partition, [b"of the next epoch"] * (seen - len(values) + 2), Level.SYNCED)
        rig.settle()
        assert partition.epoch_end(epoch) == len(values), "a reader that had seen more is told where its epoch ended"
        rig.log.close()


def test_power_loss_without_new_records_is_an_offset_out_of_range(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SMALL)
    partition = rig.log.open_partition(1)
    rig.append(partition, [b"kept"], Level.SYNCED)
    rig.settle()
    floor = rig.log.synced_sequence
    rig.append(partition, [b"lost"])
    rig.log.commit()
    assert partition.readable_offset == 2
    rig.kill()
    lose_power(tmp_path, floor)
    rig.open()
    with pytest.raises(Missing):
        rig.read_once(rig.log.partition(1), 2)
    rig.log.close()


def _is_relieved(rig: Rig) -> bool:
    return not rig.log.congested


def lose_power(directory: Path, floor: int) -> None:
    """Take away every group behind sequence ``floor``, as a disk does that never got it."""
    seed = read_seed(directory / "journal")
    slots = [Slot(path, 0, seed) for path in sorted((directory / "journal").glob("slot-*"))]
    chain = find_chain(slots)
    assert chain is not None
    if chain.snapshot is not None:
        assert get_snapshot(FileStore(directory), chain.snapshot).sequence <= floor, (
            "no snapshot runs ahead of the disk"
        )
    assert chain.sequence >= floor, "everything synced is there"
    for place in chain.groups:
        if place.sequence > floor:
            with place.slot.path.open("r+b") as file:
                file.seek(place.position)
                file.write(bytes(place.length))
    for slot in slots:
        slot.close()
