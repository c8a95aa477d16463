"""The index of delayed records on a simulated disk.

It is derived data: after a power loss it may be missing, damaged, or as it was after any earlier write.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from typing import Final

from polywire.broker.groups.delay_index import _SCHEMA, DelayStore
from polywire.errors import ErrorCode, Unavailable
from tests.sim.chance import Chance
from tests.sim.story import Story

VERSIONS_MAX: Final = 30
FAILURES: Final = 0.2  # share of the calls that fail while the disk has faults
DAMAGED: Final = b"no database" * 500


class IndexDisk:
    """The database files of all processes of a run. has_faults: whether calls may fail now."""

    def __init__(self, chance: Chance, story: Story) -> None:
        self._versions: Final[deque[bytes]] = deque(maxlen=VERSIONS_MAX)
        self._chance = chance
        self._story = story
        self.has_faults: Callable[[], bool] = lambda: False

    @property
    def content(self) -> bytes:
        """The database as it was written last; empty if there is none."""
        return self._versions[-1] if self._versions else b""

    def write(self, content: bytes) -> None:
        """Replace the database."""
        if content != self.content:
            self._versions.append(content)

    def check(self) -> None:
        """Fail in some of the calls. Raises Unavailable(STORAGE_FAILED)."""
        if self.has_faults() and self._chance.happens(FAILURES):
            self._story.tell("index fault")
            raise Unavailable(ErrorCode.STORAGE_FAILED, "the disk of the index fails")

    def lose_power(self) -> None:
        """Replace the database by an earlier version, or by none."""
        found = self.content
        if self._chance.happens(0.5):
            found = self._chance.one_of((b"", DAMAGED, *self._versions))
        self._story.tell("index", f"bytes={len(found)} of {len(self.content)}")
        self._versions.clear()
        self._versions.append(found)


class IndexStore(DelayStore):
    """The database of one process."""

    def __init__(self, disk: IndexDisk) -> None:
        super().__init__(None)
        self._disk = disk

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        if self._disk.content:
            database.deserialize(self._disk.content)
        try:
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _delete(self) -> None:
        super()._delete()
        self._disk.write(b"")

    def call(self, work: Callable[[sqlite3.Connection], object]) -> object:
        self._disk.check()
        found = super().call(work)
        self._disk.write(self._database().serialize())
        return found
