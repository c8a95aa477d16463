"""The table of newest offsets by key, against a dictionary."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from polywire.errors import Invalid
from polywire.log.segments.key_offset_map import COMPRESSED, NOTED_ALL, KeyOffsetMap
from polywire.records.batch import (
    address_of,
    keep,
    offset_of,
    read_header,
    record_at_address,
    record_at_offset,
    slice_records,
    stamp,
    validate,
)
from polywire.records.columns import BatchFlags, Record
from polywire.records.compression import Compression, compress_body
from polywire.records.rows import from_records, to_records

FOREVER = -(2**62)  # earlier than any record
PAYLOADS = st.one_of(st.none(), st.sampled_from([b"", b"a", b"b", b"abcdefghi" * 5]))
RECORDS = st.lists(st.builds(Record, value=PAYLOADS, key=PAYLOADS), min_size=1, max_size=12)


def stored(batches: list[list[Record]]) -> list[bytearray]:
    """Number batches back to back; the n-th has append time n."""
    found, offset, address = [], 0, 0
    for time_us, records in enumerate(batches):
        batch = from_records(records)
        stamp(batch, 0, 1, 1, offset, address, time_us)
        header = read_header(batch)
        offset, address = offset + header.offset_span, address + header.address_span
        found.append(batch)
    return found


@settings(max_examples=200)
@given(batches=st.lists(RECORDS, min_size=1, max_size=6), share=st.floats(0, 1), null_time_us=st.integers(-1, 7))
def test_the_newest_offset_of_each_key_is_found(batches: list[list[Record]], share: float, null_time_us: int) -> None:
    chunks = stored(batches)
    noted = chunks[: round(len(chunks) * share)]
    table = KeyOffsetMap(256)
    assert table.note(b"".join(noted)) == NOTED_ALL
    newest, noted_end = {}, 0
    for batch in noted:
        for record in to_records(batch):
            newest[record.key] = record.offset
        noted_end = read_header(batch).next_offset
    positions, at = array("q"), 0
    for batch in chunks:
        positions.append(at)
        at += len(batch)
    counts = table.count_kept(b"".join(chunks), positions, noted_end=noted_end, null_time_us=null_time_us)
    for batch, count in zip(chunks, counts, strict=True):
        rows = table.rows_kept(batch, noted_end=noted_end, null_time_us=null_time_us)
        assert len(rows) == count
        expected = []
        for index, record in enumerate(to_records(batch)):
            gone = record.value is None and record.append_time_us < null_time_us and record.offset < noted_end
            if record.key is None or (newest.get(record.key, -1) <= record.offset and not gone):
                expected.append(index)
        assert list(rows) == expected


def test_a_full_table_stops() -> None:
    table = KeyOffsetMap(16)
    chunks = stored([[Record(b"v", b"%d" % (10 * batch + row)) for row in range(10)] for batch in range(3)])
    assert table.note(b"".join(chunks)) == len(chunks[0]), "the second batch might not fit"
    assert table.count_kept(chunks[1], array("q", (0,)), noted_end=10, null_time_us=FOREVER)[0] == 10


def test_compressed_batches_are_reported() -> None:
    table = KeyOffsetMap(64)
    plain = stored([[Record(b"v" * 100, b"k")] * 5])[0]
    packed = compress_body(plain, Compression.ZSTD)
    assert table.note(packed) == 0
    assert table.note(plain) == NOTED_ALL
    assert list(table.count_kept(packed, array("q", (0,)), noted_end=5, null_time_us=FOREVER)) == [COMPRESSED]
    with pytest.raises(ValueError, match="truncated or compressed"):
        table.rows_kept(packed, noted_end=5, null_time_us=FOREVER)


@settings(max_examples=200)
@given(records=RECORDS, data=st.data(), lead=st.integers(0, 1000))
def test_kept_records_keep_their_offsets_and_addresses(records: list[Record], data: st.DataObject, lead: int) -> None:
    batch = from_records(records)
    stamp(batch, 0, 7, 3, 5000, 90_000, 77)
    before = to_records(batch)
    addresses = [address_of(batch, index) for index in range(len(records))]
    for _ in range(2):  # a compacted batch can be compacted again
        rows = sorted(data.draw(st.sets(st.integers(0, len(before) - 1), min_size=1)))
        kept = keep(batch, array("i", rows), base_offset=5000 - lead, base_address=90_000 - 11 * lead)
        assert validate(kept) == len(kept)
        header, old = read_header(kept), read_header(batch)
        assert header.flags & BatchFlags.COMPACTED
        assert header.base_offset == 5000 - lead
        assert header.base_address + header.address_span <= old.base_address + old.address_span
        assert (header.partition, header.epoch, header.append_time_us) == (7, 3, 77)
        before, addresses = [before[row] for row in rows], [addresses[row] for row in rows]
        assert to_records(kept) == before
        assert header.next_offset == before[-1].offset + 1, "gaps come before records"
        for index, record in enumerate(before):
            assert offset_of(kept, index) == record.offset
            assert address_of(kept, index) == addresses[index]
            assert record_at_offset(kept, record.offset) == index
            assert record_at_address(kept, addresses[index]) == index
        assert record_at_offset(kept, header.base_offset) == 0
        cut = slice_records(kept, len(before) - 1, len(before))
        assert to_records(cut) == before[-1:]
        batch, lead = kept, 0
        records = records[: len(rows)]
        if header.base_offset != 5000:
            return


def test_a_gap_too_wide_for_a_batch_raises() -> None:
    batch = stored([[Record(b"v")]])[0]
    stamp(batch, 0, 1, 1, 2**40, 2**40, 0)
    for base_offset, base_address in ((0, 2**40), (2**40, 0), (2**40 + 1, 2**40)):
        with pytest.raises(Invalid):
            keep(batch, array("i", (0,)), base_offset=base_offset, base_address=base_address)
