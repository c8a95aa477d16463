"""A bucket whose objects are files below one directory, for brokers on one machine and for tests.

An object is created with a hard link, which fails if the name exists. It is replaced while a lock file next to it is
locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from polywire.errors import ErrorCode, Unavailable
from polywire.records.checksum import xxh64
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.files import (
    NEW_MODE,
    Access,
    Files,
    fill,
    make_directories,
    read_file,
    remove,
    replace_file,
    write_parts,
)
from polywire.store.objects import ObjectChanged, Stored, check_object_name
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import Buffer

LOCK_SUFFIX: Final = ".lock"


class FileObjects:
    """Implements ``Objects`` with files, for ``file:///`` URLs. Names that begin with a dot are reserved."""

    __slots__ = ("_files", "_made", "_root")

    def __init__(self, root: Path, files: Files = SYSTEM_FILES) -> None:
        self._root = root
        self._files = files
        # directories whose names survive a power loss
        self._made: set[Path] = set()

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        files, path = self._files, self._path(name)
        temporary = self._temporary(path)
        with _errors("create", path, missing=_no_directory):
            self._make_directory(path.parent)
            try:
                file = files.open(temporary, Access.NEW)
                try:
                    write_parts(file, parts, 0)
                    file.sync()
                finally:
                    file.close()
                files.link(temporary, path)
            except FileExistsError:
                # The sync of an earlier request may have failed, and the caller relies on the object that it reads now.
                files.sync_directory(path.parent)
                raise BlobExists(name) from None
            finally:
                remove(files, temporary)
            files.sync_directory(path.parent)

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        path = self._path(name)
        with _errors("replace", path, missing=_no_directory):
            self._check(name, tag)
            lock = self._files.open(self._lock(path), Access.KEEP)
            try:
                lock.lock()
                self._check(name, tag)
                self._put(path, content)
            finally:
                lock.close()

    def put(self, name: str, content: Buffer) -> None:
        path = self._path(name)
        with _errors("put", path, missing=_no_directory):
            self._make_directory(path.parent)
            self._put(path, content)

    def read(self, name: str) -> Stored:
        path = self._path(name)
        with _errors("read", path):
            content = read_file(self._files, path)
        return Stored(content, _tag(content))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        path = self._path(name)
        with _errors("read", path):
            file = self._files.open(path, Access.READ)
            try:
                content = bytearray(max(min(stop, file.size) - start, 0))
                return bytes(content[: fill(file, memoryview(content), start, len(content))])
            finally:
                file.close()

    def size(self, name: str) -> int:
        path = self._path(name)
        with _errors("measure", path):
            return self._files.size(path)

    def list(self, prefix: str) -> list[str]:
        path = self._root / prefix
        with suppress(BlobMissing), _errors("list", path):
            return sorted(prefix + name for name in self._files.names(path) if not name.startswith("."))
        return []

    def delete(self, name: str) -> None:
        path = self._path(name)
        with _errors("delete", path):
            remove(self._files, path)
            remove(self._files, self._lock(path))

    def _check(self, name: str, tag: str) -> None:
        """Raise ObjectChanged unless the object has this tag."""
        path = self._path(name)
        with suppress(FileNotFoundError):
            if _tag(read_file(self._files, path)) == tag:
                return
            self._files.sync_directory(path.parent)  # as after a create
        raise ObjectChanged(name)

    def _make_directory(self, path: Path) -> None:
        if path not in self._made:  # an existing directory may come from a process whose sync failed
            make_directories(self._files, path)
            self._made.add(path)

    def _put(self, path: Path, content: Buffer) -> None:
        replace_file(self._files, path, [content], temporary=self._temporary(path), mode=NEW_MODE)

    def _lock(self, path: Path) -> Path:
        return path.with_name(f".{path.name}{LOCK_SUFFIX}")

    def _temporary(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{self._files.token(6).hex()}")

    def _path(self, name: str) -> Path:
        check_object_name(name)
        return self._root / name


def _tag(content: bytes) -> str:
    return f"{xxh64(content):016x}"


def _no_directory(path: Path) -> Unavailable:
    return Unavailable(ErrorCode.STORAGE_FAILED, f"directory of the bucket has disappeared path={str(path.parent)!r}")


@contextmanager
def _errors(
    what: str, path: Path, *, missing: Callable[[Path], Exception] = lambda path: BlobMissing(path.name)
) -> Iterator[None]:
    """Raise what ``missing`` returns if there is no such file, and Unavailable for other errors of the system."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise missing(path) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(ErrorCode.STORAGE_FAILED, f"cannot {what} object: {reason} path={str(path)!r}") from error
