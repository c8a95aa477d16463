"""``python -m tests.histories.losing_broker``: a broker whose machine can lose power, on a disk that syncs to a copy.

The environment variable ``DURABLE`` names the directory of the copy (``durable_disk``). The broker's file port
(``store.files``) writes to the data directory as always. At each sync it copies the data instead of syncing it, and it
records changes of directories in their order.

With ``IMPATIENT=1``, the broker acknowledges records before they are synced, which the checkers must notice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Final

import msgspec
import pytest

from polywire.cli.main import run
from polywire.log.journal.syncer import Flusher
from polywire.store.files import NEW_MODE, Access
from polywire.store.system_files import SystemFile, SystemFiles, SystemMapping
from polywire.types import Buffer
from tests.histories.durable_disk import CHANGES, DIRECTORY, DURABLE, IMPATIENT, Change
from tests.sim.mutation import wrapped

HONEST: Final = 30  # writes of the journal that an impatient broker syncs, so that topics exist
IMPATIENT_S: Final = 60.0  # without a sync from then on
PAGE: Final = 4096
CREATING: Final = (Access.KEEP, Access.NEW, Access.REPLACE)
FIRST_NUMBER: Final = 1 << 48  # files that exist at the start have the number of their inode


class Copy:
    """The copy of all that was synced.

    A file that this process created has a number of its own, because the number of a removed inode is reused.
    """

    def __init__(self, place: Path) -> None:
        self._place: Final = place
        self._root: Final = place.with_name("data")
        self._changes: Final = os.open(place / CHANGES, os.O_WRONLY | os.O_APPEND)
        self._fresh: Final = count(FIRST_NUMBER)
        self._numbers: Final[dict[int, int]] = {}
        self._unsynced: Final[dict[int, list[tuple[int, int]]]] = {}
        self.lock: Final = RLock()
        """Held while a name and its record change, because workers use files, too."""

    def has(self, path: Path) -> bool:
        """Whether a path is in the data directory."""
        return path.is_relative_to(self._root)

    def number(self, descriptor: int, path: Path, *, is_new: bool) -> int:
        """Return the number of an open file, which gets a name if it is new."""
        with self.lock:
            inode = os.fstat(descriptor).st_ino
            if not is_new:
                return self._numbers.get(inode, inode)
            self._numbers[inode] = number = next(self._fresh)
            (self._place / str(number)).touch()
            self.change(path.parent, {path.name: (number, inode)})
            return number

    def named(self, path: Path) -> tuple[int, int]:
        """Return the number and inode of the file with this name."""
        inode = path.stat().st_ino
        return self._numbers.get(inode, inode), inode

    def change(self, directory: Path, names: dict[str, tuple[int, int] | None]) -> None:
        """Record a change of a directory."""
        self._record(Change(str(directory.relative_to(self._root)), names))

    def sync_names(self, directory: Path) -> None:
        """Record that a directory was synced."""
        self._record(Change(str(directory.relative_to(self._root)), None))

    def _record(self, change: Change) -> None:
        os.write(self._changes, msgspec.json.encode(change) + b"\n")

    def wrote(self, number: int, start: int, stop: int) -> None:
        """Note that bytes were written and not synced."""
        with self.lock:
            self._unsynced.setdefault(number, []).append((start, stop))

    def sync(self, number: int, descriptor: int) -> None:
        """Copy all unsynced bytes of a file, and its size."""
        with self.lock:  # another sync of the same file must not return before the copy is complete
            for start, stop in self._unsynced.pop(number, []):
                self.copy(number, descriptor, start, stop)
            os.truncate(self._place / str(number), os.fstat(descriptor).st_size)

    def copy(self, number: int, descriptor: int, start: int, stop: int) -> None:
        """Copy a range of a file."""
        source = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)  # the descriptor itself may bypass the page cache
        target = os.open(self._place / str(number), os.O_WRONLY)
        try:
            while start < stop and (data := os.pread(source, stop - start, start)):
                start += os.pwrite(target, data, start)
        finally:
            os.close(target)
            os.close(source)


COPY: Final = Copy(Path(os.environ[DURABLE]))


class LosingMapping(SystemMapping):
    """A mapping that copies what is flushed."""

    __slots__ = ("_number",)

    def __init__(self, descriptor: int, path: str, number: int) -> None:
        super().__init__(descriptor, path)
        self._number = number

    def flush(self, start: int, stop: int) -> None:
        start -= start % PAGE
        COPY.copy(self._number, self._descriptor, start, min(-(-stop // PAGE) * PAGE, len(self.view)))


class LosingFile(SystemFile):
    """A file that copies what is synced."""

    __slots__ = ("_number",)

    def __init__(self, descriptor: int, path: Path, *, is_new: bool) -> None:
        super().__init__(descriptor, path)
        self._number = COPY.number(descriptor, path, is_new=is_new)

    def write(self, parts: Sequence[Buffer], position: int, *, past_cache: bool = False) -> int:
        written = super().write(parts, position, past_cache=past_cache)
        COPY.wrote(self._number, position, position + written)
        return written

    def sync(self, *, data_only: bool = False) -> None:
        self._wait_for_write()
        COPY.sync(self._number, self._descriptor)

    def map(self) -> LosingMapping:
        return LosingMapping(self._descriptor, self._path, self._number)


def _open(
    old: Callable[..., SystemFile], files: SystemFiles, path: Path, access: Access, mode: int = NEW_MODE
) -> SystemFile:
    if not COPY.has(path) or path.is_dir():
        return old(files, path, access, mode)
    with COPY.lock:
        is_new = access in CREATING and not path.exists()
        opened = old(files, path, access, mode)
        return LosingFile(opened._descriptor, path, is_new=is_new)


def _make_directory(old: Callable[..., bool], files: SystemFiles, path: Path) -> bool:
    with COPY.lock:
        made = old(files, path)
        if made and COPY.has(path.parent):
            COPY.change(path.parent, {path.name: DIRECTORY})
        return made


def _link(old: Callable[..., None], files: SystemFiles, path: Path, new: Path) -> None:
    with COPY.lock:
        old(files, path, new)
        if COPY.has(new):
            COPY.change(new.parent, {new.name: COPY.named(new)})


def _rename(old: Callable[..., None], files: SystemFiles, path: Path, new: Path) -> None:
    with COPY.lock:
        old(files, path, new)
        if COPY.has(new):
            COPY.change(new.parent, {path.name: None, new.name: COPY.named(new)})


def _unlink(old: Callable[..., None], files: SystemFiles, path: Path) -> None:
    with COPY.lock:
        old(files, path)
        if COPY.has(path):
            COPY.change(path.parent, {path.name: None})


def _sync_directory(old: Callable[..., None], files: SystemFiles, path: Path) -> None:
    if COPY.has(path):
        COPY.sync_names(path)
    else:
        old(files, path)


SWITCHES: Final = (
    wrapped(SystemFiles, "open", _open),
    wrapped(SystemFiles, "make_directory", _make_directory),
    wrapped(SystemFiles, "link", _link),
    wrapped(SystemFiles, "rename", _rename),
    wrapped(SystemFiles, "unlink", _unlink),
    wrapped(SystemFiles, "sync_directory", _sync_directory),
)


def _acknowledge(old: Callable[..., None], flusher: Flusher, sequence: int, callback: Callable[[None], object]) -> None:
    if sequence < HONEST:
        old(flusher, sequence, callback)
    else:
        flusher._interval = IMPATIENT_S
        callback(None)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        for switch in SWITCHES:
            switch(patch)
        if IMPATIENT in os.environ:
            wrapped(Flusher, "wait", _acknowledge)(patch)
        sys.exit(run(sys.argv[1:]))
