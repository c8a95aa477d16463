"""Read and write the header of a stored batch, find its columns, and iterate over several batches (decision 0101).

Assigning an offset to a batch changes only its header. No function reads beyond the buffer, whatever lengths its bytes
contain. Check untrusted bytes once with ``check.validate`` before you use their columns.
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Final

import cython

from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import BatchHeader
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.checksum import xxh64_raw
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_u32,
        load_u64,
        move,
        store_i64,
        store_u32,
        store_u64,
    )
else:
    from polywire.records.checksum import xxh64_raw
    from polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_u32,
        load_u64,
        move,
        store_i64,
        store_u32,
        store_u64,
    )

_MAGIC = cython.declare(cython.uint, 0x31425750)
_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_SEALED_BYTES = cython.declare(cython.Py_ssize_t, 96)  # bytes that the header checksum covers
_BATCH_BYTES_MAX = cython.declare(cython.Py_ssize_t, 16 * 1024 * 1024 - 4096)
_COMPACTED = cython.declare(cython.uint, 8)
_COLUMN_COUNT = cython.declare(cython.int, 27)
_NOGIL_BYTES_MIN = cython.declare(cython.Py_ssize_t, 262_144)

_FIELDS: Final = Struct("<IIIIQIIQQqqQIIIIQQ")


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def seal_header(p: cython.p_uchar, at: cython.Py_ssize_t) -> cython.void:
    """Update the checksum of the header at ``at``."""
    store_u64(p, at + 96, xxh64_raw(p, at, _SEALED_BYTES))


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def body_matches(p: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.bint:
    """Return whether the body matches its checksum. The caller has checked that the body is complete."""
    return load_u64(p, at + 88) == xxh64_raw(p, at + _HEADER_BYTES, load_u32(p, at + 72))


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _whole_length(p: cython.p_const_uchar, at: cython.Py_ssize_t, limit: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the length of the batch at ``at``, 0 if it ends after ``limit``, or -1 if no batch begins at ``at``."""
    if limit - at < _HEADER_BYTES:
        return 0 if limit - at < 4 or load_u32(p, at) == _MAGIC else -1
    length: cython.Py_ssize_t = load_u32(p, at + 4)
    body_bytes: cython.Py_ssize_t = load_u32(p, at + 72)
    if load_u32(p, at) != _MAGIC or length > _BATCH_BYTES_MAX or length != ((_HEADER_BYTES + body_bytes + 7) & ~7):
        return -1
    return length if length <= limit - at else 0


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def fill_layout(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, limit: cython.Py_ssize_t, places: cython.p_longlong
) -> cython.Py_ssize_t:
    """Write position (from the buffer's start, -1 if absent) and size of every column to ``places[0:54]``.

    Returns the batch's length, or -1 if the columns do not fit the batch exactly, the batch ends after ``limit``, or
    its body is compressed.
    """
    length: cython.Py_ssize_t = _whole_length(p, at, limit)
    if length <= 0 or load_u32(p, at + 8) & 6:
        return -1
    columns: cython.uint = load_u32(p, at + 12)
    mask: cython.Py_ssize_t = 63 if load_u32(p, at + 8) & 1 else 7
    end: cython.Py_ssize_t = _HEADER_BYTES + load_u32(p, at + 72)
    sizes: cython.Py_ssize_t = _HEADER_BYTES
    place: cython.Py_ssize_t = _HEADER_BYTES
    i: cython.int
    for i in range(_COLUMN_COUNT):
        if columns >> i & 1:
            place += 4
    if columns >> _COLUMN_COUNT or place > end:
        return -1
    for i in range(_COLUMN_COUNT):
        if columns >> i & 1:
            place = (place + mask) & ~mask
            places[2 * i] = at + place
            places[2 * i + 1] = load_u32(p, at + sizes)
            place += load_u32(p, at + sizes)
            sizes += 4
        else:
            places[2 * i] = -1
            places[2 * i + 1] = 0
    return length if place == end else -1


@cython.cfunc
def _require_header(lent: Lent, at: cython.Py_ssize_t) -> cython.void:
    if at < 0 or lent.size - at < _HEADER_BYTES:
        raise Invalid(ErrorCode.INVALID_BATCH, f"batch header is truncated at={at} size={lent.size}")


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def number_header(
    p: cython.p_uchar,
    at: cython.Py_ssize_t,
    partition: cython.ulonglong,
    epoch: cython.uint,
    base_offset: cython.ulonglong,
    base_address: cython.ulonglong,
    append_time_us: cython.longlong,
) -> cython.void:
    """Set partition, epoch, offset, address, append time and header checksum of the batch at ``at``.

    The caller has checked that the header is complete.
    """
    store_u64(p, at + 16, partition)
    store_u32(p, at + 24, epoch)
    store_u64(p, at + 32, base_offset)
    store_u64(p, at + 40, base_address)
    store_i64(p, at + 48, append_time_us)
    seal_header(p, at)


def stamp(
    batch: Buffer, at: int, partition: int, epoch: int, base_offset: int, base_address: int, append_time_us: int
) -> None:
    """Set partition, epoch, offset, address, append time and header checksum of the batch at ``at`` in place.

    Raises Invalid if the buffer is too short for a header.
    """
    lent: Lent = lend_writable(batch)
    place: cython.Py_ssize_t = at
    _require_header(lent, place)
    number_header(lent.p, place, partition, epoch, base_offset, base_address, append_time_us)


def unnumbered_header(batch: Buffer) -> bytes:
    """Return a batch's header with partition, epoch, offset, address and append time set to 0.

    Raises Invalid if the batch is too short for a header.
    """
    header = bytearray(memoryview(batch)[:104])
    stamp(header, 0, 0, 0, 0, 0, 0)
    return bytes(header)


def stamp_producer(batch: Buffer, at: int, producer_epoch: int, base_sequence: int) -> None:
    """Set the producer's epoch and first sequence in place. Raises Invalid if the buffer is too short for a header."""
    lent: Lent = lend_writable(batch)
    place: cython.Py_ssize_t = at
    _require_header(lent, place)
    store_i64(lent.p, place + 56, producer_epoch)
    store_u64(lent.p, place + 64, base_sequence)
    seal_header(lent.p, place)


def read_header(buf: Buffer, at: int = 0) -> BatchHeader:
    """Return the header at ``at``. Only its magic number is checked.

    Raises:
        Invalid: INVALID_BATCH: the buffer is too short for a header, or its magic number is wrong.
    """
    lent: Lent = lend(buf)
    _require_header(lent, at)
    fields = _FIELDS.unpack_from(buf, at)
    if fields[0] != _MAGIC:
        raise Invalid(ErrorCode.INVALID_BATCH, f"not a batch: wrong magic number magic={fields[0]:#x}")
    return BatchHeader(*fields[1:])


def check_header(buf: Buffer, at: int) -> bool:
    """Return whether a header with valid magic number, length and checksum is at ``at``. The body need not be complete."""
    lent: Lent = lend(buf)
    place: cython.Py_ssize_t = at
    if place < 0 or lent.size - place < _HEADER_BYTES or _whole_length(lent.p, place, lent.size) < 0:
        return False
    return load_u64(lent.p, place + 96) == xxh64_raw(lent.p, place, _SEALED_BYTES)


def check_body(buf: Buffer, at: int) -> bool:
    """Return whether the batch at ``at`` is complete and its body matches its checksum.

    Large bodies are read without the GIL.
    """
    lent: Lent = lend(buf)
    place: cython.Py_ssize_t = at
    matches: cython.bint
    if place < 0 or _whole_length(lent.p, place, lent.size) <= 0:
        return False
    if load_u32(lent.p, place + 72) < _NOGIL_BYTES_MIN:
        return body_matches(lent.p, place)
    with cython.nogil:
        matches = body_matches(lent.p, place)
    return matches


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def header_matches(p: cython.p_const_uchar, at: cython.Py_ssize_t, limit: cython.Py_ssize_t) -> cython.bint:
    """Return whether a batch begins at ``at``, ends before ``limit``, and its header matches its checksum."""
    return _whole_length(p, at, limit) > 0 and load_u64(p, at + 96) == xxh64_raw(p, at, _SEALED_BYTES)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def is_sound(p: cython.p_const_uchar, at: cython.Py_ssize_t, limit: cython.Py_ssize_t) -> cython.bint:
    """Return whether the batch at ``at`` ends before ``limit`` and its header and body match their checksums."""
    return header_matches(p, at, limit) and body_matches(p, at)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _first_damaged(p: cython.p_const_uchar, size: cython.Py_ssize_t) -> cython.Py_ssize_t:
    at: cython.Py_ssize_t = 0
    while at < size:
        if not is_sound(p, at, size):
            return at
        at += load_u32(p, at + 4)
    return size


def first_damaged(chunk: Buffer) -> int:
    """Return the position of the first damaged batch in a chunk of consecutive batches, or -1.

    A batch is damaged if its magic number, length or a checksum is wrong. Large chunks are checked without the GIL.
    """
    lent: Lent = lend(chunk)
    at: cython.Py_ssize_t
    if lent.size < _NOGIL_BYTES_MIN:
        at = _first_damaged(lent.p, lent.size)
    else:
        with cython.nogil:
            at = _first_damaged(lent.p, lent.size)
    return at if at < lent.size else -1


def walk(chunk: Buffer) -> array[int]:
    """Return the positions (i64) of the consecutive batches in ``chunk``. An incomplete last batch is skipped.

    Only magic numbers and lengths are checked.

    Raises:
        Invalid: INVALID_BATCH: there are bytes that are not a batch.
    """
    lent: Lent = lend(chunk)
    at: cython.Py_ssize_t = 0
    length: cython.Py_ssize_t = _whole_length(lent.p, 0, lent.size)
    positions = array("q")
    while length > 0:
        positions.append(at)
        at += length
        length = _whole_length(lent.p, at, lent.size)
    if length < 0:
        raise Invalid(ErrorCode.INVALID_BATCH, f"bytes are not a batch position={at}")
    return positions


def headers_of(chunk: Buffer) -> bytearray:
    """Return the headers of the complete batches in ``chunk``, back to back, without bodies.

    A compacted batch includes its body, because a column has the offsets of its records.

    Raises:
        Invalid: INVALID_BATCH: as ``walk``.
    """
    lent: Lent = lend(chunk)
    at: cython.Py_ssize_t
    size: cython.Py_ssize_t
    kept: cython.Py_ssize_t = 0
    positions = walk(chunk)
    for at in positions:
        kept += load_u32(lent.p, at + 4) if load_u32(lent.p, at + 8) & _COMPACTED else _HEADER_BYTES
    made = bytearray(kept)
    target: Lent = lend_writable(made)
    kept = 0
    for at in positions:
        size = load_u32(lent.p, at + 4) if load_u32(lent.p, at + 8) & _COMPACTED else _HEADER_BYTES
        move(target.p, kept, lent.p, at, size)
        kept += size
    return made


def layout(batch: Buffer, at: int = 0) -> array[int]:
    """Return position and size of each column, as 2 × COLUMN_COUNT i64.

    Positions are relative to the buffer. The position of an absent column is -1.

    Raises:
        Invalid: INVALID_BATCH: the columns do not fit the batch, it is truncated, or its body is compressed.
    """
    lent: Lent = lend(batch)
    numbers = array("q", bytes(16 * _COLUMN_COUNT))
    if at < 0 or _fill_numbers(lent, at, numbers) < 0:
        raise Invalid(ErrorCode.INVALID_BATCH, f"batch is truncated or compressed position={at} size={lent.size}")
    return numbers


@cython.cfunc
def _fill_numbers(lent: Lent, at: cython.Py_ssize_t, numbers: object) -> cython.Py_ssize_t:
    if not cython.compiled:
        return fill_layout(lent.p, at, lent.size, numbers)
    target: Lent = lend_writable(numbers)
    return fill_layout(lent.p, at, lent.size, cython.cast(cython.p_longlong, target.p))


def totals(batch: Buffer, at: int = 0) -> tuple[int, int, int, int, int]:
    """Return (length, record count, number of offsets, bytes in Kafka 0.7's format, column bits) of the header at
    ``at``.

    Much cheaper than ``read_header``. Raises Invalid(INVALID_BATCH) if the buffer is too short for a header.
    """
    lent: Lent = lend(batch)
    place: cython.Py_ssize_t = at
    _require_header(lent, place)
    return (
        load_u32(lent.p, place + 4),
        load_u32(lent.p, place + 28),
        load_u32(lent.p, place + 84),
        load_u32(lent.p, place + 80),
        load_u32(lent.p, place + 12),
    )
