# cython: language_level=3, annotation_typing=False, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# mypy: disable-error-code="untyped-decorator,import-untyped"
"""Decode consecutive PRODUCE lines from a receive buffer with one call.

A *run* is a sequence of consecutive PRODUCE lines that the full parser in ``messages`` would read in the same way. The
next line that needs that parser ends the run. No Python object is created per record.

Layout of the ``work`` array, i64 words (R = RUN_RECORDS_MAX, T = RUN_TOPICS_MAX)::

    0   4R      spans: key position, key length, value position, value length, as in decision 0101
    4R  6R      correlation ids: position, length
    6R  7R      number of the record's topic within the run
    7R  7R+2T   topics of the run: position, length
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import cython

if TYPE_CHECKING:
    from array import array

    Buffer = bytes | bytearray | memoryview
    Numbers = array[int] | memoryview

RUN_RECORDS_MAX: Final = 2048  # records of one run; limits the work array to 115 KB
RUN_TOPICS_MAX: Final = 16  # topics of one run, which are searched linearly
WORK_WORDS: Final = 7 * RUN_RECORDS_MAX + 2 * RUN_TOPICS_MAX
LINE_BYTES_MAX: Final = 65_536  # length of a line with its ending (spec: flux#framing)

MORE: Final = 0  # the data ends within a line
LINE: Final = 1  # a complete line that the full parser must read
FULL: Final = 2  # the run is full; the caller continues with the next run
LONG: Final = 3  # a line exceeds the limit

_R = cython.declare(cython.Py_ssize_t, 2048)
_T = cython.declare(cython.Py_ssize_t, 16)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.bint)
@cython.locals(data="const unsigned char[::1]", i=cython.Py_ssize_t, stop=cython.Py_ssize_t)
def _wide_white(data: Buffer, i: int, stop: int) -> bool:
    """Return whether a non-ASCII white space character (spec: flux#white-space) begins at ``i``."""
    if stop - i < 2:
        return False
    if data[i] == 0xC2:
        return data[i + 1] == 0x85 or data[i + 1] == 0xA0
    if stop - i < 3:
        return False
    if data[i] == 0xE1:
        return data[i + 1] == 0x9A and data[i + 2] == 0x80
    if data[i] == 0xE3:
        return data[i + 1] == 0x80 and data[i + 2] == 0x80
    if data[i] != 0xE2:
        return False
    if data[i + 1] == 0x81:
        return data[i + 2] == 0x9F
    if data[i + 1] != 0x80:
        return False
    return 0x80 <= data[i + 2] <= 0x8A or data[i + 2] == 0xA8 or data[i + 2] == 0xA9 or data[i + 2] == 0xAF


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.bint)
@cython.locals(c=cython.uchar)
def _topic_byte(c: int) -> bool:
    return 0x61 <= c <= 0x7A or 0x41 <= c <= 0x5A or 0x30 <= c <= 0x39 or c == 0x2E or c == 0x5F or c == 0x2D


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(data="const unsigned char[::1]", i=cython.Py_ssize_t, stop=cython.Py_ssize_t)
def _after_id(data: Buffer, i: int, stop: int) -> int:
    """Return the position of the pipe after the correlation id at ``i`` if ``PRODUCE|`` follows it; otherwise -1."""
    start = cython.declare(cython.Py_ssize_t, i)
    while i < stop and data[i] != 0x7C:
        if data[i] == 0x0A:
            return -1
        i += 1
    if i == start or stop - i < 9:
        return -1
    if not (0x20 < data[start] < 0x80 and 0x20 < data[i - 1] < 0x80):
        return -1
    if data[i + 1] != 0x50 or data[i + 2] != 0x52 or data[i + 3] != 0x4F or data[i + 4] != 0x44:
        return -1
    if data[i + 5] != 0x55 or data[i + 6] != 0x43 or data[i + 7] != 0x45 or data[i + 8] != 0x7C:
        return -1
    return i


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(data="const unsigned char[::1]", i=cython.Py_ssize_t, stop=cython.Py_ssize_t)
def _after_topic(data: Buffer, i: int, stop: int) -> int:
    """Return the position of the space after the valid topic name that begins at ``i``; -1 if there is none."""
    start = cython.declare(cython.Py_ssize_t, i)
    while i < stop and _topic_byte(data[i]):
        i += 1
    if i == start or i - start > 249 or i >= stop or data[i] != 0x20:  # types.NAME_BYTES_MAX
        return -1
    if data[start] == 0x2E and (i - start == 1 or (i - start == 2 and data[start + 1] == 0x2E)):
        return -1
    return i


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(data="const unsigned char[::1]", i=cython.Py_ssize_t, stop=cython.Py_ssize_t)
def _after_key(data: Buffer, i: int, stop: int) -> int:
    """Return the position of the first colon from ``i`` on; -1 if white space, a pipe or the end comes first."""
    c = cython.declare(cython.uchar)
    while i < stop:
        c = data[i]
        if c == 0x3A:
            return i
        if c == 0x7C:
            return -1
        if c <= 0x20 and (c == 0x20 or 0x09 <= c <= 0x0D):
            return -1
        if c >= 0xC2 and c <= 0xE3 and _wide_white(data, i, stop):
            return -1
        i += 1
    return -1


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(data="const unsigned char[::1]", i=cython.Py_ssize_t, stop=cython.Py_ssize_t)
def _after_value(data: Buffer, i: int, stop: int) -> int:
    """Return the position of the ASCII white space after the value that begins at ``i``.

    Returns -1 if the data ends or other white space comes first, and for a value with a pipe or a control byte: the
    full parser marks such values (``messages.is_plain``).
    """
    c = cython.declare(cython.uchar)
    while i < stop:
        c = data[i]
        if c <= 0x20:
            return i if c == 0x20 or c == 0x0A or c == 0x0D else -1
        if c >= 0x7C:
            if c == 0x7D or c == 0x7E:
                i += 1
                continue
            if c == 0x7C or c == 0x7F or (0xC2 <= c <= 0xE3 and _wide_white(data, i, stop)):
                return -1
            i = after_character(data, i, stop)
            if i < 0:
                return -1
            continue
        i += 1
    return -1


@cython.cfunc
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(data="const unsigned char[::1]", i=cython.Py_ssize_t, stop=cython.Py_ssize_t)
def after_character(data: Buffer, i: int, stop: int) -> int:
    """Return the position after the non-ASCII UTF-8 character at ``i``; -1 if it is invalid."""
    c = cython.declare(cython.uchar, data[i])
    d = cython.declare(cython.uchar)
    if c < 0xC2 or c > 0xF4 or stop - i < 2:
        return -1
    d = data[i + 1]
    if d & 0xC0 != 0x80:
        return -1
    if c < 0xE0:
        return i + 2
    if stop - i < 3 or data[i + 2] & 0xC0 != 0x80:
        return -1
    if c < 0xF0:
        if (c == 0xE0 and d < 0xA0) or (c == 0xED and d > 0x9F):
            return -1
        return i + 3
    if stop - i < 4 or data[i + 3] & 0xC0 != 0x80:
        return -1
    if (c == 0xF0 and d < 0x90) or (c == 0xF4 and d > 0x8F):
        return -1
    return i + 4


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(data="const unsigned char[::1]", i=cython.Py_ssize_t, stop=cython.Py_ssize_t)
def _after_line(data: Buffer, i: int, stop: int) -> int:
    """Return the position after the line ending at ``i``. Before it, only ``acks=0`` or ``acks=1`` is allowed.

    Returns -1 for anything else.
    """
    if data[i] == 0x20:
        if stop - i < 8 or data[i + 1] != 0x61 or data[i + 2] != 0x63 or data[i + 3] != 0x6B or data[i + 4] != 0x73:
            return -1
        if data[i + 5] != 0x3D or (data[i + 6] != 0x30 and data[i + 6] != 0x31):
            return -1
        i += 7
    if data[i] == 0x0D:
        i += 1
        if i >= stop:
            return -1
    if data[i] != 0x0A:
        return -1
    return i + 1


@cython.cfunc
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(
    data="const unsigned char[::1]",
    at=cython.Py_ssize_t,
    size=cython.Py_ssize_t,
    work="long long[::1]",
    topics=cython.Py_ssize_t,
)
def _topic_number(data: Buffer, at: int, size: int, work: Numbers, topics: int) -> int:
    """Return the number of a topic among those of the decoded lines, adding a new one.

    Returns -1 if there is no space.
    """
    t = cython.declare(cython.Py_ssize_t, topics - 1)
    k = cython.declare(cython.Py_ssize_t)
    other = cython.declare(cython.Py_ssize_t)
    base = cython.declare(cython.Py_ssize_t, 7 * _R)
    while t >= 0:
        if work[base + 2 * t + 1] == size:
            other = work[base + 2 * t]
            k = 0
            while k < size and data[at + k] == data[other + k]:
                k += 1
            if k == size:
                return t
        t -= 1
    if topics == _T:
        return -1
    work[base + 2 * topics] = at
    work[base + 2 * topics + 1] = size
    return topics


@cython.cfunc
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(
    data="const unsigned char[::1]",
    at=cython.Py_ssize_t,
    stop=cython.Py_ssize_t,
    work="long long[::1]",
    k=cython.Py_ssize_t,
    topics=cython.Py_ssize_t,
    line_max=cython.Py_ssize_t,
)
def _produce_line(data: Buffer, at: int, stop: int, work: Numbers, k: int, topics: int, line_max: int) -> int:
    """Decode the PRODUCE line at ``at`` as record ``k``, if it has no unusual syntax.

    Returns the position after the line, -1 if it is incomplete or needs the full parser, and -2 if the run has too many
    topics.
    """
    id_end = cython.declare(cython.Py_ssize_t)
    topic_end = cython.declare(cython.Py_ssize_t)
    key_end = cython.declare(cython.Py_ssize_t)
    value_end = cython.declare(cython.Py_ssize_t)
    after = cython.declare(cython.Py_ssize_t)
    topic = cython.declare(cython.Py_ssize_t)
    if stop - at < 17 or data[at] != 0x56 or data[at + 1] != 0x31 or data[at + 2] != 0x7C:
        return -1
    id_end = _after_id(data, at + 3, stop)
    if id_end < 0:
        return -1
    topic_end = _after_topic(data, id_end + 9, stop)
    if topic_end < 0:
        return -1
    key_end = _after_key(data, topic_end + 1, stop)
    if key_end < 0:
        return -1
    value_end = _after_value(data, key_end + 1, stop)
    if value_end < 0:
        return -1
    after = _after_line(data, value_end, stop)
    if after < 0 or after - at > line_max:
        return -1
    topic = _topic_number(data, id_end + 9, topic_end - id_end - 9, work, topics)
    if topic < 0:
        return -2
    work[4 * k] = topic_end + 1
    work[4 * k + 1] = key_end - topic_end - 1
    work[4 * k + 2] = key_end + 1
    work[4 * k + 3] = value_end - key_end - 1
    work[4 * _R + 2 * k] = at + 3
    work[4 * _R + 2 * k + 1] = id_end - at - 3
    work[6 * _R + k] = topic
    return after


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(data="const unsigned char[::1]", i=cython.Py_ssize_t, stop=cython.Py_ssize_t)
def _line_end(data: Buffer, i: int, stop: int) -> int:
    while i < stop and data[i] != 0x0A:
        i += 1
    return i


@cython.locals(
    data="const unsigned char[::1]",
    start=cython.Py_ssize_t,
    stop=cython.Py_ssize_t,
    work="long long[::1]",
    line_max=cython.Py_ssize_t,
    at=cython.Py_ssize_t,
    after=cython.Py_ssize_t,
    end=cython.Py_ssize_t,
    count=cython.Py_ssize_t,
    topics=cython.Py_ssize_t,
    reason=cython.int,
)
def scan(
    data: Buffer, start: int, stop: int, work: Numbers, line_max: int = LINE_BYTES_MAX
) -> tuple[int, int, int, int, int]:
    """Decode the consecutive PRODUCE lines at ``start`` that need no full parser.

    ``line_max`` is the limit for a line with its ending. Returns (reason for the end, position after these lines, end
    of the next line, number of records, number of topics). The end of the next line is only determined if the reason is
    LINE; otherwise it is the position after the lines. Raises ValueError if the arguments do not fit the buffers.
    """
    if not 0 <= start <= stop <= len(data) or len(work) < 7 * 2048 + 2 * 16:
        raise ValueError(f"scan range is outside the buffers start={start} stop={stop}")
    at = start
    end = start
    count = 0
    topics = 0
    reason = 0
    while at < stop and reason == 0:
        after = -2 if count == _R else _produce_line(data, at, stop, work, count, topics, line_max)
        if after > 0:
            topics += work[6 * _R + count] == topics
            count += 1
            at = after
        elif after == -2:
            reason = 2
        else:
            end = _line_end(data, at, stop)
            reason = 3 if end - at >= line_max else 1
            if end == stop and reason == 1:
                break
    if reason == 1 and end < stop:
        return 1, at, end + 1, count, topics
    return (0 if reason == 1 else reason), at, at, count, topics


@cython.locals(data="const unsigned char[::1]", work="const long long[::1]", at=cython.Py_ssize_t, i=cython.int)
def first_of(data: Buffer, work: Numbers) -> tuple[bytes, str, bytes]:
    """Return the correlation id, topic and key of the first record that ``scan`` decoded."""
    if len(work) < 7 * 2048 + 2:
        raise ValueError(f"work array is too small words={len(work)}")
    for i in (4 * 2048, 7 * 2048, 0):
        at = work[i]
        if at < 0 or work[i + 1] < 0 or at + work[i + 1] > len(data):
            raise ValueError(f"work array points outside the receive buffer position={at} bytes={work[i + 1]}")
    return (
        _bytes_at(data, work[4 * _R], work[4 * _R + 1]),
        _bytes_at(data, work[7 * _R], work[7 * _R + 1]).decode("ascii"),
        _bytes_at(data, work[0], work[1]),
    )


@cython.cfunc
@cython.returns(bytes)
@cython.locals(data="const unsigned char[::1]", at=cython.Py_ssize_t, size=cython.Py_ssize_t)
def _bytes_at(data: Buffer, at: int, size: int) -> bytes:
    if cython.compiled:
        return cython.cast(cython.p_char, cython.address(data[0]))[at : at + size]
    return bytes(data[at : at + size])


@cython.locals(
    data="const unsigned char[::1]",
    work="const long long[::1]",
    out="unsigned char[::1]",
    count=cython.Py_ssize_t,
    n=cython.Py_ssize_t,
    k=cython.Py_ssize_t,
    j=cython.Py_ssize_t,
    at=cython.Py_ssize_t,
    size=cython.Py_ssize_t,
)
def pack_ids(data: Buffer, work: Numbers, count: int, out: Buffer) -> int:
    """Copy the correlation ids of the decoded lines, each with an LF, to ``out``.

    Return the bytes written, or -1 if they do not fit. The ids are copied because replies are written after the commit,
    when the receive buffer may have other content.
    """
    if not 0 <= count <= 2048 or len(work) < 6 * 2048:
        raise ValueError(f"number of records is outside the buffers count={count}")
    n = 0
    for k in range(count):
        at = work[4 * _R + 2 * k]
        size = work[4 * _R + 2 * k + 1]
        if at < 0 or size < 0 or at + size > len(data):
            raise ValueError(f"correlation id is outside the receive buffer position={at} bytes={size}")
        if n + size + 1 > len(out):
            return -1
        for j in range(size):
            out[n + j] = data[at + j]  # type: ignore[index]
        n += size
        out[n] = 0x0A  # type: ignore[index]
        n += 1
    return n


@cython.locals(
    work="const long long[::1]",
    count=cython.Py_ssize_t,
    topic=cython.Py_ssize_t,
    spans="long long[::1]",
    records="int[::1]",
    n=cython.Py_ssize_t,
    k=cython.Py_ssize_t,
    j=cython.Py_ssize_t,
)
def select(work: Numbers, count: int, topic: int, spans: Numbers, records: Numbers) -> int:
    """Copy positions and lengths of one topic's records to ``spans``, and the records' numbers to ``records``.

    Return how many there are.
    """
    if not 0 <= count <= 2048 or len(work) < 7 * 2048 or len(spans) < 4 * count or len(records) < count:
        raise ValueError(f"number of records is outside the buffers count={count}")
    n = 0
    for k in range(count):
        if work[6 * _R + k] == topic:
            for j in range(4):
                spans[4 * n + j] = work[4 * k + j]
            records[n] = k
            n += 1
    return n


@cython.locals(
    partitions="const int[::1]",
    count=cython.Py_ssize_t,
    records="const int[::1]",
    base=cython.int,
    slots="int[::1]",
    groups="int[::1]",
    rows="int[::1]",
    bounds="int[::1]",
    n=cython.Py_ssize_t,
    k=cython.Py_ssize_t,
    p=cython.Py_ssize_t,
    g=cython.int,
    total=cython.int,
)
def divide(
    partitions: Numbers,
    count: int,
    records: Numbers | None,
    base: int,
    slots: Numbers,
    groups: Numbers,
    rows: Numbers,
    bounds: Numbers,
) -> int:
    """Group the records of a topic by partition, in the order of their first appearance.

    Return the number of groups.

    Args:
        partitions: the partition of each record.
        records: the records' numbers among all decoded lines; None for all of them.
        base: number of the first group.
        slots: one zero per partition of the topic; all are zero again afterwards.
        groups: receives the group of each record.
        rows: receives the indexes of the records, group after group.
        bounds: receives, for each group, its end in ``rows`` and its partition.
    """
    if count > len(partitions) or count > len(rows) or 2 * count > len(bounds) or count > len(groups):
        raise ValueError(f"records do not fit into the buffers count={count}")
    if records is not None and count > len(records):
        raise ValueError(f"records do not fit into the buffers count={count}")
    total = 0
    for k in range(count):
        p = partitions[k]
        if p < 0 or p >= len(slots):
            raise ValueError(f"the topic has no such partition partition={p}")
        g = slots[p] - 1
        if g < 0:
            g = total
            total += 1
            slots[p] = total
            bounds[2 * g] = 0
            bounds[2 * g + 1] = p
        bounds[2 * g] += 1
        if records is None:
            groups[k] = base + g
        elif records[k] < len(groups):
            groups[records[k]] = base + g
    n = 0
    for g in range(total):
        p = bounds[2 * g]
        bounds[2 * g] = n  # the start of the group, which the loop below moves to its end
        n += p
    for k in range(count):
        g = slots[partitions[k]] - 1
        rows[bounds[2 * g]] = k
        bounds[2 * g] += 1
    for g in range(total):
        slots[bounds[2 * g + 1]] = 0
    return total
