"""The Store port: immutable named blobs, and the only consistency primitive there is, *write this name only if it does not exist*.

Promises: a blob that can be seen is whole, and never changes; who puts a name that exists is told so and changes nothing. Must not know:
what a blob holds.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from typing import Final, Protocol

from polywire.errors import Corrupt, ErrorCode, Invalid
from polywire.types import Buffer

BLOB_NAME_BYTES_MAX: Final = 200  # leaves room for the temporary suffix within the 255 bytes file systems allow
CHUNK_BYTES: Final = 4 * 1024 * 1024  # one direct read: 0.10 CPU seconds per GB (design §4)
BLOCK_BYTES: Final = 4096  # direct reads begin and end at multiples of this, in memory and in the file

_NAME: Final = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._-]*")


class BlobExists(Exception):
    """``put_new``: the name is taken, and what it names was not touched. Whoever chose the name decides what that means."""


class BlobMissing(Exception):
    """There is no blob of this name. Whoever was told of the name decides what that means."""


class Blob(Protocol):
    """One open blob, shared by all who opened it. Views stay valid after it was deleted, until the last of them is gone."""

    @property
    def size(self) -> int:
        """Bytes of the blob."""

    def map(self) -> memoryview:
        """The whole blob as a read-only view; mapped, not read, where the store can."""

    def pread_into(self, out: Buffer, position: int) -> int:
        """Fill the writable ``out`` from ``position``; returns the bytes read, fewer only at the blob's end. Raises Unavailable."""

    def is_warm(self, start: int, stop: int) -> bool:
        """Whether touching these bytes of ``map()`` waits for no disk."""

    def read_direct(self, block: memoryview, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), cut at the blob's end, read past the page cache where the store can, into ``block``: writable memory that
        begins on a page and has room for two ``BLOCK_BYTES`` more. May wait for a disk, so never on the loop. Raises Unavailable."""


class Store(Protocol):
    """Named immutable blobs. A name is one file name, or a directory, a slash and a file name (``segments/0001.pws``).

    Every verb but ``put_new`` of a new name may be repeated without harm. Failures of what lies below raise Unavailable(STORAGE_FAILED).
    BlobExists and BlobMissing are no kinds of BrokerError, because they never leave the floors that name blobs: the log settles a
    collision by reading, and a blob that is named but missing is Corrupt to it.
    """

    def put_new(self, name: str, parts: Iterable[Buffer]) -> None:
        """Store the parts, in order, as one blob; durable on return. A part is consumed before the next one is asked for, so all may
        lie in the same memory.

        Raises BlobExists, Busy(DISK_FULL) without space, Unavailable otherwise; then nothing is visible.
        """

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a blob, cut at its end. Raises BlobMissing."""

    def open(self, name: str) -> Blob:
        """The blob, shared with others who opened it; a bounded number stays open. Raises BlobMissing."""

    def list(self, prefix: str) -> list[str]:
        """Sorted names that begin with ``prefix`` and have no slash after it."""

    def delete(self, name: str) -> None:
        """Remove a blob; a name that does not exist is no error."""

    def size(self, name: str) -> int:
        """Bytes of a blob. Raises BlobMissing."""


def aligned_buffer(size: int) -> memoryview:
    """Writable memory that begins on a page, as direct reads need it; make it once and use it again."""
    return memoryview(mmap.mmap(-1, size))


def check_blob_name(name: str) -> None:
    """Refuse a name no store may hold. Raises Invalid(INVALID_NAME)."""
    if len(name) > BLOB_NAME_BYTES_MAX or _NAME.fullmatch(name) is None:
        raise Invalid(ErrorCode.INVALID_NAME, f"invalid blob name name={name!r}")


def blob_corrupt(name: str, reason: str) -> Corrupt:
    """The error of a blob whose bytes do not verify."""
    return Corrupt(ErrorCode.CORRUPT, f"blob does not verify: {reason} name={name!r}")
