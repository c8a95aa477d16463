"""Encode and decode frames of the `polywire` protocol (spec: polywire#opening, polywire#frames, polywire#limits).

A frame has a prefix, a head and a payload. An invalid frame raises PeerError(fatal=True), an invalid head
PeerError(fatal=False). Payloads are never copied.
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar

import msgspec

from polywire.errors import PeerError
from polywire.protocols.polywire.messages import REQUESTS, Head
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.types import Buffer

# A zero byte, with which no other protocol begins; then the name; then the version, big-endian (spec: polywire#opening)
NAME: Final = b"\xf1PWIRE"
VERSION: Final = 1
MAGIC: Final = NAME + VERSION.to_bytes(2, "big")

# u32 length · u8 verb · u8 flags · u16 zero · u32 correlation · u32 head_bytes (spec: polywire#frames)
PREFIX: Final = struct.Struct("<IBBHII")
PREFIX_BYTES: Final = PREFIX.size

MORE: Final = 1
ERROR: Final = 2

HEAD_BYTES_MAX: Final = 1 << 20  # fits 1,000 names of 511 bytes, or 10,000 tokens
FRAME_BYTES_MAX: Final = BATCH_BYTES_MAX + 4096 + HEAD_BYTES_MAX  # fits one batch of maximum size and its head: 17 MiB
# Payload of a FETCH frame: large enough that the cost of a frame does not matter, small enough that connections take
# turns
ANSWER_BYTES_MAX: Final = 4 << 20
# Limits of a client for the broker's frames: heads with half a million partitions, and any valid payload
ANSWER_HEAD_BYTES_MAX: Final = 64 << 20
ANSWER_FRAME_BYTES_MAX: Final = ANSWER_HEAD_BYTES_MAX + (64 << 20)

_encoder = msgspec.msgpack.Encoder()
_requests: Final = {verb: msgspec.msgpack.Decoder(head) for verb, head in REQUESTS.items()}

_H = TypeVar("_H", bound=Head)


class Prefix(msgspec.Struct, frozen=True, gc=False):  # made in a third of the time of a named tuple
    """The first 16 bytes of a frame, before its header and payload."""

    length: int
    verb: int
    flags: int
    correlation: int
    head_bytes: int


NO_PREFIX: Final = Prefix(0, 0, 0, 0, 0)
"""Stands for the prefix of a frame before the first one was received."""


def decode_prefix(
    data: Buffer, at: int = 0, *, length_max: int = FRAME_BYTES_MAX, head_bytes_max: int = HEAD_BYTES_MAX
) -> Prefix:
    """Decode the prefix of the frame at ``at``. By default, the limits are those for requests.

    Raises PeerError(fatal=True) if it is invalid.
    """
    length, verb, flags, zero, correlation, head_bytes = PREFIX.unpack_from(data, at)
    if head_bytes > length or zero != 0 or flags > (MORE | ERROR):
        raise PeerError(
            f"invalid frame prefix verb={verb} flags={flags} length={length} head_bytes={head_bytes}", fatal=True
        )
    if length > length_max or head_bytes > head_bytes_max:
        raise PeerError(
            f"frame is too long length={length} length_max={length_max} head_bytes={head_bytes} "
            f"head_bytes_max={head_bytes_max}",
            fatal=True,
        )
    return Prefix(length, verb, flags, correlation, head_bytes)


def decode_answer_prefix(data: Buffer, at: int = 0) -> Prefix:
    """Decode the prefix of a response. Raises PeerError(fatal=True) if it is invalid."""
    return decode_prefix(data, at, length_max=ANSWER_FRAME_BYTES_MAX, head_bytes_max=ANSWER_HEAD_BYTES_MAX)


def decode_request(verb: int, head: Buffer) -> Head:
    """Decode the header of a request. Raises PeerError(fatal=False) for an unknown verb or an invalid header."""
    decoder = _requests.get(verb)
    if decoder is None:
        raise PeerError(f"unknown verb verb={verb}", fatal=False)
    try:
        return decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"request has an invalid head verb={verb} reason={error}", fatal=False) from None


def decode_answer(head: Buffer, kind: type[_H]) -> _H:
    """Decode the header of a response. Raises PeerError(fatal=True) if it is malformed: the client cannot continue."""
    try:
        return msgspec.msgpack.decode(head, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"response has an invalid head kind={kind.__name__} reason={error}", fatal=True) from None


def encode_head(verb: int, correlation: int, head: Head, *, payload_bytes: int = 0, flags: int = 0) -> bytes:
    """Return the prefix and the header of a frame.

    The caller sends the payload of ``payload_bytes`` bytes after them.
    """
    body = _encoder.encode(head)
    return PREFIX.pack(len(body) + payload_bytes, verb, flags, 0, correlation, len(body)) + body
