"""The Store port: immutable named blobs, and the only consistency primitive there is, *write this name only if it does not exist*.

Promises: a blob that can be seen is whole, and never changes; putting a name that exists as new is refused and changes nothing. A name can
be given to another blob, which no promise rests on. Must not know: what a blob holds.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from polywire.errors import Busy, Corrupt, ErrorCode, Invalid
from polywire.matching import WORD, consists_of
from polywire.records.allocation import allocate_lasting
from polywire.types import Buffer

BLOB_NAME_BYTES_MAX: Final = 200  # leaves space for the temporary suffix within the 255 bytes file systems allow
CHUNK_BYTES: Final = 4 * 1024 * 1024  # one direct read: 0.10 CPU seconds per GB (concepts: storage#what-it-costs)
OPEN_BLOBS_MAX: Final = 64  # kept open, with up to two descriptors each: well below the usual limit of 1,024
BLOCK_BYTES: Final = 4096  # direct reads begin and end at multiples of this, in memory and in the file

DESCRIPTORS_RETRY_MS: Final = 1000

_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
_FIRST: Final = WORD + "_"
_NAME: Final = _FIRST + ".-"


class BlobExists(Exception):
    """``put_new``: the name is taken, and what it names was not touched. Whoever chose the name decides what that means."""


class BlobMissing(Exception):
    """There is no blob of this name. Whoever asked for the name decides what that means."""


def no_descriptor(error: OSError) -> Busy | None:
    """The error of a file that could not be opened because too many are, which passes: nothing is wrong with the storage. None for any
    other."""
    if error.errno not in _NO_DESCRIPTOR:
        return None
    return Busy(ErrorCode.BUSY, f"too many files are open: {error.strerror}", retry_after_ms=DESCRIPTORS_RETRY_MS)


class Blob(Protocol):
    """One open blob, shared by all who opened it; it can be read after it was deleted. It is read, never mapped: touching a mapped page that
    lies on a bad sector, or behind the end of a file that was cut short, ends the process instead of the read."""

    @property
    def size(self) -> int:
        """Bytes of the blob."""

    @property
    def is_kept(self) -> bool:
        """Whether it was kept in memory when it was written: then ``read_now`` is worth a try before anybody has read it."""

    def pread_into(self, out: Buffer, position: int) -> int:
        """Fill the writable ``out`` from ``position``; returns the bytes read, fewer only at the blob's end. Raises Unavailable."""

    def read_now(self, out: Buffer, position: int) -> bool:
        """Fill the writable ``out`` from ``position`` if that waits for no disk; False when it would, or the blob ends before, or the store
        does not know: then ``out`` holds anything."""

    def read_direct(self, block: memoryview, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), cut at the blob's end, read past the page cache where the store can, into ``block``: writable memory that
        begins on a page and has space for two ``BLOCK_BYTES`` more. May wait for a disk, so never on the loop. Raises Unavailable."""


class Store(Protocol):
    """Named immutable blobs. A name is one file name, or a directory, a slash and a file name (``segments/0001.pws``).

    Every verb but ``put_new`` may be repeated without harm. Failures of what lies below raise Unavailable(STORAGE_FAILED).
    BlobExists and BlobMissing are no kinds of BrokerError, because they never leave the floors that name blobs: the log settles a
    collision by reading, and a blob that is named but missing is Corrupt to it.
    """

    def put_new(self, name: str, parts: Iterable[Buffer]) -> None:
        """Store the parts, in order, as one blob; durable on return. A part is consumed before the next one is asked for, so all may
        lie in the same memory.

        Raises BlobExists, Busy(DISK_FULL) without space, Unavailable otherwise; then nothing is visible.
        """

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        """Store the parts, in order, as the blob of this name, replacing the one it named: who opens the name gets one or the other, whole.

        Nothing is synced, so this is for what is made anew after a crash. Raises Busy(DISK_FULL), Unavailable; then nothing has changed.
        """

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a blob, cut at its end. Raises BlobMissing."""

    def open(self, name: str) -> Blob:
        """The blob, shared with others who opened it; a bounded number stays open. Raises BlobMissing."""

    def list(self, prefix: str) -> list[str]:
        """Sorted names that begin with ``prefix`` and have no slash after it."""

    def delete(self, name: str) -> None:
        """Remove a blob; a name that does not exist is no error."""

    def delete_in_steps(self, name: str) -> Iterator[int]:
        """Remove a blob like ``delete``, its space a piece at a time: the name is gone with the first step, each returns how many bytes it
        freed, 0 while others still read the blob. Who stops half-way, or deletes a blob for ever read, leaves the rest to the system."""

    def size(self, name: str) -> int:
        """Bytes of a blob. Raises BlobMissing."""

    def drop_copy(self, name: str) -> bool:
        """What was read of a blob does not verify: throw away what is only a copy of it. Whether who opens it now may read other bytes."""


def aligned_buffer(size: int) -> memoryview:
    """Writable memory that begins on a page, as direct reads need it; make it once and use it again."""
    return memoryview(allocate_lasting(size))[:size]


def check_blob_name(name: str) -> None:
    """Refuse a name no store may hold. Raises Invalid(INVALID_NAME)."""
    parts = name.split("/", 1)
    named = all(part and part[0] in _FIRST and consists_of(part, _NAME) for part in parts)
    if len(name) > BLOB_NAME_BYTES_MAX or not named:
        raise Invalid(ErrorCode.INVALID_NAME, f"invalid blob name name={name[:BLOB_NAME_BYTES_MAX]!r}")


def blob_newer(name: str, version: int) -> Corrupt:
    """The error of a blob that verifies, of a version that is not known."""
    return Corrupt(ErrorCode.NEWER_FORMAT, f"a newer Polywire wrote this, and reads it version={version} name={name!r}")


def blob_corrupt(name: str, reason: str) -> Corrupt:
    """The error of a blob whose bytes do not verify."""
    return Corrupt(ErrorCode.CORRUPT, f"blob does not verify: {reason} name={name!r}")
