"""Build one stored batch from ranges of records of other batches, column by column (decision 0101).

Each range, called a run, is (source batch, start, stop). Records retain all their columns. If only some batches have an
optional column, the records of the others get its default. The source batches must have been validated.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import cython

from polywire.errors import ErrorCode, Invalid
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.build import allocate, finish
    from cython.cimports.polywire.records.check import flagged
    from cython.cimports.polywire.records.checksum import crc32_raw
    from cython.cimports.polywire.records.header import fill_layout, seal_header
    from cython.cimports.polywire.records.memory import (
        Lent,
        clear,
        lend,
        lend_writable,
        load_i32,
        load_u32,
        load_u64,
        move,
        store_u32,
        store_u64,
    )
else:
    from polywire.records.build import allocate, finish
    from polywire.records.check import flagged
    from polywire.records.checksum import crc32_raw
    from polywire.records.header import fill_layout, seal_header
    from polywire.records.memory import (
        Lent,
        clear,
        lend,
        lend_writable,
        load_i32,
        load_u32,
        load_u64,
        move,
        store_u32,
        store_u64,
    )

_COLUMN_COUNT = cython.declare(cython.int, 27)
_LAYOUT = cython.declare(cython.Py_ssize_t, 54)
_NOGIL_BYTES_MIN = cython.declare(cython.Py_ssize_t, 262_144)
_NO_TIME = cython.declare(cython.ulonglong, 0x8000000000000000)  # i64 min


@cython.final
@cython.cclass
class Runs:
    """Ranges of records, from one or more source batches, that are copied into one new batch."""

    if not cython.compiled:  # in the compiled module, runs.pxd declares these fields
        sources: list[Lent]
        kept: list[object]
        triples: array[int]
        layouts: array[int]
        places: array[int]
        run_count: int
        count: int
        deltas: bool
        holes: bool
        lead_offset: int
        lead_address: int
        sequences: bool
        offset_span: int
        address_span: int
        target: memoryview
        bases: list[memoryview]
        batch: Lent


@cython.cfunc
def zeros(runs: Runs, count: cython.Py_ssize_t) -> cython.p_longlong:
    """Allocate an i64 array of zeros that is freed with ``runs``."""
    if not cython.compiled:
        return array("q", bytes(8 * count))
    lent: Lent = lend_writable(bytearray(8 * count))
    runs.kept.append(lent)
    return cython.cast(cython.p_longlong, lent.p)


@cython.cfunc
def open_sources(batches: Sequence[Buffer]) -> Runs:
    """Locate the columns of the source batches. Raises Invalid if one is truncated or compressed."""
    runs: Runs = Runs.__new__(Runs)
    lent: Lent
    i: cython.Py_ssize_t
    runs.kept = []
    runs.sources = [lend(batch) for batch in batches]
    runs.layouts = zeros(runs, _LAYOUT * len(runs.sources))
    runs.places = zeros(runs, _LAYOUT)
    runs.deltas = False
    runs.holes = False
    runs.lead_offset = 0
    runs.lead_address = 0
    runs.sequences = False
    if cython.compiled:
        lent = lend_writable(bytearray(8 * len(runs.sources)))
        runs.kept.append(lent)
        runs.bases = cython.cast(cython.pointer(cython.p_uchar), lent.p)
    else:
        runs.bases = [source.p for source in runs.sources]
    for i in range(len(runs.sources)):
        lent = runs.sources[i]
        if cython.compiled:
            runs.bases[i] = lent.p
        if not _fill_source(runs, i, lent):
            raise Invalid(ErrorCode.INVALID_BATCH, f"batch is truncated or compressed number={i} size={lent.size}")
    return runs


@cython.cfunc
def _fill_source(runs: Runs, number: cython.Py_ssize_t, lent: Lent) -> cython.bint:
    """Locate the columns of one source. Return False if the source is truncated or compressed."""
    if cython.compiled:
        if fill_layout(lent.p, 0, lent.size, runs.layouts + _LAYOUT * number) < 0:
            return False
    else:
        places = [0] * _LAYOUT
        if fill_layout(lent.p, 0, lent.size, places) < 0:
            return False
        runs.layouts[_LAYOUT * number : _LAYOUT * (number + 1)] = array("q", places)
    return runs.layouts[_LAYOUT * number + 1] == 4 * cython.cast(cython.longlong, load_u32(lent.p, 28)) + 4


@cython.cfunc
def set_runs(runs: Runs, triples: cython.p_longlong, run_count: cython.Py_ssize_t) -> cython.void:
    """Set the ranges of records to copy, as triples of source, start and stop. The array comes from ``zeros``."""
    i: cython.Py_ssize_t
    runs.run_count = run_count
    runs.triples = triples
    runs.count = 0
    for i in range(run_count):
        runs.count += triples[3 * i + 2] - triples[3 * i + 1]


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _between(
    p: cython.p_const_uchar, at: cython.longlong, start: cython.longlong, stop: cython.longlong
) -> cython.longlong:
    """Return the number of bytes that entries ``start`` to ``stop`` have in a column of variable-length values.

    ``at`` is the position of the column's offsets. The result is 0 if the column is absent.
    """
    if at < 0:
        return 0
    return load_i32(p, at + 4 * stop) - load_i32(p, at + 4 * start)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _nulls(
    p: cython.p_const_uchar,
    offsets: cython.longlong,
    bits: cython.longlong,
    start: cython.longlong,
    stop: cython.longlong,
) -> cython.longlong:
    """Count the nulls among records ``start`` to ``stop``.

    Without an offsets column all records are null. With an offsets column but no bitmap, no record is null.
    """
    found: cython.longlong = 0
    i: cython.longlong
    if offsets < 0:
        return stop - start
    if bits >= 0:
        for i in range(start, stop):
            found += 1 - ((p[bits + (i >> 3)] >> (i & 7)) & 1)
    return found


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _measure(runs: Runs) -> cython.void:
    p: cython.p_const_uchar
    start: cython.longlong
    stop: cython.longlong
    base: cython.longlong
    count: cython.longlong = runs.count
    value_nulls: cython.longlong = 0
    key_nulls: cython.longlong = 0
    columns: cython.uint = 0
    places: cython.p_longlong = runs.places
    layouts: cython.p_longlong = runs.layouts
    i: cython.Py_ssize_t
    for i in range(_COLUMN_COUNT):
        places[2 * i + 1] = 0
    for i in range(runs.run_count):
        p = runs.bases[runs.triples[3 * i]]
        base = _LAYOUT * runs.triples[3 * i]
        start = runs.triples[3 * i + 1]
        stop = runs.triples[3 * i + 2]
        columns |= load_u32(p, 12)
        value_nulls += _nulls(p, layouts[base], layouts[base + 4], start, stop)
        key_nulls += _nulls(p, layouts[base + 6], layouts[base + 10], start, stop)
        places[3] += _between(p, layouts[base], start, stop)
        places[9] += _between(p, layouts[base + 6], start, stop)
        places[39] += _between(p, layouts[base + 36], start, stop)
        places[47] += _between(p, layouts[base + 44], start, stop)
        places[13] = layouts[base + 13]
        if layouts[base + 22] >= 0:
            start = load_i32(p, layouts[base + 22] + 4 * start)
            stop = load_i32(p, layouts[base + 22] + 4 * stop)
            places[25] += stop - start
            places[29] += _between(p, layouts[base + 26], start, stop)
            places[35] += _between(p, layouts[base + 32], start, stop)
    if key_nulls == count:
        columns &= ~cython.cast(cython.uint, 1 << 3)
    if places[25] == 0:
        columns &= ~cython.cast(cython.uint, 1 << 11)
    if places[47] == 0:
        columns &= ~cython.cast(cython.uint, 1 << 22)
    _size_columns(runs, columns, key_nulls, value_nulls)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _size_columns(
    runs: Runs, columns: cython.uint, key_nulls: cython.longlong, value_nulls: cython.longlong
) -> cython.void:
    """Compute the sizes of all columns of the result, -1 for an absent column."""
    count: cython.longlong = runs.count
    places: cython.p_longlong = runs.places
    offsets: cython.longlong = 4 * count + 4
    bits: cython.longlong = (count + 7) >> 3
    keys: cython.bint = (columns >> 3 & 1) != 0
    headers: cython.bint = (columns >> 11 & 1) != 0
    events: cython.bint = (columns >> 18 & 1) != 0
    metadata: cython.bint = (columns >> 22 & 1) != 0
    places[1] = offsets
    places[5] = bits if value_nulls > 0 else -1
    places[7] = offsets if keys else -1
    places[9] = places[9] if keys else -1
    places[11] = bits if keys and key_nulls > 0 else -1
    places[13] = places[13] if columns >> 6 & 1 else -1
    places[15] = 8 * count if runs.sequences else -1
    places[17] = 16 * count if columns >> 8 & 1 else -1
    places[19] = 8 * count if columns >> 9 & 1 else -1
    places[21] = count if columns >> 10 & 1 else -1
    places[23] = offsets if headers else -1
    places[27] = 4 * places[25] + 4 if headers else -1
    places[31] = places[25] if headers else -1
    places[33] = places[27]
    places[25] = places[31]
    places[29] = places[29] if headers else -1
    places[35] = places[35] if headers else -1
    places[37] = offsets if events else -1
    places[39] = places[39] if events else -1
    places[41] = 4 * count if events else -1
    places[43] = 8 * count if events else -1
    places[45] = offsets if metadata else -1
    places[47] = places[47] if metadata else -1
    places[49] = 4 * count if columns >> 24 & 1 else -1
    places[51] = 4 * count if runs.deltas else -1
    places[53] = places[51]


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_offsets(runs: Runs, offsets: cython.int, payload: cython.int, nested: cython.bint) -> cython.void:
    """Copy one column of variable-length values (offsets and bytes) from all ranges into the new batch.

    If ``payload`` is -1, only the offsets are copied. ``nested`` is true for a column with one entry per record header,
    false for one entry per record.
    """
    p: cython.p_const_uchar
    target: cython.p_uchar = runs.target
    place: cython.longlong = runs.places[2 * offsets]
    start: cython.longlong
    stop: cython.longlong
    base: cython.longlong
    at: cython.longlong
    end: cython.longlong = 0
    shift: cython.longlong
    i: cython.Py_ssize_t
    j: cython.longlong
    if place < 0:
        return
    store_u32(target, place, 0)
    for i in range(runs.run_count):
        p = runs.bases[runs.triples[3 * i]]
        base = _LAYOUT * runs.triples[3 * i]
        start = runs.triples[3 * i + 1]
        stop = runs.triples[3 * i + 2]
        if nested:
            if runs.layouts[base + 22] < 0:
                continue
            start = load_i32(p, runs.layouts[base + 22] + 4 * start)
            stop = load_i32(p, runs.layouts[base + 22] + 4 * stop)
        at = runs.layouts[base + 2 * offsets]
        if at < 0:
            for j in range(start, stop):  # noqa: B007 (a typed counter)
                place += 4
                store_u32(target, place, end)
            continue
        shift = end - load_i32(p, at + 4 * start)
        for j in range(start, stop):
            place += 4
            store_u32(target, place, load_i32(p, at + 4 * j + 4) + shift)
        if payload >= 0:
            move(
                target,
                runs.places[2 * payload] + end,
                p,
                runs.layouts[base + 2 * payload] + end - shift,
                _between(p, at, start, stop),
            )
        end += _between(p, at, start, stop)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_fixed(runs: Runs, column: cython.int, width: cython.longlong, nested: cython.bint) -> cython.void:
    """Copy one column of values of ``width`` bytes from all ranges into the new batch.

    For a source without the column, zeros are written, or ``NO_TIME`` for origin times.
    """
    p: cython.p_const_uchar
    target: cython.p_uchar = runs.target
    place: cython.longlong = runs.places[2 * column]
    start: cython.longlong
    stop: cython.longlong
    base: cython.longlong
    at: cython.longlong
    i: cython.Py_ssize_t
    j: cython.longlong
    if place < 0:
        return
    for i in range(runs.run_count):
        p = runs.bases[runs.triples[3 * i]]
        base = _LAYOUT * runs.triples[3 * i]
        start = runs.triples[3 * i + 1]
        stop = runs.triples[3 * i + 2]
        if nested:
            if runs.layouts[base + 22] < 0:
                continue
            start = load_i32(p, runs.layouts[base + 22] + 4 * start)
            stop = load_i32(p, runs.layouts[base + 22] + 4 * stop)
        at = runs.layouts[base + 2 * column]
        if at >= 0:
            move(target, place, p, at + width * start, width * (stop - start))
        elif column == 9:
            for j in range(stop - start):
                store_u64(target, place + 8 * j, _NO_TIME)
        elif column == 24:
            _fill_crcs(runs, runs.triples[3 * i], start, stop, place)
        else:
            clear(target, place, width * (stop - start))
        place += width * (stop - start)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_crcs(
    runs: Runs, source: cython.longlong, start: cython.longlong, stop: cython.longlong, place: cython.longlong
) -> cython.void:
    """Compute the CRC-32 of values from a source without a CRC column."""
    p: cython.p_const_uchar = runs.bases[source]
    target: cython.p_uchar = runs.target
    at: cython.longlong = runs.layouts[_LAYOUT * source]
    values: cython.longlong = runs.layouts[_LAYOUT * source + 2]
    first: cython.longlong
    j: cython.longlong
    for j in range(start, stop):
        first = load_i32(p, at + 4 * j)
        store_u32(target, place, crc32_raw(p, values + first, load_i32(p, at + 4 * j + 4) - first))
        place += 4


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_bits(runs: Runs, validity: cython.int, offsets: cython.int) -> cython.void:
    p: cython.p_const_uchar
    target: cython.p_uchar = runs.target
    place: cython.longlong = runs.places[2 * validity]
    base: cython.longlong
    bits: cython.longlong
    row: cython.longlong = 0
    i: cython.Py_ssize_t
    j: cython.longlong
    if place < 0:
        return
    clear(target, place, runs.places[2 * validity + 1])
    for i in range(runs.run_count):
        p = runs.bases[runs.triples[3 * i]]
        base = _LAYOUT * runs.triples[3 * i]
        bits = runs.layouts[base + 2 * validity]
        for j in range(runs.triples[3 * i + 1], runs.triples[3 * i + 2]):
            if runs.layouts[base + 2 * offsets] >= 0 and (bits < 0 or (p[bits + (j >> 3)] >> (j & 7)) & 1):
                target[place + (row >> 3)] |= cython.cast(cython.uchar, 1 << (row & 7))
            row += 1


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _sequence(runs: Runs, source: cython.longlong, index: cython.longlong) -> cython.ulonglong:
    p: cython.p_const_uchar = runs.bases[source]
    at: cython.longlong = runs.layouts[_LAYOUT * source + 14]
    if at >= 0:
        return load_u64(p, at + 8 * index)
    return load_u64(p, 64) + cython.cast(cython.ulonglong, index)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_sequences(runs: Runs) -> cython.void:
    target: cython.p_uchar = runs.target
    place: cython.longlong = runs.places[14]
    i: cython.Py_ssize_t
    j: cython.longlong
    if place < 0:
        return
    for i in range(runs.run_count):
        for j in range(runs.triples[3 * i + 1], runs.triples[3 * i + 2]):
            store_u64(target, place, _sequence(runs, runs.triples[3 * i], j))
            place += 8


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def offset_delta(p: cython.p_const_uchar, deltas: cython.longlong, index: cython.longlong) -> cython.longlong:
    """Return the offset of record ``index`` relative to the first record of its batch.

    If ``index`` is the record count, return the number of offsets that the batch covers.
    """
    if index == load_u32(p, 28):
        return load_u32(p, 84)
    return load_u32(p, deltas + 4 * index) if deltas >= 0 else index


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def address_delta(
    p: cython.p_const_uchar, layout: cython.p_const_longlong, base: cython.longlong, index: cython.longlong
) -> cython.longlong:
    """Return the byte position of record ``index`` relative to the first record of its batch, in Kafka 0.7's format.

    If ``index`` is the record count, return the size of the whole batch in that format.
    """
    if index == load_u32(p, 28):
        return load_u32(p, 80)
    if layout[base + 52] >= 0:
        return load_u32(p, layout[base + 52] + 4 * index)
    return 10 * index + load_i32(p, layout[base] + 4 * index) - flagged(p, layout[base + 20], index, 1)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _record_size(
    p: cython.p_const_uchar, layouts: cython.p_const_longlong, base: cython.longlong, index: cython.longlong
) -> cython.longlong:
    size: cython.longlong = 10 + _between(p, layouts[base], index, index + 1)
    if layouts[base + 20] >= 0:
        size -= p[layouts[base + 20] + index] & 1
    return size


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_deltas(runs: Runs) -> cython.void:
    """Write each record's relative offset and byte position in the new batch, and what the batch covers in total.

    With ``holes`` there is a single source, and removed records before and between the ranges are covered, too.
    """
    p: cython.p_const_uchar
    target: cython.p_uchar = runs.target
    layouts: cython.p_longlong = runs.layouts
    base: cython.longlong
    start: cython.longlong
    stop: cython.longlong
    place: cython.longlong = 0
    offset: cython.longlong = runs.lead_offset  # offset of the source's record 0, relative to the result
    address: cython.longlong = runs.lead_address
    step: cython.longlong
    i: cython.Py_ssize_t
    j: cython.longlong
    for i in range(runs.run_count):
        p = runs.bases[runs.triples[3 * i]]
        base = _LAYOUT * runs.triples[3 * i]
        start = runs.triples[3 * i + 1]
        stop = runs.triples[3 * i + 2]
        step = address_delta(p, layouts, base, start)
        if not runs.holes:
            offset -= offset_delta(p, layouts[base + 50], start)
            address -= step
        for j in range(start, stop):
            if layouts[base + 52] >= 0:
                step = load_u32(p, layouts[base + 52] + 4 * j)
            store_u32(target, runs.places[50] + place, offset + offset_delta(p, layouts[base + 50], j))
            store_u32(target, runs.places[52] + place, address + step)
            step += _record_size(p, layouts, base, j)
            place += 4
        if not runs.holes:
            offset += offset_delta(p, layouts[base + 50], stop)
            address += address_delta(p, layouts, base, stop)
    runs.offset_span = offset
    runs.address_span = address


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill(runs: Runs) -> cython.void:
    target: cython.p_uchar = runs.target
    _fill_offsets(runs, 0, 1, False)
    _fill_bits(runs, 2, 0)
    _fill_offsets(runs, 3, 4, False)
    _fill_bits(runs, 5, 3)
    _fill_sequences(runs)
    _fill_fixed(runs, 8, 16, False)
    _fill_fixed(runs, 9, 8, False)
    _fill_fixed(runs, 10, 1, False)
    _fill_offsets(runs, 11, -1, False)
    _fill_fixed(runs, 12, 1, True)
    _fill_offsets(runs, 13, 14, True)
    _fill_fixed(runs, 15, 1, True)
    _fill_offsets(runs, 16, 17, True)
    _fill_offsets(runs, 18, 19, False)
    _fill_fixed(runs, 20, 4, False)
    _fill_fixed(runs, 21, 8, False)
    _fill_offsets(runs, 22, 23, False)
    _fill_fixed(runs, 24, 4, False)
    if runs.places[12] >= 0:
        move(target, runs.places[12], runs.bases[0], runs.layouts[12], runs.layouts[13])
        store_u64(target, 56, load_u64(runs.bases[0], 56))
        store_u64(target, 64, _sequence(runs, 0, runs.triples[1]))
    if runs.deltas:
        _fill_deltas(runs)
    finish(target, runs.places, runs.count)
    if runs.deltas and not runs.holes:  # including removed records after the last one
        store_u32(target, 80, runs.address_span)
        store_u32(target, 84, runs.offset_span)
        seal_header(target, 0)


@cython.cfunc
def concatenate(runs: Runs) -> bytearray:
    """Return one batch of all ranges, without offsets. Raises Invalid if it would be too large or empty."""
    _measure(runs)
    batch = allocate(runs.places, runs.count)
    runs.batch = lend_writable(batch)
    runs.target = runs.batch.p
    if runs.batch.size < _NOGIL_BYTES_MIN:
        _fill(runs)
    else:
        with cython.nogil:
            _fill(runs)
    return batch
