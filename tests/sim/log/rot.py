"""Damage tests: start on a damaged copy of a disk, and compare the result with the model.

The original disk stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from polywire.errors import BrokerError, Corrupt
from polywire.log.journal.group import GROUP_HEADER_BYTES, GROUP_MAGIC
from polywire.log.settings import LogSettings
from polywire.testing.loop import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.disk import SECTOR_BYTES, Inode, SimulatedDisk
from tests.sim.log.model import Model
from tests.sim.log.process import LogProcess
from tests.sim.log.reading import check_start, read_back
from tests.sim.promises import require
from tests.sim.story import Story

JOURNAL: Final = ".pwj"
UNNEEDED: Final = ("LOCK",)  # written by every start


def _places(data: bytearray, pattern: bytes) -> Iterator[int]:
    """Yield the positions of a pattern."""
    at = data.find(pattern)
    while at >= 0:
        yield at
        at = data.find(pattern, at + 1)


class Rot:
    """Damage to one place of a disk."""

    def __init__(
        self, model: Model, settings: LogSettings, clock: SimulatedClock, chance: Chance, story: Story
    ) -> None:
        self._model = model
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._story = story

    def judge(self, disk: SimulatedDisk) -> None:
        """Damage a copy of the disk after a clean stop and start on it: everything is there, or the damage is reported."""
        path, process = self._start(disk)
        if process is None:
            return
        changes = self._model.changes
        require(process.state.changes == changes, "damage changes nothing unnoticed", damaged=path)
        for kept in [kept for kept in self._model.partitions.values() if not kept.dropped]:
            end = process.log.partition(kept.incarnation).next_offset
            require(end == len(kept.records), "damage takes no number", damaged=path, partition=kept.incarnation)
            read_back(process, kept, damaged=path)
        process.log.close()

    def judge_killed(self, disk: SimulatedDisk) -> None:
        """Do the same after a kill. A damaged end of the journal looks like an incomplete write then."""
        path, process = self._start(disk)
        if process is None:
            return
        if path.endswith(JOURNAL):
            self._model.forget_acknowledged()
        check_start(process, self._model, powerless=False, shown_stays=False, damaged=path)
        process.log.close()

    def _start(self, disk: SimulatedDisk) -> tuple[str, LogProcess | None]:
        """Damage a copy and start on it; return the damaged file, and the process unless it reported the damage."""
        copy = disk.copied()
        copy.close_all()
        path, cut = self._spoil(copy)
        process = LogProcess(copy, self._settings, self._clock, self._chance, self._story)
        before, self._story.actor = self._story.actor, "rot"
        try:
            process.open()
        except Corrupt as error:
            self._story.tell("reported rot", error.message)
            require(path in error.message, "a start says what is damaged", damaged=path, error=error.message)
            twice = not cut and (path.endswith(".pwt") or "seed" in path)
            require(not twice, "what is kept twice may be damaged once", damaged=path, error=error.message)
            return path, None
        except BrokerError as error:
            require(False, "damage is called damage", damaged=path, error=error.message)
        finally:
            self._story.actor = before
        return path, process

    def _spoil(self, disk: SimulatedDisk) -> tuple[str, bool]:
        """Damage something; return the file's path in the data directory, and whether it was truncated."""
        chance = self._chance
        files = [(name, inode) for name, inode in disk.files() if inode.data and not name.endswith(UNNEEDED)]
        path, inode = chance.one_of(sorted(files, key=lambda file: file[0]))
        place = self._some_place(inode, path)
        kind = chance.below(4)
        if kind == 0 and not path.endswith(JOURNAL):
            self._put(inode, place, b"", cut=True)
        elif kind == 1:
            start = place // SECTOR_BYTES * SECTOR_BYTES
            self._put(inode, start, bytes(min(SECTOR_BYTES, len(inode.data) - start)))
        else:
            self._put(inode, place, bytes((inode.data[place] ^ 1 << chance.below(8),)))
        short = "/".join(path.split("/")[-2:])
        self._story.tell("rot", f"{short} at={place} kind={kind}")
        return short, kind == 0 and not path.endswith(JOURNAL)

    def _some_place(self, inode: Inode, path: str) -> int:
        """Return a position in the file, mostly a significant one: in a journal often a group's header."""
        heads = list(_places(inode.data, GROUP_MAGIC)) if path.endswith(JOURNAL) and self._chance.happens(0.5) else []
        if heads:
            return min(self._chance.one_of(heads) + self._chance.below(GROUP_HEADER_BYTES), len(inode.data) - 1)
        for _ in range(20):
            place = self._chance.below(len(inode.data))
            if inode.data[place]:
                break
        return place

    @staticmethod
    def _put(inode: Inode, place: int, content: bytes, *, cut: bool = False) -> None:
        for data in (inode.data, inode.durable):
            if cut:
                del data[place:]
            else:
                data[place : place + len(content)] = content
