"""Buffers that large replies are written into, used again once they were sent.

Promises: who takes one has it alone until it is given back; what is kept for the next replies has a limit. Must not know: any wire, what is
written.
"""

from __future__ import annotations

from collections import deque
from typing import Final

REPLY_BYTES_MIN: Final = 256 * 1024  # of a buffer: most replies fit, and smaller ones would only fill the pool
KEPT_BYTES_MAX: Final = (
    32 * 1024 * 1024
)  # of buffers nobody has: three of the longest replies, or those of many short ones at once


class ReplyBuffers:
    """The buffers of one wire. Invariant: ``_kept_bytes`` is the size of all that are ``_free``, never more than ``KEPT_BYTES_MAX``."""

    __slots__ = ("_free", "_kept_bytes")

    def __init__(self) -> None:
        self._free: Final[deque[bytearray]] = deque()
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Size of what is kept."""
        return self._kept_bytes

    def take(self, size: int = REPLY_BYTES_MIN) -> bytearray:
        """A buffer of at least this size; what is in it is of no worth."""
        free = self._free
        if not free:
            return bytearray(max(size, REPLY_BYTES_MIN))
        buffer = free.pop()  # the one given back last is the likeliest to be near
        if len(buffer) < size:
            free.append(buffer)
            return self._large(size)
        self._kept_bytes -= len(buffer)
        return buffer

    def _large(self, size: int) -> bytearray:
        """A buffer of at least this size, wherever among the free ones."""
        found = next((at for at, buffer in enumerate(self._free) if len(buffer) >= size), None)
        if found is None:
            return bytearray(max(size, REPLY_BYTES_MIN))
        buffer = self._free[found]
        del self._free[found]
        self._kept_bytes -= len(buffer)
        return buffer

    def give(self, buffer: bytearray) -> None:
        """Nobody reads it any more; it may have grown. Those given back longest ago make room for it."""
        kept_bytes = self._kept_bytes + len(buffer)
        if kept_bytes > KEPT_BYTES_MAX:
            if len(buffer) > KEPT_BYTES_MAX:
                return
            while kept_bytes > KEPT_BYTES_MAX:
                kept_bytes -= len(self._free.popleft())
        self._free.append(buffer)
        self._kept_bytes = kept_bytes
