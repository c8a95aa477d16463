"""Decode Kafka record batches, version 2, into stored batches.

* One call checks a batch and another one builds it, without a Python object per record.
* Every length is checked before use, and the size of columns is measured before they are allocated.

A batch, numbers big-endian; the CRC covers the bytes after it::

    i64 base offset | i32 length of the rest | i32 leader epoch | i8 magic 2 | u32 CRC-32C | i16 attributes |
    i32 last offset delta | i64 first time, ms | i64 greatest time | i64 producer id | i16 producer epoch |
    i32 base sequence | i32 record count | records

Attributes: bits 0-2 codec, 3 append times, 4 transactional, 5 control. A record, all lengths and deltas zigzag
varints::

    length | u8 attributes | time delta | offset delta | key length, key | value length, value | header count | headers
    header: name length, name | value length, value                                     a length of -1 is null
"""

from __future__ import annotations

from typing import Final

import cython

from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.kafka.messages import Refused, WireError
from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.protocols.kafka.crc32c import crc32c_raw
    from cython.cimports.polywire.records.build import allocate, finish
    from cython.cimports.polywire.records.memory import (
        Lent,
        clear,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        move,
        store_i64,
        store_u32,
        store_u64,
    )
else:
    from polywire.protocols.kafka.crc32c import crc32c_raw
    from polywire.records.build import allocate, finish
    from polywire.records.memory import (
        Lent,
        clear,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        move,
        store_i64,
        store_u32,
        store_u64,
    )

BATCH_HEAD_BYTES: Final = 61
CODEC_AT: Final = 22  # position of the byte of a batch with its codec (``CODEC_BITS``)
CODEC_BITS: Final = 7
BATCH_BYTES_MAX: Final = 1_048_588  # limit for a batch as it was sent; Kafka's default

_HEAD_BYTES = cython.declare(cython.Py_ssize_t, 61)
# size of the base offset and the length, which the length does not include
_LOG_BYTES = cython.declare(cython.Py_ssize_t, 12)
_NOGIL_BYTES_MIN = cython.declare(cython.Py_ssize_t, 262_144)
_RECORD_BYTES_MIN = cython.declare(cython.longlong, 7)
_SPAN_BYTES = cython.declare(cython.Py_ssize_t, 32)
_COLUMN_COUNT = cython.declare(cython.int, 27)
_NO_TIME = cython.declare(cython.longlong, -(2**63))
_TIME_MS_MAX = cython.declare(cython.longlong, 2**62 // 1000)
_DELTA_MAX = cython.declare(cython.longlong, 2**61)
_I32_MAX = cython.declare(cython.longlong, 2_147_483_647)
_MASK32 = cython.declare(cython.longlong, 0xFFFFFFFF)
_MASK64: Final = 0xFFFFFFFFFFFFFFFF


@cython.final
@cython.cclass
class BatchHead:
    """The header of a batch.

    Attributes:
        end: position after the batch.
        codec: number of the compression of the records.
        producer_id: -1 if the producer is not idempotent.
    """

    if not cython.compiled:  # when compiled, decoder.pxd declares the fields
        __slots__ = (
            "base_sequence",
            "codec",
            "end",
            "first_time_ms",
            "has_append_time",
            "is_transactional",
            "max_time_ms",
            "producer_epoch",
            "producer_id",
            "record_count",
        )

    def __init__(
        self,
        end: int,
        codec: int,
        record_count: int,
        has_append_time: bool,
        is_transactional: bool,
        first_time_ms: int,
        max_time_ms: int,
        producer_id: int,
        producer_epoch: int,
        base_sequence: int,
    ) -> None:
        self.end = end
        self.codec = codec
        self.record_count = record_count
        self.has_append_time = has_append_time
        self.is_transactional = is_transactional
        self.first_time_ms = first_time_ms
        self.max_time_ms = max_time_ms
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.base_sequence = base_sequence


@cython.final
@cython.cclass
class Built:
    """A stored batch without sequence numbers.

    Attributes:
        max_time_ms: greatest record time in milliseconds; -1 if no record has a time.
        null_keys: number of records without a key.
    """

    if not cython.compiled:
        __slots__ = ("batch", "max_time_ms", "null_keys")

    def __init__(self, batch: bytearray, max_time_ms: int, null_keys: int) -> None:
        self.batch = batch
        self.max_time_ms = max_time_ms
        self.null_keys = null_keys


# The header


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _load(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.int) -> cython.longlong:
    i: cython.int
    x: cython.longlong = p[at]
    x -= (x >> 7) << 8
    for i in range(1, size):
        x = (x * 256) | p[at + i]
    return x


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _crc_matches(p: cython.p_const_uchar, end: cython.Py_ssize_t) -> cython.bint:
    return crc32c_raw(p, 21, end - 21) == _load(p, 17, 4) & _MASK32


@cython.ccall
def check_batch(records: Buffer | None, bytes_max: cython.longlong = BATCH_BYTES_MAX) -> BatchHead:
    """Check the record data of a partition in a PRODUCE request. Return the header of its batch.

    Raises Refused unless there is exactly one valid batch of a supported kind, with at most ``bytes_max`` bytes.
    """
    if records is None or len(records) == 0:
        raise Refused(WireError.INVALID_RECORD, "the partition has no record batch")
    lent: Lent = lend(records)
    end: cython.longlong
    attributes: cython.longlong
    count: cython.longlong
    matches: cython.bint
    if lent.size < _HEAD_BYTES or _load(lent.p, 8, 4) < _HEAD_BYTES - _LOG_BYTES or lent.p[16] != 2:
        raise Refused(WireError.CORRUPT_MESSAGE, f"record data is not a batch of version 2 bytes={lent.size}")
    end = _LOG_BYTES + _load(lent.p, 8, 4)
    if end > bytes_max:
        raise Refused(WireError.MESSAGE_TOO_LARGE, f"batch is too large bytes={end} limit={bytes_max}")
    if end > lent.size or lent.size - end >= _HEAD_BYTES:
        raise Refused(
            WireError.INVALID_RECORD, f"a partition must have exactly one batch bytes={lent.size} batch={end}"
        )
    if end < _NOGIL_BYTES_MIN:
        matches = _crc_matches(lent.p, end)
    else:
        with cython.nogil:
            matches = _crc_matches(lent.p, end)
    if not matches:
        raise Refused(WireError.CORRUPT_MESSAGE, "batch checksum does not match")
    attributes = _load(lent.p, 21, 2)
    count = _load(lent.p, 57, 4)
    reason = ""
    if attributes & 32:
        reason = "producers must not send control batches"
    elif attributes & 7 > 4:
        reason = f"unknown compression codec={attributes & 7}"
    elif count < 1 or _load(lent.p, 23, 4) != count - 1:
        reason = f"record count does not match the offset deltas count={count} last={_load(lent.p, 23, 4)}"
    elif _load(lent.p, 0, 8) != 0:
        reason = f"base offset must be 0 offset={_load(lent.p, 0, 8)}"
    elif _load(lent.p, 43, 8) < -1 or (_load(lent.p, 43, 8) >= 0 and _load(lent.p, 53, 4) < 0):
        reason = (
            f"batch has a producer id but no sequence producer={_load(lent.p, 43, 8)} sequence={_load(lent.p, 53, 4)}"
        )
    if reason:
        raise Refused(WireError.INVALID_RECORD, reason)
    if _load(lent.p, 43, 8) >= 0 and _load(lent.p, 51, 2) < 0:
        message = f"producer epoch is negative producer={_load(lent.p, 43, 8)} epoch={_load(lent.p, 51, 2)}"
        raise Refused(WireError.INVALID_PRODUCER_EPOCH, message)
    return BatchHead(
        end,
        attributes & 7,
        count,
        attributes & 8 != 0,
        attributes & 16 != 0,
        _load(lent.p, 27, 8),
        _load(lent.p, 35, 8),
        _load(lent.p, 43, 8),
        _load(lent.p, 51, 2),
        _load(lent.p, 53, 4),
    )


# The records


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _varint(
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    shift_max: cython.int,
    found: cython.p_longlong,
) -> cython.Py_ssize_t:
    """Read a varint in zigzag encoding into ``found``, and return the position after it.

    Returns -1 if the varint is too long or crosses ``end``.
    """
    x: cython.ulonglong = 0
    byte: cython.ulonglong
    shift: cython.int = 0
    while at < end and shift <= shift_max:
        byte = p[at]
        at += 1
        x |= (byte & 127) << shift
        if byte < 128:
            if cython.compiled:
                found[0] = cython.cast(cython.longlong, x >> 1) ^ -cython.cast(cython.longlong, x & 1)
            else:
                x &= _MASK64
                found[0] = (x >> 1) ^ -(x & 1)
            return at
        shift += 7
    return -1


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _sized(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t, found: cython.p_longlong
) -> cython.Py_ssize_t:
    """Skip length-prefixed bytes and store the length in ``found``.

    Returns the position after them, or -1 if they are malformed or cross ``end``.
    """
    at = _varint(p, at, end, 28, found)
    if at < 0 or found[0] < -1 or found[0] > end - at:
        return -1
    return at + found[0] if found[0] > 0 else at


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _measure_headers(
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    count: cython.longlong,
    sums: cython.p_longlong,
    found: cython.p_longlong,
) -> cython.Py_ssize_t:
    """Add the sizes of a record's headers to ``sums``. Return the position after them, or -1 if they are malformed."""
    sums[4] += count
    while count > 0:
        at = _sized(p, at, end, found)
        if at < 0 or found[0] < 0:
            return -1
        sums[5] += found[0]
        at = _sized(p, at, end, found)
        if at < 0:
            return -1
        if found[0] > 0:
            sums[6] += found[0]
        count -= 1
    return at


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _measure_payload(
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    span: cython.p_uchar,
    place: cython.Py_ssize_t,
    sums: cython.p_longlong,
    which: cython.int,
    found: cython.p_longlong,
) -> cython.Py_ssize_t:
    """Measure a key (``which`` 1) or a value (``which`` 0).

    Write its position and length to ``span``, and add its size to ``sums``.

    Returns the position after it, or -1 if it is malformed.
    """
    at = _sized(p, at, end, found)
    if at < 0:
        return -1
    if found[0] >= 0:
        sums[which] += found[0]
        store_u32(span, place, at - found[0])
    else:
        sums[2 + which] += 1
    store_u32(span, place + 4, found[0] & _MASK32)
    return at


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _measure_time(
    delta: cython.longlong, base_time: cython.longlong, timed: cython.bint, sums: cython.p_longlong
) -> cython.longlong:
    """Return a record's time in microseconds. If it is out of range, increment its counter in ``sums``."""
    time: cython.longlong = base_time
    if timed and -_DELTA_MAX <= delta <= _DELTA_MAX:
        time += delta
    elif timed:
        sums[9] += 1
    if time > _TIME_MS_MAX or time < -_TIME_MS_MAX:
        sums[9] += 1
        return _NO_TIME
    if time == -1:
        sums[7] += 1
        return _NO_TIME
    if time > sums[8]:
        sums[8] = time
    return time * 1000


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _measure(
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    base_time: cython.longlong,
    timed: cython.bint,
    spans: cython.p_uchar,
    sums: cython.p_longlong,
    deltas: cython.p_uchar,
    has_deltas: cython.bint,
) -> cython.bint:
    """Parse all records and write their positions and sizes to ``spans``. Return whether they are valid.

    ``deltas`` gets the u32 offset of each record relative to the batch, if ``has_deltas``.

    ``spans`` has for each record: i64 time, i32 position and length of the key and of the value, position and number of
    the headers.

    ``sums`` gets: bytes of values and of keys, null values, null keys, headers, bytes of their names and of their
    values, records without time, greatest time, times out of range. If ``timed``, records have individual times.
    """
    end: cython.Py_ssize_t
    place: cython.Py_ssize_t = 0
    if cython.compiled:
        found = cython.declare(cython.longlong[1])
    else:
        found = [0]
    for _ in range(count):
        at = _varint(p, at, stop, 28, found)
        if at < 0 or found[0] < 0 or found[0] > stop - at:
            return False
        end = at + found[0]
        at = _varint(p, at + 1, end, 63, found)
        if at < 0:
            return False
        store_i64(spans, place, _measure_time(found[0], base_time, timed, sums))
        at = _varint(p, at, end, 28, found)
        if at < 0 or (has_deltas and found[0] < 0):
            return False
        if has_deltas:
            store_u32(deltas, place >> 3, found[0])
        at = _measure_payload(p, at, end, spans, place + 8, sums, 1, found)
        if at < 0:
            return False
        at = _measure_payload(p, at, end, spans, place + 16, sums, 0, found)
        if at < 0:
            return False
        at = _varint(p, at, end, 28, found)
        if at < 0 or found[0] < 0 or found[0] > end - at:
            return False
        store_u32(spans, place + 24, at)
        store_u32(spans, place + 28, found[0])
        if found[0] > 0:
            at = _measure_headers(p, at, end, found[0], sums, found)
        if at != end:
            return False
        place += _SPAN_BYTES
    return at == stop


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill(
    p: cython.p_uchar,
    offsets_at: cython.Py_ssize_t,
    bytes_at: cython.Py_ssize_t,
    validity_at: cython.Py_ssize_t,
    source: cython.p_const_uchar,
    spans: cython.p_const_uchar,
    count: cython.Py_ssize_t,
) -> cython.void:
    """Copy the keys or the values of all records into their columns.

    ``spans`` points to the first record's position of the key or the value.
    """
    length: cython.longlong
    end: cython.Py_ssize_t = 0
    i: cython.Py_ssize_t
    if validity_at >= 0:
        clear(p, validity_at, (count + 7) >> 3)
    store_u32(p, offsets_at, 0)
    for i in range(count):
        length = load_i32(spans, _SPAN_BYTES * i + 4)
        if length >= 0:
            move(p, bytes_at + end, source, load_i32(spans, _SPAN_BYTES * i), length)
            end += length
            if validity_at >= 0:
                p[validity_at + (i >> 3)] |= 1 << (i & 7)
        store_u32(p, offsets_at + 4 * i + 4, end)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_headers(
    p: cython.p_uchar,
    places: cython.p_const_longlong,
    source: cython.p_const_uchar,
    end: cython.Py_ssize_t,
    spans: cython.p_const_uchar,
    count: cython.Py_ssize_t,
) -> cython.void:
    """Copy the headers of all records into their columns. Names are text; values are raw or null."""
    names: cython.Py_ssize_t = 0
    values: cython.Py_ssize_t = 0
    entry: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t
    i: cython.Py_ssize_t
    if cython.compiled:
        found = cython.declare(cython.longlong[1])
    else:
        found = [0]
    store_u32(p, places[22], 0)
    store_u32(p, places[26], 0)
    store_u32(p, places[32], 0)
    for i in range(count):
        at = load_i32(spans, _SPAN_BYTES * i + 24)
        for _ in range(load_i32(spans, _SPAN_BYTES * i + 28)):
            at = _sized(source, at, end, found)
            move(p, places[28] + names, source, at - found[0], found[0])
            names += found[0]
            p[places[24] + entry] = 2
            at = _sized(source, at, end, found)
            p[places[30] + entry] = 0
            if found[0] >= 0:
                move(p, places[34] + values, source, at - found[0], found[0])
                values += found[0]
                p[places[30] + entry] = 1
            entry += 1
            store_u32(p, places[26] + 4 * entry, names)
            store_u32(p, places[32] + 4 * entry, values)
        store_u32(p, places[22] + 4 * i + 4, entry)


@cython.cfunc
def _arrange(
    places: cython.p_longlong,
    sums: cython.p_const_longlong,
    count: cython.Py_ssize_t,
    has_producer: cython.bint,
    has_times: cython.bint,
) -> cython.void:
    i: cython.int
    for i in range(_COLUMN_COUNT):
        places[2 * i + 1] = -1
    places[1] = 4 * count + 4
    places[3] = sums[0]
    if sums[2] > 0:
        places[5] = (count + 7) >> 3
    if sums[3] < count:
        places[7] = 4 * count + 4
        places[9] = sums[1]
        if sums[3] > 0:
            places[11] = (count + 7) >> 3
    if has_producer:
        places[13] = 9
    if has_times:
        places[19] = 8 * count
    if sums[4] > 0:
        places[23] = 4 * count + 4
        places[25] = sums[4]
        places[27] = 4 * sums[4] + 4
        places[29] = sums[5]
        places[31] = sums[4]
        places[33] = 4 * sums[4] + 4
        places[35] = sums[6]


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_all(
    p: cython.p_uchar,
    places: cython.p_const_longlong,
    source: cython.p_const_uchar,
    stop: cython.Py_ssize_t,
    spans: cython.p_const_uchar,
    count: cython.Py_ssize_t,
) -> cython.void:
    i: cython.Py_ssize_t
    if cython.compiled:
        _fill(p, places[0], places[2], places[4], source, spans + 16, count)
        if places[6] >= 0:
            _fill(p, places[6], places[8], places[10], source, spans + 8, count)
    else:
        _fill(p, places[0], places[2], places[4], source, spans[16:], count)
        if places[6] >= 0:
            _fill(p, places[6], places[8], places[10], source, spans[8:], count)
    if places[18] >= 0:
        for i in range(count):
            store_i64(p, places[18] + 8 * i, load_i64(spans, _SPAN_BYTES * i))
    if places[22] >= 0:
        _fill_headers(p, places, source, stop, spans, count)


@cython.cfunc
def _put_producer(p: cython.p_uchar, at: cython.Py_ssize_t, head: BatchHead) -> cython.void:
    """Write the producer's id, epoch and first sequence.

    The letter before the id marks producers of this protocol.
    """
    i: cython.int
    producer_id: cython.longlong = head.producer_id
    p[at] = 107  # the letter "k"
    for i in range(8):
        p[at + 1 + i] = (producer_id >> (56 - 8 * i)) & 255
    store_i64(p, 56, head.producer_epoch)
    store_u64(p, 64, head.base_sequence)


@cython.cfunc
def _allocated(places: cython.p_longlong, count: cython.Py_ssize_t) -> bytearray:
    try:
        return allocate(places, count)
    except BrokerError as error:
        too_large = error.code is ErrorCode.RECORD_TOO_LARGE
        raise Refused(WireError.MESSAGE_TOO_LARGE if too_large else WireError.INVALID_RECORD, error.message) from None


@cython.ccall
def build(
    plain: Lendable,
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    head: BatchHead,
    keep_times: cython.bint = True,
    deltas: bytearray | None = None,
) -> Built:
    """Build a stored batch from the decompressed records between ``start`` and ``stop``.

    Args:
        keep_times: whether to store the producer's timestamps.
        deltas: 4 bytes for each record, which get its offset relative to the batch, as u32. The caller checks them.
            Without it, the records have consecutive offsets.

    Raises:
        Refused: a record is malformed or too large.
    """
    source: Lent = lend(plain)
    at: cython.Py_ssize_t = start
    end: cython.Py_ssize_t = stop
    count: cython.Py_ssize_t = head.record_count
    base_time: cython.longlong = head.max_time_ms if head.has_append_time else head.first_time_ms
    timed: cython.bint = not head.has_append_time
    i: cython.int
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
        sums = cython.declare(cython.longlong[10])
        for i in range(10):
            sums[i] = 0
    else:
        places = [0] * 54
        sums = [0] * 10
    sums[8] = -1
    if at < 0 or at > end or end > source.size:
        raise ValueError(f"range is outside the buffer start={start} stop={stop} size={source.size}")
    if count > (end - at) // _RECORD_BYTES_MIN or end - at > _I32_MAX:
        raise Refused(WireError.INVALID_RECORD, f"too few bytes for the records count={count} bytes={end - at}")
    if base_time > _DELTA_MAX or base_time < -_DELTA_MAX:
        raise Refused(WireError.INVALID_TIMESTAMP, f"timestamp is out of range time={base_time}")
    spans: Lent = lend_writable(bytearray(_SPAN_BYTES * count))
    offsets: Lent = spans if deltas is None else lend_writable(deltas)
    if deltas is not None and offsets.size != 4 * count:
        raise ValueError(f"four bytes for each record are needed bytes={offsets.size} records={count}")
    if not _measure(source.p, at, end, count, base_time, timed, spans.p, sums, offsets.p, deltas is not None):
        raise Refused(WireError.INVALID_RECORD, f"records of the batch are malformed count={count}")
    if sums[9] > 0:
        raise Refused(WireError.INVALID_TIMESTAMP, "timestamp of a record is out of range")
    _arrange(places, sums, count, head.producer_id >= 0, keep_times and sums[7] < count)
    batch = _allocated(places, count)
    target: Lent = lend_writable(batch)
    _fill_all(target.p, places, source.p, end, spans.p, count)
    if places[12] >= 0:
        _put_producer(target.p, places[12], head)
    finish(target.p, places, count)
    return Built(batch, sums[8], sums[3])
