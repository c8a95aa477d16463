"""What sealing does to scattered batches: survey their headers, find which to merge, gather them into chunks. Compiled.

Promises: one call per run or per 4 MiB chunk, the interpreter lock free for the bulk, nothing written that was not seen to be a whole
batch. Must not know: files, slots, segments; it sees numbers, buffers and the fixed header of decision 0001. Little-endian machines
only when compiled.
"""

from __future__ import annotations

from array import array
from typing import Final

import cython

from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.libc.string import memcpy

View = memoryview  # the typed view of bytes or numbers in the compiled module

INDEX_STRIDE_BYTES: Final = 64 * 1024  # decision 0002: one index entry per 64 KiB of a run

_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_MAGIC = cython.declare(cython.uint, 0x31425750)
_GIL_BYTES = cython.declare(
    cython.Py_ssize_t, 1048576
)  # below, giving the interpreter lock away costs more than the copy
_SMALL_BYTES = cython.declare(cython.Py_ssize_t, 32768)  # a batch of this size or more gains nothing from merging


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(view="const unsigned char[::1]")
def _u64(view: View, at: cython.Py_ssize_t) -> cython.ulonglong:
    if cython.compiled:
        return cython.cast("const unsigned long long*", cython.address(view[at]))[0]
    else:
        return int.from_bytes(view[at : at + 8], "little")


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(view="const unsigned char[::1]")
def _u32(view: View, at: cython.Py_ssize_t) -> cython.uint:
    if cython.compiled:
        return cython.cast("const unsigned int*", cython.address(view[at]))[0]
    else:
        return int.from_bytes(view[at : at + 4], "little")


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(view="const unsigned char[::1]")
def _i64(view: View, at: cython.Py_ssize_t) -> cython.longlong:
    if cython.compiled:
        return cython.cast("const long long*", cython.address(view[at]))[0]
    else:
        return int.from_bytes(view[at : at + 8], "little", signed=True)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(view="unsigned char[::1]")
def _put64(view: View, at: cython.Py_ssize_t, value: cython.ulonglong) -> cython.void:
    if cython.compiled:
        cython.cast("unsigned long long*", cython.address(view[at]))[0] = value
    else:
        view[at : at + 8] = (value & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(out="unsigned char[::1]", source="const unsigned char[::1]")
def _copy(
    out: View, at: cython.Py_ssize_t, source: View, start: cython.Py_ssize_t, count: cython.Py_ssize_t
) -> cython.void:
    """Copy ``count`` > 0 bytes; both ranges were checked by the caller."""
    if cython.compiled:
        memcpy(cython.address(out[at]), cython.address(source[start]), count)
    else:
        out[at : at + count] = source[start : start + count]


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.locals(view="const unsigned char[::1]", length=cython.Py_ssize_t)
def _batch_bytes(view: View, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Length of the whole batch at ``at``, or -1 when there is none before ``size``."""
    if at < 0 or at + _HEADER_BYTES > size or _u32(view, at) != _MAGIC:
        return -1
    length = _u32(view, at + 4)
    if length < _HEADER_BYTES or length % 8 != 0 or at + length > size:
        return -1
    return length


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(
    source="const unsigned char[::1]",
    target="unsigned char[::1]",
    starts="const long long[::1]",
    sizes="const long long[::1]",
    state="long long[::1]",
    index=cython.Py_ssize_t,
    skip=cython.Py_ssize_t,
    at=cython.Py_ssize_t,
    room=cython.Py_ssize_t,
    count=cython.Py_ssize_t,
)
def _gather(source: View, starts: View, sizes: View, stop: cython.Py_ssize_t, target: View, state: View) -> cython.bint:
    """The loop of ``gather``; the caller checked that pieces [state[0], stop) exist. Returns whether a piece lies outside ``source``."""
    index, skip, at = state[0], state[1], state[2]
    room = target.shape[0] - at
    while index < stop and room > 0:
        if starts[index] < 0 or sizes[index] <= skip or starts[index] + sizes[index] > source.shape[0]:
            return True
        count = sizes[index] - skip
        if count > room:
            count = room
        _copy(target, at, source, starts[index] + skip, count)
        at += count
        room -= count
        skip += count
        if skip == sizes[index]:
            index += 1
            skip = 0
    state[0], state[1], state[2] = index, skip, at
    return False


@cython.locals(
    source="const unsigned char[::1]",
    target="unsigned char[::1]",
    starts="const long long[::1]",
    sizes="const long long[::1]",
    state="long long[::1]",
    failed=cython.bint,
)
def gather(
    base: Buffer,
    positions: array[int],
    lengths: array[int],
    stop: cython.Py_ssize_t,
    out: bytearray | memoryview,
    cursor: array[int],
) -> None:
    """Copy pieces of ``base`` back to back into ``out`` until it is full or piece ``stop`` is reached. ``cursor`` holds (next piece,
    bytes of it already copied, next place in ``out``) and is moved on. The interpreter lock is free during large copies.

    Raises IndexError when a piece is empty or lies outside ``base``.
    """
    source, target, state = memoryview(base), memoryview(out), memoryview(cursor)
    starts, sizes = memoryview(positions), memoryview(lengths)
    if len(state) != 3 or state[0] < 0 or state[1] < 0 or state[2] < 0 or stop > len(starts) or stop > len(sizes):
        raise IndexError((list(cursor), stop))
    if len(target) - state[2] < _GIL_BYTES:
        failed = _gather(source, starts, sizes, stop, target, state)
    else:
        with cython.nogil:
            failed = _gather(source, starts, sizes, stop, target, state)
    if failed:
        raise IndexError(cursor[0])


# What is known of a run while its batches are surveyed: places in an ``array("q")``.
RUN_POSITION: Final = 0  # where the next batch goes in the blob
RUN_LAST_ENTRY: Final = 1  # position of the last index entry, below -64 KiB when there is none
RUN_ENTRIES: Final = 2
RUN_FIRST_OFFSET: Final = 3  # -1 before the first batch
RUN_NEXT_OFFSET: Final = 4  # -1 for good where batches are not numbered
RUN_FIRST_ADDRESS: Final = 5
RUN_NEXT_ADDRESS: Final = 6
RUN_FIRST_TIME: Final = 7
RUN_LAST_TIME: Final = 8
RUN_RECORDS: Final = 9
RUN_EPOCH: Final = 10  # -1 before the first batch
RUN_PARTITION: Final = 11  # what every header must say
RUN_STATE_COUNT: Final = 12


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(
    view="const unsigned char[::1]",
    starts="const long long[::1]",
    sizes="const long long[::1]",
    state="long long[::1]",
    entries="unsigned char[::1]",
    at=cython.Py_ssize_t,
    place=cython.Py_ssize_t,
)
def _survey(
    view: View, starts: View, sizes: View, index: cython.Py_ssize_t, stop: cython.Py_ssize_t, state: View, entries: View
) -> cython.Py_ssize_t:
    """The loop of ``survey``; the caller checked that the pieces exist and that ``entries`` has room for all of them."""
    while index < stop:
        at = starts[index]
        if (
            _batch_bytes(view, at, view.shape[0]) != sizes[index]
            or _i64(view, at + 32) < state[4]
            or _i64(view, at + 16) != state[11]
        ):
            return -1 - index
        if _u32(view, at + 24) != state[10]:
            return index
        if state[3] < 0:
            state[3], state[5], state[7] = _i64(view, at + 32), _i64(view, at + 40), _i64(view, at + 48)
        if state[0] - state[1] >= 65536:
            place = state[2] * 32
            _put64(entries, place, _u64(view, at + 32))
            _put64(entries, place + 8, state[0])
            _put64(entries, place + 16, _u64(view, at + 40))
            _put64(entries, place + 24, _u64(view, at + 48))
            state[1] = state[0]
            state[2] += 1
        state[0] += sizes[index]
        if state[4] >= 0:
            state[4] = _i64(view, at + 32) + _u32(view, at + 84)
        state[6] = _i64(view, at + 40) + _u32(view, at + 80)
        state[8] = _i64(view, at + 48)
        state[9] += _u32(view, at + 28)
        index += 1
    return stop


@cython.locals(
    view="const unsigned char[::1]",
    starts="const long long[::1]",
    sizes="const long long[::1]",
    run="long long[::1]",
    room="unsigned char[::1]",
    found=cython.Py_ssize_t,
)
def survey(
    base: Buffer,
    positions: array[int],
    lengths: array[int],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    state: array[int],
    entries: bytearray,
) -> int:
    """Enter the headers of batches [start, stop) into a run's ``state`` (RUN_…) and write index entries, one per 64 KiB.

    ``entries`` must have room for ``(bytes of the batches) / 64 KiB + 1`` entries more than the state counts.
    Returns ``stop``; or the number of the first batch of another epoch, not yet entered; or -1 - n where batch n makes no sense: no
    whole batch of that length and partition begins there, or its offsets lie below those before it. Raises IndexError when arrays are too small.
    """
    view, run, room = memoryview(base), memoryview(state), memoryview(entries)
    starts, sizes = memoryview(positions), memoryview(lengths)
    if start < 0 or stop > len(starts) or stop > len(sizes) or len(run) != 12:
        raise IndexError((start, stop))
    total: cython.longlong = 0
    for found in range(start, stop):
        total += sizes[found]
    if len(room) < (run[2] + total // 65536 + 1) * 32:
        raise IndexError(len(room))
    with cython.nogil:
        found = _survey(view, starts, sizes, start, stop, run, room)
    return found


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(
    view="const unsigned char[::1]",
    starts="const long long[::1]",
    sizes="const long long[::1]",
    first=cython.Py_ssize_t,
    at=cython.Py_ssize_t,
    total=cython.longlong,
    next_offset=cython.longlong,
)
def _merge_stop(
    view: View, starts: View, sizes: View, index: cython.Py_ssize_t, stop: cython.Py_ssize_t, bytes_max: cython.longlong
) -> cython.Py_ssize_t:
    """End of the longest group of batches from ``index`` on that may become one: at least ``index + 1``."""
    first = starts[index]
    total, next_offset = 0, _i64(view, first + 32)
    while index < stop:
        at = starts[index]
        if (
            _batch_bytes(view, at, view.shape[0]) != sizes[index]
            or sizes[index] >= _SMALL_BYTES
            or total + sizes[index] > bytes_max
            or _u32(view, at + 8) > 1  # compressed or compacted
            or (_u32(view, at + 12) & 64) != 0  # has a producer id
            or _i64(view, at + 56) != -1  # has a producer epoch
            or _u32(view, at + 24) != _u32(view, first + 24)
            or _i64(view, at + 48) != _i64(view, first + 48)
            or _i64(view, at + 32) != next_offset
        ):
            break
        total += sizes[index]
        next_offset += _u32(view, at + 84)
        index += 1
    return index


@cython.locals(
    view="const unsigned char[::1]",
    starts="const long long[::1]",
    sizes="const long long[::1]",
    end=cython.Py_ssize_t,
)
def next_merge(
    base: Buffer,
    positions: array[int],
    lengths: array[int],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    bytes_max: cython.longlong,
) -> tuple[int, int]:
    """The next two or more batches in [start, stop) that may be merged: neighbours by offset, each below 32 KiB and together at most
    ``bytes_max``, without producer, neither compressed nor compacted, of one epoch and one append time. (stop, stop) if there are none.
    """
    view = memoryview(base)
    starts, sizes = memoryview(positions), memoryview(lengths)
    if start < 0 or stop > len(starts) or stop > len(sizes):
        raise IndexError((start, stop))
    with cython.nogil:
        while start < stop:
            if _batch_bytes(view, starts[start], view.shape[0]) < 0:
                end = start + 1
            else:
                end = _merge_stop(view, starts, sizes, start, stop, bytes_max)
            if end > start + 1:
                break
            start = end if end > start else start + 1
        else:
            end = stop
    return start, end
