"""The disk below a journal: which pages of its slots survive a power loss, and with which content.

A flushed page survives as of its last flush. A page that was only written is lost, or survives at random.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from polywire.store.system_files import SystemMapping

PAGE = 4096


class JournalDisk:
    """Records every flush of a slot.

    Invariant: by inode, ``_pages`` has what the disk holds of a file created with zeros.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._pages: dict[int, dict[int, bytes]] = {}
        self._fdatasync, self._flush = os.fdatasync, SystemMapping.flush
        self.flushed_bytes = 0
        patch.setattr(SystemMapping, "flush", lambda *flushed: self._note_range(*flushed))
        patch.setattr(os, "fdatasync", self._note_file)

    def _note_range(self, mapping: SystemMapping, start: int, stop: int) -> None:
        self._flush(mapping, start, stop)
        self._note(mapping._descriptor, start, min(stop, len(mapping.view)))

    def _note_file(self, descriptor: int) -> None:
        self._fdatasync(descriptor)
        self._note(descriptor, 0, os.fstat(descriptor).st_size)

    def _note(self, descriptor: int, start: int, stop: int) -> None:
        pages = self._pages.setdefault(os.fstat(descriptor).st_ino, {})
        for at in range(start - start % PAGE, stop, PAGE):
            pages[at] = os.pread(descriptor, PAGE, at)
        self.flushed_bytes += stop - start

    def lose_power(self, directory: Path, keep: random.Random | None, *, origin: Path | None = None) -> int:
        """Remove from a log's journal what never reached the disk, except the pages that ``keep`` selects.

        Returns how many pages were removed. origin: the log of which ``directory`` is a copy.
        """
        lost = 0
        for path in sorted((directory / "journal").glob("slot-*")):
            known = self._pages.get(((origin or directory) / "journal" / path.name).stat().st_ino, {})
            written = path.read_bytes()
            pages = [written[at : at + PAGE] for at in range(0, len(written), PAGE)]
            for number, page in enumerate(pages):
                flushed = known.get(number * PAGE, bytes(PAGE))
                if page != flushed and (keep is None or keep.random() < 0.6):
                    pages[number] = flushed
                    lost += 1
            path.write_bytes(b"".join(pages))
        return lost
