# cython: language_level=3, annotation_typing=False, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# mypy: disable-error-code="untyped-decorator,import-untyped"
"""Encode FLUX replies in bulk: those to consecutive PRODUCE lines, and the records of CONSUME replies.

One call encodes all replies, or all records of a read, without a Python object per record. Values that cannot be part
of a line are escaped.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import cython

from polywire.records.compression import expand_body
from polywire.records.fields import header_fields

if cython.compiled:
    from cython.cimports.polywire.protocols.flux.decoder import after_character
    from cython.cimports.polywire.records.fields import load_base_offset, load_flags, load_record_count
    from cython.cimports.polywire.records.header import fill_layout
    from cython.cimports.polywire.records.memory import Lent, lend, load_u32
else:
    from polywire.protocols.flux.decoder import after_character
    from polywire.records.fields import load_base_offset, load_flags, load_record_count
    from polywire.records.header import fill_layout
    from polywire.records.memory import Lent, lend, load_u32

if TYPE_CHECKING:
    Buffer = bytes | bytearray | memoryview
    Numbers = array[int] | memoryview

EXPANDED_BYTES_MAX: Final = 256 * 1024 * 1024
REPLY_BYTES: Final = 96  # "V1||OK|partition= offset= hw=" and three numbers of at most 20 digits, with the line ending

START: Final = 0  # indexes of the words in the state of ``put_chunk``
END: Final = 1
CAP: Final = 2
POSITION: Final = 3
ROW: Final = 4
AT: Final = 5
ESCAPED: Final = 6
STATE_WORDS: Final = 7

DONE: Final = 0  # results of ``put_chunk``
STOPPED: Final = 1
COMPRESSED: Final = 2

_length: Final = header_fields("length")

_START = cython.declare(cython.Py_ssize_t, 0)
_END = cython.declare(cython.Py_ssize_t, 1)
_CAP = cython.declare(cython.Py_ssize_t, 2)
_POSITION = cython.declare(cython.Py_ssize_t, 3)
_ROW = cython.declare(cython.Py_ssize_t, 4)
_AT = cython.declare(cython.Py_ssize_t, 5)
_ESCAPED = cython.declare(cython.Py_ssize_t, 6)
_STOPPED = cython.declare(cython.Py_ssize_t, 1)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(out="unsigned char[::1]", at=cython.Py_ssize_t, value=cython.longlong)
def _put_number(out: bytearray, at: int, value: int) -> int:
    """Write a decimal number of at most 20 characters. Return the position after it."""
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
    return end


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(out="unsigned char[::1]", at=cython.Py_ssize_t, text="const unsigned char[::1]")
def _put_text(out: bytearray, at: int, text: Buffer) -> int:
    k = cython.declare(cython.Py_ssize_t)
    n = cython.declare(cython.Py_ssize_t, len(text))
    for k in range(n):
        out[at + k] = text[k]
    return at + n


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
    """Write the replies to consecutive PRODUCE lines to ``out``. Return the bytes written.

    Args:
        ids: the result of ``pack_ids``.
        groups: the group of each record. A group is a batch for one partition.
        numbers: for each group, the partition, the offset of its next record, and the lowest high watermark to report.
            The offset is incremented for each reply. A reply never reports a high watermark below the record's offset.
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
    """Return whether a value can be in a reply without escapes (spec: flux#values-in-replies)."""
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
    """Return whether a value has no ASCII white space, so that a FLUX line can have contained it.

    The record's flag does not prove that, because other protocols set it, too.
    """
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
    """Write the text before a value, with a comma unless it is the first value. Return the position after it."""
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
    """Write a value with %XX for bytes that cannot be in a line, and %25 for %. Return the position after it."""
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
@cython.exceptval(check=False)
@cython.nogil
@cython.returns(cython.Py_ssize_t)
@cython.locals(
    data="const unsigned char[::1]",
    p=cython.p_const_uchar,
    places=cython.p_longlong,
    batch=cython.Py_ssize_t,
    state="long long[::1]",
    out="unsigned char[::1]",
)
def _put_rows(data: Buffer, p: memoryview, places: list[int], batch: int, state: Numbers, out: bytearray) -> int:
    """Write the records of a batch, beginning at the record number in ``state``.

    Returns 0 at the end of the batch, -1 if it is corrupt, otherwise a result of ``put_chunk``.
    """
    count = cython.declare(cython.Py_ssize_t, load_record_count(p, batch))
    base = cython.declare(cython.longlong, load_base_offset(p, batch))
    offset = cython.declare(cython.longlong)
    row = cython.declare(cython.Py_ssize_t)
    begin = cython.declare(cython.Py_ssize_t)
    end = cython.declare(cython.Py_ssize_t)
    put = cython.declare(cython.Py_ssize_t)
    if (
        places[1] != 4 * count + 4
        or (places[50] >= 0 and places[51] != 4 * count)
        or (places[20] >= 0 and places[21] != count)
    ):
        return -1
    while state[_ROW] < count:
        row = state[_ROW]
        offset = base + (row if places[50] < 0 else load_u32(p, places[50] + 4 * row))
        if offset >= state[_END]:
            state[_START] = state[_END]
            return _STOPPED
        if offset < state[_START]:
            state[_ROW] = row + 1
            continue
        begin = load_u32(p, places[0] + 4 * row)
        end = load_u32(p, places[0] + 4 * row + 4)
        if begin > end or end > places[3]:
            return -1
        if state[_AT] + 24 + 3 * (end - begin) > len(out):
            return 24 + 3 * (end - begin)
        put = _put_offset(out, state[_AT], offset)
        begin += places[2]
        end += places[2]
        if _clean(data, begin, end) or (places[20] >= 0 and data[places[20] + row] & 4 and _one_word(data, begin, end)):
            put = _put_plain(data, begin, end, out, put)
        else:
            put = _put_escaped(data, begin, end, out, put)
            state[_ESCAPED] += 1
        if state[_AT] > 0 and put > state[_CAP]:
            return _STOPPED
        state[_AT] = put
        state[_START] = offset + 1
        state[_ROW] = row + 1
    return 0


@cython.locals(
    data="const unsigned char[::1]",
    state="long long[::1]",
    out="unsigned char[::1]",
    lent=Lent,
    length=cython.Py_ssize_t,
    code=cython.Py_ssize_t,
    batch=cython.Py_ssize_t,
)
def put_chunk(data: Buffer, state: Numbers, out: bytearray) -> int:
    """Write ``offset:value`` of the records in a chunk of stored batches to ``out``, joined by commas.

    The words of ``state`` are:

    * START and END: requested offsets; END is exclusive.
    * CAP: bytes at which to stop, but at least one record is written.
    * POSITION and ROW: where to continue.
    * AT: bytes written so far.
    * ESCAPED: values escaped so far.

    All but END and CAP are updated. START becomes the offset after the written records; if no more are requested, it
    becomes END. Returns DONE at the end of the chunk, and STOPPED if no more records are requested or fit. Returns
    COMPRESSED if the batch at POSITION must be decompressed first. Otherwise returns the free bytes that the next
    record needs in ``out``. Raises ValueError for invalid batches.
    """
    lent = lend(data)
    if len(state) < STATE_WORDS or state[_POSITION] < 0 or state[_ROW] < 0 or state[_AT] < 0:
        raise ValueError("state array has the wrong size")
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    while state[_POSITION] < lent.size:
        batch = state[_POSITION]
        if lent.size - batch >= 104 and load_flags(lent.p, batch) & 6:
            return COMPRESSED
        length = fill_layout(lent.p, batch, lent.size, places)
        code = -1 if length < 0 else _put_rows(data, lent.p, places, batch, state, out)
        if code < 0:
            raise ValueError(f"no readable batch position={batch}")
        if code > 0:
            return code
        state[_POSITION] = batch + length
        state[_ROW] = 0
    return DONE


def new_state(start: int, end: int, limit: int) -> array[int]:
    """Return the state for writing records ``start <= offset < end`` in at most ``limit`` bytes."""
    state = array("q", bytes(8 * STATE_WORDS))
    state[START], state[END], state[CAP] = start, end, limit
    return state


def put_chunks(
    chunks: Sequence[memoryview], start: int, end: int, limit: int, out: bytearray
) -> tuple[bytearray, int, int]:
    """Write records ``start <= offset < end`` as ``offset:value``.

    Returns ``out``, or a larger buffer if it was too small, with the number of bytes written and the number of escaped
    values. Raises Corrupt for a damaged batch.
    """
    state = new_state(start, end, limit)
    out, _ = put_more(chunks, state, out)
    return out, state[AT], state[ESCAPED]


def put_more(chunks: Sequence[memoryview], state: array[int], out: bytearray) -> tuple[bytearray, bool]:
    """Append records as ``offset:value``.

    Returns ``out``, or a larger buffer if it was too small, and whether all requested records are written or no more
    fit. Raises Corrupt for a damaged batch.
    """
    for chunk in chunks:
        state[POSITION] = state[ROW] = 0
        code, out = _put_chunk(chunk, state, out)
        if code == STOPPED:
            return out, True
    return out, False


def _put_chunk(chunk: memoryview, state: array[int], out: bytearray) -> tuple[int, bytearray]:
    """Write one chunk. Enlarge ``out`` and decompress batches as needed."""
    while (code := put_chunk(chunk, state, out)) not in (DONE, STOPPED):
        if code == COMPRESSED:
            position = state[POSITION]
            (length,) = _length(chunk, position)
            expanded = expand_body(chunk[position : position + length], EXPANDED_BYTES_MAX)
            state[POSITION] = 0
            code, out = _put_chunk(memoryview(expanded), state, out)
            if code == STOPPED:
                break
            state[POSITION], state[ROW] = position + length, 0
        else:
            grown = bytearray(max(2 * len(out), state[AT] + code))
            grown[: state[AT]] = memoryview(out)[: state[AT]]
            out = grown
    return code, out
