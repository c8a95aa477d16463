"""Encode records as a response in a reusable buffer, with one call per read."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Final

from polywire.log.base import Read
from polywire.protocols.cursus import encoder
from polywire.protocols.cursus.batches import empty_batch, head_bytes, put_head
from polywire.protocols.cursus.messages import frame
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields
from polywire.types import Buffer

PAYLOAD_BYTES_MAX: Final = 8 * 1024 * 1024  # limit of one frame (spec: cursus#consume); at least one record is sent
VALUES_BYTES_MAX: Final = (
    8_192  # limit for the values in one answer of the legacy dialect, as its specification says; at least one is sent
)
SMALL_BYTES: Final = 64 * 1024  # copying this much costs less than keeping a buffer until it was sent
EXPANDED_BYTES_MAX: Final = 256 * 1024 * 1024

_length: Final = header_fields("length")

Parts = tuple[list[Buffer], Callable[[], None] | None]
"""    Bytes to send, and a function to call when they were sent."""


class ReplyBatch:
    """Records of a response, encoded as one batch, or as one frame per value for the oldest clients."""

    __slots__ = ("_begin", "_buffer", "_put", "_reply_buffers", "_state")

    def __init__(self, reply_buffers: ReplyBuffers, begin: bytes | None, records_max: int) -> None:
        """``begin`` is the result of ``batches.opening``, or None to encode each value as a frame."""
        self._reply_buffers = reply_buffers
        self._begin = begin
        self._buffer = reply_buffers.take()
        self._state = array("q", bytes(8 * encoder.PUT_WORDS))
        self._state[encoder.BYTES_LEFT] = PAYLOAD_BYTES_MAX
        if begin is None:
            self._put = encoder.put_values
            self._state[encoder.RECORDS_LEFT] = VALUES_BYTES_MAX
        else:
            self._put = encoder.put
            self._state[encoder.RECORDS_LEFT] = records_max
            self._state[encoder.AT] = head_bytes(begin)

    @property
    def written(self) -> int:
        return self._state[encoder.WRITTEN]

    @property
    def next_offset(self) -> int:
        return self._state[encoder.NEXT]

    def take(self, read: Read, start: int, end: int) -> bool:
        """Add the records with ``start <= offset < end``. Return False if no more fit.

        Raises Invalid for a damaged batch.
        """
        state = self._state
        state[encoder.START], state[encoder.STOP] = start, end
        for chunk in read.chunks:
            state[encoder.POSITION] = state[encoder.ROW] = 0
            if not self._take_chunk(chunk):
                return False
        return True

    def _take_chunk(self, chunk: memoryview) -> bool:
        state = self._state
        while (code := self._put(chunk, state, self._buffer)) not in (encoder.DONE, encoder.FULL):
            if code != encoder.COMPRESSED:
                self._grow(code)
                continue
            position = state[encoder.POSITION]
            (length,) = _length(chunk, position)
            expanded = expand_body(chunk[position : position + length], EXPANDED_BYTES_MAX)
            state[encoder.POSITION] = 0
            if not self._take_chunk(memoryview(expanded)):
                return False
            state[encoder.POSITION], state[encoder.ROW] = position + length, 0
        return code == encoder.DONE

    def _grow(self, need: int) -> None:
        used = self._state[encoder.AT]
        grown = bytearray(max(2 * len(self._buffer), used + need))
        grown[:used] = memoryview(self._buffer)[:used]
        self._buffer = grown

    def finish(self) -> Parts:
        state, reply_buffers = self._state, self._reply_buffers
        size = state[encoder.AT]
        if not self.written:
            reply_buffers.give(self._buffer)
            return [], None
        if self._begin is not None:
            put_head(
                self._buffer,
                self._begin,
                size=size,
                first=state[encoder.FIRST],
                last=state[encoder.LAST],
                count=state[encoder.WRITTEN],
            )
        if size <= SMALL_BYTES:
            data = bytes(memoryview(self._buffer)[:size])
            reply_buffers.give(self._buffer)
            return [data], None
        return [memoryview(self._buffer)[:size]], partial(reply_buffers.give, self._buffer)

    def answer(self, answer: Answer) -> None:
        parts, released = self.finish()
        answer.fill(parts or [frame(empty_batch(self._begin or b""))], released)

    def drop(self) -> None:
        self._reply_buffers.give(self._buffer)
