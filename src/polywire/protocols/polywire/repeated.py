"""PRODUCE requests that are equal to an earlier one of their connection, apart from correlation id and batch.

A producer that writes to one partition sends such requests all the time. They are recognised by comparing bytes. This
module is compiled.

A request that needs anything else (errors included) has no effect here: the session then executes it like any other.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import cython

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.protocols.polywire.arguments import level_of
from polywire.protocols.polywire.batches import FORBIDDEN_COLUMNS
from polywire.protocols.polywire.codec import PREFIX_BYTES
from polywire.protocols.polywire.messages import BY_KEY, Head, Produce, Verb
from polywire.protocols.runtime.shapes import SHAPE_BYTES_MAX
from polywire.records.columns import BatchFlags, Column

if cython.compiled:
    from cython.cimports.polywire.protocols.polywire.produce_runs import encode_one
    from cython.cimports.polywire.protocols.runtime.shapes import BareShape, Shapes, may_produce
    from cython.cimports.polywire.records.check import validate
    from cython.cimports.polywire.records.fields import load_columns, load_flags, load_record_count
    from cython.cimports.polywire.records.memory import Lent, lend, load_u32
else:
    from polywire.protocols.polywire.produce_runs import encode_one
    from polywire.protocols.runtime.shapes import BareShape, Shapes, may_produce
    from polywire.records.check import validate
    from polywire.records.fields import load_columns, load_flags, load_record_count
    from polywire.records.memory import Lent, lend, load_u32

Session: TypeAlias = Any
"""``session.PolywireSession``, which imports this module."""

_CORRELATION_AT = cython.declare(cython.Py_ssize_t, 4)
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
    """Execute the request ``data[start:end]`` if it has a known shape. Return False, without an effect, if not."""
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    stop: cython.Py_ssize_t = end
    shapes: Shapes = session.shapes
    shape: BareShape = shapes.find(lent.p, at, stop, _CORRELATION_AT, _HEAD_BYTES_AT)
    if shape is None:
        return False
    partition = shape.partition
    if partition.ended or partition.link:
        return False
    if not may_produce(session.broker.access, session.admission.principal, partition.topic):
        return False
    batch_at: cython.Py_ssize_t = at + len(shape.before)
    try:
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
