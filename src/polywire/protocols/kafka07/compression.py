"""Decompress message sets under a limit (spec: kafka-0.7#wrappers).

The limit applies to all compressed messages of one request together, whatever sizes they claim. Order is preserved.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct
from typing import Final

import cramjam

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


@dataclass(frozen=True, slots=True)
class PlainSet:
    """A checked message set without wrappers.

    It has the set's range in the data, its number of records, and its longest value.
    """

    data: Buffer
    start: int
    stop: int
    records: int
    longest: int


OpenedSet = tuple[ProduceEntry, list[PlainSet] | PeerError]
"""A message set of a request, with its content or the reason for rejecting it."""


class Expander:
    """Decompresses the wrappers of one request.

    ``_left`` is how many bytes may still be decompressed. Each wrapper counts as at least ``PART_BYTES_MIN``.
    """

    __slots__ = ("_bytes_max", "_left")

    def __init__(self, bytes_max: int = EXPANDED_BYTES_MAX) -> None:
        self._left = self._bytes_max = bytes_max

    def open_set(self, data: Buffer, start: int, stop: int, *, depth: int = 0) -> list[PlainSet]:
        """Return the message set as sets without wrappers, in order.

        Raises PeerError if it is invalid or expands too far.
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
    """Decompress the message sets of one request, up to the first rejected one.

    Raises ExpandsTooFar if they expand to more than ``bytes_max``, unless that is ``EXPANDED_BYTES_MAX``.
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
    """Return a message set as one compressed message. With the codec ``NONE``, return it unchanged."""
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
