"""Encode stored batches as the messages of a poll reply, in any version of the Iggy protocol.

* One call encodes all messages of a read, whichever protocol stored them; no Python code runs per message.
* A message is written completely or not at all.

The dialects D0 to D3 are defined in ``dialect``. The ``state`` array of a call has these i64 words:

* next offset to write, messages that may be written, bytes of ``out`` that may be used
* position in ``out``, position in the chunk of a compressed batch
* offset of the last message written (-1: none), bytes needed by the next message if there was not enough space
* two words of the seed for ids of records without one, and the partition

(spec: iggy#d0-poll-reply, iggy#d2-poll-reply, iggy#d3-poll-reply)
"""

from __future__ import annotations

from array import array
from typing import Final

import cython

from polywire.records.memory import Lendable

if cython.compiled:
    from cython.cimports.polywire.protocols.iggy.decoder import batch_checksum
    from cython.cimports.polywire.records.checksum import crc32_raw
    from cython.cimports.polywire.records.fields import load_append_time_us, load_base_offset, load_record_count
    from cython.cimports.polywire.records.header import fill_layout
    from cython.cimports.polywire.records.lookup import first_row
    from cython.cimports.polywire.records.memory import (
        Lent,
        clear,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        load_u64,
        move,
        store_i64,
        store_u32,
        store_u64,
    )
    from cython.cimports.polywire.records.xxh3 import xxh3_raw
else:
    from polywire.protocols.iggy.decoder import batch_checksum
    from polywire.records.checksum import crc32_raw
    from polywire.records.fields import load_append_time_us, load_base_offset, load_record_count
    from polywire.records.header import fill_layout
    from polywire.records.lookup import first_row
    from polywire.records.memory import (
        Lent,
        clear,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        load_u64,
        move,
        store_i64,
        store_u32,
        store_u64,
    )
    from polywire.records.xxh3 import xxh3_raw

DONE: Final = 0  # all messages of the chunk were written
FULL: Final = 1  # the limits of the reply, or the buffer, do not allow another message
COMPRESSED: Final = 2  # the next batch is compressed

NEXT: Final = 0  # the indexes of the state words
LEFT: Final = 1
CAP: Final = 2
AT: Final = 3
POSITION: Final = 4
LAST: Final = 5
NEEDED: Final = 6
SEED_LOW: Final = 7
SEED_HIGH: Final = 8
PARTITION: Final = 9  # the partition's number, which is written in records of D3
STATE_WORDS: Final = 10

FLAT: Final = 4  # the layouts of a message; FLAT is the layout of D0 and D1
D2A: Final = 0
D2B: Final = 1
D2C: Final = 2
D3: Final = 3

_NO_TIME = cython.declare(cython.longlong, -(2**63))
_NO_VARIANT = cython.declare(cython.ulonglong, 0x3FFFFFFFFFFFFFFF)
_VARIANT = cython.declare(cython.ulonglong, 0x8000000000000000)
_NO_VERSION = cython.declare(cython.ulonglong, 0xFFFFFFFFFFFF0FFF)
_VERSION = cython.declare(cython.ulonglong, 0x4000)
_VALUE_MAX = cython.declare(cython.longlong, 255)
_DELTA_MAX = cython.declare(cython.longlong, 4_294_967_295)
_NAMES = cython.declare(cython.uchar[80])  # type: ignore[misc, valid-type]
_EVENT_NAMES: Final = b"event.type\0\0\0\0\0\0\0\0\0\0event.schema_version\0event.aggregate_version event.metadata"


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _stir(x: cython.ulonglong) -> cython.ulonglong:
    """Mix the bits of ``x`` (splitmix64)."""
    if cython.compiled:
        x = (x ^ (x >> 30)) * cython.cast(cython.ulonglong, 0xBF58476D1CE4E5B9)
        x = (x ^ (x >> 27)) * cython.cast(cython.ulonglong, 0x94D049BB133111EB)
    else:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_id(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    row: cython.Py_ssize_t,
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
    state: cython.p_const_longlong,
    offset: cython.longlong,
) -> cython.void:
    """Write a record's id.

    A record without an id gets a UUID that is computed from the partition's seed and the offset.
    """
    low: cython.ulonglong = 0
    high: cython.ulonglong = 0
    if places[16] >= 0:
        low = load_u64(p, places[16] + 16 * row)
        high = load_u64(p, places[16] + 16 * row + 8)
    if low == 0 and high == 0:  # a UUID of version 4, variant 1; the number's bytes are reversed
        low = (_stir(cython.cast(cython.ulonglong, state[7]) ^ offset) & _NO_VARIANT) | _VARIANT
        high = (_stir(cython.cast(cython.ulonglong, state[8]) ^ offset) & _NO_VERSION) | _VERSION
    store_u64(out, at, low)
    store_u64(out, at + 8, high)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _is_shown(
    p: cython.p_const_uchar, places: cython.p_const_longlong, entry: cython.Py_ssize_t, typed: cython.bint
) -> cython.bint:
    """Return whether a header is sent to Iggy clients.

    Its key and its value must have 1 to 255 bytes. Before layout D2c, the key must be text.
    """
    size: cython.longlong = load_i32(p, places[26] + 4 * entry + 4) - load_i32(p, places[26] + 4 * entry)
    if size < 1 or size > _VALUE_MAX or (not typed and p[places[24] + entry] != 2):
        return False
    size = load_i32(p, places[32] + 4 * entry + 4) - load_i32(p, places[32] + 4 * entry)
    return 1 <= size <= _VALUE_MAX and p[places[30] + entry] != 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _event_size(
    places: cython.p_const_longlong, p: cython.p_const_uchar, row: cython.Py_ssize_t, column: cython.int
) -> cython.longlong:
    """Return the size of a record's event type or metadata; 0 if Iggy cannot represent it."""
    if places[2 * column] < 0:
        return 0
    size: cython.longlong = load_i32(p, places[2 * column] + 4 * row + 4) - load_i32(p, places[2 * column] + 4 * row)
    return size if size <= _VALUE_MAX else 0


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _is_event(p: cython.p_const_uchar, places: cython.p_const_longlong, row: cython.Py_ssize_t) -> cython.bint:
    return places[36] >= 0 and places[20] >= 0 and p[places[20] + row] & 2


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _headers_bytes(
    p: cython.p_const_uchar, places: cython.p_const_longlong, row: cython.Py_ssize_t, typed: cython.bint
) -> cython.longlong:
    total: cython.longlong = 0
    fixed: cython.longlong = 10 if typed else 9
    size: cython.longlong
    i: cython.Py_ssize_t
    if places[22] >= 0:
        for i in range(load_i32(p, places[22] + 4 * row), load_i32(p, places[22] + 4 * row + 4)):
            if _is_shown(p, places, i, typed):
                total += fixed + load_i32(p, places[26] + 4 * i + 4) - load_i32(p, places[26] + 4 * i)
                total += load_i32(p, places[32] + 4 * i + 4) - load_i32(p, places[32] + 4 * i)
    if _is_event(p, places, row):
        total += 2 * fixed + 20 + 4 + 23 + 8
        size = _event_size(places, p, row, 18)
        if size > 0:
            total += fixed + 10 + size
        size = _event_size(places, p, row, 22)
        if size > 0:
            total += fixed + 14 + size
    return total


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_entry(
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
    key: cython.p_const_uchar,
    key_at: cython.Py_ssize_t,
    key_size: cython.Py_ssize_t,
    key_kind: cython.uchar,
    value: cython.p_const_uchar,
    value_at: cython.Py_ssize_t,
    value_size: cython.Py_ssize_t,
    value_kind: cython.uchar,
) -> cython.Py_ssize_t:
    """Write one header, and the type of its key if the dialect has it. Return the position after the header."""
    if key_kind != 0:
        out[at] = key_kind
        at += 1
    store_u32(out, at, cython.cast(cython.uint, key_size))
    move(out, at + 4, key, key_at, key_size)
    at += 4 + key_size
    out[at] = value_kind
    store_u32(out, at + 1, cython.cast(cython.uint, value_size))
    move(out, at + 5, value, value_at, value_size)
    return at + 5 + value_size


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_headers(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    row: cython.Py_ssize_t,
    typed: cython.bint,
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Write a record's headers, with the fields of an event as headers. Return the position after them."""
    size: cython.Py_ssize_t
    start: cython.Py_ssize_t
    i: cython.Py_ssize_t
    text: cython.uchar = 2 if typed else 0
    if places[22] >= 0:
        for i in range(load_i32(p, places[22] + 4 * row), load_i32(p, places[22] + 4 * row + 4)):
            if not _is_shown(p, places, i, typed):
                continue
            start = load_i32(p, places[26] + 4 * i)
            size = load_i32(p, places[26] + 4 * i + 4) - start
            at = _put_entry(
                out,
                at,
                p,
                places[28] + start,
                size,
                p[places[24] + i] if typed else 0,
                p,
                places[34] + load_i32(p, places[32] + 4 * i),
                load_i32(p, places[32] + 4 * i + 4) - load_i32(p, places[32] + 4 * i),
                p[places[30] + i],
            )
    if _is_event(p, places, row):
        size = _event_size(places, p, row, 18)
        if size > 0:
            at = _put_entry(out, at, _NAMES, 0, 10, text, p, places[38] + load_i32(p, places[36] + 4 * row), size, 2)
        at = _put_entry(out, at, _NAMES, 20, 20, text, p, places[40] + 4 * row, 4, 11)
        at = _put_entry(out, at, _NAMES, 41, 23, text, p, places[42] + 8 * row, 8, 12)
        size = _event_size(places, p, row, 22)
        if size > 0:
            at = _put_entry(out, at, _NAMES, 65, 14, text, p, places[46] + load_i32(p, places[44] + 4 * row), size, 1)
    return at


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_flat(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    row: cython.Py_ssize_t,
    headers: cython.longlong,
    out: cython.p_uchar,
    state: cython.p_const_longlong,
    offset: cython.longlong,
    append_time: cython.longlong,
) -> cython.Py_ssize_t:
    """Write a message in the layout of D0 and D1. Return the position after it."""
    at: cython.Py_ssize_t = state[3]
    value_at: cython.Py_ssize_t = places[2] + load_i32(p, places[0] + 4 * row)
    size: cython.Py_ssize_t = load_i32(p, places[0] + 4 * row + 4) - load_i32(p, places[0] + 4 * row)
    store_i64(out, at, offset)
    out[at + 8] = 1  # state: available
    store_i64(out, at + 9, append_time)
    _put_id(p, places, row, out, at + 17, state, offset)
    store_u32(out, at + 33, crc32_raw(p, value_at, size))
    store_u32(out, at + 37, cython.cast(cython.uint, headers))
    at += 41
    if headers > 0:
        at = _put_headers(p, places, row, False, out, at)
    store_u32(out, at, cython.cast(cython.uint, size))
    move(out, at + 4, p, value_at, size)
    return at + 4 + size


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_message(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    row: cython.Py_ssize_t,
    head: cython.Py_ssize_t,
    headers: cython.longlong,
    out: cython.p_uchar,
    state: cython.p_const_longlong,
    offset: cython.longlong,
) -> cython.Py_ssize_t:
    """Write the fields that all layouts since D2 share (id, sizes, payload, headers).

    Return the position after them.
    """
    at: cython.Py_ssize_t = state[3]
    start: cython.Py_ssize_t = load_i32(p, places[0] + 4 * row)
    size: cython.Py_ssize_t = load_i32(p, places[0] + 4 * row + 4) - start
    sizes_at: cython.Py_ssize_t = 32 if head == 48 else 48
    clear(out, at, head)
    _put_id(p, places, row, out, at + 8, state, offset)
    store_u32(out, at + sizes_at, cython.cast(cython.uint, headers))
    store_u32(out, at + sizes_at + 4, cython.cast(cython.uint, size))
    move(out, at + head, p, places[2] + start, size)
    at += head + size
    # with a head of 56 bytes, keys are always texts
    return _put_headers(p, places, row, head != 56, out, at) if headers > 0 else at


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _origin(
    p: cython.p_const_uchar, places: cython.p_const_longlong, row: cython.Py_ssize_t, append_time: cython.longlong
) -> cython.longlong:
    time: cython.longlong = _NO_TIME
    if places[18] >= 0:
        time = load_i64(p, places[18] + 8 * row)
    return append_time if time == _NO_TIME else time


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _finish_indexed(
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    offset: cython.longlong,
    append_time: cython.longlong,
    origin: cython.longlong,
    form: cython.int,
) -> cython.void:
    """Write offset, times and checksum of a message in a layout of D2."""
    store_i64(out, at + 24, offset)
    store_i64(out, at + 32, append_time)
    store_i64(out, at + 40, origin)
    store_u64(out, at, crc32_raw(out, at + 8, end - at - 8) if form == 0 else xxh3_raw(out, at + 8, end - at - 8))


@cython.cfunc
def _close_record(out: Lent, start: cython.Py_ssize_t, end: cython.Py_ssize_t, count: cython.Py_ssize_t) -> cython.void:
    if count == 0:
        return
    scratch: Lent = lend_writable(bytearray(44 + 8 * count))
    store_u64(out.p, start + 32, end - start)
    store_u32(out.p, start + 48, cython.cast(cython.uint, count))
    store_u64(out.p, start + 40, batch_checksum(out.p, start, end, count, scratch.p))


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_classic(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    at: cython.Py_ssize_t,
    out: cython.p_uchar,
    state: cython.p_longlong,
    form: cython.int,
) -> cython.int:
    """Write the messages of a stored batch in a layout of D0 to D2. Return DONE or FULL."""
    base: cython.longlong = load_base_offset(p, at)
    append_time: cython.longlong = load_append_time_us(p, at)
    count: cython.Py_ssize_t = load_record_count(p, at)
    head: cython.Py_ssize_t = 64 if form == 2 else (45 if form == 4 else 56)
    row: cython.Py_ssize_t = first_row(p, places, base, count, state[0])
    place: cython.Py_ssize_t
    headers: cython.longlong
    size: cython.longlong
    offset: cython.longlong
    while row < count:
        headers = _headers_bytes(p, places, row, head == 64) if places[22] >= 0 or places[36] >= 0 else 0
        size = head + headers + load_i32(p, places[0] + 4 * row + 4) - load_i32(p, places[0] + 4 * row)
        if state[1] <= 0 or size > state[2] - state[3]:
            state[6] = size
            return 1
        offset = base + (load_u32(p, places[50] + 4 * row) if places[50] >= 0 else row)
        if form == 4:
            state[3] = _put_flat(p, places, row, headers, out, state, offset, append_time)
        else:
            place = state[3]
            state[3] = _put_message(p, places, row, head, headers, out, state, offset)
            _finish_indexed(out, place, state[3], offset, append_time, _origin(p, places, row, append_time), form)
        state[0] = offset + 1
        state[1] -= 1
        state[5] = offset
        row += 1
    return 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _earliest(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    row: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    append_time: cython.longlong,
) -> cython.longlong:
    earliest: cython.longlong = _origin(p, places, row, append_time)
    time: cython.longlong
    if places[18] < 0:
        return earliest
    while row < count:
        time = _origin(p, places, row, append_time)
        if time < earliest:
            earliest = time
        row += 1
    return earliest


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _open_record(
    out: cython.p_uchar,
    start: cython.Py_ssize_t,
    offset: cython.longlong,
    append_time: cython.longlong,
    earliest: cython.longlong,
    first: cython.longlong,
) -> cython.longlong:
    """Begin a batch in Iggy's newest layout (D3), and return its origin time: the earliest origin time of its messages.

    If that time is too early for a delta, the batch gets the time of the first message.
    """
    origin: cython.longlong = earliest if first - earliest <= _DELTA_MAX else first
    clear(out, start, 256)
    store_i64(out, start + 8, offset)
    store_i64(out, start + 16, append_time)
    store_i64(out, start + 24, origin)
    return origin


@cython.cfunc
def _put_framed(
    source: Lent, places: cython.p_const_longlong, at: cython.Py_ssize_t, target: Lent, state: cython.p_longlong
) -> cython.int:
    """Write the messages of a stored batch as batches in Iggy's newest layout (D3). Return DONE or FULL.

    A new one begins when a message's time cannot be encoded as a delta to the batch's time.
    """
    base: cython.longlong = load_base_offset(source.p, at)
    append_time: cython.longlong = load_append_time_us(source.p, at)
    count: cython.Py_ssize_t = load_record_count(source.p, at)
    row: cython.Py_ssize_t = first_row(source.p, places, base, count, state[0])
    start: cython.Py_ssize_t = -1
    origin: cython.longlong = 0
    first: cython.longlong = 0
    frames: cython.Py_ssize_t = 0
    place: cython.Py_ssize_t
    headers: cython.longlong
    size: cython.longlong
    offset: cython.longlong
    delta: cython.longlong
    time: cython.longlong
    while row < count:
        headers = _headers_bytes(source.p, places, row, True) if places[22] >= 0 or places[36] >= 0 else 0
        size = 48 + headers + load_i32(source.p, places[0] + 4 * row + 4) - load_i32(source.p, places[0] + 4 * row)
        delta = _origin(source.p, places, row, append_time) - origin
        if start >= 0 and (delta < 0 or delta > _DELTA_MAX):
            _close_record(target, start, state[3], frames)
            start = -1
        if state[1] <= 0 or size + (256 if start < 0 else 0) > state[2] - state[3]:
            state[6] = size + 256
            break
        offset = base + (load_u32(source.p, places[50] + 4 * row) if places[50] >= 0 else row)
        if start < 0:
            start = state[3]
            frames = 0
            first = offset
            time = _origin(source.p, places, row, append_time)
            origin = _open_record(
                target.p, start, offset, append_time, _earliest(source.p, places, row, count, append_time), time
            )
            store_i64(target.p, start, state[9])
            delta = time - origin
            state[3] += 256
        place = state[3]
        state[3] = _put_message(source.p, places, row, 48, headers, target.p, state, offset)
        store_u32(target.p, place + 24, cython.cast(cython.uint, offset - first))
        store_u32(target.p, place + 28, cython.cast(cython.uint, delta))
        store_u64(target.p, place, xxh3_raw(target.p, place + 8, state[3] - place - 8))
        frames += 1
        state[0] = offset + 1
        state[1] -= 1
        state[5] = offset
        row += 1
    if start >= 0:
        _close_record(target, start, state[3], frames)
    return 0 if row == count else 1


def put_chunk(chunk: Lendable, at: int, out: Lendable, state: Lendable, form: int) -> int:
    """Write the messages of a chunk, from position ``at`` on, up to the limits in ``state``.

    Return DONE, FULL or COMPRESSED. Call it with each chunk of a read in turn and the same state. Bytes of ``out``
    after the position in ``state`` are undefined. Raises ValueError if the state allows more bytes than ``out`` has.
    """
    source: Lent = lend(chunk)
    target: Lent = lend_writable(out)
    numbers: Lent = lend_writable(state)
    place: cython.Py_ssize_t = at
    length: cython.Py_ssize_t
    ended: cython.int = 0
    wanted: cython.int = form
    i: cython.int
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
        words = cython.declare(cython.longlong[10])
    else:
        places = [0] * 54
        words = [0] * 10
    if numbers.size != 80:
        raise ValueError(f"state array has the wrong size bytes={numbers.size}")
    for i in range(10):
        words[i] = load_i64(numbers.p, 8 * i)
    if place < 0 or words[3] < 0 or words[2] > target.size:
        raise ValueError(f"state points outside the output buffer position={place} cap={words[2]} bytes={target.size}")
    while place < source.size and ended == 0:
        length = fill_layout(source.p, place, source.size, places)
        if length < 0:
            words[4] = place
            ended = 2
        elif wanted == 3:
            ended = _put_framed(source, places, place, target, words)
        else:
            ended = _put_classic(source.p, places, place, target.p, words, wanted)
        if ended == 0:
            place += length
    for i in range(10):
        store_i64(numbers.p, 8 * i, words[i])
    return ended


def new_state() -> array[int]:
    """Return a state for ``put_chunk`` with limits of zero. The caller sets its words."""
    return array("q", bytes(8 * STATE_WORDS))


if cython.compiled:
    _place: cython.Py_ssize_t
    for _place in range(79):
        _NAMES[_place] = _EVENT_NAMES[_place]
else:
    _NAMES = memoryview(_EVENT_NAMES)
