"""Fuzz the check of stored batches: a batch is refused, or safe for everything that reads it later.

Run as ``python -m tests.fuzz.fuzz_batches``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

import random
from struct import Struct
from typing import Final

from polywire.errors import Invalid
from polywire.protocols.flux.encoder import put_chunks
from polywire.records import batch as batches
from polywire.records.checksum import xxh64, xxh64_at
from polywire.records.columns import HEADER_BYTES, Header, HeaderKind, Record
from polywire.records.partitioner import partitions_of, rows_by_partition
from polywire.records.rows import from_records, to_records
from polywire.types import KeyHash
from tests.fuzz.chance import fuzz

INPUTS: Final = 8  # of a round
SEALED_BYTES: Final = 96  # bytes under the header's checksum (decision 0101)
ODD: Final = (0, 1, 2, 7, 8, 104, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
PARTITIONS: Final = 7

_LENGTH: Final = Struct("<I")
_LONG: Final = Struct("<Q")


def samples() -> list[bytes]:
    """Return valid batches with every column that a client may send."""
    header = Header(b"h", b"x")
    null = Header(b"n", None, value_kind=HeaderKind.NULL)
    return [
        bytes(batch)
        for batch in (
            from_records([Record(b"value")]),
            from_records([Record(b"a", key=b"k"), Record(None, key=None), Record(b"", key=b"")]),
            from_records([Record(b"v", headers=(header, null), id=b"i" * 16), Record(b"w", headers=(header,))]),
            from_records([Record(b"v", origin_time_us=5), Record(b"w")]),
            from_records([Record(b"v" * 5000, key=b"k" * 100), Record(b"w")]),
            from_records([Record(b"v"), Record(b"w")], producer_id=b"p", producer_epoch=1, base_sequence=3),
        )
    ]


GOOD: Final = samples()


def sealed(batch: bytearray) -> bytes:
    """Correct both checksums, so that only the columns are wrong."""
    if len(batch) < HEADER_BYTES:
        return bytes(batch)
    (body_bytes,) = _LENGTH.unpack_from(batch, 72)
    _LONG.pack_into(batch, 88, xxh64(batch[HEADER_BYTES : HEADER_BYTES + body_bytes]))
    _LONG.pack_into(batch, 96, xxh64_at(bytes(batch), 0, SEALED_BYTES))
    return bytes(batch)


def mutated(chance: random.Random, sample: bytes) -> bytes:
    """Return a batch with some damage under valid checksums."""
    batch = bytearray(sample)
    for _ in range(chance.randrange(1, 5)):
        limit = SEALED_BYTES if chance.random() < 0.4 else len(batch)
        place = chance.randrange(limit)
        match chance.randrange(5):
            case 0:
                batch[place] ^= 1 << chance.randrange(8)
            case 1:
                batch[place] = chance.randrange(256)
            case 2 if place + 4 <= len(batch):
                _LENGTH.pack_into(batch, place & ~3, chance.choice(ODD))
            case 3 if place + 4 <= len(batch):
                (number,) = _LENGTH.unpack_from(batch, place & ~3)
                _LENGTH.pack_into(batch, place & ~3, (number + chance.choice((-8, -4, -1, 1, 4, 8))) % 2**32)
            case _:
                at = max(HEADER_BYTES, place)
                batch[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9))
    if chance.random() < 0.5 and len(batch) >= HEADER_BYTES:
        _LENGTH.pack_into(batch, 4, (len(batch) + 7) & ~7)
        _LENGTH.pack_into(batch, 72, len(batch) - HEADER_BYTES)
        batch += bytes(-len(batch) % 8)
    return sealed(batch)


def read_all(batch: memoryview) -> None:
    """Run everything that reads a stored batch."""
    records = to_records(batch)
    count = len(records)
    spans = batches.spans_of(batch)
    assert len(spans) == 4 * count, "four numbers a record"
    assert batches.longest_payload(batch) == max(
        max(len(record.value or b""), len(record.key or b"")) for record in records
    )
    rows, starts = rows_by_partition(partitions_of(batch, spans, PARTITIONS, KeyHash.FNV32), PARTITIONS)
    assert starts[PARTITIONS] == count, "every record has a partition"
    for number in range(PARTITIONS):
        if starts[number] < starts[number + 1]:
            batches.validate(batches.take(batch, rows[starts[number] : starts[number + 1]]))
    batches.validate(batches.slice_records(batch, 0, count))
    stored = bytearray(batch)
    batches.stamp(stored, 0, 1, 1, 0, 0, 5)
    assert list(batches.walk(stored)), "a stored batch is walked"
    batches.address_of(stored, count - 1)
    put_chunks([memoryview(stored)], 0, count, 1 << 20, bytearray(4096))


def check(data: bytes) -> bool:
    """Check that the batch is refused as documented, or read without error; return whether it was accepted."""
    view = memoryview(data)
    try:
        length = batches.validate(view)
    except Invalid:
        return False
    read_all(view[:length])
    return True


def check_all(chance: random.Random) -> None:
    """Run one round."""
    for _ in range(INPUTS):
        check(mutated(chance, chance.choice(GOOD)))


if __name__ == "__main__":
    assert all(map(check, GOOD)), "the samples are valid"
    fuzz(check_all)
