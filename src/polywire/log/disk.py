"""Whether there is space: appends are refused before the disk is full, so that deleting, retention and sealing still find some.

Promises: ``full`` goes away by itself when there is space again. Must not know: the log.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from polywire.store.base import Store


class Disk:
    """One data directory's space, and the store that lies in it. Guards: ``full`` is what was last seen."""

    def __init__(self, path: Path, store: Store, reserve_bytes: int) -> None:
        self.store: Final = store
        self.full = False
        self._path = path
        self._reserve_bytes = reserve_bytes
        self._refused = False
        self.look()

    def look(self) -> None:
        """See how much is free."""
        found = os.statvfs(self._path)
        self.full = self._refused or found.f_bavail * found.f_frsize < self._reserve_bytes

    def refused(self) -> None:
        """A segment found no space, whatever the system says is free."""
        self._refused = self.full = True

    def accepted(self) -> None:
        """A segment was written."""
        self._refused = False
        self.look()
