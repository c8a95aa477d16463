"""The port for files and directory entries: everything that the store and the log do to a disk goes through it.

Promises: each verb is one thing that a disk can do, and fails with the system's OSError; what is built of several verbs stands below the
port. What a power loss leaves is stated per verb, because nothing else is promised: a name lasts once its directory is synced, bytes once
the file is. Must not know: what the files hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from enum import Enum, auto
from pathlib import Path
from typing import Final, Protocol

from polywire.types import Buffer

NEW_MODE: Final = 0o640
COPY_MODE: Final = 0o666  # and what the process's mask takes of it, as for files of people
COPIED_BYTES: Final = 1 << 20


class Access(Enum):
    """How a file is opened."""

    READ = auto()
    """Also a directory, to lock it."""
    DIRECT = auto()
    """To be read past the page cache."""
    WRITE = auto()
    """A file that exists, to be read and written."""
    KEEP = auto()
    """The same, made where it does not exist."""
    NEW = auto()
    """Made; a name that exists is an error."""
    REPLACE = auto()
    """Made, or emptied where it exists."""


class Hint(Enum):
    """What becomes of some bytes; a system may ignore it."""

    READ_SOON = auto()
    WRITE_NOW = auto()
    READ_NO_MORE = auto()


class Mapping(Protocol):
    """A whole file as memory: shows at once what is written to it. Lives as long as somebody views it."""

    @property
    def view(self) -> memoryview:
        """The file's bytes, read-only."""

    def find(self, pattern: bytes, start: int) -> int:
        """Position of a pattern at or after ``start``, -1 when there is none."""

    def flush(self, start: int, stop: int) -> None:
        """Put bytes [start, stop) on the disk, and leave alone what else waits there where the system can; other threads run meanwhile."""

    def forget(self) -> None:
        """Give the mapped pages back; they stay in the page cache and are not this process's memory any more."""


class File(Protocol):
    """One open file. It stays what it is when its name goes, or names another file. The OSError of a verb that fails has the path."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def read(self, out: Buffer, position: int, *, now: bool = False) -> int:
        """Fill the writable ``out`` from ``position``; returns how many bytes that were: perhaps fewer for no reason, none at the file's end.

        now: only if that waits for no disk; raises BlockingIOError where it would, or the system does not know.
        """

    def write(self, parts: Sequence[Buffer], position: int, *, past_cache: bool = False) -> int:
        """Write the parts back to back; returns how many bytes were, which may be fewer.

        past_cache: past the page cache where the system can, and perhaps later, until ``sync``, which raises what goes wrong: then they are
        whole blocks, in memory and in the file, and nobody changes them meanwhile.
        """

    def sync(self, *, data_only: bool = False) -> None:
        """Put everything written to the file on the disk. data_only: times need not be."""

    def truncate(self, size: int) -> None:
        """Cut the file to this size, or fill it with zeros up to it."""

    def allocate(self, size: int) -> None:
        """Make sure that writing the first ``size`` bytes finds space."""

    def map(self) -> Mapping:
        """The file as it is now, as memory."""

    def hint(self, hint: Hint, start: int, size: int) -> None:
        """Advise the system what becomes of ``size`` bytes from ``start`` on; a size of 0 means all that follow."""

    def lock(self) -> None:
        """Keep others from locking it until it is closed. Raises BlockingIOError while another holds the lock."""

    def is_shared(self) -> bool | None:
        """Whether anybody else, in any process, has this unlinked file open or mapped; None where the system does not know, or another name
        keeps it."""

    def close(self) -> None:
        """Let go of it."""


class Files(Protocol):
    """Files by their names, and the names themselves."""

    @property
    def owner(self) -> int:
        """The number of this process, for people."""

    def open(self, path: Path, access: Access, mode: int = NEW_MODE) -> File:
        """Open a file; ``mode`` is that of one that is made. Its name lasts once its directory is synced."""

    def size(self, path: Path) -> int:
        """Bytes of a file, any number for a directory. Raises FileNotFoundError."""

    def names(self, path: Path) -> list[str]:
        """Names of the files in a directory, in any order. Raises FileNotFoundError, NotADirectoryError."""

    def make_directory(self, path: Path) -> bool:
        """Make a directory in one that exists; False when it exists already. It lasts once the one above is synced."""

    def link(self, path: Path, new: Path) -> None:
        """Give a file one more name. Raises FileExistsError."""

    def rename(self, path: Path, new: Path) -> None:
        """Give a file another name; what had it before has it no longer. Who looks finds the one or the other, never neither."""

    def unlink(self, path: Path) -> None:
        """Take a name away; the file goes with its last name, once nobody has it open. Raises FileNotFoundError."""

    def sync_directory(self, path: Path) -> None:
        """Put the names in a directory on the disk, as they are now."""

    def free_bytes(self, path: Path) -> int:
        """Space that is left on the disk of a directory."""

    def token(self, size: int) -> bytes:
        """Random bytes that nobody guesses."""


# What is built of these


def exists(files: Files, path: Path) -> bool:
    """Whether there is a file or directory of this name."""
    try:
        files.size(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def remove(files: Files, path: Path) -> None:
    """Take a name away, if it is there."""
    with suppress(FileNotFoundError):
        files.unlink(path)


def fill(file: File, out: memoryview, position: int, size: int) -> int:
    """Read until there are ``size`` bytes, or no more; returns how many. ``out`` may be longer than that."""
    done = 0
    while done < size and (count := file.read(out[done:], position + done)):
        done += count
    return done


def read_file(files: Files, path: Path, size_max: int | None = None) -> bytes:
    """What a file holds, at most ``size_max`` bytes of it. Raises FileNotFoundError."""
    file = files.open(path, Access.READ)
    try:
        content = bytearray(file.size if size_max is None else min(file.size, size_max))
        return bytes(content[: fill(file, memoryview(content), 0, len(content))])
    finally:
        file.close()


def write_parts(file: File, parts: Sequence[Buffer], position: int, *, past_cache: bool = False) -> int:
    """Write everything, in pieces where the system takes no more at once; returns the position behind it. past_cache: as ``File.write``."""
    views = [memoryview(part).cast("B") for part in parts]
    while views:
        count = file.write(views, position, past_cache=past_cache)
        position += count
        take_off(views, count)
    return position


def take_off(views: list[memoryview], count: int) -> None:
    """Leave out of these views the first ``count`` bytes, which were written."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if views:
        views[0] = views[0][count:]


def replace_file(files: Files, path: Path, parts: Iterable[Buffer], *, temporary: Path, mode: int) -> None:
    """Create or replace a file: whole and on the disk, or not at all. Call it from one thread at a time."""
    file = files.open(temporary, Access.REPLACE, mode)
    try:
        position = 0
        for part in parts:
            position = write_parts(file, [part], position)
        file.sync()
    finally:
        file.close()
    files.rename(temporary, path)
    files.sync_directory(path.parent)


def copy_file(files: Files, path: Path, copy: Path) -> None:
    """Copy a file's bytes to the disk under another name, which lasts once its directory is synced."""
    source, target = files.open(path, Access.READ), files.open(copy, Access.REPLACE, COPY_MODE)
    try:
        block, position = memoryview(bytearray(COPIED_BYTES)), 0
        while count := source.read(block, position):
            position = write_parts(target, [block[:count]], position)
        target.sync()
    finally:
        target.close()
        source.close()


def make_directories(files: Files, path: Path) -> None:
    """A directory that a power loss does not take away, with those above it that do not exist."""
    try:
        made = files.make_directory(path)
    except FileNotFoundError:
        make_directories(files, path.parent)
        made = files.make_directory(path)
    # Whoever made it, or the one above, may have been killed before this, or its sync have failed.
    with suppress(PermissionError):
        files.sync_directory(path.parent.parent)
    with nullcontext() if made else suppress(PermissionError):  # who may not look there has not made it
        files.sync_directory(path.parent)
