"""The interface for a bucket: named objects with conditional create and conditional replace.

* Of concurrent creates of a name exactly one succeeds. The same holds for concurrent replaces of an object.
* A read returns the last completed write.

``cluster.bucket_probe`` tests whether a store satisfies these conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from polywire.errors import ErrorCode, Invalid
from polywire.matching import WORD, consists_of
from polywire.store.base import BLOB_NAME_BYTES_MAX
from polywire.types import Buffer, shard_name

FIRST: Final = 0  # most buckets have no other shard


class ObjectChanged(Exception):
    """Raised by ``replace`` if the object was changed since it was read. The object is left unchanged."""


class Stored(msgspec.Struct, frozen=True):
    """Content of an object.

    Attributes:
        tag: identifies this version of the content, for ``replace``.
    """

    content: bytes
    tag: str


class Objects(Protocol):
    """Objects of a bucket below one URL. A name is a path of ``a-z A-Z 0-9 _ . -`` and slashes.

    Requests are not retried. If a write raises Unavailable(STORAGE_FAILED), its outcome is unknown: it may have taken
    effect, or may do so later. BlobExists from ``create`` is not final either, because stores report it while another
    request for the name is pending. To learn the outcome, read the object.
    """

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        """Store the parts, in order, as one object if the name is free. Raises BlobExists or Unavailable."""

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        """Replace an object if it still has this tag. Raises ObjectChanged or Unavailable."""

    def put(self, name: str, content: Buffer) -> None:
        """Store an object unconditionally. Raises Unavailable."""

    def read(self, name: str) -> Stored:
        """Return an object and its tag. Raises BlobMissing or Unavailable."""

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of an object, up to its end. Raises BlobMissing or Unavailable."""

    def size(self, name: str) -> int:
        """Return the size of an object in bytes. Raises BlobMissing or Unavailable."""

    def list(self, prefix: str) -> list[str]:
        """Return, sorted, the names that begin with ``prefix``, which ends with a slash.

        Lists may be outdated, so use them only for garbage collection and for display. Raises Unavailable.
        """

    def delete(self, name: str) -> None:
        """Delete an object. A missing name is not an error. Raises Unavailable."""


def check_object_name(name: str) -> None:
    """Raise Invalid(INVALID_NAME) for a name that buckets do not accept."""
    parts = name.split("/")
    named = all(part.strip(".") and consists_of(part, WORD + "_.-") for part in parts)
    if len(name) > BLOB_NAME_BYTES_MAX or not named:
        raise Invalid(ErrorCode.INVALID_NAME, f"object name is not allowed name={name[:BLOB_NAME_BYTES_MAX]!r}")


class Rooted:
    """The objects of another bucket whose names begin with ``root``. Implements ``Objects``.

    Args:
        root: prefix of every name, with a trailing slash.
    """

    def __init__(self, objects: Objects, root: str) -> None:
        self._objects: Final = objects
        self._root: Final = root

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        self._objects.create(self._root + name, parts)

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        self._objects.replace(self._root + name, content, tag)

    def put(self, name: str, content: Buffer) -> None:
        self._objects.put(self._root + name, content)

    def read(self, name: str) -> Stored:
        return self._objects.read(self._root + name)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        return self._objects.read_range(self._root + name, start, stop)

    def size(self, name: str) -> int:
        return self._objects.size(self._root + name)

    def list(self, prefix: str) -> list[str]:
        return [name.removeprefix(self._root) for name in self._objects.list(self._root + prefix)]

    def delete(self, name: str) -> None:
        self._objects.delete(self._root + name)


def shard_root(shard: int) -> str:
    """Return the prefix of a shard's object names."""
    return f"shards/{shard_name(shard)}/"


def of_shard(objects: Objects, shard: int) -> Rooted:
    """Return the objects of one shard."""
    return Rooted(objects, shard_root(shard))
