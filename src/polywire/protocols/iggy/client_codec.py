"""For clients of the documented Iggy dialect: encode requests, decode replies (spec: iggy#d0-requests,
iggy#d0-replies).

``reader.Reader`` decodes what this module encodes. A value that the protocol cannot represent raises Refused with the
error number that the server would return.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from polywire.protocols.iggy.dialect import D0
from polywire.protocols.iggy.messages import HEAD, U32, U64, Consumer, Refused, name_bytes
from polywire.protocols.iggy.reader import Reader
from polywire.records.columns import Header, HeaderKind, Record

BAD_HEADER_KEY: Final = 4018
BAD_HEADER_VALUE: Final = 4019
EMPTY_PAYLOAD: Final = 4024
BAD_KEY: Final = 4028
PART_BYTES_MAX: Final = 255  # largest size of a name, a message key, or the key or value of a header

BALANCED: Final = b"\x01\x00"

_OFFSET: Final = Struct("<IQQ")
_POLLED: Final = Struct("<IQI")
_MESSAGE: Final = Struct("<QBQ16sII")  # offset, state, time, id, checksum, length of the headers
_STREAM: Final = Struct("<IQIQQ")
_TOPIC: Final = Struct("<IQIIQQ")
_PARTITION: Final = Struct("<IQIQQQ")


@dataclass(frozen=True, slots=True)
class StreamSeen:
    id: int
    created_at_us: int
    topic_count: int
    size_bytes: int
    message_count: int
    name: str


@dataclass(frozen=True, slots=True)
class TopicSeen:
    """A topic in a reply to GET_TOPICS.

    Attributes:
        expiry_s: 0 if messages do not expire.
    """

    id: int
    created_at_us: int
    partition_count: int
    expiry_s: int
    size_bytes: int
    message_count: int
    name: str


@dataclass(frozen=True, slots=True)
class TopicLimits:
    """The options of a topic.

    Attributes:
        expiry_us: 0 if messages do not expire.
        size_max: 0 if the size is not limited.
        others: options without an effect on what the topic retains, as ``name=value``.
    """

    partition_count: int
    expiry_us: int
    size_max: int
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartitionSeen:
    """A partition in a reply to GET_TOPIC.

    Attributes:
        current_offset: offset of the newest message; 0 if the partition is empty, too.
    """

    id: int
    created_at_us: int
    segment_count: int
    current_offset: int
    size_bytes: int
    message_count: int


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A member of a group.

    Attributes:
        id: number of the member's connection.
    """

    id: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Polled:
    """A reply to POLL_MESSAGES.

    Attributes:
        current_offset: offset of the partition's newest message.
    """

    partition: int
    current_offset: int
    records: tuple[Record, ...]


# Requests


def request(code: int, body: bytes = b"") -> bytes:
    return HEAD.pack(4 + len(body), code) + body


def ident(identifier: int | str) -> bytes:
    """Encode an identifier, which is a number or a name. Raises Refused if a name does not have 1 to 255 bytes."""
    if isinstance(identifier, int):
        return b"\x01\x04" + U32.pack(identifier)
    return b"\x02" + name(identifier)


def name(text: str) -> bytes:
    """Encode a name with its length. Raises Refused if it does not have 1 to 255 bytes."""
    if not 1 <= len(text.encode()) <= PART_BYTES_MAX:
        raise Refused(3)
    return name_bytes(text)


def place(consumer: Consumer, topic: bytes, partition: int) -> bytes:
    """Encode the first fields of polls and of requests for stored offsets: consumer, stream, topic and partition.

    The partition 0 means none.
    """
    assert isinstance(consumer.identifier, int), "consumers of this dialect are numbers"
    return bytes((2 if consumer.group else 1,)) + U32.pack(consumer.identifier) + topic + U32.pack(partition)


def poll(at: bytes, kind: int, value: int, count: int, *, commit: bool = False) -> bytes:
    """Encode the body of POLL_MESSAGES.

    Args:
        at: the result of ``place``.
        kind: the polling strategy, from 1 (offset) to 5 (next).
        value: the argument of the strategy.
    """
    return at + bytes((kind,)) + U64.pack(value) + U32.pack(count) + bytes((commit,))


def to_partition(partition: int) -> bytes:
    return b"\x02\x04" + U32.pack(partition)


def by_key(key: bytes) -> bytes:
    """Encode partitioning by key. Raises Refused if the key does not have 1 to 255 bytes."""
    if not 1 <= len(key) <= PART_BYTES_MAX:
        raise Refused(BAD_KEY)
    return bytes((3, len(key))) + key


def messages(records: Sequence[Record]) -> bytes:
    """Encode messages to send. Raises Refused for records that the protocol cannot represent."""
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


# Replies; all functions raise Refused for malformed bytes


def read_streams(payload: bytes) -> list[StreamSeen]:
    reader, found = _reader(payload), []
    while reader.left:
        found.append(_stream(reader))
    return found


def _stream(reader: Reader) -> StreamSeen:
    number, created_at_us, topics, size, messages = _STREAM.unpack(reader.take(_STREAM.size))
    return StreamSeen(number, created_at_us, topics, size, messages, reader.name())


def read_stream(payload: bytes) -> tuple[StreamSeen, list[TopicSeen]]:
    reader = _reader(payload)
    stream, topics = _stream(reader), []
    while reader.left:
        topics.append(_topic(reader))
    return stream, topics


def read_topics(payload: bytes) -> list[TopicSeen]:
    reader, found = _reader(payload), []
    while reader.left:
        found.append(_topic(reader))
    return found


def _topic(reader: Reader) -> TopicSeen:
    number, created_at_us, partitions, expiry_s, size, messages = _TOPIC.unpack(reader.take(_TOPIC.size))
    return TopicSeen(number, created_at_us, partitions, expiry_s, size, messages, reader.name())


def read_topic(payload: bytes) -> tuple[TopicSeen, list[PartitionSeen]]:
    reader = _reader(payload)
    topic, partitions = _topic(reader), []
    while reader.left:
        partitions.append(PartitionSeen(*_PARTITION.unpack(reader.take(_PARTITION.size))))
    return topic, partitions


def read_group(payload: bytes) -> tuple[int, int, list[MemberSeen]]:
    """Decode a reply to GET_CONSUMER_GROUP: the group's number, its number of partitions, and its members."""
    reader = _reader(payload)
    number, partition_count, member_count = reader.u32(), reader.u32(), reader.u32()
    members: list[MemberSeen] = []
    for _ in range(member_count):
        member, count = reader.u32(), reader.u32()
        numbers = reader.take(4 * count).cast("I")
        members.append(MemberSeen(member, tuple(numbers)))
    return number, partition_count, members


def read_groups(payload: bytes) -> dict[int, int]:
    """Decode a reply to GET_CONSUMER_GROUPS: how many members each group has, by the group's number."""
    reader, members = _reader(payload), {}
    while reader.left:
        number, _, count = reader.u32(), reader.u32(), reader.u32()
        members[number] = count
    return members


def read_client_id(payload: bytes) -> int:
    """Decode a reply to GET_ME: the number of this connection."""
    return _reader(payload).u32()


def read_offset(payload: bytes) -> tuple[int, int, int]:
    """Decode a reply to GET_CONSUMER_OFFSET: partition, newest offset, last consumed offset (0 if there is none)."""
    if len(payload) != _OFFSET.size:
        raise Refused(3)
    partition, current, stored = _OFFSET.unpack(payload)
    return partition, current, stored


def read_polled(payload: bytes) -> Polled:
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
