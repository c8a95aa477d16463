# cython: language_level=3, annotation_typing=False, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# mypy: disable-error-code="untyped-decorator,import-untyped"
"""FLUX replies in bulk: the answers of a run of PRODUCE lines, and the records of a CONSUME reply.

Promises: one call per run, one per stored batch; no Python object per record; a value a line cannot carry is escaped, never torn.
Must not know: sockets, the broker, the layout of a stored batch beyond the column positions it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import cython

if cython.compiled:
    from cython.cimports.polywire.protocols.flux.codec import after_character
else:
    from polywire.protocols.flux.codec import after_character

if TYPE_CHECKING:
    from array import array

    Buffer = bytes | bytearray | memoryview
    Numbers = array[int] | memoryview

REPLY_BYTES: Final = 96  # "V1||OK|partition= offset= hw=" and three numbers of at most 20 digits, with the line ending


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(out="unsigned char[::1]", at=cython.Py_ssize_t, value=cython.longlong)
def _put_number(out: bytearray, at: int, value: int) -> int:
    """Write a decimal number of at most 20 characters; position after it."""
    digits = cython.declare(cython.Py_ssize_t, 1)
    rest = cython.declare(cython.longlong)
    end = cython.declare(cython.Py_ssize_t)
    k = cython.declare(cython.Py_ssize_t)
    if value < 0:
        out[at] = 0x2D
        at += 1
        value = -value
    rest = value
    while rest >= 10:
        rest = rest // 10
        digits += 1
    end = at + digits
    k = end - 1
    while k >= at:
        out[k] = 0x30 + value % 10
        value = value // 10
        k -= 1
    return end  # type: ignore[no-any-return]


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(out="unsigned char[::1]", at=cython.Py_ssize_t, text="const unsigned char[::1]")
def _put_text(out: bytearray, at: int, text: Buffer) -> int:
    """Write a constant; position after it."""
    k = cython.declare(cython.Py_ssize_t)
    n = cython.declare(cython.Py_ssize_t, len(text))
    for k in range(n):
        out[at + k] = text[k]
    return at + n  # type: ignore[no-any-return]


@cython.locals(
    ids="const unsigned char[::1]",
    groups="const int[::1]",
    numbers="long long[::1]",
    out="unsigned char[::1]",
    head="const unsigned char[::1]",
    ok="const unsigned char[::1]",
    offset_text="const unsigned char[::1]",
    hw_text="const unsigned char[::1]",
    i=cython.Py_ssize_t,
    at=cython.Py_ssize_t,
    k=cython.Py_ssize_t,
    g=cython.Py_ssize_t,
    offset=cython.longlong,
)
def put_produced(ids: Buffer, groups: Numbers, numbers: Numbers, out: Buffer) -> int:
    """Write the replies of a run to ``out``; returns the bytes written.

    ids: as ``pack_ids`` made them. groups: group of each record. numbers: per group (partition, offset of its next record,
    lowest hw to tell), the offset is counted up. A reply's hw is the record's own offset, or the lowest hw when that is higher.
    """
    if len(out) < len(ids) + len(groups) * 96:
        raise ValueError(f"replies do not fit bytes={len(out)} records={len(groups)}")
    head = b"V1|"
    ok = b"|OK|partition="
    offset_text = b" offset="
    hw_text = b" hw="
    i = 0
    at = 0
    for k in range(len(groups)):
        g = groups[k]
        if g < 0 or 3 * g + 2 >= len(numbers):
            raise ValueError(f"group outside its numbers group={g}")
        at = _put_text(out, at, head)  # type: ignore[arg-type]
        while i < len(ids) and ids[i] != 0x0A:
            out[at] = ids[i]  # type: ignore[index]
            at += 1
            i += 1
        i += 1
        at = _put_text(out, at, ok)  # type: ignore[arg-type]
        at = _put_number(out, at, numbers[3 * g])  # type: ignore[arg-type]
        offset = numbers[3 * g + 1]
        numbers[3 * g + 1] = offset + 1
        at = _put_text(out, at, offset_text)  # type: ignore[arg-type]
        at = _put_number(out, at, offset)  # type: ignore[arg-type]
        at = _put_text(out, at, hw_text)  # type: ignore[arg-type]
        at = _put_number(out, at, offset if offset > numbers[3 * g + 2] else numbers[3 * g + 2])  # type: ignore[arg-type]
        out[at] = 0x0A  # type: ignore[index]
        at += 1
    return at


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.bint)
@cython.locals(data="const unsigned char[::1]", i=cython.Py_ssize_t, stop=cython.Py_ssize_t)
def _clean(data: Buffer, i: int, stop: int) -> bool:
    """Whether a value can stand in a reply as it is (dossier §7)."""
    c = cython.declare(cython.uchar)
    while i < stop:
        c = data[i]
        if c < 0x20 or c == 0x7F:
            return False
        if c == 0x20 and stop - i >= 4 and data[i + 1] == 0x68 and data[i + 2] == 0x77 and data[i + 3] == 0x3D:
            return False
        if c >= 0x80:
            i = after_character(data, i, stop)
            if i < 0:
                return False
            continue
        i += 1
    return True


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.bint)
@cython.locals(data="const unsigned char[::1]", i=cython.Py_ssize_t, stop=cython.Py_ssize_t)
def _one_word(data: Buffer, i: int, stop: int) -> bool:
    """Whether a value has no white space of ASCII, so that a line could have brought it; a flag alone is not trusted."""
    while i < stop:
        if data[i] == 0x20 or 0x09 <= data[i] <= 0x0D:
            return False
        i += 1
    return True


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(out="unsigned char[::1]", at=cython.Py_ssize_t, offset=cython.longlong)
def _put_offset(out: bytearray, at: int, offset: int) -> int:
    """Write what stands before a value, a comma included unless it is the first; position after it."""
    if at > 0:
        out[at] = 0x2C
        at += 1
    at = _put_number(out, at, offset)
    out[at] = 0x3A
    return at + 1


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(
    data="const unsigned char[::1]",
    i=cython.Py_ssize_t,
    stop=cython.Py_ssize_t,
    out="unsigned char[::1]",
    at=cython.Py_ssize_t,
)
def _put_plain(data: Buffer, i: int, stop: int, out: bytearray, at: int) -> int:
    """Write a value as it is; position after it."""
    while i < stop:
        out[at] = data[i]
        at += 1
        i += 1
    return at


@cython.cfunc
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(
    data="const unsigned char[::1]",
    i=cython.Py_ssize_t,
    stop=cython.Py_ssize_t,
    out="unsigned char[::1]",
    at=cython.Py_ssize_t,
)
def _put_escaped(data: Buffer, i: int, stop: int, out: bytearray, at: int) -> int:
    """Write a value with what a line cannot carry as %XX, and % as %25; position after it."""
    c = cython.declare(cython.uchar)
    after = cython.declare(cython.Py_ssize_t)
    odd = cython.declare(cython.bint)
    while i < stop:
        c = data[i]
        after = i + 1
        odd = c < 0x20 or c == 0x7F or c == 0x25
        if c == 0x20 and stop - i >= 4 and data[i + 1] == 0x68 and data[i + 2] == 0x77 and data[i + 3] == 0x3D:
            odd = True
        if c >= 0x80:
            after = after_character(data, i, stop)
            if after < 0:
                odd = True
                after = i + 1
        if odd:
            out[at] = 0x25
            out[at + 1] = (c >> 4) + (0x30 if c >> 4 < 10 else 0x37)
            out[at + 2] = (c & 15) + (0x30 if c & 15 < 10 else 0x37)
            at += 3
            i = after
            continue
        while i < after:
            out[at] = data[i]
            at += 1
            i += 1
    return at


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(data="const unsigned char[::1]", at=cython.Py_ssize_t, v=cython.Py_ssize_t)
def _u32(data: Buffer, at: int) -> int:
    """A little-endian number of four bytes."""
    v = data[at + 3]
    v = v << 8 | data[at + 2]
    v = v << 8 | data[at + 1]
    return v << 8 | data[at]


@cython.locals(
    data="const unsigned char[::1]",
    places="const long long[::1]",
    limits="const long long[::1]",
    out="unsigned char[::1]",
    at=cython.Py_ssize_t,
    row=cython.Py_ssize_t,
    count=cython.Py_ssize_t,
    offsets_at=cython.Py_ssize_t,
    values_at=cython.Py_ssize_t,
    values_size=cython.Py_ssize_t,
    deltas_at=cython.Py_ssize_t,
    flags_at=cython.Py_ssize_t,
    begin=cython.Py_ssize_t,
    end=cython.Py_ssize_t,
    put=cython.Py_ssize_t,
    cap=cython.Py_ssize_t,
    base=cython.longlong,
    offset=cython.longlong,
    offset_start=cython.longlong,
    offset_end=cython.longlong,
    escaped=cython.Py_ssize_t,
)
def put_values(data: Buffer, places: Numbers, limits: Numbers, out: Buffer, at: int) -> tuple[int, int, int, int]:
    """Write ``offset:value`` of a batch's records to ``out`` from ``at`` on, joined by commas; everything before ``at`` is kept.

    places: positions in ``data`` of value offsets, value bytes, their size, offset deltas (-1: none), record flags (-1: none), the record
    count and the base offset. limits: first offset wanted, exclusive end, reply bytes at which to stop (one record is always written), row
    to begin with.
    Returns (position after what was written, next row, free bytes the next record needs or 0, escaped values). The row equals the count when
    the batch is done; a need above 0 asks for a larger ``out``; otherwise the limit was reached.
    """
    if len(places) < 7 or len(limits) < 4:
        raise ValueError("places and limits are too short")
    offsets_at = places[0]
    values_at = places[1]
    values_size = places[2]
    deltas_at = places[3]
    flags_at = places[4]
    count = places[5]
    base = places[6]
    offset_start = limits[0]
    offset_end = limits[1]
    cap = limits[2]
    row = limits[3]
    escaped = 0
    if count < 0 or row < 0 or offsets_at < 0 or offsets_at + 4 * (count + 1) > len(data):
        raise ValueError(f"value offsets outside the batch records={count}")
    if values_at < 0 or values_size < 0 or values_at + values_size > len(data):
        raise ValueError(f"values outside the batch bytes={values_size}")
    if (deltas_at >= 0 and deltas_at + 4 * count > len(data)) or (flags_at >= 0 and flags_at + count > len(data)):
        raise ValueError(f"columns outside the batch records={count}")
    while row < count:
        offset = base + (row if deltas_at < 0 else _u32(data, deltas_at + 4 * row))
        if offset >= offset_end:
            return at, count, 0, escaped
        if offset < offset_start:
            row += 1
            continue
        begin = _u32(data, offsets_at + 4 * row)
        end = _u32(data, offsets_at + 4 * row + 4)
        if begin > end or end > values_size:
            raise ValueError(f"value outside its column row={row}")
        if at + 24 + 3 * (end - begin) > len(out):
            return at, row, 24 + 3 * (end - begin), escaped
        put = _put_offset(out, at, offset)  # type: ignore[arg-type]
        begin += values_at
        end += values_at
        if _clean(data, begin, end) or (flags_at >= 0 and data[flags_at + row] & 4 and _one_word(data, begin, end)):
            put = _put_plain(data, begin, end, out, put)  # type: ignore[arg-type]
        else:
            put = _put_escaped(data, begin, end, out, put)  # type: ignore[arg-type]
            escaped += 1
        if at > 0 and put > cap:
            return at, row, 0, escaped
        at = put
        row += 1
    return at, row, 0, escaped
