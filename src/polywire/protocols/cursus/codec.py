"""Cursus batches in bulk: the messages of a produced batch as spans, stored records as the messages of a pushed batch (dossier §3).

Promises: one call per received batch, one per stored chunk that is sent; no Python object per record; every length is checked before it is
used. Must not know: sockets, the broker, text commands.

A batch, all integers big-endian; a string is a u16 length and its bytes unless said otherwise::

    BA 7C, topic, i32 partition, u8 length and acks, u8 idempotent, u64 seqStart, u64 seqEnd, i32 count
    per message: u64 offset, u64 seqNum, producerId, key, i64 epoch, u32 length and payload,
                 eventType, u32 schemaVersion, u64 aggregateVersion, metadata

Layouts differ so (§3.2): POSITIONAL has partition and acks as strings of digits and text; APRIL has no event fields; DECEMBER has
neither event fields nor the idempotent byte.
"""

from __future__ import annotations

from typing import Final

import cython

from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.header import fill_layout
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
    )
else:
    from polywire.records.header import fill_layout
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
    )

RECORDS_MAX: Final = 100_000  # of one batch (dossier §3.1)
MESSAGE_BYTES_MIN: Final = 32  # a message of the shortest layout
MESSAGE_BYTES: Final = 48  # of the modern layout, without its texts
PRODUCER_BYTES_MAX: Final = 255  # what a stored batch takes (decision 0001)

MODERN: Final = 0
POSITIONAL: Final = 1
APRIL: Final = 2
DECEMBER: Final = 3

# Numbers of a batch's head, as ``scan`` leaves them; positions count from the body's first byte, i64 each.
TOPIC_AT: Final = 0
TOPIC_SIZE: Final = 1
PARTITION: Final = 2
ACKS_AT: Final = 3
ACKS_SIZE: Final = 4
IDEMPOTENT: Final = 5
SEQ_START: Final = 6
SEQ_END: Final = 7
COUNT: Final = 8
PRODUCER_AT: Final = 9  # of the first message
PRODUCER_SIZE: Final = 10
EPOCH: Final = 11
FIRST_SEQUENCE: Final = 12
LAST_AT: Final = 13  # producer of the last message
LAST_SIZE: Final = 14
LAST_EPOCH: Final = 15
LAST_SEQUENCE: Final = 16
TRAITS: Final = 17
END: Final = 18
FAULT_MESSAGE: Final = 19
PAYLOAD_BYTES: Final = 20
HEAD_WORDS: Final = 21

MIXED: Final = 1  # traits: messages of several producers or epochs
GAPS: Final = 2  # sequences are not consecutive
EVENTS: Final = 4  # some message has event fields

# Numbers of one message beside its spans, i64 each: what ``scan`` leaves in ``details``.
SEQUENCE: Final = 0
MESSAGE_EPOCH: Final = 1
MESSAGE_PRODUCER_AT: Final = 2
MESSAGE_PRODUCER_SIZE: Final = 3
TYPE_AT: Final = 4
TYPE_SIZE: Final = 5
SCHEMA_VERSION: Final = 6
AGGREGATE_VERSION: Final = 7
METADATA_AT: Final = 8
METADATA_SIZE: Final = 9
DETAIL_WORDS: Final = 10

FIELDS: Final = (
    "topic",
    "partition",
    "acks",
    "idempotent flag",
    "sequence range",
    "message count",
    "offset",
    "sequence number",
    "producer ID",
    "key",
    "epoch",
    "payload",
    "event type",
    "schema version",
    "aggregate version",
    "metadata",
)
"""What may be cut short; ``scan`` answers a fault as -1 minus the place here."""
COUNT_FAULT: Final = 5

# Numbers of ``put``, i64 each.
START: Final = 0  # offsets wanted: from here
STOP: Final = 1  # to here
ROOM: Final = 2  # records that may still be written
PAYLOAD_ROOM: Final = 3  # bytes of keys and values that may still be written; one record always is
POSITION: Final = 4  # where to go on in the chunk
ROW: Final = 5
AT: Final = 6  # bytes written so far
WRITTEN: Final = 7  # records written so far
FIRST: Final = 8  # sequence of the first record written
LAST: Final = 9  # and of the last
NEXT: Final = 10  # offset after the last record written or passed over
PUT_WORDS: Final = 11

DONE: Final = 0  # what ``put`` answers: the chunk ended
FULL: Final = 1  # no further record is wanted or fits
COMPRESSED: Final = 2  # the batch at POSITION has to be expanded first

_WORD = cython.declare(cython.longlong, 4_294_967_296)
_KEY_MAX = cython.declare(cython.longlong, 65_535)
_RECORDS_MAX = cython.declare(cython.longlong, 100_000)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _u16(p: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.Py_ssize_t:
    return (p[at] << 8) | p[at + 1]


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _u32(p: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.longlong:
    high: cython.longlong = (p[at] << 8) | p[at + 1]
    return (high << 16) | (p[at + 2] << 8) | p[at + 3]


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _i32(p: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.longlong:
    value: cython.longlong = _u32(p, at)
    return value - _WORD if value >= _WORD >> 1 else value


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _i64(p: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.longlong:
    high: cython.longlong = _i32(p, at)
    return high * _WORD + _u32(p, at + 4)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_u16(p: cython.p_uchar, at: cython.Py_ssize_t, x: cython.longlong) -> cython.void:
    p[at] = (x >> 8) & 255
    p[at + 1] = x & 255


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_u32(p: cython.p_uchar, at: cython.Py_ssize_t, x: cython.longlong) -> cython.void:
    p[at] = (x >> 24) & 255
    p[at + 1] = (x >> 16) & 255
    p[at + 2] = (x >> 8) & 255
    p[at + 3] = x & 255


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_u64(p: cython.p_uchar, at: cython.Py_ssize_t, x: cython.longlong) -> cython.void:
    _put_u32(p, at, x >> 32)
    _put_u32(p, at + 4, x)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _scan_head(
    p: cython.p_const_uchar, size: cython.Py_ssize_t, layout: cython.int, head: cython.p_uchar
) -> cython.Py_ssize_t:
    """Everything in front of the messages; where they begin, or a fault."""
    at: cython.Py_ssize_t = 4
    width: cython.Py_ssize_t
    i: cython.Py_ssize_t
    number: cython.longlong = 0
    if size < 4 or size - 4 < _u16(p, 2):
        return -1
    store_i64(head, 0, at)
    store_i64(head, 8, _u16(p, 2))
    at += _u16(p, 2)
    if layout == 1:
        width = _u16(p, at) if size - at >= 2 else -1
        if width < 1 or width > 10 or size - at - 2 < width:
            return -2
        for i in range(width):
            if p[at + 2 + i] < 0x30 or p[at + 2 + i] > 0x39:
                return -2
            number = 10 * number + p[at + 2 + i] - 0x30
        at += 2 + width
        if size - at < 2 or size - at - 2 < _u16(p, at):
            return -3
        width = _u16(p, at)
        at += 2
    else:
        if size - at < 4:
            return -2
        number = _i32(p, at)
        at += 4
        if size - at < 1 or size - at - 1 < p[at]:
            return -3
        width = p[at]
        at += 1
    store_i64(head, 16, number)
    store_i64(head, 24, at)
    store_i64(head, 32, width)
    at += width
    store_i64(head, 40, 0)
    if layout != 3:
        if size - at < 1:
            return -4
        store_i64(head, 40, p[at])
        at += 1
    if size - at < 16:
        return -5
    store_i64(head, 48, _i64(p, at))
    store_i64(head, 56, _i64(p, at + 8))
    if size - at < 20:
        return -6
    number = _i32(p, at + 16)
    store_i64(head, 64, number)
    return at + 20 if 0 <= number <= _RECORDS_MAX else -6


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _scan_message(
    p: cython.p_const_uchar,
    size: cython.Py_ssize_t,
    at: cython.Py_ssize_t,
    eventful: cython.bint,
    spans: cython.p_uchar,
    details: cython.p_uchar,
    row: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """One message; where it ends, or a fault."""
    length: cython.longlong
    span: cython.Py_ssize_t = 32 * row
    detail: cython.Py_ssize_t = 80 * row
    if size - at < 8:
        return -7
    if size - at < 16:
        return -8
    store_i64(details, detail, _i64(p, at + 8))
    at += 16
    if size - at < 2 or size - at - 2 < _u16(p, at):
        return -9
    length = _u16(p, at)
    store_i64(details, detail + 16, at + 2)
    store_i64(details, detail + 24, length)
    at += 2 + length
    if size - at < 2 or size - at - 2 < _u16(p, at):
        return -10
    length = _u16(p, at)
    store_i64(spans, span, at + 2)
    store_i64(spans, span + 8, length if length > 0 else -1)
    at += 2 + length
    if size - at < 8:
        return -11
    store_i64(details, detail + 8, _i64(p, at))
    at += 8
    if size - at < 4 or size - at - 4 < _u32(p, at):
        return -12
    length = _u32(p, at)
    store_i64(spans, span + 16, at + 4)
    store_i64(spans, span + 24, length)
    at += 4 + length
    if not eventful:
        clear(details, detail + 32, 48)
        return at
    if size - at < 2 or size - at - 2 < _u16(p, at):
        return -13
    length = _u16(p, at)
    store_i64(details, detail + 32, at + 2)
    store_i64(details, detail + 40, length)
    at += 2 + length
    if size - at < 4:
        return -14
    store_i64(details, detail + 48, _u32(p, at))
    if size - at < 12:
        return -15
    store_i64(details, detail + 56, _i64(p, at + 4))
    at += 12
    if size - at < 2 or size - at - 2 < _u16(p, at):
        return -16
    length = _u16(p, at)
    store_i64(details, detail + 64, at + 2)
    store_i64(details, detail + 72, length)
    return at + 2 + length


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _traits(p: cython.p_const_uchar, details: cython.p_const_uchar, row: cython.Py_ssize_t) -> cython.longlong:
    """What sets a message apart from the one before it."""
    one: cython.Py_ssize_t = 80 * row
    before: cython.Py_ssize_t = one - 80
    found: cython.longlong = 0
    size: cython.longlong = load_i64(details, one + 24)
    mine: cython.Py_ssize_t = load_i64(details, one + 16)
    its: cython.Py_ssize_t
    i: cython.Py_ssize_t
    if (
        load_i64(details, one + 40)
        | load_i64(details, one + 48)
        | load_i64(details, one + 56)
        | load_i64(details, one + 72)
    ):
        found = 4
    if row == 0:
        return found
    if load_i64(details, one) != load_i64(details, before) + 1:
        found |= 2
    if load_i64(details, one + 8) != load_i64(details, before + 8) or size != load_i64(details, before + 24):
        return found | 1
    its = load_i64(details, before + 16)
    for i in range(size):
        if p[mine + i] != p[its + i]:
            return found | 1
    return found


def scan(body: Buffer, layout: int, head: Lendable, spans: Lendable, details: Lendable) -> int:
    """Read a whole batch in one of the layouts.

    head: HEAD_WORDS numbers. spans, details: room for the spans and details of len(body) // MESSAGE_BYTES_MIN messages, at most RECORDS_MAX.
    Returns 0 when the batch fills the body, 1 when bytes are left behind it; otherwise -1 minus the place in ``FIELDS`` of what is wrong,
    with FAULT_MESSAGE the number of the message (-1: the head). Raises ValueError when there is too little room.
    """
    source: Lent = lend(body)
    numbers: Lent = lend_writable(head)
    places: Lent = lend_writable(spans)
    more: Lent = lend_writable(details)
    kind: cython.int = layout
    traits: cython.longlong = 0
    payload: cython.longlong = 0
    at: cython.Py_ssize_t
    row: cython.Py_ssize_t
    if numbers.size < 168:
        raise ValueError("no room for the head")
    clear(numbers.p, 0, 168)
    store_i64(numbers.p, 152, -1)
    at = _scan_head(source.p, source.size, kind, numbers.p)
    if at < 0:
        return at
    count: cython.Py_ssize_t = load_i64(numbers.p, 64)
    room: cython.Py_ssize_t = min(places.size // 32, more.size // 80)
    if room < count and room < source.size // 32:
        raise ValueError(f"no room for the messages room={room} count={count}")
    for row in range(count):
        if row >= room:
            at = -7  # so many messages cannot fit what came
        else:
            at = _scan_message(source.p, source.size, at, kind < 2, places.p, more.p, row)
        if at < 0:
            store_i64(numbers.p, 152, row)
            return at
        traits |= _traits(source.p, more.p, row)
        payload += load_i64(places.p, 32 * row + 24)
    if count > 0:
        store_i64(numbers.p, 72, load_i64(more.p, 16))
        store_i64(numbers.p, 80, load_i64(more.p, 24))
        store_i64(numbers.p, 88, load_i64(more.p, 8))
        store_i64(numbers.p, 96, load_i64(more.p, 0))
        store_i64(numbers.p, 104, load_i64(more.p, 80 * count - 64))
        store_i64(numbers.p, 112, load_i64(more.p, 80 * count - 56))
        store_i64(numbers.p, 120, load_i64(more.p, 80 * count - 72))
        store_i64(numbers.p, 128, load_i64(more.p, 80 * count - 80))
    store_i64(numbers.p, 136, traits)
    store_i64(numbers.p, 144, at)
    store_i64(numbers.p, 160, payload)
    return 0 if at == source.size else 1


def reach(body: Buffer, spans: Lendable, details: Lendable, start: int, count: int, traits: int, bytes_max: int) -> int:
    """Where the run of messages that begins at ``start`` ends: before one that has one of these traits (MIXED, GAPS) against the message
    before it, or at ``bytes_max`` bytes of messages; it holds at least one. Raises ValueError for rows out of range."""
    source: Lent = lend(body)
    places: Lent = lend(spans)
    more: Lent = lend(details)
    row: cython.Py_ssize_t = start
    stop: cython.Py_ssize_t = count
    mask: cython.longlong = traits
    room: cython.longlong = bytes_max
    if row < 0 or row >= stop or stop > more.size // 80 or stop > places.size // 32:
        raise ValueError(f"rows out of range start={start} count={count}")
    room -= _weight(places.p, more.p, row)
    row += 1
    while row < stop:
        room -= _weight(places.p, more.p, row)
        if room < 0 or _traits(source.p, more.p, row) & mask:
            break
        row += 1
    return row


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _weight(spans: cython.p_const_uchar, details: cython.p_const_uchar, row: cython.Py_ssize_t) -> cython.longlong:
    """Bytes of a message, its producer left out."""
    return (
        48
        + load_i64(spans, 32 * row + 8)
        + load_i64(spans, 32 * row + 24)
        + load_i64(details, 80 * row + 40)
        + load_i64(details, 80 * row + 72)
    )


@cython.cfunc
def _check_rows(details: Lent, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.void:
    if start < 0 or stop < start or stop > details.size // 80:
        raise ValueError(f"rows out of range start={start} stop={stop}")


def pick(details: Lendable, word: int, start: int, stop: int, out: Lendable) -> None:
    """One of the numbers of the messages ``start`` to ``stop``: as i64, or as u32 when ``out`` has no more room.

    Raises ValueError when it does not fit.
    """
    source: Lent = lend(details)
    target: Lent = lend_writable(out)
    first: cython.Py_ssize_t = start
    count: cython.Py_ssize_t = stop - start
    place: cython.Py_ssize_t = 8 * word
    row: cython.Py_ssize_t
    _check_rows(source, start, stop)
    if not 0 <= place < 80 or (target.size != 8 * count and target.size != 4 * count):
        raise ValueError(f"no room for a number of every message word={word} messages={count}")
    for row in range(count):
        if target.size == 8 * count:
            store_i64(target.p, 8 * row, load_i64(source.p, 80 * (first + row) + place))
        else:
            store_u32(target.p, 4 * row, load_i64(source.p, 80 * (first + row) + place))


def texts(body: Buffer, details: Lendable, word: int, start: int, stop: int) -> tuple[bytearray, bytearray]:
    """One of the texts of the messages ``start`` to ``stop``: where each begins and the last ends (i32), and their bytes.

    word: TYPE_AT or METADATA_AT. Raises ValueError for rows or places out of range.
    """
    source: Lent = lend(body)
    more: Lent = lend(details)
    first: cython.Py_ssize_t = start
    count: cython.Py_ssize_t = stop - start
    place: cython.Py_ssize_t = 8 * word
    row: cython.Py_ssize_t
    at: cython.longlong
    size: cython.longlong
    total: cython.longlong = 0
    _check_rows(more, start, stop)
    if place != 32 and place != 64:
        raise ValueError(f"not a text word={word}")
    for row in range(first, first + count):
        at = load_i64(more.p, 80 * row + place)
        size = load_i64(more.p, 80 * row + place + 8)
        if size < 0 or at < 0 or size > source.size or at > source.size - size:
            raise ValueError(f"text out of range message={row}")
        total += size
    offsets = bytearray(4 * count + 4)
    joined = bytearray(total)
    target: Lent = lend_writable(joined)
    ends: Lent = lend_writable(offsets)
    total = 0
    for row in range(count):
        at = load_i64(more.p, 80 * (first + row) + place)
        size = load_i64(more.p, 80 * (first + row) + place + 8)
        move(target.p, total, source.p, at, size)
        total += size
        store_u32(ends.p, 4 * row + 4, total)
    return offsets, joined


def is_text(offsets: Buffer, joined: bytearray) -> bool:
    """Whether each of these texts is UTF-8: all of them together are, and none begins inside a character."""
    ends: Lent = lend(offsets)
    lent: Lent = lend(joined)
    row: cython.Py_ssize_t
    at: cython.Py_ssize_t
    for row in range(ends.size // 4):
        at = load_i32(ends.p, 4 * row)
        if at < lent.size and lent.p[at] & 0xC0 == 0x80:
            return False
    try:
        joined.decode()
    except UnicodeDecodeError:
        return False
    return True


def mark(details: Lendable, start: int, stop: int, flags: Buffer, bit: int) -> None:
    """Set ``bit`` in the flags (u8 each) of those of the messages that have event fields. Raises ValueError when it does not fit."""
    source: Lent = lend(details)
    target: Lent = lend_writable(flags)
    first: cython.Py_ssize_t = start
    count: cython.Py_ssize_t = stop - start
    flag: cython.int = bit
    at: cython.Py_ssize_t
    row: cython.Py_ssize_t
    _check_rows(source, start, stop)
    if target.size != count:
        raise ValueError(f"not one flag per message flags={target.size} messages={count}")
    for row in range(count):
        at = 80 * (first + row)
        if (
            load_i64(source.p, at + 40)
            | load_i64(source.p, at + 48)
            | load_i64(source.p, at + 56)
            | load_i64(source.p, at + 72)
        ):
            target.p[row] |= flag


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _begins(p: cython.p_const_uchar, offsets: cython.longlong, row: cython.Py_ssize_t) -> cython.longlong:
    return 0 if offsets < 0 else load_i32(p, offsets + 4 * row)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _length(p: cython.p_const_uchar, offsets: cython.longlong, row: cython.Py_ssize_t) -> cython.longlong:
    return 0 if offsets < 0 else load_i32(p, offsets + 4 * row + 4) - load_i32(p, offsets + 4 * row)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _fits(
    p: cython.p_const_uchar, places: cython.p_const_longlong, column: cython.int, row: cython.Py_ssize_t
) -> cython.bint:
    """Whether a text lies within its bytes: stored batches were checked when they came, and are read with care all the same."""
    offsets: cython.longlong = places[2 * column]
    return offsets < 0 or (
        load_i32(p, offsets + 4 * row) >= 0
        and load_i32(p, offsets + 4 * row) <= load_i32(p, offsets + 4 * row + 4)
        and load_i32(p, offsets + 4 * row + 4) <= places[2 * column + 3]
    )


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _short(length: cython.longlong) -> cython.longlong:
    """The length of a text as the wire can carry it: one that is too long is left out."""
    return length if length <= _KEY_MAX else 0


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_text(
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
    p: cython.p_const_uchar,
    place: cython.longlong,
    length: cython.longlong,
) -> cython.Py_ssize_t:
    _put_u16(out, at, length)
    move(out, at + 2, p, place, length)
    return at + 2 + length


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_message(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    batch: cython.Py_ssize_t,
    row: cython.Py_ssize_t,
    offset: cython.longlong,
    sequence: cython.longlong,
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """One record as a message; where it ends. The caller has made sure of the room."""
    epoch: cython.longlong = load_i64(p, batch + 56)
    length: cython.longlong
    _put_u64(out, at, offset)
    _put_u64(out, at + 8, sequence)
    at = _put_text(out, at + 16, p, places[12], places[13] if places[12] >= 0 else 0)
    length = _short(_length(p, places[6], row))
    at = _put_text(out, at, p, places[8] + _begins(p, places[6], row), length)
    _put_u64(out, at, epoch if epoch > 0 else 0)
    length = _length(p, places[0], row)
    _put_u32(out, at + 8, length)
    move(out, at + 12, p, places[2] + _begins(p, places[0], row), length)
    at += 12 + length
    length = _short(_length(p, places[36], row))
    at = _put_text(out, at, p, places[38] + _begins(p, places[36], row), length)
    _put_u32(out, at, load_u32(p, places[40] + 4 * row) if places[40] >= 0 else 0)
    _put_u64(out, at + 4, load_i64(p, places[42] + 8 * row) if places[42] >= 0 else 0)
    length = _short(_length(p, places[44], row))
    return _put_text(out, at + 12, p, places[46] + _begins(p, places[44], row), length)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_rows(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    batch: cython.Py_ssize_t,
    state: cython.p_uchar,
    out: cython.p_uchar,
    size: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """The records of one batch from the state's row on; DONE, FULL, the bytes of room the next one needs, or -1 for nonsense."""
    count: cython.Py_ssize_t = load_u32(p, batch + 28)
    base: cython.longlong = load_u64(p, batch + 32)
    row: cython.Py_ssize_t = load_i64(state, 40)
    at: cython.Py_ssize_t = load_i64(state, 48)
    written: cython.longlong = load_i64(state, 56)
    room: cython.longlong = load_i64(state, 16)
    payload: cython.longlong = load_i64(state, 24)
    code: cython.Py_ssize_t = 0
    offset: cython.longlong
    sequence: cython.longlong
    need: cython.longlong
    while row < count:
        offset = base + (row if places[50] < 0 else load_u32(p, places[50] + 4 * row))
        if offset >= load_i64(state, 8):
            code = 1
            break
        if offset < load_i64(state, 0):
            row += 1
            continue
        if not (_fits(p, places, 0, row) and _fits(p, places, 3, row)):
            code = -1
            break
        need = _length(p, places[0], row) + _short(_length(p, places[6], row))
        if room <= 0 or (need > payload and written > 0):
            code = 1
            break
        payload -= need
        need += 48 + (places[13] if places[12] >= 0 else 0)
        need += _short(_length(p, places[36], row)) + _short(_length(p, places[44], row))
        if need > size - at:
            code = need
            break
        sequence = 0
        if places[12] >= 0:
            sequence = load_i64(p, places[14] + 8 * row) if places[14] >= 0 else load_i64(p, batch + 64) + row
        at = _put_message(p, places, batch, row, offset, sequence, out, at)
        if written == 0:
            store_i64(state, 64, sequence)
        store_i64(state, 72, sequence)
        store_i64(state, 80, offset + 1)
        written += 1
        room -= 1
        store_i64(state, 24, payload)
        row += 1
    store_i64(state, 40, row)
    store_i64(state, 48, at)
    store_i64(state, 56, written)
    store_i64(state, 16, room)
    return code


def put(chunk: Buffer, state: Lendable, out: Buffer) -> int:
    """Write the records of a chunk of stored batches to ``out`` as messages of the modern layout.

    state: PUT_WORDS numbers as named above; POSITION, ROW, AT, WRITTEN, FIRST, LAST, NEXT and what room is left are moved on.
    Returns DONE, FULL, COMPRESSED, or the bytes of room that the next record needs. Raises ValueError for bytes that are no batches.
    """
    source: Lent = lend(chunk)
    numbers: Lent = lend_writable(state)
    target: Lent = lend_writable(out)
    code: cython.Py_ssize_t = 0
    batch: cython.Py_ssize_t
    length: cython.Py_ssize_t
    if numbers.size < 88 or load_i64(numbers.p, 32) < 0 or load_i64(numbers.p, 40) < 0 or load_i64(numbers.p, 48) < 0:
        raise ValueError("state does not fit")
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    while load_i64(numbers.p, 32) < source.size:
        batch = load_i64(numbers.p, 32)
        if source.size - batch >= 104 and load_u32(source.p, batch + 8) & 6:
            return COMPRESSED
        length = fill_layout(source.p, batch, source.size, places)
        if length < 0 or places[1] != 4 * load_u32(source.p, batch + 28) + 4:
            raise ValueError(f"no readable batch position={batch}")
        code = _put_rows(source.p, places, batch, numbers.p, target.p, target.size)
        if code < 0:
            raise ValueError(f"no readable record position={batch}")
        if code > 0:
            return code
        store_i64(numbers.p, 32, batch + length)
        store_i64(numbers.p, 40, 0)
    return DONE
