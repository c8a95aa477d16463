"""Read and write the values of which Iggy's requests and replies consist, in all dialects.

A ``Reader`` never reads beyond its payload. For malformed bytes it raises ``Refused`` with the protocol's error number.

(spec: iggy#shared-encodings, iggy#d0-requests, iggy#d0-replies)
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

import msgspec

from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.iggy.dialect import Dialect

WIRE: Final = "iggy"
REFUSED: Final = "refused number="  # begins the message of ``Refused``
MALFORMED: Final = 3  # the error "invalid command", for bytes that cannot be decoded
NO_PARTITION: Final = 2**32 - 1

U32: Final = Struct("<I")
U64: Final = Struct("<Q")
HEAD: Final = Struct("<II")
NO_OPTIONS: Final = bytes(4)  # an empty block: its length is 0
_PERMISSION_FLAGS: Final = 10
_STREAM_FLAGS: Final = 6
_TOPIC_FLAGS: Final = 4


class Code(IntEnum):
    """Commands, by their number in requests without a header of 256 bytes.

    Operations of newer requests are mapped to these.
    """

    PING = 1
    GET_STATS = 10
    GET_SNAPSHOT = 11
    GET_CLUSTER = 12
    DESCRIBE_OPTIONS = 13
    BIND_SESSION = 15
    GET_CHANGES = 17
    GET_ME = 20
    GET_CLIENT = 21
    GET_CLIENTS = 22
    GET_USER = 31
    GET_USERS = 32
    CREATE_USER = 33
    DELETE_USER = 34
    UPDATE_USER = 35
    UPDATE_PERMISSIONS = 36
    CHANGE_PASSWORD = 37
    LOGIN = 38
    LOGOUT = 39
    GET_TOKENS = 41
    CREATE_TOKEN = 42
    DELETE_TOKEN = 43
    LOGIN_TOKEN = 44
    POLL = 100
    SEND = 101
    FLUSH = 102
    GET_ROUTE = 105
    POLL_HELD = 106
    AWAIT = 107
    CANCEL = 108
    FETCH = 109
    GET_OFFSET = 120
    STORE_OFFSET = 121
    DELETE_OFFSET = 122
    GET_STREAM = 200
    GET_STREAMS = 201
    CREATE_STREAM = 202
    DELETE_STREAM = 203
    UPDATE_STREAM = 204
    PURGE_STREAM = 205
    GET_TOPIC = 300
    GET_TOPICS = 301
    CREATE_TOPIC = 302
    DELETE_TOPIC = 303
    UPDATE_TOPIC = 304
    PURGE_TOPIC = 305
    CREATE_PARTITIONS = 402
    DELETE_PARTITIONS = 403
    DELETE_SEGMENTS = 503
    GET_GROUP = 600
    GET_GROUPS = 601
    CREATE_GROUP = 602
    DELETE_GROUP = 603
    JOIN_GROUP = 604
    LEAVE_GROUP = 605
    SYNC_GROUP = 606


class Refused(BrokerError):
    """A request that is rejected with an error number of the protocol.

    The number is part of the message, because other processes send only that.
    """

    def __init__(self, number: int) -> None:
        super().__init__(ErrorCode.INVALID_REQUEST, f"{REFUSED}{number}")
        self.number: Final = number


class Consumer(msgspec.Struct, frozen=True):
    """A single consumer or a group. Numbers count from 0 or 1, as in the client's protocol version."""

    group: bool
    identifier: int | str


class TopicFields(msgspec.Struct, frozen=True):
    """The fields of a topic in a request that creates or updates it.

    None means that the request does not set the field.
    """

    name: str
    expiry_us: int | None = None
    compression: int | None = None
    size_max: int | None = None
    replication: int = 1
    options: bytes = b""


class PermissionFlags(msgspec.Struct, frozen=True):
    """The protocol's permissions: ten flags for all streams, six for each listed stream, four for each listed topic.

    Numbers of streams and topics count from 0 or 1, as in the client's protocol version.
    """

    everywhere: tuple[bool, ...]
    streams: tuple[tuple[int, tuple[bool, ...], tuple[tuple[int, tuple[bool, ...]], ...]], ...] = ()


class Reader:
    """Decodes a payload. Raises Refused for malformed bytes."""

    __slots__ = ("at", "data", "dialect", "stop")

    def __init__(self, data: memoryview, dialect: Dialect) -> None:
        self.data: Final = data
        self.dialect: Final = dialect
        self.at = 0
        self.stop: Final = len(data)

    @property
    def left(self) -> int:
        return self.stop - self.at

    def take(self, size: int) -> memoryview:
        at = self._skip(size)
        return self.data[at : at + size]

    def _skip(self, size: int) -> int:
        at = self.at
        if size > self.stop - at:
            raise Refused(MALFORMED)
        self.at = at + size
        return at

    def u8(self) -> int:
        return self.data[self._skip(1)]

    def u32(self) -> int:
        number: int = U32.unpack_from(self.data, self._skip(4))[0]
        return number

    def u64(self) -> int:
        number: int = U64.unpack_from(self.data, self._skip(8))[0]
        return number

    def flag(self) -> bool:
        value = self.u8()
        if value > 1:
            raise Refused(MALFORMED)
        return value == 1

    def text(self, size: int) -> str:
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError:
            raise Refused(MALFORMED) from None

    def name(self) -> str:
        size = self.u8()
        if size == 0:
            raise Refused(MALFORMED)
        return self.text(size)

    def str32(self) -> str:
        return self.text(self.u32())

    def ident(self) -> int | str:
        """Read an identifier: a name, or a number that counts from 0 or 1, as in the client's protocol version."""
        kind, size = self.u8(), self.u8()
        if kind == 1 and size == 4:
            return self.u32()
        if kind == 2 and size > 0:
            return self.text(size)
        raise Refused(MALFORMED)

    def number(self) -> int:
        """Read a number of a stream, topic or partition. Return it counted from 0.

        If the client counts from 1, the invalid value 0 becomes -1.
        """
        return self.u32() - self.dialect.base

    def partition(self) -> int | None:
        """Read a partition number. Return it counted from 0, or None if the request has none."""
        if self.dialect.optional_partition:
            given = self.flag()
            number = self.u32()
            return number if given else None
        number = self.u32()
        return None if number == 0 else number - self.dialect.base

    def consumer(self) -> Consumer:
        kind = self.u8()
        if kind not in (1, 2):
            raise Refused(MALFORMED)
        return Consumer(kind == 2, self.ident() if self.dialect.ident_consumers else self.u32())

    def group(self) -> int | str:
        """Read a group's identifier, which is a plain number in protocol versions whose groups have no names."""
        return self.ident() if self.dialect.named_groups else self.u32()

    def topic_fields(self, *, is_patch: bool = False) -> TopicFields:
        """Read the fields of a topic after its ids and partitions.

        ``is_patch``: whether the request changes only some fields (since protocol 0.12), so that the name may be empty.
        """
        layout = self.dialect.topic_settings
        if layout == 4:
            name = "" if is_patch and self.dialect.contexts and self._is_zero() else self.name()
            return TopicFields(name, options=bytes(self.take(self.left)))
        compression = self.u8() if layout >= 2 else 1
        if layout == 3:
            expiry = self.u64()
            expiry_us = None if expiry == 0 else 0 if expiry == 2**64 - 1 else expiry
        else:
            expiry_us = self.u32() * 1_000_000
        size_max = self.u64() if layout >= 1 else None
        replication = self.u8() if layout >= 1 else 1
        return TopicFields(self.name(), expiry_us, compression, size_max, replication)

    def _is_zero(self) -> bool:
        if not self.left or self.data[self.at]:
            return False
        self.at += 1
        return True

    def permissions(self) -> PermissionFlags | None:
        """Read a flag and, if it is set, the length of the permissions and the permissions. Return None otherwise."""
        if not self.flag():
            return None
        inner = Reader(self.take(self.u32()), self.dialect)
        everywhere = inner.flags(_PERMISSION_FLAGS)
        streams = []
        more = inner.flag()
        while more:
            stream, flags, topics = inner.u32(), inner.flags(_STREAM_FLAGS), []
            has_topic = inner.flag()
            while has_topic:
                topics.append((inner.u32(), inner.flags(_TOPIC_FLAGS)))
                has_topic = inner.flag()
            streams.append((stream, flags, tuple(topics)))
            more = inner.flag()
        return PermissionFlags(everywhere, tuple(streams))

    def flags(self, count: int) -> tuple[bool, ...]:
        """Read ``count`` bytes that are each 0 or 1."""
        return tuple(self.flag() for _ in range(count))


def name_bytes(name: str) -> bytes:
    """Encode a name with its length. Names above 255 bytes, which other protocols allow, are truncated."""
    encoded = name.encode()[:255]
    return bytes((len(encoded),)) + encoded


def str32_bytes(text: str) -> bytes:
    encoded = text.encode()
    return U32.pack(len(encoded)) + encoded


def permission_bytes(permissions: PermissionFlags | None) -> bytes:
    """Encode the permissions at the end of a user's details."""
    if permissions is None:
        return bytes(4)  # four zero bytes in place of the flag (spec: iggy#users-and-tokens)
    body = bytearray(permissions.everywhere)
    body.append(1 if permissions.streams else 0)
    for index, (stream, flags, topics) in enumerate(permissions.streams):
        body += U32.pack(stream) + bytes(flags)
        body.append(1 if topics else 0)
        for number, (topic, rights) in enumerate(topics):
            body += U32.pack(topic) + bytes(rights)
            body.append(1 if number + 1 < len(topics) else 0)
        body.append(1 if index + 1 < len(permissions.streams) else 0)
    return b"\x01" + U32.pack(len(body)) + body
