"""Make new batches from records of existing ones: merge, slice, take, compact (decision 0101).

Records retain all their columns. The docstring of a function says whether they retain offsets, addresses and sequences.
The source batches must have been validated.
"""

from __future__ import annotations

from collections.abc import Sequence

import cython

from polywire.errors import ErrorCode, Invalid
from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.build import finish
    from cython.cimports.polywire.records.fields import (
        load_columns,
        load_epoch,
        load_flags,
        load_partition,
        load_producer_epoch,
        load_record_count,
    )
    from cython.cimports.polywire.records.header import seal_header
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        load_i32,
        load_u32,
        load_u64,
        move,
        store_u32,
        store_u64,
    )
    from cython.cimports.polywire.records.runs import (
        Runs,
        address_delta,
        concatenate,
        offset_delta,
        open_sources,
        set_runs,
        zeros,
    )
else:
    from polywire.records.build import finish
    from polywire.records.fields import (
        load_columns,
        load_epoch,
        load_flags,
        load_partition,
        load_producer_epoch,
        load_record_count,
    )
    from polywire.records.header import seal_header
    from polywire.records.memory import Lent, lend, load_i32, load_u32, load_u64, move, store_u32, store_u64
    from polywire.records.runs import Runs, address_delta, concatenate, offset_delta, open_sources, set_runs, zeros

_LAYOUT = cython.declare(cython.Py_ssize_t, 54)
_LEAD_MAX = cython.declare(
    cython.longlong, 0x8000_0000
)  # half of the 32-bit range of a span; the other half is for removed records before the batch's first record
_SPAN_MAX = cython.declare(
    cython.longlong, 0x4000_0000
)  # offsets of a batch with gaps: compaction may add as many before it, and Kafka's offset deltas have 31 bits
_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_SMALL_BYTES = cython.declare(cython.Py_ssize_t, 4096)  # larger batches gain little from merging
_PRODUCER_BIT = cython.declare(cython.uint, 64)
_NO_PRODUCER = cython.declare(cython.longlong, -1)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def small_records(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the record count of a small batch that may be merged with batches of the same columns, or 0.

    Batches of idempotent producers are not merged. Neither are batches in which a client has set offsets.
    """
    if size < _HEADER_BYTES or size >= _SMALL_BYTES or load_flags(p, at) > 1:
        return 0
    if load_partition(p, at) != 0 or load_epoch(p, at) != 0:
        return 0
    if load_columns(p, at) & _PRODUCER_BIT or load_producer_epoch(p, at) != _NO_PRODUCER:
        return 0
    return load_record_count(p, at)


@cython.cfunc
def _check_neighbours(runs: Runs) -> cython.void:
    """Raise ValueError unless the batches can be merged.

    They must have no producer id, the same partition and epoch, no gaps between them, and together fit one batch.
    """
    one: Lent
    other: Lent
    offsets: cython.longlong = 0
    addresses: cython.longlong = 0
    i: cython.Py_ssize_t
    for i in range(len(runs.sources)):
        other = runs.sources[i]
        offsets += load_u32(other.p, 84)
        addresses += load_u32(other.p, 80)
        if runs.layouts[_LAYOUT * i + 12] >= 0:
            raise ValueError(f"a batch of a producer cannot be merged number={i}")
        if i == 0:
            continue
        one = runs.sources[i - 1]
        if load_u64(one.p, 16) != load_u64(other.p, 16) or load_u32(one.p, 24) != load_u32(other.p, 24):
            raise ValueError(f"batches of several partitions or epochs cannot be merged number={i}")
        if load_u64(one.p, 16) == 0:
            continue
        if load_u64(one.p, 32) + load_u32(one.p, 84) != load_u64(other.p, 32):
            raise ValueError(f"offsets of numbered batches are not consecutive number={i}")
        if load_u64(one.p, 40) + load_u32(one.p, 80) != load_u64(other.p, 40):
            raise ValueError(f"addresses of numbered batches are not consecutive number={i}")
    if offsets > 0xFFFFFFFF or addresses > 0xFFFFFFFF:
        raise ValueError(f"spans too long for one batch offsets={offsets} addresses={addresses}")


def merge(batches: Sequence[Buffer]) -> bytearray:
    """Merge batches into one, which gets partition, epoch, offset and append time of the first one.

    The batches either have no offsets yet, or are consecutive in one partition and epoch. Each record retains its
    offset.

    Raises:
        ValueError: a batch has a producer id, partitions or epochs differ, or there is a gap between batches.
        Invalid: RECORD_TOO_LARGE: the result would be too large.
    """
    runs: Runs = open_sources(batches)
    first: Lent
    lent: Lent
    i: cython.Py_ssize_t
    if not runs.sources:
        raise ValueError("nothing to merge")
    first = runs.sources[0]
    if len(runs.sources) == 1:
        return bytearray(memoryview(batches[0]).cast("B")[: load_u32(first.p, 4)])
    _check_neighbours(runs)
    triples: cython.p_longlong = zeros(runs, 3 * len(runs.sources))
    for i in range(len(runs.sources)):
        triples[3 * i] = i
        triples[3 * i + 2] = load_u32(runs.bases[i], 28)
        runs.deltas = runs.deltas or runs.layouts[_LAYOUT * i + 50] >= 0
    set_runs(runs, triples, len(runs.sources))
    batch = concatenate(runs)
    lent = runs.batch
    move(lent.p, 16, first.p, 16, 12)  # partition, epoch
    move(lent.p, 32, first.p, 32, 24)  # offset, address, time
    seal_header(lent.p, 0)
    return batch


def slice_records(batch: Buffer, start: int, stop: int) -> bytearray:
    """Return records ``start`` to ``stop`` as a batch with the same partition, epoch and append time.

    Records retain their offsets and sequence numbers.

    Raises:
        IndexError: the range is empty or not within the batch.
    """
    runs: Runs = open_sources((batch,))
    source: Lent = runs.sources[0]
    count: cython.longlong = load_u32(source.p, 28)
    first: cython.longlong = start
    last: cython.longlong = stop
    if first < 0 or first >= last or last > count:
        raise IndexError(f"no such records start={start} stop={stop} records={count}")
    runs.sequences = runs.layouts[14] >= 0
    runs.deltas = runs.layouts[50] >= 0
    triples: cython.p_longlong = zeros(runs, 3)
    triples[1] = first
    triples[2] = last
    set_runs(runs, triples, 1)
    result = concatenate(runs)
    target: Lent = runs.batch
    move(target.p, 16, source.p, 16, 12)  # partition, epoch
    store_u64(target.p, 32, load_u64(source.p, 32) + offset_delta(source.p, runs.layouts[50], first))
    store_u64(target.p, 40, load_u64(source.p, 40) + address_delta(source.p, runs.layouts, 0, first))
    move(target.p, 48, source.p, 48, 8)  # time
    seal_header(target.p, 0)
    return result


@cython.cfunc
def _pick(runs: Runs, rows: Lendable) -> cython.void:
    """Select the records with these indexes (i32 array). ``runs`` must have a single source.

    Raises IndexError if a record does not exist.
    """
    source: Lent = runs.sources[0]
    lent: Lent = lend(rows)
    count: cython.longlong = load_u32(source.p, 28)
    row_count: cython.Py_ssize_t = lent.size // 4
    i: cython.Py_ssize_t = 0
    start: cython.longlong
    stop: cython.longlong
    run_count: cython.Py_ssize_t = 0
    triples: cython.p_longlong = zeros(runs, 3 * row_count)
    while i < row_count:
        start = load_i32(lent.p, 4 * i)
        if start < 0 or start >= count:
            raise IndexError(f"no such record index={start} records={count}")
        stop = start
        while i < row_count and stop < count and load_i32(lent.p, 4 * i) == stop:
            stop += 1
            i += 1
        triples[3 * run_count + 1] = start
        triples[3 * run_count + 2] = stop
        run_count += 1
    runs.sequences = runs.layouts[12] >= 0 and (runs.layouts[14] >= 0 or run_count > 1)
    set_runs(runs, triples, run_count)


def take(batch: Buffer, rows: Lendable) -> bytearray:
    """Return the records at these indexes, in that order, as a batch without offsets.

    Records of an idempotent producer retain their sequence numbers.

    Args:
        batch: a validated batch.
        rows: i32 array of record indexes.

    Raises:
        IndexError: a record does not exist.
        Invalid: INVALID_BATCH: no rows.
    """
    runs: Runs = open_sources((batch,))
    _pick(runs, rows)
    return concatenate(runs)


def keep(batch: Buffer, rows: Lendable, *, base_offset: int, base_address: int) -> bytearray:
    """Return a compacted batch with the records at these indexes, which retain their offsets.

    The batch covers the offsets from ``base_offset`` to the end of its last record or, if that is the last one of the
    source, to the end of the source. It has the partition, epoch, append time and producer of the source.

    Args:
        batch: a validated batch.
        rows: ascending i32 array of record indexes.
        base_offset: first offset to cover, at most the batch's own.
        base_address: the same as a byte position, Kafka 0.7's offset.

    Raises:
        IndexError: a record does not exist.
        Invalid: INVALID_BATCH: no rows, or a range of removed records does not fit 32 bits.
    """
    runs: Runs = open_sources((batch,))
    source: Lent = runs.sources[0]
    runs.lead_offset = cython.cast(cython.longlong, load_u64(source.p, 32)) - base_offset
    runs.lead_address = cython.cast(cython.longlong, load_u64(source.p, 40)) - base_address
    if not (0 <= runs.lead_offset < _LEAD_MAX and 0 <= runs.lead_address < _LEAD_MAX):
        raise Invalid(
            ErrorCode.INVALID_BATCH,
            f"too many removed records before a record of the batch offset={base_offset} address={base_address}",
        )
    runs.deltas = True
    runs.holes = True
    _pick(runs, rows)
    result = concatenate(runs)
    target: Lent = runs.batch
    move(target.p, 16, source.p, 16, 12)  # partition, epoch
    store_u64(target.p, 32, base_offset)
    store_u64(target.p, 40, base_address)
    move(target.p, 48, source.p, 48, 8)  # time
    if runs.triples[3 * runs.run_count - 1] == load_record_count(source.p, 0):
        store_u32(target.p, 80, runs.lead_address + load_u32(source.p, 80))
        store_u32(target.p, 84, runs.lead_offset + load_u32(source.p, 84))
    seal_header(target.p, 0)
    return result


def spread(batch: Buffer, offsets: Lendable | None = None, *, lead: int, span: int) -> bytearray:
    """Return a compacted batch with the same records, which covers offsets without a record, too. It has no offset yet.

    Args:
        batch: a validated batch.
        offsets: u32 array, the offset of each record relative to the batch. By default, those that it has.
        lead: offsets to cover before the batch.
        span: offsets that the result covers, ``lead`` included.

    Raises:
        Invalid: INVALID_BATCH: the offsets do not ascend or do not fit the span, or the span is above 2^30.
    """
    runs: Runs = open_sources((batch,))
    lent: Lent = runs.sources[0]
    count: cython.longlong = load_u32(lent.p, 28)
    before: cython.longlong = lead
    total: cython.longlong = span
    last: cython.longlong = offset_delta(lent.p, runs.layouts[50], count - 1)
    fits: cython.bint = 0 <= before < total <= _SPAN_MAX
    i: cython.Py_ssize_t
    if offsets is not None:
        lent = lend(offsets)
        fits = fits and lent.size == 4 * count
        if fits:
            for i in range(1, count):
                fits &= load_u32(lent.p, 4 * i) > load_u32(lent.p, 4 * i - 4)
            last = load_u32(lent.p, 4 * count - 4)
    if not fits or before + last >= total:
        raise Invalid(
            ErrorCode.INVALID_BATCH,
            f"offsets of a batch do not ascend or do not fit lead={lead} last={last} span={span}",
        )
    runs.deltas = True
    runs.holes = True
    runs.lead_offset = before
    triples: cython.p_longlong = zeros(runs, 3)
    triples[2] = count
    set_runs(runs, triples, 1)
    result = concatenate(runs)
    target: Lent = runs.batch
    if offsets is not None:
        for i in range(count):
            store_u32(target.p, runs.places[50] + 4 * i, before + load_u32(lent.p, 4 * i))
        finish(target.p, runs.places, count)
    store_u32(target.p, 84, total)
    seal_header(target.p, 0)
    return result
