"""Identity of a bucket: a small object with the log's id, its format version and its number of shards.

It is created once and its id never changes. Concurrent creators all get the same id. A bucket with an unknown version
is refused. A broker notes the id in its data directory, and uses no other log there: otherwise it would begin an empty
one if the bucket's directory is not mounted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from polywire.errors import ErrorCode, Invalid, Unavailable
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.files import NEW_MODE, exists, make_directories, read_file, replace_file
from polywire.store.objects import ObjectChanged, Objects
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import SHARDS_MAX

NAME: Final = "cluster"
NOTE: Final = "bucket-log"  # file in the data directory of a broker
KEY_NAME: Final = "key"  # exists only if there are several shards; anyone who can read it can read the log
VERSION: Final = 1
ID_BYTES: Final = 16
_BYTES_MAX: Final = 4096


class Identity(msgspec.Struct, frozen=True):
    """Identity of a log in a bucket.

    Attributes:
        id: distinguishes this log from every other, even after it is copied.
        shards: number of shards, each with its own journal.
        source: data directory that was imported into the bucket.
        importing: whether the import is unfinished.
    """

    id: str
    created_at_us: int
    shards: int = 1
    version: int = VERSION
    source: str = ""
    importing: bool = False

    @property
    def mark(self) -> bytes:
        """The log's id as bytes."""
        return bytes.fromhex(self.id)


def find_identity(objects: Objects) -> Identity | None:
    """Return a bucket's identity, or None if it has none.

    Raises:
        Invalid: this version of Polywire cannot read the identity.
        Unavailable: the store failed.
    """
    try:
        content = objects.read(NAME).content
    except BlobMissing:
        return None
    try:
        found = msgspec.json.decode(content[:_BYTES_MAX], type=Identity)
        found.mark  # noqa: B018 — raises ValueError for an id with other than hexadecimal digits
    except (msgspec.DecodeError, ValueError) as error:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"the bucket holds another program's object: {error} object={NAME!r}"
        ) from None
    if found.version != VERSION or not 1 <= found.shards <= SHARDS_MAX:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"this release of Polywire cannot read the log in the bucket version={found.version} shards={found.shards}",
        )
    return found


def make_identity(
    objects: Objects, token: Callable[[int], bytes], now_us: int, *, shards: int = 1
) -> tuple[Identity, bool]:
    """Return a bucket's identity, and whether this call created it.

    Args:
        token: returns random bytes.
        shards: number of shards if the identity is created.

    Raises:
        Invalid: this version cannot read the existing one.
        Unavailable: the store failed.
    """
    while (found := find_identity(objects)) is None:
        mine = Identity(token(ID_BYTES).hex(), now_us, shards)
        try:
            objects.create(NAME, [msgspec.json.encode(mine)])
        except BlobExists:
            continue
        return mine, True
    return found, False


def join_log(objects: Objects, directory: Path, make: Callable[[], Identity] | None = None) -> Identity | None:
    """Return the identity of the bucket, and note its id in the data directory of this broker.

    Args:
        objects: the bucket.
        directory: the data directory.
        make: creates an identity if there is none. It is called only if this broker has never used a log in a bucket.

    Raises:
        Unavailable: the bucket has lost the log that this broker has used, or has another one. Or the store failed.
        Invalid: this version cannot read the identity.
        OSError: the data directory cannot be read or written.
    """
    path = directory / NOTE
    known = read_file(SYSTEM_FILES, path).decode("ascii", "replace").strip() if exists(SYSTEM_FILES, path) else ""
    identity = find_identity(objects)
    if known and (identity is None or identity.id != known):
        raise Unavailable(
            ErrorCode.STORAGE_FAILED,
            "the bucket does not have the log that this broker has used (is it mounted? to use another log, set another"
            f" --data-dir) expected={known} found={'none' if identity is None else identity.id}",
        )
    if identity is None and make is not None:
        identity = make()
    if identity is not None and not known:
        make_directories(SYSTEM_FILES, directory)
        temporary = path.with_name(f".{NOTE}")
        replace_file(SYSTEM_FILES, path, [f"{identity.id}\n".encode()], temporary=temporary, mode=NEW_MODE)
    return identity


def make_key(objects: Objects, token: Callable[[int], bytes]) -> bytes:
    """Return the secret with which broker processes that share a bucket authenticate to each other.

    Create it if missing.

    Args:
        token: returns random bytes.

    Raises:
        Invalid: the stored key is malformed.
        Unavailable: the store failed.
    """
    while (found := _key_of(objects)) is None:
        with suppress(BlobExists):
            objects.create(KEY_NAME, [token(ID_BYTES)])
    if len(found) != ID_BYTES:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the key in the bucket is malformed (delete it while no broker runs) object={KEY_NAME!r} bytes={len(found)}",
        )
    return found


def _key_of(objects: Objects) -> bytes | None:
    try:
        return objects.read(KEY_NAME).content
    except BlobMissing:
        return None


def begin_import(objects: Objects, token: Callable[[int], bytes], now_us: int, source: str) -> tuple[Identity, bool]:
    """Mark a bucket as the target of an import, so that no broker leads it meanwhile.

    Returns the identity, and whether this import was begun earlier, or even finished.

    Args:
        objects: the bucket.
        token: returns random bytes.
        now_us: wall clock time.
        source: identifies the data directory.

    Raises:
        Invalid: another import was begun.
        Unavailable: the store failed.
    """
    while True:
        found, _ = make_identity(objects, token, now_us)
        if found.source == source:
            return found, True
        if found.importing:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "the bucket has an incomplete import of another directory, or this directory has changed since (complete that"
                " import, or delete its objects)"
                f" begun={found.source} now={source}",
            )
        mine = msgspec.structs.replace(found, source=source, importing=True)
        if _replaced(objects, found, mine):
            return mine, False


def end_import(objects: Objects, identity: Identity) -> Identity:
    """Mark the import as finished, so that brokers may lead the bucket. Raises Unavailable."""
    whole = msgspec.structs.replace(identity, importing=False)
    _replaced(objects, identity, whole)
    return whole


def forget_import(objects: Objects, identity: Identity) -> None:
    """Unmark a bucket as the target of an import, before anything was copied. Raises Unavailable."""
    _replaced(objects, identity, msgspec.structs.replace(identity, source="", importing=False))


def _replaced(objects: Objects, known: Identity, new: Identity) -> bool:
    """Replace the stored identity if it still is ``known``.

    Return False if another process has changed it meanwhile.
    """
    stored = objects.read(NAME)
    if msgspec.json.decode(stored.content, type=Identity) != known:
        return False
    try:
        objects.replace(NAME, msgspec.json.encode(new), stored.tag)
    except ObjectChanged:
        return False
    return True
