"""Decompress the gzip streams, snappy blocks and zstd frames of clients, under limits (decision 0101).

* At most ``limit`` bytes are produced, whatever size the input claims.
* Time is limited, too: each gzip member or snappy block counts as at least ``PART_BYTES_MIN`` bytes.
* The GIL is released.

The headers of a zstd frame and of its blocks (RFC 8878) contain the decompressed size and the window, so both are known
before any data is decompressed:

    magic 4 | descriptor 1 | window 0-1 | dictionary 0-4 | content size 0-8 | blocks | checksum 0-4
    block: last 1 bit, type 2 bits, size 21 bits, then its bytes
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

import cramjam
import msgspec

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
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
WINDOW_BYTES_MAX: Final = (
    128 * 1024 * 1024
)  # the default limit of libzstd; streaming clients declare it at levels 20 to 22
# decoders allocate the declared window, so an unnecessarily large one is reduced first
PLAIN_WINDOW_BYTES_MAX: Final = 8 * 1024 * 1024
BLOCK_BYTES_MAX: Final = 128 * 1024  # expanded size of a block
_WINDOW_AT: Final = 5  # position of the window in a frame
_WINDOW_LOG_MIN: Final = 10
_SKIPPABLE: Final = b"\x2a\x4d\x18"  # follows a byte from 50 to 5f
_DICTIONARY_BYTES: Final = (0, 1, 2, 4)
_CONTENT_BYTES: Final = (0, 2, 4, 8)
_RAW, _REPEATED, _COMPRESSED = 0, 1, 2  # types of blocks


class Damaged(Exception):
    """The input is invalid or truncated."""


class TooFar(Exception):
    """The output exceeds the limit."""


def gunzip(packed: Buffer, limit: int) -> bytearray:
    """Expand a gzip stream, or several in a row. Raises Damaged, or TooFar above ``limit`` bytes."""
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
    """Return the maximum number of gzip members or snappy blocks for an output of ``limit`` bytes."""
    return PARTS_MIN + limit // PART_BYTES_MIN


def unsnap(block: Buffer, limit: int) -> memoryview:
    """Expand a raw snappy block. Raises Damaged, or TooFar above ``limit`` bytes."""
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
    """Expand blocks into one buffer. Its size is the sum of the sizes in the blocks' headers."""
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


class _Head(msgspec.Struct, frozen=True):
    """The header of a zstd frame.

    Attributes:
        size: size of the header in bytes.
        content: decompressed size of the frame, None if the header does not contain it.
    """

    size: int
    window: int
    content: int | None
    checksum_bytes: int


class _Frame(msgspec.Struct, frozen=True):
    start: int
    stop: int
    capacity: int
    parts: int
    window: int


def unzstd(packed: Buffer, limit: int) -> memoryview:
    """Expand a zstd frame, or several consecutive frames.

    Raises:
        Damaged: the input is invalid or truncated.
        TooFar: the input expands beyond ``limit`` bytes, needs a larger window than allowed, or has too many small
            parts.
    """
    view = memoryview(packed).cast("B")
    frames = _frames(view, limit)
    size = sum(frame.capacity for frame in frames)
    out = memoryview(allocate(min(size, limit)))
    at = 0
    for frame in frames:
        target = out[at : at + frame.capacity]
        try:
            at += cramjam.zstd.decompress_into(_source(view, frame, min(frame.capacity, limit)), target)
        except cramjam.DecompressionError as error:
            if len(target) < frame.capacity and "whole buffer" in str(error):
                raise TooFar from None
            raise Damaged(str(error)) from None
    return out[:at]


def _source(view: memoryview, frame: _Frame, size_max: int) -> Buffer:
    """Return the bytes of a zstd frame. Its window size is reduced to its content size if it is larger."""
    source = view[frame.start : frame.stop]
    if frame.window <= max(PLAIN_WINDOW_BYTES_MAX, size_max):
        return source
    lowered = bytearray(source)
    lowered[_WINDOW_AT] = max(size_max - 1, BLOCK_BYTES_MAX - 1).bit_length() - _WINDOW_LOG_MIN << 3
    return lowered


def _frames(view: memoryview, limit: int) -> list[_Frame]:
    """Return the frames of a stream, without skippable ones. Raises Damaged or TooFar."""
    at, announced, left = 0, 0, parts_max(limit)
    found: list[_Frame] = []
    while at < len(view):
        left -= 1
        if left < 0:
            raise TooFar
        if bytes(view[at + 1 : at + 4]) == _SKIPPABLE and view[at] & 0xF0 == 0x50:
            at = _behind(view, at + 8 + _number(view, at + 4, 4))
            continue
        head = _head(view, at)
        if head.window > WINDOW_BYTES_MAX:
            raise TooFar
        frame = _frame(view, at, head, left)
        announced += head.content or 0
        if announced > limit:
            raise TooFar
        found.append(frame)
        at, left = frame.stop, left - frame.parts
    if not found:
        raise Damaged("the data has no zstd frame")
    return found


def _head(view: memoryview, start: int) -> _Head:
    if bytes(view[start : start + 4]) != ZSTD_MAGIC:
        raise Damaged(f"expected a zstd frame position={start}")
    descriptor = _number(view, start + 4, 1)
    if descriptor & 0x08:
        raise Damaged("a reserved bit of a zstd frame is set")
    at, window, single = start + _WINDOW_AT, 0, bool(descriptor & 0x20)
    if not single:
        code = _number(view, at, 1)
        window = (8 + (code & 7)) << (7 + (code >> 3))
        at += 1
    dictionary_bytes = _DICTIONARY_BYTES[descriptor & 3]
    if _number(view, at, dictionary_bytes):
        raise Damaged("a zstd frame needs a dictionary, which is not supported")
    at += dictionary_bytes
    content, content_bytes = None, _CONTENT_BYTES[descriptor >> 6] or int(single)
    if content_bytes:
        content = _number(view, at, content_bytes) + (256 if content_bytes == 2 else 0)
    return _Head(at + content_bytes - start, content or 0 if single else window, content, descriptor & 4)


def _frame(view: memoryview, start: int, head: _Head, parts: int) -> _Frame:
    """Parse the headers of a zstd frame's blocks to find the end of the frame and its maximum decompressed size."""
    at, size, count, is_last = start + head.size, 0, 0, False
    while not is_last:
        count += 1
        if count > parts:
            raise TooFar
        block = _number(view, at, 3)
        is_last, kind, length = bool(block & 1), block >> 1 & 3, block >> 3
        if kind > _COMPRESSED or length > BLOCK_BYTES_MAX:
            raise Damaged("a zstd block has an invalid type")
        size += BLOCK_BYTES_MAX if kind == _COMPRESSED else length
        at = _behind(view, at + 3 + (1 if kind == _REPEATED else length))
    if head.content is not None and head.content > size:
        raise Damaged("a zstd frame is too short for its declared size")
    capacity = size if head.content is None else head.content
    return _Frame(start, _behind(view, at + head.checksum_bytes), capacity, count, head.window)


def _number(view: memoryview, at: int, size: int) -> int:
    _behind(view, at + size)
    return int.from_bytes(view[at : at + size], "little")


def _behind(view: memoryview, at: int) -> int:
    if at > len(view):
        raise Damaged("a zstd frame is truncated")
    return at
