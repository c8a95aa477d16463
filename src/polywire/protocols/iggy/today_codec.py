"""For clients of current Iggy dialects: encode requests, decode replies (spec: iggy#d3-bodies, iggy#d4-records).

A value that the protocol cannot represent raises Refused with the error number that the server would return. A
malformed reply raises Refused too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from polywire.protocols.iggy import vsr
from polywire.protocols.iggy.client_codec import (
    BAD_HEADER_KEY,
    BAD_HEADER_VALUE,
    EMPTY_PAYLOAD,
    PART_BYTES_MAX,
    Polled,
    TopicLimits,
    name,
)
from polywire.protocols.iggy.dialect import D3, FRAMED, Dialect
from polywire.protocols.iggy.messages import MALFORMED, U32, U64, Code, Refused
from polywire.protocols.iggy.options import TEXT, parse_options
from polywire.protocols.iggy.reader import Reader
from polywire.records.columns import Header, HeaderKind, Record
from polywire.records.xxh3 import xxh3

CLIENT_NAME: Final = "polywire"
CONTEXT_BYTES: Final = 24
RESULT_BYTES: Final = 12  # size of an error in the result section of a reply

_OPERATIONS: Final = {code: operation for operation, code in vsr.OPERATIONS.items()}
# Size, command, client, identifier, number, operation, epoch, code, incarnation of the partition.
_REQUEST: Final = Struct("<48xI8xB67x16s16s8xQB7xQ4xIQ48x")
_STREAM: Final = Struct("<IQIQQ")
_TOPIC: Final = Struct("<IQIQBQQQ")
_TOPIC_012: Final = Struct("<IQIQQ")
_LIMITS: Final = (b"message_expiry", b"max_topic_size")
NEVER: Final = 2**64 - 1
_WINDOW: Final = Struct("<II")
_ROUTE: Final = Struct("<QQIIB")
_POLLED: Final = Struct("<IQI")
_BATCH: Final = Struct("<QQQQQQI204x")  # partition, base offset, base time, origin time, length, checksum, count
_FRAME: Final = Struct(
    "<Q16sIIIIQ"
)  # checksum, id, offset delta, time delta, bytes of headers, bytes of the value, reserved
_SENT: Final = Struct("<IIIQ")


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, or a message that ends the connection.

    Attributes:
        status: the reason if the connection ends; otherwise 0 or an error number.
        protocols: lowest and highest version that the server accepts, if the reason is an unsupported version.
    """

    is_eviction: bool
    status: int
    operation: int
    body: bytes
    protocols: tuple[int, int] = (0, 0)


# Requests


def operation_of(code: Code) -> int:
    """Return the operation number of a command. All commands that change nothing have the same number."""
    return _OPERATIONS.get(code, vsr.PLAIN)


def request(
    operation: int,
    body: bytes,
    *,
    client: bytes,
    epoch: int,
    number: int,
    code: int = 0,
    identifier: bytes = b"",
    incarnation: int = 0,
) -> bytes:
    """Encode a request with its header.

    Since protocol 0.12, a request that changes state has an ``identifier``. ``incarnation`` is the partition's
    incarnation number, if it is known.
    """
    size = vsr.HEADER_BYTES + len(body)
    fields = client, identifier, number, operation, epoch, code, incarnation
    return _REQUEST.pack(size, vsr.REQUEST, *fields) + body


def register(version: str, *words: str, protocol: int = D3.protocols[0], secret: bytes = b"") -> bytes:
    """Encode the body of a login. ``words`` are a name and a password, or a token.

    Since protocol 0.12, ``secret`` has 32 bytes. Raises Refused if a word does not have 1 to 255 bytes.
    """
    names = [name(text) for text in (CLIENT_NAME, version, *words)]
    return b"".join([U32.pack(protocol), *names[:2], secret, *names[2:], U32.pack(0)])


def protocol_within(lowest: int, highest: int) -> tuple[Dialect, int] | None:
    """Return the newest dialect with a protocol version in this range, and the version; None if there is none."""
    for dialect in reversed(FRAMED):
        versions = [version for version in dialect.protocols if lowest <= version <= highest]
        if versions:
            return dialect, versions[-1]
    return None


def place(*, group: bool, who: bytes, topic: bytes, partition: int) -> bytes:
    """Encode the first fields of polls and of requests for stored offsets: consumer, stream, topic and partition.

    ``who`` and ``topic`` are encoded identifiers.
    """
    return bytes((2 if group else 1,)) + who + topic + b"\x01" + U32.pack(partition)


def poll(at: bytes, kind: int, value: int, count: int) -> bytes:
    """Encode the body of a poll that does not store an offset. ``kind`` is the polling strategy."""
    return at + bytes((kind,)) + U64.pack(value) + U32.pack(count) + b"\x00"


def send(topic: bytes, partitioning: bytes, records: Sequence[Record], origin_us: int) -> bytes:
    """Encode the body of a request that sends one batch. All messages get the same origin time.

    Raises Refused for records that the protocol cannot represent.
    """
    frames = [_frame(number, record) for number, record in enumerate(records)]
    size = vsr.HEADER_BYTES + sum(map(len, frames))
    head = _BATCH.pack(0, 0, 0, origin_us, size, 0, len(frames))
    sums = b"".join([frame[:8] for frame in frames])
    checksum = xxh3(head[:40] + head[48:52] + sums)
    head = _BATCH.pack(0, 0, 0, origin_us, size, checksum, len(frames))
    where = topic + partitioning + U32.pack(len(frames))
    return b"".join([U32.pack(len(where)), where, head, *frames])


def _frame(number: int, record: Record) -> bytes:
    if not record.value:
        raise Refused(EMPTY_PAYLOAD)
    headers = b"".join(map(_header, record.headers))
    fields = _FRAME.pack(0, record.id or bytes(16), number, 0, len(headers), len(record.value), 0)
    rest = fields[8:] + record.value + headers
    return U64.pack(xxh3(rest)) + rest


def _header(header: Header) -> bytes:
    if not 1 <= len(header.key) <= PART_BYTES_MAX:
        raise Refused(BAD_HEADER_KEY)
    if header.value is None or not 1 <= len(header.value) <= PART_BYTES_MAX:
        raise Refused(BAD_HEADER_VALUE)
    parts = ((header.key_kind, header.key), (header.value_kind, header.value))
    return b"".join([bytes((kind,)) + U32.pack(len(data)) + data for kind, data in parts])


# Replies; all functions raise Refused for malformed bytes


def read_reply(data: memoryview) -> Reply:
    command, body = data[60], bytes(data[vsr.HEADER_BYTES :])
    if command == vsr.EVICTION:
        highest, lowest = _WINDOW.unpack_from(data, 144)
        return Reply(is_eviction=True, status=data[255], operation=0, body=body, protocols=(lowest, highest))
    if command != vsr.REPLY:
        raise Refused(MALFORMED)
    return Reply(is_eviction=False, status=int(U32.unpack_from(data, 216)[0]), operation=data[208], body=body)


def result_of(reply: Reply) -> bytes:
    """Return the payload of a reply. Raises Refused with the error number that it contains."""
    if reply.status:
        raise Refused(reply.status)
    has_section = reply.operation == vsr.REGISTER or (reply.operation >= 128 and reply.operation != vsr.SEND)
    if not has_section:
        return reply.body
    if len(reply.body) == RESULT_BYTES and reply.body[0] == 1:
        raise Refused(int(U32.unpack_from(reply.body, 8)[0]))
    if reply.body[:4] != bytes(4):
        raise Refused(MALFORMED)
    return reply.body[4:]


def read_epoch(payload: bytes) -> int:
    """Decode the number of the login from the reply to a login."""
    reader = _reader(payload)
    reader.u32()
    return reader.u64()


def read_route(payload: bytes) -> int:
    """Decode the reply to GET_PARTITION_ROUTE. Return the partition's incarnation number."""
    if len(payload) != _ROUTE.size:
        raise Refused(MALFORMED)
    return int(_ROUTE.unpack(payload)[0])


def read_streams(payload: bytes, dialect: Dialect = D3) -> list[tuple[int, str]]:
    """Decode number and name of each stream."""
    reader, found = _reader(payload), []
    while reader.left:
        number = _STREAM.unpack(reader.take(_STREAM.size))[0]
        found.append((number, reader.name()))
        for _ in range(dialect.option_blocks):
            reader.take(reader.u32())
    return found


def read_topics(payload: bytes, dialect: Dialect = D3) -> list[tuple[str, int]]:
    reader = _reader(payload, dialect)
    return [_topic(reader) for _ in range(reader.u32())]


def read_topic(payload: bytes, dialect: Dialect = D3) -> int:
    """Decode a topic's number of partitions; 0 if the topic does not exist."""
    return _topic(_reader(payload, dialect))[1] if payload else 0


def _topic(reader: Reader) -> tuple[str, int]:
    record = _TOPIC_012 if reader.dialect.contexts else _TOPIC
    partitions = record.unpack(reader.take(record.size))[2]
    found = reader.name(), partitions
    for _ in range(2):
        reader.take(reader.u32())
    return found


def read_limits(payload: bytes, dialect: Dialect = D3) -> TopicLimits:
    """Decode the options of a topic. Since protocol 0.12, the limits are only in the lists of options."""
    reader = _reader(payload, dialect)
    record = _TOPIC_012 if dialect.contexts else _TOPIC
    fields = record.unpack(reader.take(record.size))
    reader.name()
    given = parse_options(bytes(reader.take(reader.u32())))
    derived = parse_options(bytes(reader.take(reader.u32())))
    if dialect.contexts:
        limits = [_limit_option(derived | given, name) for name in (b"message_expiry", b"max_topic_size")]
    else:
        limits = [fields[3], fields[5]]
    expiry_us, size_max = (0 if limit == NEVER else limit for limit in limits)
    others = [_option_text(name, *option) for name, option in given.items() if name not in _LIMITS]
    return TopicLimits(fields[2], expiry_us, size_max, tuple(others))


def _limit_option(options: Mapping[bytes, tuple[int, bytes]], name: bytes) -> int:
    _, value = options.get(name, (0, b""))
    return int(U64.unpack(value)[0]) if len(value) == U64.size else 0


def _option_text(name: bytes, kind: int, value: bytes) -> str:
    text = value.decode("utf-8", "replace") if kind == TEXT else str(int.from_bytes(value[:8], "little"))
    return f"{name.decode('utf-8', 'replace')}={text}"


def read_groups(payload: bytes) -> dict[str, int]:
    """Decode how many members each group of a topic has, by the group's name."""
    reader, members = _reader(payload), {}
    while reader.left:
        reader.take(2 * 4)  # skips the group's number and that of its partitions
        count = reader.u32()
        members[reader.name()] = count
    return members


def read_sent(payload: bytes) -> tuple[int, int] | None:
    """Decode the partition and the first offset of a sent batch; None if the server does not report them."""
    if not payload:
        return None
    reader = _reader(payload)
    if reader.u32() != 1:
        raise Refused(MALFORMED)
    _, _, partition, offset = _SENT.unpack(reader.take(_SENT.size))
    return partition, offset


def read_assignment(payload: bytes) -> tuple[int, tuple[int, ...]] | None:
    """Decode a group's generation and the member's partitions; None if the client is not a member."""
    if not payload:
        return None
    reader = _reader(payload)
    generation, count = reader.u64(), reader.u32()
    return generation, tuple(reader.take(4 * count).cast("I"))


def read_polled(payload: bytes, dialect: Dialect = D3) -> Polled:
    reader = _reader(payload)
    partition, current, count = _POLLED.unpack(reader.take(_POLLED.size))
    if dialect.contexts:
        reader.take(CONTEXT_BYTES)
    records: list[Record] = []
    while reader.left:
        records += _batch(reader)
    if len(records) != count:
        raise Refused(MALFORMED)
    return Polled(partition, current, tuple(records))


def _batch(reader: Reader) -> Iterator[Record]:
    _, base_offset, time_us, _, size, _, count = _BATCH.unpack(reader.take(_BATCH.size))
    if size < _BATCH.size:
        raise Refused(MALFORMED)
    frames = Reader(reader.take(size - _BATCH.size), D3)
    for _ in range(count):
        _, id_, delta, _, header_bytes, value_bytes, _ = _FRAME.unpack(frames.take(_FRAME.size))
        value = bytes(frames.take(value_bytes))
        headers = tuple(_headers(Reader(frames.take(header_bytes), D3)))
        yield Record(value=value, headers=headers, offset=base_offset + delta, append_time_us=time_us, id=id_)
    if frames.left:
        raise Refused(MALFORMED)


def _headers(reader: Reader) -> Iterator[Header]:
    while reader.left:
        key_kind, key = _kind(reader), bytes(reader.take(reader.u32()))
        value_kind, value = _kind(reader), bytes(reader.take(reader.u32()))
        yield Header(key, value, key_kind=key_kind, value_kind=value_kind)


def _kind(reader: Reader) -> HeaderKind:
    kind = reader.u8()
    if not HeaderKind.RAW <= kind <= HeaderKind.FLOAT64:
        raise Refused(MALFORMED)
    return HeaderKind(kind)


def _reader(payload: bytes, dialect: Dialect = D3) -> Reader:
    return Reader(memoryview(payload), dialect)
