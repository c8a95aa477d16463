"""Build a stored batch from keys and values in a receive buffer, or from existing columns (decision 0101).

The result is a complete batch with both checksums, but without offsets. Building makes one call and one allocation per
batch, and none per record. Batches below ``WIDE_BYTES_MIN`` align their columns to 8 bytes, larger ones to 64.
"""

from __future__ import annotations

from collections.abc import Mapping

import cython

from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import Column
from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.cpython.bytearray import PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
    from cython.cimports.polywire.records.check import flagged, sizes_fit
    from cython.cimports.polywire.records.checksum import xxh64_raw
    from cython.cimports.polywire.records.header import seal_header
    from cython.cimports.polywire.records.memory import (
        Lent,
        clear,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        move,
        store_i64,
        store_u32,
        store_u64,
    )
else:
    from polywire.records.check import flagged, sizes_fit
    from polywire.records.checksum import xxh64_raw
    from polywire.records.header import seal_header
    from polywire.records.memory import (
        Lent,
        clear,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        move,
        store_i64,
        store_u32,
        store_u64,
    )

_MAGIC = cython.declare(cython.uint, 0x31425750)
_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_BATCH_BYTES_MAX = cython.declare(cython.longlong, 16 * 1024 * 1024 - 4096)
_RECORD_COUNT_MAX = cython.declare(cython.Py_ssize_t, 4_194_304)
_WIDE_BYTES_MIN = cython.declare(cython.longlong, 4096)
_COLUMN_COUNT = cython.declare(cython.int, 27)
_SPAN_BYTES = cython.declare(cython.Py_ssize_t, 32)  # key position, key length, value position, value length


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _arrange(places: cython.p_longlong, mask: cython.longlong) -> cython.longlong:
    """Compute the positions of a batch's columns, aligned to ``mask`` + 1. Return the end of the last column.

    ``places`` has the size of each column, -1 if it is absent. The positions are written into it.
    """
    end: cython.longlong = _HEADER_BYTES
    i: cython.int
    for i in range(_COLUMN_COUNT):
        if places[2 * i + 1] >= 0:
            end += 4
    for i in range(_COLUMN_COUNT):
        places[2 * i] = -1
        if places[2 * i + 1] >= 0:
            places[2 * i] = (end + mask) & ~mask
            end = places[2 * i] + places[2 * i + 1]
    return end


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _write_frame(
    p: cython.p_uchar,
    places: cython.p_const_longlong,
    count: cython.Py_ssize_t,
    end: cython.longlong,
    length: cython.longlong,
) -> cython.void:
    """Write the header, the column sizes and the padding, except for header fields that depend on the records."""
    columns: cython.uint = 0
    at: cython.Py_ssize_t = _HEADER_BYTES
    i: cython.int
    clear(p, 0, _HEADER_BYTES)
    for i in range(_COLUMN_COUNT):
        if places[2 * i] >= 0:
            columns |= cython.cast(cython.uint, 1) << i
            store_u32(p, at, places[2 * i + 1])
            at += 4
    for i in range(_COLUMN_COUNT):
        if places[2 * i] >= 0:
            clear(p, at, places[2 * i] - at)
            at = places[2 * i] + places[2 * i + 1]
    clear(p, at, length - at)
    store_u32(p, 0, _MAGIC)
    store_u32(p, 4, length)
    store_u32(p, 8, 1 if length >= _WIDE_BYTES_MIN else 0)
    store_u32(p, 12, columns)
    store_u32(p, 28, count)
    store_i64(p, 56, -1)
    store_u32(p, 72, end - _HEADER_BYTES)
    store_u32(p, 76, end - _HEADER_BYTES)


@cython.cfunc
def allocate(places: cython.p_longlong, count: cython.Py_ssize_t) -> bytearray:
    """Allocate a batch and write everything that does not depend on the content of its columns.

    Args:
        places: sizes of the columns (-1 if absent) on entry, their sizes and positions on return.

    Raises:
        Invalid: RECORD_TOO_LARGE: above the largest batch. INVALID_BATCH: no records, or too many.
    """
    if count < 1 or count > _RECORD_COUNT_MAX:
        raise Invalid(ErrorCode.INVALID_BATCH, f"number of records out of range count={count} max={_RECORD_COUNT_MAX}")
    end: cython.longlong = _arrange(places, 7)
    if end + 7 >= _WIDE_BYTES_MIN:
        end = _arrange(places, 63)
    length: cython.longlong = (end + 7) & ~7
    if length > _BATCH_BYTES_MAX:
        raise Invalid(ErrorCode.RECORD_TOO_LARGE, f"batch too large bytes={length} max={_BATCH_BYTES_MAX}")
    if cython.compiled:
        batch = PyByteArray_FromStringAndSize(cython.NULL, length)
        _write_frame(cython.cast(cython.p_uchar, PyByteArray_AS_STRING(batch)), places, count, end, length)
    else:
        batch = bytearray(length)
        _write_frame(memoryview(batch), places, count, end, length)
    return batch


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def finish(p: cython.p_uchar, places: cython.p_const_longlong, count: cython.Py_ssize_t) -> cython.void:
    """Write the header fields that depend on the columns, and both checksums.

    Call it after the columns were written.
    """
    last: cython.longlong
    address_span: cython.longlong = 10 * count + places[3] - flagged(p, places[20], count, 1)
    offset_span: cython.longlong = count
    if places[50] >= 0:
        last = places[0] + 4 * count
        address_span = load_u32(p, places[52] + 4 * count - 4) + 10 + load_i32(p, last) - load_i32(p, last - 4)
        if places[20] >= 0:
            address_span -= p[places[20] + count - 1] & 1
        offset_span = 1 + cython.cast(cython.longlong, load_u32(p, places[50] + 4 * count - 4))
        store_u32(p, 8, load_u32(p, 8) | 8)
    store_u32(p, 80, address_span)
    store_u32(p, 84, offset_span)
    store_u64(p, 88, xxh64_raw(p, _HEADER_BYTES, load_u32(p, 72)))
    seal_header(p, 0)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _measure(
    source_size: cython.longlong,
    spans: cython.p_const_uchar,
    span_count: cython.Py_ssize_t,
    rows: cython.p_const_uchar,
    count: cython.Py_ssize_t,
    places: cython.p_longlong,
) -> cython.Py_ssize_t:
    """Compute the sizes of the key and value columns for the selected records.

    Returns -1, or the number of the first record that does not exist or extends beyond the source.
    """
    key_bytes: cython.longlong = 0
    value_bytes: cython.longlong = 0
    key_nulls: cython.Py_ssize_t = 0
    value_nulls: cython.Py_ssize_t = 0
    row: cython.Py_ssize_t
    position: cython.longlong
    length: cython.longlong
    i: cython.Py_ssize_t
    for i in range(count):
        row = load_i32(rows, 4 * i) if rows else i
        if row < 0 or row >= span_count:
            return i
        position = load_i64(spans, _SPAN_BYTES * row)
        length = load_i64(spans, _SPAN_BYTES * row + 8)
        if length == -1:
            key_nulls += 1
        elif position < 0 or length < 0 or length > source_size or position > source_size - length:
            return i
        else:
            key_bytes += length
        position = load_i64(spans, _SPAN_BYTES * row + 16)
        length = load_i64(spans, _SPAN_BYTES * row + 24)
        if length == -1:
            value_nulls += 1
        elif position < 0 or length < 0 or length > source_size or position > source_size - length:
            return i
        else:
            value_bytes += length
    places[1] = 4 * count + 4
    places[3] = value_bytes
    if value_nulls > 0:
        places[5] = (count + 7) >> 3
    if key_nulls < count:
        places[7] = 4 * count + 4
        places[9] = key_bytes
        if key_nulls > 0:
            places[11] = (count + 7) >> 3
    return -1


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill(
    p: cython.p_uchar,
    source: cython.p_const_uchar,
    spans: cython.p_const_uchar,
    rows: cython.p_const_uchar,
    count: cython.Py_ssize_t,
    offsets_at: cython.Py_ssize_t,
    bytes_at: cython.Py_ssize_t,
    validity_at: cython.Py_ssize_t,
) -> cython.void:
    """Copy the key or the value of every selected record into its columns.

    ``spans`` points at the (position, length) pairs of the keys or of the values.
    """
    row: cython.Py_ssize_t
    length: cython.longlong
    end: cython.Py_ssize_t = 0
    i: cython.Py_ssize_t
    if validity_at >= 0:
        clear(p, validity_at, (count + 7) >> 3)
    store_u32(p, offsets_at, 0)
    for i in range(count):
        row = load_i32(rows, 4 * i) if rows else i
        length = load_i64(spans, _SPAN_BYTES * row + 8)
        if length >= 0:
            move(p, bytes_at + end, source, load_i64(spans, _SPAN_BYTES * row), length)
            end += length
            if validity_at >= 0:
                p[validity_at + (i >> 3)] |= 1 << (i & 7)
        store_u32(p, offsets_at + 4 * i + 4, end)


@cython.cfunc
def _any_flag(
    flags: Lent, rows: cython.p_const_uchar, span_count: cython.Py_ssize_t, count: cython.Py_ssize_t
) -> cython.bint:
    i: cython.Py_ssize_t
    if flags.size != span_count:
        raise ValueError(f"one flag per span is needed flags={flags.size} spans={span_count}")
    seen: cython.int = 0
    for i in range(count):
        seen |= flags.p[load_i32(rows, 4 * i) if rows else i]
    return seen != 0


def from_spans(
    source: Buffer,
    spans: Lendable,
    rows: Lendable | None = None,
    record_flags: Buffer | None = None,
    *,
    columns: Mapping[int, Lendable] | None = None,
    producer_epoch: int = -1,
    base_sequence: int = 0,
) -> bytearray:
    """Build a batch from payloads inside ``source``.

    Args:
        spans: i64 array, four numbers per record: position and length of key and value. A length of -1 is null.
        rows: i32 array of the records to use, in this order. By default all are used.
        record_flags: u8 array, one per span (not per row).
        columns: additional columns, with one entry per row. They cannot be keys, values or record flags.

    Raises ValueError for a row or span out of range, and Invalid as ``allocate`` or for a column that does not fit.
    """
    lent_source: Lent = lend(source)
    lent_spans: Lent = lend(spans)
    lent_rows: Lent = lent_spans
    lent_flags: Lent = lent_spans
    span_count: cython.Py_ssize_t = lent_spans.size // _SPAN_BYTES
    count: cython.Py_ssize_t = span_count
    i: cython.Py_ssize_t
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
        p_rows: cython.p_uchar = cython.NULL
    else:
        places = [0] * 54
        p_rows = None
    for i in range(_COLUMN_COUNT):
        places[2 * i + 1] = -1
    if rows is not None:
        lent_rows = lend(rows)
        count = lent_rows.size // 4
        p_rows = lent_rows.p
    i = _measure(lent_source.size, lent_spans.p, span_count, p_rows, count, places)
    if i >= 0:
        raise ValueError(f"row or span out of range record={i} spans={span_count} source={lent_source.size}")
    if record_flags is not None:
        lent_flags = lend(record_flags)
        if _any_flag(lent_flags, p_rows, span_count, count):
            places[21] = count
    if columns:
        _measure_further(columns, places)
    batch = allocate(places, count)
    target: Lent = lend_writable(batch)
    _fill_both(target, lent_source, lent_spans, p_rows, count, places)
    if places[20] >= 0:
        for i in range(count):
            target.p[places[20] + i] = lent_flags.p[load_i32(p_rows, 4 * i) if p_rows else i]
    if columns:
        _fill_further(target, columns, count, places)
        store_i64(target.p, 56, producer_epoch)
        store_u64(target.p, 64, base_sequence)
    finish(target.p, places, count)
    return batch


@cython.cfunc
def _measure_further(columns: object, places: cython.p_longlong) -> cython.void:
    """Add the sizes of additional columns to ``places``. Raises ValueError for key, value and record flag columns."""
    i: cython.Py_ssize_t
    lent: Lent
    for column, data in columns.items():  # type: ignore[attr-defined]
        i = column
        if i < 6 or i == 10 or i >= _COLUMN_COUNT:
            raise ValueError(f"column is made from spans, so it cannot be passed as well column={column}")
        lent = lend(data)
        places[2 * i + 1] = lent.size


@cython.cfunc
def _fill_further(
    target: Lent, columns: object, count: cython.Py_ssize_t, places: cython.p_const_longlong
) -> cython.void:
    i: cython.Py_ssize_t
    rule: cython.int
    lent: Lent
    for column, data in columns.items():  # type: ignore[attr-defined]
        i = column
        lent = lend(data)
        move(target.p, places[2 * i], lent.p, 0, lent.size)
    rule = sizes_fit(target.p, places, count)
    if rule >= 0:
        raise _misfit(rule, count)


def _misfit(column: int, records: int) -> Invalid:
    name = Column(column).name.lower()
    return Invalid(
        ErrorCode.INVALID_BATCH,
        f"a column has the wrong size (or a column that it needs is absent) column={name} records={records}",
    )


@cython.cfunc
def _fill_both(
    target: Lent,
    source: Lent,
    spans: Lent,
    rows: cython.p_const_uchar,
    count: cython.Py_ssize_t,
    places: cython.p_const_longlong,
) -> cython.void:
    if cython.compiled:
        _fill(target.p, source.p, spans.p + 16, rows, count, places[0], places[2], places[4])
        if places[6] >= 0:
            _fill(target.p, source.p, spans.p, rows, count, places[6], places[8], places[10])
    else:
        _fill(target.p, source.p, spans.p[16:], rows, count, places[0], places[2], places[4])
        if places[6] >= 0:
            _fill(target.p, source.p, spans.p, rows, count, places[6], places[8], places[10])


def from_columns(
    columns: Mapping[int, Lendable] | Mapping[Column, Lendable],
    record_count: int,
    *,
    producer_epoch: int = -1,
    base_sequence: int = 0,
) -> bytearray:
    """Build a batch from ready-made columns by ``Column`` number. Each column is copied once.

    The sizes of the columns are checked, and whether columns that require each other are all present. Their content is
    not checked: call ``validate`` afterwards if they come from outside.

    Raises:
        Invalid: INVALID_BATCH: a column does not fit. RECORD_TOO_LARGE: above the largest batch.
    """
    count: cython.Py_ssize_t = record_count
    i: cython.int
    rule: cython.int
    lent: Lent
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    lents: list[Lent | None] = []
    for i in range(_COLUMN_COUNT):
        column = columns.get(i)  # type: ignore[call-overload, unused-ignore]  # a Column is an int
        places[2 * i + 1] = -1
        if column is None:
            lents.append(None)
            continue
        lent = lend(column)
        lents.append(lent)
        places[2 * i + 1] = lent.size
    batch = allocate(places, count)
    target: Lent = lend_writable(batch)
    for i in range(_COLUMN_COUNT):
        if places[2 * i] >= 0:
            lent = cython.cast(Lent, lents[i]) if cython.compiled else lents[i]  # type: ignore[assignment, redundant-expr]
            move(target.p, places[2 * i], lent.p, 0, lent.size)
    rule = sizes_fit(target.p, places, count)
    if rule >= 0:
        raise _misfit(rule, count)
    store_i64(target.p, 56, producer_epoch)
    store_u64(target.p, 64, base_sequence)
    finish(target.p, places, count)
    return batch
