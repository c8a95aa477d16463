"""Access files through the operating system: the implementation of ``files``. Each method makes one or two system
calls."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from errno import EACCES, EAGAIN, EINVAL
from pathlib import Path
from typing import Final

from polywire.store.files import NEW_MODE, Access, Hint, drop_written
from polywire.store.native_memory import address_of, find_call
from polywire.types import Buffer

BEHIND_BYTES_MIN: Final = (
    1024 * 1024
)  # takes half a millisecond of disk time: smaller writes finish before another thread would start

_O_CLOEXEC: Final = getattr(os, "O_CLOEXEC", 0)
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_RWF_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_SYNC_FILE_RANGE_WRITE: Final = 2  # Linux, uapi/linux/fs.h
_MS_SYNC: Final = 16 if sys.platform == "darwin" else 4  # sys/mman.h

_FLAGS: Final[Mapping[Access, int]] = {
    Access.READ: os.O_RDONLY | getattr(os, "O_NONBLOCK", 0),  # a FIFO in place of a file must not block the open
    Access.DIRECT: os.O_RDONLY | _O_DIRECT,
    Access.WRITE: os.O_RDWR,
    Access.KEEP: os.O_RDWR | os.O_CREAT,
    Access.NEW: os.O_RDWR | os.O_CREAT | os.O_EXCL,
    Access.REPLACE: os.O_RDWR | os.O_CREAT | os.O_TRUNC,
}
_ADVICE: Final[Mapping[Hint, str]] = {
    Hint.READ_SOON: "POSIX_FADV_WILLNEED",
    Hint.READ_NO_MORE: "POSIX_FADV_DONTNEED",
}

_sync_file_range: Final = find_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_msync: Final = find_call("msync", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _named(error: OSError, path: str) -> OSError:
    """Add the file's path to an error of a file descriptor, and return the error."""
    error.filename = path
    return error


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Context that adds a file's path to errors raised inside. It is too slow for frequent calls."""
    try:
        yield
    except OSError as error:
        raise _named(error, path) from None


class SystemMapping:
    """Implements ``Mapping`` with mmap."""

    __slots__ = ("_descriptor", "_map", "_path", "view")

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path
        size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        self.view = memoryview(self._map)

    def find(self, pattern: bytes, start: int) -> int:
        return self._map.find(pattern, start)

    def flush(self, start: int, stop: int) -> None:
        """Sync a range with ``msync``, which writes only changed pages of the range.

        ``fdatasync`` has the same guarantee (on Linux both end in ``vfs_fsync_range``). But it would write every
        changed page of the file, and a reused journal file may have many that are not needed.
        """
        if _msync is None:
            with _naming(self._path):
                os.fdatasync(self._descriptor)
            return
        start -= start % mmap.PAGESIZE
        if _msync(address_of(self.view) + start, stop - start, _MS_SYNC) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), self._path)

    def forget(self) -> None:
        with suppress(OSError, AttributeError, ValueError):  # only a hint
            self._map.madvise(mmap.MADV_DONTNEED)


class SystemFile:
    """One file descriptor. Its lock ends when the descriptor is closed, even if a mapping of the file lasts longer."""

    __slots__ = ("_behind", "_descriptor", "_locked", "_past_cache", "_path", "_writer")

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = str(path)
        self._locked = False
        # whether writes bypass the page cache
        self._past_cache = False
        # write that runs in ``_writer``
        self._behind: Future[None] | None = None
        self._writer: ThreadPoolExecutor | None = None

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, out: Buffer, position: int, *, now: bool = False) -> int:
        if now and not _RWF_NOWAIT:
            raise BlockingIOError(EAGAIN, os.strerror(EAGAIN), self._path)
        try:
            if now:
                return os.preadv(self._descriptor, [out], position, _RWF_NOWAIT)
            return os.preadv(self._descriptor, [out], position)
        except OSError as error:
            raise _named(error, self._path) from None

    def write(self, parts: Sequence[Buffer], position: int, *, past_cache: bool = False) -> int:
        if past_cache:
            return self._write_past(parts, position)
        if self._past_cache:
            self._wait_for_write()
            self._set_direct(False)
        try:
            return os.pwritev(self._descriptor, parts, position)
        except OSError as error:
            raise _named(error, self._path) from None

    def _write_past(self, parts: Sequence[Buffer], position: int) -> int:
        """Write parts, bypassing the page cache. Return the number of bytes.

        A large write runs in a thread, so that the caller can prepare the next parts.
        """
        self._wait_for_write()
        if not self._past_cache:
            self._set_direct(True)
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(map(len, views))
        if size < BEHIND_BYTES_MIN:
            self._write_all(views, position)
            return size
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._behind = self._writer.submit(self._write_all, views, position)
        return size

    def _write_all(self, views: list[memoryview], position: int) -> None:
        while views:
            try:
                count = os.pwritev(self._descriptor, views, position)
            except OSError as error:
                if error.errno != EINVAL or not self._past_cache:
                    raise _named(error, self._path) from None
                # the file system does not support direct writes, or not at this position after a short one
                self._set_direct(False)
                continue
            position += count
            drop_written(views, count)

    def _wait_for_write(self) -> None:
        """Wait for pending writes. Raises OSError if one failed."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()

    def _set_direct(self, past_cache: bool) -> None:
        """Turn direct writes on or off. Does nothing if the file system does not support them."""
        with suppress(OSError):  # the write itself reports errors
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | _O_DIRECT if past_cache else flags & ~_O_DIRECT)
            self._past_cache = past_cache and bool(_O_DIRECT)

    def sync(self, *, data_only: bool = False) -> None:
        self._wait_for_write()
        with _naming(self._path):
            if data_only:
                os.fdatasync(self._descriptor)
            else:
                os.fsync(self._descriptor)

    def truncate(self, size: int) -> None:
        with _naming(self._path):
            os.ftruncate(self._descriptor, size)

    def allocate(self, size: int) -> None:
        with _naming(self._path):
            os.posix_fallocate(self._descriptor, 0, size)

    def map(self) -> SystemMapping:
        with _naming(self._path):
            return SystemMapping(self._descriptor, self._path)

    def hint(self, hint: Hint, start: int, size: int) -> None:
        if hint is Hint.WRITE_NOW:
            if _sync_file_range is not None:
                _sync_file_range(
                    self._descriptor, start, size, _SYNC_FILE_RANGE_WRITE
                )  # an error here would also make the sync fail
            return
        with suppress(OSError, AttributeError):  # AttributeError: the system has no such hints
            os.posix_fadvise(self._descriptor, start, size, getattr(os, _ADVICE[hint]))

    def lock(self) -> None:
        with _naming(self._path):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._locked = True

    def is_shared(self) -> bool | None:
        take, give_back = getattr(fcntl, "F_SETLEASE", None), fcntl.F_UNLCK
        if take is None or os.fstat(self._descriptor).st_nlink > 0:
            return None
        try:
            # Linux grants the lease only if no other descriptor has the file open
            fcntl.fcntl(self._descriptor, take, fcntl.F_WRLCK)
            fcntl.fcntl(self._descriptor, take, give_back)
        except OSError as error:
            return True if error.errno in (EAGAIN, EACCES) else None
        return False

    def close(self) -> None:
        if self._writer is not None:
            self._writer.shutdown()  # otherwise it could write to the next file that gets this descriptor
        if self._locked:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


class SystemFiles:
    """Implements ``Files`` with the operating system's files."""

    __slots__ = ()

    @property
    def owner(self) -> int:
        return os.getpid()

    def open(self, path: Path, access: Access, mode: int = NEW_MODE) -> SystemFile:
        return SystemFile(os.open(path, _FLAGS[access] | _O_CLOEXEC, mode), path)

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def names(self, path: Path) -> list[str]:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]

    def make_directory(self, path: Path) -> bool:
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise
            return False
        return True

    def link(self, path: Path, new: Path) -> None:
        os.link(path, new)

    def rename(self, path: Path, new: Path) -> None:
        path.replace(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | _O_CLOEXEC)
        try:
            with _naming(str(path)):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def token(self, size: int) -> bytes:
        return secrets.token_bytes(size)


SYSTEM_FILES: Final = SystemFiles()
