"""Encode stored batches as Kafka record batches, version 2.

* One call encodes all batches of a read, without a Python object per record. Any protocol may have stored them.
* A record is written completely or not at all.
* Stored batches must be valid.

The batches that consumers get can differ from the stored ones. The first begins at the requested record. A batch longer
than ``SPLIT_BYTES`` is split. Short consecutive batches of the same epoch are joined up to ``JOIN_BYTES``. Records are
not compressed and have no producer id.

Length, counts, greatest time and CRC are written when a batch is complete (layout: see ``decoder``).

The ``state`` array of a call has these i64 words:

* next offset to write, bytes of ``out`` that may be used
* position in ``out``, position in the chunk of a compressed batch
* bytes that the next record needs, if it did not fit
"""

from __future__ import annotations

from array import array
from typing import Final

import cython

from polywire.records.memory import Lendable

if cython.compiled:
    from cython.cimports.polywire.protocols.kafka.crc32c import crc32c_raw
    from cython.cimports.polywire.records.header import fill_layout
    from cython.cimports.polywire.records.lookup import first_row
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        load_u64,
        move,
    )
else:
    from polywire.protocols.kafka.crc32c import crc32c_raw
    from polywire.records.header import fill_layout
    from polywire.records.lookup import first_row
    from polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        load_u64,
        move,
    )

DONE: Final = 0  # the chunk is finished
FULL: Final = 1  # the next record does not fit into the output
COMPRESSED: Final = 2  # the next batch is compressed

NEXT: Final = 0  # indexes into the state
CAP: Final = 1
AT: Final = 2
POSITION: Final = 3
NEEDED: Final = 4
STATE_WORDS: Final = 5

SPLIT_BYTES: Final = (
    1024 * 1024 - 1024
)  # size limit of a batch with more than one record; clients request one megabyte per partition
JOIN_BYTES: Final = 64 * 1024

_STATE: Final = array("q", [0] * STATE_WORDS)
_SPLIT = cython.declare(cython.Py_ssize_t, 1024 * 1024 - 1024)
_JOIN = cython.declare(cython.Py_ssize_t, 64 * 1024)
_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_BATCH_HEAD = cython.declare(cython.Py_ssize_t, 61)
_NO_TIME = cython.declare(cython.longlong, -(2**63))
_DELTA_MAX = cython.declare(cython.longlong, 2_147_483_647)
_NAMES = cython.declare(cython.uchar[67])  # type: ignore[misc, valid-type]
_EVENT_NAMES: Final = b"event.typeevent.schema_versionevent.aggregate_versionevent.metadata"


@cython.final
@cython.cclass
class _Out:
    """The output buffer, and the Kafka batch that is being written to it.

    Attributes:
        next: the next offset to write.
        start: position of the batch, which begins with space for its header; -1 if none was begun.
        count: number of its records.
        base, last: its first and last offset.
        first_time, max_time: in milliseconds.
    """

    if cython.compiled:
        lent: Lent
        p: cython.p_uchar
        at: cython.Py_ssize_t
        cap: cython.Py_ssize_t
        start: cython.Py_ssize_t
        next: cython.longlong
        base: cython.longlong
        last: cython.longlong
        epoch: cython.longlong
        first_time: cython.longlong
        max_time: cython.longlong
        append_time: cython.longlong
        count: cython.longlong
        needed: cython.longlong
        stamped: cython.bint

    def __init__(self, out: Lendable, state: array[int], stamped: bool) -> None:
        self.lent = lend_writable(out)
        self.p = self.lent.p
        self.next = state[0]
        self.cap = state[1]
        self.at = state[2]
        self.start = -1
        self.base = self.last = self.epoch = self.first_time = self.max_time = self.append_time = self.count = 0
        self.needed = 0
        self.stamped = stamped


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _store(p: cython.p_uchar, at: cython.Py_ssize_t, x: cython.longlong, size: cython.int) -> cython.void:
    i: cython.int
    for i in range(size):
        p[at + i] = (x >> (8 * (size - 1 - i))) & 255


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _zigzag(x: cython.longlong) -> cython.ulonglong:
    if cython.compiled:
        return (cython.cast(cython.ulonglong, x) << 1) ^ cython.cast(cython.ulonglong, x >> 63)
    return (x << 1) ^ (x >> 63)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _varint_bytes(x: cython.longlong) -> cython.Py_ssize_t:
    z: cython.ulonglong = _zigzag(x)
    size: cython.Py_ssize_t = 1
    while z >= 128:
        z >>= 7
        size += 1
    return size


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_varint(p: cython.p_uchar, at: cython.Py_ssize_t, x: cython.longlong) -> cython.Py_ssize_t:
    """Write a varint in zigzag encoding, and return the position after it."""
    z: cython.ulonglong = _zigzag(x)
    while z >= 128:
        p[at] = (z & 127) | 128
        z >>= 7
        at += 1
    p[at] = z
    return at + 1


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _to_ms(time_us: cython.longlong) -> cython.longlong:
    if cython.compiled:
        return time_us // 1000 if time_us >= 0 else -((999 - time_us) // 1000)
    return time_us // 1000


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _begin(out: _Out, base: cython.longlong, time: cython.longlong) -> cython.void:
    out.start = out.at
    out.at += _BATCH_HEAD
    out.base = base
    out.first_time = time
    out.max_time = time
    out.count = 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _end(out: _Out) -> cython.void:
    p: cython.p_uchar = out.p
    start: cython.Py_ssize_t = out.start
    if start < 0:
        return
    _store(p, start, out.base, 8)
    _store(p, start + 8, out.at - start - 12, 4)
    _store(p, start + 12, out.epoch & _DELTA_MAX, 4)
    p[start + 16] = 2
    _store(p, start + 21, 8 if out.stamped else 0, 2)
    _store(p, start + 23, out.last - out.base, 4)
    _store(p, start + 27, out.first_time, 8)
    _store(p, start + 35, out.max_time, 8)
    _store(p, start + 43, -1, 8)
    _store(p, start + 51, -1, 2)
    _store(p, start + 53, -1, 4)
    _store(p, start + 57, out.count, 4)
    _store(p, start + 17, crc32c_raw(p, start + 21, out.at - start - 21), 4)
    out.start = -1


# Headers


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _is_event(p: cython.p_const_uchar, places: cython.p_const_longlong, row: cython.Py_ssize_t) -> cython.bint:
    return places[36] >= 0 and places[20] >= 0 and p[places[20] + row] & 2


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _decimal_bytes(x: cython.ulonglong) -> cython.Py_ssize_t:
    size: cython.Py_ssize_t = 1
    while x >= 10:
        x = x // 10
        size += 1
    return size


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _size(p: cython.p_const_uchar, offsets_at: cython.Py_ssize_t, row: cython.Py_ssize_t) -> cython.longlong:
    return load_i32(p, offsets_at + 4 * row + 4) - load_i32(p, offsets_at + 4 * row)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _pair_bytes(name: cython.longlong, value: cython.longlong) -> cython.longlong:
    """Return the size of a header, given the length of its name and its value. A null value has the length -1."""
    return _varint_bytes(name) + name + _varint_bytes(value) + (value if value > 0 else 0)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _name_size(p: cython.p_const_uchar, places: cython.p_const_longlong, entry: cython.Py_ssize_t) -> cython.longlong:
    """Return the size of a header's name. A name that is not text is sent as hexadecimal digits."""
    size: cython.longlong = _size(p, places[26], entry)
    return size if p[places[24] + entry] == 2 else 2 * size


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _headers_bytes(
    p: cython.p_const_uchar, places: cython.p_const_longlong, row: cython.Py_ssize_t, count: cython.p_longlong
) -> cython.longlong:
    """Return the size of a record's headers, and store their number in ``count``.

    The fields of an event become headers.
    """
    total: cython.longlong = 0
    i: cython.Py_ssize_t
    count[0] = 0
    if places[22] >= 0:
        for i in range(load_i32(p, places[22] + 4 * row), load_i32(p, places[22] + 4 * row + 4)):
            total += _pair_bytes(_name_size(p, places, i), _size(p, places[32], i) if p[places[30] + i] != 0 else -1)
            count[0] += 1
    if _is_event(p, places, row):
        total += _pair_bytes(10, _size(p, places[36], row))
        total += _pair_bytes(20, _decimal_bytes(load_u32(p, places[40] + 4 * row)))
        total += _pair_bytes(23, _decimal_bytes(load_u64(p, places[42] + 8 * row)))
        count[0] += 3
        if places[44] >= 0 and _size(p, places[44], row) > 0:
            total += _pair_bytes(14, _size(p, places[44], row))
            count[0] += 1
    return total


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_bytes(
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
    source: cython.p_const_uchar,
    source_at: cython.Py_ssize_t,
    size: cython.longlong,
) -> cython.Py_ssize_t:
    """Write length-prefixed bytes, and return the position after them. A null has the length -1."""
    at = _put_varint(out, at, size)
    if size > 0:
        move(out, at, source, source_at, size)
        at += size
    return at


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_decimal(out: cython.p_uchar, at: cython.Py_ssize_t, x: cython.ulonglong) -> cython.Py_ssize_t:
    """Write a number as length-prefixed decimal digits, and return the position after it."""
    size: cython.Py_ssize_t = _decimal_bytes(x)
    i: cython.Py_ssize_t
    at = _put_varint(out, at, size)
    for i in range(size):
        out[at + size - 1 - i] = 48 + x % 10
        x = x // 10
    return at + size


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_name(
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    entry: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    size: cython.longlong = _size(p, places[26], entry)
    source_at: cython.Py_ssize_t = places[28] + load_i32(p, places[26] + 4 * entry)
    digit: cython.uchar
    i: cython.Py_ssize_t
    if p[places[24] + entry] == 2:
        return _put_bytes(out, at, p, source_at, size)
    at = _put_varint(out, at, 2 * size)
    for i in range(2 * size):
        digit = p[source_at + (i >> 1)] >> 4 if i & 1 == 0 else p[source_at + (i >> 1)] & 15
        out[at + i] = 48 + digit if digit < 10 else 87 + digit
    return at + 2 * size


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_headers(
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    row: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    size: cython.longlong
    i: cython.Py_ssize_t
    if places[22] >= 0:
        for i in range(load_i32(p, places[22] + 4 * row), load_i32(p, places[22] + 4 * row + 4)):
            at = _put_name(out, at, p, places, i)
            size = _size(p, places[32], i) if p[places[30] + i] != 0 else -1
            at = _put_bytes(out, at, p, places[34] + load_i32(p, places[32] + 4 * i), size)
    if _is_event(p, places, row):
        at = _put_bytes(out, at, _NAMES, 0, 10)
        at = _put_bytes(out, at, p, places[38] + load_i32(p, places[36] + 4 * row), _size(p, places[36], row))
        at = _put_bytes(out, at, _NAMES, 10, 20)
        at = _put_decimal(out, at, load_u32(p, places[40] + 4 * row))
        at = _put_bytes(out, at, _NAMES, 30, 23)
        at = _put_decimal(out, at, load_u64(p, places[42] + 8 * row))
        if places[44] >= 0 and _size(p, places[44], row) > 0:
            at = _put_bytes(out, at, _NAMES, 53, 14)
            at = _put_bytes(out, at, p, places[46] + load_i32(p, places[44] + 4 * row), _size(p, places[44], row))
    return at


# Records


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _payload_size(
    p: cython.p_const_uchar,
    offsets_at: cython.Py_ssize_t,
    validity_at: cython.Py_ssize_t,
    row: cython.Py_ssize_t,
) -> cython.longlong:
    if offsets_at < 0 or (validity_at >= 0 and (p[validity_at + (row >> 3)] >> (row & 7)) & 1 == 0):
        return -1
    return _size(p, offsets_at, row)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _time(
    p: cython.p_const_uchar, places: cython.p_const_longlong, row: cython.Py_ssize_t, append_time: cython.longlong
) -> cython.longlong:
    time: cython.longlong = _NO_TIME
    if places[18] >= 0:
        time = load_i64(p, places[18] + 8 * row)
    return append_time if time == _NO_TIME else _to_ms(time)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_record(
    out: _Out, p: cython.p_const_uchar, places: cython.p_const_longlong, row: cython.Py_ssize_t, offset: cython.longlong
) -> cython.bint:
    """Write a record to the current batch or a new one. Return False if it does not fit into the output."""
    to: cython.p_uchar = out.p
    at: cython.Py_ssize_t
    time: cython.longlong = out.append_time if out.stamped else _time(p, places, row, out.append_time)
    key: cython.longlong = _payload_size(p, places[6], places[10], row)
    value: cython.longlong = _payload_size(p, places[0], places[4], row)
    headers: cython.longlong = 0
    size: cython.longlong
    fresh: cython.bint = out.start < 0
    if cython.compiled:
        header_count = cython.declare(cython.longlong[1])
    else:
        header_count = [0]
    header_count[0] = 0
    if places[22] >= 0 or places[36] >= 0:
        headers = _headers_bytes(p, places, row, header_count)
    if not fresh and offset - out.base > _DELTA_MAX:
        _end(out)
        fresh = True
    size = 1 + _varint_bytes(0 if fresh else time - out.first_time) + _varint_bytes(0 if fresh else offset - out.base)
    size += _varint_bytes(key) + _varint_bytes(value) + _varint_bytes(header_count[0]) + headers
    if key > 0:
        size += key
    if value > 0:
        size += value
    if not fresh and out.at - out.start + size > _SPLIT:
        _end(out)
        fresh = True
        size = 1 + 2 + _varint_bytes(key) + _varint_bytes(value) + _varint_bytes(header_count[0]) + headers
        size += (key if key > 0 else 0) + (value if value > 0 else 0)
    if size + _varint_bytes(size) + (_BATCH_HEAD if fresh else 0) > out.cap - out.at:
        out.needed = size + 5 + _BATCH_HEAD
        return False
    if fresh:
        _begin(out, offset, time)
    at = _put_varint(to, out.at, size)
    to[at] = 0
    at = _put_varint(to, at + 1, time - out.first_time)
    at = _put_varint(to, at, offset - out.base)
    at = _put_varint(to, at, key)
    if key > 0:
        move(to, at, p, places[8] + load_i32(p, places[6] + 4 * row), key)
        at += key
    at = _put_varint(to, at, value)
    if value > 0:
        move(to, at, p, places[2] + load_i32(p, places[0] + 4 * row), value)
        at += value
    at = _put_varint(to, at, header_count[0])
    if header_count[0] > 0:
        at = _put_headers(to, at, p, places, row)
    out.at = at
    out.count += 1
    out.last = offset
    if time > out.max_time:
        out.max_time = time
    return True


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_batch(
    out: _Out, p: cython.p_const_uchar, at: cython.Py_ssize_t, places: cython.p_const_longlong
) -> cython.bint:
    """Write the records of the stored batch at ``at``, from the next offset on. Return False if one does not fit."""
    base: cython.longlong = load_i64(p, at + 32)
    count: cython.Py_ssize_t = load_u32(p, at + 28)
    behind: cython.longlong = base + load_u32(p, at + 84)
    epoch: cython.longlong = load_u32(p, at + 24)
    append_time: cython.longlong = _to_ms(load_i64(p, at + 48))
    offset: cython.longlong
    row: cython.Py_ssize_t
    if out.start >= 0 and (
        out.at - out.start >= _JOIN or epoch != out.epoch or (out.stamped and append_time != out.append_time)
    ):
        _end(out)
    out.epoch = epoch
    out.append_time = append_time
    for row in range(first_row(p, places, base, count, out.next), count):
        offset = base + (load_u32(p, places[50] + 4 * row) if places[50] >= 0 else row)
        if not _put_record(out, p, places, row, offset):
            return False
        out.next = offset + 1
    if out.next < behind:
        out.next = behind
    if out.start >= 0 and behind - 1 - out.base <= _DELTA_MAX and behind - 1 > out.last:
        out.last = behind - 1
    return True


@cython.cfunc
def _put_chunk(out: _Out, chunk: Lent, state: array[int]) -> cython.int:
    at: cython.Py_ssize_t = state[3]
    size: cython.Py_ssize_t
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    while chunk.size - at >= _HEADER_BYTES:
        if load_i64(chunk.p, at + 32) + load_u32(chunk.p, at + 84) <= out.next:
            size = load_u32(chunk.p, at + 4)
            if size < _HEADER_BYTES:
                raise ValueError(f"no batch in a chunk position={at}")
            at += size
            continue
        size = fill_layout(chunk.p, at, chunk.size, places)
        if size < 0:
            state[3] = at
            return 2
        if not _put_batch(out, chunk.p, at, places):
            state[3] = at
            return 1
        at += size
    state[3] = at
    return 0


def begin(offset: int, *, at: int, limit: int) -> array[int]:
    """Return the state of an encoder, for ``put_batches``. Its output begins with the record at ``offset``.

    The output is written to ``out[at:limit]``.
    """
    state = _STATE[:]  # a quarter of the time of the type's constructor
    state[NEXT], state[CAP], state[AT] = offset, at + limit, at
    return state


def put_batches(chunk: Lendable, state: array[int], out: Lendable, *, append_times: bool = False) -> int:
    """Encode the stored batches in ``chunk`` from position ``state[POSITION]`` on.

    Returns DONE, FULL or COMPRESSED. Incomplete Kafka batches are not written. After FULL, ``state[NEEDED]`` is the
    size of the next record's batch.

    ``append_times``: whether consumers get append times instead of the producers' timestamps. Raises ValueError if
    ``out`` is shorter than the state says.
    """
    writer: _Out = _Out(out, state, append_times)
    reason: cython.int
    if writer.at < 0 or writer.cap > writer.lent.size:
        raise ValueError(f"output is outside the buffer at={writer.at} cap={writer.cap} size={writer.lent.size}")
    reason = _put_chunk(writer, lend(chunk), state)
    _end(writer)
    state[0] = writer.next
    state[2] = writer.at
    state[4] = writer.needed if reason == 1 else 0
    return reason


if cython.compiled:
    for _place in range(67):
        _NAMES[_place] = _EVENT_NAMES[_place]
else:
    _NAMES = memoryview(_EVENT_NAMES)
