"""Records that together use every column, and damage to batches on purpose."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from struct import pack_into, unpack_from

from xxhash import xxh64_intdigest

from polywire.records.columns import Event, Header, HeaderKind, Record, RecordFlags

PRODUCER = b"writer-1"

RICH = (
    Record(value=b"first", key=b"a", origin_time_us=1_700_000_000_000_000, id=bytes(range(16))),
    Record(value=None, headers=(Header(b"k", None), Header(b"n", b"\x01\0\0\0", HeaderKind.STRING, HeaderKind.INT32))),
    Record(value=b"", key=b"", flags=RecordFlags.KAFKA_MAGIC_0),
    Record(
        value=b"paid",
        key=b"order-7",
        flags=RecordFlags.EVENT_SOURCED,
        event=Event("größe.changed", 3, 2**63, b'{"by": 1}'),
    ),
    Record(value=bytes(300), key=b"order-8", headers=(Header(b"", b"", HeaderKind.RAW),)),
)


def spans(rows: Iterable[tuple[bytes | None, bytes | None]]) -> tuple[bytes, array[int]]:
    """Return a receive buffer with these keys and values, and their spans."""
    source, numbers = bytearray(b"noise"), array("q")
    for row in rows:
        for part in row:
            numbers.extend((len(source), len(part)) if part is not None else (0, -1))
            source += part or b""
            source += b"|"
    return bytes(source), numbers


def reseal(batch: bytearray) -> bytearray:
    """Renew both checksums, as an attacker would."""
    body_bytes = min(unpack_from("<I", batch, 72)[0], len(batch) - 104)
    pack_into("<Q", batch, 88, xxh64_intdigest(memoryview(batch)[104 : 104 + body_bytes]))
    pack_into("<Q", batch, 96, xxh64_intdigest(memoryview(batch)[:96]))
    return batch


def payloads(records: Sequence[Record]) -> list[tuple[bytes | None, bytes | None]]:
    return [(record.key, record.value) for record in records]
