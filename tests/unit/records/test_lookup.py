"""Lookups of records by offset and Kafka 0.7 address, and of payloads by spans."""

from __future__ import annotations

from array import array

import pytest

from polywire.errors import Invalid
from polywire.records import batch
from polywire.records.columns import Column
from tests.unit.records.samples import spans

ROWS = [(b"k", b"hello"), (None, None), (b"", b"x" * 50), (b"qq", b"")]


def _numbered(flags: bytes | None) -> bytearray:
    built = batch.from_spans(*spans(ROWS), None, flags)
    batch.stamp(built, 0, 9, 1, 100, 1000, 5)
    return built


@pytest.mark.parametrize(
    ("flags", "addresses"), [(None, [1000, 1015, 1025, 1085]), (b"\0\x01\0\x01", [1000, 1015, 1024, 1084])]
)
def test_addresses(flags: bytes | None, addresses: list[int]) -> None:
    built = _numbered(flags)
    end = 1000 + batch.read_header(built).address_span
    assert [batch.address_of(built, i) for i in range(4)] == addresses
    found = {address: batch.record_at_address(built, address) for address in range(990, end + 10)}
    assert {address: index for address, index in found.items() if index >= 0} == dict(
        zip(addresses, range(4), strict=True)
    )


def test_missing_records() -> None:
    for index in (-1, 4):
        with pytest.raises(IndexError):
            batch.address_of(_numbered(None), index)
    for address in (0, 2**63, 2**64 - 1):
        assert batch.record_at_address(_numbered(None), address) == -1
    with pytest.raises(Invalid):
        batch.address_of(b"", 0)


def test_offsets() -> None:
    built = _numbered(None)
    assert [batch.record_at_offset(built, offset) for offset in (0, 100, 101, 103, 104, 2**64 - 1)] == [
        0,
        0,
        1,
        3,
        4,
        4,
    ]


def test_offsets_and_addresses_of_a_compacted_batch() -> None:
    columns = {
        Column.VALUE_OFFSETS: array("i", [0, 1, 2, 3]).tobytes(),
        Column.VALUE_BYTES: b"abc",
        Column.OFFSET_DELTAS: array("I", [0, 4, 5]).tobytes(),
        Column.ADDRESS_DELTAS: array("I", [0, 44, 60]).tobytes(),
    }
    built = batch.from_columns(columns, 3)
    batch.stamp(built, 0, 1, 1, 10, 100, 0)
    assert [batch.record_at_offset(built, offset) for offset in range(9, 17)] == [0, 0, 1, 1, 1, 1, 2, 3]
    assert [batch.address_of(built, i) for i in range(3)] == [100, 144, 160]
    assert [batch.record_at_address(built, address) for address in (100, 111, 144, 160, 171)] == [0, -1, 1, 2, -1]


def test_spans_match_those_that_made_the_batch() -> None:
    chunk = b"abc" + _numbered(None)
    numbers = batch.spans_of(chunk, 3)
    quads = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
    found = [
        (
            chunk[key : key + key_size] if key_size >= 0 else None,
            chunk[value : value + value_size] if value_size >= 0 else None,
        )
        for key, key_size, value, value_size in quads
    ]
    assert found == ROWS
    assert batch.from_spans(chunk, numbers)[104:] == chunk[3 + 104 :]
    for at in (-1, 0, 4):
        with pytest.raises(Invalid):
            batch.spans_of(chunk, at)


def test_spans_can_be_filled_in_parts() -> None:
    chunk = bytes(_numbered(None))
    whole, spans = batch.spans_of(chunk), memoryview(bytearray(32 * len(ROWS)))
    for first in range(0, len(ROWS), 2):
        batch.fill_spans(chunk, spans, first, min(first + 2, len(ROWS)))
    assert bytes(spans) == whole.tobytes()
    for first, stop, room in ((-1, 1, 32), (1, 0, 32), (0, len(ROWS) + 1, 64), (0, 1, 31)):
        with pytest.raises(IndexError):
            batch.fill_spans(chunk, bytearray(room * len(ROWS)), first, stop)


def test_longest_payload() -> None:
    for records, longest in (
        ([(None, b"")], 0),
        ([(None, b"abc"), (None, None)], 3),
        ([(b"a", b"b"), (b"abcd", b"abc"), (b"", b"ab")], 4),
    ):
        source, positions = spans(records)
        assert batch.longest_payload(batch.from_spans(source, positions)) == longest
    with pytest.raises(Invalid):
        batch.longest_payload(bytes(200))
