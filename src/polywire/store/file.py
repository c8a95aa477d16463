"""Blobs as files of one directory: temporary file, write, sync, link, directory sync.

Promises: a new name appears whole and durable or not at all, and is never overwritten as new; what was written does not stay in the page
cache; few files stay open. Must not know: what a blob holds.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from polywire.errors import BrokerError, Busy, ErrorCode, Unavailable
from polywire.store.base import BLOCK_BYTES, OPEN_BLOBS_MAX, BlobExists, BlobMissing, check_blob_name, no_descriptor
from polywire.store.libc import find_call
from polywire.types import Buffer

WRITE_OUT_BYTES: Final = 4 * 1024 * 1024  # of a new blob, before the disk is asked to begin with them

FREED_BYTES: Final = (
    16 * 1024 * 1024
)  # of a deleted file at once: some 5 ms of the disk, its journal and the page cache

NEW_MODE: Final = 0o640
REPLACED_MODE: Final = 0o600  # other programs are meant to read such a file: those of its owner

_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_RWF_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_O_CLOEXEC: Final = getattr(os, "O_CLOEXEC", 0)
_SYNC_FILE_RANGE_WRITE: Final = 2  # Linux, uapi/linux/fs.h
_sync_file_range: Final = find_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def _storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turn the system's errors into ours; a full disk and too many open files pass by themselves."""
    try:
        yield
    except OSError as error:
        raise _storage_error(error, what, path) from error


def _storage_error(error: OSError, what: str, path: Path) -> BrokerError:
    reason = error.strerror or str(error)
    if error.errno in DISK_FULL:
        return Busy(ErrorCode.DISK_FULL, f"disk is full path={str(path)!r}")
    busy = no_descriptor(error)
    if busy is not None:
        return busy
    return Unavailable(ErrorCode.STORAGE_FAILED, f"cannot {what} file: {reason} path={str(path)!r}")


class FileBlob:
    """One open file."""

    __slots__ = ("_descriptor", "_direct", "_path", "_size")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | _O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size
        self._direct = -1

    @property
    def size(self) -> int:
        return self._size

    def pread_into(self, out: Buffer, position: int) -> int:
        view, done = memoryview(out), 0
        with _storage_errors("read", self._path):
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done:]], position + done)
                if count == 0:
                    break
                done += count
        return done

    def expect(self, start: int, stop: int) -> None:
        """Have the system bring bytes [start, stop) into its page cache meanwhile, if it can."""
        if start < stop:  # to the system, no bytes mean all that follow
            _advise(self._descriptor, start, stop - start, "POSIX_FADV_WILLNEED")

    def read_now(self, out: Buffer, position: int) -> bool:
        if not _RWF_NOWAIT:
            return False
        try:
            return os.preadv(self._descriptor, [out], position, _RWF_NOWAIT) == len(out)
        except OSError:  # it would wait, the file system cannot tell, or who goes on to read it is told
            return False

    def read_direct(self, block: memoryview, start: int, stop: int) -> memoryview:
        first, stop = start - start % BLOCK_BYTES, min(stop, self._size)
        room = block[: -(-(stop - first) // BLOCK_BYTES) * BLOCK_BYTES]
        with _storage_errors("read", self._path):
            descriptor, done = self._direct_descriptor(), 0
            while first + done < stop:
                count = os.preadv(descriptor, [room[done:]], first + done)
                if count == 0:
                    break
                done += count
        if first + done < stop:
            raise Unavailable(ErrorCode.STORAGE_FAILED, f"file is shorter than it was path={str(self._path)!r}")
        return block[start - first : stop - first]

    def _direct_descriptor(self) -> int:
        """A descriptor that passes the page cache by, or the ordinary one where the file system has none."""
        if self._direct < 0:
            try:
                self._direct = os.open(self._path, os.O_RDONLY | _O_CLOEXEC | _O_DIRECT)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOENT):  # deleted meanwhile: the open one still reads
                    raise
                return self._descriptor
        return self._direct

    def __del__(self) -> None:
        for name in ("_descriptor", "_direct"):
            descriptor = getattr(self, name, -1)  # missing when opening failed
            if descriptor >= 0:
                os.close(descriptor)


class OpenBlobs:
    """The bounded set of open files, least recently used out first. A blob put out closes when its last holder lets go."""

    __slots__ = ("_blobs", "_count_max", "_lock")

    def __init__(self, *, count_max: int = OPEN_BLOBS_MAX) -> None:
        self._blobs: OrderedDict[str, FileBlob] = OrderedDict()
        self._count_max = count_max
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blobs)

    def get(self, name: str) -> FileBlob | None:
        with self._lock:
            blob = self._blobs.get(name)
            if blob is not None:
                self._blobs.move_to_end(name)
            return blob

    def add(self, name: str, blob: FileBlob) -> FileBlob:
        """Keep a blob; when another thread was first, its blob is returned instead."""
        with self._lock:
            known = self._blobs.setdefault(name, blob)
            while len(self._blobs) > self._count_max:
                self._blobs.popitem(last=False)
            return known

    def drop(self, name: str) -> None:
        with self._lock:
            self._blobs.pop(name, None)


class FileStore:
    """Blobs below one directory, which exists."""

    __slots__ = ("_open", "_root")

    def __init__(self, root: Path, *, open_blobs_max: int = OPEN_BLOBS_MAX) -> None:
        self._root = root
        self._open = OpenBlobs(count_max=open_blobs_max)

    def delete_remains(self, directory: str) -> list[str]:
        """Delete temporary files that a crash left in a directory; returns their names. Call it before anybody writes."""
        path = self._root / directory
        with _storage_errors("clean", path):
            remains = [entry for entry in path.iterdir() if entry.name.startswith(".")] if path.is_dir() else []
            for entry in remains:
                entry.unlink(missing_ok=True)
        return sorted(entry.name for entry in remains)

    def put_new(self, name: str, parts: Iterable[Buffer]) -> None:
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        with _storage_errors("write", path):
            if path.exists():  # a courtesy that saves the writing; the link below decides
                raise BlobExists(name)
            self._make_directory(path.parent)
            try:
                _write_file(temporary, parts)
                os.link(temporary, path)
            except FileExistsError:
                raise BlobExists(name) from None
            finally:
                temporary.unlink(missing_ok=True)
            _sync_directory(path.parent)

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.new")  # one at a time: what a crash left is in nobody's way
        with _storage_errors("write", path):
            self._make_directory(path.parent)
            try:
                temporary.unlink(missing_ok=True)
                _write_file(temporary, parts, mode=REPLACED_MODE, sync=False)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        self._open.drop(name)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        blob = self.open(name)
        stop = blob.size if stop is None else min(stop, blob.size)
        content = bytearray(max(stop - start, 0))
        count = blob.pread_into(content, start)
        return bytes(content[:count])

    def open(self, name: str) -> FileBlob:
        blob = self._open.get(name)
        if blob is not None:
            return blob
        path = self._path(name)
        with _storage_errors("open", path):
            try:
                return self._open.add(name, FileBlob(path))
            except FileNotFoundError:
                raise BlobMissing(name) from None

    def list(self, prefix: str) -> list[str]:
        directory, slash, start = prefix.rpartition("/")
        path = self._root / directory
        with _storage_errors("list", path):
            if not path.is_dir():
                return []
            with os.scandir(path) as entries:
                names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        return sorted(directory + slash + name for name in names if name.startswith(start) and not name.startswith("."))

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._open.drop(name)
        with _storage_errors("delete", path):
            path.unlink(missing_ok=True)

    def delete_in_steps(self, name: str) -> Iterator[int]:
        """See ``Store``. A file that is unlinked while somebody has it open is freed at once, by whoever closes it last; one of some size
        keeps the file system's journal, and so every sync, waiting. So the last to have it open is this, and it cuts the file down."""
        path = self._path(name)
        with _storage_errors("delete", path):
            try:
                descriptor = os.open(path, os.O_RDWR | _O_CLOEXEC)
            except FileNotFoundError:
                self._open.drop(name)
                return
            try:
                path.unlink(missing_ok=True)
                self._open.drop(name)
                while (others := _others_have_it_open(descriptor)) is True:
                    yield 0
                if others is None:  # it is freed when it is closed
                    return
                size = os.fstat(descriptor).st_size
                while size > 0:
                    freed = min(size, FREED_BYTES)
                    size -= freed
                    os.ftruncate(descriptor, size)
                    yield freed
            finally:
                os.close(descriptor)

    def size(self, name: str) -> int:
        path = self._path(name)
        with _storage_errors("measure", path):
            try:
                return path.stat().st_size
            except FileNotFoundError:
                raise BlobMissing(name) from None

    def _path(self, name: str) -> Path:
        check_blob_name(name)
        return self._root / name

    def _make_directory(self, path: Path) -> None:
        if not path.is_dir():
            path.mkdir(exist_ok=True)
            _sync_directory(path.parent)


def _others_have_it_open(descriptor: int) -> bool | None:
    """Whether anybody else, in any process, has this file open or mapped: a reader would find its end, or worse, where it is cut. None where
    the system cannot tell."""
    take, give_back = getattr(fcntl, "F_SETLEASE", None), fcntl.F_UNLCK
    if take is None:
        return None
    try:
        fcntl.fcntl(descriptor, take, fcntl.F_WRLCK)  # Linux gives the lease to the only one
        fcntl.fcntl(descriptor, take, give_back)
    except OSError as error:
        return True if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return False


def _write_file(path: Path, parts: Iterable[Buffer], *, mode: int = NEW_MODE, sync: bool = True) -> None:
    """A new file of these parts; with ``sync`` it is on the disk on return, and not kept in the page cache."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _O_CLOEXEC, mode)
    try:
        _write_parts(descriptor, parts)
        if not sync:
            return
        os.fsync(descriptor)
        _advise(descriptor, 0, 0, "POSIX_FADV_DONTNEED")
    finally:
        os.close(descriptor)


def _write_parts(descriptor: int, parts: Iterable[Buffer]) -> None:
    """Write the parts back to back. The disk begins with each stretch as soon as it is written, and is nearly done when the last one is."""
    size = begun = 0
    for part in parts:
        size += _write_all(descriptor, memoryview(part).cast("B"))
        if size - begun >= WRITE_OUT_BYTES and _sync_file_range is not None:
            _sync_file_range(descriptor, begun, size - begun, _SYNC_FILE_RANGE_WRITE)  # what fails here fails the sync
            begun = size


def _advise(descriptor: int, start: int, size: int, advice: str) -> None:
    """Tell the system what becomes of some bytes in its page cache; no more than a hint."""
    with suppress(OSError, AttributeError):  # AttributeError: this system takes no hints
        os.posix_fadvise(descriptor, start, size, getattr(os, advice))


def _write_all(descriptor: int, view: memoryview) -> int:
    """Write everything, and return how much that was; a short write is continued."""
    done = 0
    while done < len(view):
        done += os.write(descriptor, view[done:])
    return done


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | _O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
