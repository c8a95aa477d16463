"""What a bucket is: one small object that says that it holds a log, which one, and in what form.

Promises: it is made once, and its id never changes; of those who make it at the same time all get the same. A bucket of a form that is not
known is refused. Must not know: what else lies there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from polywire.errors import ErrorCode, Invalid
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.objects import ObjectChanged, Objects
from polywire.types import SHARDS_MAX

NAME: Final = "cluster"
KEY_NAME: Final = "key"  # where there are several shards: who reads it can read the log
VERSION: Final = 1
ID_BYTES: Final = 16
_BYTES_MAX: Final = 4096


class Identity(msgspec.Struct, frozen=True):
    """``id`` tells this log from every other, wherever it is copied to; ``shards`` is how many journals it has; ``source`` says what was
    brought into it, ``importing`` that not all of that is there."""

    id: str
    created_at_us: int
    shards: int = 1
    version: int = VERSION
    source: str = ""
    importing: bool = False

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
    if found.version != VERSION or not 1 <= found.shards <= SHARDS_MAX:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the log in this bucket needs another Polywire version={found.version} shards={found.shards}",
        )
    return found


def make_identity(
    objects: Objects, token: Callable[[int], bytes], now_us: int, *, shards: int = 1
) -> tuple[Identity, bool]:
    """What a bucket is from now on, and whether that was said here and now; ``shards`` is for one that says nothing yet. Raises Invalid,
    Unavailable."""
    while (found := find_identity(objects)) is None:
        mine = Identity(token(ID_BYTES).hex(), now_us, shards)
        try:
            objects.create(NAME, [msgspec.json.encode(mine)])
        except BlobExists:
            continue
        return mine, True
    return found, False


def make_key(objects: Objects, token: Callable[[int], bytes]) -> bytes:
    """What the processes of a bucket know each other by, wherever they run; made by whoever comes first. Raises Invalid, Unavailable."""
    while (found := _key_of(objects)) is None:
        with suppress(BlobExists):
            objects.create(KEY_NAME, [token(ID_BYTES)])
    if len(found) != ID_BYTES:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"this is no key of ours: delete it while no broker runs object={KEY_NAME!r} bytes={len(found)}",
        )
    return found


def _key_of(objects: Objects) -> bytes | None:
    try:
        return objects.read(KEY_NAME).content
    except BlobMissing:
        return None


def begin_import(objects: Objects, token: Callable[[int], bytes], now_us: int, source: str) -> tuple[Identity, bool]:
    """Say that something is being brought into a bucket, which nobody may lead until then; whether that was said, or done, before.

    source: what tells it from everything else. Raises Invalid where something else is being brought in, Unavailable.
    """
    while True:
        found, _ = make_identity(objects, token, now_us)
        if found.source == source:
            return found, True
        if found.importing:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "an import of something else was begun in this bucket, or this directory has been written to since: that one must be"
                " brought to its end, or its objects removed"
                f" begun={found.source} now={source}",
            )
        mine = msgspec.structs.replace(found, source=source, importing=True)
        if _replaced(objects, found, mine):
            return mine, False


def end_import(objects: Objects, identity: Identity) -> Identity:
    """Say that all of it is there: brokers may lead. Raises Unavailable."""
    whole = msgspec.structs.replace(identity, importing=False)
    _replaced(objects, identity, whole)
    return whole


def forget_import(objects: Objects, identity: Identity) -> None:
    """Say that nothing was brought in after all. Raises Unavailable."""
    _replaced(objects, identity, msgspec.structs.replace(identity, source="", importing=False))


def _replaced(objects: Objects, known: Identity, wanted: Identity) -> bool:
    """Put one in the other's place, unless another has done so."""
    stored = objects.read(NAME)
    if msgspec.json.decode(stored.content, type=Identity) != known:
        return False
    try:
        objects.replace(NAME, msgspec.json.encode(wanted), stored.tag)
    except ObjectChanged:
        return False
    return True
