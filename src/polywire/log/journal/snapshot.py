"""Encode and decode a snapshot: the state of the log and of the broker (decision 0102).

A snapshot contains everything twice. Reading it raises Corrupt if both copies have wrong checksums. Versions 1 and 2
can be read.

```
 0 u32 magic "PWT1" (0x31545750)      40 u32 segments    44 u32 tokens
 4 u32 version, 3                      48 u64 bytes of packed partitions
 8 u64 log state after this sequence   56 u64 bytes of the broker's state
16 u64 broker's state after this one   64 packed partitions, u64 segment numbers, (16-byte token, i64 expiry,
24 u64 compacted partitions               u64 segment that holds a run of it), (u64 compacted partition, u64 offset
32 u64 zero                               up to which it is), broker's state, u64 XXH64 of everything before
```
The file contains all this twice, so that damage at one position affects one copy only. Each copy is padded with zeros
to the same multiple of a page. Versions 1 and 2 contained it once, without padding; version 1 had 0 at 24.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from polywire.records.checksum import xxh64
from polywire.store.base import BLOCK_BYTES, Store, blob_corrupt, blob_newer

_MAGIC: Final = 0x31545750
_VERSION: Final = 3
_VERSION_OF_COPIES: Final = 3
_HEADER: Final = Struct("<II4Q2I2Q")
_TOKEN: Final = Struct("<16sqQ")
_CLEAN: Final = Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Content of a snapshot file.

    Attributes:
        sequence: last journal write whose effect on the log is included.
        broker_sequence: last journal write whose effect on the broker's state is included.
        partitions: packed partitions, back to back.
        segments: numbers of the log's segments.
        tokens: (token, expiry, segment with batches of the token).
        broker: encoded state of the broker.
        clean: offset up to which each partition is compacted, valid if all of ``segments`` are present.
    """

    sequence: int
    broker_sequence: int
    partitions: bytes
    segments: Sequence[int]
    tokens: Sequence[tuple[bytes, int, int]]
    broker: bytes
    clean: Mapping[int, int]


def put_snapshot(store: Store, name: str, snapshot: Snapshot) -> None:
    """Write a snapshot, which is durable on return. Raises errors of the store."""
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        snapshot.sequence,
        snapshot.broker_sequence,
        len(snapshot.clean),
        0,
        len(snapshot.segments),
        len(snapshot.tokens),
        len(snapshot.partitions),
        len(snapshot.broker),
    )
    tokens = b"".join(_TOKEN.pack(*token) for token in snapshot.tokens)
    clean = b"".join(_CLEAN.pack(*item) for item in snapshot.clean.items())
    segments = array("Q", snapshot.segments).tobytes()
    content = b"".join((header, snapshot.partitions, segments, tokens, clean, snapshot.broker))
    content += xxh64(content).to_bytes(8, "little")
    content += bytes(-len(content) % BLOCK_BYTES)
    store.put_new(name, (content, content))


def get_snapshot(store: Store, name: str) -> Snapshot:
    """Read a snapshot. Raises BlobMissing or Corrupt."""
    content = store.get(name)
    for copy in (content, content[: len(content) // 2], content[len(content) // 2 :]):
        fields = _fields_of(copy)
        if fields is not None:
            return _unpacked(copy, fields)
    version = newer_version(content)
    if version:
        raise blob_newer(name, version)
    raise blob_corrupt(name, "snapshot is damaged")


def copies_sound(store: Store, name: str) -> tuple[int, int]:
    """Return (number of valid copies, number of all copies) of a snapshot. Raises BlobMissing."""
    content = store.get(name)
    if _fields_of(content) is not None:
        return 1, 1
    half = len(content) // 2
    return sum(_fields_of(copy) is not None for copy in (content[:half], content[half:])), 2


def is_copy(content: bytes) -> bool:
    """Return whether this is one valid copy of a snapshot."""
    return _fields_of(content) is not None


def newer_version(content: bytes) -> int:
    """Return the unknown version that both copies have, or 0."""
    versions = set()
    for copy in (content[: len(content) // 2], content[len(content) // 2 :]):
        magic, version = _HEADER.unpack_from(copy)[:2] if len(copy) >= _HEADER.size else (0, 0)
        versions.add(version if magic == _MAGIC and version > _VERSION else 0)
    return versions.pop() if len(versions) == 1 else 0


def _fields_of(copy: bytes) -> tuple[int, ...] | None:
    """Return the header of one copy of a snapshot, or None if the copy is damaged."""
    if len(copy) < _HEADER.size + 8:
        return None
    fields = _HEADER.unpack_from(copy)
    clean_count, _, segment_count, token_count, partitions_bytes, broker_bytes = fields[4:]
    size = _HEADER.size + partitions_bytes + 8 * segment_count + _TOKEN.size * token_count
    size += _CLEAN.size * clean_count + broker_bytes
    padding = len(copy) - size - 8
    if fields[0] != _MAGIC or not 1 <= fields[1] <= _VERSION or padding < 0:
        return None
    if padding >= BLOCK_BYTES or (padding > 0 and fields[1] < _VERSION_OF_COPIES):
        return None
    return fields if xxh64(copy[:size]) == int.from_bytes(copy[size : size + 8], "little") else None


def _unpacked(content: bytes, fields: tuple[int, ...]) -> Snapshot:
    clean_count, _, segment_count, token_count, partitions_bytes, broker_bytes = fields[4:]
    segments_at = _HEADER.size + partitions_bytes
    tokens_at = segments_at + 8 * segment_count
    clean_at = tokens_at + _TOKEN.size * token_count
    broker_at = clean_at + _CLEAN.size * clean_count
    return Snapshot(
        sequence=fields[2],
        broker_sequence=fields[3],
        partitions=content[_HEADER.size : segments_at],
        segments=array("Q", content[segments_at:tokens_at]),
        tokens=list(_TOKEN.iter_unpack(content[tokens_at:clean_at])),
        broker=content[broker_at : broker_at + broker_bytes],
        clean=dict(_CLEAN.iter_unpack(content[clean_at:broker_at])),
    )
