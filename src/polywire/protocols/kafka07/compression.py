"""Decompress Kafka 0.7 message sets, up to a size limit (spec: kafka-0.7#wrappers).

A wrapper is a compressed message whose value is a message set. The limit applies to all wrappers of one request
together, whatever sizes they claim. The order of messages is preserved.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from struct import Struct
from typing import Final

import cramjam
import msgspec

from polywire.errors import PeerError
from polywire.protocols.kafka07.decoder import next_wrapper, survey
from polywire.protocols.kafka07.messages import MAGIC_1, CompressionCodec, ProduceEntry, encode_message
from polywire.records.inflate import (
    PART_BYTES_MIN,
    XERIAL_HEAD,
    XERIAL_MAGIC,
    Damaged,
    TooFar,
    gunzip,
    unsnap,
    unsnap_stream,
)
from polywire.types import Buffer

# limit for one request; decompressing it takes several times as much memory
EXPANDED_BYTES_MAX: Final = 16 * 1024 * 1024 - 4
NESTING_MAX: Final = 8  # levels of wrappers within wrappers; clients write at most two

_I32: Final = Struct(">i")
_HEAD_BYTES: Final = 10  # size of a wrapper's head: size, magic, attributes, CRC
_XERIAL_BLOCK_BYTES: Final = 32 * 1024


class ExpandsTooFar(PeerError):
    """The compressed messages of one request exceed the limit after decompression."""


class PlainSet(msgspec.Struct, frozen=True):
    """A valid message set without compressed messages: the bytes ``data[start:stop]``.

    Attributes:
        records: number of messages.
        longest: size in bytes of the longest value.
    """

    data: Buffer
    start: int
    stop: int
    records: int
    longest: int


OpenedSet = tuple[ProduceEntry, list[PlainSet] | PeerError]
"""A message set of a request: its messages, or the error if it is rejected."""


class Expander:
    """Decompresses the compressed messages of one request."""

    __slots__ = ("_bytes_max", "_left")

    def __init__(self, bytes_max: int = EXPANDED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._left = bytes_max  # bytes that may still be decompressed; a wrapper counts as at least PART_BYTES_MIN

    def open_set(self, data: Buffer, start: int, stop: int, *, depth: int = 0) -> list[PlainSet]:
        """Check a message set and decompress it. Return sets without compressed messages, in order.

        Raises PeerError if the set is damaged, nested too deeply, or expands too far.
        """
        is_sound, records, wrappers, longest = survey(data, start, stop)
        # if these bytes were ignored, a message could be lost without an error
        is_stray = depth > 0 and 0 < stop - start < _I32.size
        if not is_sound or is_stray:
            raise PeerError("message set is damaged", fatal=True)
        if not wrappers:
            return [PlainSet(data, start, stop, records, longest)]
        if depth == NESTING_MAX:
            raise PeerError(f"compressed messages are nested too deeply limit={NESTING_MAX}", fatal=True)
        found: list[PlainSet] = []
        at = start
        while at < stop:
            place, end, codec = next_wrapper(data, at, stop)
            if place > at:
                _, records, _, longest = survey(data, at, place)
                found.append(PlainSet(data, at, place, records, longest))
            if codec:
                inner = self._expand(memoryview(data)[place + _HEAD_BYTES : end], codec)
                found += self.open_set(inner, 0, len(inner), depth=depth + 1)
            at = end
        return found

    def _expand(self, packed: memoryview, codec: int) -> Buffer:
        try:
            if codec == CompressionCodec.GZIP:
                plain: Buffer = gunzip(packed, self._left)
            elif bytes(packed[: len(XERIAL_MAGIC)]) == XERIAL_MAGIC:
                plain = unsnap_stream(packed, self._left)
            else:
                plain = unsnap(packed, self._left)
        except Damaged as error:
            raise PeerError(f"compressed message set cannot be decompressed reason={error}", fatal=True) from None
        except TooFar:
            raise self._too_far() from None
        self._left -= max(len(plain), PART_BYTES_MIN)
        if self._left < 0:
            raise self._too_far()
        return plain

    def _too_far(self) -> ExpandsTooFar:
        return ExpandsTooFar(f"compressed sets expand too far limit={self._bytes_max}", fatal=True)


def open_sets(data: Buffer, entries: Iterable[ProduceEntry], bytes_max: int) -> list[OpenedSet]:
    """Check and decompress the message sets of one request, until one is rejected.

    Raises ExpandsTooFar if they expand to more than ``bytes_max`` and a larger limit may be tried; with
    ``EXPANDED_BYTES_MAX``, the set is rejected instead.
    """
    expander = Expander(bytes_max)
    found: list[OpenedSet] = []
    for entry in entries:
        try:
            found.append((entry, expander.open_set(data, entry.start, entry.stop)))
        except PeerError as error:
            if isinstance(error, ExpandsTooFar) and bytes_max < EXPANDED_BYTES_MAX:
                raise
            # the traceback's frames refer to the decompressed data, and to this list
            found.append((entry, error.with_traceback(None)))
            break
    return found


def wrap(message_set: bytes, codec: CompressionCodec) -> bytes:
    """Return a message set as one compressed message; unchanged with the codec ``NONE``."""
    match codec:
        case CompressionCodec.NONE:
            return message_set
        case CompressionCodec.GZIP:
            packed = gzip.compress(message_set, compresslevel=6, mtime=0)
        case CompressionCodec.SNAPPY:
            packed = XERIAL_HEAD
            for at in range(0, len(message_set), _XERIAL_BLOCK_BYTES):
                block = bytes(cramjam.snappy.compress_raw(message_set[at : at + _XERIAL_BLOCK_BYTES]))
                packed += _I32.pack(len(block)) + block
    return encode_message(packed, MAGIC_1, codec)
