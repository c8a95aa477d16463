"""The ``Store`` interface: named, immutable files or objects (blobs).

A blob is a segment or a snapshot. Stores need only one atomic operation: write a name only if it does not exist.

* A visible blob is complete and never changes.
* Creating a name that exists fails and changes nothing.

``put`` replaces a blob. It is not used for data that must survive a crash.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from polywire.errors import Busy, Corrupt, ErrorCode, Invalid
from polywire.matching import WORD, consists_of
from polywire.records.allocation import allocate_lasting
from polywire.types import Buffer

BLOB_NAME_BYTES_MAX: Final = 200  # leaves space for a temporary suffix within the 255 bytes that file systems allow
# size of one direct read: 0.10 CPU seconds per GB (decision 0104)
CHUNK_BYTES: Final = 4 * 1024 * 1024
OPEN_BLOBS_MAX: Final = 64  # each with up to two descriptors: far below the usual limit of 1,024
BLOCK_BYTES: Final = 4096  # direct reads start and end at multiples of this, in memory and in the file

DESCRIPTORS_RETRY_MS: Final = 1000

_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
_FIRST: Final = WORD + "_"
_NAME: Final = _FIRST + ".-"


class BlobExists(Exception):
    """The name passed to ``put_new`` is taken. Its blob is unchanged. The caller decides whether this is an error."""


class BlobMissing(Exception):
    """No blob has this name. The caller decides whether this is an error."""


def no_descriptor(error: OSError) -> Busy | None:
    """Return Busy if the error was caused by too many open files, which is temporary, otherwise None."""
    if error.errno not in _NO_DESCRIPTOR:
        return None
    return Busy(ErrorCode.BUSY, f"too many files are open: {error.strerror}", retry_after_ms=DESCRIPTORS_RETRY_MS)


class Blob(Protocol):
    """An open file or object, shared by all callers that opened it. It stays readable after it is deleted.

    Its bytes are read, never mapped. Accessing a mapped page on a bad sector, or beyond the end of a truncated file,
    would kill the process. A read only fails.
    """

    @property
    def size(self) -> int: ...

    @property
    def is_cached(self) -> bool:
        """Whether the content was cached in memory when it was written, so that ``read_now`` can succeed."""

    def pread_into(self, out: Buffer, position: int) -> int:
        """Fill ``out`` with bytes from ``position``.

        Return their number, which is smaller only at the end of the content. Raises Unavailable.
        """

    def read_now(self, out: Buffer, position: int) -> bool:
        """Fill ``out`` with bytes from ``position`` if that does not wait for a disk.

        Returns False, with ``out`` undefined, if the read would wait, the content is too short, or the store cannot
        determine this.
        """

    def read_direct(self, block: memoryview, start: int, stop: int) -> memoryview:
        """Read bytes [start, stop), up to the blob's end, bypassing the page cache where the store can.

        May wait for a disk, so never call it on the event loop.

        Args:
            block: page-aligned writable memory, at least two ``BLOCK_BYTES`` larger than the range.
            start: first byte.
            stop: end of the range.

        Raises:
            Unavailable: the read failed.
        """


class CopiedParts(ABC, Iterable[Buffer]):
    """The content of a blob, which a store copies straight into its own memory, if it has some.

    A store that has none iterates over the content like over any other parts. Either way it is read once.

    Args:
        part_bytes: size of the parts in an iteration.
    """

    def __init__(self, part_bytes: int) -> None:
        self.part_bytes: Final = part_bytes

    @abstractmethod
    def fill(self, out: memoryview) -> int:
        """Copy the next bytes into ``out``. Return their number, which is smaller than ``out`` only at the end."""

    def __iter__(self) -> Iterator[Buffer]:
        part = memoryview(bytearray(self.part_bytes))
        while count := self.fill(part):
            yield part[:count]


class Store(Protocol):
    """Named immutable blobs (files or objects). A name is a file name, or a directory, a slash and a file name.

    All methods except ``put_new`` are idempotent. Failures of the underlying storage raise Unavailable(STORAGE_FAILED).
    BlobExists and BlobMissing are not BrokerErrors, because the callers handle them: the log resolves a name collision
    by reading the blob, and reports a missing blob that it expects as Corrupt.
    """

    def put_new(self, name: str, parts: Iterable[Buffer]) -> None:
        """Store the parts, in order, as a new blob, which is durable on return.

        Each part is consumed before the next one is requested, so all parts may use the same memory. ``CopiedParts``
        need no memory of their own.

        Raises:
            BlobExists: the name is taken.
            Busy: DISK_FULL: no space. No blob is visible then.
            Unavailable: any other failure. No blob is visible then.
        """

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        """Store the parts, in order, as the blob of this name, atomically replacing the previous one.

        Nothing is synced, so use it only for data that can be re-created after a crash.

        Raises:
            Busy: DISK_FULL: nothing has changed.
            Unavailable: nothing has changed.
        """

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of a blob, up to its end. Raises BlobMissing."""

    def open(self, name: str) -> Blob:
        """Open a blob, shared with other callers. The store limits the number of open blobs. Raises BlobMissing."""

    def list(self, prefix: str) -> list[str]:
        """Return, sorted, the names that begin with ``prefix`` and have no slash after it."""

    def delete(self, name: str) -> None:
        """Delete a blob. A missing name is not an error."""

    def delete_in_steps(self, name: str) -> Iterator[int]:
        """Delete a blob like ``delete``, but free its space piece by piece.

        The name is removed in the first step. Each step yields the number of bytes it freed, 0 while readers still have
        the blob open. If the caller stops early, the system frees the remaining space.
        """

    def size(self, name: str) -> int:
        """Return the size of a blob in bytes. Raises BlobMissing."""

    def drop_copy(self, name: str) -> bool:
        """Discard the cached local copy of a blob whose checksum does not match.

        Return True if reading again may succeed.
        """


def aligned_buffer(size: int) -> memoryview:
    """Allocate page-aligned writable memory for direct reads. Allocation is slow, so reuse it."""
    return memoryview(allocate_lasting(size))[:size]


def check_blob_name(name: str) -> None:
    """Raise Invalid(INVALID_NAME) for a name that stores do not accept."""
    parts = name.split("/", 1)
    named = all(part and part[0] in _FIRST and consists_of(part, _NAME) for part in parts)
    if len(name) > BLOB_NAME_BYTES_MAX or not named:
        raise Invalid(ErrorCode.INVALID_NAME, f"blob name is not allowed name={name[:BLOB_NAME_BYTES_MAX]!r}")


def blob_newer(name: str, version: int) -> Corrupt:
    """Return the error for a blob whose checksum is valid but whose version is unknown."""
    return Corrupt(
        ErrorCode.NEWER_FORMAT,
        f"a newer version of Polywire wrote this blob (start that version) version={version} name={name!r}",
    )


def blob_corrupt(name: str, reason: str) -> Corrupt:
    """Return the error for a damaged blob."""
    return Corrupt(ErrorCode.CORRUPT, f"blob is damaged: {reason} name={name!r}")
