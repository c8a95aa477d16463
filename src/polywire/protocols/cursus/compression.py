"""Detect and decompress compressed frames (spec: cursus#compression).

A decompressed frame never exceeds its limit, whatever size it claims. Further algorithms can be registered.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Final

import cramjam
import msgspec

from polywire.errors import ErrorCode, Invalid, PeerError
from polywire.records.allocation import MAPPED_BYTES_MIN, allocate
from polywire.records.inflate import (
    XERIAL_HEAD,
    XERIAL_MAGIC,
    ZSTD_MAGIC,
    Damaged,
    TooFar,
    gunzip,
    unsnap,
    unsnap_stream,
    unzstd,
)

Expand = Callable[[memoryview, int], bytes | bytearray | memoryview]
"""    Decompresses a frame to at most ``limit`` bytes.

Raises TooLarge if the frame is larger, and PeerError for damaged input. It is first called on the event loop with a
small limit, then, for a long frame, in a thread.
"""

Compress = Callable[[bytes], bytes]

LZ4_BUFFER_BYTES: Final = 256 * 1024  # size of the first buffer for a frame that does not declare its size
LZ4_GROWTH: Final = 8  # the first buffer has at least this many times the size of the compressed frame
MAGIC_BYTES_MAX: Final = 16
ZSTD_LEVEL: Final = 3  # zstd's default
_GZIP: Final = 31  # zlib's code for the gzip format


class TooLarge(PeerError):
    """The frame has too many bytes after decompression."""


class Algorithm(msgspec.Struct, frozen=True):
    """A compression algorithm.

    Attributes:
        magic: the first bytes of every compressed frame. If it is empty, compressed frames cannot be detected, and the
            listener must be configured for this algorithm.
    """

    name: str
    expand: Expand
    compress: Compress
    magic: bytes = b""


_algorithms: dict[str, Algorithm] = {}
_openings: set[bytes] = set()  # the first bytes of all magics


def register(algorithm: Algorithm) -> None:
    """Add or replace an algorithm.

    The first bytes of its compressed frames must not begin a batch, command or envelope (spec: cursus#compression).
    Therefore, its magic needs at least two bytes. The first two must be above 00 F9, and must not be two letters or BA
    7C. Raises Invalid(INVALID_REQUEST) for any other magic.
    """
    magic = algorithm.magic
    opening = magic[:2]
    if magic and (
        not 2 <= len(magic) <= MAGIC_BYTES_MAX or opening <= b"\x00\xf9" or opening.isalpha() or opening == b"\xba\x7c"
    ):
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"magic is ambiguous: uncompressed frames can begin with it magic={magic.hex()}"
        )
    if not algorithm.name:
        raise Invalid(ErrorCode.INVALID_REQUEST, "the algorithm needs a name")
    _algorithms[algorithm.name] = algorithm
    _openings.add(magic[:1])


def algorithm(name: str) -> Algorithm:
    found = _algorithms.get(name)
    if found is None:
        known = ",".join(sorted(_algorithms))
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown compression name={name} known={known}")
    return found


def begins_compressed(prefix: bytes) -> bool | None:
    """Return whether a frame begins with the magic of an algorithm; None if more bytes are needed."""
    magics = [known.magic for known in _algorithms.values() if known.magic]
    if any(prefix.startswith(magic) for magic in magics):
        return True
    return None if any(magic.startswith(prefix) for magic in magics) else False


def sniffed(body: memoryview) -> Algorithm | None:
    head = bytes(body[:MAGIC_BYTES_MAX])
    if head[:1] not in _openings:
        return None
    return next((known for known in _algorithms.values() if known.magic and head.startswith(known.magic)), None)


def _expand_lz4(body: memoryview, limit: int) -> memoryview:
    """Decompress a frame that does not declare its size.

    A small buffer is tried first, because a small allocation is cheaper.
    """
    size = max(LZ4_BUFFER_BYTES, LZ4_GROWTH * len(body))
    if size >= MAPPED_BYTES_MIN:
        size = limit  # memory that is never written costs nothing
    while True:
        out = memoryview(allocate(min(size, limit)))
        try:
            return out[: cramjam.lz4.decompress_into(body, out)]
        except cramjam.DecompressionError as error:
            if "whole buffer" not in str(error):
                raise PeerError(f"lz4 frame is damaged: {error}", fatal=True) from None
            if size >= limit:
                raise _too_large() from None
            size = limit


def _expand_by(expand: Expand, what: str, body: memoryview, limit: int) -> bytes | bytearray | memoryview:
    try:
        return expand(body, limit)
    except Damaged as error:
        raise PeerError(f"{what} is damaged: {error}", fatal=True) from None
    except TooFar:
        raise _too_large() from None


def _too_large() -> TooLarge:
    return TooLarge("the decompressed frame exceeds the size limit", fatal=True)


def _compress_gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=_GZIP)
    return packer.compress(body) + packer.flush()


def _compress_xerial(body: bytes) -> bytes:
    block = bytes(cramjam.snappy.compress_raw(body))
    return XERIAL_HEAD + len(block).to_bytes(4, "big") + block


for _known in (
    Algorithm("gzip", partial(_expand_by, gunzip, "gzip frame"), _compress_gzip, b"\x1f\x8b"),
    Algorithm("lz4", _expand_lz4, lambda body: bytes(cramjam.lz4.compress(body)), b"\x04\x22\x4d\x18"),
    Algorithm("xerial", partial(_expand_by, unsnap_stream, "frame of snappy blocks"), _compress_xerial, XERIAL_MAGIC),
    Algorithm(
        "zstd",
        partial(_expand_by, unzstd, "zstd frame"),
        lambda body: bytes(cramjam.zstd.compress(body, ZSTD_LEVEL)),
        ZSTD_MAGIC,
    ),
    Algorithm(
        "snappy", partial(_expand_by, unsnap, "snappy block"), lambda body: bytes(cramjam.snappy.compress_raw(body))
    ),
):
    register(_known)
