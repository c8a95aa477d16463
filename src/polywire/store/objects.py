"""The port for a bucket: named objects, of which a name can be claimed once and an object replaced by whoever knows it.

Promises: of those who create a name at the same time exactly one succeeds, and so of those who replace the same object; what was written is
what the next reader finds. ``cluster.probe`` tries whether a store keeps that. Must not know: what an object holds, who repeats a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from polywire.errors import ErrorCode, Invalid
from polywire.matching import WORD, consists_of
from polywire.store.base import BLOB_NAME_BYTES_MAX
from polywire.types import Buffer


class ObjectChanged(Exception):
    """``replace``: the object is not the one that was read, and was not touched."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as it was read. ``tag`` names this content of the name, for ``replace``."""

    content: bytes
    tag: str


class Objects(Protocol):
    """Objects below the root of one URL. A name is a path of ``a-z A-Z 0-9 _ . -`` and slashes.

    Nothing is repeated in here. Unavailable(STORAGE_FAILED) of a verb that writes says nothing of what became of it: it may have happened, or
    may happen later. BlobExists of ``create`` is not final either: a store says so while another request on the name is under way. Who wants
    to know reads.
    """

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        """Store the parts, in order, as one object, if there is none of this name. Raises BlobExists, Unavailable."""

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        """Replace the object that was read with this tag. Raises ObjectChanged, Unavailable."""

    def put(self, name: str, content: Buffer) -> None:
        """Store an object, whatever the name holds. Raises Unavailable."""

    def read(self, name: str) -> Stored:
        """An object and its tag. Raises BlobMissing, Unavailable."""

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object, cut at its end. Raises BlobMissing, Unavailable."""

    def size(self, name: str) -> int:
        """Bytes of an object. Raises BlobMissing, Unavailable."""

    def list(self, prefix: str) -> list[str]:
        """Sorted names that begin with ``prefix``, which ends with a slash. For litter and for people: nothing may rest on it."""

    def delete(self, name: str) -> None:
        """Remove an object; a name that does not exist is no error. Raises Unavailable."""


def check_object_name(name: str) -> None:
    """Refuse a name no bucket may hold. Raises Invalid(INVALID_NAME)."""
    parts = name.split("/")
    named = all(part.strip(".") and consists_of(part, WORD + "_.-") for part in parts)
    if len(name) > BLOB_NAME_BYTES_MAX or not named:
        raise Invalid(ErrorCode.INVALID_NAME, f"invalid object name name={name[:BLOB_NAME_BYTES_MAX]!r}")
