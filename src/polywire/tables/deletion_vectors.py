"""Deletion vectors: which rows of a data file a table does not have any more, because newer ones replaced them.

A vector is part of an object with all vectors of one commit, in the format of the Delta protocol (Deletion Vector
Format, storage type "u").
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from secrets import token_bytes
from struct import Struct
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import pyarrow as pa

from polywire.errors import Corrupt, ErrorCode
from polywire.extras import required
from polywire.store.objects import Objects

if TYPE_CHECKING:
    from pyroaring import BitMap

_NAME: Final = "deletion_vector_"
_ENDING: Final = ".bin"
_RELATIVE: Final = "u"
_FILE_VERSION: Final = b"\x01"
_SIZE: Final = Struct(">I")  # before the vector: its size; after it: its CRC-32
_HEAD: Final = Struct("<IQI")  # magic number, number of bitmaps, and the key of the first
_MAGIC: Final = 1681511377
_UUID_CHARACTERS: Final = 20
_BASE85: Final = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85: Final = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85: Final = bytes.maketrans(_BASE85, _Z85)
_FROM_Z85: Final = bytes.maketrans(_Z85, _BASE85)


@dataclass(frozen=True, slots=True)
class DeletionVector:
    """Where the deleted rows of one data file are stored.

    Attributes:
        path: path of the object, relative to the table.
        offset: position of the vector's size in the object.
        size: size of the vector in bytes.
        count: number of deleted rows.
    """

    path: str
    offset: int
    size: int
    count: int

    def descriptor(self) -> dict[str, Any]:
        """Return the vector in the form that actions of the Delta log have."""
        folder, name = self.path.rsplit("/", 1)
        unique = UUID(name.removeprefix(_NAME).removesuffix(_ENDING)).bytes
        return {
            "storageType": _RELATIVE,
            "pathOrInlineDv": folder + base64.b85encode(unique).translate(_TO_Z85).decode(),
            "offset": self.offset,
            "sizeInBytes": self.size,
            "cardinality": self.count,
        }

    @classmethod
    def of(cls, descriptor: Mapping[str, Any]) -> DeletionVector:
        """Decode the form in actions of the Delta log. Raises Corrupt if another program wrote it."""
        place = descriptor["pathOrInlineDv"]
        if descriptor["storageType"] != _RELATIVE or len(place) <= _UUID_CHARACTERS:
            raise Corrupt(ErrorCode.CORRUPT, "table is damaged: another program deleted rows of it")
        folder, unique = place[:-_UUID_CHARACTERS], place[-_UUID_CHARACTERS:]
        name = UUID(bytes=base64.b85decode(unique.encode().translate(_FROM_Z85)))
        path = f"{folder}/{_NAME}{name}{_ENDING}"
        return cls(path, descriptor["offset"], descriptor["sizeInBytes"], descriptor["cardinality"])


def encode(folder: str, version: int, deleted: Mapping[str, BitMap]) -> tuple[bytes, dict[str, DeletionVector]]:
    """Return an object with one vector for each data file, and where each vector is.

    Delta prescribes a UUID as the name of the object. Its first half is the version of the table that adds it.
    """
    path = f"{folder}/{_NAME}{UUID(bytes=version.to_bytes(8) + token_bytes(8))}{_ENDING}"
    parts, offset, vectors = [_FILE_VERSION], len(_FILE_VERSION), {}
    for name, rows in deleted.items():
        content = _HEAD.pack(_MAGIC, 1, 0) + rows.serialize()
        vectors[name] = DeletionVector(path, offset, len(content), len(rows))
        parts += _SIZE.pack(len(content)), content, _SIZE.pack(zlib.crc32(content))
        offset += len(content) + 2 * _SIZE.size
    return b"".join(parts), vectors


def version_of(path: str) -> int | None:
    """Return the version of the table that adds an object with vectors; None for other objects."""
    name = path.rsplit("/", 1)[-1]
    if not (name.startswith(_NAME) and name.endswith(_ENDING)):
        return None
    try:
        unique = UUID(name.removeprefix(_NAME).removesuffix(_ENDING))
    except ValueError:
        return None
    return int.from_bytes(unique.bytes[:8])


def read(objects: Objects, vector: DeletionVector | None) -> BitMap:
    """Return the deleted rows of a data file, counted from 0. Raises BlobMissing, Unavailable, Corrupt."""
    if vector is None:
        return bitmap()
    found = objects.read_range(vector.path, vector.offset, vector.offset + vector.size + 2 * _SIZE.size)
    content = found[_SIZE.size : -_SIZE.size]
    whole = _SIZE.pack(vector.size) + content + _SIZE.pack(zlib.crc32(content))
    if found != whole or content[: _HEAD.size] != _HEAD.pack(_MAGIC, 1, 0):
        raise Corrupt(
            ErrorCode.CORRUPT, f"table is damaged: deletion vector cannot be read path={vector.path} at={vector.offset}"
        )
    rows: BitMap = _library().BitMap.deserialize(content[_HEAD.size :])
    return rows


def bitmap(rows: Any = ()) -> BitMap:
    """Return a set of rows, from numbers or a buffer of unsigned 32-bit numbers."""
    found: BitMap = _library().BitMap(rows)
    return found


def remaining(batch: pa.RecordBatch, first: int, deleted: BitMap | None) -> pa.RecordBatch:
    """Return a batch without its deleted rows. ``first`` is the number of its first row in the file."""
    stop = first + batch.num_rows
    if deleted is None or not deleted.range_cardinality(first, stop):
        return batch
    wanted = (bitmap(range(first, stop)) - deleted).shift(-first).to_array()
    return batch.take(pa.Array.from_buffers(pa.uint32(), len(wanted), [None, pa.py_buffer(wanted)]))


def _library() -> Any:
    return required("pyroaring", "tables of compacted topics need pyroaring", "tables")
