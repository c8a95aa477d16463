"""Compressed frames: which algorithm one has, and its bytes again (dossier §1.4).

Promises: an expanded frame never takes more memory than its limit, whatever the bytes claim; users may add algorithms by name.
Must not know: what a frame holds, sockets.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import cramjam

from polywire.errors import ErrorCode, Invalid, PeerError

Expand = Callable[[memoryview, int], bytes | bytearray]
"""Gives a frame's bytes back, at most so many. Raises PeerError for bytes that are damaged or too many."""

Compress = Callable[[bytes], bytes]

LZ4_ROOM_BYTES: Final = 256 * 1024  # first tried for a frame that does not tell its size
LZ4_GROWTH: Final = 8
GZIP_PIECE_BYTES: Final = 16 * 1024  # expanded at a time, to at most a thousand times as much
MAGIC_BYTES_MAX: Final = 16
XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEAD_BYTES: Final = 16
_GZIP: Final = 31  # zlib's word for a gzip member


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compress a frame.

    magic: bytes that a compressed frame begins with; without, a frame is taken for compressed only when the listener is set to it.
    """

    name: str
    expand: Expand
    compress: Compress
    magic: bytes = b""


_algorithms: dict[str, Algorithm] = {}
_openings: set[bytes] = set()  # first bytes of all magics


def register(algorithm: Algorithm) -> None:
    """Add an algorithm, or replace the one of its name.

    A magic must be one that no batch, command or envelope begins with (dossier §1.4): at least two bytes, the first two above 00 F9 and
    no letters, blanks or BA 7C. Raises Invalid(INVALID_REQUEST).
    """
    magic = algorithm.magic
    opening = magic[:2]
    if magic and (
        not 2 <= len(magic) <= MAGIC_BYTES_MAX or opening <= b"\x00\xf9" or opening.isalpha() or opening == b"\xba\x7c"
    ):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"this magic may begin an uncompressed frame magic={magic.hex()}")
    if not algorithm.name:
        raise Invalid(ErrorCode.INVALID_REQUEST, "an algorithm needs a name")
    _algorithms[algorithm.name] = algorithm
    _openings.add(magic[:1])


def algorithm(name: str) -> Algorithm:
    """The algorithm of this name. Raises Invalid(INVALID_REQUEST)."""
    found = _algorithms.get(name)
    if found is None:
        known = ",".join(sorted(_algorithms))
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown compression name={name} known={known}")
    return found


def sniffed(body: memoryview) -> Algorithm | None:
    """The algorithm whose magic a frame begins with, None for a plain frame."""
    head = bytes(body[:MAGIC_BYTES_MAX])
    if head[:1] not in _openings:
        return None
    return next((known for known in _algorithms.values() if known.magic and head.startswith(known.magic)), None)


def _expand_gzip(body: memoryview, limit: int) -> bytearray:
    """Members one behind the other, in pieces: zlib holds what one call gives back twice."""
    out = bytearray()
    at = 0
    member = zlib.decompressobj(_GZIP)
    while at < len(body):
        piece = body[at : at + GZIP_PIECE_BYTES]
        try:
            out += member.decompress(piece, limit + 1 - len(out))
        except zlib.error as error:
            raise PeerError(f"a gzip frame is damaged: {error}", fatal=True) from None
        if len(out) > limit:
            raise _too_large()
        at += len(piece) - len(member.unused_data)
        if member.eof and at < len(body):
            member = zlib.decompressobj(_GZIP)
    if not member.eof:
        raise PeerError("a gzip frame is cut short", fatal=True)
    return out


def _expand_lz4(body: memoryview, limit: int) -> bytes | bytearray:
    room = min(limit, max(LZ4_ROOM_BYTES, LZ4_GROWTH * len(body)))
    while True:
        out = bytearray(room)
        try:
            size = cramjam.lz4.decompress_into(body, out)
        except cramjam.DecompressionError as error:
            if "whole buffer" not in str(error):
                raise PeerError(f"an lz4 frame is damaged: {error}", fatal=True) from None
            if room >= limit:
                raise _too_large() from None
            room = min(limit, LZ4_GROWTH * room)
            continue
        del out[size:]
        return out


def _expand_snappy(body: memoryview, limit: int) -> bytearray:
    """A raw block, no framing."""
    return _expand_blocks([body], limit)


def _expand_xerial(body: memoryview, limit: int) -> bytearray:
    """Blocks with their lengths behind a head of 16 bytes."""
    blocks = []
    at = _XERIAL_HEAD_BYTES
    if len(body) <= at:
        raise PeerError("a xerial snappy frame is cut short", fatal=True)
    while at < len(body):
        end = at + 4 + int.from_bytes(body[at : at + 4], "big")
        if end > len(body) or at + 4 > len(body):
            raise PeerError("a xerial snappy frame is cut short", fatal=True)
        blocks.append(body[at + 4 : end])
        at = end
    return _expand_blocks(blocks, limit)


def _expand_blocks(blocks: Sequence[memoryview], limit: int) -> bytearray:
    """Raw blocks, one behind the other; they tell their sizes, so that memory is taken once."""
    try:
        sizes = [cramjam.snappy.decompress_raw_len(block) for block in blocks]
        if sum(sizes) > limit:
            raise _too_large()
        out = bytearray(sum(sizes))
        at = 0
        for block, size in zip(blocks, sizes, strict=True):
            if cramjam.snappy.decompress_raw_into(block, memoryview(out)[at : at + size]) != size:
                raise PeerError("a snappy block is cut short", fatal=True)
            at += size
    except cramjam.DecompressionError as error:
        raise PeerError(f"a snappy block is damaged: {error}", fatal=True) from None
    return out


def _too_large() -> PeerError:
    return PeerError("a compressed frame expands too far", fatal=True)


def _compress_gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=_GZIP)
    return packer.compress(body) + packer.flush()


def _compress_xerial(body: bytes) -> bytes:
    block = bytes(cramjam.snappy.compress_raw(body))
    return XERIAL + bytes((0, 0, 0, 1, 0, 0, 0, 1)) + len(block).to_bytes(4, "big") + block


for _known in (
    Algorithm("gzip", _expand_gzip, _compress_gzip, b"\x1f\x8b"),
    Algorithm("lz4", _expand_lz4, lambda body: bytes(cramjam.lz4.compress(body)), b"\x04\x22\x4d\x18"),
    Algorithm("xerial", _expand_xerial, _compress_xerial, XERIAL),
    Algorithm("snappy", _expand_snappy, lambda body: bytes(cramjam.snappy.compress_raw(body))),
):
    register(_known)
