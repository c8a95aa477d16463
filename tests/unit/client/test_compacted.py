"""What compaction and compression left is read by every reader with its own offsets."""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa
import pytest

from polywire.client.arrow import chunk_to_arrow
from polywire.client.bulk import StoredChunk
from polywire.protocols.flux.replies import put_chunks
from polywire.records.batch import keep, stamp
from polywire.records.columns import Record
from polywire.records.compression import Compression, compress_body
from polywire.records.rows import from_records

OFFSETS = [103, 105, 109, 110, 111]
"""Records that are left: 100 to 102 are gone before the first batch's first record, 106 to 108 within it."""


FIELDS: list[pa.Field[Any]] = [pa.field("offset", pa.int64()), pa.field("value", pa.binary())]
SCHEMA = pa.schema(FIELDS)


def chunk_of(pack: Compression | None) -> bytes:
    chunk, address, covered = b"", 1000, (100, 990)
    for first, rows in ((100, [3, 5, 9]), (110, [0, 1])):
        batch = from_records([Record(b"%d" % offset * 3, b"k%d" % offset) for offset in range(first, first + 10)])
        stamp(batch, 0, 7, 1, first, address, 5)
        kept = keep(batch, array("i", rows), base_offset=covered[0], base_address=covered[1])
        covered, address = (110, 990 + int.from_bytes(kept[80:84], "little")), 2000
        chunk += kept if pack is None else compress_body(kept, pack)
    return chunk


@pytest.mark.parametrize("pack", [None, *Compression])
def test_flux_spells_offsets(pack: Compression | None) -> None:
    chunk = memoryview(chunk_of(pack))
    out, size, _ = put_chunks([chunk], 0, 1000, 10_000, bytearray(10_000))
    assert bytes(out[:size]).decode().split(",") == [f"{offset}:{str(offset) * 3}" for offset in OFFSETS]
    out, size, _ = put_chunks([chunk], 106, 111, 10_000, bytearray(10_000))
    assert [int(item.split(":")[0]) for item in bytes(out[:size]).decode().split(",")] == [109, 110]


@pytest.mark.parametrize("pack", [None, *Compression])
@pytest.mark.parametrize(("start", "end"), [(0, 1000), (100, 120), (104, 110), (106, 111), (106, 109)])
def test_arrow_numbers_rows(pack: Compression | None, start: int, end: int) -> None:
    chunk = chunk_of(pack)
    found = [
        (row["offset"], row["value"])
        for batch in chunk_to_arrow(StoredChunk("t", 0, memoryview(chunk), start, end, end), SCHEMA.names, SCHEMA)
        for row in batch.to_pylist()
    ]
    assert found == [(offset, b"%d" % offset * 3) for offset in OFFSETS if start <= offset < end]
