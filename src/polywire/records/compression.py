"""Compress and decompress the body of a stored batch as a whole, with lz4 or zstd (decision 0101).

Decompression never takes more memory than its limit, whatever size the bytes claim.
"""

from __future__ import annotations

from enum import Enum
from struct import pack_into
from typing import Final

import cramjam

from polywire.errors import ErrorCode, Invalid
from polywire.records.checksum import xxh64_at
from polywire.records.columns import BATCH_BYTES_MAX, HEADER_BYTES, BatchFlags
from polywire.records.header import check_body, check_header, read_header
from polywire.types import Buffer

ZSTD_LEVEL: Final = 1  # sealing must be as fast as producing; level 2 takes twice the time and saves only a few percent
_KINDS = int(BatchFlags.LZ4 | BatchFlags.ZSTD)


class Compression(Enum):
    """Compression of a batch's body: one lz4 block or one zstd frame, without a size prefix."""

    LZ4 = "lz4"
    ZSTD = "zstd"


def compress_body(batch: Buffer, kind: Compression) -> Buffer:
    """Return the batch with its body compressed. A batch that is compressed or would not shrink is returned unchanged.

    Raises:
        Invalid: INVALID_BATCH: the batch is truncated.
    """
    header = read_header(batch)
    if header.flags & _KINDS:
        return batch
    body = memoryview(batch).cast("B")[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
    if len(body) != header.body_bytes:
        raise Invalid(ErrorCode.INVALID_BATCH, f"batch is truncated size={len(batch)}")
    match kind:
        case Compression.LZ4:
            packed, flag = bytes(cramjam.lz4.compress_block(body, store_size=False)), BatchFlags.LZ4
        case Compression.ZSTD:
            packed, flag = bytes(cramjam.zstd.compress(body, level=ZSTD_LEVEL)), BatchFlags.ZSTD
    if len(packed) >= header.body_bytes:
        return batch
    return _with_body(batch, packed, header.flags | flag)


def expand_body(batch: Buffer, limit: int = BATCH_BYTES_MAX) -> Buffer:
    """Return the batch with its body decompressed. An uncompressed batch is returned unchanged and is not checked.

    Args:
        batch: the whole batch.
        limit: maximum size of the decompressed batch.

    Raises:
        Invalid: INVALID_BATCH: a checksum does not match, or the decompressed size differs from the header.
            RECORD_TOO_LARGE: above ``limit``.
    """
    header = read_header(batch)
    if not header.flags & _KINDS:
        return batch
    if not check_header(batch, 0) or not check_body(batch, 0):
        raise Invalid(ErrorCode.INVALID_BATCH, "invalid batch: a checksum does not match")
    if _length(header.body_bytes_raw) > min(limit, BATCH_BYTES_MAX):
        raise Invalid(
            ErrorCode.RECORD_TOO_LARGE, f"decompressed batch is too large bytes={header.body_bytes_raw} max={limit}"
        )
    body = memoryview(batch).cast("B")[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
    expanded = bytearray(header.body_bytes_raw)
    try:
        match header.flags & _KINDS:
            case BatchFlags.LZ4:
                size = cramjam.lz4.decompress_block_into(body, expanded, output_len=len(expanded))
            case BatchFlags.ZSTD:
                size = cramjam.zstd.decompress_into(body, expanded)
            case _:
                raise Invalid(ErrorCode.INVALID_BATCH, "invalid batch: unknown compression")
    except cramjam.DecompressionError as error:
        raise Invalid(
            ErrorCode.INVALID_BATCH, "invalid batch: cannot decompress the body to the size in the header"
        ) from error
    if size != len(expanded):
        raise Invalid(
            ErrorCode.INVALID_BATCH, f"invalid batch: decompressed body is smaller than the header says bytes={size}"
        )
    return _with_body(batch, expanded, header.flags & ~_KINDS)


def _length(body_bytes: int) -> int:
    return (HEADER_BYTES + body_bytes + 7) & ~7


def _with_body(batch: Buffer, body: Buffer, flags: int) -> bytearray:
    """Return the batch with another body and these flags. The field for the uncompressed size is unchanged."""
    result = bytearray(_length(len(body)))
    result[:HEADER_BYTES] = memoryview(batch).cast("B")[:HEADER_BYTES]
    result[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    pack_into("<II", result, 4, len(result), flags)
    pack_into("<I", result, 72, len(body))
    pack_into("<Q", result, 88, xxh64_at(result, HEADER_BYTES, HEADER_BYTES + len(body)))
    pack_into("<Q", result, 96, xxh64_at(result, 0, 96))
    return result
