"""Pieces: records with gaps between their offsets, on their way to another log."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from polywire.errors import Invalid
from polywire.records.batch import keep, read_header, spread, stamp, validate
from polywire.records.columns import Event, Header, Record, RecordFlags
from polywire.records.compression import Compression, compress_body
from polywire.records.pieces import GAP_MAX, Piece, covering, merged, piece_of_records, piece_of_stored
from polywire.records.rows import from_records, to_records
from polywire.types import Buffer

FULL = Record(b"v", b"k", (Header(b"h", b"x"),), id=b"i" * 16, origin_time_us=5)


def stored(batch: Buffer, base: int = 1000) -> bytearray:
    copy = bytearray(batch)
    stamp(copy, 0, 7, 3, base, 77, 123_000)
    return copy


def placed(batches: list[Buffer], at: int) -> list[Record]:
    """Return the records of batches that are stored one after the other."""
    found: list[Record] = []
    for batch in batches:
        assert validate(batch) == len(batch)
        numbered = stored(batch, at)
        found += to_records(numbered)
        at = read_header(numbered).next_offset
    return found


def records_at(*offsets: int) -> list[Record]:
    return [Record(b"%d" % offset, b"k", offset=offset) for offset in offsets]


def test_spread_covers_offsets_without_records() -> None:
    batch = from_records(records_at(0, 1, 2))
    wide = spread(batch, array("I", [2, 5, 6]), lead=10, span=30)
    assert validate(wide) == len(wide)
    assert [record.offset for record in to_records(stored(wide))] == [1012, 1015, 1016]
    assert read_header(wide).offset_span == 30
    again = spread(wide, lead=4, span=34)
    assert [record.offset for record in to_records(stored(again))] == [1016, 1019, 1020]


@pytest.mark.parametrize(
    ("deltas", "lead", "span"),
    [
        ([0, 0, 1], 0, 9),
        ([2, 1, 3], 0, 9),
        ([0, 1, 9], 0, 9),
        ([0, 1], 0, 9),
        ([0, 1, 2], -1, 9),
        ([0, 1, 2], 7, 9),
        (None, 7, 9),
        (None, 0, (1 << 30) + 1),
        (None, 0, 0),
    ],
)
def test_spread_refuses_offsets_that_do_not_fit(deltas: list[int] | None, lead: int, span: int) -> None:
    batch = from_records(records_at(0, 1, 2))
    with pytest.raises(Invalid, match="do not ascend or do not fit"):
        spread(batch, None if deltas is None else array("I", deltas), lead=lead, span=span)


def test_pieces_cover_a_range() -> None:
    pieces = [piece_of_records(records_at(*offsets)) for offsets in ([5, 6], [7, 9], [20], [21], [22, 23])]
    found = placed(list(covering(list(merged(pieces)), 3, 40)), 3)
    assert [(record.offset, record.value) for record in found] == [
        (offset, b"%d" % offset) for offset in (5, 6, 7, 9, 20, 21, 22, 23)
    ]
    assert [record.offset for piece in pieces for record in piece.records()] == [5, 6, 7, 9, 20, 21, 22, 23]
    batches = list(covering(list(merged(pieces)), 3, 40))
    assert sum(read_header(batch).offset_span for batch in batches) == 37


def test_dense_pieces_are_merged_and_unchanged() -> None:
    pieces = [piece_of_records(records_at(number)) for number in range(10)]
    [one] = merged(pieces)
    assert (one.first, one.next_offset, one.record_count) == (0, 10, 10)
    assert list(covering([one], 0, 10)) == [one.batch]


def test_overlapping_pieces_are_an_error() -> None:
    pieces = [piece_of_records(records_at(*offsets)) for offsets in ([5, 8], [7, 9])]
    with pytest.raises(Invalid, match="do not ascend"):
        list(covering(pieces, 0, 20))
    with pytest.raises(Invalid, match="do not ascend"):
        list(covering(pieces[:1], 6, 20))
    with pytest.raises(Invalid, match="do not ascend"):
        list(covering(pieces[:1], 0, 7))
    with pytest.raises(Invalid, match="do not ascend"):
        piece_of_records(records_at(5, 4, 9, 2))


def test_wide_gaps_are_omitted() -> None:
    piece = piece_of_records(records_at(5))
    [batch] = covering([piece], 0, GAP_MAX + 7)
    assert read_header(batch).offset_span == 6
    far = piece._replace(first=GAP_MAX + 1, next_offset=GAP_MAX + 2)
    [batch] = covering([far], 0, GAP_MAX + 2)
    assert read_header(batch).offset_span == 1


def test_stored_batches_lose_producers_and_get_times() -> None:
    records = [replace(FULL, flags=RecordFlags.LINE_VALUE), replace(FULL, origin_time_us=None, event=Event("e", 1, 2))]
    batch = stored(from_records(records, producer_id=b"p", producer_epoch=1, base_sequence=3))
    for form in (batch, compress_body(batch, Compression.LZ4), compress_body(batch, Compression.ZSTD)):
        piece = piece_of_stored(form, 0)
        assert piece is not None
        first, second = piece.records()
        assert (first.offset, second.offset) == (1000, 1001)
        assert (first.origin_time_us, second.origin_time_us) == (5, 123_000)
        assert (first.id, first.headers, first.flags, first.sequence) == (FULL.id, FULL.headers, records[0].flags, None)
        assert second.event == records[1].event


def test_stored_batches_are_read_from_an_offset() -> None:
    batch = stored(from_records(records_at(*range(10))))
    compacted = keep(batch, array("i", [2, 3, 7]), base_offset=990, base_address=0)
    for source, offsets in ((batch, range(1000, 1010)), (compacted, (1002, 1003, 1007))):
        for offset in range(985, 1012):
            piece = piece_of_stored(source, offset)
            found = [] if piece is None else [record.offset for record in piece.records()]
            assert found == [one for one in offsets if one >= offset], offset


def test_hostile_stored_batches_are_refused() -> None:
    batch = bytes(stored(from_records([FULL, FULL])))
    for at in range(len(batch)):
        broken = batch[:at] + bytes([batch[at] ^ 0x41]) + batch[at + 1 :]
        with pytest.raises(Invalid):
            piece_of_stored(broken, 0)
    with pytest.raises(Invalid):
        piece_of_stored(batch[:90], 0)


def test_a_piece_that_is_none() -> None:
    assert Piece(0, from_records(records_at(0)), 1).is_dense
