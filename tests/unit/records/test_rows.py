"""Records as values round-trip through a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polywire.errors import Invalid
from polywire.records import batch
from polywire.records.columns import Column, Event, Header, HeaderKind, Record, RecordFlags
from polywire.records.rows import Rows, from_records, producer_of, to_records
from tests.unit.records.samples import PRODUCER, RICH


def test_every_column_round_trips() -> None:
    built = from_records(RICH)
    expected = [replace(record, headers=tuple(_as_stored(header) for header in record.headers)) for record in RICH]
    assert batch.validate(built) == len(built)
    assert to_records(b"x" + built, 1) == expected
    assert producer_of(built) is None


def _as_stored(header: Header) -> Header:
    return header if header.value is not None else replace(header, value_kind=HeaderKind.NULL)


def test_absent_columns_take_no_space() -> None:
    assert batch.read_header(from_records([Record(value=b"v")])).columns == 0b11


def test_numbers_of_the_broker_round_trip() -> None:
    built = from_records([Record(value=b"a"), Record(value=b"b")])
    batch.stamp(built, 0, 1, 1, 70, 0, 1234)
    assert [(record.offset, record.append_time_us) for record in to_records(built)] == [(70, 1234), (71, 1234)]


def test_consecutive_sequences_need_no_column() -> None:
    records = [Record(value=b"a", sequence=7), Record(value=b"b"), Record(value=b"c", sequence=9)]
    built = from_records(records, producer_id=PRODUCER, producer_epoch=2)
    header = batch.read_header(built)
    assert (header.producer_epoch, header.base_sequence) == (2, 7)
    assert not header.columns >> Column.SEQUENCES & 1
    assert [record.sequence for record in to_records(built)] == [7, 8, 9]
    assert producer_of(built) == PRODUCER


def test_sequences_with_gaps_have_a_column() -> None:
    records = [Record(value=b"a", sequence=7), Record(value=b"b", sequence=2**64 - 1)]
    built = from_records(records, producer_id=PRODUCER)
    assert batch.validate(built) == len(built)
    assert [record.sequence for record in to_records(built)] == [7, 2**64 - 1]


def test_the_event_flag_follows_the_event() -> None:
    event = Event("made", 1, 1)
    records = [Record(value=b"", flags=RecordFlags.EVENT_SOURCED), Record(value=b"", event=event)]
    stored = to_records(from_records(records))
    assert [(record.flags, record.event) for record in stored] == [(0, None), (RecordFlags.EVENT_SOURCED, event)]


@pytest.mark.parametrize(
    "record",
    [
        Record(value=b"", sequence=1),
        Record(value=b"", id=b"short"),
        Record(value=b"", flags=8),
        Record(value=b"", origin_time_us=2**63),
        Record(value=b"", event=Event("t", 2**32, 0)),
        Record(value=b"", event=Event("t", 0, -1)),
        Record(value=b"", headers=(Header(b"k", b"v", HeaderKind.NULL),)),
        Record(value=b"", headers=(Header(b"k", b"v", HeaderKind.STRING, HeaderKind.NULL),)),
    ],
)
def test_records_that_a_batch_cannot_hold_are_refused(record: Record) -> None:
    with pytest.raises(Invalid):
        from_records([Record(value=b"good"), record])


@pytest.mark.parametrize("sequence", [-1, 2**64])
def test_sequences_out_of_range_are_refused(sequence: int) -> None:
    for records in (
        [Record(value=b"", sequence=sequence)],
        [Record(value=b"", sequence=5), Record(value=b"", sequence=sequence)],
    ):
        with pytest.raises(Invalid):
            from_records(records, producer_id=PRODUCER)


def test_no_records_and_no_producer_name_are_refused() -> None:
    with pytest.raises(Invalid):
        from_records([])
    for producer_id in (b"", bytes(256)):
        with pytest.raises(Invalid):
            from_records([Record(value=b"")], producer_id=producer_id)


def test_rows_equal_records() -> None:
    built = from_records(RICH)
    batch.stamp(built, 0, 1, 1, 70, 0, 1234)
    rows, records = Rows(built), to_records(built)
    assert rows.count == len(records)
    for index, record in enumerate(records):
        assert _bytes(rows.key(index)) == record.key
        assert _bytes(rows.value(index)) == record.value
        assert tuple(rows.headers(index)) == record.headers
        assert rows.header_count(index) == len(record.headers)
        assert rows.offset(index) == record.offset
        assert rows.event(index) == record.event
        assert rows.origin_time_us(index) == record.origin_time_us
    assert rows.header.append_time_us == 1234


def _bytes(data: memoryview[int] | None) -> bytes | None:
    return None if data is None else bytes(data)


def test_rows_of_a_batch_with_the_fewest_columns() -> None:
    rows = Rows(from_records([Record(b"v")]))
    assert (rows.key(0), rows.offset(0), rows.origin_time_us(0)) == (None, -1, None)
    assert (list(rows.headers(0)), rows.last_header(0, b"k"), rows.size(0)) == ([], None, 1)
    assert to_records(rows.copy(0, without=b"x")) == [Record(b"v")]


def test_the_size_of_a_row_counts_its_headers() -> None:
    headers = (Header(b"abc", b"de"), Header(b"", None))
    rows = Rows(from_records([Record(b"xx"), Record(b"1234", b"key", headers), Record(None)]))
    assert [rows.size(index) for index in range(3)] == [2, 4 + 3 + 5 + 2 * 10, 0]


def test_the_last_header_of_a_key_with_a_value_counts() -> None:
    headers = (Header(b"k", b"1"), Header(b"k", b"2"), Header(b"kk", b"3"), Header(b"k", None), Header(b"x", b"4"))
    rows = Rows(from_records([Record(b"a", headers=(Header(b"k", b"other"),)), Record(b"b", headers=headers)]))
    assert rows.last_header(1, b"k") == headers[1]
    assert rows.last_header(1, b"none") is None


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("prefix", [b"", b"dead.", b"none", b"keep"])
def test_a_copy_has_key_value_and_the_other_headers(index: int, prefix: bytes) -> None:
    headers = tuple(
        Header(key, value, value_kind=HeaderKind.STRING)
        for key, value in ((b"dead.a", b"1"), (b"keep", b""), (b"dead.b", b"22"), (b"keep", b"333"), (b"dead.", b"4"))
    )
    records = [Record(b"v", b"k", headers, origin_time_us=5), Record(None, None, headers[1:2]), Record(b"", b"", ())]
    built = from_records(records)
    batch.stamp(built, 0, 1, 1, 70, 0, 1234)
    kept = tuple(header for header in records[index].headers if not prefix or not header.key.startswith(prefix))
    copy = Rows(built).copy(index, without=prefix, has_origin_time=True)
    assert batch.validate(copy) == len(copy)
    assert to_records(copy) == [replace(records[index], headers=kept)]
    assert to_records(Rows(built).copy(index))[0].origin_time_us is None
