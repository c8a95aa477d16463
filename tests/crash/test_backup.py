"""Backups of a log during writes, by processes that are killed: each backup is consistent and complete, or absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from polywire.cli.backup import NewBackup, find_backup, list_backups, restore_backup, take_backup
from polywire.clock import SystemClock
from polywire.errors import Busy
from polywire.log.doctor import Severity
from polywire.log.partition.partition import FilePartition
from tests.crash.journal_writer import PARTITIONS
from tests.unit.log.rig import SMALL, Memory, Rig, RigLoop

BACKUPS: Final = 6
KILLS: Final = 4  # points at which a backup or a restore is killed
TRIES: Final = 5

Counts = list[int]
"""Records of each partition, then changes."""


class WriterProcess:
    """Writes to a log as fast as it can; ``acknowledged`` counts acknowledged writes."""

    def __init__(self, directory: Path, seed: int) -> None:
        command = [sys.executable, "-m", "tests.crash.journal_writer", str(directory), str(seed)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.acknowledged: Counts = [0] * (PARTITIONS + 1)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):
                return
            what, *words = line.split()
            numbers = [int(word) for word in words]
            which, end = (PARTITIONS, numbers[0] + 1) if what == "c" else (numbers[0], numbers[2] + numbers[3])
            self.acknowledged[which] = max(self.acknowledged[which], end)

    def wait(self, count: int) -> None:
        """Wait until that many writes were acknowledged."""
        while sum(self.acknowledged) < count:
            assert self.process.poll() is None
            time.sleep(0.002)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._reading.join()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def back_up(directory: Path, shelf: Path, writer: WriterProcess | None = None) -> Path:
    """Make a backup. The writer's journal is tiny, so that a slow backup in the end blocks the writer."""
    try:
        taken = attempt(directory, shelf, TRIES)
    except Busy:
        assert writer is not None, "the writer makes no progress"
        writer.process.send_signal(signal.SIGSTOP)
        try:
            taken = attempt(directory, shelf, 1)
        finally:
            writer.process.send_signal(signal.SIGCONT)
    assert {finding.severity for finding in taken.findings} <= {Severity.SOUND}
    return taken.path


def attempt(directory: Path, shelf: Path, tries: int) -> NewBackup:
    """Raises Busy if the journal had moved on in every attempt."""
    for _ in range(tries - 1):
        with suppress(Busy):
            return take_backup(directory, shelf, replay=Memory, loop=RigLoop(), clock=SystemClock())
    return take_backup(directory, shelf, replay=Memory, loop=RigLoop(), clock=SystemClock())


def counted(directory: Path) -> Counts:
    """Return how much of the written sequence a log holds."""
    rig = Rig(directory, SMALL)
    counts = []
    for which in range(PARTITIONS):
        values = rig.read(rig.log.partition(which + 1))
        assert values == [b"%d:%d" % (which, number) for number in range(len(values))], (
            "neither duplicated nor reordered"
        )
        counts.append(len(values))
    changes = [change for change in rig.memory.changes if change != b"published"]
    assert changes == [b"%d" % number for number in range(len(changes))]
    rig.log.close()
    return [*counts, len(changes)]


def restored(backup: Path, directory: Path) -> Counts:
    findings = restore_backup(backup, directory, replay=Memory, loop=RigLoop())
    assert {finding.severity for finding in findings} == {Severity.SOUND}
    return counted(directory)


def test_a_backup_has_everything_acknowledged_before_it(tmp_path: Path) -> None:
    directory, shelf = tmp_path / "log", tmp_path / "shelf"
    least: list[Counts] = []
    paths = []
    for seed in range(2):
        writer = WriterProcess(directory, seed)
        try:
            for _ in range(BACKUPS // 2):
                writer.wait(sum(least[-1] if least else [0]) + 500)
                least.append([*map(max, least[-1] if least else writer.acknowledged, writer.acknowledged)])
                paths.append(back_up(directory, shelf, writer))
        finally:
            writer.kill()
    assert list_backups(shelf) == sorted(path.name for path in paths)
    most = counted(directory)
    for number, (path, acknowledged) in enumerate(zip(paths, least, strict=True)):
        found = restored(path, tmp_path / f"restored-{number}")
        assert all(low <= count <= high for low, count, high in zip(acknowledged, found, most, strict=True))


def test_segments_are_copied_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "log", SMALL)
    partition = rig.log.open_partition(1)
    fill(rig, partition)
    first = back_up(rig.directory, tmp_path / "shelf")
    fill(rig, partition)
    second = back_up(rig.directory, tmp_path / "shelf")
    shared = {path.name for path in first.glob("segments/*")} & {path.name for path in second.glob("segments/*")}
    assert shared
    assert all((first / "segments" / name).samefile(second / "segments" / name) for name in shared)
    rig.log.close()


def fill(rig: Rig, partition: FilePartition) -> None:
    """Append records of a kilobyte until they are sealed."""
    for _ in range(200):
        rig.loop.run_until(lambda: not rig.log.congested)
        rig.append(partition, [b"." * 1000])
        rig.log.commit()
    rig.settle()


def victim(what: str, last: int, source: Path, target: Path) -> int | None:
    """Return the number of operations of a run, or None if it was killed."""
    command = [sys.executable, "-m", "tests.crash.backup_victim", what, str(last), str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_killed_backup_is_absent_and_the_next_one_continues(tmp_path: Path) -> None:
    writer = WriterProcess(tmp_path / "log", 5)
    try:
        writer.wait(3000)
    finally:
        writer.kill()
    expected = counted(tmp_path / "log")
    verbs = victim("create", -1, tmp_path / "log", tmp_path / "whole")
    assert verbs is not None
    for number in range(KILLS):
        shelf = tmp_path / f"shelf-{number}"
        assert victim("create", number * (verbs - 1) // (KILLS - 1), tmp_path / "log", shelf) is None
        finished = list_backups(shelf)
        assert len(finished) == (number == KILLS - 1), "it gets its name with its last operation but one"
        if not finished:
            back_up(tmp_path / "log", shelf)
        assert restored(find_backup(shelf), tmp_path / f"restored-{number}") == expected
    backup, target = find_backup(tmp_path / "whole"), tmp_path / "target"
    verbs = victim("restore", -1, backup, tmp_path / "all")
    assert verbs is not None
    for number in range(KILLS - 1):
        assert victim("restore", number * (verbs - 1) // (KILLS - 1), backup, target) is None
        assert not target.exists()
    assert restored(backup, target) == expected
    assert not list(tmp_path.glob(".*"))
