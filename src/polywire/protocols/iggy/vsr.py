"""Frames of current Iggy dialects: a header of 256 bytes and a body (spec: iggy#d3-frames, iggy#d3-operations).

A header is validated before its fields are used. As in Iggy's server, replies repeat some fields of the request.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import msgspec

from polywire.protocols.iggy.messages import Code

HEADER_BYTES: Final = 256
REQUEST: Final = 5
REPLY: Final = 8
EVICTION: Final = 13
REGISTER: Final = 1
PLAIN: Final = 2  # the operation of all commands that are identified by their code
LOG_OUT: Final = 3
UPDATE: Final = 150  # since 0.12; it stands for several commands
SEND: Final = 160
COMMITTED: Final = 1  # at position 220 of a reply: the reply is final

# Every command that changes state has its own operation.
OPERATIONS: Final[dict[int, Code]] = {
    LOG_OUT: Code.LOGOUT,
    128: Code.CREATE_STREAM,
    129: Code.UPDATE_STREAM,
    130: Code.DELETE_STREAM,
    131: Code.PURGE_STREAM,
    132: Code.CREATE_TOPIC,
    133: Code.UPDATE_TOPIC,
    134: Code.DELETE_TOPIC,
    135: Code.PURGE_TOPIC,
    136: Code.CREATE_PARTITIONS,
    137: Code.DELETE_PARTITIONS,
    138: Code.DELETE_SEGMENTS,
    139: Code.CREATE_GROUP,
    140: Code.DELETE_GROUP,
    141: Code.CREATE_USER,
    142: Code.UPDATE_USER,
    143: Code.DELETE_USER,
    144: Code.CHANGE_PASSWORD,
    145: Code.UPDATE_PERMISSIONS,
    146: Code.CREATE_TOKEN,
    147: Code.DELETE_TOKEN,
    148: Code.JOIN_GROUP,
    149: Code.LEAVE_GROUP,
    SEND: Code.SEND,
    161: Code.STORE_OFFSET,
    162: Code.DELETE_OFFSET,
}

EVICT_NO_LOGIN: Final = 1
EVICT_UNKNOWN: Final = 4
EVICT_CREDENTIALS: Final = 9
EVICT_TOKEN: Final = 10
EVICT_BUSY: Final = 12
EVICT_VERSION: Final = 14
EVICT_LOGIN: Final = 15

_FRAME: Final = Struct("<48xI8xB")
_FIELDS: Final = Struct("<16s16sQQB7xQIIQ")
_REPLY: Final = Struct("<48xI8xB67x16s16x16sQQQQB7xIB3xQ24x")
_EVICTION: Final = Struct("<48xI8xB67x16sII103xB")


class Head(msgspec.Struct, frozen=True):
    """The fields of a request's header that the broker uses.

    Attributes:
        incarnation: the partition's incarnation number in the request; 0 if it has none.
    """

    size: int
    command: int
    client: bytes
    checksum: bytes
    timestamp: int
    number: int
    operation: int
    epoch: int
    code: int
    incarnation: int

    @property
    def has_result(self) -> bool:
        """Whether the reply begins with an error number."""
        return self.operation >= 128 and self.operation != SEND

    @property
    def changes_metadata(self) -> bool:
        """Whether the request changes streams, topics or partitions.

        The reply then has the number of the metadata change, which clients compare with that in later replies.
        """
        return self.operation != PLAIN and self.operation < SEND


def parse_head(data: memoryview) -> Head:
    """Decode the header at the start of ``data``, which must have at least its size."""
    size, command = _FRAME.unpack_from(data)
    client, checksum, timestamp, number, operation, epoch, _, code, incarnation = _FIELDS.unpack_from(data, 128)
    return Head(size, command, client, checksum, timestamp, number, operation, epoch, code, incarnation)


def reply_head(head: Head, position: int, size: int, status: int, *, committed: int = 0, incarnation: int = 0) -> bytes:
    """Encode the header of the reply to the request with the header ``head``.

    The body has ``size`` bytes. ``position`` must increase with each change.
    """
    return _REPLY.pack(
        HEADER_BYTES + size,
        REPLY,
        head.checksum,
        head.client,
        position,
        position,
        head.timestamp,
        head.number,
        head.operation,
        status,
        committed,
        incarnation,
    )


def eviction(client: bytes, reason: int, protocols: tuple[int, int] = (0, 0)) -> bytes:
    """Encode the message that ends a login and its connection.

    ``protocols`` has the lowest and the highest accepted version, if the reason is an unsupported version.
    """
    lowest, highest = protocols
    return _EVICTION.pack(HEADER_BYTES, EVICTION, client, highest, lowest, reason)
