"""Process many batches with one call: verify, summarize or copy them, or find batches to merge.

The batches may be anywhere in a buffer. Two arrays (``array("q")``) contain their positions and lengths. The functions
release the GIL for most of their work.
"""

from __future__ import annotations

from array import array
from typing import Final

import cython

from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.log.segments.streaming import copy_past_cache
    from cython.cimports.polywire.records.fields import (
        load_address_span,
        load_append_time_us,
        load_base_address,
        load_base_offset,
        load_columns,
        load_epoch,
        load_flags,
        load_length,
        load_offset_span,
        load_partition,
        load_producer_epoch,
        load_record_count,
    )
    from cython.cimports.polywire.records.header import body_matches, header_matches
    from cython.cimports.polywire.records.memory import Lent, lend, lend_writable, load_i64, load_u32, store_i64
else:
    from polywire.records.fields import (
        load_address_span,
        load_append_time_us,
        load_base_address,
        load_base_offset,
        load_columns,
        load_epoch,
        load_flags,
        load_length,
        load_offset_span,
        load_partition,
        load_producer_epoch,
        load_record_count,
    )
    from polywire.records.header import body_matches, header_matches
    from polywire.records.memory import Lent, lend, lend_writable, load_i64, load_u32, store_i64

INDEX_STRIDE_BYTES: Final = 64 * 1024  # one index entry per 64 KiB of a run (decision 0102)

_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_MAGIC = cython.declare(cython.uint, 0x31425750)
_STRIDE = cython.declare(cython.longlong, 65536)
_ENTRY_BYTES = cython.declare(cython.Py_ssize_t, 32)
# Smaller copies do not release the GIL, because acquiring it again may take longer than the copy.
_NOGIL_BYTES_MIN = cython.declare(cython.Py_ssize_t, 262_144)
SMALL_BYTES: Final = 32_768  # larger batches gain nothing from merging
_SMALL_BYTES = cython.declare(cython.Py_ssize_t, 32_768)
_PRODUCER_ID = cython.declare(cython.uint, 1 << 6)  # bit of the producer IDs in a batch's column flags

# State of a run during a survey: indexes into an array("q").
RUN_POSITION: Final = 0  # position of the next batch in the segment
RUN_LAST_ENTRY: Final = 1  # position of the last index entry; 64 KiB before the run if there is none
RUN_ENTRIES: Final = 2
RUN_FIRST_OFFSET: Final = 3  # -1 before the first batch
RUN_NEXT_OFFSET: Final = 4  # stays -1 if the batches have no offsets
RUN_FIRST_ADDRESS: Final = 5
RUN_NEXT_ADDRESS: Final = 6
RUN_FIRST_TIME: Final = 7
RUN_LAST_TIME: Final = 8
RUN_RECORDS: Final = 9
RUN_EPOCH: Final = 10  # -1 before the first batch
RUN_PARTITION: Final = 11  # expected in every header
RUN_STATE_COUNT: Final = 12


@cython.cclass
class _Pieces:
    """Byte ranges of one buffer, with raw pointers for the scans.

    Attributes:
        count: number of byte ranges.
    """

    if cython.compiled:
        base: Lent
        positions: Lent
        lengths: Lent
        count: cython.Py_ssize_t
    else:
        __slots__ = ("base", "count", "lengths", "positions")

    def __init__(self, base: Buffer, positions: array[int], lengths: array[int]) -> None:
        self.base = lend(base)
        self.positions = lend(memoryview(positions))
        self.lengths = lend(memoryview(lengths))
        self.count = min(self.positions.size, self.lengths.size) // 8


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _is_batch(
    p: cython.p_const_uchar, size: cython.Py_ssize_t, at: cython.longlong, length: cython.longlong
) -> cython.bint:
    return (
        at >= 0
        and length >= _HEADER_BYTES
        and length <= size - at
        and load_u32(p, at) == _MAGIC
        and load_length(p, at) == length
    )


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _verify(
    p: cython.p_const_uchar,
    size: cython.Py_ssize_t,
    starts: cython.p_const_uchar,
    sizes: cython.p_const_uchar,
    index: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    bytes_max: cython.longlong,
    copied_from: cython.longlong,
) -> cython.Py_ssize_t:
    while index < stop and bytes_max > 0:
        at: cython.longlong = load_i64(starts, index * 8)
        length: cython.longlong = load_i64(sizes, index * 8)
        if not _is_batch(p, size, at, length) or not header_matches(p, at, size):
            return -1 - index
        if length < copied_from:
            if not body_matches(p, at):
                return -1 - index
            bytes_max -= length
        index += 1
    return index


def verify(
    base: Buffer,
    positions: array[int],
    lengths: array[int],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    bytes_max: cython.longlong,
    copied_from: cython.longlong,
) -> int:
    """Verify the checksums of the batches at ranges [start, stop) of ``base``, up to about ``bytes_max`` bytes of bodies.

    The limit ensures that a copy still finds them in the CPU cache. Returns the index of the first range not verified,
    or -1 - n if the batches at range n are damaged.

    Args:
        copied_from: for batches of at least this many bytes only the header is verified, because they are copied with
            their existing checksum. They do not count towards the limit.

    Raises:
        IndexError: the range is invalid.
    """
    pieces: _Pieces = _Pieces(base, positions, lengths)
    p: Lent = pieces.base
    starts: Lent = pieces.positions
    sizes: Lent = pieces.lengths
    if start < 0 or stop > pieces.count:
        raise IndexError((start, stop))
    index: cython.Py_ssize_t
    with cython.nogil:
        index = _verify(p.p, p.size, starts.p, sizes.p, start, stop, bytes_max, copied_from)
    return index


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _copy_batches(
    source: cython.p_const_uchar,
    source_bytes: cython.Py_ssize_t,
    starts: cython.p_const_uchar,
    sizes: cython.p_const_uchar,
    stop: cython.Py_ssize_t,
    target: cython.p_uchar,
    target_bytes: cython.Py_ssize_t,
    cursor: cython.p_uchar,
) -> cython.bint:
    # the caller has checked the range; returns whether a piece is empty or outside ``source``
    index: cython.Py_ssize_t = load_i64(cursor, 0)
    skip: cython.longlong = load_i64(cursor, 8)
    at: cython.longlong = load_i64(cursor, 16)
    while index < stop and at < target_bytes:
        position: cython.longlong = load_i64(starts, index * 8)
        count: cython.longlong = load_i64(sizes, index * 8) - skip
        if position < 0 or position > source_bytes or count <= 0 or count > source_bytes - position - skip:
            return True
        if count > target_bytes - at:
            count = target_bytes - at
        if cython.compiled:
            copy_past_cache(target + at, source + position + skip, count)
        else:
            target[at : at + count] = source[position + skip : position + skip + count]
        at += count
        skip += count
        if skip == load_i64(sizes, index * 8):
            index += 1
            skip = 0
    store_i64(cursor, 0, index)
    store_i64(cursor, 8, skip)
    store_i64(cursor, 16, at)
    return False


def copy_batches(
    base: Buffer,
    positions: array[int],
    lengths: array[int],
    stop: cython.Py_ssize_t,
    out: Buffer,
    cursor: array[int],
) -> None:
    """Copy ranges of ``base`` back to back into ``out`` until it is full or range ``stop`` is reached.

    The copy bypasses the CPU cache, because a disk reads it before this processor does.

    Args:
        cursor: an ``array("q")`` of (next range, bytes of that range already copied, position in ``out``). Updated.

    Raises:
        IndexError: a range is empty or outside ``base``.
    """
    pieces: _Pieces = _Pieces(base, positions, lengths)
    source: Lent = pieces.base
    starts: Lent = pieces.positions
    sizes: Lent = pieces.lengths
    target: Lent = lend_writable(out)
    state: Lent = lend_writable(memoryview(cursor))
    if state.size != 24 or stop > pieces.count or min(cursor) < 0:
        raise IndexError((list(cursor), stop))
    failed: cython.bint
    if target.size - load_i64(state.p, 16) < _NOGIL_BYTES_MIN:
        failed = _copy_batches(source.p, source.size, starts.p, sizes.p, stop, target.p, target.size, state.p)
    else:
        with cython.nogil:
            failed = _copy_batches(source.p, source.size, starts.p, sizes.p, stop, target.p, target.size, state.p)
    if failed:
        raise IndexError(list(cursor))


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _enter(run: cython.p_uchar, p: cython.p_const_uchar, at: cython.longlong, entries: cython.p_uchar) -> cython.void:
    """Count the batch at ``at`` in ``run``. Add it to the index if its 64 KiB block has no entry yet."""
    is_numbered: cython.bint = load_i64(run, 32) >= 0
    offset: cython.longlong = load_base_offset(p, at) if is_numbered else 0
    address: cython.longlong = load_base_address(p, at) if is_numbered else 0
    time_us: cython.longlong = load_append_time_us(p, at) if is_numbered else 0
    position: cython.longlong = load_i64(run, 0)
    if load_i64(run, 24) < 0:
        store_i64(run, 24, offset)
        store_i64(run, 40, address)
        store_i64(run, 56, time_us)
    if position - load_i64(run, 8) >= _STRIDE:
        entry_at: cython.longlong = load_i64(run, 16) * _ENTRY_BYTES
        store_i64(entries, entry_at, offset)
        store_i64(entries, entry_at + 8, position)
        store_i64(entries, entry_at + 16, address)
        store_i64(entries, entry_at + 24, time_us)
        store_i64(run, 8, position)
        store_i64(run, 16, load_i64(run, 16) + 1)
    if is_numbered:
        store_i64(run, 32, offset + load_offset_span(p, at))
    store_i64(run, 0, position + load_length(p, at))
    store_i64(run, 48, address + load_address_span(p, at))
    store_i64(run, 64, time_us)
    store_i64(run, 72, load_i64(run, 72) + load_record_count(p, at))


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _survey(
    p: cython.p_const_uchar,
    size: cython.Py_ssize_t,
    starts: cython.p_const_uchar,
    sizes: cython.p_const_uchar,
    index: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    run: cython.p_uchar,
    entries: cython.p_uchar,
) -> cython.Py_ssize_t:
    # the caller has checked the range and the space for entries
    is_numbered: cython.bint = load_i64(run, 32) >= 0  # headers of staged batches have no valid offsets
    while index < stop:
        at: cython.longlong = load_i64(starts, index * 8)
        if not _is_batch(p, size, at, load_i64(sizes, index * 8)):
            return -1 - index
        if is_numbered:
            if load_partition(p, at) != load_i64(run, 88) or load_base_offset(p, at) < load_i64(run, 32):
                return -1 - index
            if load_epoch(p, at) != load_i64(run, 80):
                return index
        _enter(run, p, at, entries)
        index += 1
    return stop


def survey(
    base: Buffer,
    positions: array[int],
    lengths: array[int],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    state: array[int],
    entries: bytearray,
) -> int:
    """Add the headers of batches [start, stop) to ``state`` and the index, for one partition in a new segment.

    There is one index entry per 64 KiB. Returns one of:

    * ``stop``, if all batches were added;
    * the index of the first batch of another leader epoch, which is not added;
    * -1 - n if batch n is invalid: it is not a whole batch of that length and partition, or its offset is not above the
      earlier ones.

    Args:
        state: record count, offsets, sizes and times so far, at the RUN_ indexes. Updated.
        entries: index entries of the partition, with space for ``(bytes of the batches) / 64 KiB + 1`` more.

    Raises:
        IndexError: an array is too small.
    """
    pieces: _Pieces = _Pieces(base, positions, lengths)
    p: Lent = pieces.base
    starts: Lent = pieces.positions
    sizes: Lent = pieces.lengths
    run: Lent = lend_writable(memoryview(state))
    table: Lent = lend_writable(entries)
    if start < 0 or stop > pieces.count or run.size != 96:
        raise IndexError((start, stop))
    total: cython.longlong = 0
    index: cython.Py_ssize_t
    for index in range(start, stop):
        total += load_i64(sizes.p, index * 8)
    if table.size < (load_i64(run.p, 16) + total // _STRIDE + 1) * _ENTRY_BYTES:
        raise IndexError(table.size)
    with cython.nogil:
        index = _survey(p.p, p.size, starts.p, sizes.p, start, stop, run.p, table.p)
    return index


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _merge_stop(
    p: cython.p_const_uchar,
    size: cython.Py_ssize_t,
    starts: cython.p_const_uchar,
    sizes: cython.p_const_uchar,
    index: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    bytes_max: cython.longlong,
) -> cython.Py_ssize_t:
    """Return the end of the longest sequence of batches that begins at ``index`` and can be merged."""
    first: cython.longlong = load_i64(starts, index * 8)
    begun: cython.Py_ssize_t = index
    total: cython.longlong = 0
    next_offset: cython.longlong = 0
    next_address: cython.longlong = 0
    while index < stop:
        at: cython.longlong = load_i64(starts, index * 8)
        length: cython.longlong = load_i64(sizes, index * 8)
        if (
            length >= _SMALL_BYTES
            or total + length > bytes_max
            or not _is_batch(p, size, at, length)
            or load_flags(p, at) > 1  # compressed or compacted
            or (load_columns(p, at) & _PRODUCER_ID) != 0
            or load_producer_epoch(p, at) != -1  # a producer's epoch
            or (index > begun and (load_base_offset(p, at) != next_offset or load_base_address(p, at) != next_address))
            or load_epoch(p, at) != load_epoch(p, first)
            or load_append_time_us(p, at) != load_append_time_us(p, first)
        ):
            break
        total += length
        next_offset = load_base_offset(p, at) + load_offset_span(p, at)
        next_address = load_base_address(p, at) + load_address_span(p, at)
        index += 1
    return index if index > begun else begun + 1


def next_merge(
    base: Buffer,
    positions: array[int],
    lengths: array[int],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    bytes_max: cython.longlong,
) -> tuple[int, int]:
    """Return (start, stop) of the next two or more batches in [start, stop) that can be merged, or (stop, stop).

    Batches can be merged if they are adjacent by offset, each is below 32 KiB, and their total is at most
    ``bytes_max``. They must have the same epoch and append time, no producer, and be neither compressed nor compacted.
    Raises IndexError for an invalid range.
    """
    pieces: _Pieces = _Pieces(base, positions, lengths)
    p: Lent = pieces.base
    starts: Lent = pieces.positions
    sizes: Lent = pieces.lengths
    if start < 0 or stop > pieces.count:
        raise IndexError((start, stop))
    end: cython.Py_ssize_t = stop
    with cython.nogil:
        while start < stop:
            end = _merge_stop(p.p, p.size, starts.p, sizes.p, start, stop, bytes_max)
            if end > start + 1:
                break
            start = end
    return start, end
