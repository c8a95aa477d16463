"""The interface through which the store and the log access files and directories.

Each method is one operation of the operating system and fails with its OSError. The module also has functions that
combine these methods. Each method documents what is durable after it. A directory entry survives a power loss once the
directory is synced. Bytes survive once the file is synced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from enum import Enum, auto
from pathlib import Path
from typing import Final, Protocol

from polywire.types import Buffer

NEW_MODE: Final = 0o640
COPY_MODE: Final = 0o666  # the process's umask is subtracted, as for files that users create
COPIED_BYTES: Final = 1 << 20


class Access(Enum):
    """How a file is opened."""

    READ = auto()
    """An existing file for reading, or a directory to lock it."""
    DIRECT = auto()
    """An existing file for reads that bypass the page cache."""
    WRITE = auto()
    """An existing file, for reading and writing."""
    KEEP = auto()
    """Like WRITE, but the file is created if it does not exist."""
    NEW = auto()
    """A file that must not exist; it is created."""
    REPLACE = auto()
    """The file is created, or truncated if it exists."""


class Hint(Enum):
    """Advice on how a range of a file will be used. A system may ignore it."""

    READ_SOON = auto()
    WRITE_NOW = auto()
    READ_NO_MORE = auto()


class Mapping(Protocol):
    """A whole file mapped into memory (mmap).

    Later writes to the file are visible in it. The mapping lasts as long as any view of it.
    """

    @property
    def view(self) -> memoryview:
        """Return the file's bytes, read-only."""

    def find(self, pattern: bytes, start: int) -> int:
        """Return the position of a pattern at or after ``start``, or -1."""

    def flush(self, start: int, stop: int) -> None:
        """Sync bytes [start, stop) and, if the system can, no other pages of the file. Releases the GIL."""

    def forget(self) -> None:
        """Unmap the resident pages. They stay in the page cache but no longer count as this process's memory."""


class File(Protocol):
    """An open file. It stays the same file if its directory entry is removed or reused.

    An OSError that a method raises contains the path.
    """

    @property
    def size(self) -> int:
        """Return the size in bytes."""

    def read(self, out: Buffer, position: int, *, now: bool = False) -> int:
        """Fill ``out`` with bytes from ``position``. Return their number, which may be smaller, 0 at the end.

        Args:
            out: writable buffer.
            position: position in the file.
            now: do not wait for the disk. Raises BlockingIOError if the data is not in memory or the system cannot
                tell.
        """

    def write(self, parts: Sequence[Buffer], position: int, *, past_cache: bool = False) -> int:
        """Write the parts back to back. Return the number of bytes written, possibly fewer.

        Args:
            parts: the bytes.
            position: position in the file.
            past_cache: bypass the page cache where the system can. The write may be delayed until ``sync``, which
                raises its errors. The parts must be whole blocks, in memory and in the file, and must not change until
                then.
        """

    def sync(self, *, data_only: bool = False) -> None:
        """Sync everything written to the file. With ``data_only``, timestamps may be left unsynced."""

    def truncate(self, size: int) -> None:
        """Truncate the file to this size, or extend it with zeros."""

    def allocate(self, size: int) -> None:
        """Reserve disk space for the first ``size`` bytes."""

    def map(self) -> Mapping:
        """Map the file in its current size."""

    def hint(self, hint: Hint, start: int, size: int) -> None:
        """Tell the system with ``posix_fadvise`` how ``size`` bytes from ``start`` on will be used.

        A size of 0 means to the end.
        """

    def lock(self) -> None:
        """Lock the file until it is closed. Raises BlockingIOError if another process holds the lock."""

    def is_shared(self) -> bool | None:
        """Return whether another descriptor or mapping, in any process, uses this unlinked file.

        Returns None if the system cannot determine it, or the file has another directory entry.
        """

    def close(self) -> None: ...


class Files(Protocol):
    """File system operations on paths."""

    @property
    def owner(self) -> int:
        """Return the process id."""

    def open(self, path: Path, access: Access, mode: int = NEW_MODE) -> File:
        """Open a file. ``mode`` applies to a file that is created. Its name is durable once its directory is synced."""

    def size(self, path: Path) -> int:
        """Return the size of a file in bytes. The number for a directory has no meaning. Raises FileNotFoundError."""

    def names(self, path: Path) -> list[str]:
        """Return the names in a directory, in any order. Raises FileNotFoundError or NotADirectoryError."""

    def make_directory(self, path: Path) -> bool:
        """Create a directory in an existing one. Return False if it exists. It is durable once its parent is synced."""

    def link(self, path: Path, new: Path) -> None:
        """Add a hard link to a file. Raises FileExistsError."""

    def rename(self, path: Path, new: Path) -> None:
        """Rename a file, replacing the target atomically: readers see the old or the new file, never none."""

    def unlink(self, path: Path) -> None:
        """Remove a directory entry. Raises FileNotFoundError.

        The file's space is freed when its last entry is gone and it is no longer open.
        """

    def sync_directory(self, path: Path) -> None:
        """Sync the entries of a directory."""

    def free_bytes(self, path: Path) -> int:
        """Return the free space on the disk of a directory."""

    def token(self, size: int) -> bytes:
        """Return random bytes that cannot be guessed."""


# Functions that combine methods


def exists(files: Files, path: Path) -> bool:
    """Return whether a file or directory of this name exists."""
    try:
        files.size(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def remove(files: Files, path: Path) -> None:
    """Remove a file's directory entry if it exists."""
    with suppress(FileNotFoundError):
        files.unlink(path)


def fill(file: File, out: memoryview, position: int, size: int) -> int:
    """Read ``size`` bytes into ``out``, which may be longer.

    Return their number, smaller only at the end of the file.
    """
    done = 0
    while done < size and (count := file.read(out[done:], position + done)):
        done += count
    return done


def read_file(files: Files, path: Path, size_max: int | None = None) -> bytes:
    """Return the content of a file, at most ``size_max`` bytes. Raises FileNotFoundError."""
    file = files.open(path, Access.READ)
    try:
        content = bytearray(file.size if size_max is None else min(file.size, size_max))
        return bytes(content[: fill(file, memoryview(content), 0, len(content))])
    finally:
        file.close()


def write_parts(file: File, parts: Sequence[Buffer], position: int, *, past_cache: bool = False) -> int:
    """Write all parts, in as many calls as the system needs. Return the end position.

    ``past_cache``: bypass the page cache where the system can.
    """
    views = [memoryview(part).cast("B") for part in parts]
    while views:
        count = file.write(views, position, past_cache=past_cache)
        position += count
        drop_written(views, count)
    return position


def drop_written(views: list[memoryview], count: int) -> None:
    """Remove the first ``count`` bytes, which were already written, from these views."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if views:
        views[0] = views[0][count:]


def replace_file(files: Files, path: Path, parts: Iterable[Buffer], *, temporary: Path, mode: int) -> None:
    """Create or replace a file: complete and synced, or not at all. Call it from one thread at a time."""
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
    """Copy a file and sync the copy. The copy's name is durable once its directory is synced."""
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
    """Create a directory and its missing parents so that they survive a power loss."""
    # The parent's name is synced before anything is created in it. Its creator may have been killed before it did this,
    # or the sync may have failed. So at most the last name of any existing path can be lost.
    try:
        with suppress(PermissionError):
            files.sync_directory(path.parent.parent)
        made = files.make_directory(path)
    except FileNotFoundError:
        make_directories(files, path.parent)
        made = files.make_directory(path)
    # a process that may not open the parent directory cannot have created the data directory
    with nullcontext() if made else suppress(PermissionError):
        files.sync_directory(path.parent)
