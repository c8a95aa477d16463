"""Batches built from spans and columns hold the given records in the layout of decision 0101."""

from __future__ import annotations

from array import array
from struct import unpack_from

import pytest
from xxhash import xxh64_intdigest

from polywire.errors import ErrorCode, Invalid
from polywire.records import batch
from polywire.records.columns import BATCH_BYTES_MAX, COLUMN_COUNT, HEADER_BYTES, Column
from polywire.records.rows import from_records, to_records
from tests.unit.records.samples import PRODUCER, RICH, payloads, spans

ROWS = [(b"k1", b"one"), (None, b""), (b"", None), (b"k4", b"four")]


def test_the_bytes_match_the_decision() -> None:
    """The example of the decision: one record ``v`` without a key."""
    built = batch.from_spans(*spans([(None, b"v")]))
    assert len(built) == 128
    assert built[:4] == b"PWB1"
    assert unpack_from("<IIIQIIQQqqQIIII", built, 4) == (128, 0, 0b11, 0, 0, 1, 0, 0, 0, -1, 0, 17, 17, 11, 1)
    assert built[HEADER_BYTES:] == b"\x08\0\0\0\x01\0\0\0" + b"\0\0\0\0\x01\0\0\0" + b"v" + bytes(7)
    assert unpack_from("<QQ", built, 88) == (xxh64_intdigest(built[104:121]), xxh64_intdigest(built[:96]))


def test_records_of_spans_read_back() -> None:
    built = batch.from_spans(*spans(ROWS))
    assert batch.validate(built) == len(built)
    assert payloads(to_records(built)) == ROWS


def test_rows_choose_and_order_records() -> None:
    source, numbers = spans(ROWS)
    built = batch.from_spans(memoryview(source), numbers, array("i", [3, 0, 3]))
    assert batch.validate(built) == len(built)
    assert payloads(to_records(built)) == [ROWS[3], ROWS[0], ROWS[3]]
    assert Column.KEY_VALIDITY not in _columns(built)


def test_flags_belong_to_spans_and_change_kafka_sizes() -> None:
    source, numbers = spans(ROWS)
    built = batch.from_spans(source, numbers, array("i", [3, 0]), b"\x01\0\0\0")
    assert [record.flags for record in to_records(built)] == [0, 1]
    assert batch.read_header(built).address_span == (10 + 4) + (9 + 3)
    assert Column.RECORD_FLAGS not in _columns(batch.from_spans(source, numbers, array("i", [3]), b"\x01\0\0\0"))


@pytest.mark.parametrize("size", [0, 3947, 3948, 3949, 3950, 5000])
def test_only_large_batches_are_wide(size: int) -> None:
    built = batch.from_spans(*spans([(b"k", bytes(size))]))
    assert batch.validate(built) == len(built)
    wide = len(built) >= 4096
    places = [place for place, _ in _places(built).values()]
    assert batch.read_header(built).flags == wide
    assert all(place % (64 if wide else 8) == 0 for place in places)


@pytest.mark.parametrize(
    "numbers", [[0, -1, 0, 7], [0, -1, -1, 2], [0, 7, 0, 0], [0, -1, 0, -2], [6, 1, 0, 0], [0, 0, 2**62, 2**62]]
)
def test_spans_outside_of_the_source_are_refused(numbers: list[int]) -> None:
    with pytest.raises(ValueError):
        batch.from_spans(b"source", array("q", numbers))


@pytest.mark.parametrize("rows", [[1], [-1], [0, 2**31 - 1]])
def test_rows_outside_of_the_spans_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError):
        batch.from_spans(b"source", array("q", [0, 1, 0, 1]), array("i", rows))


def test_flags_for_other_spans_are_refused() -> None:
    with pytest.raises(ValueError):
        batch.from_spans(b"source", array("q", [0, 1, 0, 1]), None, b"\0\0")


def test_an_empty_batch_is_refused() -> None:
    for rows in (None, array("i")):
        with pytest.raises(Invalid) as caught:
            batch.from_spans(b"", array("q"), rows)
        assert caught.value.code is ErrorCode.INVALID_BATCH


def test_the_largest_batch() -> None:
    overhead = len(batch.from_spans(*spans([(None, bytes(4096))]))) - 4096
    largest = batch.from_spans(*spans([(None, bytes(BATCH_BYTES_MAX - overhead))]))
    assert batch.validate(largest) == BATCH_BYTES_MAX
    with pytest.raises(Invalid) as caught:
        batch.from_spans(*spans([(None, bytes(BATCH_BYTES_MAX - overhead + 1))]))
    assert caught.value.code is ErrorCode.RECORD_TOO_LARGE


def test_columns_round_trip() -> None:
    original = from_records(RICH, producer_id=PRODUCER, producer_epoch=3, base_sequence=9)
    again = batch.from_columns(_columns(original), len(RICH), producer_epoch=3, base_sequence=9)
    assert again == original
    assert batch.validate(again) == len(again)


@pytest.mark.parametrize("column", Column)
def test_a_column_of_wrong_size_is_refused(column: Column) -> None:
    columns = _columns(from_records(RICH, producer_id=PRODUCER))
    if column is Column.PRODUCER_ID:
        columns[column] = bytes(256)
    else:
        columns[column] = columns.get(column, b"") + b"\0"
    with pytest.raises(Invalid):
        batch.from_columns(columns, len(RICH))


@pytest.mark.parametrize(
    "column", [Column(i) for i in (0, 1, 3, 4, *range(11, 23), 23)] + [Column.RECORD_FLAGS, Column.EVENT_TYPE_BYTES]
)
def test_a_column_without_its_companion_is_refused(column: Column) -> None:
    columns = _columns(from_records(RICH, producer_id=PRODUCER))
    del columns[column]
    with pytest.raises(Invalid):
        batch.from_columns(columns, len(RICH))


def test_a_compacted_batch_covers_its_gaps() -> None:
    columns: dict[int, bytes] = _columns(batch.from_spans(*spans([(b"a", b"12"), (b"b", b"345")])))
    columns[Column.OFFSET_DELTAS] = array("I", [0, 5]).tobytes()
    columns[Column.ADDRESS_DELTAS] = array("I", [0, 100]).tobytes()
    built = batch.from_columns(columns, 2)
    header = batch.read_header(built)
    assert batch.validate(built) == len(built)
    assert (header.flags, header.offset_span, header.address_span) == (8, 6, 113)


def _places(built: bytearray) -> dict[int, tuple[int, int]]:
    numbers = batch.layout(built)
    assert len(numbers) == 2 * COLUMN_COUNT
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
    return {i: pair for i, pair in enumerate(pairs) if pair[0] >= 0}


def _columns(built: bytearray) -> dict[int, bytes]:
    return {i: bytes(built[place : place + size]) for i, (place, size) in _places(built).items()}
