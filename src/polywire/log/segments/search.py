"""Find a batch in a segment by offset, time or address: search its index entries, then batch headers.

The search is binary among index entries, and linear between two of them (64 KiB).
"""

from __future__ import annotations

from array import array
from typing import Final

import cython

from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.fields import (
        load_address_span,
        load_append_time_us,
        load_base_address,
        load_base_offset,
        load_length,
        load_offset_span,
    )
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i64,
        load_u32,
        load_u64,
        store_i64,
    )
else:
    from polywire.records.fields import (
        load_address_span,
        load_append_time_us,
        load_base_address,
        load_base_offset,
        load_length,
        load_offset_span,
    )
    from polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i64,
        load_u32,
        load_u64,
        store_i64,
    )

BY_OFFSET: Final = 0  # fields of a run's index entry, in stored order
BY_POSITION: Final = 1
BY_ADDRESS: Final = 2
BY_TIME: Final = 3

NO_END: Final = 0x7FFF_FFFF_FFFF_FFFF  # an end offset that no partition reaches

_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_MAGIC = cython.declare(cython.uint, 0x31425750)
_RUN_ENTRY_BYTES = cython.declare(cython.Py_ssize_t, 32)
_RUN_BYTES = cython.declare(cython.Py_ssize_t, 112)


# ---- walking headers ------------------------------------------------------------------------------------------------------------


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _batch_bytes(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the length of the batch at ``at``, or -1 if it is invalid or incomplete."""
    if at < 0 or at + _HEADER_BYTES > size or load_u32(p, at) != _MAGIC:
        return -1
    length: cython.Py_ssize_t = load_length(p, at)
    if length < _HEADER_BYTES or length % 8 != 0 or at + length > size:
        return -1
    return length


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _scan(
    p: cython.p_const_uchar, size: cython.Py_ssize_t, at: cython.Py_ssize_t, field: cython.int, key: cython.longlong
) -> cython.Py_ssize_t:
    """Return the position of the first batch whose ``field`` (see ``scan_to``) ends beyond ``key``.

    Returns ``size`` if there is none, or -1 if a batch is invalid.
    """
    while at < size:
        length: cython.Py_ssize_t = _batch_bytes(p, at, size)
        if length < 0:
            return -1
        reached: cython.longlong
        if field == 0:
            reached = load_base_offset(p, at) + load_offset_span(p, at)
        elif field == 1:
            reached = at + length
        elif field == 2:
            reached = load_base_address(p, at) + load_address_span(p, at)
        else:
            reached = load_append_time_us(p, at)
        if reached > key:
            return at
        at += length
    return size


def scan_to(chunk: Buffer, start: cython.Py_ssize_t, field: cython.int, key: cython.longlong) -> int:
    """Return the position of the first batch, from ``start`` on, that ends beyond ``key``.

    A batch must begin at ``start``. ``field`` selects what is compared with ``key``:

    * BY_OFFSET: the offset after the batch's last record.
    * BY_ADDRESS: the same as a byte position, Kafka 0.7's offset.
    * BY_POSITION: the position in ``chunk`` after the batch.
    * BY_TIME: the append time of the batch.

    Returns the chunk's size if there is no such batch, or -1 if a batch is invalid.
    """
    lent: Lent = lend(chunk)
    if start < 0:
        return -1
    return _scan(lent.p, lent.size, start, field, key)


def scan_to_offset(chunk: Buffer, offset: cython.longlong) -> int:
    """Return the position of the batch that contains ``offset``.

    Returns the chunk's size if the chunk ends below ``offset``, or -1 if a batch is invalid.
    """
    lent: Lent = lend(chunk)
    return _scan(lent.p, lent.size, 0, 0, offset)


def scan_read(
    chunk: Buffer, offset: cython.longlong, bytes_max: cython.longlong, offset_end: cython.longlong = NO_END
) -> tuple[int, int, int]:
    """Select the batches of a read from a chunk. Return (start, stop, offset after the last record).

    The selection begins with the batch that contains ``offset``, or the first one beyond it. Whole batches follow as
    long as they fit ``bytes_max`` and begin below ``offset_end``. If the chunk ends below ``offset``, start is the
    chunk's size. If a batch is invalid, start is -1.
    """
    lent: Lent = lend(chunk)
    p: cython.p_const_uchar = lent.p
    start: cython.Py_ssize_t = _scan(p, lent.size, 0, 0, offset)
    at: cython.Py_ssize_t = start
    next_offset: cython.longlong = offset
    while 0 <= at < lent.size:
        length: cython.Py_ssize_t = _batch_bytes(p, at, lent.size)
        if length < 0:
            return -1, -1, offset
        if at > start and (at + length - start > bytes_max or load_base_offset(p, at) >= offset_end):
            break
        next_offset = load_base_offset(p, at) + load_offset_span(p, at)
        at += length
    return start, at, next_offset


def split_batches(chunk: Buffer) -> tuple[array[int], array[int]]:
    """Return positions and lengths of the batches in a chunk, up to the first incomplete one.

    Both results are an ``array('q')``.
    """
    lent: Lent = lend(chunk)
    count: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = 0
    length: cython.Py_ssize_t = _batch_bytes(lent.p, 0, lent.size)
    while length > 0:
        count += 1
        at += length
        length = _batch_bytes(lent.p, at, lent.size)
    positions: array[int] = array("q", bytes(8 * count))
    lengths: array[int] = array("q", bytes(8 * count))
    starts: Lent = lend_writable(memoryview(positions))
    sizes: Lent = lend_writable(memoryview(lengths))
    at = 0
    index: cython.Py_ssize_t
    for index in range(count):
        length = _batch_bytes(lent.p, at, lent.size)
        store_i64(starts.p, index * 8, at)
        store_i64(sizes.p, index * 8, length)
        at += length
    return positions, lengths


# ---- tables of a segment's footer -----------------------------------------------------------------------------------------------


def find_entry(
    entries: Buffer, start: cython.Py_ssize_t, count: cython.Py_ssize_t, field: cython.int, key: cython.longlong
) -> int:
    """Return the last of index entries [start, start + count) whose value in ``field`` is at most ``key``, or -1.

    ``field`` is a BY_ constant. The result is relative to ``start``. Raises IndexError for an invalid range.
    """
    lent: Lent = lend(entries)
    if start < 0 or count < 0 or field < 0 or field > 3 or count > lent.size // 32 - start:
        raise IndexError((start, count, field))
    base: cython.Py_ssize_t = start * _RUN_ENTRY_BYTES + field * 8
    low: cython.Py_ssize_t = 0
    high: cython.Py_ssize_t = count
    while low < high:
        middle: cython.Py_ssize_t = (low + high) >> 1
        if load_i64(lent.p, base + middle * _RUN_ENTRY_BYTES) <= key:
            low = middle + 1
        else:
            high = middle
    return low - 1


def find_run(runs: Buffer, partition: cython.ulonglong) -> int:
    """Return the index of a partition's first entry in a segment's sorted footer.

    If there is none, return the index of the first entry of a higher partition, or the table's length.
    """
    lent: Lent = lend(runs)
    low: cython.Py_ssize_t = 0
    high: cython.Py_ssize_t = lent.size // _RUN_BYTES
    while low < high:
        middle: cython.Py_ssize_t = (low + high) >> 1
        if load_u64(lent.p, middle * _RUN_BYTES) < partition:
            low = middle + 1
        else:
            high = middle
    return low
