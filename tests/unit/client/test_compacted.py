"""Compacted and compressed records are read with their own offsets by every reader."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest

from polywire.client.arrow import chunk_to_arrow
from polywire.client.bulk import StoredChunk
from polywire.client.polywire import PolywireClient
from polywire.protocols.flux.encoder import put_chunks
from polywire.protocols.polywire.messages import Fetched, Verb
from polywire.records.batch import keep, stamp
from polywire.records.columns import Record
from polywire.records.compression import Compression, compress_body
from polywire.records.rows import from_records

OFFSETS = [103, 105, 109, 110, 111]
"""Offsets that remain: 100 to 102 were removed before the first batch's first record, 106 to 108 within it."""


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
def test_flux_lists_offsets(pack: Compression | None) -> None:
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


class Scripted:
    """A connection with scripted FETCH responses, as from a compacted partition."""

    def __init__(self, batches: list[tuple[int, int, bytes]], readable: int) -> None:
        """batches: the offsets that each covers, gaps included, and its bytes."""
        self.batches = batches
        self.readable = readable
        self.asked: list[int] = []

    async def ask(self, verb: Verb, head: Any) -> tuple[bytes, list[bytes]]:
        assert verb is Verb.FETCH
        self.asked.append(head.offset)
        for first, end, content in self.batches:
            if first <= head.offset < end:
                return msgspec.msgpack.encode(Fetched(end, self.readable)), [content]
        return msgspec.msgpack.encode(Fetched(head.offset, self.readable)), []


def fetched(batches: list[tuple[int, int, bytes]], offset: int, records_max: int) -> tuple[list[int], list[int]]:
    """Return the offsets that a fetch finds, and the offsets it requested."""
    connection = Scripted(batches, 5_000)
    client = PolywireClient(cast(Any, connection), cast(Any, None))
    records = asyncio.run(client.fetch("t", 0, offset, records_max=records_max))
    return [record.offset for record in records], connection.asked


def numbered(first: int, count: int) -> bytes:
    batch = from_records([Record(b"%d" % offset) for offset in range(first, first + count)])
    stamp(batch, 0, 7, 1, first, 0, 5)
    return bytes(batch)


@pytest.mark.parametrize("records_max", [1, 10, 1000])
def test_a_gap_longer_than_the_limit_of_records_is_not_the_end(records_max: int) -> None:
    """The broker returns the batch after the gap; the limit counts records, not offsets."""
    batches = [(0, 4_005, numbered(4_000, 5)), (4_005, 5_000, numbered(4_990, 10))]
    assert fetched(batches, 0, records_max) == (list(range(4_000, 4_005))[:records_max], [0])
    assert fetched(batches, 4_003, 1) == ([4_003], [4_003])
    assert fetched(batches, 5_000, 1) == ([], [5_000])


def test_a_batch_without_records_after_the_offset_is_skipped() -> None:
    batches = [(0, 4_005, numbered(10, 5)), (4_005, 5_000, numbered(4_990, 10))]
    assert fetched(batches, 20, 3) == ([4_990, 4_991, 4_992], [20, 4_005])
