"""Read one header of all records of a stored batch as a number (decision 0142).

No Python object is created per record, because a queue reads the headers of all its records on the event loop.
"""

from __future__ import annotations

from array import array
from typing import Final

import cython

from polywire.errors import ErrorCode, Invalid
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.header import fill_layout
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        store_i64,
    )
else:
    from polywire.records.header import fill_layout
    from polywire.records.memory import Lent, lend, lend_writable, load_i32, load_i64, load_u32, store_i64

ABSENT: Final = -1
"""The record does not have the header."""
NO_NUMBER: Final = -2
"""The value is not a number of up to 18 digits."""

_NONE: Final = array("q")
_ABSENT = cython.declare(cython.longlong, -1)
_NO_NUMBER = cython.declare(cython.longlong, -2)
_DIGITS_MAX = cython.declare(cython.Py_ssize_t, 18)
_INT64 = cython.declare(cython.int, 7)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _matches(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, key: cython.p_const_uchar, size: cython.Py_ssize_t
) -> cython.bint:
    i: cython.Py_ssize_t
    for i in range(size):  # noqa: SIM110 - compiled, this is a plain loop
        if p[at + i] != key[i]:
            return False
    return True


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _has_key(
    p: cython.p_const_uchar, places: cython.p_const_longlong, key: cython.p_const_uchar, size: cython.Py_ssize_t
) -> cython.bint:
    """Return whether any record of a batch has a header with this key."""
    header: cython.Py_ssize_t
    start: cython.Py_ssize_t = 0
    end: cython.Py_ssize_t
    for header in range(places[25]):
        end = load_i32(p, places[26] + 4 * header + 4)
        if end - start == size and start >= 0 and end <= places[29] and _matches(p, places[28] + start, key, size):
            return True
        start = end
    return False


def batches_with(chunk: Buffer, key: bytes, other_key: bytes) -> array[int]:
    """Return the positions (i64) of those consecutive batches that may have a header with one of two keys.

    A compressed batch with headers may have it.
    """
    lent: Lent = lend(chunk)
    at: cython.Py_ssize_t = 0
    length: cython.Py_ssize_t
    while lent.size - at >= 104 and not load_u32(lent.p, at + 12) >> 11 & 1:
        length = load_u32(lent.p, at + 4)
        at = at + length if length >= 104 else lent.size
    if lent.size - at < 104:
        return _NONE
    name: Lent = lend(key)
    other: Lent = lend(other_key)
    found = array("q")
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    while lent.size - at >= 104:
        length = load_u32(lent.p, at + 4)
        if load_u32(lent.p, at + 12) >> 11 & 1 and (
            fill_layout(lent.p, at, lent.size, places) < 0
            or _has_key(lent.p, places, name.p, name.size)
            or _has_key(lent.p, places, other.p, other.size)
        ):
            found.append(at)
        if length < 104:
            break
        at += length
    return found


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _number(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t, kind: cython.int
) -> cython.longlong:
    number: cython.longlong = 0
    i: cython.Py_ssize_t
    if kind == _INT64 and size == 8:
        number = load_i64(p, at)
        return number if number >= 0 else _NO_NUMBER
    if size == 0 or size > _DIGITS_MAX:
        return _NO_NUMBER
    for i in range(size):
        if p[at + i] < 48 or p[at + i] > 57:
            return _NO_NUMBER
        number = number * 10 + (p[at + i] - 48)
    return number


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    count: cython.Py_ssize_t,
    key: cython.p_const_uchar,
    key_size: cython.Py_ssize_t,
    out: cython.p_uchar,
) -> cython.Py_ssize_t:
    """Write the number of each record to ``out``. Return how many records have the header, or -1 for a bad batch."""
    found: cython.Py_ssize_t = 0
    number: cython.longlong
    row: cython.Py_ssize_t
    header: cython.Py_ssize_t
    start: cython.Py_ssize_t
    end: cython.Py_ssize_t = load_i32(p, places[22])
    total: cython.Py_ssize_t = places[25]
    key_start: cython.Py_ssize_t
    key_end: cython.Py_ssize_t
    value_start: cython.Py_ssize_t
    value_end: cython.Py_ssize_t
    for row in range(count):
        start = end
        end = load_i32(p, places[22] + 4 * row + 4)
        number = _ABSENT
        if start < 0 or end < start or end > total:
            return -1
        for header in range(start, end):
            key_start = load_i32(p, places[26] + 4 * header)
            key_end = load_i32(p, places[26] + 4 * header + 4)
            if key_end - key_start != key_size or key_start < 0 or key_end > places[29]:
                continue
            if p[places[30] + header] == 0 or not _matches(p, places[28] + key_start, key, key_size):
                continue
            value_start = load_i32(p, places[32] + 4 * header)
            value_end = load_i32(p, places[32] + 4 * header + 4)
            if value_start < 0 or value_end < value_start or value_end > places[35]:
                return -1
            number = _number(p, places[34] + value_start, value_end - value_start, p[places[30] + header])
        if number != _ABSENT:
            found += 1
        store_i64(out, 8 * row, number)
    return found


def header_numbers(batch: Buffer, key: bytes) -> array[int] | None:
    """Return the value of each record's last header with this key, as i64. None if no record has one.

    A missing header, or one that is null, is ABSENT. A value that is not a number is NO_NUMBER.

    Raises:
        Invalid: INVALID_BATCH: the batch is truncated or compressed.
    """
    lent: Lent = lend(batch)
    name: Lent = lend(key)
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    if fill_layout(lent.p, 0, lent.size, places) < 0:
        raise Invalid(ErrorCode.INVALID_BATCH, f"batch is truncated or compressed size={lent.size}")
    count: cython.Py_ssize_t = load_u32(lent.p, 28)
    if places[22] < 0:
        return None
    if places[23] != 4 * count + 4 or places[25] < 0:
        raise Invalid(ErrorCode.INVALID_BATCH, f"headers do not match the number of records records={count}")
    out = array("q", bytes(8 * count))
    target: Lent = lend_writable(out)
    found: cython.Py_ssize_t = _fill(lent.p, places, count, name.p, name.size, target.p)
    if found < 0:
        raise Invalid(ErrorCode.INVALID_BATCH, "headers exceed the batch")
    return out if found else None
