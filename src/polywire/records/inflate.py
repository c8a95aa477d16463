"""Decompress gzip streams and snappy blocks under a limit; clients compress with both (decision 0101).

* At most ``limit`` bytes are produced, whatever size the input claims.
* Time is limited, too: each gzip member or snappy block counts as at least ``PART_BYTES_MIN`` bytes.
* The GIL is released.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

import cramjam

from polywire.records.allocation import allocate
from polywire.types import Buffer

PART_BYTES_MIN: Final = 1024  # minimum charge for a gzip member or snappy block; each costs some 5 µs
PARTS_MIN: Final = 16  # this many parts are always allowed
XERIAL_MAGIC: Final = b"\x82SNAPPY\0"
XERIAL_HEAD: Final = XERIAL_MAGIC + b"\0\0\0\x01\0\0\0\x01"

_PIECE_BYTES: Final = 64 * 1024  # bytes passed to zlib at a time, because zlib copies input that it has not consumed
_FOUND_BYTES: Final = 1024 * 1024  # bytes taken from zlib at a time, because the copy holds the GIL
_GZIP: Final = 16 + zlib.MAX_WBITS
_SNAPPY_RATIO_MAX: Final = 22  # a copy of 64 bytes is encoded in three, so no valid block expands further


class Damaged(Exception):
    """The input is invalid or truncated."""


class TooFar(Exception):
    """The input expands beyond the limit."""


def gunzip(packed: Buffer, limit: int) -> bytearray:
    """Expand a gzip stream, or several in a row; raise Damaged, or TooFar above ``limit`` bytes."""
    view = memoryview(packed).cast("B")
    out = bytearray()
    member, left = zlib.decompressobj(_GZIP), parts_max(limit)
    # the last piece may be empty: it flushes the output that zlib still buffers
    for at in range(0, len(view) + 1, _PIECE_BYTES):
        rest: Buffer = view[at : at + _PIECE_BYTES]
        found = b"\0"
        while len(rest) or (found and not member.eof):
            if member.eof:
                member, left = zlib.decompressobj(_GZIP), left - 1
            try:
                found = member.decompress(rest, min(_FOUND_BYTES, limit + 1 - len(out)))
            except zlib.error as error:
                raise Damaged(str(error)) from None
            out += found
            if len(out) > limit or left < 0:
                raise TooFar
            rest = member.unused_data or member.unconsumed_tail
    if not member.eof:
        raise Damaged("the gzip stream is truncated")
    return out


def parts_max(limit: int) -> int:
    """Return the limit on the number of parts for an output of ``limit`` bytes."""
    return PARTS_MIN + limit // PART_BYTES_MIN


def unsnap(block: Buffer, limit: int) -> memoryview:
    """Expand a raw snappy block; raise Damaged, or TooFar above ``limit`` bytes."""
    return _unsnap([memoryview(block).cast("B")], limit)


def unsnap_stream(packed: Buffer, limit: int) -> memoryview:
    """Expand a snappy-java stream: a header, then blocks with their lengths.

    Raises Damaged, or TooFar above ``limit`` bytes.
    """
    view = memoryview(packed).cast("B")
    return _unsnap(list(_blocks(view, parts_max(limit))), limit)


def _blocks(view: memoryview, count_max: int) -> Iterator[memoryview]:
    at = len(XERIAL_HEAD)
    count = 0
    if len(view) < at:
        raise Damaged("the header of the snappy stream is truncated")
    while at < len(view):
        end = at + 4 + int.from_bytes(view[at : at + 4], "big")
        if end > len(view) or end <= at + 4:
            raise Damaged("a snappy block is truncated")
        count += 1
        if count > count_max:
            raise TooFar
        yield view[at + 4 : end]
        at = end


def _unsnap(blocks: list[memoryview], limit: int) -> memoryview:
    """Expand blocks into one buffer, whose size is the sum of the sizes in the blocks' headers."""
    if not all(map(len, blocks)):
        raise Damaged("a snappy block is empty")
    try:
        sizes = [cramjam.snappy.decompress_raw_len(block) for block in blocks]
        if sum(sizes) > limit:
            raise TooFar
        if any(size > _SNAPPY_RATIO_MAX * len(block) for block, size in zip(blocks, sizes, strict=True)):
            raise Damaged("a snappy block is too short for its declared size")
        out = memoryview(allocate(sum(sizes)))
        at = 0
        for block, size in zip(blocks, sizes, strict=True):
            if size and cramjam.snappy.decompress_raw_into(block, out[at : at + size]) != size:
                raise Damaged("a snappy block expands to less than its declared size")
            at += size
    except cramjam.DecompressionError as error:
        raise Damaged(str(error)) from None
    return out
