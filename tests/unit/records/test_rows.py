"""Records as values survive the way through a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polywire.errors import Invalid
from polywire.records import batch
from polywire.records.columns import Column, Event, Header, HeaderKind, Record, RecordFlags
from polywire.records.rows import from_records, producer_of, to_records
from tests.unit.records.samples import PRODUCER, RICH


def test_every_column_comes_back() -> None:
    built = from_records(RICH)
    expected = [replace(record, headers=tuple(_as_stored(header) for header in record.headers)) for record in RICH]
    assert batch.validate(built) == len(built)
    assert to_records(b"x" + built, 1) == expected
    assert producer_of(built) is None


def _as_stored(header: Header) -> Header:
    return header if header.value is not None else replace(header, value_kind=HeaderKind.NULL)


def test_absent_columns_cost_nothing() -> None:
    assert batch.read_header(from_records([Record(value=b"v")])).columns == 0b11


def test_numbers_of_the_broker_come_back() -> None:
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
def test_what_a_batch_cannot_hold_is_refused(record: Record) -> None:
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
