"""Blobs as files of one directory: temporary file, write, sync, link, directory sync.

Promises: a name appears whole and durable or not at all, and is never overwritten; what was written does not stay in the page cache; few
files stay open. Must not know: what a blob holds.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from polywire.errors import BrokerError, Busy, ErrorCode, Unavailable
from polywire.store.base import BLOCK_BYTES, BlobExists, BlobMissing, check_blob_name
from polywire.store.libc import find_call
from polywire.store.residency import Residency
from polywire.types import Buffer

OPEN_BLOBS_MAX: Final = 64  # three descriptors each: well below the usual limit of 1,024
MAPPED_BYTES_MAX: Final = 128 * 1024 * 1024  # mapped pages count as the broker's memory, which stays below 500 MB

WRITE_OUT_BYTES: Final = 4 * 1024 * 1024  # of a new blob, before the disk is asked to begin with them

_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_O_CLOEXEC: Final = getattr(os, "O_CLOEXEC", 0)
_SYNC_FILE_RANGE_WRITE: Final = 2  # Linux, uapi/linux/fs.h
_sync_file_range: Final = find_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def _storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turn the system's errors into ours; a full disk is the only one that passes by itself."""
    try:
        yield
    except OSError as error:
        raise _storage_error(error, what, path) from error


def _storage_error(error: OSError, what: str, path: Path) -> BrokerError:
    reason = error.strerror or str(error)
    if error.errno in _DISK_FULL:
        return Busy(ErrorCode.DISK_FULL, f"disk is full path={str(path)!r}")
    return Unavailable(ErrorCode.STORAGE_FAILED, f"cannot {what} file: {reason} path={str(path)!r}")


class FileBlob:
    """One open file, mapped when first asked for."""

    __slots__ = ("_descriptor", "_direct", "_path", "_residency", "_size", "_view")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | _O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size
        self._view: memoryview | None = None
        self._residency: Residency | None = None
        self._direct = -1

    @property
    def size(self) -> int:
        return self._size

    def map(self) -> memoryview:
        if self._view is None:
            self._view = self._mapped()
        return self._view

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

    def is_warm(self, start: int, stop: int) -> bool:
        if self._residency is None:
            self._residency = Residency(self.map())
        return self._residency.holds(start, min(stop, self._size))

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

    def _mapped(self) -> memoryview:
        if self._size == 0:
            return memoryview(b"")
        with _storage_errors("map", self._path):
            return memoryview(mmap.mmap(self._descriptor, self._size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED))


class OpenBlobs:
    """The bounded set of open files, least recently used out first. A blob put out closes when its last holder lets go."""

    __slots__ = ("_blobs", "_bytes", "_bytes_max", "_count_max", "_lock")

    def __init__(self, *, count_max: int = OPEN_BLOBS_MAX, bytes_max: int = MAPPED_BYTES_MAX) -> None:
        self._blobs: OrderedDict[str, FileBlob] = OrderedDict()
        self._bytes = 0
        self._count_max = count_max
        self._bytes_max = bytes_max
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
            if known is blob:
                self._bytes += blob.size
            while len(self._blobs) > 1 and (len(self._blobs) > self._count_max or self._bytes > self._bytes_max):
                _, oldest = self._blobs.popitem(last=False)
                self._bytes -= oldest.size
            return known

    def drop(self, name: str) -> None:
        with self._lock:
            blob = self._blobs.pop(name, None)
            if blob is not None:
                self._bytes -= blob.size


class FileStore:
    """Blobs below one directory, which exists."""

    __slots__ = ("_open", "_root")

    def __init__(
        self,
        root: Path,
        *,
        open_blobs_max: int = OPEN_BLOBS_MAX,
        mapped_bytes_max: int = MAPPED_BYTES_MAX,
    ) -> None:
        self._root = root
        self._open = OpenBlobs(count_max=open_blobs_max, bytes_max=mapped_bytes_max)

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


def _write_file(path: Path, parts: Iterable[Buffer]) -> None:
    """A new file of these parts, on the disk on return; what was written is not kept in the page cache."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _O_CLOEXEC, 0o640)
    try:
        _write_parts(descriptor, parts)
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
