"""Where the keys and values of a batch lie, as the spans that every decoder hands over (decision 0001).

Promises: one compiled pass over a validated batch; four i64 a record. Must not know: partitions, frames.
"""

from __future__ import annotations

from array import array

import cython

from polywire.records.batch import layout
from polywire.records.columns import Column
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.memory import Lent, lend, lend_writable, load_i32, store_i64
else:
    from polywire.records.memory import Lent, lend, lend_writable, load_i32, store_i64


def spans_of(batch: Buffer) -> array[int]:
    """Spans of a batch's records into the batch itself; absent or null keys and values have the length -1.

    The batch must have been validated: its offsets are followed unchecked. Raises Invalid(INVALID_BATCH) when it is not whole.
    """
    places = layout(batch)
    count: cython.Py_ssize_t = places[2 * Column.VALUE_OFFSETS + 1] // 4 - 1
    spans = array("q", bytes(32 * count))
    source: Lent = lend(batch)
    target: Lent = lend_writable(spans)
    key = places[2 * Column.KEY_OFFSETS : 2 * Column.KEY_VALIDITY + 1 : 2]
    value = places[2 * Column.VALUE_OFFSETS : 2 * Column.VALUE_VALIDITY + 1 : 2]
    _fill(source, target, 0, count, key[0], key[1], key[2])
    _fill(source, target, 2, count, value[0], value[1], value[2])
    return spans


@cython.cfunc
def _fill(
    source: Lent,
    target: Lent,
    at: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    offsets: cython.Py_ssize_t,
    data: cython.Py_ssize_t,
    validity: cython.Py_ssize_t,
) -> cython.void:
    """Fill position and length of one column pair: ``offsets``, ``data`` and ``validity`` are places in the batch, -1 when absent."""
    row: cython.Py_ssize_t
    begin: cython.Py_ssize_t
    place: cython.Py_ssize_t
    for row in range(count):
        place = 8 * (4 * row + at)
        if offsets < 0 or (validity >= 0 and not (source.p[validity + (row >> 3)] >> (row & 7)) & 1):
            store_i64(target.p, place, 0)
            store_i64(target.p, place + 8, -1)
        else:
            begin = load_i32(source.p, offsets + 4 * row)
            store_i64(target.p, place, data + begin)
            store_i64(target.p, place + 8, load_i32(source.p, offsets + 4 * row + 4) - begin)
