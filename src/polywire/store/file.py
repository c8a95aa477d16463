"""Store blobs (immutable segments and snapshots) as files in one directory.

* A new file appears complete and durable, or not at all. ``put_new`` never overwrites a file.
* The most recently written blobs stay in memory, up to a limit, and not in the page cache.
* The number of open files is limited.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Final

from polywire.clock import SYSTEM_CLOCK, Clock
from polywire.errors import BrokerError, Busy, ErrorCode, Unavailable
from polywire.store.base import (
    BLOCK_BYTES,
    OPEN_BLOBS_MAX,
    BlobExists,
    BlobMissing,
    CopiedParts,
    check_blob_name,
    no_descriptor,
)
from polywire.store.blob_cache import BlobCache, CachedBlob
from polywire.store.files import (
    Access,
    File,
    Files,
    Hint,
    exists,
    fill,
    remove,
    write_parts,
)
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import Buffer

# bytes of a blob in the page cache that are collected before the disk is asked to write them
WRITE_OUT_BYTES: Final = 4 * 1024 * 1024

FREED_BYTES: Final = (
    16 * 1024 * 1024
)  # bytes freed at a time from a deleted file: takes some 5 ms of the disk, its journal and the page cache

REPLACED_MODE: Final = 0o600  # other programs of the same user may read such files

DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def _storage_errors(what: str, path: Path) -> Iterator[None]:
    """Convert the system's errors to BrokerErrors. A full disk and too many open files become Busy."""
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
    """One open file.

    Args:
        kept: its copy in the memory cache, if any.
    """

    __slots__ = ("_direct", "_file", "_files", "_kept", "_path", "_size")

    def __init__(self, path: Path, files: Files = SYSTEM_FILES, *, kept: CachedBlob | None = None) -> None:
        self._kept = kept
        self._path = path
        self._files = files
        self._direct: File | None = None
        self._file = files.open(path, Access.READ)
        self._size = self._file.size

    @property
    def size(self) -> int:
        return self._size

    @property
    def is_cached(self) -> bool:
        return self._kept is not None and self._kept.is_valid

    def pread_into(self, out: Buffer, position: int) -> int:
        with _storage_errors("read", self._path):
            return fill(self._file, memoryview(out), position, len(out))

    def expect(self, start: int, stop: int) -> None:
        """Advise the system to read bytes [start, stop) ahead into its page cache."""
        if start < stop:  # posix_fadvise treats a length of 0 as "to the end"
            self._file.hint(Hint.READ_SOON, start, stop - start)

    def read_now(self, out: Buffer, position: int) -> bool:
        if self._kept is not None and self._kept.read(out, position):
            return True
        try:
            return self._file.read(out, position, now=True) == len(out)
        # the read would wait, the file system does not support this, or it fails and the ordinary read reports the
        # error
        except OSError:
            return False

    def read_direct(self, block: memoryview, start: int, stop: int) -> memoryview:
        first, stop = start - start % BLOCK_BYTES, min(stop, self._size)
        space = block[: -(-(stop - first) // BLOCK_BYTES) * BLOCK_BYTES]
        with _storage_errors("read", self._path):
            done = fill(self._direct_file(), space, first, stop - first)
        if first + done < stop:
            raise Unavailable(ErrorCode.STORAGE_FAILED, f"file is shorter than it was path={str(self._path)!r}")
        return block[start - first : stop - first]

    def _direct_file(self) -> File:
        """Return the file opened for direct reads, or the ordinary file if the file system does not support them."""
        if self._direct is None:
            try:
                self._direct = self._files.open(self._path, Access.DIRECT)
            except OSError as error:
                # deleted meanwhile: the file that is already open can still be read
                if error.errno not in (errno.EINVAL, errno.ENOENT):
                    raise
                return self._file
        return self._direct

    def __del__(self) -> None:
        for name in ("_file", "_direct"):
            file = getattr(self, name, None)  # the attribute is missing if opening failed
            if file is not None:
                file.close()


class OpenBlobs:
    """A limited set of open files. The least recently used file is closed when its last user has finished."""

    __slots__ = ("_blobs", "_count_max", "_lock")

    def __init__(self, *, count_max: int = OPEN_BLOBS_MAX) -> None:
        self._blobs: OrderedDict[str, FileBlob] = OrderedDict()
        self._count_max = count_max
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._blobs)

    def get(self, name: str) -> FileBlob | None:
        with self._lock:
            blob = self._blobs.get(name)
            if blob is not None:
                self._blobs.move_to_end(name)
            return blob

    def add(self, name: str, blob: FileBlob) -> FileBlob:
        """Add an open file and return it. If another thread has added one with this name, return that one."""
        with self._lock:
            known = self._blobs.setdefault(name, blob)
            while len(self._blobs) > self._count_max:
                self._blobs.popitem(last=False)
            return known

    def drop(self, name: str) -> None:
        with self._lock:
            self._blobs.pop(name, None)


class _NewFile:
    """A file that is written in whole blocks from memory, which may become the file's copy in the cache."""

    __slots__ = ("_blocks", "_file", "_kept", "_memory", "_written", "size")

    def __init__(self, file: File, memory: BlobCache) -> None:
        self._file = file
        self._memory = memory
        # bytes after position ``_written``
        self._blocks: list[memoryview] = []
        # bytes before position ``_written``, None if they are not cached
        self._kept: list[memoryview] | None = []
        self._written = 0
        self.size = 0

    def add(self, part: Buffer) -> None:
        """Append bytes. They are written at the latest by ``finish``."""
        rest = memoryview(part).cast("B")
        while rest:
            space = self._space()
            if space is None:  # no memory to write from: write directly from the part
                self._write_out()
                self._kept = None
                self.size = self._written = write_parts(self._file, [rest], self._written)
                return
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            rest = rest[count:]
            self._advance(count)

    def add_all(self, parts: Iterable[Buffer]) -> None:
        """Append all parts."""
        if isinstance(parts, CopiedParts):
            while (space := self._space()) is not None:
                count = parts.fill(space)
                self._advance(count)
                if count < len(space):
                    return
        for part in parts:
            self.add(part)

    def finish(self) -> list[memoryview] | None:
        """Write the remaining bytes and sync the file.

        Return the blocks with the whole file, or None if it is not to be cached.
        """
        self._write_out()
        self._file.sync()
        self._file.hint(Hint.READ_NO_MORE, 0, 0)
        return self._kept

    def _space(self) -> memoryview | None:
        """Return the free part of the last block or, if that block is full, a new one.

        Return None if there is no memory.
        """
        at = (self.size - self._written) % self._memory.block_bytes
        if at == 0:
            block = self._memory.take() if self._written % BLOCK_BYTES == 0 else None
            if block is None:
                return None
            self._blocks.append(block)
        return self._blocks[-1][at:]

    def _advance(self, count: int) -> None:
        self.size += count
        if self.size - self._written == self._memory.stretch_bytes:
            self._write_out()

    def _write_out(self) -> None:
        """Write the blocks to the file. A last piece that is not a whole block is written through the page cache."""
        begun, left = self._written, self.size - self._written
        past, last = [], []
        for block in self._blocks:
            whole = min(len(block), left - left % BLOCK_BYTES)
            past.append(block[:whole])
            last.append(block[whole : min(len(block), left)])
            left -= min(len(block), left)
        self._written = write_parts(self._file, [view for view in past if view], begun, past_cache=True)
        self._written = write_parts(self._file, [view for view in last if view], self._written)
        self._file.hint(Hint.WRITE_NOW, begun, self.size - begun)
        if self._kept is not None:
            self._kept += self._blocks
            if not self._memory.may_grow(self.size):
                self._kept = None
        self._blocks = []


class FileStore:
    """Stores blobs as files below an existing directory.

    Args:
        kept_bytes: total size of the most recently created files that stay in memory.
    """

    __slots__ = ("_files", "_kept", "_open", "_root", "_unsynced")

    def __init__(
        self,
        root: Path,
        *,
        open_blobs_max: int = OPEN_BLOBS_MAX,
        files: Files = SYSTEM_FILES,
        kept_bytes: int = 0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._kept = BlobCache(kept_bytes, clock)
        self._root = root
        self._files = files
        self._open = OpenBlobs(count_max=open_blobs_max)
        # directories whose entries a power loss may remove
        self._unsynced: set[Path] = set()

    def delete_remains(self, directory: str) -> list[str]:
        """Delete temporary files that a crash left in a directory. Return their names. Call it before any write."""
        path = self._root / directory
        with _storage_errors("clean", path):
            remains = sorted(name for name in self._names(path) if name.startswith("."))
            for name in remains:
                remove(self._files, path / name)
        return remains

    def put_new(self, name: str, parts: Iterable[Buffer]) -> None:
        self.put_cached(name, parts)

    def put_cached(self, name: str, parts: Iterable[Buffer]) -> Sequence[Buffer]:
        """Store the parts as a new file. Return the memory with the cached content, or nothing if it is not cached."""
        files, path = self._files, self._path(name)
        temporary = path.with_name(f".{path.name}.{files.token(6).hex()}")
        with _storage_errors("write", path):
            if exists(files, path):  # only avoids useless writing; the link below decides
                raise BlobExists(name)
            self._make_directory(path.parent)
            try:
                blocks, size = self._write_new(temporary, parts)
                files.link(temporary, path)
            except FileExistsError:
                raise BlobExists(name) from None
            finally:
                remove(files, temporary)
            files.sync_directory(path.parent)
        if not blocks:
            return ()
        self._kept.add(name, blocks, size)
        first = (len(blocks) - 1) * len(blocks[0])
        return [*blocks[:-1], blocks[-1][: size - first]]

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        files, path = self._files, self._path(name)
        # one writer at a time; the next write replaces a file that a crash left
        temporary = path.with_name(f".{path.name}.new")
        with _storage_errors("write", path):
            self._make_directory(path.parent)
            try:
                remove(files, temporary)
                file = files.open(temporary, Access.NEW, REPLACED_MODE)
                try:
                    _write_all(file, parts)
                finally:
                    file.close()
                files.rename(temporary, path)
            finally:
                remove(files, temporary)
        self._open.drop(name)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        blob = self.open(name)
        stop = blob.size if stop is None else min(stop, blob.size)
        content = bytearray(max(stop - start, 0))
        if blob.is_cached and blob.read_now(content, start):
            return bytes(content)
        count = blob.pread_into(content, start)
        return bytes(content[:count])

    def open(self, name: str) -> FileBlob:
        blob = self._open.get(name)
        if blob is not None:
            return blob
        path = self._path(name)
        with _storage_errors("open", path):
            try:
                return self._open.add(name, FileBlob(path, self._files, kept=self._kept.find(name)))
            except FileNotFoundError:
                raise BlobMissing(name) from None

    def list(self, prefix: str) -> list[str]:
        directory, slash, start = prefix.rpartition("/")
        path = self._root / directory
        with _storage_errors("list", path):
            names = self._names(path)
        return sorted(directory + slash + name for name in names if name.startswith(start) and not name.startswith("."))

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._let_go(name)
        with _storage_errors("delete", path):
            remove(self._files, path)

    def delete_in_steps(self, name: str) -> Iterator[int]:
        """Delete a file. Truncate it step by step, once nothing else has it open.

        The system frees an unlinked file at once when its last user closes it. For a large file that blocks the file
        system's journal, and with it every sync.
        """
        path = self._path(name)
        with _storage_errors("delete", path):
            try:
                file = self._files.open(path, Access.WRITE)
            except FileNotFoundError:
                self._let_go(name)
                return
            try:
                remove(self._files, path)
                self._let_go(name)
                # while other readers have the file open, truncating it would cut off what they read
                while (others := file.is_shared()) is True:
                    yield 0
                if others is None:  # the system frees it on close, or another link keeps it
                    return
                size = file.size
                while size > 0:
                    freed = min(size, FREED_BYTES)
                    size -= freed
                    file.truncate(size)
                    yield freed
            finally:
                file.close()

    def drop_copy(self, name: str) -> bool:
        return False

    def forget(self, name: str) -> None:
        """Drop a file from the memory cache."""
        self._kept.drop(name)

    def size(self, name: str) -> int:
        path = self._path(name)
        with _storage_errors("measure", path):
            try:
                return self._files.size(path)
            except FileNotFoundError:
                raise BlobMissing(name) from None

    def _path(self, name: str) -> Path:
        check_blob_name(name)
        return self._root / name

    def _names(self, directory: Path) -> Iterable[str]:
        try:
            return self._files.names(directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _make_directory(self, path: Path) -> None:
        if self._files.make_directory(path):
            self._unsynced.add(path)
        if path in self._unsynced:  # perhaps since an earlier call whose sync failed
            self._files.sync_directory(path.parent)
            self._unsynced.discard(path)

    def _write_new(self, path: Path, parts: Iterable[Buffer]) -> tuple[Sequence[memoryview] | None, int]:
        """Write a new file that is synced and not in the page cache.

        Returns the memory with the cached file (None if it is not cached) and its size.
        """
        file = self._files.open(path, Access.NEW)
        try:
            new = _NewFile(file, self._kept)
            new.add_all(parts)
            return new.finish(), new.size
        finally:
            file.close()

    def _let_go(self, name: str) -> None:
        self._open.drop(name)
        self._kept.drop(name)


def _write_all(file: File, parts: Iterable[Buffer]) -> None:
    """Write the parts back to back. Each MiB or so is submitted to the disk as soon as it is complete."""
    size = begun = 0
    for part in parts:
        size = write_parts(file, [part], size)
        if size - begun >= WRITE_OUT_BYTES:
            file.hint(Hint.WRITE_NOW, begun, size - begun)
            begun = size
