"""Find one record in a stored batch, or return the payloads of all records (decision 0101).

The functions create no Python object per record. Batches must have been validated.
"""

from __future__ import annotations

from array import array

import cython

from polywire.errors import ErrorCode, Invalid
from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.check import flagged
    from cython.cimports.polywire.records.header import fill_layout
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_u32,
        load_u64,
        store_i64,
    )
else:
    from polywire.records.check import flagged
    from polywire.records.header import fill_layout
    from polywire.records.memory import Lent, lend, lend_writable, load_i32, load_u32, load_u64, store_i64


@cython.cfunc
def _require_layout(lent: Lent, at: cython.Py_ssize_t, places: cython.p_longlong) -> cython.Py_ssize_t:
    """Find the columns of a batch and return the number of records. Raises Invalid if it is truncated or compressed."""
    if at < 0 or fill_layout(lent.p, at, lent.size, places) < 0:
        raise Invalid(ErrorCode.INVALID_BATCH, f"batch is truncated or compressed position={at} size={lent.size}")
    count: cython.Py_ssize_t = load_u32(lent.p, at + 28)
    if places[1] != 4 * count + 4:
        raise Invalid(
            ErrorCode.INVALID_BATCH, f"offset deltas do not match the number of records position={at} records={count}"
        )
    return count


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _delta(p: cython.p_const_uchar, places: cython.p_const_longlong, index: cython.Py_ssize_t) -> cython.longlong:
    """Return the distance in bytes, in Kafka 0.7's format, from the batch's first record to record ``index``.

    If ``index`` is the record count, return the distance to the end of the batch.
    """
    if places[52] >= 0:
        return load_u32(p, places[52] + 4 * index)
    return 10 * index + load_i32(p, places[0] + 4 * index) - flagged(p, places[20], index, 1)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def first_row(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    base: cython.longlong,
    count: cython.Py_ssize_t,
    wanted: cython.longlong,
) -> cython.Py_ssize_t:
    """Return the index of the first record at or after offset ``wanted``, or ``count`` if there is none."""
    low: cython.Py_ssize_t = 0
    high: cython.Py_ssize_t = count
    middle: cython.Py_ssize_t
    if wanted <= base:
        return 0
    if places[50] < 0:
        return wanted - base if wanted - base < count else count
    while low < high:
        middle = (low + high) >> 1
        if base + load_u32(p, places[50] + 4 * middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def address_of(batch: Buffer, index: int) -> int:
    """Return the offset of record ``index`` in Kafka 0.7: its byte position in the partition's messages.

    Raises IndexError if the record does not exist.
    """
    lent: Lent = lend(batch)
    i: cython.Py_ssize_t = index
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    count: cython.Py_ssize_t = _require_layout(lent, 0, places)
    if i < 0 or i >= count:
        raise IndexError(f"no such record index={index} records={count}")
    return load_u64(lent.p, 40) + _delta(lent.p, places, i)


def offset_of(batch: Buffer, index: int) -> int:
    """Return the offset of record ``index``. Raises IndexError if it does not exist."""
    lent: Lent = lend(batch)
    i: cython.Py_ssize_t = index
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    count: cython.Py_ssize_t = _require_layout(lent, 0, places)
    if i < 0 or i >= count:
        raise IndexError(f"no such record index={index} records={count}")
    return load_u64(lent.p, 32) + (load_u32(lent.p, places[50] + 4 * i) if places[50] >= 0 else i)


def record_at_address(batch: Buffer, address: int, *, covering: bool = False) -> int:
    """Return the index of the record that begins at a byte position, its offset in Kafka 0.7, or -1.

    Args:
        batch: a validated batch.
        address: byte position in the partition.
        covering: also accept a byte position inside a record. If compaction removed the record, the result is the next
            one.
    """
    lent: Lent = lend(batch)
    low: cython.Py_ssize_t = 0
    middle: cython.Py_ssize_t
    delta: cython.longlong
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    count: cython.Py_ssize_t = _require_layout(lent, 0, places)
    high: cython.Py_ssize_t = count
    distance = address - load_u64(lent.p, 40)
    if distance < 0 or distance >= load_u32(lent.p, 80):
        return -1
    wanted: cython.longlong = distance
    while low < high:
        middle = (low + high) >> 1
        delta = _delta(lent.p, places, middle)
        if delta == wanted:
            return middle
        if delta < wanted:
            low = middle + 1
        else:
            high = middle
    if not covering:
        return -1
    if low > 0:  # low is the first record beyond the address, so the one before begins below it
        delta = 10 + load_i32(lent.p, places[0] + 4 * low) - load_i32(lent.p, places[0] + 4 * low - 4)
        if places[20] >= 0:
            delta -= lent.p[places[20] + low - 1] & 1
        if wanted < _delta(lent.p, places, low - 1) + delta:
            return low - 1
    return low if low < count else -1


def record_at_offset(batch: Buffer, offset: int) -> int:
    """Return the index of the first record at or after ``offset``, or the record count if there is none."""
    lent: Lent = lend(batch)
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    count: cython.Py_ssize_t = _require_layout(lent, 0, places)
    distance = offset - load_u64(lent.p, 32)
    if distance <= 0:
        return 0
    if distance >= load_u32(lent.p, 84):
        return count
    wanted: cython.longlong = distance
    return first_row(lent.p, places, 0, count, wanted)


def longest_payload(batch: Buffer) -> int:
    """Return the size in bytes of the longest key or value."""
    lent: Lent = lend(batch)
    i: cython.Py_ssize_t
    length: cython.longlong
    longest: cython.longlong = 0
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    count: cython.Py_ssize_t = _require_layout(lent, 0, places)
    keyed: cython.bint = places[6] >= 0 and places[7] == 4 * count + 4
    for i in range(count):
        length = load_i32(lent.p, places[0] + 4 * i + 4) - load_i32(lent.p, places[0] + 4 * i)
        if length > longest:
            longest = length
        if keyed:
            length = load_i32(lent.p, places[6] + 4 * i + 4) - load_i32(lent.p, places[6] + 4 * i)
            if length > longest:
                longest = length
    return longest


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_spans(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    first: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    offsets: cython.int,
    validity: cython.int,
    spans: cython.p_uchar,
    spans_at: cython.Py_ssize_t,
) -> cython.void:
    """Write position and length of the key or value of records ``first`` to ``stop``.

    ``spans_at`` is 0 for keys, 16 for values.
    """
    offsets_at: cython.Py_ssize_t = places[2 * offsets]
    bytes_at: cython.Py_ssize_t = places[2 * offsets + 2]
    bits: cython.Py_ssize_t = places[2 * validity]
    start: cython.longlong
    i: cython.Py_ssize_t
    for i in range(first, stop):
        if offsets_at < 0 or (bits >= 0 and not (p[bits + (i >> 3)] >> (i & 7)) & 1):
            store_i64(spans, 32 * i + spans_at, 0)
            store_i64(spans, 32 * i + spans_at + 8, -1)
            continue
        start = load_i32(p, offsets_at + 4 * i)
        store_i64(spans, 32 * i + spans_at, bytes_at + start)
        store_i64(spans, 32 * i + spans_at + 8, load_i32(p, offsets_at + 4 * i + 4) - start)


def spans_of(batch: Buffer, at: int = 0) -> array[int]:
    """Return the positions and lengths of the keys and values of all records, as ``from_spans`` accepts it.

    The result is an i64 array with four numbers per record: key position, key length or -1, value position, value
    length or -1.
    """
    lent: Lent = lend(batch)
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    count: cython.Py_ssize_t = _require_layout(lent, at, places)
    spans = array("q", bytes(32 * count))
    target: Lent = lend_writable(spans)
    _fill_spans(lent.p, places, 0, count, 3, 5, target.p, 0)
    _fill_spans(lent.p, places, 0, count, 0, 2, target.p, 16)
    return spans


def fill_spans(batch: Buffer, spans: Lendable, first: int, stop: int) -> None:
    """Write the positions and lengths of the keys and values of records ``first`` to ``stop`` into a writable array.

    The array has the form that ``spans_of`` returns, with space for all records of the batch.

    Raises:
        IndexError: a record does not exist, or the array is too small.
    """
    lent: Lent = lend(batch)
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    count: cython.Py_ssize_t = _require_layout(lent, 0, places)
    target: Lent = lend_writable(spans)
    start: cython.Py_ssize_t = first
    end: cython.Py_ssize_t = stop
    if start < 0 or end < start or end > count or count > target.size // 32:
        raise IndexError((start, end))
    _fill_spans(lent.p, places, start, end, 3, 5, target.p, 0)
    _fill_spans(lent.p, places, start, end, 0, 2, target.p, 16)
