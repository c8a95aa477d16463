"""Compressed message sets, opened under a limit (dossier §2.1).

Promises: whatever the bytes claim, no more than the limit is ever expanded, all wrappers of one request counted together; order is kept.
Must not know: sockets, the broker, what becomes of the records.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from struct import Struct
from typing import Final

import cramjam

from polywire.errors import PeerError
from polywire.protocols.kafka07.codec import BROKEN, FRAME_BYTES_MAX, LARGE, PAYLOAD_BYTES_MAX, next_wrapper, survey
from polywire.protocols.kafka07.messages import MAGIC_1, CompressionCodec, encode_message
from polywire.types import Buffer

EXPANDED_BYTES_MAX: Final = FRAME_BYTES_MAX  # of one request: what it could have carried uncompressed
NESTING_MAX: Final = 8  # wrappers within wrappers; no client writes more than two
SNAPPY_RATIO_MAX: Final = 22  # a copy of 64 bytes takes three: no sound block expands further

NO_LIMIT: Final = 2**31  # no payload is as long

_XERIAL_MAGIC: Final = b"\x82SNAPPY\0"
_XERIAL_HEAD: Final = _XERIAL_MAGIC + b"\0\0\0\x01\0\0\0\x01"
_I32: Final = Struct(">i")
_GZIP: Final = 16 + zlib.MAX_WBITS
_HEAD_BYTES: Final = 10  # of a wrapper: size, magic, attributes, CRC
_XERIAL_BLOCK_BYTES: Final = 32 * 1024


@dataclass(frozen=True, slots=True)
class PlainSet:
    """A set without wrappers, surveyed: where it lies, its records and its longest value."""

    data: Buffer
    start: int
    stop: int
    records: int
    longest: int


class Expander:
    """Opens the wrappers of one request. Guards: ``_left`` is what may still be expanded."""

    __slots__ = ("_left", "_payload_bytes_max")

    def __init__(self, bytes_max: int = EXPANDED_BYTES_MAX, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        """payload_bytes_max: what a message at the top of a set may have."""
        self._left = bytes_max
        self._payload_bytes_max = payload_bytes_max

    def open_set(self, data: Buffer, start: int, stop: int, *, depth: int = 0) -> list[PlainSet] | None:
        """The set as plain sets in order; None when a payload at its top is above the limit.

        Raises PeerError for a set that is to be refused, and when it expands too far.
        """
        payload_bytes_max = self._payload_bytes_max if depth == 0 else NO_LIMIT
        verdict, records, wrappers, longest = survey(data, start, stop, payload_bytes_max)
        if verdict == LARGE:
            return None
        if verdict == BROKEN:
            raise PeerError("a message set is broken", fatal=True)
        if not wrappers:
            return [PlainSet(data, start, stop, records, longest)]
        if depth == NESTING_MAX:
            raise PeerError(f"wrappers are nested too deeply limit={NESTING_MAX}", fatal=True)
        found: list[PlainSet] = []
        at = start
        while at < stop:
            place, end, codec = next_wrapper(data, at, stop)
            if place > at:
                _, records, _, longest = survey(data, at, place, NO_LIMIT)
                found.append(PlainSet(data, at, place, records, longest))
            if codec:
                inner = self._expand(memoryview(data)[place + _HEAD_BYTES : end], codec)
                found += self.open_set(inner, 0, len(inner), depth=depth + 1) or ()
            at = end
        return found

    def _expand(self, packed: memoryview, codec: int) -> Buffer:
        try:
            plain = self._gunzip(packed) if codec == CompressionCodec.GZIP else self._unsnap(packed)
        except (zlib.error, cramjam.DecompressionError, EOFError) as error:
            raise PeerError(f"a compressed set cannot be expanded reason={error}", fatal=True) from None
        self._left -= len(plain)
        return plain

    def _too_far(self) -> PeerError:
        return PeerError(f"compressed sets expand too far limit={EXPANDED_BYTES_MAX}", fatal=True)

    def _gunzip(self, packed: memoryview) -> bytes:
        """One gzip stream, or several in a row."""
        parts: list[bytes] = []
        size = 0
        rest: Buffer = packed
        while rest:
            stream = zlib.decompressobj(_GZIP)
            part = stream.decompress(rest, self._left - size + 1)
            size += len(part)
            if size > self._left:
                raise self._too_far()
            if not stream.eof:
                raise EOFError("the stream ends early")
            parts.append(part)
            rest = stream.unused_data
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _unsnap(self, packed: memoryview) -> Buffer:
        """Blocks as snappy-java writes them, or one raw block."""
        if bytes(packed[:8]) != _XERIAL_MAGIC:
            return self._unsnap_block(packed, self._left)
        plain = bytearray()
        at = len(_XERIAL_HEAD)
        while at < len(packed):
            if len(packed) - at < 4:
                raise EOFError("a block's length ends early")
            (size,) = _I32.unpack_from(packed, at)
            at += 4
            if not 0 < size <= len(packed) - at:
                raise EOFError("a block ends early")
            plain += memoryview(self._unsnap_block(packed[at : at + size], self._left - len(plain)))
            at += size
        return plain

    def _unsnap_block(self, block: memoryview, left: int) -> Buffer:
        """A raw block begins with its expanded size, which is looked at before memory is taken."""
        size = shift = 0
        for byte in block[:5]:
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if size > left:
            raise self._too_far()
        if size > SNAPPY_RATIO_MAX * len(block):
            raise EOFError("a block is too short for what it claims")
        plain = bytearray(size)
        if size:
            written = cramjam.snappy.decompress_raw_into(block, plain)
            if written != size:
                raise EOFError("a block expands to less than it claims")
        return plain


def wrap(message_set: bytes, codec: CompressionCodec) -> bytes:
    """A set as one compressed message; as it is for ``NONE``."""
    match codec:
        case CompressionCodec.NONE:
            return message_set
        case CompressionCodec.GZIP:
            packed = gzip.compress(message_set, compresslevel=6, mtime=0)
        case CompressionCodec.SNAPPY:
            packed = _XERIAL_HEAD
            for at in range(0, len(message_set), _XERIAL_BLOCK_BYTES):
                block = bytes(cramjam.snappy.compress_raw(message_set[at : at + _XERIAL_BLOCK_BYTES]))
                packed += _I32.pack(len(block)) + block
    return encode_message(packed, MAGIC_1, codec)
