"""The documented dialect from the client's side: requests written, replies read (spec: iggy#d0-requests, iggy#d0-replies).

Promises: what is written here is read back the same by ``messages.Reader``; a value the wire cannot carry raises Refused with the number
that the server would answer. Must not know: sockets, the broker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from polywire.protocols.iggy.dialect import D0
from polywire.protocols.iggy.messages import HEAD, U32, U64, Consumer, Reader, Refused, name_bytes
from polywire.records.columns import Header, HeaderKind, Record

BAD_HEADER_KEY: Final = 4018
BAD_HEADER_VALUE: Final = 4019
EMPTY_PAYLOAD: Final = 4024
BAD_KEY: Final = 4028
PART_BYTES_MAX: Final = 255  # of a name, a key, a header's key or value

BALANCED: Final = b"\x01\x00"

_OFFSET: Final = Struct("<IQQ")
_POLLED: Final = Struct("<IQI")
_MESSAGE: Final = Struct("<QBQ16sII")  # offset, state, time, id, checksum, length of the headers
_STREAM: Final = Struct("<IQIQQ")
_TOPIC: Final = Struct("<IQIIQQ")
_PARTITION: Final = Struct("<IQIQQQ")


@dataclass(frozen=True, slots=True)
class StreamSeen:
    """A stream as GET_STREAMS shows it."""

    id: int
    created_at_us: int
    topic_count: int
    size_bytes: int
    message_count: int
    name: str


@dataclass(frozen=True, slots=True)
class TopicSeen:
    """A topic as GET_TOPICS shows it; ``expiry_s`` is 0 when its messages stay for ever."""

    id: int
    created_at_us: int
    partition_count: int
    expiry_s: int
    size_bytes: int
    message_count: int
    name: str


@dataclass(frozen=True, slots=True)
class PartitionSeen:
    """A partition as GET_TOPIC shows it; ``current_offset`` is that of its newest message, 0 when it is empty."""

    id: int
    created_at_us: int
    segment_count: int
    current_offset: int
    size_bytes: int
    message_count: int


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A member of a group: the number of its connection, and its partitions."""

    id: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Polled:
    """A poll's reply: the partition that was read, its newest offset, the messages."""

    partition: int
    current_offset: int
    records: tuple[Record, ...]


# Requests


def request(code: int, body: bytes = b"") -> bytes:
    """A whole request."""
    return HEAD.pack(4 + len(body), code) + body


def ident(who: int | str) -> bytes:
    """A number or a name. Raises Refused when the name has not 1 to 255 bytes."""
    if isinstance(who, int):
        return b"\x01\x04" + U32.pack(who)
    return b"\x02" + name(who)


def name(text: str) -> bytes:
    """A name behind its length. Raises Refused when it has not 1 to 255 bytes."""
    if not 1 <= len(text.encode()) <= PART_BYTES_MAX:
        raise Refused(3)
    return name_bytes(text)


def place(consumer: Consumer, topic: bytes, partition: int) -> bytes:
    """Consumer, stream and topic, partition (0: none): what polls and stored offsets begin with."""
    assert isinstance(consumer.who, int), "consumers of this dialect are numbers"
    return bytes((2 if consumer.group else 1,)) + U32.pack(consumer.who) + topic + U32.pack(partition)


def poll(at: bytes, kind: int, value: int, count: int, *, commit: bool = False) -> bytes:
    """The body of POLL_MESSAGES; ``at`` is a ``place``, ``kind`` a polling strategy from 1 (offset) to 5 (next)."""
    return at + bytes((kind,)) + U64.pack(value) + U32.pack(count) + bytes((commit,))


def to_partition(partition: int) -> bytes:
    """Partitioning by number."""
    return b"\x02\x04" + U32.pack(partition)


def by_key(key: bytes) -> bytes:
    """Partitioning by a key. Raises Refused when it has not 1 to 255 bytes."""
    if not 1 <= len(key) <= PART_BYTES_MAX:
        raise Refused(BAD_KEY)
    return bytes((3, len(key))) + key


def messages(records: Sequence[Record]) -> bytes:
    """Messages to send, one after the other. Raises Refused for what the wire cannot carry."""
    parts: list[bytes] = []
    for record in records:
        if not record.value:
            raise Refused(EMPTY_PAYLOAD)
        headers = b"".join(map(_header, record.headers))
        parts += (
            (record.id or bytes(16)) + U32.pack(len(headers)) + headers + U32.pack(len(record.value)),
            record.value,
        )
    return b"".join(parts)


def _header(header: Header) -> bytes:
    if header.key_kind is not HeaderKind.STRING or not 1 <= len(header.key) <= PART_BYTES_MAX:
        raise Refused(BAD_HEADER_KEY)
    if header.value is None or not 1 <= len(header.value) <= PART_BYTES_MAX:
        raise Refused(BAD_HEADER_VALUE)
    value = bytes((header.value_kind,)) + U32.pack(len(header.value)) + header.value
    return U32.pack(len(header.key)) + header.key + value


# Replies; all raise Refused for bytes that make no sense


def read_streams(payload: bytes) -> list[StreamSeen]:
    """GET_STREAMS."""
    reader, found = _reader(payload), []
    while reader.left:
        found.append(_stream(reader))
    return found


def _stream(reader: Reader) -> StreamSeen:
    number, created_at_us, topics, size, messages = _STREAM.unpack(reader.take(_STREAM.size))
    return StreamSeen(number, created_at_us, topics, size, messages, reader.name())


def read_stream(payload: bytes) -> tuple[StreamSeen, list[TopicSeen]]:
    """GET_STREAM."""
    reader = _reader(payload)
    stream, topics = _stream(reader), []
    while reader.left:
        topics.append(_topic(reader))
    return stream, topics


def read_topics(payload: bytes) -> list[TopicSeen]:
    """GET_TOPICS."""
    reader, found = _reader(payload), []
    while reader.left:
        found.append(_topic(reader))
    return found


def _topic(reader: Reader) -> TopicSeen:
    number, created_at_us, partitions, expiry_s, size, messages = _TOPIC.unpack(reader.take(_TOPIC.size))
    return TopicSeen(number, created_at_us, partitions, expiry_s, size, messages, reader.name())


def read_topic(payload: bytes) -> tuple[TopicSeen, list[PartitionSeen]]:
    """GET_TOPIC."""
    reader = _reader(payload)
    topic, partitions = _topic(reader), []
    while reader.left:
        partitions.append(PartitionSeen(*_PARTITION.unpack(reader.take(_PARTITION.size))))
    return topic, partitions


def read_group(payload: bytes) -> tuple[int, int, list[MemberSeen]]:
    """GET_CONSUMER_GROUP: number, partitions, members."""
    reader = _reader(payload)
    number, partition_count, member_count = reader.u32(), reader.u32(), reader.u32()
    members: list[MemberSeen] = []
    for _ in range(member_count):
        member, count = reader.u32(), reader.u32()
        numbers = reader.take(4 * count).cast("I")
        members.append(MemberSeen(member, tuple(numbers)))
    return number, partition_count, members


def read_groups(payload: bytes) -> list[int]:
    """GET_CONSUMER_GROUPS: the number of each group."""
    reader, numbers = _reader(payload), []
    while reader.left:
        numbers.append(reader.u32())
        reader.take(2 * 4)  # partitions, members
    return numbers


def read_client_id(payload: bytes) -> int:
    """The number of this connection, from GET_ME."""
    return _reader(payload).u32()


def read_offset(payload: bytes) -> tuple[int, int, int]:
    """GET_CONSUMER_OFFSET: partition, newest offset, the last one consumed (0 also when none was)."""
    if len(payload) != _OFFSET.size:
        raise Refused(3)
    partition, current, stored = _OFFSET.unpack(payload)
    return partition, current, stored


def read_polled(payload: bytes) -> Polled:
    """POLL_MESSAGES."""
    reader = _reader(payload)
    partition, current, count = _POLLED.unpack(reader.take(_POLLED.size))
    records = tuple(_message(reader) for _ in range(count))
    if reader.left:
        raise Refused(3)
    return Polled(partition, current, records)


def _message(reader: Reader) -> Record:
    offset, _, time_us, id_, _, header_bytes = _MESSAGE.unpack(reader.take(_MESSAGE.size))
    headers = tuple(_headers(Reader(reader.take(header_bytes), D0))) if header_bytes else ()
    value = bytes(reader.take(reader.u32()))
    return Record(value=value, headers=headers, offset=offset, append_time_us=time_us, id=id_)


def _headers(reader: Reader) -> Iterator[Header]:
    while reader.left:
        key = bytes(reader.take(reader.u32()))
        kind = reader.u8()
        if not HeaderKind.RAW <= kind <= HeaderKind.FLOAT64:
            raise Refused(3)
        yield Header(key, bytes(reader.take(reader.u32())), value_kind=HeaderKind(kind))


def _reader(payload: bytes) -> Reader:
    return Reader(memoryview(payload), D0)
