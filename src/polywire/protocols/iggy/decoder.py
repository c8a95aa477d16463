"""Decode the messages of one Iggy request, in any version of the protocol, into one stored batch.

* A request costs two passes over the received bytes and one allocation; no Python code runs per message.
* Every length, index, checksum and reserved field is checked before a byte is copied.

The dialects D0 to D3 are defined in ``dialect``. The size of a message's head identifies its layout. From D2 on,
payload and user headers follow the head. In D0 and D1, the head size ``24`` means the size of a message without its
headers and its payload::

    head bytes   24 (D0, D1)                    56 (D2a, D2b), 64 (D2c)   48 (D3)
    checksum                                    0, not checked            0
    id           0                              8                         8
    origin time                                 u64 at 40                 delta u32 at 28
    headers      u32 at 16, then the headers    u32 at 48                 u32 at 32
    payload      u32 after the headers,         u32 at 52                 u32 at 36
                 then the payload

The documentation of 2023 also describes a message without headers. Its head has 20 bytes: the id and the u32 size of
the payload (``LISTED``).

(spec: iggy#d0-message-to-send, iggy#d2-messages, iggy#d3-send)
"""

from __future__ import annotations

import cython

from polywire.errors import BrokerError
from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.build import allocate, finish
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
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
    from polywire.records.build import allocate, finish
    from polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i64,
        load_u32,
        load_u64,
        move,
        store_i64,
        store_u32,
        store_u64,
    )
    from polywire.records.xxh3 import xxh3_raw

LISTED = 20  # bytes of a message's head in the layout that the documentation of 2023 shows as a list of bytes

_COLUMN_COUNT = cython.declare(cython.int, 27)
# Limits of header values in one message, and of payloads in one request of the dialects without batches
_HEADER_VALUES_MAX = cython.declare(cython.longlong, 102_400)
_FLAT_PAYLOADS_MAX = cython.declare(cython.longlong, 10_485_760)
_NO_TIME = cython.declare(cython.longlong, -(2**63))
# A time below this is in milliseconds (spec: iggy#between-dialects).
_MILLISECONDS_BELOW = cython.declare(cython.longlong, 100_000_000_000_000)
_TIME_MAX = cython.declare(cython.longlong, 2**62)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _measure_headers(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t, typed: cython.bint, sums: cython.p_longlong
) -> cython.int:
    """Check a message's user headers. Add their number, and the bytes of keys and of values, to ``sums``.

    Returns 0 or an error number.
    """
    values: cython.longlong = sums[2]
    size: cython.longlong
    while at < end:
        if typed:
            if p[at] < 1 or p[at] > 15:
                return 4040
            at += 1
        if end - at < 4:
            return 4018
        size = load_u32(p, at)
        if size < 1 or size > 255 or end - at - 4 < size + 5:
            return 4018
        sums[1] += size
        at += 4 + size
        if p[at] < 1 or p[at] > 15:
            return 4040 if typed else 3
        size = load_u32(p, at + 1)
        if size < 1 or size > 255 or end - at - 5 < size:
            return 4019
        sums[2] += size
        sums[0] += 1
        at += 5 + size
    return 4017 if sums[2] - values > _HEADER_VALUES_MAX else 0


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _split(
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    head: cython.Py_ssize_t,
    parts: cython.p_longlong,
) -> cython.Py_ssize_t:
    """Write the positions and sizes of a message's headers and payload to ``parts``.

    Returns the position after the message, or -1 if the message extends beyond ``stop``.
    """
    sizes_at: cython.Py_ssize_t = at + (32 if head == 48 else 48)
    if stop - at < head:
        return -1
    if head == 24:
        parts[0] = at + 20
        parts[1] = load_u32(p, at + 16)
        if parts[1] > stop - at - 24:
            return -1
        parts[2] = at + 24 + parts[1]
        parts[3] = load_u32(p, parts[2] - 4)
    elif head == 20:
        parts[0] = at + 20
        parts[1] = 0
        parts[2] = at + 20
        parts[3] = load_u32(p, at + 16)
    else:
        parts[1] = load_u32(p, sizes_at)
        parts[3] = load_u32(p, sizes_at + 4)
        parts[2] = at + head
        parts[0] = parts[2] + parts[3]
    if parts[1] + parts[3] > stop - at - head:
        return -1
    return at + head + parts[1] + parts[3]


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _check_frame(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t, i: cython.Py_ssize_t
) -> cython.int:
    """Check the index, the reserved field and the checksum of a message in Iggy's newest layout (D3).

    Returns 0 or an error number.
    """
    if load_u32(p, at + 24) != cython.cast(cython.uint, i):
        return 4036
    if load_u64(p, at + 40) != 0:
        return 4101
    if load_u64(p, at) != xxh3_raw(p, at + 8, size - 8):
        return 4027
    return 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _measure(
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    head: cython.Py_ssize_t,
    index_at: cython.Py_ssize_t,
    sums: cython.p_longlong,
) -> cython.int:
    """Check all messages. Returns 0 or an error number.

    ``sums`` receives totals: number, key bytes and value bytes of headers, payload bytes, and the number of messages
    with an id.
    """
    start: cython.Py_ssize_t = at
    id_at: cython.Py_ssize_t = 0 if head <= 24 else 8
    end: cython.Py_ssize_t
    error: cython.int
    i: cython.Py_ssize_t
    if cython.compiled:
        parts = cython.declare(cython.longlong[4])
    else:
        parts = [0] * 4
    for i in range(count):
        end = _split(p, at, stop, head, parts)
        if end < 0:
            return 4037 if stop - at < head else 4036
        if parts[3] == 0:
            return 4024
        if head == 48:
            error = _check_frame(p, at, end - at, i)
            if error != 0:
                return error
        if parts[1] > 0:
            error = _measure_headers(p, parts[0], parts[0] + parts[1], head == 48 or head == 64, sums)
            if error != 0:
                return error
        sums[3] += parts[3]
        if head <= 24 and sums[3] > _FLAT_PAYLOADS_MAX:
            return 4022
        sums[4] += load_u64(p, at + id_at) != 0 or load_u64(p, at + id_at + 8) != 0
        at = end
        if index_at >= 0:
            if load_u32(p, index_at + 16 * i) != 0:
                return 4031
            if load_u64(p, index_at + 16 * i + 8) != 0:
                return 4032
            if load_u32(p, index_at + 16 * i + 4) != cython.cast(cython.uint, at - start):
                return 4036
    return 0 if at == stop else 4036


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_headers(
    p: cython.p_uchar,
    places: cython.p_const_longlong,
    source: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    typed: cython.bint,
    done: cython.p_longlong,
) -> cython.void:
    """Copy the headers of one message to the columns.

    ``done`` counts the headers, key bytes and value bytes that were copied before.
    """
    size: cython.Py_ssize_t
    kind: cython.uchar = 2  # the kind of a text
    while at < end:
        if typed:
            kind = source[at]
            at += 1
        size = load_u32(source, at)
        p[places[24] + done[0]] = kind
        move(p, places[28] + done[1], source, at + 4, size)
        done[1] += size
        at += 4 + size
        p[places[30] + done[0]] = source[at]
        size = load_u32(source, at + 1)
        move(p, places[34] + done[2], source, at + 5, size)
        done[2] += size
        done[0] += 1
        store_u32(p, places[26] + 4 * done[0], cython.cast(cython.uint, done[1]))
        store_u32(p, places[32] + 4 * done[0], cython.cast(cython.uint, done[2]))
        at += 5 + size


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _origin(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, head: cython.Py_ssize_t, base: cython.longlong
) -> cython.longlong:
    """Return a message's origin time in microseconds, or ``NO_TIME``."""
    time: cython.longlong
    if head == 48:
        time = base + load_u32(p, at + 28) if 0 < base < _TIME_MAX else 0
    else:
        time = load_i64(p, at + 40)
    if time <= 0 or time >= _TIME_MAX:
        return _NO_TIME
    return time * 1000 if time < _MILLISECONDS_BELOW else time


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill(
    p: cython.p_uchar,
    places: cython.p_const_longlong,
    source: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    head: cython.Py_ssize_t,
    base: cython.longlong,
    done: cython.p_longlong,
) -> cython.void:
    id_at: cython.Py_ssize_t = 0 if head <= 24 else 8
    end: cython.Py_ssize_t
    value_end: cython.Py_ssize_t = 0
    i: cython.Py_ssize_t
    if cython.compiled:
        parts = cython.declare(cython.longlong[4])
    else:
        parts = [0] * 4
    store_u32(p, places[0], 0)
    if places[22] >= 0:
        store_u32(p, places[22], 0)
        store_u32(p, places[26], 0)
        store_u32(p, places[32], 0)
    for i in range(count):
        end = _split(source, at, stop, head, parts)
        move(p, places[2] + value_end, source, parts[2], parts[3])
        value_end += parts[3]
        store_u32(p, places[0] + 4 * i + 4, cython.cast(cython.uint, value_end))
        if places[16] >= 0:
            move(p, places[16] + 16 * i, source, at + id_at, 16)
        if places[18] >= 0:
            store_i64(p, places[18] + 8 * i, _origin(source, at, head, base))
        if places[22] >= 0:
            if parts[1] > 0:
                _fill_headers(p, places, source, parts[0], parts[0] + parts[1], head == 48 or head == 64, done)
            store_u32(p, places[22] + 4 * i + 4, cython.cast(cython.uint, done[0]))
        at = end


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_key(
    p: cython.p_uchar,
    places: cython.p_const_longlong,
    key: cython.p_const_uchar,
    size: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
) -> cython.void:
    i: cython.Py_ssize_t
    store_u32(p, places[6], 0)
    for i in range(count):
        move(p, places[8] + size * i, key, 0, size)
        store_u32(p, places[6] + 4 * i + 4, cython.cast(cython.uint, size * (i + 1)))


@cython.cfunc
def _arrange(
    places: cython.p_longlong,
    sums: cython.p_const_longlong,
    count: cython.Py_ssize_t,
    key: cython.Py_ssize_t,
    timed: cython.bint,
) -> cython.void:
    """Compute the sizes of the batch's columns and write them to ``places``."""
    i: cython.int
    for i in range(_COLUMN_COUNT):
        places[2 * i + 1] = -1
    places[1] = 4 * count + 4
    places[3] = sums[3]
    if key >= 0:
        places[7] = 4 * count + 4
        places[9] = key * count
    if sums[4] > 0:
        places[17] = 16 * count
    if timed:
        places[19] = 8 * count
    if sums[0] > 0:
        places[23] = 4 * count + 4
        places[25] = sums[0]
        places[27] = 4 * sums[0] + 4
        places[29] = sums[1]
        places[31] = sums[0]
        places[33] = 4 * sums[0] + 4
        places[35] = sums[2]


@cython.cfunc
def _build(
    lent: Lent,
    at: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    head: cython.Py_ssize_t,
    index_at: cython.Py_ssize_t,
    base: cython.longlong,
    key: Buffer | None,
) -> bytearray | int:
    i: cython.int
    error: cython.int
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
        sums = cython.declare(cython.longlong[5])
        done = cython.declare(cython.longlong[3])
        for i in range(5):
            sums[i] = 0
        for i in range(3):
            done[i] = 0
    else:
        places = [0] * 54
        sums = [0] * 5
        done = [0] * 3
    error = _measure(lent.p, at, stop, count, head, index_at, sums)
    if error != 0:
        return error
    lent_key: Lent = lent if key is None else lend(key)
    _arrange(places, sums, count, -1 if key is None else lent_key.size, head > 24)
    try:
        batch = allocate(places, count)
    except BrokerError:
        return 4022
    target: Lent = lend_writable(batch)
    _fill(target.p, places, lent.p, at, stop, count, head, base, done)
    if key is not None:
        _fill_key(target.p, places, lent_key.p, lent_key.size, count)
    finish(target.p, places, count)
    return batch


def from_indexed(
    source: Lendable, index_at: int, stop: int, count: int, head: int, key: Buffer | None = None
) -> bytearray | int:
    """Build a batch of the ``count`` messages of a request whose index is at ``index_at`` (layout D2).

    Returns the batch, or an error number. ``head`` is the size of a message's fixed fields (see ``message_head``).
    ``key`` becomes the key of each record.
    """
    lent: Lent = lend(source)
    at: cython.Py_ssize_t = index_at
    end: cython.Py_ssize_t = stop
    messages: cython.Py_ssize_t = count
    if head not in (56, 64) or at < 0 or end > lent.size or messages < 1 or messages > (end - at) // 72:
        return 4035
    return _build(lent, at + 16 * messages, end, messages, head, at, 0, key)


def from_flat(source: Lendable, start: int, stop: int, key: Buffer | None = None, head: int = 24) -> bytearray | int:
    """Build a batch of the messages of a request without an index (layouts D0 and D1).

    Returns the batch, or an error number. ``head`` is the size of a message's fixed fields: 24, or ``LISTED``. ``key``
    becomes the key of each record.
    """
    lent: Lent = lend(source)
    first: cython.Py_ssize_t = start
    at: cython.Py_ssize_t = start
    end: cython.Py_ssize_t = stop
    count: cython.Py_ssize_t = 0
    if cython.compiled:
        parts = cython.declare(cython.longlong[4])
    else:
        parts = [0] * 4
    if first < 0 or end > lent.size or head not in (20, 24):
        return 3
    while at < end:
        at = _split(lent.p, at, end, head, parts)
        if at < 0:
            return 3
        count += 1
    return _build(lent, first, end, count, head, -1, 0, key) if count > 0 else 4009


def message_head(source: Lendable, index_at: int, stop: int, count: int) -> int:
    """Return the size of a message's fixed fields in a request with an index (D2): 56, 64, or 0 if neither is possible.

    It is computed from the index entry of the first message (spec: iggy#recognising-the-dialect).
    """
    lent: Lent = lend(source)
    at: cython.Py_ssize_t = index_at + 16 * count
    if index_at < 0 or count < 1 or stop > lent.size or stop - at < 56:
        return 0
    end: cython.longlong = load_u32(lent.p, index_at + 4)
    rest: cython.longlong = end - load_u32(lent.p, at + 48) - load_u32(lent.p, at + 52)
    return rest if rest == 56 or rest == 64 else 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def batch_checksum(
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    count: cython.Py_ssize_t,
    scratch: cython.p_uchar,
) -> cython.ulonglong:
    """Return the checksum of the batch at ``at`` in Iggy's newest layout (D3). Its messages must have been checked.

    It covers 40 bytes of the batch's header, the number of messages, the producer if there is one, and the checksums of
    the messages. ``scratch`` is memory for these bytes.
    """
    place: cython.Py_ssize_t = 44
    move(scratch, 0, p, at, 40)
    move(scratch, 40, p, at + 48, 4)
    if p[at + 52] != 0:
        scratch[44] = p[at + 52]
        move(scratch, 45, p, at + 56, 8)
        move(scratch, 53, p, at + 64, 2)
        move(scratch, 55, p, at + 68, 4)
        place = 59
    at += 256
    while at < stop:
        store_u64(scratch, place, load_u64(p, at))
        place += 8
        at += 48 + cython.cast(cython.Py_ssize_t, load_u32(p, at + 32)) + load_u32(p, at + 36)
    return xxh3_raw(scratch, 0, place)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _check_batch_head(p: cython.p_const_uchar, at: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.int:
    i: cython.Py_ssize_t
    if load_u64(p, at + 32) != cython.cast(cython.ulonglong, stop - at):
        return 4036
    names_producer: cython.uint = load_u32(p, at + 52)
    if names_producer > 1:
        return 4101
    if names_producer == 1 and (p[at + 66] != 0 or p[at + 67] != 0):
        return 4101
    for i in range(2 if names_producer == 1 else 0, 25):
        if load_u64(p, at + 56 + 8 * i) != 0:
            return 4101
    return 0


def from_frames(source: Lendable, start: int, stop: int, key: Buffer | None = None) -> bytearray | int:
    """Build a batch of the messages of a request in Iggy's newest layout (D3).

    Returns the batch, or an error number. ``key`` becomes the key of each record.
    """
    lent: Lent = lend(source)
    at: cython.Py_ssize_t = start
    end: cython.Py_ssize_t = stop
    if at < 0 or end > lent.size or end - at < 256:
        return 4037
    error: cython.int = _check_batch_head(lent.p, at, end)
    count: cython.Py_ssize_t = load_u32(lent.p, at + 48)
    if error != 0:
        return error
    if count < 1 or count > (end - at - 256) // 49:
        return 4036
    built = _build(lent, at + 256, end, count, 48, -1, load_i64(lent.p, at + 24), key)
    if isinstance(built, int):
        return built
    scratch: Lent = lend_writable(bytearray(59 + 8 * count))
    if load_u64(lent.p, at + 40) != batch_checksum(lent.p, at, end, count, scratch.p):
        return 4039
    return built
