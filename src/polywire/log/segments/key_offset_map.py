"""A table with the newest offset of each key, for compaction.

A key is identified by 128 bits: XXH64, CRC-32 and length. The table has a fixed size. Functions release the GIL while
they process a batch. Batches must have been validated.
"""

from __future__ import annotations

from array import array

import cython

from polywire.records.allocation import allocate
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.checksum import crc32_raw, xxh64_raw
    from cython.cimports.polywire.records.fields import load_append_time_us, load_base_offset, load_record_count
    from cython.cimports.polywire.records.header import fill_layout
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        load_u64,
        store_i64,
        store_u32,
        store_u64,
    )
else:
    from polywire.records.checksum import crc32_raw, xxh64_raw
    from polywire.records.fields import load_append_time_us, load_base_offset, load_record_count
    from polywire.records.header import fill_layout
    from polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        load_u64,
        store_i64,
        store_u32,
        store_u64,
    )

_SLOT_BYTES = cython.declare(cython.Py_ssize_t, 24)  # u64 XXH64, u64 CRC-32 and length, i64 offset + 1 (0: free)

NOTED_ALL = -1
COMPRESSED = -1  # result for a batch that must be decompressed before its records can be counted


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _slot_of(
    table: cython.p_const_uchar, mask: cython.longlong, first: cython.ulonglong, second: cython.ulonglong
) -> cython.Py_ssize_t:
    """Return the position of the key's slot or, if the key is unknown, of the free slot for it."""
    at: cython.longlong = first & mask
    while load_i64(table, at * _SLOT_BYTES + 16) != 0:
        if load_u64(table, at * _SLOT_BYTES) == first and load_u64(table, at * _SLOT_BYTES + 8) == second:
            break
        at = (at + 1) & mask
    return at * _SLOT_BYTES


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _present(
    p: cython.p_const_uchar, columns: cython.p_const_longlong, bits: cython.int, index: cython.longlong
) -> cython.bint:
    """Return whether a payload is not null. ``columns[bits]`` is the position of its validity column."""
    return columns[bits] < 0 or ((p[columns[bits] + (index >> 3)] >> (index & 7)) & 1) != 0


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _find(
    table: cython.p_const_uchar,
    mask: cython.longlong,
    p: cython.p_const_uchar,
    columns: cython.p_const_longlong,
    index: cython.longlong,
    identity: cython.p_ulonglong,
) -> cython.Py_ssize_t:
    """Return the slot of a record's key, and write the 128 bits that identify the key to ``identity``."""
    at: cython.Py_ssize_t = columns[8] + load_i32(p, columns[6] + 4 * index)
    size: cython.Py_ssize_t = columns[8] + load_i32(p, columns[6] + 4 * index + 4) - at
    first: cython.ulonglong = xxh64_raw(p, at, size)
    second: cython.ulonglong = cython.cast(cython.ulonglong, crc32_raw(p, at, size)) << 32 | size
    identity[0] = first
    identity[1] = second
    return _slot_of(table, mask, first, second)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _note(
    table: cython.p_uchar,
    mask: cython.longlong,
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    columns: cython.p_longlong,
) -> cython.longlong:
    """Add the keys of one batch to the table. Return the number of new keys."""
    found: cython.longlong = 0
    base: cython.longlong = load_base_offset(p, at)
    count: cython.longlong = load_record_count(p, at)
    index: cython.longlong
    slot: cython.Py_ssize_t
    if cython.compiled:
        identity = cython.declare(cython.ulonglong[2])
    else:
        identity = [0, 0]
    for index in range(count if columns[6] >= 0 else 0):
        if not _present(p, columns, 10, index):
            continue
        slot = _find(table, mask, p, columns, index, identity)
        found += load_i64(table, slot + 16) == 0
        store_u64(table, slot, identity[0])
        store_u64(table, slot + 8, identity[1])
        store_i64(table, slot + 16, 1 + base + (load_u32(p, columns[50] + 4 * index) if columns[50] >= 0 else index))
    return found


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _is_retained(
    table: cython.p_const_uchar,
    mask: cython.longlong,
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    columns: cython.p_const_longlong,
    index: cython.longlong,
    limits: cython.p_const_longlong,
    identity: cython.p_ulonglong,
) -> cython.bint:
    """Return whether compaction retains a record.

    ``limits`` is (end of the offsets whose keys are in the table, time). A null older than that time is removed even if
    it is the newest record of its key.
    """
    offset: cython.longlong
    slot: cython.Py_ssize_t
    if columns[6] < 0 or not _present(p, columns, 10, index):
        return True
    offset = load_base_offset(p, at) + (load_u32(p, columns[50] + 4 * index) if columns[50] >= 0 else index)
    slot = _find(table, mask, p, columns, index, identity)
    if load_i64(table, slot + 16) > offset + 1:
        return False
    return offset >= limits[0] or load_append_time_us(p, at) >= limits[1] or _present(p, columns, 4, index)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _retained_rows(
    table: cython.p_const_uchar,
    mask: cython.longlong,
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    columns: cython.p_const_longlong,
    limits: cython.p_const_longlong,
    rows: cython.p_uchar,
    rows_at: cython.Py_ssize_t,
) -> cython.longlong:
    """Count the records of one batch that compaction retains.

    Write their indexes (u32) to ``rows``, unless ``rows_at`` < 0.
    """
    found: cython.longlong = 0
    index: cython.longlong
    if cython.compiled:
        identity = cython.declare(cython.ulonglong[2])
    else:
        identity = [0, 0]
    for index in range(load_record_count(p, at)):
        if _is_retained(table, mask, p, at, columns, index, limits, identity):
            if rows_at >= 0:
                store_u32(rows, rows_at + 4 * found, index)
            found += 1
    return found


@cython.final
@cython.cclass
class KeyOffsetMap:
    """Hash table from key to newest offset, for compaction. It is full when three quarters of its slots are used."""

    if cython.compiled:
        _table: Lent
        _mask: cython.longlong
        _count: cython.longlong
    else:
        __slots__ = ("_count", "_mask", "_table")

    def __init__(self, slot_count: int) -> None:
        assert slot_count & (slot_count - 1) == 0, "a power of two"
        self._table = lend_writable(
            memoryview(allocate(slot_count * 24, mapped_bytes_min=0))
        )  # anonymous mapping: pages are zeroed when first touched
        self._mask = slot_count - 1
        self._count = 0

    def note(self, chunk: Buffer) -> int:
        """Add the keys of batches, which are back to back and in offset order.

        Returns NOTED_ALL, or the position of the first batch that was not added. That batch is compressed, or the table
        may be too small for its keys.
        """
        lent: Lent = lend(chunk)
        table: Lent = self._table
        at: cython.Py_ssize_t = 0
        length: cython.Py_ssize_t
        if cython.compiled:
            columns = cython.declare(cython.longlong[54])
        else:
            columns = [0] * 54
        with cython.nogil:
            while at < lent.size:
                length = fill_layout(lent.p, at, lent.size, columns)
                if length < 0 or 4 * (self._count + load_record_count(lent.p, at)) > 3 * self._mask:
                    break
                self._count += _note(table.p, self._mask, lent.p, at, columns)
                at += length
        return at if at < lent.size else NOTED_ALL

    def count_kept(self, chunk: Buffer, positions: array[int], *, noted_end: int, null_time_us: int) -> array[int]:
        """Return for each batch the number of records to retain, as an i64 array.

        It is COMPRESSED for a compressed batch.

        Args:
            chunk: whole batches.
            positions: positions of the batches.
            noted_end: end of the offsets whose keys are in the table.
            null_time_us: a null older than this is removed even if it is the newest record of its key.
        """
        lent: Lent = lend(chunk)
        table: Lent = self._table
        starts: Lent = lend(memoryview(positions))
        counts: array[int] = array("q", bytes(8 * len(positions)))
        target: Lent = lend_writable(memoryview(counts))
        number: cython.Py_ssize_t
        batch_count: cython.Py_ssize_t = starts.size // 8
        at: cython.Py_ssize_t
        kept: cython.longlong
        if cython.compiled:
            columns = cython.declare(cython.longlong[54])
            limits = cython.declare(cython.longlong[2])
        else:
            columns, limits = [0] * 54, [0, 0]
        limits[0] = noted_end
        limits[1] = null_time_us
        with cython.nogil:
            for number in range(batch_count):
                at = load_i64(starts.p, number * 8)
                kept = -1
                if fill_layout(lent.p, at, lent.size, columns) >= 0:
                    kept = _retained_rows(table.p, self._mask, lent.p, at, columns, limits, target.p, -1)
                store_i64(target.p, number * 8, kept)
        return counts

    def rows_kept(self, batch: Buffer, *, noted_end: int, null_time_us: int) -> array[int]:
        """Return the indexes (i32) of the records to retain in one uncompressed batch.

        Args:
            noted_end: end of the offsets whose keys are in the table.
            null_time_us: a null older than this is removed even if it is the newest record of its key.
        """
        lent: Lent = lend(batch)
        table: Lent = self._table
        found: cython.Py_ssize_t
        if cython.compiled:
            columns = cython.declare(cython.longlong[54])
            limits = cython.declare(cython.longlong[2])
        else:
            columns, limits = [0] * 54, [0, 0]
        if fill_layout(lent.p, 0, lent.size, columns) < 0:
            raise ValueError("batch is truncated or compressed")
        limits[0] = noted_end
        limits[1] = null_time_us
        count: cython.longlong = load_record_count(lent.p, 0)
        rows: bytearray = bytearray(4 * count)
        target: Lent = lend_writable(rows)
        with cython.nogil:
            found = _retained_rows(table.p, self._mask, lent.p, 0, columns, limits, target.p, 0)
        return array("i", bytes(rows[: 4 * found]))
