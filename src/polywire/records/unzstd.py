"""Decompress zstd frames under limits (RFC 8878).

The headers of a frame and of its blocks contain the decompressed size and the window, so both are known before any data
is decompressed. The limits are those of ``records.inflate``.

    magic 4 | descriptor 1 | window 0-1 | dictionary 0-4 | content size 0-8 | blocks | checksum 0-4
    block: last 1 bit, type 2 bits, size 21 bits, then its bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import cramjam

from polywire.records.allocation import allocate
from polywire.records.inflate import Damaged, TooFar, parts_max
from polywire.types import Buffer

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


@dataclass(frozen=True, slots=True)
class _Head:
    """Header of a frame. content: decompressed size, None if not declared."""

    size: int
    window: int
    content: int | None
    checksum_bytes: int


@dataclass(frozen=True, slots=True)
class _Frame:
    """Position of a frame and its maximum decompressed size."""

    start: int
    stop: int
    capacity: int
    parts: int
    window: int


def unzstd(packed: Buffer, limit: int) -> memoryview:
    """Expand a frame, or several consecutive frames.

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
    """Return a frame whose window is at most as large as its content can be, because no match lies further back."""
    source = view[frame.start : frame.stop]
    if frame.window <= max(PLAIN_WINDOW_BYTES_MAX, size_max):
        return source
    lowered = bytearray(source)
    lowered[_WINDOW_AT] = max(size_max - 1, BLOCK_BYTES_MAX - 1).bit_length() - _WINDOW_LOG_MIN << 3
    return lowered


def _frames(view: memoryview, limit: int) -> list[_Frame]:
    """Return the positions of the frames; skippable frames are omitted. Raise Damaged or TooFar."""
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
        raise Damaged(f"the data has no zstd frame at this position position={start}")
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
    """Walk the blocks of a frame."""
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
