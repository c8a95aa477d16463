"""Read and write the values of which Iggy's requests and replies consist, in all dialects.

See ``reader`` for the values of requests.

(spec: iggy#shared-encodings, iggy#d0-requests, iggy#d0-replies)
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

import msgspec

from polywire.errors import BrokerError, ErrorCode

WIRE: Final = "iggy"
REFUSED: Final = "refused number="  # begins the message of ``Refused``
MALFORMED: Final = 3  # the error "invalid command", for bytes that cannot be decoded
NO_PARTITION: Final = 2**32 - 1

U32: Final = Struct("<I")
U64: Final = Struct("<Q")
HEAD: Final = Struct("<II")
NO_OPTIONS: Final = bytes(4)  # an empty block: its length is 0


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
