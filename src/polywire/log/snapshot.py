"""The blob of a snapshot: the log's state and the broker's (decision 0002).

Promises: a blob that does not verify is Corrupt, never half taken over; those of version 1 are read. Must not know: partitions as objects,
the broker's state.

```
 0 u32 magic "PWT1" (0x31545750)      40 u32 segments    44 u32 tokens
 4 u32 version, 2                      48 u64 bytes of packed partitions
 8 u64 log state after this sequence   56 u64 bytes of the broker's state
16 u64 broker's state after this one   64 packed partitions, u64 segment numbers, (16-byte token, i64 expiry,
24 u64 compacted partitions               u64 segment that holds a run of it), (u64 compacted partition, u64 offset
32 u64 zero                               up to which it is), broker's state, u64 XXH64 of everything before
```
Version 1 had 0 at 24.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from polywire.records.checksum import xxh64
from polywire.store.base import Store, blob_corrupt

_MAGIC: Final = 0x31545750
_VERSION: Final = 2
_HEADER: Final = Struct("<II4Q2I2Q")
_TOKEN: Final = Struct("<16sqQ")
_CLEAN: Final = Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a blob holds; ``partitions`` are packed one after the other; ``tokens`` are (token, expiry, segment that holds a run of it);
    ``clean`` tells how far some of the partitions were compacted when all of ``segments`` counted.
    """

    sequence: int
    broker_sequence: int
    partitions: bytes
    segments: Sequence[int]
    tokens: Sequence[tuple[bytes, int, int]]
    broker: bytes
    clean: Mapping[int, int]


def put_snapshot(store: Store, name: str, snapshot: Snapshot) -> None:
    """Write a snapshot; durable on return. Raises what the store raises."""
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
    store.put_new(name, (content, xxh64(content).to_bytes(8, "little")))


def get_snapshot(store: Store, name: str) -> Snapshot:
    """Read a snapshot. Raises Missing, Corrupt."""
    content = store.get(name)
    if len(content) < _HEADER.size + 8 or xxh64(content[:-8]) != int.from_bytes(content[-8:], "little"):
        raise blob_corrupt(name, "snapshot is damaged")
    fields = _HEADER.unpack_from(content)
    if fields[0] != _MAGIC or not 1 <= fields[1] <= _VERSION:
        raise blob_corrupt(name, f"not a snapshot of this version version={fields[1]}")
    clean_count, _, segment_count, token_count, partitions_bytes, broker_bytes = fields[4:]
    segments_at = _HEADER.size + partitions_bytes
    tokens_at = segments_at + 8 * segment_count
    clean_at = tokens_at + _TOKEN.size * token_count
    broker_at = clean_at + _CLEAN.size * clean_count
    if broker_at + broker_bytes + 8 != len(content):
        raise blob_corrupt(name, "snapshot has another size than it says")
    return Snapshot(
        sequence=fields[2],
        broker_sequence=fields[3],
        partitions=content[_HEADER.size : segments_at],
        segments=array("Q", content[segments_at:tokens_at]),
        tokens=list(_TOKEN.iter_unpack(content[tokens_at:clean_at])),
        broker=content[broker_at:-8],
        clean=dict(_CLEAN.iter_unpack(content[clean_at:broker_at])),
    )
