"""Merging, slicing and taking preserve records, numbers and columns."""

from __future__ import annotations

import struct
import zlib
from array import array
from dataclasses import replace

import pytest

from polywire.errors import ErrorCode, Invalid
from polywire.records import batch
from polywire.records.columns import Column, Record
from polywire.records.rows import from_records, producer_of, to_records
from tests.unit.records.samples import PRODUCER, RICH, reseal, spans

PLAIN = tuple(Record(value=b"v%d" % i) for i in range(3))


def test_merging_fills_missing_columns() -> None:
    merged = batch.merge([from_records(PLAIN), from_records(RICH), from_records(PLAIN)])
    assert batch.validate(merged) == len(merged)
    assert merged == from_records([*PLAIN, *RICH, *PLAIN])


def test_merging_numbered_neighbours_preserves_their_numbers() -> None:
    parts, offset, address = [], 40, 4000
    for records in (PLAIN, RICH):
        part = from_records(records)
        batch.stamp(part, 0, 7, 2, offset, address, 99)
        offset += len(records)
        address += batch.read_header(part).address_span
        parts.append(part)
    merged = batch.merge(parts)
    header = batch.read_header(merged)
    assert to_records(merged) == to_records(parts[0]) + to_records(parts[1])
    assert (header.partition, header.epoch, header.base_offset, header.append_time_us) == (7, 2, 40, 99)
    assert (header.base_address + header.address_span, header.next_offset) == (address, offset)
    assert batch.check_header(merged, 0)
    assert batch.check_body(merged, 0)


@pytest.mark.parametrize("numbers", [(8, 2, 43, 36), (7, 3, 43, 36), (7, 2, 44, 36), (7, 2, 43, 35)])
def test_only_neighbours_are_merged(numbers: tuple[int, int, int, int]) -> None:
    parts = [from_records(PLAIN), from_records(PLAIN)]
    batch.stamp(parts[0], 0, 7, 2, 40, 0, 5)
    batch.stamp(parts[1], 0, *numbers, 5)
    with pytest.raises(ValueError):
        batch.merge(parts)
    batch.stamp(parts[1], 0, 7, 2, 43, 36, 5)
    assert len(to_records(batch.merge(parts))) == 6


def test_batches_of_producers_are_not_merged() -> None:
    part = from_records(PLAIN, producer_id=PRODUCER)
    assert batch.merge([part]) == part
    with pytest.raises(ValueError):
        batch.merge([from_records(PLAIN), part])


def test_invalid_merges_are_refused() -> None:
    with pytest.raises(ValueError):
        batch.merge([])
    with pytest.raises(Invalid):
        batch.merge([from_records(PLAIN), b"nothing"])
    large = batch.from_spans(*spans([(None, bytes(9_000_000))]))
    with pytest.raises(Invalid) as caught:
        batch.merge([large, large])
    assert caught.value.code is ErrorCode.RECORD_TOO_LARGE


def test_merging_computes_missing_crcs() -> None:
    with_crc = batch.from_columns(
        {
            Column.VALUE_OFFSETS: array("i", [0, 9]).tobytes(),
            Column.VALUE_BYTES: b"123456789",
            Column.VALUE_CRC32: array("I", [0xCBF43926]).tobytes(),
        },
        1,
    )
    merged = batch.merge([from_records(PLAIN), with_crc])
    place = batch.layout(merged)[2 * Column.VALUE_CRC32]
    assert batch.validate(merged) == len(merged)
    assert list(memoryview(merged)[place : place + 8].cast("I")) == [zlib.crc32(b"v0"), zlib.crc32(b"v1")]


def test_compacted_batches_keep_their_gaps() -> None:
    compacted = _compacted()
    batch.stamp(compacted, 0, 7, 2, 10, 100, 5)
    after = from_records(PLAIN)
    batch.stamp(after, 0, 7, 2, 20, 300, 5)
    merged = batch.merge([compacted, after])
    header = batch.read_header(merged)
    assert batch.validate(merged) == len(merged)
    assert [record.offset for record in to_records(merged)] == [10, 13, 18, 20, 21, 22]
    assert [batch.address_of(merged, i) for i in range(6)] == [100, 150, 170, 300, 312, 324]
    assert (header.next_offset, header.base_address + header.address_span) == (23, 336)
    part = batch.slice_records(merged, 1, 3)
    assert batch.validate(part) == len(part)
    assert [record.offset for record in to_records(part)] == [13, 18]
    assert [batch.address_of(part, i) for i in range(2)] == [150, 170]
    assert batch.read_header(part).next_offset == 20
    assert batch.read_header(part).address_span == 150


def _compacted() -> bytearray:
    """Return three records left by compaction: offsets 0, 3, 8 of 10; addresses 0, 50, 70 of 200."""

    built = batch.from_columns(
        {
            Column.VALUE_OFFSETS: array("i", [0, 1, 2, 3]).tobytes(),
            Column.VALUE_BYTES: b"abc",
            Column.OFFSET_DELTAS: array("I", [0, 3, 8]).tobytes(),
            Column.ADDRESS_DELTAS: array("I", [0, 50, 70]).tobytes(),
        },
        3,
    )
    struct.pack_into("<II", built, 80, 200, 10)
    return reseal(built)


def test_every_slice_matches_the_slice_of_its_records() -> None:
    whole = from_records(RICH, producer_id=PRODUCER, producer_epoch=4, base_sequence=100)
    batch.stamp(whole, 0, 7, 2, 40, 4000, 99)
    records = to_records(whole)
    for start in range(len(RICH)):
        for stop in range(start + 1, len(RICH) + 1):
            part = batch.slice_records(whole, start, stop)
            assert batch.validate(part) == len(part)
            assert to_records(part) == records[start:stop]
            assert producer_of(part) == PRODUCER
            assert batch.read_header(part).producer_epoch == 4
            assert batch.read_header(part).base_address == batch.address_of(whole, start)
    assert batch.slice_records(whole, 0, len(RICH)) == whole


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (-1, 2), (0, 6), (5, 6)])
def test_slices_out_of_range_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError):
        batch.slice_records(from_records(RICH), start, stop)


@pytest.mark.parametrize("rows", [[0], [4, 3, 2], [0, 1, 2, 3, 4], [1, 2, 2, 0, 1]])
def test_taken_records_are_the_chosen_ones(rows: list[int]) -> None:
    whole = from_records(RICH, producer_id=PRODUCER, producer_epoch=4, base_sequence=100)
    batch.stamp(whole, 0, 7, 2, 40, 4000, 99)
    taken = batch.take(whole, array("i", rows))
    assert batch.validate(taken) == len(taken)
    expected = [replace(to_records(whole)[row], offset=-1, append_time_us=0) for row in rows]
    assert to_records(taken) == expected


def test_missing_records_cannot_be_taken() -> None:
    for row in (-1, 5):
        with pytest.raises(IndexError):
            batch.take(from_records(RICH), array("i", [0, row]))
    with pytest.raises(Invalid):
        batch.take(from_records(RICH), array("i"))
