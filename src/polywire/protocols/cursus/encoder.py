"""Encode stored records as messages of a batch, or as single frames (spec: cursus#batch-layout, cursus#consume).

One call encodes all records of a read, without a Python object per record. A key or an event text that is too long for
the protocol is omitted.
"""

from __future__ import annotations

from typing import Final

import cython

from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.fields import (
        load_base_offset,
        load_base_sequence,
        load_flags,
        load_producer_epoch,
        load_record_count,
    )
    from cython.cimports.polywire.records.header import fill_layout
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        move,
        store_i64,
    )
else:
    from polywire.records.fields import (
        load_base_offset,
        load_base_sequence,
        load_flags,
        load_producer_epoch,
        load_record_count,
    )
    from polywire.records.header import fill_layout
    from polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        move,
        store_i64,
    )

# The words (i64) in the state of ``put`` and ``put_values``.
START: Final = 0  # first requested offset
STOP: Final = 1  # end of the requested offsets
RECORDS_LEFT: Final = 2  # number of records that may still be written
BYTES_LEFT: Final = 3  # bytes of keys and values that may still be written; at least one record is written
POSITION: Final = 4  # position in the chunk at which to continue
ROW: Final = 5
AT: Final = 6  # number of bytes written so far
WRITTEN: Final = 7  # number of records written so far
FIRST: Final = 8  # sequence of the first record written
LAST: Final = 9  # sequence of the last record written
NEXT: Final = 10  # offset after the last record written or skipped
PUT_WORDS: Final = 11

DONE: Final = 0  # results of ``put``: all records of the chunk were written or skipped
FULL: Final = 1  # no more records are requested, or there is no space for another
COMPRESSED: Final = 2  # the batch at POSITION must be decompressed first

_KEY_MAX = cython.declare(cython.longlong, 65_535)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_u16(p: cython.p_uchar, at: cython.Py_ssize_t, x: cython.longlong) -> cython.void:
    p[at] = (x >> 8) & 255
    p[at + 1] = x & 255


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_u32(p: cython.p_uchar, at: cython.Py_ssize_t, x: cython.longlong) -> cython.void:
    p[at] = (x >> 24) & 255
    p[at + 1] = (x >> 16) & 255
    p[at + 2] = (x >> 8) & 255
    p[at + 3] = x & 255


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_u64(p: cython.p_uchar, at: cython.Py_ssize_t, x: cython.longlong) -> cython.void:
    _put_u32(p, at, x >> 32)
    _put_u32(p, at + 4, x)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _begins(p: cython.p_const_uchar, offsets: cython.longlong, row: cython.Py_ssize_t) -> cython.longlong:
    return 0 if offsets < 0 else load_i32(p, offsets + 4 * row)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _length(p: cython.p_const_uchar, offsets: cython.longlong, row: cython.Py_ssize_t) -> cython.longlong:
    return 0 if offsets < 0 else load_i32(p, offsets + 4 * row + 4) - load_i32(p, offsets + 4 * row)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _fits(
    p: cython.p_const_uchar, places: cython.p_const_longlong, column: cython.int, row: cython.Py_ssize_t
) -> cython.bint:
    """Return whether a text lies within the bytes of its column.

    Stored batches are checked when they are read, so that damage cannot cause reads out of bounds.
    """
    offsets: cython.longlong = places[2 * column]
    return offsets < 0 or (
        load_i32(p, offsets + 4 * row) >= 0
        and load_i32(p, offsets + 4 * row) <= load_i32(p, offsets + 4 * row + 4)
        and load_i32(p, offsets + 4 * row + 4) <= places[2 * column + 3]
    )


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _short(length: cython.longlong) -> cython.longlong:
    return length if length <= _KEY_MAX else 0


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_text(
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
    p: cython.p_const_uchar,
    place: cython.longlong,
    length: cython.longlong,
) -> cython.Py_ssize_t:
    _put_u16(out, at, length)
    move(out, at + 2, p, place, length)
    return at + 2 + length


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_message(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    batch: cython.Py_ssize_t,
    row: cython.Py_ssize_t,
    offset: cython.longlong,
    sequence: cython.longlong,
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Write one record as a message. Return the position after it. The caller must have checked the space."""
    epoch: cython.longlong = load_producer_epoch(p, batch)
    length: cython.longlong
    _put_u64(out, at, offset)
    _put_u64(out, at + 8, sequence)
    at = _put_text(out, at + 16, p, places[12], places[13] if places[12] >= 0 else 0)
    length = _short(_length(p, places[6], row))
    at = _put_text(out, at, p, places[8] + _begins(p, places[6], row), length)
    _put_u64(out, at, epoch if epoch > 0 else 0)
    length = _length(p, places[0], row)
    _put_u32(out, at + 8, length)
    move(out, at + 12, p, places[2] + _begins(p, places[0], row), length)
    at += 12 + length
    length = _short(_length(p, places[36], row))
    at = _put_text(out, at, p, places[38] + _begins(p, places[36], row), length)
    _put_u32(out, at, load_u32(p, places[40] + 4 * row) if places[40] >= 0 else 0)
    _put_u64(out, at + 4, load_i64(p, places[42] + 8 * row) if places[42] >= 0 else 0)
    length = _short(_length(p, places[44], row))
    return _put_text(out, at + 12, p, places[46] + _begins(p, places[44], row), length)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_rows(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    batch: cython.Py_ssize_t,
    state: cython.p_uchar,
    out: cython.p_uchar,
    size: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Write records from number ``state[5]`` on. Return DONE, FULL, -1 if invalid, or the bytes that the next needs."""
    count: cython.Py_ssize_t = load_record_count(p, batch)
    base: cython.longlong = load_base_offset(p, batch)
    row: cython.Py_ssize_t = load_i64(state, 40)
    at: cython.Py_ssize_t = load_i64(state, 48)
    written: cython.longlong = load_i64(state, 56)
    room: cython.longlong = load_i64(state, 16)
    payload: cython.longlong = load_i64(state, 24)
    code: cython.Py_ssize_t = 0
    offset: cython.longlong
    sequence: cython.longlong
    need: cython.longlong
    while row < count:
        offset = base + (row if places[50] < 0 else load_u32(p, places[50] + 4 * row))
        if offset >= load_i64(state, 8):
            code = 1
            break
        if offset < load_i64(state, 0):
            row += 1
            continue
        if not (_fits(p, places, 0, row) and _fits(p, places, 3, row)):
            code = -1
            break
        need = _length(p, places[0], row) + _short(_length(p, places[6], row))
        if room <= 0 or (need > payload and written > 0):
            code = 1
            break
        payload -= need
        need += 48 + (places[13] if places[12] >= 0 else 0)
        need += _short(_length(p, places[36], row)) + _short(_length(p, places[44], row))
        if need > size - at:
            code = need
            break
        sequence = 0
        if places[12] >= 0:
            sequence = load_i64(p, places[14] + 8 * row) if places[14] >= 0 else load_base_sequence(p, batch) + row
        at = _put_message(p, places, batch, row, offset, sequence, out, at)
        if written == 0:
            store_i64(state, 64, sequence)
        store_i64(state, 72, sequence)
        store_i64(state, 80, offset + 1)
        written += 1
        room -= 1
        store_i64(state, 24, payload)
        row += 1
    store_i64(state, 40, row)
    store_i64(state, 48, at)
    store_i64(state, 56, written)
    store_i64(state, 16, room)
    return code


def put(chunk: Buffer, state: Lendable, out: Buffer) -> int:
    """Write the records of a chunk of stored batches to ``out``, as messages of the current layout.

    Returns DONE, FULL, COMPRESSED, or the number of bytes that the next record needs. ``state`` has PUT_WORDS words:
    the range of offsets, limits and the position. START and STOP are not changed. Raises ValueError for invalid
    batches.
    """
    return _put_chunk(chunk, state, out, alone=False)


def put_values(chunk: Buffer, state: Lendable, out: Buffer) -> int:
    """Write the values of a chunk to ``out``, each as a frame (spec: cursus#consume-of-the-legacy-dialect).

    State and result are as for ``put``, but RECORDS_LEFT limits the number of bytes in ``out``. At least one value is
    written.
    """
    return _put_chunk(chunk, state, out, alone=True)


def _put_chunk(chunk: Buffer, state: Lendable, out: Buffer, *, alone: bool) -> int:
    source: Lent = lend(chunk)
    numbers: Lent = lend_writable(state)
    target: Lent = lend_writable(out)
    code: cython.Py_ssize_t = 0
    batch: cython.Py_ssize_t
    length: cython.Py_ssize_t
    if numbers.size < 88 or load_i64(numbers.p, 32) < 0 or load_i64(numbers.p, 40) < 0 or load_i64(numbers.p, 48) < 0:
        raise ValueError("state array has the wrong size")
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    while load_i64(numbers.p, 32) < source.size:
        batch = load_i64(numbers.p, 32)
        if source.size - batch >= 104 and load_flags(source.p, batch) & 6:
            return COMPRESSED
        length = fill_layout(source.p, batch, source.size, places)
        if length < 0 or places[1] != 4 * load_record_count(source.p, batch) + 4:
            raise ValueError(f"no readable batch position={batch}")
        if alone:
            code = _put_value_rows(source.p, places, batch, numbers.p, target.p, target.size)
        else:
            code = _put_rows(source.p, places, batch, numbers.p, target.p, target.size)
        if code < 0:
            raise ValueError(f"no readable record position={batch}")
        if code > 0:
            return code
        store_i64(numbers.p, 32, batch + length)
        store_i64(numbers.p, 40, 0)
    return DONE


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_value_rows(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    batch: cython.Py_ssize_t,
    state: cython.p_uchar,
    out: cython.p_uchar,
    size: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Write the values of one batch, beginning with record number ``state[5]``.

    Returns DONE, FULL, -1 for invalid data, or the number of bytes that the next value needs.
    """
    count: cython.Py_ssize_t = load_record_count(p, batch)
    base: cython.longlong = load_base_offset(p, batch)
    row: cython.Py_ssize_t = load_i64(state, 40)
    at: cython.Py_ssize_t = load_i64(state, 48)
    code: cython.Py_ssize_t = 0
    offset: cython.longlong
    length: cython.longlong
    while row < count:
        offset = base + (row if places[50] < 0 else load_u32(p, places[50] + 4 * row))
        if offset >= load_i64(state, 8):
            code = 1
            break
        if offset < load_i64(state, 0):
            row += 1
            continue
        if not _fits(p, places, 0, row):
            code = -1
            break
        length = _length(p, places[0], row)
        if load_i64(state, 56) > 0 and at + 4 + length > load_i64(state, 16):
            code = 1
            break
        if 4 + length > size - at:
            code = 4 + length
            break
        _put_u32(out, at, length)
        move(out, at + 4, p, places[2] + _begins(p, places[0], row), length)
        at += 4 + length
        row += 1
        store_i64(state, 56, load_i64(state, 56) + 1)
        store_i64(state, 80, offset + 1)
    store_i64(state, 40, row)
    store_i64(state, 48, at)
    return code
