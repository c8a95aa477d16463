"""Batch frames that begin like an earlier one of their connection, and have messages of one producer.

A producer sends such batches to a partition all the time. Their beginning is compared with the earlier one, so that
topic, partition and acks are not decoded again. This module is compiled.

A batch that needs anything else (errors included) has no effect here: the session then executes it like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cython

from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.protocols.cursus import decoder
from polywire.protocols.cursus.batches import ACKED, LEVELS, Batch, Status, acknowledged, quoted
from polywire.protocols.cursus.idempotence import STORED_BYTES_MAX, append_failure
from polywire.protocols.cursus.messages import Refused, encoded
from polywire.protocols.runtime.off_loop import LONG_BYTES
from polywire.protocols.runtime.shapes import PRODUCE, SHAPE_BYTES_MAX
from polywire.records.batch import from_spans
from polywire.records.columns import Column
from polywire.types import Level

if cython.compiled:
    from cython.cimports.polywire.protocols.runtime.pipelined import BareSlot
    from cython.cimports.polywire.protocols.runtime.shapes import BareShape, Shapes, is_permitted
    from cython.cimports.polywire.records.memory import Lent, lend, load_i64
else:
    from polywire.protocols.runtime.pipelined import BareSlot
    from polywire.protocols.runtime.shapes import BareShape, Shapes, is_permitted
    from polywire.records.memory import Lent, lend, load_i64

if TYPE_CHECKING:
    from polywire.protocols.cursus.session import CursusSession

_LONG_BYTES = cython.declare(cython.Py_ssize_t, LONG_BYTES)
_MODERN = decoder.MODERN
_PRODUCER_ID = int(Column.PRODUCER_ID)
_UNSIGNED = (1 << 64) - 1


@cython.final
@cython.cclass
class Shape(BareShape):
    """The beginning of a batch, before its sequence numbers.

    Attributes:
        leader: the broker's address, as acknowledgements contain it.
        producer: the producer of the last batch.
        name: its id, as acknowledgements contain it.
    """

    if cython.compiled:
        leader: bytes
        producer: bytes
        name: bytes
    else:
        __slots__ = ("leader", "name", "producer")

    def __init__(self, before: bytes, partition: Partition, level: Level, leader: bytes) -> None:
        super().__init__(before, partition, level)
        self.leader = leader
        self.producer = self.name = b""


@cython.cclass
class RepeatedSlot(BareSlot):
    """The response to a batch of a known shape."""

    if cython.compiled:
        count: cython.longlong
        first: object
        last: object
        leader: bytes
        partition: object
        producer: bytes
        name: bytes
    else:
        __slots__ = ("count", "first", "last", "leader", "name", "partition", "producer")

    def __init__(self, session: CursusSession, shape: Shape, *, count: int, first: int, last: int) -> None:
        self.session = session
        self.leader = shape.leader
        self.partition = shape.partition
        self.producer = shape.producer
        self.name = shape.name
        self.count = count
        self.first = first
        self.last = last
        self.blocking = False
        self.parts = self.released = self.cancel = None

    def done(self, result: int | BrokerError) -> None:
        """Completion of the append."""
        session = self.session
        if session.closed:
            return
        if isinstance(result, BrokerError):
            body = self._failure(result)
        else:
            offset = result + self.count - 1
            body = ACKED % (offset, 0, self.name, self.first, self.last, self.leader)
        self.parts = (len(body).to_bytes(4, "big") + body,)  # as ``frame``, without the cost of a call
        session.slot_filled()

    def _failure(self, error: BrokerError) -> bytes:
        session = self.session
        known = session.broker.producer_last(self.partition, self.producer)
        return acknowledged(
            Status.ERROR,
            last_offset=0,
            epoch=0 if known is None else known[0],
            producer=self.producer,
            first_sequence=self.first,
            last_sequence=self.last,
            leader=session.leader,
            error=append_failure(error),
        )


def learn(session: CursusSession, body: memoryview, batch: Batch, partition: Partition) -> None:
    """Remember the beginning of a batch that is being stored, if it is not idempotent."""
    if batch.idempotent or session.state.forward is not None or session.compresses:
        return
    name, acks = encoded(batch.topic), encoded(batch.acks)
    parts = (b"\xba\x7c", len(name).to_bytes(2, "big"), name, batch.partition.to_bytes(4, "big"))
    before = b"".join((*parts, bytes((len(acks),)), acks, b"\0"))
    if len(before) > SHAPE_BYTES_MAX or body[: len(before)] != before:  # another layout
        return
    if session.shapes.knows(before):
        return
    session.take_repeated = take
    session.shapes.add(Shape(before, partition, LEVELS[batch.acks.lower()], encoded(session.leader)))


def take(session: CursusSession, data: memoryview, start: int, end: int) -> bool:
    """Store the batch ``data[start:end]`` if it has a known shape. Return False, without an effect, if not."""
    at: cython.Py_ssize_t = start
    size: cython.Py_ssize_t = end - start
    lent: Lent = lend(data)
    state = session.state
    shapes: Shapes = session.shapes
    shape: Shape = shapes.find(lent.p, at, at + size, 0, 0)  # type: ignore[assignment]
    if shape is None:
        return False
    if session._unused is not None:
        session.is_used()
    if size > _LONG_BYTES or size > state.piece_bytes_max:
        return False
    partition = shape.partition
    topic = partition.topic
    if partition.ended or topic.settings.idempotent:
        return False
    access, principal = session.broker.access, None
    if not access.is_open:
        try:
            state.guard.admit_batch(session)
        except Refused:
            return False
        principal = state.guard.acting
    if not is_permitted(access, principal, PRODUCE, topic):
        return False
    scratch = state.scratch
    if size > scratch.reserved_bytes:
        scratch.reserve(size)
    body = data[at : at + size]
    if decoder.scan(body, _MODERN, scratch.head, scratch.spans, scratch.details) != 0:
        return False
    # the words of ``head``: see ``decoder``
    head: Lent = lend(scratch.head)
    count: cython.longlong = load_i64(head.p, 8 * 8)
    producer_bytes: cython.longlong = load_i64(head.p, 8 * 10)
    if count < 1 or load_i64(head.p, 8 * 17) or load_i64(head.p, 8 * 11) or producer_bytes > STORED_BYTES_MAX:
        return False
    producer_at: cython.Py_ssize_t = at + load_i64(head.p, 8 * 9)
    producer = bytes(data[producer_at : producer_at + producer_bytes])
    first = load_i64(head.p, 8 * 12) & _UNSIGNED
    if producer != shape.producer or not shape.name:
        shape.producer, shape.name = producer, quoted(producer)
    columns = {_PRODUCER_ID: producer} if producer else None
    slot = RepeatedSlot(session, shape, count=count, first=first, last=load_i64(head.p, 8 * 16) & _UNSIGNED)
    try:
        batch = from_spans(body, scratch.spans[: 4 * count], columns=columns, base_sequence=first if producer else 0)
        session.broker.produce(partition, batch, level=shape.level, done=slot.done)
    except BrokerError:
        return False
    session.append(slot)
    return True
