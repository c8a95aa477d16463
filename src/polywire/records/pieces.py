"""Records on their way from one log to another, as batches whose records retain their offsets.

A *piece* is a batch with the offsets that its records have at their source. ``covering`` makes batches of pieces that
cover a range of offsets without a hole, so that the records get the same offsets in another log.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from polywire.errors import ErrorCode, Invalid
from polywire.records.batch import from_columns, layout, merge, slice_records, spread, stamp, validate
from polywire.records.columns import MERGED_BYTES_MAX, NO_TIME, BatchFlags, Column, Record
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields
from polywire.records.header import read_header
from polywire.records.rows import from_records, to_records
from polywire.types import Buffer

GAP_MAX: Final = 1 << 28  # offsets without a record before or after a batch, which covers at most 2^30 offsets
_DROPPED: Final = (Column.PRODUCER_ID, Column.SEQUENCES)
_record_count: Final = header_fields("record_count")


class Piece(NamedTuple):
    """A batch without offsets, and its offsets at its source.

    Attributes:
        first: offset of the first record, if ``deltas`` is None and the batch has no gaps.
        next_offset: the offset after the last one that the batch covers.
        deltas: u32 array, the offset of each record relative to ``first``; None if they are consecutive, or in the
            batch itself.
        newest_us: time of the last record.
    """

    first: int
    batch: Buffer
    next_offset: int
    deltas: Buffer | None = None
    newest_us: int = 0

    @property
    def record_count(self) -> int:
        return int(_record_count(self.batch)[0])

    def records(self) -> list[Record]:
        """Return the records, with their offsets."""
        batch = spread(self.batch, self.deltas, lead=0, span=self.next_offset - self.first)
        stamp(batch, 0, 1, 0, self.first, 0, 0)
        return to_records(batch)

    @property
    def is_dense(self) -> bool:
        """Whether each offset from ``first`` to ``next_offset`` has a record."""
        return self.deltas is None and self.next_offset - self.first == self.record_count


def piece_of_records(records: Sequence[Record]) -> Piece:
    """Return a piece of records with ascending offsets. Raises Invalid."""
    first, end = records[0].offset, records[-1].offset + 1
    deltas = None
    if end - first != len(records):
        try:
            deltas = array("I", [record.offset - first for record in records]).tobytes()
        except OverflowError:
            raise _out_of_order(first, end) from None
    newest_us = records[-1].append_time_us or records[-1].origin_time_us or 0
    return Piece(first, from_records([_timed(record) for record in records]), end, deltas, newest_us)


def _timed(record: Record) -> Record:
    """Return the record without a sequence number and, if the producer set no time, with its append time."""
    time_us = record.origin_time_us if record.origin_time_us is not None else record.append_time_us or None
    return Record(record.value, record.key, record.headers, id=record.id, event=record.event, origin_time_us=time_us)


def piece_of_stored(stored: Buffer, offset: int) -> Piece | None:
    """Return the records of a fetched stored batch from an offset on, or None if there are none.

    The batch may come from a hostile source. A record without a producer's timestamp gets its append time. Producer and
    sequence numbers are removed. Raises Invalid.
    """
    batch: Buffer = expand_body(stored)
    validate(batch)
    header = read_header(batch)
    if header.base_offset < offset < header.next_offset:
        row = _row_at(batch, offset)
        if row == header.record_count:
            return None
        batch = slice_records(batch, row, header.record_count)
        header = read_header(batch)
    if header.next_offset <= offset:
        return None
    places, view = layout(batch).tolist(), memoryview(batch)
    columns: dict[int, Buffer] = {
        column: view[places[2 * column] : places[2 * column] + places[2 * column + 1]]
        for column in Column
        if places[2 * column] >= 0 and column not in _DROPPED
    }
    columns[Column.ORIGIN_TIMES_US] = _times(
        columns.get(Column.ORIGIN_TIMES_US), header.append_time_us, header.record_count
    )
    copy = from_columns(columns, header.record_count)
    return Piece(header.base_offset, copy, header.next_offset, None, header.append_time_us)


def _row_at(batch: Buffer, offset: int) -> int:
    """Return the index of the first record from an offset on, or the number of records."""
    places = layout(batch)
    at, size = places[2 * Column.OFFSET_DELTAS], places[2 * Column.OFFSET_DELTAS + 1]
    delta = offset - read_header(batch).base_offset
    return delta if at < 0 else bisect_left(memoryview(batch)[at : at + size].cast("I"), delta)


def _times(times: Buffer | None, append_time_us: int, count: int) -> Buffer:
    if times is None:
        return array("q", [append_time_us]) * count
    found = array("q", bytes(times))
    if NO_TIME in found:
        return array("q", [append_time_us if time == NO_TIME else time for time in found])
    return found


def merged(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the pieces, with neighbours merged up to ``MERGED_BYTES_MAX``."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        follows = bool(group) and group[-1].next_offset == piece.first
        if group and not (follows and piece.is_dense and size + len(piece.batch) <= MERGED_BYTES_MAX):
            yield _merged(group)
            group, size = [], 0
        group.append(piece)
        size += len(piece.batch) if piece.is_dense else MERGED_BYTES_MAX
    if group:
        yield _merged(group)


def _merged(group: Sequence[Piece]) -> Piece:
    if len(group) == 1:
        return group[0]
    batch = merge([piece.batch for piece in group])
    return Piece(group[0].first, batch, group[-1].next_offset, None, group[-1].newest_us)


def covering(pieces: Sequence[Piece], at: int, end: int) -> Iterator[Buffer]:
    """Yield batches that together cover exactly the offsets from ``at`` to ``end``.

    A gap above ``GAP_MAX`` is omitted. Raises Invalid if the pieces overlap or are not within the range.
    """
    for number, piece in enumerate(pieces):
        following = end if number == len(pieces) - 1 else piece.next_offset
        if piece.first < at or following < piece.next_offset:
            raise _out_of_order(piece.first, piece.next_offset)
        lead = piece.first - at
        trail = following - piece.next_offset
        lead, trail = lead if lead <= GAP_MAX else 0, trail if trail <= GAP_MAX else 0
        if lead or trail or not piece.is_dense or _is_compacted(piece.batch):
            span = lead + piece.next_offset - piece.first + trail
            yield spread(piece.batch, piece.deltas, lead=lead, span=span)
        else:
            yield piece.batch
        at = following


_flags: Final = header_fields("flags")


def _is_compacted(batch: Buffer) -> bool:
    return bool(_flags(batch)[0] & BatchFlags.COMPACTED)


def _out_of_order(first: int, end: int) -> Invalid:
    return Invalid(
        ErrorCode.INVALID_BATCH,
        f"the source returned offsets that do not ascend first_offset={first} next_offset={end}",
    )
