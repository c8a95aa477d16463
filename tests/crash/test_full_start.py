"""Starts on a completely full disk: everything is there, removals work, and sealing resumes once there is space."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from polywire.errors import Busy, ErrorCode
from polywire.log.settings import LogSettings
from polywire.store.file import FileStore
from polywire.types import Level
from tests.unit.log.rig import SMALL, Rig, batch_of

NEVER = 2**62
MIDDLE = replace(SMALL, slot_bytes=1024 * 1024, sync_interval_ms=20)
TOKENS = [bytes([number]) * 16 for number in (1, 2, 3)]


@contextmanager
def full_disk() -> Iterator[None]:
    """Make new allocations fail; allocated space can be overwritten."""

    def refuse(store: object, name: str, *_: object) -> None:
        raise Busy(ErrorCode.DISK_FULL, f"disk is full name={name!r}")

    def make_slot(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStore, "put_new", refuse)
        patch.setattr("polywire.log.journal.slots.make_slot", make_slot)
        yield


class Story:
    """The actions on a log, and the content that they require."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.values: list[bytes] = []
        self.changes: list[bytes] = []
        self.first = 0
        rig.log.open_partition(1)
        rig.log.open_partition(2)

    def append(self, size: int) -> None:
        value = b"%d" % len(self.values) + b"." * size
        self.rig.append(self.rig.log.partition(1), [value])
        self.values.append(value)

    def change(self) -> None:
        self.changes.append(b"%d" % len(self.changes))
        self.rig.change(self.changes[-1])

    def stage(self, number: int) -> None:
        batch = batch_of([TOKENS[number]])
        log = self.rig.log
        log.stage(TOKENS[number], log.partition(1), batch, expires_at_us=NEVER, level=Level.WRITTEN, done=None)

    def publish(self, number: int) -> None:
        self.changes.append(b"published")
        self.rig.log.publish([TOKENS[number]], b"published", level=Level.WRITTEN, done=lambda _: None)
        self.rig.memory.apply(b"published")
        self.values.append(TOKENS[number])

    def trim(self) -> None:
        self.first += 2
        self.rig.log.trim(1, self.first)

    def fill(self) -> None:
        """Write until the journal has capacity for removals only; sealing has not started."""
        self.rig.log._sealer._stopped = True
        self.stage(0)
        for number in range(10_000):
            try:
                self.append(1000)
                self.change()
                if number == 10:
                    self.stage(1)
                    self.stage(2)
                if number == 20:
                    self.publish(0)
            except Busy:
                break
            self.rig.log.commit()
        self.rig.log.commit()

    def check(self) -> None:
        rig = self.rig
        partition = rig.log.partition(1)
        assert partition.first_offset == self.first
        assert rig.read(partition, self.first) == self.values[self.first :]
        assert rig.memory.changes == self.changes
        for token in TOKENS[1:]:
            assert list(rig.log.staged_partitions([token])) == [1]


def begin(directory: Path, settings: LogSettings, *, sealed: bool) -> Story:
    story = Story(Rig(directory, settings))
    if sealed:
        for _ in range(3 * settings.slot_bytes // 2000):
            story.rig.loop.run_until(lambda: story.rig.log._journal.free)
            story.append(1000)
            story.change()
            story.rig.log.commit()
        story.rig.settle()
    return story


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("slot_count", [2, 4])
def test_a_killed_log_starts_on_a_full_disk(tmp_path: Path, sealed: bool, slot_count: int) -> None:
    settings = replace(MIDDLE, slot_count_max=slot_count)
    story = begin(tmp_path, settings, sealed=sealed)
    rig = story.rig
    story.fill()
    rig.kill()
    with full_disk():
        for _ in range(3):
            rig.open()
            story.check()
            with pytest.raises(Busy):
                rig.append(rig.log.partition(1), [b"refused"])
            story.trim()
            rig.log.commit()
            rig.loop.run_pass(0.01)
            assert rig.read(rig.log.partition(1), story.first) == story.values[story.first :]
            rig.kill()
        rig.open()
        rig.loop.run_pass(0.01)
    rig.loop.run_until(lambda: not rig.log.sealing)
    story.check()
    story.append(1000)
    story.change()
    rig.settle()
    story.check()
    rig.kill()
    rig.open()
    story.check()
    story.publish(1)
    rig.settle()
    assert rig.read(rig.log.partition(1), story.first) == story.values[story.first :]
    assert len(rig.log.partition(1).epoch_numbers) == len(set(rig.log.partition(1).epoch_numbers))
    rig.log.close()


def test_a_start_on_a_full_disk_can_be_killed_anywhere(tmp_path: Path) -> None:
    """Batches that an unsealed start wrote may be there or not: the groups before it count."""
    origin = tmp_path / "origin"
    story = begin(origin, replace(SMALL, slot_count_max=2), sealed=True)
    story.fill()
    story.rig.kill()
    before = {path: path.read_bytes() for path in (origin / "journal").glob("slot-*")}
    with full_disk():
        story.rig.open()
        story.rig.kill()
    written = [(path, at) for path, data in before.items() for at in changed(data, path.read_bytes())]
    assert len({at // 4096 for _, at in written}) == 1, "it takes one page"
    for keep in range(0, len(written), 7):
        directory = tmp_path / f"cut-{keep}"
        shutil.copytree(origin, directory)
        for path, at in written[keep:]:
            copy = directory / "journal" / path.name
            data = bytearray(copy.read_bytes())
            data[at] = before[path][at]
            copy.write_bytes(data)
        rig = Rig(directory, story.rig.settings)
        other = Story.__new__(Story)
        other.__dict__.update(story.__dict__, rig=rig)
        other.check()
        rig.kill()
        shutil.rmtree(directory)


def changed(before: bytes, after: bytes) -> list[int]:
    return [at for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
