"""Gzip streams and blocks of snappy, under a limit: the ways in which peers compress what they send (decision 0001 opens it on arrival).

Promises: never more than the limit is expanded, whatever the bytes claim; the time that is taken is bounded by the limit too, because the
smallest part counts as ``PART_BYTES_MIN``; other threads go on meanwhile. Must not know: what is expanded.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

import cramjam

from polywire.records.allocation import allocate
from polywire.types import Buffer

PART_BYTES_MIN: Final = 1024  # what a member of a gzip stream, or a block of snappy, counts as: some 5 µs each
PARTS_MIN: Final = 16  # so many are always allowed
XERIAL_MAGIC: Final = b"\x82SNAPPY\0"
XERIAL_HEAD: Final = XERIAL_MAGIC + b"\0\0\0\x01\0\0\0\x01"

_PIECE_BYTES: Final = 64 * 1024  # given to zlib at a time: it copies what is left of a piece
_FOUND_BYTES: Final = 1024 * 1024  # taken from zlib at a time: nobody else's Python runs while that is copied
_GZIP: Final = 16 + zlib.MAX_WBITS
_SNAPPY_RATIO_MAX: Final = 22  # a copy of 64 bytes takes three: no sound block expands further


class Damaged(Exception):
    """The bytes are not what they should be, or end early."""


class TooFar(Exception):
    """They expand to more than was allowed."""


def gunzip(packed: Buffer, limit: int) -> bytearray:
    """One gzip stream, or several in a row. Raises Damaged, TooFar above ``limit`` bytes."""
    view = memoryview(packed).cast("B")
    out = bytearray()
    member, left = zlib.decompressobj(_GZIP), parts_max(limit)
    for at in range(0, len(view) + 1, _PIECE_BYTES):  # the last may be empty: what zlib still holds is got out of it
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
        raise Damaged("the stream ends early")
    return out


def parts_max(limit: int) -> int:
    """Into how many parts so much may be cut."""
    return PARTS_MIN + limit // PART_BYTES_MIN


def unsnap(block: Buffer, limit: int) -> memoryview:
    """One raw block of snappy. Raises Damaged, TooFar above ``limit`` bytes."""
    return _unsnap([memoryview(block).cast("B")], limit)


def unsnap_stream(packed: Buffer, limit: int) -> memoryview:
    """Blocks with their lengths, as snappy-java writes them behind a head of its own. Raises Damaged, TooFar above ``limit`` bytes."""
    view = memoryview(packed).cast("B")
    return _unsnap(list(_blocks(view, parts_max(limit))), limit)


def _blocks(view: memoryview, count_max: int) -> Iterator[memoryview]:
    at = len(XERIAL_HEAD)
    count = 0
    if len(view) < at:
        raise Damaged("the head ends early")
    while at < len(view):
        end = at + 4 + int.from_bytes(view[at : at + 4], "big")
        if end > len(view) or end <= at + 4:
            raise Damaged("a block ends early")
        count += 1
        if count > count_max:
            raise TooFar
        yield view[at + 4 : end]
        at = end


def _unsnap(blocks: list[memoryview], limit: int) -> memoryview:
    """Expand blocks. Their sizes are read first, so that memory is allocated once; an empty block has none."""
    if not all(map(len, blocks)):
        raise Damaged("a block is empty")
    try:
        sizes = [cramjam.snappy.decompress_raw_len(block) for block in blocks]
        if sum(sizes) > limit:
            raise TooFar
        if any(size > _SNAPPY_RATIO_MAX * len(block) for block, size in zip(blocks, sizes, strict=True)):
            raise Damaged("a block is too short for what it claims")
        out = memoryview(allocate(sum(sizes)))
        at = 0
        for block, size in zip(blocks, sizes, strict=True):
            if size and cramjam.snappy.decompress_raw_into(block, out[at : at + size]) != size:
                raise Damaged("a block expands to less than it claims")
            at += size
    except cramjam.DecompressionError as error:
        raise Damaged(str(error)) from None
    return out
