"""Copy the records of several stored batches into one set of Arrow buffers, with one compiled call per buffer.

A *plan* selects records (rows) of stored batches. It is an i64 array with ``PLAN_WIDTH`` numbers for each batch:

* position of the batch, first row, end row, base offset, append time
* position and size of each column as returned by ``records.batch.layout``

The functions do not check bounds: batches must be valid, and targets must have the size that the plan requires.
"""

from __future__ import annotations

import cython

from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        move,
        store_i64,
        store_u32,
    )
else:
    from polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        move,
        store_i64,
        store_u32,
    )

PLAN_FACTS = 5
PLAN_WIDTH = PLAN_FACTS + 2 * 27

_WIDTH = cython.declare(cython.Py_ssize_t, 8 * (5 + 2 * 27))
_START = cython.declare(cython.Py_ssize_t, 8)
_STOP = cython.declare(cython.Py_ssize_t, 16)
_OFFSET = cython.declare(cython.Py_ssize_t, 24)
_TIME = cython.declare(cython.Py_ssize_t, 32)
_COLUMNS = cython.declare(cython.Py_ssize_t, 40)
_NO_TIME = cython.declare(cython.longlong, -9223372036854775808)


def binary_bytes(chunk: Buffer, plan: Buffer, offsets_column: int) -> int:
    """Return the total size of the values of selected rows in a column of variable length."""
    source: Lent = lend(chunk)
    runs: Lent = lend(plan)
    column: cython.Py_ssize_t = _COLUMNS + 16 * offsets_column
    total: cython.Py_ssize_t = 0
    run: cython.Py_ssize_t = 0
    position: cython.Py_ssize_t
    while run < runs.size:
        position = load_i64(runs.p, run + column)
        if position >= 0:
            total += load_i32(source.p, position + 4 * load_i64(runs.p, run + _STOP))
            total -= load_i32(source.p, position + 4 * load_i64(runs.p, run + _START))
        run += _WIDTH
    return int(total)


def gather_offsets(chunk: Buffer, plan: Buffer, offsets_column: int, target: Buffer) -> None:
    """Write the Arrow offsets of a binary column: an i32 for each row and one for the end, beginning with 0.

    If a batch does not have the column, its rows have length 0.
    """
    source: Lent = lend(chunk)
    runs: Lent = lend(plan)
    made: Lent = lend_writable(target)
    column: cython.Py_ssize_t = _COLUMNS + 16 * offsets_column
    run: cython.Py_ssize_t = 0
    row: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    position: cython.Py_ssize_t
    at: cython.Py_ssize_t = 4
    end: cython.Py_ssize_t = 0
    shift: cython.Py_ssize_t
    store_u32(made.p, 0, 0)
    while run < runs.size:
        row = load_i64(runs.p, run + _START)
        stop = load_i64(runs.p, run + _STOP)
        position = load_i64(runs.p, run + column)
        if position < 0:
            while row < stop:
                store_u32(made.p, at, end)
                at += 4
                row += 1
        else:
            shift = end - load_i32(source.p, position + 4 * row)
            while row < stop:
                row += 1
                end = shift + load_i32(source.p, position + 4 * row)
                store_u32(made.p, at, end)
                at += 4
        run += _WIDTH


def gather_bytes(chunk: Buffer, plan: Buffer, offsets_column: int, target: Buffer) -> None:
    """Write the values of a binary column, which are in the stored column after ``offsets_column``."""
    source: Lent = lend(chunk)
    runs: Lent = lend(plan)
    made: Lent = lend_writable(target)
    column: cython.Py_ssize_t = _COLUMNS + 16 * offsets_column
    run: cython.Py_ssize_t = 0
    position: cython.Py_ssize_t
    begin: cython.Py_ssize_t
    size: cython.Py_ssize_t
    at: cython.Py_ssize_t = 0
    while run < runs.size:
        position = load_i64(runs.p, run + column)
        if position >= 0:
            begin = load_i32(source.p, position + 4 * load_i64(runs.p, run + _START))
            size = load_i32(source.p, position + 4 * load_i64(runs.p, run + _STOP)) - begin
            move(made.p, at, source.p, load_i64(runs.p, run + column + 16) + begin, size)
            at += size
        run += _WIDTH


def gather_validity(chunk: Buffer, plan: Buffer, offsets_column: int, validity_column: int, target: Buffer) -> int:
    """Write the validity bits of a column into zeroed bytes, and return the number of nulls.

    If a batch does not have the validity column, its rows are null.
    """
    source: Lent = lend(chunk)
    runs: Lent = lend(plan)
    made: Lent = lend_writable(target)
    present: cython.Py_ssize_t = _COLUMNS + 16 * offsets_column
    bits: cython.Py_ssize_t = _COLUMNS + 16 * validity_column
    run: cython.Py_ssize_t = 0
    row: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    position: cython.Py_ssize_t
    at: cython.Py_ssize_t = 0
    nulls: cython.Py_ssize_t = 0
    while run < runs.size:
        row = load_i64(runs.p, run + _START)
        stop = load_i64(runs.p, run + _STOP)
        position = load_i64(runs.p, run + bits)
        if load_i64(runs.p, run + present) < 0:
            nulls += stop - row
            at += stop - row
            row = stop
        while row < stop:
            if position < 0 or (source.p[position + (row >> 3)] >> (row & 7)) & 1:
                made.p[at >> 3] |= 1 << (at & 7)
            else:
                nulls += 1
            at += 1
            row += 1
        run += _WIDTH
    return int(nulls)


def gather_kinds(chunk: Buffer, plan: Buffer, kinds_column: int, target: Buffer) -> int:
    """Write a validity bit for each row into zeroed bytes, and return the number of nulls. A row of kind 0 is null."""
    source: Lent = lend(chunk)
    runs: Lent = lend(plan)
    made: Lent = lend_writable(target)
    column: cython.Py_ssize_t = _COLUMNS + 16 * kinds_column
    run: cython.Py_ssize_t = 0
    row: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    position: cython.Py_ssize_t
    at: cython.Py_ssize_t = 0
    nulls: cython.Py_ssize_t = 0
    while run < runs.size:
        row = load_i64(runs.p, run + _START)
        stop = load_i64(runs.p, run + _STOP)
        position = load_i64(runs.p, run + column)
        while row < stop:
            if source.p[position + row]:
                made.p[at >> 3] |= 1 << (at & 7)
            else:
                nulls += 1
            at += 1
            row += 1
        run += _WIDTH
    return int(nulls)


def mark_lists(offsets: Buffer, row_count: int, target: Buffer) -> int:
    """Write a validity bit for each list that is not empty into zeroed bytes, and return the number of empty lists."""
    source: Lent = lend(offsets)
    made: Lent = lend_writable(target)
    row: cython.Py_ssize_t
    count: cython.Py_ssize_t = row_count
    nulls: cython.Py_ssize_t = 0
    for row in range(count):
        if load_i32(source.p, 4 * row + 4) > load_i32(source.p, 4 * row):
            made.p[row >> 3] |= 1 << (row & 7)
        else:
            nulls += 1
    return int(nulls)


def number_rows(chunk: Buffer, plan: Buffer, deltas_column: int, target: Buffer) -> None:
    """Write the offset of each row as i64.

    Offsets are consecutive from the batch's base offset. A compacted batch has a column with the distance of each
    offset from the base offset.
    """
    source: Lent = lend(chunk)
    runs: Lent = lend(plan)
    made: Lent = lend_writable(target)
    column: cython.Py_ssize_t = _COLUMNS + 16 * deltas_column
    run: cython.Py_ssize_t = 0
    row: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    position: cython.Py_ssize_t
    base: cython.longlong
    at: cython.Py_ssize_t = 0
    while run < runs.size:
        row = load_i64(runs.p, run + _START)
        stop = load_i64(runs.p, run + _STOP)
        base = load_i64(runs.p, run + _OFFSET)
        position = load_i64(runs.p, run + column)
        if position < 0:
            while row < stop:
                store_i64(made.p, at, base + row)
                at += 8
                row += 1
        while row < stop:
            store_i64(made.p, at, base + load_u32(source.p, position + 4 * row))
            at += 8
            row += 1
        run += _WIDTH


def time_rows(plan: Buffer, target: Buffer) -> None:
    """Write the append time of each row as i64, in microseconds."""
    runs: Lent = lend(plan)
    made: Lent = lend_writable(target)
    run: cython.Py_ssize_t = 0
    row: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    time_us: cython.longlong
    at: cython.Py_ssize_t = 0
    while run < runs.size:
        row = load_i64(runs.p, run + _START)
        stop = load_i64(runs.p, run + _STOP)
        time_us = load_i64(runs.p, run + _TIME)
        while row < stop:
            store_i64(made.p, at, time_us)
            at += 8
            row += 1
        run += _WIDTH


def create_time_rows(chunk: Buffer, plan: Buffer, times_column: int, target: Buffer) -> None:
    """Write the producer's timestamp of each row as i64. A row without one gets its append time.

    Times are in microseconds, rounded down to milliseconds.
    """
    source: Lent = lend(chunk)
    runs: Lent = lend(plan)
    made: Lent = lend_writable(target)
    column: cython.Py_ssize_t = _COLUMNS + 16 * times_column
    run: cython.Py_ssize_t = 0
    row: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    position: cython.Py_ssize_t
    time_us: cython.longlong
    at: cython.Py_ssize_t = 0
    while run < runs.size:
        row = load_i64(runs.p, run + _START)
        stop = load_i64(runs.p, run + _STOP)
        position = load_i64(runs.p, run + column)
        while row < stop:
            time_us = load_i64(source.p, position + 8 * row) if position >= 0 else _NO_TIME
            if time_us == _NO_TIME:
                time_us = load_i64(runs.p, run + _TIME)
            store_i64(made.p, at, time_us - _over_ms(time_us))
            at += 8
            row += 1
        run += _WIDTH


@cython.cfunc
def _over_ms(time_us: cython.longlong) -> cython.longlong:
    """Return the microseconds above the full millisecond. For negative times, C and Python would round differently."""
    over: cython.longlong = time_us - (time_us // 1000) * 1000
    return over + 1000 if over < 0 else over


def inner_plan(chunk: Buffer, plan: Buffer, counts_column: int) -> bytearray:
    """Return the selection of the elements of lists (headers), given the selection of the lists.

    Batches without lists are skipped.
    """
    source: Lent = lend(chunk)
    runs: Lent = lend(plan)
    target = bytearray(runs.size)
    made: Lent = lend_writable(target)
    column: cython.Py_ssize_t = _COLUMNS + 16 * counts_column
    run: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = 0
    position: cython.Py_ssize_t
    while run < runs.size:
        position = load_i64(runs.p, run + column)
        if position >= 0:
            move(made.p, at, runs.p, run, _WIDTH)
            store_i64(made.p, at + _START, load_i32(source.p, position + 4 * load_i64(runs.p, run + _START)))
            store_i64(made.p, at + _STOP, load_i32(source.p, position + 4 * load_i64(runs.p, run + _STOP)))
            at += _WIDTH
        run += _WIDTH
    return target[:at] if at < runs.size else target


def rebase_offsets(offsets: Buffer, start: int, row_count: int) -> bytearray:
    """Return the Arrow offsets (i32) of ``row_count`` rows from row ``start`` on, so that the first offset is 0."""
    source: Lent = lend(offsets)
    size: cython.Py_ssize_t = row_count
    position: cython.Py_ssize_t = 4 * start
    target = bytearray(4 * size + 4)
    made: Lent = lend_writable(target)
    base: cython.int = load_i32(source.p, position)
    row: cython.Py_ssize_t
    for row in range(size + 1):
        store_u32(made.p, 4 * row, load_i32(source.p, position + 4 * row) - base)
    return target
