"""Requests that are equal to an earlier one of their connection, apart from a few fields. This module is compiled.

* A producer that writes to one partition sends Produce requests that differ in correlation id and records. They are
  recognised by comparing bytes, and the response is a copy of an encoded one. A request that needs anything else (errors
  included) has no effect here: the session then executes it like any other.
* A consumer sends Fetch requests that differ in a few numbers. They are not decoded again, and executed like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import cython

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.checks import REPEATED, check_records, produce_error, stamp_head
from polywire.protocols.kafka.codec import decode_head, encode_response
from polywire.protocols.kafka.compression import expand
from polywire.protocols.kafka.configs import produce_limits
from polywire.protocols.kafka.lookup import partition_of, topic_of
from polywire.protocols.kafka.messages import NO_ID, Api, Codec, Refused, Request, WireError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.structure_decoder import locate
from polywire.protocols.kafka.structures import changed
from polywire.protocols.runtime.off_loop import LARGE_BYTES
from polywire.protocols.runtime.shapes import PRODUCE, SHAPE_BYTES_MAX, SHAPES_MAX, is_learned
from polywire.types import Buffer, Level

if cython.compiled:
    from cython.cimports.polywire.protocols.kafka.decoder import BatchHead, Built, build, check_batch
    from cython.cimports.polywire.protocols.runtime.append_queue import AppendQueue
    from cython.cimports.polywire.protocols.runtime.pipelined import BarePipelined, BareSlot
    from cython.cimports.polywire.protocols.runtime.shapes import BareShape, Shapes, Template, is_permitted
    from cython.cimports.polywire.records.memory import Lent, filled, lend, lend_writable
else:
    from polywire.protocols.kafka.decoder import BatchHead, Built, build, check_batch
    from polywire.protocols.runtime.append_queue import AppendQueue
    from polywire.protocols.runtime.pipelined import BarePipelined, BareSlot
    from polywire.protocols.runtime.shapes import BareShape, Shapes, Template, is_permitted
    from polywire.records.memory import Lent, filled, lend, lend_writable

from polywire.protocols.kafka.decoder import BATCH_HEAD_BYTES, CODEC_AT, CODEC_BITS

if TYPE_CHECKING:
    from polywire.broker.settings import TopicSettings
    from polywire.protocols.kafka.session import KafkaSession

COMPRESSED_BYTES_MAX: Final = 16_384  # a larger batch may have to be decompressed in a thread
LEVELS: Final[Mapping[int, Level | None]] = {1: Level.WRITTEN, -1: None}  # None: see ``KafkaSettings.acks_all``

VARYING: Final = frozenset(("session_epoch", "partition", "fetch_offset"))
"""The numbers in which a Fetch request may differ from an earlier one."""

_FETCH: Final = Api.FETCH  # read for every request; a module constant is ten times as fast as an attribute
_FETCH_KEY = cython.declare(cython.uchar, 1)
_CORRELATION_AT = cython.declare(cython.Py_ssize_t, 4)
_CLIENT_ID_AT = cython.declare(cython.Py_ssize_t, 8)
_TAGS_BYTES = cython.declare(cython.Py_ssize_t, 3)  # after the records of a flexible version: three empty lists of tags
# values that no response has; their positions in an encoded response are those of the offsets
_BASE_MARK: Final = 0x7B5A_C3D2_E1F0_9687
_START_MARK: Final = 0x7B5A_C3D2_E1F0_9688


@cython.final
@cython.cclass
class Shape(BareShape):
    """The parts of a request before the length of the records, which later ones repeat.

    Attributes:
        response: an encoded response, in which the correlation id and the offsets are replaced; empty at first.
        base_at, start_at: positions of the offsets in it. The latter is -1 in versions without it.
        settings: the topic's settings, from which the following are derived.
        bytes_max, after_ms, has_times_of_append: see ``ProduceLimits``.
        is_strict: whether records must be checked for more than ``after_ms``.
    """

    if cython.compiled:
        after_ms: cython.longlong
        bytes_max: cython.longlong
        has_times_of_append: cython.bint
        is_strict: cython.bint
        settings: object
        flexible: cython.bint
        request: object
        response: bytes
        base_at: cython.Py_ssize_t
        start_at: cython.Py_ssize_t
    else:
        __slots__ = (
            "after_ms",
            "base_at",
            "bytes_max",
            "flexible",
            "has_times_of_append",
            "is_strict",
            "request",
            "response",
            "settings",
            "start_at",
        )

    def __init__(self, before: bytes, request: Request, partition: Partition, level: Level) -> None:
        super().__init__(before, partition, level)
        self.flexible = schema.is_flexible(Api.PRODUCE, request.version)
        self.request = request
        self.response = b""
        self.base_at = self.start_at = -1
        self.accept(partition.topic.settings)

    @cython.cfunc
    def accept(self, settings: TopicSettings) -> None:
        """Take over the limits of the topic, which are the same until its settings are replaced."""
        limits = produce_limits(settings)
        self.settings = settings
        self.bytes_max, self.after_ms = limits.bytes_max, limits.after_ms
        self.has_times_of_append = limits.has_times_of_append
        self.is_strict = limits.before_ms is not None or bool(settings.compaction)


@cython.cclass
class RepeatedSlot(BareSlot):
    """The response to a request of a known shape."""

    if cython.compiled:
        correlation: cython.uint
        shape: Shape
    else:
        __slots__ = ("correlation", "shape")

    def __init__(self, session: KafkaSession, shape: Shape, correlation: int) -> None:
        self.session = session
        self.shape = shape
        self.correlation = correlation
        self.blocking = False
        self.parts = self.released = self.cancel = None

    def done(self, result: int | BrokerError) -> None:
        """Completion of the append."""
        shape: Shape = self.shape
        if isinstance(result, BrokerError) or result < 0:
            self.fill(_failure(shape, self.correlation, result))
            return
        if not shape.response:
            _encode_marked(shape)
        response: bytes = shape.response
        made = filled(response, len(response))
        out: Lent = lend_writable(made)
        _put(out, _CORRELATION_AT, self.correlation, 4)
        _put(out, shape.base_at, result, 8)
        if shape.start_at >= 0:
            _put(out, shape.start_at, shape.partition.log.first_offset, 8)
        self.parts = (made,)
        replies: BarePipelined = self.session
        replies.slot_filled()


@cython.cfunc
def _put(out: Lent, at: cython.Py_ssize_t, value: cython.longlong, size: cython.Py_ssize_t) -> cython.void:
    i: cython.Py_ssize_t
    for i in range(size):
        out.p[at + i] = (value >> (8 * (size - 1 - i))) & 255


def _response(shape: Shape, correlation: int, **fields: Any) -> list[Buffer]:
    response = schema.response(Api.PRODUCE)
    request = shape.request._replace(correlation_id=correlation - ((correlation >> 31) << 32))
    partition = shape.partition
    entry = response.Responses.Partitions(index=partition.number, **fields)
    topic = request.body.topics[0]
    responses = [response.Responses(name=topic.name, topic_id=topic.topic_id, partitions=[entry])]
    return encode_response(request, response(responses=responses))


def _encode_marked(shape: Shape) -> None:
    (buffer,) = _response(shape, 0, base_offset=_BASE_MARK, log_start_offset=_START_MARK)
    encoded = bytes(buffer)
    shape.response = encoded
    shape.base_at = encoded.rindex(_BASE_MARK.to_bytes(8, "big"))
    shape.start_at = encoded.rfind(_START_MARK.to_bytes(8, "big"))


def _failure(shape: Shape, correlation: int, result: int | BrokerError) -> list[Buffer]:
    if isinstance(result, BrokerError):
        return _response(shape, correlation, error=produce_error(result), message=result.message)
    return _response(shape, correlation, error=WireError.DUPLICATE_SEQUENCE_NUMBER, message=REPEATED)


# Fetch requests


@cython.final
@cython.cclass
class FetchShape(Template):
    """A Fetch request that later ones repeat.

    Attributes:
        request: the request.
        numbers: (record, field, position, size) of the numbers in ``request`` that differ.
    """

    if cython.compiled:
        numbers: list
        request: object
    else:
        __slots__ = ("numbers", "request")

    def __init__(self, frame: bytes, request: Request, numbers: list[Any]) -> None:
        super().__init__(frame, ((4, 4), *[(at, size) for _, _, at, size in numbers]))
        self.request = request
        self.numbers = numbers


def learn_fetch(session: KafkaSession, frame: memoryview, request: Request) -> None:
    """Remember a Fetch request that was executed, if it is short."""
    if len(frame) > SHAPE_BYTES_MAX or not is_learned(session.fetch_shapes, session.requests):
        return
    copy = bytes(frame)
    program = schema.request_program(_FETCH, request.version)
    body, numbers = locate(program, copy, decode_head(copy)[1], VARYING)
    del session.fetch_shapes[: 1 - SHAPES_MAX]
    session.fetch_shapes.append(FetchShape(copy, request._replace(body=body), numbers))
    session.take_repeated = take


@cython.cfunc
def _number(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.int) -> cython.longlong:
    """Return a signed number, the most significant byte first."""
    i: cython.int
    number: cython.longlong = p[at]
    number -= (number >> 7) << 8
    for i in range(1, size):
        number = number * 256 + p[at + i]
    return number


@cython.cfunc
def _take_fetch(session: KafkaSession, lent: Lent, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.bint:
    """Execute a Fetch request if it repeats an earlier one. Return False, without an effect, if not."""
    shape: FetchShape
    for shape in session.fetch_shapes:
        if shape.matches(lent.p, at, end):
            break
    else:
        return False
    if not session._earlier_answered():
        return False
    request = shape.request
    # no earlier Fetch request of the connection is in progress, so this body is not in use
    for record, name, position, size in shape.numbers:
        setattr(record, name, _number(lent.p, at + position, size))
    correlation = _number(lent.p, at + _CORRELATION_AT, 4)
    request = Request(_FETCH, request.version, correlation, request.client_id, request.body)
    session._handle(session._commands[_FETCH], session.append(Answer(session, request, blocking=True)))
    return True


# Shapes of Produce requests


def learn(session: KafkaSession, frame: memoryview, request: Request) -> None:
    """Remember the shape of a request that was executed, if it writes one batch to one partition."""
    body = request.body
    if len(body.topics) != 1 or len(body.topics[0].partitions) != 1 or body.transactional_id is not None:
        return
    topic_request = body.topics[0]
    partition_request = topic_request.partitions[0]
    records = partition_request.records
    tags = 3 if schema.is_flexible(Api.PRODUCE, request.version) else 0
    if records is None or not len(records) or body.acks not in LEVELS:
        return
    size = len(frame) - tags - len(records) - _length_bytes(len(records), bool(tags))
    if size > SHAPE_BYTES_MAX or size != _bytes_before(request, bool(tags)):
        return
    before = b"".join((frame[:4], bytes(4), frame[8:size]))
    if session.shapes.knows(before):
        return
    try:
        topic = topic_of(session, Action.PRODUCE, topic_request.name, topic_request.topic_id)
        partition = partition_of(topic, partition_request.index)
    except BrokerError:
        return
    level = LEVELS[body.acks] or session.shared.settings.acks_all
    # without the records, which refer to the receive buffer
    partition_request = changed(partition_request, records=b"")
    body = changed(body, topics=[changed(topic_request, partitions=[partition_request])])
    session.take_repeated = take
    session.shapes.add(Shape(before, request._replace(body=body), partition, level))


def _length_bytes(size: int, flexible: bool) -> int:
    return max(1, ((size + 1).bit_length() + 6) // 7) if flexible else 4


def _bytes_before(request: Request, flexible: bool) -> int:
    """Return the number of bytes before the length of the records, if the request has no tags."""
    topic = request.body.topics[0]
    size = 10 + len((request.client_id or "").encode()) + 2 + 4  # header, acks and timeout
    name = 16 if topic.topic_id != NO_ID else len(topic.name.encode())
    if not flexible:
        return size + 2 + 4 + 2 + name + 4 + 4  # transactional id, topics, name, partitions, index
    if topic.topic_id == NO_ID:
        name += _length_bytes(name, flexible=True)
    return size + 1 + 1 + 1 + name + 1 + 4  # tags of the header first


@cython.cfunc
def _records_at(
    shape: Shape, p: cython.p_const_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Return the position of the records of a request, given that of their length, or -1 if other fields follow them."""
    size: cython.longlong = 0
    shift: cython.int = 0
    i: cython.Py_ssize_t
    if shape.flexible:
        while at < end and shift < 28:
            size |= cython.cast(cython.longlong, p[at] & 127) << shift
            at += 1
            if p[at - 1] < 128:
                break
            shift += 7
        size -= 1
        for _ in range(_TAGS_BYTES):
            end -= 1
            if end < at or p[end]:
                return -1
    else:
        if end - at < 4:
            return -1
        for i in range(4):
            size = size * 256 + p[at + i]
        at += 4
    return at if size == end - at else -1


def take(session: KafkaSession, data: memoryview, start: int, end: int) -> bool:
    """Execute the request ``data[start:end]`` if it has a known shape. Return False, without an effect, if not."""
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    stop: cython.Py_ssize_t = end
    if stop - at > _CLIENT_ID_AT and lent.p[at] == 0 and lent.p[at + 1] == _FETCH_KEY:
        return _take_fetch(session, lent, at, stop)
    shapes: Shapes = session.shapes
    shape: Shape = shapes.find(lent.p, at, stop, _CORRELATION_AT, _CLIENT_ID_AT)  # type: ignore[assignment]
    if shape is None:
        return False
    records_at: cython.Py_ssize_t = _records_at(shape, lent.p, at + len(shape.before), stop)
    partition = shape.partition
    replies: BarePipelined = session
    if records_at < 0 or partition.ended or replies.output.meter is not None:
        return False
    broker, topic, principal = replies.broker, partition.topic, session._principal
    settings = topic.settings
    if settings is not shape.settings:
        shape.accept(settings)
    if shape.has_times_of_append or not is_permitted(broker.access, principal, PRODUCE, topic):
        return False
    head: BatchHead
    built: Built
    try:
        records = data[records_at : stop - _TAGS_BYTES if shape.flexible else stop]
        if len(records) > COMPRESSED_BYTES_MAX and records[CODEC_AT] & CODEC_BITS:
            return False  # before its checksum is computed, which takes long
        head = check_batch(records, shape.bytes_max)
        if head.is_transactional:
            return False
        if head.codec == 0:
            built = build(records, BATCH_HEAD_BYTES, head.end, head)
        else:
            expanded = expand(records[BATCH_HEAD_BYTES : head.end], Codec(head.codec), LARGE_BYTES)
            built = build(expanded, 0, len(expanded), head)
        if shape.is_strict or built.max_time_ms > broker.clock.now_us() // 1000 + shape.after_ms:
            check_records(topic, built, produce_limits(settings), broker.clock)
        if head.producer_id >= 0:
            stamp_head(broker, partition, built.batch, head)
    except (Refused, BrokerError):
        return False
    correlation: cython.uint = _number(lent.p, at + _CORRELATION_AT, 4) & 0xFFFFFFFF
    slot: RepeatedSlot = RepeatedSlot(session, shape, correlation)
    replies.append(slot)
    queue: AppendQueue = session.append_queue
    queue.produce(partition, built.batch, shape.level, slot.done, session.caller)
    return True
