"""Requests that are equal to an earlier one of their connection, apart from a few fields. This module is compiled.

* A producer that writes to one partition sends PRODUCE requests that differ in correlation id and batch, often several
  at once.
* A consumer sends FETCH requests that differ in correlation id and offset.

They are recognised by comparing bytes, and not decoded again. A PRODUCE request that needs anything else (errors
included) has no effect here: the session then executes it like any other.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import cython
import msgspec

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.protocols.polywire.arguments import find_partition, level_of
from polywire.protocols.polywire.batches import FORBIDDEN_COLUMNS
from polywire.protocols.polywire.codec import PREFIX_BYTES
from polywire.protocols.polywire.messages import BY_KEY, Fetch, Head, Produce, Verb
from polywire.protocols.polywire.produce_runs import append_run
from polywire.protocols.runtime.shapes import FETCH, PRODUCE, SHAPE_BYTES_MAX, SHAPES_MAX, is_learned
from polywire.records.columns import BatchFlags, Column

if cython.compiled:
    from cython.cimports.polywire.protocols.polywire.produce_runs import encode_one
    from cython.cimports.polywire.protocols.runtime.shapes import BareShape, Shapes, Template, is_permitted
    from cython.cimports.polywire.records.check import validate
    from cython.cimports.polywire.records.fields import load_columns, load_flags, load_record_count
    from cython.cimports.polywire.records.memory import Lent, lend, load_u32
else:
    from polywire.protocols.polywire.produce_runs import encode_one
    from polywire.protocols.runtime.shapes import BareShape, Shapes, Template, is_permitted
    from polywire.records.check import validate
    from polywire.records.fields import load_columns, load_flags, load_record_count
    from polywire.records.memory import Lent, lend, load_u32

Session: TypeAlias = Any
"""``session.PolywireSession``, which imports this module."""

_encode: Final = msgspec.msgpack.encode
_replaced: Final = msgspec.structs.replace
_LENGTH_BYTES = cython.declare(cython.Py_ssize_t, 4)  # the length of the frame, before the request
_LENGTH_COUNTS_FROM = cython.declare(cython.Py_ssize_t, PREFIX_BYTES - 4)
_CORRELATION_AT = cython.declare(cython.Py_ssize_t, 4)
_FETCH_VERB = cython.declare(cython.uchar, Verb.FETCH)
_HEAD_BYTES_AT = cython.declare(cython.Py_ssize_t, 8)
# A batch with a producer id may be a duplicate.
_FORBIDDEN = cython.declare(cython.uint, FORBIDDEN_COLUMNS | 1 << Column.PRODUCER_ID)
_FORBIDDEN_FLAGS = cython.declare(cython.uint, ~int(BatchFlags.WIDE) & 0xFFFF_FFFF)


@cython.cclass
class _Response:
    """The response to one request."""

    if cython.compiled:
        session: object
        correlation: cython.uint
        number: cython.uint
        record_count: cython.uint
    else:
        __slots__ = ("correlation", "number", "record_count", "session")

    def __init__(self, session: Session, correlation: int, number: int, record_count: int) -> None:
        self.session = session
        self.correlation = correlation
        self.number = number
        self.record_count = record_count

    def done(self, result: int | BrokerError) -> None:
        """Completion of the append."""
        if isinstance(result, BrokerError):
            self.session.respond_error(Verb.PRODUCE, self.correlation, result)
        else:
            self.session.respond_run(encode_one(self.correlation, self.number, result, self.record_count), 1)


def learn(session: Session, head: memoryview, request: Head) -> None:
    """Remember the head of a request that was executed, if it writes to one partition of an existing topic."""
    assert isinstance(request, Produce), "the head of a PRODUCE"
    if request.partition == BY_KEY or len(head) + PREFIX_BYTES > SHAPE_BYTES_MAX:
        return
    topic = session.broker.find_topic(request.name)
    if topic is None or not 0 <= request.partition < len(topic.partitions):
        return
    before = b"".join((bytes((Verb.PRODUCE, 0, 0, 0)), bytes(4), len(head).to_bytes(4, "little"), head))
    if session.shapes.knows(before):
        return
    session.shapes.add(BareShape(before, topic.partitions[request.partition], level_of(request.level)))
    session.take_repeated = take


def take(session: Session, data: memoryview, start: int, end: int) -> bool:
    """Execute the request ``data[start:end]`` if it has a known shape. Return False, without an effect, if not.

    ``end`` may be that of several requests that can be executed together (see ``run_bytes``).
    """
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    stop: cython.Py_ssize_t = end
    if stop - at > _HEAD_BYTES_AT and lent.p[at] == _FETCH_VERB:
        return _take_fetch(session, lent, at, stop)
    shapes: Shapes = session.shapes
    shape: BareShape = shapes.find(lent.p, at, stop, _CORRELATION_AT, _HEAD_BYTES_AT)
    if shape is None:
        return False
    partition = shape.partition
    if partition.ended or partition.link:
        return False
    if not is_permitted(session.broker.access, session.admission.principal, PRODUCE, partition.topic):
        return False
    batch_at: cython.Py_ssize_t = at + len(shape.before)
    try:
        if at + _LENGTH_COUNTS_FROM + load_u32(lent.p, at - _LENGTH_BYTES) < stop:
            return append_run(session, partition, data[at - _LENGTH_BYTES : stop], level=shape.level)
        length: cython.Py_ssize_t = validate(data, batch_at)
        if length != stop - batch_at:
            return False
        if load_columns(lent.p, batch_at) & _FORBIDDEN or load_flags(lent.p, batch_at) & _FORBIDDEN_FLAGS:
            return False
        correlation: cython.uint = load_u32(lent.p, at + _CORRELATION_AT)
        response = _Response(session, correlation, partition.number, load_record_count(lent.p, batch_at))
        done: Completion[int] = response.done
        session.broker.produce(partition, data[batch_at:stop], level=shape.level, done=done)
    except BrokerError:
        return False
    session.owe()
    return True


# FETCH requests


@cython.final
@cython.cclass
class FetchShape(Template):
    """A FETCH request that later ones repeat.

    Attributes:
        request: the request.
        partition: its partition.
        offset_at, offset_bytes: position and size of the offset.
    """

    if cython.compiled:
        request: object
        partition: object
        offset_at: cython.Py_ssize_t
        offset_bytes: cython.Py_ssize_t
    else:
        __slots__ = ("offset_at", "offset_bytes", "partition", "request")

    def __init__(self, frame: bytes, request: Fetch, partition: Any, offset_at: int, offset_bytes: int) -> None:
        super().__init__(frame, ((_CORRELATION_AT, 4), (offset_at, offset_bytes)))
        self.request = request
        self.partition = partition
        self.offset_at = offset_at
        self.offset_bytes = offset_bytes


def learn_fetch(session: Session, head: memoryview, request: Head) -> None:
    """Remember a request that was executed, if it is short and encoded as by ``msgspec``."""
    assert isinstance(request, Fetch), "the head of a FETCH"
    if not is_learned(session.fetch_shapes, session.requests):
        return
    before = b"".join((bytes((Verb.FETCH, 0, 0, 0)), bytes(4), len(head).to_bytes(4, "little")))
    if len(before) + len(head) > SHAPE_BYTES_MAX or head != _encode(request):
        return
    # the head is an array of name, partition, offset and others; after its type, a large number has a fixed size
    offset_at = len(before) + 1 + len(_encode(request.name)) + len(_encode(request.partition)) + 1
    offset_bytes = len(_encode(request.offset)) - 1
    if not offset_bytes:
        return
    try:
        partition = find_partition(session.broker, request.name, request.partition)
    except BrokerError:
        return
    del session.fetch_shapes[: 1 - SHAPES_MAX]
    session.fetch_shapes.append(FetchShape(before + bytes(head), request, partition, offset_at, offset_bytes))
    session.take_repeated = take


@cython.cfunc
def _take_fetch(session: Session, lent: Lent, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.bint:
    """Execute a FETCH request if it repeats an earlier one. Return False, without an effect, if not."""
    shape: FetchShape
    offset: cython.longlong = 0
    i: cython.Py_ssize_t
    for shape in session.fetch_shapes:
        if shape.matches(lent.p, at, end):
            break
    else:
        return False
    partition = shape.partition
    for i in range(shape.offset_bytes):
        offset = offset << 8 | lent.p[at + shape.offset_at + i]
    if offset < 0 or partition.ended:
        return False
    if not is_permitted(session.broker.access, session.admission.principal, FETCH, partition.topic):
        return False
    correlation: cython.uint = load_u32(lent.p, at + _CORRELATION_AT)
    try:
        session.begin_fetch(correlation, _replaced(shape.request, offset=offset), partition)
    except BrokerError as error:
        session.refuse(Verb.FETCH, correlation, error)
    return True
