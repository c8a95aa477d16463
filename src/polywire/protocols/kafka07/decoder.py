"""Decode Kafka 0.7 produce requests, many with one call, and single message sets.

A *run* is a sequence of consecutive produce requests with valid, uncompressed message sets. One call decodes a run,
verifies every CRC, and creates no Python object per record. Other requests are parsed by ``messages``.

A message set (spec: kafka-0.7#messages) is a sequence of entries; numbers are big-endian::

    i32 size | u8 magic 0 | u32 CRC-32 of the value | value                            size = 5 + length of the value
    i32 size | u8 magic 1 | u8 attributes, 2 bits of codec | u32 CRC-32 | value        size = 6 + length of the value

A PRODUCE frame is ``i32 length | i16 0 | entry``. A MULTIPRODUCE frame is ``i32 length | i16 3 | i16 count | entries``.
An entry is ``i16 length, topic | i32 partition | i32 length, set`` (spec: kafka-0.7#produce, kafka-0.7#multiproduce).
"""

from __future__ import annotations

from array import array
from typing import Final

import cython

from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.checksum import crc32_raw
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        store_i64,
        store_u32,
    )
else:
    from polywire.records.checksum import crc32_raw
    from polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i32,
        load_i64,
        load_u32,
        store_i64,
        store_u32,
    )

# records of one run; enough for a MULTIPRODUCE with the maximum number of entries of one message each
RUN_RECORDS_MAX: Final = 32_768
RUN_GROUPS_MAX: Final = 64  # groups (topic, partition) of one run; they are searched linearly
FRAME_BYTES_MAX: Final = 100 * 1024 * 1024  # spec: kafka-0.7#connections
PAYLOAD_BYTES_MAX: Final = (
    # limit that clients are configured with (spec: kafka-0.7#client-settings); frames with longer values are parsed by
    # ``messages``
    1_000_000
)

MORE: Final = 0  # the data ends inside a frame
FRAME: Final = 1  # next is a complete frame for the parser in ``messages``, or a frame with an impossible length
FULL: Final = 2  # the run is full; continue with another run

_RECORDS_MAX = cython.declare(cython.Py_ssize_t, 32_768)
_GROUPS_MAX = cython.declare(cython.Py_ssize_t, 64)
_FRAME_MAX = cython.declare(cython.longlong, 100 * 1024 * 1024)
_PAYLOAD_MAX = cython.declare(cython.longlong, 1_000_000)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _i16(p: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.longlong:
    x: cython.longlong = p[at] << 8 | p[at + 1]
    return x - (x >> 15 << 16)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _u32(p: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.longlong:
    return cython.cast(cython.longlong, p[at]) << 24 | p[at + 1] << 16 | p[at + 2] << 8 | p[at + 3]


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _i32(p: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.longlong:
    x: cython.longlong = _u32(p, at)
    return x - (x >> 31 << 32)


class RecordSpans:
    """The records of consecutive PRODUCE requests. The object is reused for all connections of a listener.

    A group has the records for one topic and partition number.

    Attributes:
        spans: i64, four per record: position and length of key and value.
        flags, crcs: u8 and u32 per record, as they are stored.
        groups_of, sets_of: i32 per record, the numbers of its group and of its message set.
        groups: i64, four per group: position and length of the topic, partition, first record.
        counts: i64, numbers of records, groups and message sets.
    """

    __slots__ = ("counts", "crcs", "flags", "groups", "groups_of", "sets_of", "spans")

    def __init__(self) -> None:
        self.spans: Final = memoryview(array("q", bytes(32 * RUN_RECORDS_MAX)))
        self.flags: Final = bytearray(RUN_RECORDS_MAX)
        self.crcs: Final = memoryview(array("I", bytes(4 * RUN_RECORDS_MAX)))
        self.groups_of: Final = memoryview(array("i", bytes(4 * RUN_RECORDS_MAX)))
        self.sets_of: Final = memoryview(array("i", bytes(4 * RUN_RECORDS_MAX)))
        self.groups: Final = memoryview(array("q", bytes(32 * RUN_GROUPS_MAX)))
        self.counts: Final = array("q", (0, 0, 0))


@cython.cclass
class _BorrowedSpans:
    """The arrays of a ``RecordSpans`` as pointers, and its counts."""

    if cython.compiled:
        spans: Lent
        flags: Lent
        crcs: Lent
        groups_of: Lent
        sets_of: Lent
        groups: Lent
        records: cython.Py_ssize_t
        group_count: cython.Py_ssize_t
        set_count: cython.Py_ssize_t
    else:
        __slots__ = ("crcs", "flags", "group_count", "groups", "groups_of", "records", "set_count", "sets_of", "spans")

    def __init__(self, run: RecordSpans) -> None:
        self.spans = lend_writable(run.spans)
        self.flags = lend_writable(run.flags)
        self.crcs = lend_writable(run.crcs)
        self.groups_of = lend_writable(run.groups_of)
        self.sets_of = lend_writable(run.sets_of)
        self.groups = lend_writable(run.groups)
        self.records = self.group_count = self.set_count = 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _take_set(
    p: cython.p_const_uchar,
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    spans: cython.p_uchar,
    flags: cython.p_uchar,
    crcs: cython.p_uchar,
    record: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Store the records of a valid, uncompressed message set, beginning with record number ``record``.

    Returns the number of the next record, -1 if the set is compressed or invalid, and -2 if there is no space.
    """
    at: cython.Py_ssize_t = start
    size: cython.longlong
    head: cython.Py_ssize_t
    crc: cython.longlong
    while stop - at >= 4:
        size = _i32(p, at)
        if size < 5:
            return -1
        if size > stop - at - 4:
            if at == start:
                return -1
            break
        head = 5 + p[at + 4]
        if head > 6 or size < head or (head == 6 and p[at + 5] & 3) or size - head > _PAYLOAD_MAX:
            return -1
        if record == _RECORDS_MAX:
            return -2
        at += 4 + head
        crc = _u32(p, at - 4)
        if crc32_raw(p, at, size - head) != crc:
            return -1
        store_i64(spans, 32 * record, 0)
        store_i64(spans, 32 * record + 8, -1)
        store_i64(spans, 32 * record + 16, at)
        store_i64(spans, 32 * record + 24, size - head)
        flags[record] = 6 - head
        store_u32(crcs, 4 * record, crc)
        record += 1
        at += size - head
    return record


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _entry_end(p: cython.p_const_uchar, at: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the end of the entry (topic, partition and message set) at ``at``, or -1 if it is malformed."""
    size: cython.longlong
    if stop - at < 2:
        return -1
    size = _i16(p, at)
    if size < 0 or stop - at < size + 10:
        return -1
    at += 10 + size
    size = _i32(p, at - 4)
    if size < 0 or size > stop - at:
        return -1
    return at + size


@cython.cfunc
@cython.exceptval(check=False)
def _group_of(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, found: _BorrowedSpans, last: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Return the number of the group for the topic and partition at ``at``, or -1 if there is no space for a new group.

    The group ``last`` is checked first.
    """
    groups: cython.p_uchar = found.groups.p
    size: cython.Py_ssize_t = _i16(p, at)
    partition: cython.longlong = _i32(p, at + 2 + size)
    number: cython.Py_ssize_t
    tried: cython.Py_ssize_t
    other: cython.Py_ssize_t
    k: cython.Py_ssize_t
    for tried in range(found.group_count):
        number = last + tried
        if number >= found.group_count:
            number -= found.group_count
        if load_i64(groups, 32 * number + 8) != size or load_i64(groups, 32 * number + 16) != partition:
            continue
        other = load_i64(groups, 32 * number)
        k = 0
        while k < size and p[at + 2 + k] == p[other + k]:
            k += 1
        if k == size:
            return number
    number = found.group_count
    if number == _GROUPS_MAX:
        return -1
    store_i64(groups, 32 * number, at + 2)
    store_i64(groups, 32 * number + 8, size)
    store_i64(groups, 32 * number + 16, partition)
    store_i64(groups, 32 * number + 24, found.records)
    found.group_count = number + 1
    return number


@cython.cfunc
@cython.exceptval(check=False)
def _take_entry(
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    end: cython.Py_ssize_t,
    found: _BorrowedSpans,
    last: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Store the records of one topic and partition, and return the number of their group.

    Returns -1 if the entry needs the full parser (``messages``), and -2 if there is no space.
    """
    group: cython.Py_ssize_t = _group_of(p, at, found, last)
    record: cython.Py_ssize_t
    after: cython.Py_ssize_t
    if group < 0:
        return -2
    after = _take_set(p, at + 10 + _i16(p, at), end, found.spans.p, found.flags.p, found.crcs.p, found.records)
    if after < 0:
        return after
    for record in range(found.records, after):
        store_u32(found.groups_of.p, 4 * record, group)
        store_u32(found.sets_of.p, 4 * record, found.set_count)
    found.records = after
    found.set_count += 1
    return group


@cython.cfunc
@cython.exceptval(check=False)
def _take_frame(
    p: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    found: _BorrowedSpans,
    last: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """Store the records of the request whose type is at ``at``, and return the group number of its last entry.

    Returns -1 if the request needs the full parser (``messages``), and -2 if there is no space.
    """
    count: cython.longlong = 1
    end: cython.Py_ssize_t
    if p[at] != 0 or (p[at + 1] != 0 and p[at + 1] != 3):
        return -1
    at += 2
    if p[at - 1] == 3:
        if stop - at < 2:
            return -1
        count = _i16(p, at)
        if count < 0:
            return -1
        at += 2
    end = at
    for _ in range(count):
        end = _entry_end(p, end, stop)
        if end < 0:
            return -1
    for _ in range(count):
        end = _entry_end(p, at, stop)
        last = _take_entry(p, at, end, found, last)
        if last < 0:
            return last
        at = end
    return last


def scan(data: Buffer, start: int, stop: int, run: RecordSpans, bytes_max: int) -> tuple[int, int, int]:
    """Store the records of consecutive PRODUCE requests at ``start`` in ``run``.

    The run ends before its requests have more than ``bytes_max`` bytes. Returns the reason for the end (MORE, FRAME or
    FULL), the position after these requests, and another position. For FRAME, that is the end of the next request, or
    its start if its length is impossible; otherwise, it is the position after these requests.

    Raises ValueError if the arguments do not fit the buffer.
    """
    lent: Lent = lend(data)
    found: _BorrowedSpans = _BorrowedSpans(run)
    at: cython.Py_ssize_t = start
    limit: cython.Py_ssize_t = stop
    left: cython.Py_ssize_t = bytes_max
    last: cython.Py_ssize_t = 0
    taken: cython.Py_ssize_t = 0
    records: cython.Py_ssize_t = 0
    groups: cython.Py_ssize_t = 0
    sets: cython.Py_ssize_t = 0
    reason: cython.int = 0
    size: cython.longlong = 0
    if at < 0 or at > limit or limit > lent.size:
        raise ValueError(f"range is outside the buffer start={start} stop={stop}")
    while limit - at >= 4:
        size = _i32(lent.p, at)
        if size < 2 or size > _FRAME_MAX:
            reason, size = 1, -4
            break
        if size > limit - at - 4:
            break
        taken = -2 if 4 + size > left else _take_frame(lent.p, at + 4, at + 4 + size, found, last)
        if taken < 0:
            reason = 2 if taken == -2 and sets else 1
            break
        last = taken
        at += 4 + size
        left -= 4 + size
        records, groups, sets = found.records, found.group_count, found.set_count
    run.counts[0], run.counts[1], run.counts[2] = records, groups, sets
    return reason, at, at + 4 + size if reason == 1 else at


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _survey(
    p: cython.p_const_uchar, start: cython.Py_ssize_t, stop: cython.Py_ssize_t, found: cython.p_longlong
) -> cython.bint:
    """Check a message set. Return whether it is valid.

    ``found`` receives its numbers of messages and compressed messages, and the length of its longest value.
    """
    at: cython.Py_ssize_t = start
    size: cython.longlong
    head: cython.Py_ssize_t
    while stop - at >= 4:
        size = _i32(p, at)
        if size > stop - at - 4 and at > start:
            break
        if size < 5 or size > stop - at - 4:
            return False
        head = 5 + p[at + 4]
        if head > 6 or size < head or (head == 6 and p[at + 5] & 3 == 3):
            return False
        at += 4 + head
        if crc32_raw(p, at, size - head) != _u32(p, at - 4):
            return False
        if head == 6 and p[at - 5] & 3:
            found[1] += 1
        else:
            found[0] += 1
            found[2] = max(found[2], size - head)
        at += size - head
    return True


def survey(data: Buffer, start: int, stop: int) -> tuple[bool, int, int, int]:
    """Check a message set, including its CRCs. The GIL is released.

    Returns whether it is valid, its numbers of messages and compressed messages, and the length of its longest value.
    Raises ValueError for a range outside the buffer.
    """
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    limit: cython.Py_ssize_t = stop
    sound: cython.bint
    if at < 0 or at > limit or limit > lent.size:
        raise ValueError(f"range is outside the buffer start={start} stop={stop}")
    if cython.compiled:
        found = cython.declare(cython.longlong[3])
    else:
        found = [0] * 3
    found[0] = found[1] = found[2] = 0
    with cython.nogil:
        sound = _survey(lent.p, at, limit, found)
    return sound, found[0], found[1], found[2]


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _next_wrapper(p: cython.p_const_uchar, at: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.Py_ssize_t:
    size: cython.longlong
    while stop - at >= 4:
        size = _i32(p, at)
        if size < 5 or size > stop - at - 4:
            break
        if p[at + 4] == 1 and p[at + 5] & 3:
            return at
        at += 4 + size
    return stop


def next_wrapper(data: Buffer, start: int, stop: int) -> tuple[int, int, int]:
    """Find the first compressed message of a valid message set. Return the start and end of its entry, and its codec.

    Returns (stop, stop, 0) if there is none.
    """
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    limit: cython.Py_ssize_t = stop
    if at < 0 or limit > lent.size:
        raise ValueError(f"range is outside the buffer start={start} stop={stop}")
    with cython.nogil:
        at = _next_wrapper(lent.p, at, limit)
    if at >= limit:
        return stop, stop, 0
    return at, at + 4 + _i32(lent.p, at), lent.p[at + 5] & 3


def take(data: Buffer, start: int, stop: int, run: RecordSpans, bytes_max: int) -> tuple[int, int]:
    """Store records of a valid message set without compressed messages in ``run``.

    Return the position after them, and their number. Stops when ``run`` is full or its values have ``bytes_max`` bytes,
    but stores at least one record. Sets only ``spans``, ``flags`` and ``crcs`` of ``run``.
    """
    lent: Lent = lend(data)
    found: _BorrowedSpans = _BorrowedSpans(run)
    at: cython.Py_ssize_t = start
    limit: cython.Py_ssize_t = stop
    left: cython.longlong = bytes_max
    record: cython.Py_ssize_t = 0
    size: cython.longlong
    head: cython.Py_ssize_t
    if at < 0 or limit > lent.size:
        raise ValueError(f"range is outside the buffer start={start} stop={stop}")
    while limit - at >= 4 and record < _RECORDS_MAX:
        size = _i32(lent.p, at)
        if size < 5 or size > limit - at - 4:
            at = limit
            break
        head = 5 + lent.p[at + 4]
        left -= size - head
        if size < head or (left < 0 and record > 0):
            break
        at += 4 + head
        store_i64(found.spans.p, 32 * record, 0)
        store_i64(found.spans.p, 32 * record + 8, -1)
        store_i64(found.spans.p, 32 * record + 16, at)
        store_i64(found.spans.p, 32 * record + 24, size - head)
        found.flags.p[record] = 6 - head
        store_u32(found.crcs.p, 4 * record, _u32(lent.p, at - 4))
        record += 1
        at += size - head
    if limit - at < 4:
        at = limit
    return at, record


@cython.cfunc
def _put_rows(run: RecordSpans, rows: Lendable, group: cython.int) -> cython.Py_ssize_t:
    """Write the numbers of a group's records to ``rows``, and return how many there are."""
    groups: Lent = lend(run.groups_of)
    target: Lent = lend_writable(rows)
    i: cython.Py_ssize_t
    n: cython.Py_ssize_t = 0
    if target.size > groups.size:
        raise ValueError(f"rows are outside the run bytes={target.size}")
    for i in range(target.size // 4):
        if load_i32(groups.p, 4 * i) == group:
            store_u32(target.p, 4 * n, i)
            n += 1
    return n


def rows_of_group(run: RecordSpans, count: int, group: int) -> array[int]:
    """Return the numbers (i32) of the records of a group, among the first ``count`` records."""
    rows = array("i", bytes(4 * count))
    del rows[_put_rows(run, rows, group) :]
    return rows


def crcs_of(run: RecordSpans, rows: Lendable) -> array[int]:
    source: Lent = lend(run.crcs)
    chosen: Lent = lend(rows)
    count: cython.Py_ssize_t = chosen.size // 4
    row: cython.Py_ssize_t
    i: cython.Py_ssize_t
    crcs = array("I", bytes(4 * count))
    target: Lent = lend_writable(crcs)
    for i in range(count):
        row = load_i32(chosen.p, 4 * i)
        if row < 0 or row >= _RECORDS_MAX:
            raise ValueError(f"row is outside the run row={row}")
        store_u32(target.p, 4 * i, load_u32(source.p, 4 * row))
    return crcs


def spread(run: RecordSpans, rows: Lendable, seed: int, partition_count: int) -> array[int]:
    """Choose a random partition for each message set. Return the partition (i32) of each record in ``rows``.

    Used for PRODUCE requests with partition -1 (spec: kafka-0.7#topics-and-partitions).
    """
    sets: Lent = lend(run.sets_of)
    chosen: Lent = lend(rows)
    count: cython.Py_ssize_t = chosen.size // 4
    modulus: cython.ulonglong = partition_count
    salt: cython.uint = seed & 0xFFFFFFFF
    x: cython.ulonglong
    row: cython.Py_ssize_t
    i: cython.Py_ssize_t
    if partition_count < 1:
        raise ValueError(f"no partitions count={partition_count}")
    numbers = array("i", bytes(4 * count))
    target: Lent = lend_writable(numbers)
    for i in range(count):
        row = load_i32(chosen.p, 4 * i)
        if row < 0 or row >= _RECORDS_MAX:
            raise ValueError(f"row is outside the run row={row}")
        x = (load_u32(sets.p, 4 * row) + salt) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        x = x ^ (x >> 16)
        store_u32(target.p, 4 * i, x % modulus)
    return numbers
