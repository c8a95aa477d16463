"""Journals of killed processes with one damaged group each: a start does without the group, or names its file."""

from __future__ import annotations

from copy import deepcopy

from polywire.errors import Corrupt
from polywire.log.journal.recovery import FoundGroup, newest_groups
from polywire.log.journal.slots import Slot, read_seed
from tests.sim.chance import Chance
from tests.sim.disk import Inode, SimulatedDisk
from tests.sim.files import SimulatedFiles
from tests.sim.log.process import LogProcess
from tests.sim.log.world import LogWorld
from tests.sim.process import DIRECTORY
from tests.sim.promises import require
from tests.sim.story import Story

AT = (4, 20, -1)
"""Bytes of a group that are changed, one at a time: of its length, its number, and its content."""


class JournalRot(LogWorld):
    """Guards: ``refused`` counts the starts that detected damage."""

    refused = 0

    def _check_end(self) -> None:
        self._leave()
        groups = self._groups()
        for group in groups:
            for at in AT:
                self._judge(group, group.position + (at if at >= 0 else group.length - 1))

    def _groups(self) -> list[FoundGroup]:
        files, journal = SimulatedFiles(deepcopy(self._disk), Chance(0), Story()), DIRECTORY / "journal"
        seed = read_seed(files, journal)
        paths = [journal / name for name in sorted(files.names(journal)) if name.endswith(".pwj")]
        return list(newest_groups([Slot(path, 0, seed, files) for path in paths]).values())

    def _judge(self, group: FoundGroup, at: int) -> None:
        disk: SimulatedDisk = deepcopy(self._disk)
        inode = disk.find(group.slot.path)
        assert isinstance(inode, Inode)
        inode.data[at] ^= 1
        try:
            LogProcess(disk, self._settings, self._clock, Chance(0), Story()).open()
        except Corrupt as error:
            self.refused += 1
            file = f"journal/{group.slot.path.name}"
            require(file in error.message, "a start says what is damaged", damaged=file, error=error.message)


def test_a_start_names_the_file_of_any_damaged_group() -> None:
    refused = 0
    for seed in range(7):
        world = JournalRot(seed)
        world.run()
        refused += world.refused
    assert refused > 40, "most groups are needed"
