"""What if something of a sound disk were damaged: a start on a copy of it, judged by what was there before.

Promises: the disk that is asked about stays as it is. Must not know: what the files hold.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Final

from polywire.errors import BrokerError, Corrupt
from polywire.log.base import Read
from polywire.log.settings import LogSettings
from polywire.testing.clock import SimulatedClock
from polywire.testing.sim.chance import Chance
from polywire.testing.sim.disk import SECTOR_BYTES, Inode, SimulatedDisk
from polywire.testing.sim.log.client import records_of
from polywire.testing.sim.log.model import KeptPartition, Model
from polywire.testing.sim.log.process import LogProcess
from polywire.testing.sim.promises import require
from polywire.testing.sim.story import Story

UNNEEDED: Final = ("LOCK",)  # written anew by every start


class Rot:
    """Damage to one place of a disk that was stopped cleanly."""

    def __init__(
        self, model: Model, settings: LogSettings, clock: SimulatedClock, chance: Chance, story: Story
    ) -> None:
        self._model = model
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._story = story

    def judge(self, disk: SimulatedDisk) -> None:
        """Damage a copy of the disk somewhere and start on it: everything is there, or it is said what is damaged."""
        copy = deepcopy(disk)
        path, cut = self._spoil(copy)
        process = LogProcess(copy, self._settings, self._clock, self._chance, self._story)
        self._story.actor = "rot"
        try:
            process.open()
        except Corrupt as error:
            self._story.tell("told rot", error.message)
            require(path in error.message, "a start says what is damaged", damaged=path, error=error.message)
            twice = not cut and (path.endswith(".pwt") or "seed" in path)
            require(not twice, "what is kept twice may be damaged once", damaged=path, error=error.message)
            return
        except BrokerError as error:
            require(False, "damage is called damage", damaged=path, error=error.message)
        changes = self._model.changes
        require(process.state.changes == changes, "damage changes nothing unnoticed", damaged=path)
        for kept in [kept for kept in self._model.partitions.values() if not kept.dropped]:
            self._read(process, kept, path)
        process.log.close()

    def _spoil(self, disk: SimulatedDisk) -> tuple[str, bool]:
        """Change something: the file's path in the data directory, and whether it was cut."""
        chance = self._chance
        files = [(name, inode) for name, inode in disk.files() if inode.data and not name.endswith(UNNEEDED)]
        path, inode = chance.one_of(sorted(files, key=lambda file: file[0]))
        place = self._some_place(inode)
        kind = chance.below(4)
        if kind == 0 and not path.endswith(".pwj"):
            self._put(inode, place, b"", cut=True)
        elif kind == 1:
            start = place // SECTOR_BYTES * SECTOR_BYTES
            self._put(inode, start, bytes(min(SECTOR_BYTES, len(inode.data) - start)))
        else:
            self._put(inode, place, bytes((inode.data[place] ^ 1 << chance.below(8),)))
        short = "/".join(path.split("/")[-2:])
        self._story.tell("rot", f"{short} at={place} kind={kind}")
        return short, kind == 0 and not path.endswith(".pwj")

    def _some_place(self, inode: Inode) -> int:
        """A byte of the file, mostly one that says something."""
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

    def _read(self, process: LogProcess, kept: KeptPartition, path: str) -> None:
        """Everything of a partition, past what is damaged."""
        partition = process.log.partition(kept.incarnation)
        end = len(kept.records)
        require(partition.next_offset == end, "damage takes no number", damaged=path, partition=kept.incarnation)
        offset = partition.first_offset
        while offset < end:
            found = process.read(kept.incarnation, offset)
            if isinstance(found, Read):
                require(found.next_offset > offset, "a read goes on", offset=offset)
                for record in [record for record in records_of(found.chunks) if record.offset >= offset]:
                    asked = kept.records[record.offset]
                    require(asked == (record.key, record.value), "what is damaged is not served", damaged=path)
                kept.check_records(
                    [r for r in records_of(found.chunks) if r.offset >= offset], offset, found.next_offset
                )
                offset = found.next_offset
                found.pin.release()
            else:
                told = (
                    isinstance(found, Corrupt) and "segment=" in found.message
                )  # the start may have sealed it in another
                require(told, "a reader is told what is damaged", damaged=path, error=found.message)
                offset = self._behind(found.message, offset)

    @staticmethod
    def _behind(message: str, offset: int) -> int:
        """Where reading goes on behind damage, by what the reader is told."""
        _, _, rest = message.partition(" next_offset=")
        return max(int(rest.partition(" ")[0] or 0), offset + 1)
