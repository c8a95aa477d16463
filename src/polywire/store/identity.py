"""What a bucket is: one small object that says that it holds a log, which one, and in what form.

Promises: it is made once, and never changes; of those who make it at the same time all get the same. A bucket of a form that is not known is
refused. Must not know: what else lies there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from polywire.errors import ErrorCode, Invalid
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.objects import Objects

NAME: Final = "cluster"
VERSION: Final = 1
ID_BYTES: Final = 16
_BYTES_MAX: Final = 4096


class Identity(msgspec.Struct, frozen=True):
    """``id`` tells this log from every other, wherever it is copied to; ``shards`` is how many journals it has."""

    id: str
    created_at_us: int
    shards: int = 1
    version: int = VERSION

    @property
    def mark(self) -> bytes:
        """The id as the bytes it was made of."""
        return bytes.fromhex(self.id)


def find_identity(objects: Objects) -> Identity | None:
    """What a bucket says it is; None for one that says nothing. Raises Invalid where this program does not know it, Unavailable."""
    try:
        content = objects.read(NAME).content
    except BlobMissing:
        return None
    try:
        found = msgspec.json.decode(content[:_BYTES_MAX], type=Identity)
        found.mark  # noqa: B018 — only an id of hexadecimal digits is one
    except (msgspec.DecodeError, ValueError) as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"this is no log of ours: {error} object={NAME!r}") from None
    if (found.version, found.shards) != (VERSION, 1):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the log in this bucket needs another Polywire version={found.version} shards={found.shards}",
        )
    return found


def make_identity(objects: Objects, token: Callable[[int], bytes], now_us: int) -> tuple[Identity, bool]:
    """What a bucket is from now on, and whether that was said here and now. Raises Invalid, Unavailable."""
    while (found := find_identity(objects)) is None:
        mine = Identity(token(ID_BYTES).hex(), now_us)
        try:
            objects.create(NAME, [msgspec.json.encode(mine)])
        except BlobExists:
            continue
        return mine, True
    return found, False
