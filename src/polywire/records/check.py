"""Validate an untrusted batch: all rules of decision 0101 in one pass.

* For any input the validation returns the batch's length or raises ``Invalid``.
* After validation, functions of this package never read outside the batch.
* Large batches are checked without the GIL.
"""

from __future__ import annotations

from typing import Final

import cython

from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import Column
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.checksum import crc32_raw, xxh64_raw
    from cython.cimports.polywire.records.header import body_matches, fill_layout
    from cython.cimports.polywire.records.memory import Lent, lend, load_i32, load_i64, load_u32, load_u64
else:
    from polywire.records.checksum import crc32_raw, xxh64_raw
    from polywire.records.header import body_matches, fill_layout
    from polywire.records.memory import Lent, lend, load_i32, load_i64, load_u32, load_u64

_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_RECORD_COUNT_MAX = cython.declare(cython.longlong, 4_194_304)
_PRODUCER_ID_BYTES_MAX = cython.declare(cython.longlong, 255)
_COLUMN_COUNT = cython.declare(cython.int, 27)
_NOGIL_BYTES_MIN = cython.declare(cython.Py_ssize_t, 262_144)

# Rules by number, as the check reports them. A number below 100 is a column that has the wrong size or lacks a column
# that it needs.
_CHECKSUM = cython.declare(cython.int, 100)
_HEADER = cython.declare(cython.int, 101)
_PADDING = cython.declare(cython.int, 102)
_OFFSETS = cython.declare(cython.int, 103)
_NULLS = cython.declare(cython.int, 104)
_KINDS = cython.declare(cython.int, 105)
_FLAGS = cython.declare(cython.int, 106)
_SPANS = cython.declare(cython.int, 107)
_DELTAS = cython.declare(cython.int, 108)
_CRC = cython.declare(cython.int, 109)
_PRODUCER = cython.declare(cython.int, 110)

_RULES: Final = {
    100: "a checksum does not match",
    101: "a header field is outside of its range",
    102: "bytes between columns are not zero",
    103: "offsets decrease or do not match the size of their bytes",
    104: "a null key or value has bytes",
    105: "a header has an unknown kind",
    106: "a record has unknown flags, or is an event without event columns",
    107: "the spans do not match the records",
    108: "offset or address deltas do not ascend",
    109: "a value does not match its crc",
    110: "the producer fields are inconsistent",
}


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _size_is(places: cython.p_const_longlong, column: cython.int, size: cython.longlong) -> cython.bint:
    return places[2 * column] < 0 or places[2 * column + 1] == size


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _together(places: cython.p_const_longlong, first: cython.int, last: cython.int) -> cython.bint:
    column: cython.int
    apart: cython.bint = False
    for column in range(first + 1, last + 1):
        apart |= (places[2 * column] < 0) != (places[2 * first] < 0)
    return not apart


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _last(p: cython.p_const_uchar, places: cython.p_const_longlong, column: cython.int) -> cython.longlong:
    """Return the last entry of an offsets column, which is the size of the bytes column that the offsets point into."""
    return load_i32(p, places[2 * column] + places[2 * column + 1] - 4)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _incomplete_columns(places: cython.p_const_longlong) -> cython.int:
    """Return the number of a column that is present without the columns that belong to it, or -1."""
    if places[0] < 0 or places[2] < 0:
        return 0
    if not _together(places, 3, 4) or (places[10] >= 0 and places[6] < 0):
        return 3
    if not _together(places, 11, 17):
        return 11
    if not _together(places, 18, 21) or (places[36] >= 0 and places[20] < 0):
        return 18
    if not _together(places, 22, 23) or (places[44] >= 0 and places[36] < 0):
        return 22
    if not _together(places, 25, 26):
        return 25
    return 7 if places[14] >= 0 and places[12] < 0 else -1


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def sizes_fit(p: cython.p_const_uchar, places: cython.p_const_longlong, count: cython.Py_ssize_t) -> cython.int:
    """Return the number of a column that has the wrong size or lacks a column that it requires, or -1."""
    column: cython.int = _incomplete_columns(places)
    if column >= 0:
        return column
    per_record: cython.longlong
    headers: cython.longlong = 0
    for column in range(_COLUMN_COUNT):
        per_record = -1
        if column == 0 or column == 3 or column == 11 or column == 18 or column == 22:
            per_record = 4 * count + 4
        elif column == 2 or column == 5:
            per_record = (count + 7) >> 3
        elif column == 7 or column == 9 or column == 21:
            per_record = 8 * count
        elif column == 8:
            per_record = 16 * count
        elif column == 10:
            per_record = count
        elif column == 20 or column >= 24:
            per_record = 4 * count
        elif column == 12 or column == 15:
            per_record = headers
        elif column == 13 or column == 16:
            per_record = 4 * headers + 4
        elif places[2 * column] >= 0 and column != 6:
            per_record = _last(p, places, column - 1)  # a bytes column follows its offsets column
        if per_record >= 0 and not _size_is(places, column, per_record):
            return column
        if per_record < 0 and places[2 * column] >= 0 and column != 6:
            return column
        if column == 11 and places[22] >= 0:
            headers = _last(p, places, 11)
            if headers < 0:
                return column
    if places[12] >= 0 and (places[13] < 1 or places[13] > _PRODUCER_ID_BYTES_MAX):
        return 6
    return -1


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _offsets_fit(p: cython.p_const_uchar, places: cython.p_const_longlong, column: cython.int) -> cython.bint:
    """Return whether an offsets column is absent, or begins at 0 and never decreases.

    ``sizes_fit`` has already compared the last offset with the size of the column that the offsets point into.
    """
    at: cython.Py_ssize_t = places[2 * column]
    steps: cython.Py_ssize_t = (places[2 * column + 1] >> 2) - 1
    falls: cython.int = 0
    i: cython.Py_ssize_t
    if at < 0:
        return True
    for i in range(steps):
        falls |= load_i32(p, at + 4 * i + 4) < load_i32(p, at + 4 * i)
    return falls == 0 and load_i32(p, at) == 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _nulls_empty(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    validity: cython.int,
    offsets: cython.int,
    count: cython.Py_ssize_t,
) -> cython.bint:
    """Return whether all records that a validity bitmap marks as null have no bytes. True without a bitmap."""
    bits: cython.Py_ssize_t = places[2 * validity]
    at: cython.Py_ssize_t = places[2 * offsets]
    broken: cython.int = 0
    i: cython.Py_ssize_t
    if bits < 0:
        return True
    for i in range(count):
        broken |= not (p[bits + (i >> 3)] >> (i & 7)) & 1 and load_i32(p, at + 4 * i) != load_i32(p, at + 4 * i + 4)
    return broken == 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _kinds_fit(p: cython.p_const_uchar, places: cython.p_const_longlong) -> cython.bint:
    """Return whether the types of header keys are 1 to 15, those of values 0 to 15, and null values have no bytes."""
    i: cython.Py_ssize_t
    if places[22] < 0:
        return True
    for i in range(places[25]):
        if p[places[24] + i] < 1 or p[places[24] + i] > 15 or p[places[30] + i] > 15:
            return False
        if p[places[30] + i] == 0 and load_i32(p, places[32] + 4 * i) != load_i32(p, places[32] + 4 * i + 4):
            return False
    return True


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def flagged(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, count: cython.Py_ssize_t, bit: cython.int
) -> cython.longlong:
    """Count the records that have any of the bits ``bit`` in their flags.

    ``at`` is the position of the flags column, negative if it is absent.
    """
    found: cython.longlong = 0
    i: cython.Py_ssize_t
    if at < 0:
        return 0
    for i in range(count):
        found += (p[at + i] & bit) != 0
    return found


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _deltas_fit(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, places: cython.p_const_longlong, count: cython.Py_ssize_t
) -> cython.bint:
    """Return whether the offsets of a compacted batch's records ascend and stay within the range in its header.

    Their byte positions (Kafka 0.7) must ascend by at least each record's size. The first offset may be above the
    batch's, because a compacted batch also covers removed records before its first one.
    """
    offsets: cython.Py_ssize_t = places[50]
    addresses: cython.Py_ssize_t = places[52]
    size: cython.longlong
    i: cython.Py_ssize_t
    for i in range(count):
        size = 10 + load_i32(p, places[0] + 4 * i + 4) - load_i32(p, places[0] + 4 * i)
        if places[20] >= 0:
            size -= p[places[20] + i] & 1
        size += load_u32(p, addresses + 4 * i)
        if i + 1 == count:
            return size <= load_u32(p, at + 80) and load_u32(p, offsets + 4 * i) < load_u32(p, at + 84)
        if load_u32(p, addresses + 4 * i + 4) < size:
            return False
        if load_u32(p, offsets + 4 * i + 4) <= load_u32(p, offsets + 4 * i):
            return False
    return False


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _crcs_fit(p: cython.p_const_uchar, places: cython.p_const_longlong, count: cython.Py_ssize_t) -> cython.bint:
    start: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    i: cython.Py_ssize_t
    if places[48] < 0:
        return True
    for i in range(count):
        start = load_i32(p, places[0] + 4 * i)
        stop = load_i32(p, places[0] + 4 * i + 4)
        if crc32_raw(p, places[2] + start, stop - start) != load_u32(p, places[48] + 4 * i):
            return False
    return True


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _gaps_zero(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, places: cython.p_const_longlong, length: cython.Py_ssize_t
) -> cython.bint:
    end: cython.Py_ssize_t = at + _HEADER_BYTES
    seen: cython.int = 0
    i: cython.int
    for i in range(_COLUMN_COUNT):
        if places[2 * i] >= 0:
            end += 4
    for i in range(_COLUMN_COUNT):
        if places[2 * i] < 0:
            continue
        while end < places[2 * i]:
            seen |= p[end]
            end += 1
        end = places[2 * i] + places[2 * i + 1]
    while end < at + length:
        seen |= p[end]
        end += 1
    return seen == 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _header_rule(p: cython.p_const_uchar, at: cython.Py_ssize_t, places: cython.p_const_longlong) -> cython.int:
    """Return the number of the first rule of decision 0101 that the fixed header violates, or -1."""
    count: cython.longlong = load_u32(p, at + 28)
    flags: cython.uint = load_u32(p, at + 8)
    if load_u64(p, at + 96) != xxh64_raw(p, at, 96) or not body_matches(p, at):
        return _CHECKSUM
    if count < 1 or count > _RECORD_COUNT_MAX or flags & ~9 or load_u32(p, at + 72) != load_u32(p, at + 76):
        return _HEADER
    if ((flags >> 3) & 1) != (places[50] >= 0):
        return _HEADER
    if places[12] < 0 and (load_i64(p, at + 56) != -1 or load_u64(p, at + 64) != 0):
        return _PRODUCER
    return _PRODUCER if load_i64(p, at + 56) < -1 else -1


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _broken_rule(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, places: cython.p_longlong, length: cython.Py_ssize_t
) -> cython.int:
    """Return the number of the first rule of decision 0101 that the batch violates, or -1."""
    rule: cython.int = _header_rule(p, at, places)
    count: cython.Py_ssize_t = load_u32(p, at + 28)
    if rule < 0:
        rule = sizes_fit(p, places, count)
    if rule >= 0:
        return rule
    if not _gaps_zero(p, at, places, length):
        return _PADDING
    if not (_offsets_fit(p, places, 0) and _offsets_fit(p, places, 3) and _offsets_fit(p, places, 11)):
        return _OFFSETS
    if not (_offsets_fit(p, places, 13) and _offsets_fit(p, places, 16)):
        return _OFFSETS
    if not (_offsets_fit(p, places, 18) and _offsets_fit(p, places, 22)):
        return _OFFSETS
    if not (_nulls_empty(p, places, 2, 0, count) and _nulls_empty(p, places, 5, 3, count)):
        return _NULLS
    if not _kinds_fit(p, places):
        return _KINDS
    if flagged(p, places[20], count, 0xF8) or (places[36] < 0 and flagged(p, places[20], count, 2)):
        return _FLAGS
    if places[50] >= 0:
        if not _deltas_fit(p, at, places, count):
            return _DELTAS
    elif load_u32(p, at + 84) != count or load_u32(p, at + 80) != 10 * count + places[3] - flagged(
        p, places[20], count, 1
    ):
        return _SPANS
    return -1 if _crcs_fit(p, places, count) else _CRC


@cython.cfunc
def _check_event_types(batch: Buffer, p: cython.p_const_uchar, places: cython.p_const_longlong) -> cython.void:
    """Raise Invalid unless every event type is valid UTF-8."""
    i: cython.Py_ssize_t
    place: cython.longlong
    try:
        str(memoryview(batch).cast("B")[places[38] : places[38] + places[39]], "utf-8")
    except UnicodeDecodeError as error:
        raise Invalid(ErrorCode.INVALID_BATCH, "invalid batch: an event type is not utf-8") from error
    for i in range(places[37] >> 2):
        place = load_i32(p, places[36] + 4 * i)
        if place < places[39] and (p[places[38] + place] & 0xC0) == 0x80:
            raise Invalid(ErrorCode.INVALID_BATCH, "invalid batch: an event type is not utf-8")


@cython.ccall
@cython.exceptval(-1, check=True)
def validate(batch: Buffer, at: cython.Py_ssize_t = 0) -> cython.Py_ssize_t:
    """Check all rules of decision 0101 for the batch at ``at`` and return its length in bytes.

    Fields that the broker sets later (partition, epoch, offset, address, append time) may have any value. A compressed
    body must be decompressed first.

    Raises:
        Invalid: INVALID_BATCH: names the violated rule.
    """
    lent: Lent = lend(batch)
    place: cython.Py_ssize_t = at
    length: cython.Py_ssize_t = -1
    rule: cython.int
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    if place >= 0:
        length = fill_layout(lent.p, place, lent.size, places)
    if length < 0:
        raise Invalid(
            ErrorCode.INVALID_BATCH, f"invalid batch: wrong header, compressed, or truncated position={place}"
        )
    if length < _NOGIL_BYTES_MIN:
        rule = _broken_rule(lent.p, place, places, length)
    else:
        with cython.nogil:
            rule = _broken_rule(lent.p, place, places, length)
    if rule >= 100:
        raise Invalid(ErrorCode.INVALID_BATCH, f"invalid batch: {_RULES[rule]} position={place}")
    if rule >= 0:
        raise Invalid(
            ErrorCode.INVALID_BATCH,
            f"invalid batch: a column has the wrong size (or a column that it needs is absent) column={Column(rule).name.lower()}",
        )
    if places[36] >= 0:
        _check_event_types(batch, lent.p, places)
    return length
