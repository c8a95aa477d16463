"""Compress and decompress record batches.

Decompression never produces more bytes than its limit, whatever size the input claims. It releases the GIL.

An lz4 frame, with sizes in bytes::

    magic 4 | flags 1 | block size 1 | content size 0 or 8 | dictionary id 0 or 4 | header checksum 1 | blocks |
    zeros 4 | content checksum 0 or 4
    block: size 4 (its highest bit means: not compressed) | data | checksum 0 or 4
"""

from __future__ import annotations

import gzip
from typing import Final

import cramjam

from polywire.protocols.kafka.decoder import BATCH_HEAD_BYTES, BatchHead, Built, build, check_batch
from polywire.protocols.kafka.messages import Codec, Refused, WireError
from polywire.records.allocation import allocate
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.records.inflate import (
    XERIAL_HEAD,
    XERIAL_MAGIC,
    Damaged,
    TooFar,
    gunzip,
    parts_max,
    unsnap,
    unsnap_stream,
    unzstd,
)
from polywire.types import Buffer

# limit for a batch's records after decompression; the maximum of a stored batch
EXPANDED_BYTES_MAX: Final = BATCH_BYTES_MAX

_LZ4_MAGIC: Final = b"\x04\x22\x4d\x18"
_LZ4_BLOCK_BYTES: Final = {4: 64 * 1024, 5: 256 * 1024, 6: 1024 * 1024, 7: 4 * 1024 * 1024}
_LZ4_HEAD: Final = _LZ4_MAGIC + b"\x60\x40\x82"  # independent blocks of up to 64 KiB, and the checksum of these flags
_LZ4_RATIO_MAX: Final = 255
_XERIAL_BLOCK_BYTES: Final = 32 * 1024


def decode_batch(records: Buffer | None, *, bytes_max: int, keep_times: bool = True) -> tuple[BatchHead, Built]:
    """Decode the record batch of a partition in a PRODUCE request into a stored batch.

    ``bytes_max`` limits the size of the batch before decompression. Raises Refused for an invalid batch.
    """
    head = check_batch(records, bytes_max=bytes_max)
    assert records is not None, "check_batch rejects a missing batch"
    if not head.codec:
        return head, build(records, BATCH_HEAD_BYTES, head.end, head, keep_times=keep_times)
    plain = expand(memoryview(records).cast("B")[BATCH_HEAD_BYTES : head.end], Codec(head.codec))
    return head, build(plain, 0, len(plain), head, keep_times=keep_times)


def expand(packed: Buffer, codec: Codec, limit: int = EXPANDED_BYTES_MAX) -> Buffer:
    """Decompress bytes.

    Raises Refused: INVALID_RECORD for damaged bytes, and MESSAGE_TOO_LARGE if the result is larger than ``limit``.
    """
    try:
        match codec:
            case Codec.NONE:
                return packed
            case Codec.GZIP:
                return gunzip(packed, limit)
            case Codec.SNAPPY:
                framed = bytes(memoryview(packed).cast("B")[: len(XERIAL_MAGIC)]) == XERIAL_MAGIC
                return unsnap_stream(packed, limit) if framed else unsnap(packed, limit)
            case Codec.LZ4:
                return _unlz4(packed, limit)
            case Codec.ZSTD:
                return unzstd(packed, limit)
    except Damaged as error:
        message = f"records cannot be decompressed codec={codec.name.lower()} reason={error}"
        raise Refused(WireError.INVALID_RECORD, message) from None
    except TooFar:
        message = f"decompressed records are too large codec={codec.name.lower()} limit={limit}"
        raise Refused(WireError.MESSAGE_TOO_LARGE, message) from None


def compress(plain: Buffer, codec: Codec) -> Buffer:
    """Compress records as Kafka clients do."""
    match codec:
        case Codec.NONE:
            return plain
        case Codec.GZIP:
            return gzip.compress(plain, compresslevel=6, mtime=0)
        case Codec.SNAPPY:
            view, packed = memoryview(plain).cast("B"), bytearray(XERIAL_HEAD)
            for at in range(0, len(view), _XERIAL_BLOCK_BYTES):
                block = bytes(cramjam.snappy.compress_raw(view[at : at + _XERIAL_BLOCK_BYTES]))
                packed += len(block).to_bytes(4, "big") + block
            return packed
        case Codec.LZ4:
            return _lz4(memoryview(plain).cast("B"))
        case Codec.ZSTD:
            return bytes(cramjam.zstd.compress(plain))


def _lz4(plain: memoryview) -> bytes:
    """Return one LZ4 frame of independent blocks, because Kafka brokers reject frames whose blocks depend on others."""
    packed = bytearray(_LZ4_HEAD)
    for at in range(0, len(plain), _LZ4_BLOCK_BYTES[4]):
        block = plain[at : at + _LZ4_BLOCK_BYTES[4]]
        shorter = bytes(cramjam.lz4.compress_block(block, store_size=False))
        if len(shorter) < len(block):
            packed += len(shorter).to_bytes(4, "little") + shorter
        else:
            packed += (len(block) | 1 << 31).to_bytes(4, "little") + block
    return bytes(packed + bytes(4))


def _unlz4(packed: Buffer, limit: int) -> Buffer:
    """Decompress consecutive LZ4 frames.

    Raises Damaged for damaged frames, and TooFar if the result is larger than ``limit``.
    """
    view = memoryview(packed).cast("B")
    frames: list[tuple[int, int, int]] = []
    at, parts = 0, parts_max(limit)
    while at < len(view) or not frames:
        parts -= 1
        if parts < 0:
            raise TooFar
        end, size, blocks = _lz4_frame(view, at, parts)
        frames.append((at, end, size))
        at, parts = end, parts - blocks
    out = memoryview(allocate(min(sum(size for _, _, size in frames), limit)))
    filled = 0
    for start, end, size in frames:
        place = out[filled : filled + size]
        try:
            filled += cramjam.lz4.decompress_into(view[start:end], place)
        except cramjam.DecompressionError as error:
            if len(place) < size:
                raise TooFar from None
            raise Damaged(str(error)) from None
    return out[:filled]


def _lz4_frame(view: memoryview, start: int, parts: int) -> tuple[int, int, int]:
    """Return the end of an LZ4 frame, its maximum decompressed size and its number of blocks.

    Raises Damaged for a damaged frame, and TooFar if it has more than ``parts`` blocks.
    """
    if len(view) - start < 7 or bytes(view[start : start + 4]) != _LZ4_MAGIC:
        raise Damaged("not an LZ4 frame")
    flags, block_bytes = view[start + 4], _LZ4_BLOCK_BYTES.get(view[start + 5] >> 4 & 7, 0)
    if flags >> 6 != 1 or not block_bytes or flags & 1:
        raise Damaged("unsupported kind of LZ4 frame")
    at = start + 7 + (8 if flags & 8 else 0)
    size = count = 0
    while True:
        if len(view) - at < 4:
            raise Damaged("a frame ends early")
        block = int.from_bytes(view[at : at + 4], "little")
        at += 4
        if block == 0:
            break
        count += 1
        if count > parts:
            raise TooFar
        length = block & 0x7FFFFFFF
        size += length if block >> 31 else min(block_bytes, _LZ4_RATIO_MAX * length)
        at += length + (4 if flags & 16 else 0)
    at += 4 if flags & 4 else 0
    if at > len(view):
        raise Damaged("a frame ends early")
    if flags & 8:
        size = min(size, int.from_bytes(view[start + 6 : start + 14], "little"))
    return at, size, count
