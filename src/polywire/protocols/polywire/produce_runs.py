"""Handle consecutive PRODUCE requests together if they differ only in their batches.

Their records are joined in one batch, with one call for all requests. Each request gets the same response as if it were
handled alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cython

from polywire.broker.owners import NO_CALLER, Caller
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.protocols.polywire.batches import FORBIDDEN_COLUMNS
from polywire.protocols.polywire.codec import PREFIX_BYTES
from polywire.protocols.polywire.messages import Verb
from polywire.protocols.runtime.session import LOGIN_FRAME_BYTES_MAX
from polywire.records.batch import merge
from polywire.types import Buffer, Level

if cython.compiled:
    from cython.cimports.polywire.records.check import validate
    from cython.cimports.polywire.records.fields import load_columns, load_length
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_u32,
        move,
        store_u32,
    )
    from cython.cimports.polywire.records.reshape import small_records
else:
    from polywire.records.check import validate
    from polywire.records.fields import load_columns, load_length
    from polywire.records.memory import Lent, lend, lend_writable, load_u32, move, store_u32
    from polywire.records.reshape import small_records

if TYPE_CHECKING:
    from polywire.broker.topics import Partition

_BATCH_MAGIC = cython.declare(cython.uint, 0x31425750)
_PREFIX_BYTES = cython.declare(cython.Py_ssize_t, PREFIX_BYTES)
_FRAME_BYTES_MAX = cython.declare(
    cython.Py_ssize_t, LOGIN_FRAME_BYTES_MAX
)  # unauthenticated clients may send this much, so no other limit applies
_FORBIDDEN = cython.declare(cython.uint, FORBIDDEN_COLUMNS)
_BATCH_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_PRODUCE = cython.declare(cython.uint, Verb.PRODUCE)  # second word of a prefix: the verb, no flags, zero
_FETCH = cython.declare(cython.uint, Verb.FETCH)
_REQUEST_BYTES = cython.declare(cython.Py_ssize_t, 8)  # size of the correlation id and the record count of a frame
_ANSWER_BYTES_MAX = cython.declare(cython.Py_ssize_t, 16 + 3 + 3 * 9)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _batch_at(p: cython.p_const_uchar, at: cython.Py_ssize_t, left: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the position of the batch in the frame at ``at``, or 0 if the frame cannot be executed together with
    others.

    The frame must be complete in the ``left`` available bytes, and its only batch must be small.
    """
    if left < _PREFIX_BYTES or load_u32(p, at + 4) != _PRODUCE:
        return 0
    length: cython.Py_ssize_t = load_u32(p, at)
    head: cython.Py_ssize_t = load_u32(p, at + 12)
    size: cython.Py_ssize_t = length - head
    if length > left - _PREFIX_BYTES or length > _FRAME_BYTES_MAX or head == 0 or size < _BATCH_HEADER_BYTES:
        return 0
    start: cython.Py_ssize_t = at + _PREFIX_BYTES + head
    if load_u32(p, start) != _BATCH_MAGIC or load_length(p, start) != size or small_records(p, start, size) == 0:
        return 0
    return 0 if load_columns(p, start) & _FORBIDDEN else _PREFIX_BYTES + head


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _are_alike(
    p: cython.p_const_uchar, one: cython.Py_ssize_t, other: cython.Py_ssize_t, batch: cython.Py_ssize_t
) -> cython.bint:
    """Return whether two frames have the same header, and batches with the same columns.

    ``batch`` is the batches' position in their frames.
    """
    difference: cython.uint = load_columns(p, one + batch) ^ load_columns(p, other + batch)
    i: cython.Py_ssize_t
    for i in range(_PREFIX_BYTES, batch):
        difference |= p[one + i] ^ p[other + i]
    return difference == 0


def run_bytes(data: Buffer, at: int, *, frames_max: int, batch_bytes_max: int) -> int:
    """Return the total size in bytes of the frames from ``at`` on that can be executed together; 0 for fewer than two.

    The batches together have at most ``batch_bytes_max`` bytes. They are not validated.
    """
    lent: Lent = lend(data)
    first: cython.Py_ssize_t = at
    place: cython.Py_ssize_t = first
    left: cython.Py_ssize_t = batch_bytes_max
    frames: cython.Py_ssize_t = 0
    most: cython.Py_ssize_t = frames_max
    batch: cython.Py_ssize_t = _batch_at(lent.p, first, lent.size - first)
    if batch == 0:
        return 0
    while frames < most and _batch_at(lent.p, place, lent.size - place) == batch:
        size: cython.Py_ssize_t = _PREFIX_BYTES + load_u32(lent.p, place)
        if size - batch > left or not _are_alike(lent.p, first, place, batch):
            break
        left -= size - batch
        place += size
        frames += 1
    return place - first if frames > 1 else 0


def merged_run(frames: memoryview) -> tuple[bytearray, bytes]:
    """Join the batches of consecutive frames. Return the batch, and data about the frames for ``encode_produced``.

    Raises Invalid(INVALID_BATCH) for an invalid batch, and ValueError if the batches cannot be joined.
    """
    lent: Lent = lend(frames)
    batches: list[Buffer] = []
    requests = bytearray(lent.size // _BATCH_HEADER_BYTES * _REQUEST_BYTES)
    request_memory: Lent = lend_writable(requests)
    at: cython.Py_ssize_t = 0
    filled: cython.Py_ssize_t = 0
    while at < lent.size:
        batch: cython.Py_ssize_t = at + _batch_at(lent.p, at, lent.size - at)
        end: cython.Py_ssize_t = at + _PREFIX_BYTES + load_u32(lent.p, at)
        if validate(frames, batch) != end - batch:
            raise Invalid(ErrorCode.INVALID_BATCH, f"frame has data after its batch position={at}")
        batches.append(frames[batch:end])
        store_u32(request_memory.p, filled, load_u32(lent.p, at + 8))
        store_u32(request_memory.p, filled + 4, small_records(lent.p, batch, end - batch))
        filled += _REQUEST_BYTES
        at = end
    return merge(batches), bytes(requests[:filled])


@cython.cclass
class _RunResponse:
    """The responses to consecutive requests whose records were joined in one batch.

    Attributes:
        count: number of requests.
    """

    if cython.compiled:
        _session: object
        _requests: bytes
        _partition: cython.uint
        count = cython.declare(cython.long, visibility="readonly")
    else:
        __slots__ = ("_partition", "_requests", "_session", "count")

    def __init__(self, session: Any, requests: bytes, partition: int) -> None:
        """``requests`` is the second result of ``merged_run``."""
        self._session = session
        self._requests = requests
        self._partition = partition
        self.count = len(requests) // _REQUEST_BYTES

    def done(self, offset: int | BrokerError) -> None:
        """Completion of the append."""
        if not isinstance(offset, BrokerError):
            self._session.respond_run(encode_produced(self._requests, self._partition, offset), self.count)
            return
        for correlation in memoryview(self._requests).cast("B").cast("I")[::2]:
            self._session.respond_error(Verb.PRODUCE, correlation, offset)


def append_run(session: Any, partition: Partition, frames: memoryview, *, level: Level, by: Caller = NO_CALLER) -> bool:
    """Append the records of consecutive frames as one batch. Each request gets a response.

    ``session`` is a ``produce.RunOwner``. If nothing was appended, returns False or raises BrokerError. Each request must
    then be executed separately.
    """
    try:
        batch, requests = merged_run(frames)
    except ValueError:
        return False
    response = _RunResponse(session, requests, partition.number)
    session.broker.produce(partition, batch, by=by, level=level, done=response.done)
    session.owe(response.count)
    session.requests += response.count - 1  # the session has counted one
    return True


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_number(p: cython.p_uchar, at: cython.Py_ssize_t, number: cython.ulonglong) -> cython.Py_ssize_t:
    """Write a number in MessagePack's shortest form, and return the position after it."""
    size: cython.int = 0
    mark: cython.uint = 0xCC
    if number < 0x80:
        p[at] = number
        return at + 1
    size = 1
    while size < 8 and number >> (8 * size):
        size *= 2
        mark += 1
    p[at] = mark
    i: cython.int
    for i in range(size):
        p[at + 1 + i] = (number >> (8 * (size - 1 - i))) & 0xFF
    return at + 1 + size


@cython.cfunc
@cython.exceptval(-1, check=True)
def short_bytes(data: memoryview, at: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the size of the frame at ``at`` if it is a short and complete PRODUCE or FETCH, otherwise 0."""
    lent: Lent = lend(data)
    size: cython.Py_ssize_t = _PREFIX_BYTES + load_u32(lent.p, at)
    if size > lent.size - at or size > _FRAME_BYTES_MAX:
        return 0
    if load_u32(lent.p, at + 4) != _PRODUCE and load_u32(lent.p, at + 4) != _FETCH:
        return 0
    return size


@cython.cfunc
def encode_one(
    correlation: cython.uint, partition: cython.uint, base_offset: cython.ulonglong, record_count: cython.uint
) -> bytes:
    """Return the response to one request. ``base_offset`` is the offset of its first record."""
    if cython.compiled:
        answer = cython.declare(cython.uchar[64])
    else:
        answer = memoryview(bytearray(64))
    end: cython.Py_ssize_t = _put_produced(answer, 0, partition, base_offset, record_count)
    store_u32(answer, 8, correlation)
    return bytes(answer[:end])


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_produced(
    p: cython.p_uchar,
    at: cython.Py_ssize_t,
    partition: cython.ulonglong,
    base_offset: cython.ulonglong,
    record_count: cython.uint,
) -> cython.Py_ssize_t:
    """Write a response without its correlation id, and return the position after it."""
    head: cython.Py_ssize_t = at + _PREFIX_BYTES
    p[head] = p[head + 1] = 0x91  # a list with one entry
    p[head + 2] = 0x93  # an entry of three numbers
    end: cython.Py_ssize_t = _put_number(p, head + 3, partition)
    end = _put_number(p, end, base_offset)
    end = _put_number(p, end, record_count)
    store_u32(p, at, end - head)
    store_u32(p, at + 4, _PRODUCE)
    store_u32(p, at + 12, end - head)
    return end


def encode_produced(requests: Buffer, partition: int, base_offset: int) -> bytes:
    """Return the responses to frames that were executed together.

    ``requests`` is the second result of ``merged_run``. ``base_offset`` is the offset of the first record.
    """
    lent: Lent = lend(requests)
    answers = bytearray(lent.size // _REQUEST_BYTES * _ANSWER_BYTES_MAX)
    target: Lent = lend_writable(answers)
    number: cython.ulonglong = partition
    offset: cython.ulonglong = base_offset
    at: cython.Py_ssize_t = 0
    place: cython.Py_ssize_t = 0
    while place < lent.size:
        count: cython.uint = load_u32(lent.p, place + 4)
        end: cython.Py_ssize_t = _put_produced(target.p, at, number, offset, count)
        move(target.p, at + 8, lent.p, place, 4)
        offset += count
        at = end
        place += _REQUEST_BYTES
    return bytes(answers[:at])
