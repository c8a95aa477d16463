"""Decode requests and encode responses of Kafka 0.7, one frame at a time (spec: kafka-0.7#framing).

``parse`` accepts the same frames as a 0.7.2 broker. For other frames it raises PeerError, which closes the connection.
A request is decoded completely before it is executed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from enum import IntEnum
from struct import Struct
from typing import Final

import msgspec

from polywire import names
from polywire.errors import ErrorCode, Invalid, PeerError
from polywire.protocols.kafka07.decoder import FRAME_BYTES_MAX
from polywire.types import FULL_NAME_BYTES_MAX, Buffer

LATEST: Final = -1  # special times in OFFSETS (spec: kafka-0.7#offsets)
EARLIEST: Final = -2
ANY_PARTITION: Final = -1  # partition number in PRODUCE with which the broker chooses the partition
MAGIC_0: Final = 0
MAGIC_1: Final = 1
# length of the name of a topic created over this protocol, in UTF-16 units (spec: kafka-0.7#topic-names)
NAME_UNITS_MAX: Final = 255
NAME_BYTES_MAX: Final = 3 * FULL_NAME_BYTES_MAX  # size of a topic's name if every byte is escaped
ENTRY_BYTES_MIN: Final = 9  # size of a message with magic 0 and an empty value

_I16: Final = Struct(">h")
_I32: Final = Struct(">i")
_HEAD: Final = Struct(">ih")  # frame length; request type or error code
_FETCH: Final = Struct(">iqi")
_SET: Final = Struct(">ii")
_LISTED: Final = Struct(">ihi")
_MAGIC_0_ENTRY: Final = Struct(">iBI")
_MAGIC_1_ENTRY: Final = Struct(">iBBI")


class RequestType(IntEnum):
    PRODUCE = 0
    FETCH = 1
    MULTIFETCH = 2
    MULTIPRODUCE = 3
    OFFSETS = 4


class WireError(IntEnum):
    """Error codes of the protocol (spec: kafka-0.7#errors).

    A broker sends only the first, second, fourth and last.
    """

    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    INVALID_MESSAGE = 2
    WRONG_PARTITION = 3
    INVALID_FETCH_SIZE = 4
    UNKNOWN = -1


class CompressionCodec(IntEnum):
    """Compression of the messages inside a compressed message (spec: kafka-0.7#wrappers)."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2


class ProduceEntry(msgspec.Struct, frozen=True):
    """A message set of a request: the bytes ``[start, stop)`` of the request, its topic and partition."""

    topic: bytes
    partition: int
    start: int
    stop: int


class Produce(msgspec.Struct, frozen=True):
    """PRODUCE, or MULTIPRODUCE with several entries. It has no response."""

    entries: Sequence[ProduceEntry]
    is_multiple: bool

    @property
    def kind(self) -> RequestType:
        return RequestType.MULTIPRODUCE if self.is_multiple else RequestType.PRODUCE


class FetchEntry(msgspec.Struct, frozen=True):
    """A request for one partition: at most ``bytes_max`` bytes from an offset on."""

    topic: bytes
    partition: int
    address: int
    bytes_max: int


class Fetch(msgspec.Struct, frozen=True):
    entries: Sequence[FetchEntry]
    is_multiple: bool

    @property
    def kind(self) -> RequestType:
        return RequestType.MULTIFETCH if self.is_multiple else RequestType.FETCH


class Offsets(msgspec.Struct, frozen=True):
    """OFFSETS: request offsets at or before a time in milliseconds; ``LATEST`` and ``EARLIEST`` are special times."""

    topic: bytes
    partition: int
    time_ms: int
    count_max: int

    @property
    def kind(self) -> RequestType:
        return RequestType.OFFSETS


Request = Produce | Fetch | Offsets


class _Reader:
    """Parses one frame's fields. It raises PeerError instead of reading beyond ``stop``."""

    __slots__ = ("at", "data", "stop")

    def __init__(self, data: Buffer, at: int, stop: int) -> None:
        self.data: Final = data
        self.at = at
        self.stop: Final = stop

    def skip(self, size: int) -> int:
        """Skip the next ``size`` bytes, and return the position where they begin."""
        at = self.at
        if size < 0 or size > self.stop - at:
            raise PeerError(f"request ends inside a field wanted={size} left={self.stop - at}", fatal=True)
        self.at = at + size
        return at

    def i16(self) -> int:
        number: int = _I16.unpack_from(self.data, self.skip(2))[0]
        return number

    def topic(self) -> bytes:
        size = self.i16()
        at = self.skip(size)
        return bytes(memoryview(self.data)[at : at + size])

    def count(self) -> int:
        count = self.i16()
        if count < 0:
            raise PeerError(f"number of entries is negative count={count}", fatal=True)
        return count

    def produce_entry(self) -> ProduceEntry:
        topic = self.topic()
        partition, size = _SET.unpack_from(self.data, self.skip(8))
        start = self.skip(size)
        return ProduceEntry(topic, partition, start, start + size)

    def fetch_entry(self) -> FetchEntry:
        topic = self.topic()
        return FetchEntry(topic, *_FETCH.unpack_from(self.data, self.skip(16)))


def frame_length(data: Buffer, at: int) -> int:
    """Return the length of the request at ``at``, without its length field. Raises PeerError if it is impossible."""
    length: int = _I32.unpack_from(data, at)[0]
    if not 2 <= length <= FRAME_BYTES_MAX:
        raise PeerError(f"frame has an impossible length bytes={length} limit={FRAME_BYTES_MAX}", fatal=True)
    return length


def entry_count(data: Buffer, at: int, stop: int) -> int:
    """Return the number of entries that the request at ``at`` claims to have; 1 for types without such a number."""
    reader = _Reader(data, at, stop)
    many = reader.i16() in (RequestType.MULTIPRODUCE, RequestType.MULTIFETCH)
    return reader.i16() if many else 1


def parse(data: Buffer, at: int, stop: int) -> Request:
    """Parse the request whose type is at ``at`` and that ends at ``stop``.

    Surplus bytes are ignored. Raises PeerError for a malformed request.
    """
    reader = _Reader(data, at, stop)
    kind = reader.i16()
    match kind:
        case RequestType.PRODUCE:
            return Produce([reader.produce_entry()], is_multiple=False)
        case RequestType.MULTIPRODUCE:
            return Produce([reader.produce_entry() for _ in range(reader.count())], is_multiple=True)
        case RequestType.FETCH:
            return Fetch([reader.fetch_entry()], is_multiple=False)
        case RequestType.MULTIFETCH:
            return Fetch([reader.fetch_entry() for _ in range(reader.count())], is_multiple=True)
        case RequestType.OFFSETS:
            topic = reader.topic()
            return Offsets(topic, *_FETCH.unpack_from(data, reader.skip(16)))
        case _:
            raise PeerError(f"unknown request type={kind}", fatal=True)


# Requests


def _framed(kind: RequestType, body: bytes) -> bytes:
    return _HEAD.pack(len(body) + 2, kind) + body


class _Refused:
    """Container of the characters that Kafka 0.7 does not allow in topic names (spec: kafka-0.7#topic-names)."""

    def __contains__(self, char: object) -> bool:
        return isinstance(char, str) and (
            char == "/" or char < " " or "\x7f" <= char <= "\x9f" or "\ud800" <= char <= "\uf8ff" or char >= "\ufff0"
        )


_REFUSED: Final = _Refused()


def topic_bytes(name: str) -> bytes:
    """Encode a topic's name. Characters that Kafka 0.7 does not allow become ``%XX`` (decision 0116)."""
    return names.escape(name, _REFUSED).encode("utf-8", "surrogateescape")


def topic_name(topic: bytes) -> str:
    """Decode a topic's name encoded by ``topic_bytes``.

    Raises Invalid(INVALID_TOPIC) if Kafka 0.7 does not allow it.
    """
    text = topic.decode("utf-8", "replace")
    if not names.is_simple(text) and any(char in _REFUSED for char in text):
        raise Invalid(ErrorCode.INVALID_TOPIC, f"topic name has an invalid character name={text!r}")
    return names.unescape(text)


def _named(topic: bytes) -> bytes:
    return _I16.pack(len(topic)) + topic


def _produce_body(topic: bytes, partition: int, message_set: bytes) -> bytes:
    return _named(topic) + _SET.pack(partition, len(message_set)) + message_set


def encode_produce(topic: bytes, partition: int, message_set: bytes) -> bytes:
    return _framed(RequestType.PRODUCE, _produce_body(topic, partition, message_set))


def encode_multiproduce(entries: Sequence[tuple[bytes, int, bytes]]) -> bytes:
    """Return a MULTIPRODUCE request with (topic, partition, message set) entries."""
    bodies = b"".join(_produce_body(*entry) for entry in entries)
    return _framed(RequestType.MULTIPRODUCE, _I16.pack(len(entries)) + bodies)


def _fetch_body(entry: FetchEntry) -> bytes:
    return _named(entry.topic) + _FETCH.pack(entry.partition, entry.address, entry.bytes_max)


def encode_fetch(topic: bytes, partition: int, address: int, bytes_max: int) -> bytes:
    return _framed(RequestType.FETCH, _fetch_body(FetchEntry(topic, partition, address, bytes_max)))


def encode_multifetch(entries: Sequence[FetchEntry]) -> bytes:
    return _framed(RequestType.MULTIFETCH, _I16.pack(len(entries)) + b"".join(map(_fetch_body, entries)))


def encode_offsets(topic: bytes, partition: int, time_ms: int, count_max: int) -> bytes:
    return _framed(RequestType.OFFSETS, _named(topic) + _FETCH.pack(partition, time_ms, count_max))


# Message sets


def encode_message(value: bytes, magic: int = MAGIC_1, codec: CompressionCodec = CompressionCodec.NONE) -> bytes:
    """Return one entry of a message set."""
    if magic == MAGIC_0:
        return _MAGIC_0_ENTRY.pack(len(value) + 5, 0, zlib.crc32(value)) + value
    return _MAGIC_1_ENTRY.pack(len(value) + 6, 1, codec, zlib.crc32(value)) + value


def encode_set(values: Iterable[bytes], magic: int = MAGIC_1) -> bytes:
    return b"".join([encode_message(value, magic) for value in values])


# Responses


def answer_head(size: int, error: WireError = WireError.NONE) -> bytes:
    """Return the length and error code, six bytes, that precede ``size`` bytes of a response."""
    return _HEAD.pack(size + 2, error)


def encode_offsets_answer(addresses: Sequence[int]) -> bytes:
    return _LISTED.pack(6 + 8 * len(addresses), 0, len(addresses)) + b"".join(
        [address.to_bytes(8, "big") for address in addresses]
    )


def parse_error(data: Buffer, at: int) -> int:
    """Return the error code of a response whose body begins at ``at``. Raises PeerError if it is too short."""
    return _Reader(data, at, len(data)).i16()


def parse_offsets_answer(data: Buffer) -> list[int]:
    """Return the offsets in a response to OFFSETS. ``data`` begins after the length field.

    Raises PeerError if it is malformed.
    """
    reader = _Reader(data, 2, len(data))
    (count,) = _I32.unpack_from(data, reader.skip(4))
    at = reader.skip(8 * count)
    return [
        int.from_bytes(memoryview(data)[place : place + 8], "big", signed=True) for place in range(at, reader.at, 8)
    ]


def split_multifetch_answer(data: Buffer) -> list[tuple[int, memoryview]]:
    """Return (error, message set) for each entry of a MULTIFETCH response that has no length field.

    Raises PeerError if it is malformed.
    """
    reader = _Reader(data, 2, len(data))
    found = []
    while reader.at < reader.stop:
        (size,) = _I32.unpack_from(data, reader.skip(4))
        at = reader.skip(size)
        error = _Reader(data, at, at + size).i16()
        found.append((error, memoryview(data)[at + 2 : at + size]))
    return found
