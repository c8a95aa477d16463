"""Fill the addresses whose records were removed by compaction (holes) in responses to FETCH (decision 0119).

A client computes the next address by adding the sizes of messages (spec: kafka-0.7#iterating). It can pass a hole only
if the response has as many bytes as the hole. There are three ways to fill a hole:

    kind      bytes                                                             the client gets   size
    filler    a gzip wrapper around nothing, before a real message              no message        30 bytes and more
    wrapper   a gzip wrapper around the messages after the hole, at least one   messages          compressed size and more
    blank     a plain message of zero bytes                                     a message         10 bytes and more

Wrappers are padded in the gzip header, which every gzip reader skips: ``1f 8b 08 flags 00000000 00 ff | extra field |
deflate blocks | u32 CRC-32 | u32 size`` (RFC 1952). An extra field has at most 65,535 bytes; longer padding uses empty
stored blocks.

Every response contains a message, because the iterator of Kafka's own 0.7 client requires one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from struct import Struct
from typing import Final

from polywire.protocols.kafka07 import encoder
from polywire.protocols.kafka07.messages import MAGIC_1, CompressionCodec, encode_message
from polywire.records.batch import address_of, record_at_address

FILLER_BYTES_MIN: Final = 30
BLANK_BYTES_MIN: Final = 10
# size of the addresses that one wrapper covers after a small hole, if messages are short
PACKED_BYTES_MAX: Final = 4 * 1024
# size limit of a message that is put in a wrapper because of a small hole before it
MESSAGE_BYTES_MAX: Final = 16 * 1024
STORED: Final = 0  # no compression; costs one copy, however long the message is
PACKED: Final = -1  # zlib's default compression

_GZIP_HEAD: Final = Struct("<BBBBIBB")
_GZIP_TAIL: Final = Struct("<II")
_U16: Final = Struct("<H")
_WRAPPED_BYTES: Final = 10 + _GZIP_HEAD.size + _GZIP_TAIL.size  # size of a wrapper without its deflate blocks
_EXTRA, _NAME = 4, 8  # flags of a gzip header
_EXTRA_BYTES_MAX: Final = 0xFFFF
_EMPTY_BLOCK: Final = b"\0\0\0\xff\xff"  # a stored block that is not the last one


def hole_at(batch: memoryview, address: int) -> tuple[int, int] | None:
    """Return (size of the gap left by compaction at a byte position, size of the record after it).

    Return None if there is no gap. The batch must have the record after the gap, and must not be compressed.
    """
    index = record_at_address(batch, address, covering=True)
    if index < 0:
        return None
    following = address_of(batch, index)
    size = bytearray(4)
    encoder.put_entries([batch], following, 4, size, 0)
    return following - address, 4 + int.from_bytes(size, "big")


def bridge(
    chunks: Sequence[memoryview], address: int, limit: int, *, hole: int, record_bytes: int, begun: bool
) -> bytes | None:
    """Return at most ``limit`` bytes of messages that fill the gap left by compaction at ``address``.

    Return None if that is impossible. Kafka 0.7 clients compute the next offset from the bytes received, so a gap must
    have as many bytes as were removed.

    Args:
        chunks: stored batches. The first one has the record after the gap.
        hole, record_bytes: the result of ``hole_at``.
        begun: whether the response already has messages. If so, it may end before the gap.
    """
    if hole + record_bytes <= limit:
        if hole >= FILLER_BYTES_MIN:
            return wrapper(b"", hole)
        if record_bytes > MESSAGE_BYTES_MAX:
            return _blank(hole)
        span = min(limit, max(hole + record_bytes, PACKED_BYTES_MAX))
        messages, end = _messages(chunks, address + hole, address + span)
        return wrapper(messages, end - address) or _blank(hole)
    if begun:
        return None
    if record_bytes > limit:  # the record is longer than the fetch size and is truncated, as without a hole
        return _cut(chunks[0], address + hole, limit)
    size = hole if hole <= limit else min(limit, hole - FILLER_BYTES_MIN)
    if size < BLANK_BYTES_MIN:  # the rest of the hole is too small for a message
        whole = _blank(hole)
        return None if whole is None else whole[:limit]
    if record_bytes > size:
        return _blank(size)
    message, _ = _messages(chunks, address + hole, address + hole + record_bytes)
    return _repeated(message, size, hole) or _blank(size)


def _repeated(message: bytes, size: int, hole: int) -> bytes | None:
    """Return the message after a gap, unchanged or in a compressed message of ``size`` bytes.

    Returns None if the rest of the gap could then not be filled.
    """
    packed = wrapper(message, size, level=STORED)
    if packed is None and len(message) <= MESSAGE_BYTES_MAX:
        packed = wrapper(message, size)
    if packed is None and (hole == len(message) or hole - len(message) >= FILLER_BYTES_MIN):
        return message
    return packed


def wrapper(message_set: bytes, size: int, *, level: int = PACKED) -> bytes | None:
    """Return a message set as one gzip message of ``size`` bytes, or None if that is too small."""
    packer = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
    blocks = packer.compress(message_set) + packer.flush()
    padding = size - _WRAPPED_BYTES - len(blocks)
    if padding < 0:
        return None
    flags, field = 0, b""
    if padding == 1:
        flags, field = _NAME, b"\0"
    elif padding > 1:
        empty_blocks = max(-(-(padding - _U16.size - _EXTRA_BYTES_MAX) // len(_EMPTY_BLOCK)), 0)
        extra_bytes = padding - _U16.size - empty_blocks * len(_EMPTY_BLOCK)
        flags, field = _EXTRA, _U16.pack(extra_bytes) + bytes(extra_bytes) + _EMPTY_BLOCK * empty_blocks
    head = _GZIP_HEAD.pack(0x1F, 0x8B, 8, flags, 0, 0, 0xFF)
    tail = _GZIP_TAIL.pack(zlib.crc32(message_set), len(message_set))
    return encode_message(head + field + blocks + tail, MAGIC_1, CompressionCodec.GZIP)


def _blank(size: int) -> bytes | None:
    """Return a message of ``size`` bytes with a value of zeros, or None if that is too small."""
    return encode_message(bytes(size - BLANK_BYTES_MIN)) if size >= BLANK_BYTES_MIN else None


def _messages(chunks: Sequence[memoryview], address: int, stop: int) -> tuple[bytes, int]:
    """Return the messages in the byte range [address, stop) without gaps, and the offset after the last one."""
    out = bytearray(stop - address)
    size, end = encoder.put_without_holes(chunks, address, stop - address, out)
    return bytes(out[:size]), end


def _cut(batch: memoryview, address: int, limit: int) -> bytes:
    """Return the first ``limit`` bytes of the message at the offset ``address``, which is longer."""
    out = bytearray(limit)
    encoder.put_entries([batch], address, limit, out, 0)
    return bytes(out)
