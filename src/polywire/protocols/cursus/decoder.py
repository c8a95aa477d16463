"""Decode a received Cursus batch: find the positions of its messages and their fields (spec: cursus#batches).

One call handles one batch and creates no Python object per record. Every length is checked before use.

The layout of a batch follows. All integers are big-endian. A string is a u16 length and its bytes, unless noted::

    BA 7C, topic, i32 partition, u8 length and acks, u8 idempotent, u64 seqStart, u64 seqEnd, i32 count
    per message: u64 offset, u64 seqNum, producerId, key, i64 epoch, u32 length and payload,
                 eventType, u32 schemaVersion, u64 aggregateVersion, metadata

Older layouts (spec: cursus#older-batch-layouts) differ as follows:

* POSITIONAL: partition and acks are strings.
* APRIL: there are no event fields.
* DECEMBER: there are neither event fields nor the idempotent byte.
"""

from __future__ import annotations

from typing import Final

import cython

from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
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
    )
else:
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
    )

RECORDS_MAX: Final = 100_000  # messages of one batch (spec: cursus#batch-layout)
MESSAGE_BYTES_MIN: Final = 32  # size of a message without texts in the shortest layout

MODERN: Final = 0
POSITIONAL: Final = 1
APRIL: Final = 2
DECEMBER: Final = 3

# The words (i64) that ``scan`` writes about a batch's head. Positions count from the first byte of the body.
TOPIC_AT: Final = 0
TOPIC_SIZE: Final = 1
PARTITION: Final = 2
ACKS_AT: Final = 3
ACKS_SIZE: Final = 4
IDEMPOTENT: Final = 5
SEQ_START: Final = 6
SEQ_END: Final = 7
COUNT: Final = 8
PRODUCER_AT: Final = 9  # the producer of the first message
PRODUCER_SIZE: Final = 10
EPOCH: Final = 11
FIRST_SEQUENCE: Final = 12
LAST_AT: Final = 13  # the producer of the last message
LAST_SIZE: Final = 14
LAST_EPOCH: Final = 15
LAST_SEQUENCE: Final = 16
TRAITS: Final = 17
END: Final = 18
FAULT_MESSAGE: Final = 19
PAYLOAD_BYTES: Final = 20
HEAD_WORDS: Final = 21

MIXED: Final = 1  # traits: messages are from several producers or epochs
GAPS: Final = 2  # sequences are not consecutive
EVENTS: Final = 4  # a message has event fields

# The words (i64) that ``scan`` writes to ``details`` about one message.
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
"""Fields that may be truncated; if one is, ``scan`` returns -1 minus its index here."""
COUNT_FAULT: Final = 5

_WORD = cython.declare(cython.longlong, 4_294_967_296)
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
@cython.nogil
@cython.exceptval(check=False)
def _scan_head(
    p: cython.p_const_uchar, size: cython.Py_ssize_t, layout: cython.int, head: cython.p_uchar
) -> cython.Py_ssize_t:
    """Parse everything before the messages of a batch. Return the position of the first message.

    For a truncated field, returns -1 minus its index in ``FIELDS``.
    """
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
    """Parse one message, and return the position after it.

    For a truncated field, returns -1 minus its index in ``FIELDS``.
    """
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
    return _scan_event(p, size, at, details, detail)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _scan_event(
    p: cython.p_const_uchar,
    size: cython.Py_ssize_t,
    at: cython.Py_ssize_t,
    details: cython.p_uchar,
    detail: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Parse the event fields of a message, and return the position after them.

    For a truncated field, returns -1 minus its index in ``FIELDS``.
    """
    length: cython.longlong
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
    """Compare a message with the one before it.

    Return a bit mask: MIXED for another producer or epoch, GAPS for a gap in the sequence numbers, EVENTS for event
    fields.
    """
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
    """Parse a batch in one of the layouts into the arrays ``head``, ``spans`` and ``details``.

    Returns 0 if the batch fills the body, 1 if more bytes follow. For a truncated field, returns -1 minus its index in
    ``FIELDS``, and writes the message's index to FAULT_MESSAGE (-1: a field before the messages). ``head`` has
    HEAD_WORDS values. The other arrays have space for len(body) // MESSAGE_BYTES_MIN messages, at most RECORDS_MAX.
    Raises ValueError if there is too little space.
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
        raise ValueError("head array is too small")
    clear(numbers.p, 0, 168)
    store_i64(numbers.p, 152, -1)
    at = _scan_head(source.p, source.size, kind, numbers.p)
    if at < 0:
        return at
    count: cython.Py_ssize_t = load_i64(numbers.p, 64)
    room: cython.Py_ssize_t = min(places.size // 32, more.size // 80)
    if room < count and room < source.size // 32:
        raise ValueError(f"arrays are too small for the messages room={room} count={count}")
    for row in range(count):
        if row >= room:
            at = -7  # so many messages cannot fit the received bytes
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
    """Return the end of the messages from ``start`` on that can be stored as one batch.

    That batch ends before a message that differs from the previous one in one of ``traits`` (MIXED, GAPS), and before
    it exceeds ``bytes_max``. It has at least one message. Raises ValueError for messages out of range.
    """
    source: Lent = lend(body)
    places: Lent = lend(spans)
    more: Lent = lend(details)
    row: cython.Py_ssize_t = start
    stop: cython.Py_ssize_t = count
    mask: cython.longlong = traits
    room: cython.longlong = bytes_max
    if row < 0 or row >= stop or stop > more.size // 80 or stop > places.size // 32:
        raise ValueError(f"rows out of range start={start} count={count}")
    room -= _stored_bytes(places.p, more.p, row)
    row += 1
    while row < stop:
        room -= _stored_bytes(places.p, more.p, row)
        if room < 0 or _traits(source.p, more.p, row) & mask:
            break
        row += 1
    return row


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _stored_bytes(
    spans: cython.p_const_uchar, details: cython.p_const_uchar, row: cython.Py_ssize_t
) -> cython.longlong:
    """Return the size in bytes that a message has in a stored batch, without its producer."""
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
    """Copy one value (an index into ``details``) of each message from ``start`` to ``stop`` to ``out``.

    Values are written as u32 if ``out`` has half the size of i64 values, otherwise as i64. Raises ValueError if ``out``
    is too small.
    """
    source: Lent = lend(details)
    target: Lent = lend_writable(out)
    first: cython.Py_ssize_t = start
    count: cython.Py_ssize_t = stop - start
    place: cython.Py_ssize_t = 8 * word
    row: cython.Py_ssize_t
    _check_rows(source, start, stop)
    if not 0 <= place < 80 or (target.size != 8 * count and target.size != 4 * count):
        raise ValueError(f"output array is too small word={word} messages={count}")
    for row in range(count):
        if target.size == 8 * count:
            store_i64(target.p, 8 * row, load_i64(source.p, 80 * (first + row) + place))
        else:
            store_u32(target.p, 4 * row, load_i64(source.p, 80 * (first + row) + place))


def texts(body: Buffer, details: Lendable, word: int, start: int, stop: int) -> tuple[bytearray, bytearray]:
    """Return one text of each message from ``start`` to ``stop``, as a column: offsets (i32), and all bytes.

    ``word`` is TYPE_AT or METADATA_AT. Raises ValueError for messages or positions out of range.
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
    """Return whether the texts of a column are valid UTF-8.

    They are if their bytes together are valid, and none begins within a character.
    """
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
    """Set ``bit`` in the flags (one u8 per message) of messages with event fields.

    Raises ValueError if the flags have the wrong size.
    """
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
