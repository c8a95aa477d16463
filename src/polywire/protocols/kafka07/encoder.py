# mypy: disable-error-code="no-any-return"
"""Encode stored batches as Kafka 0.7 messages: one call per read, into a reusable buffer.

The address of a record is its position in the partition's sequence of messages (spec: kafka-0.7#virtual-addresses). The
bytes at an address never change. A record is truncated only where the protocol requires it. Batches must be valid.

A record is encoded as ``i32 size | u8 magic | [u8 0] | u32 CRC-32 | value`` at its address. Its magic is 1 unless its
flag ``KAFKA_MAGIC_0`` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import cython

from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.checksum import crc32_raw
    from cython.cimports.polywire.records.fields import load_base_address, load_record_count
    from cython.cimports.polywire.records.header import fill_layout
    from cython.cimports.polywire.records.memory import Lent, lend, lend_writable, load_i32, load_u32, load_u64, move
else:
    from polywire.records.checksum import crc32_raw
    from polywire.records.fields import load_base_address, load_record_count
    from polywire.records.header import fill_layout
    from polywire.records.memory import Lent, lend, lend_writable, load_i32, load_u32, load_u64, move

DONE: Final = 0  # all batches are written
FULL: Final = 1  # the next record does not fit
CUT: Final = 2  # the first record is longer than the limit and was truncated
HOLE: Final = 3  # there is no record at the address (a hole, left by compaction)
PACKED: Final = 4  # the next batch is compressed

_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)


@cython.cclass
class _Writer:
    """State of writing messages to a response.

    Attributes:
        at: position in ``out`` of the next byte.
        start: position in ``out`` of the first byte for this partition.
        limit: number of bytes that may be written.
        address: offset (in Kafka 0.7, a byte position) of the next byte.
        position: position in the chunk of the batch at which writing has stopped.
        skips: whether gaps left by compaction are omitted. Then they are counted as if they were written.
    """

    if cython.compiled:
        out: Lent
        start: cython.Py_ssize_t
        at: cython.Py_ssize_t
        limit: cython.longlong
        address: cython.longlong
        position: cython.Py_ssize_t
        skips: cython.bint
    else:
        __slots__ = ("address", "at", "limit", "out", "position", "skips", "start")

    def __init__(self, out: Buffer, at: int, limit: int, address: int, written: int) -> None:
        self.out = lend_writable(out)
        self.at = at
        self.start = at - written
        self.limit = limit
        self.address = address
        self.position = 0
        self.skips = False


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_u32(p: cython.p_uchar, at: cython.Py_ssize_t, x: cython.uint) -> cython.void:
    p[at] = x >> 24
    p[at + 1] = (x >> 16) & 0xFF
    p[at + 2] = (x >> 8) & 0xFF
    p[at + 3] = x & 0xFF


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _crc(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    record: cython.Py_ssize_t,
    value_at: cython.Py_ssize_t,
    length: cython.longlong,
) -> cython.uint:
    if places[48] >= 0:
        return load_u32(p, places[48] + 4 * record)
    return crc32_raw(p, value_at, length)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_head(
    p: cython.p_uchar, at: cython.Py_ssize_t, head: cython.Py_ssize_t, length: cython.longlong, crc: cython.uint
) -> cython.void:
    """Write the first ``head`` bytes of a message: everything before the value."""
    _put_u32(p, at, length + head - 4)
    p[at + 4] = head - 9
    if head == 10:
        p[at + 5] = 0
    _put_u32(p, at + head - 4, crc)


@cython.cfunc
def _put_part(
    p: cython.p_const_uchar,
    places: cython.p_const_longlong,
    record: cython.Py_ssize_t,
    head: cython.Py_ssize_t,
    skipped: cython.longlong,
    writer: _Writer,
) -> cython.bint:
    """Write a record from its byte ``skipped`` on, up to the limit. Return whether it was written completely."""
    value_at: cython.Py_ssize_t = places[2] + load_i32(p, places[0] + 4 * record)
    length: cython.longlong = load_i32(p, places[0] + 4 * record + 4) - load_i32(p, places[0] + 4 * record)
    size: cython.longlong = head + length - skipped
    whole: cython.bint = size <= writer.limit
    small: Lent = lend_writable(bytearray(16))
    if not whole:
        size = writer.limit
    _put_head(small.p, 0, head, length, _crc(p, places, record, value_at, length))
    writer.address += size
    writer.limit -= size
    while size > 0 and skipped < head:
        writer.out.p[writer.at] = small.p[skipped]
        writer.at += 1
        skipped += 1
        size -= 1
    move(writer.out.p, writer.at, p, value_at + skipped - head, size)
    writer.at += size
    return whole


@cython.cfunc
def _put_batch(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t, writer: _Writer) -> cython.int:
    """Write the records of a batch, from the one at the writer's address on.

    Return DONE, FULL (no space), CUT (a record is truncated), HOLE (a gap left by compaction) or PACKED (compressed
    batch).
    """
    if cython.compiled:
        places = cython.declare(cython.longlong[54])
    else:
        places = [0] * 54
    if fill_layout(p, at, size, places) < 0:
        return 4
    count: cython.Py_ssize_t = load_record_count(p, at)
    base: cython.longlong = load_base_address(p, at)
    begins: cython.longlong = base
    record: cython.Py_ssize_t
    head: cython.Py_ssize_t
    length: cython.longlong
    value_at: cython.Py_ssize_t
    start: cython.longlong = load_i32(p, places[0])
    for record in range(count):
        head = 10
        if places[20] >= 0:
            head -= p[places[20] + record] & 1
        length = load_i32(p, places[0] + 4 * record + 4) - start
        if places[52] >= 0:
            begins = base + load_u32(p, places[52] + 4 * record)
        value_at = places[2] + start
        start += length
        if begins + head + length <= writer.address:
            begins += head + length
            continue
        if begins > writer.address:
            if not writer.skips:
                return 3
            if begins + head + length - writer.address > writer.limit:
                return 1
            writer.limit -= begins - writer.address
            writer.address = begins
        if begins < writer.address or (writer.at == writer.start and head + length > writer.limit):
            if not _put_part(p, places, record, head, writer.address - begins, writer):
                return 2
        elif head + length > writer.limit:
            return 1
        else:
            _put_head(writer.out.p, writer.at, head, length, _crc(p, places, record, value_at, length))
            move(writer.out.p, writer.at + head, p, value_at, length)
            writer.at += head + length
            writer.address += head + length
            writer.limit -= head + length
        begins += head + length
    return 0


@cython.cfunc
def _put_chunk(p: cython.p_const_uchar, size: cython.Py_ssize_t, writer: _Writer) -> cython.int:
    """Write the records of a chunk's batches, beginning at the writer's offset.

    Return DONE, FULL (no space), CUT (a record is truncated), HOLE (a gap left by compaction) or PACKED (compressed
    batch).
    """
    reason: cython.int
    writer.position = 0
    while size - writer.position >= _HEADER_BYTES:
        if load_u64(p, writer.position + 40) + load_u32(p, writer.position + 80) > writer.address:
            reason = _put_batch(p, writer.position, size, writer)
            if reason != 0:
                return reason
        if load_u32(p, writer.position + 4) < _HEADER_BYTES:
            return 3
        writer.position += load_u32(p, writer.position + 4)
    return 0


def put_entries(
    chunks: Sequence[Lendable], address: int, limit: int, out: Buffer, at: int, *, written: int = 0
) -> tuple[int, int, int, int]:
    """Write at most ``limit`` bytes of messages, beginning at the offset (byte position) ``address``, to ``out[at:]``.

    Args:
        chunks: consecutive stored batches in offset order.
        written: bytes for this partition that are already in the response. If there are some, no record is truncated.

    Returns the reason for the end, the number of bytes written, and the chunk and position of the batch at which
    writing has stopped. For HOLE (a gap left by compaction), PACKED (compressed) and FULL, everything before that batch
    was written.

    Raises ValueError if ``out`` is too small.
    """
    writer: _Writer = _Writer(out, at, limit, address, written)
    lent: Lent
    begun: cython.Py_ssize_t = at
    number: cython.Py_ssize_t = 0
    reason: cython.int = 0
    if at < 0 or writer.limit < 0 or writer.limit > writer.out.size - begun:
        raise ValueError(f"output is outside the buffer position={at} limit={limit} size={writer.out.size}")
    for number in range(len(chunks)):
        lent = lend(chunks[number])
        reason = _put_chunk(lent.p, lent.size, writer)
        if reason != 0:
            break
    return reason, writer.at - begun, number, writer.position


def put_without_holes(chunks: Sequence[Lendable], address: int, limit: int, out: Buffer) -> tuple[int, int]:
    """Write the records of the ``limit`` bytes from offset ``address`` on to ``out``, without gaps left by compaction.

    Stops at a compressed batch. Returns the bytes written, and the offset after the last record. Raises ValueError if
    ``out`` is too small.
    """
    writer: _Writer = _Writer(out, 0, limit, address, 0)
    lent: Lent
    chunk: object
    writer.skips = True
    if writer.limit < 0 or writer.limit > writer.out.size:
        raise ValueError(f"output is outside the buffer limit={limit} size={writer.out.size}")
    for chunk in chunks:
        lent = lend(chunk)
        if _put_chunk(lent.p, lent.size, writer) != 0:
            break
    return writer.at, writer.address
