"""SEND_MESSAGES requests that name the same topic and partition as an earlier one of their connection.

A producer sends such requests all the time. They are recognised by comparing bytes, so that names are not looked up
again. This module is compiled. Requests with a header of 256 bytes, and those with a key, are not recognised.

A request that needs anything else (errors included) has no effect here: the session then executes it like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cython

from polywire.protocols.iggy.decoder import from_flat, from_indexed, message_head
from polywire.protocols.iggy.messages import U32, Code
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.runtime.shapes import PRODUCE, SHAPE_BYTES_MAX
from polywire.types import Level

if cython.compiled:
    from cython.cimports.polywire.protocols.runtime.append_queue import AppendQueue
    from cython.cimports.polywire.protocols.runtime.pipelined import BarePipelined
    from cython.cimports.polywire.protocols.runtime.shapes import BareShape, Shapes, is_permitted
    from cython.cimports.polywire.records.memory import Lent, lend, load_u32
else:
    from polywire.protocols.runtime.append_queue import AppendQueue
    from polywire.protocols.runtime.pipelined import BarePipelined
    from polywire.protocols.runtime.shapes import BareShape, Shapes, is_permitted
    from polywire.records.memory import Lent, lend, load_u32

if TYPE_CHECKING:
    from polywire.broker.settings import TopicSettings
    from polywire.broker.topics import Partition, Topic
    from polywire.protocols.iggy.dialect import Dialect
    from polywire.protocols.iggy.directory import StoredStream, Stream
    from polywire.protocols.iggy.session import IggySession

_COUNT_BYTES = cython.declare(cython.Py_ssize_t, 4)


@cython.final
@cython.cclass
class Shape(BareShape):
    """The command code, the names and the partitioning of a request.

    Attributes:
        balanced: whether each request goes to the next partition of the topic.
        dialect: the dialect of the request.
        settings: settings of the topic; with its name for Iggy clients. They are replaced when it is renamed.
        stream: the stream of the topic.
        stored: its name. It is replaced when the stream is renamed.
    """

    if cython.compiled:
        balanced: cython.bint
        dialect: object
        settings: object
        stored: object
        stream: object
    else:
        __slots__ = ("balanced", "dialect", "settings", "stored", "stream")

    def __init__(
        self, before: bytes, partition: Partition, dialect: Dialect, stream: Stream, *, balanced: bool
    ) -> None:
        super().__init__(before, partition, Level.WRITTEN)
        self.balanced = balanced
        self.dialect = dialect
        self.settings: TopicSettings = partition.topic.settings
        self.stream = stream
        self.stored: StoredStream = stream.stored


def learn(session: IggySession, reader: Reader, partition: Partition, *, names_at: int, balanced: bool) -> None:
    """Remember the beginning of a request, up to the reader's position.

    names_at: position of the names of stream and topic. A name that only other protocols use is not learned, because a
    new stream or topic can get it.
    """
    before = U32.pack(Code.SEND) + bytes(reader.data[: reader.at])
    if len(before) > SHAPE_BYTES_MAX or session.shapes.knows(before):
        return
    names = Reader(reader.data[names_at:], reader.dialect)
    directory, topic = session.shared.directory, partition.topic
    stream = directory.stream_of(topic)
    if _is_own(names.ident(), stream.stored.name) and _is_own(names.ident(), directory.stored(topic).name):
        session.shapes.add(Shape(before, partition, reader.dialect, stream, balanced=balanced))
        session.take_repeated = take


def _is_own(named: int | str, name: str) -> bool:
    return isinstance(named, int) or named == name


def take(session: IggySession, data: memoryview, start: int, end: int) -> bool:
    """Execute the request ``data[start:end]`` if it has a known shape. Return False, without an effect, if not."""
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    stop: cython.Py_ssize_t = end
    shapes: Shapes = session.shapes
    shape: Shape = shapes.find(lent.p, at, stop, 0, 0)  # type: ignore[assignment]
    if shape is None:
        return False
    partition = shape.partition
    topic: Topic = partition.topic
    dialect, principal = shape.dialect, session.principal
    is_renamed = topic.settings is not shape.settings or shape.stream.stored is not shape.stored
    if partition.ended or is_renamed or session.recognition.dialect is not dialect:
        shapes.forget(shape)  # another request with this beginning is learned again
        return False
    if principal is None or not is_permitted(session.broker.access, principal, PRODUCE, topic):
        return False
    at += len(shape.before)
    if dialect.batched:
        if stop - at < _COUNT_BYTES:
            return False
        count = load_u32(lent.p, at)
        at += _COUNT_BYTES
        if message_head(data, at, stop, count) != dialect.message_head:
            return False
        batch = from_indexed(data, at, stop, count, dialect.message_head)
    else:
        batch = from_flat(data, at, stop)
    if isinstance(batch, int):
        return False
    if shape.balanced:
        partition = topic.partitions[session.shared.directory.next_balanced(topic)]
    replies: BarePipelined = session
    answer = Answer(session, dialect, blocking=False)
    replies.append(answer)
    queue: AppendQueue = session.append_queue
    queue.produce(partition, batch, shape.level, answer.sent)
    return True
