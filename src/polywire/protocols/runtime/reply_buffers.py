"""Reusable buffers for large replies. A buffer has one user at a time. Free buffers are limited, and freed after some time."""

from __future__ import annotations

from collections import deque
from typing import Final

from polywire.log.base import Loop

# minimum size of a buffer; most replies fit, and smaller buffers would only fill the pool
REPLY_BYTES_MIN: Final = 256 * 1024
# limit for the free buffers, enough for three of the longest replies or many short ones
FREE_BYTES_MAX: Final = 32 * 1024 * 1024
REST_S: Final = 5.0  # a buffer is freed when it was not used for this long, and at most twice as long


class ReplyBuffers:
    """Pool of buffers for one protocol's responses."""

    __slots__ = ("_free", "_free_bytes", "_is_timed", "_loop", "_unused")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._free: Final[deque[bytearray]] = deque()
        self._free_bytes = 0
        self._unused = 0
        """Number of buffers, the oldest ones, that were free all the time since the timer ran."""
        self._is_timed = False

    @property
    def free_bytes(self) -> int:
        """Total size of the free buffers, at most ``FREE_BYTES_MAX``."""
        return self._free_bytes

    def take(self, size: int = REPLY_BYTES_MIN) -> bytearray:
        """Return a buffer of at least this size, with arbitrary content."""
        free = self._free
        if not free:
            return bytearray(max(size, REPLY_BYTES_MIN))
        buffer = free.pop()  # the buffer that was returned last is most likely in the processor's cache
        if len(buffer) < size:
            free.append(buffer)
            return self._large(size)
        self._free_bytes -= len(buffer)
        self._unused = min(self._unused, len(free))
        return buffer

    def _large(self, size: int) -> bytearray:
        found = next((at for at, buffer in enumerate(self._free) if len(buffer) >= size), None)
        if found is None:
            return bytearray(max(size, REPLY_BYTES_MIN))
        buffer = self._free[found]
        del self._free[found]
        self._free_bytes -= len(buffer)
        self._unused -= found < self._unused
        return buffer

    def give(self, buffer: bytearray) -> None:
        """Return a buffer to the pool. It may have grown. If the pool is full, its oldest buffers are freed."""
        free_bytes = self._free_bytes + len(buffer)
        if free_bytes > FREE_BYTES_MAX:
            if len(buffer) > FREE_BYTES_MAX:
                return
            while free_bytes > FREE_BYTES_MAX:
                free_bytes -= len(self._free.popleft())
                self._unused = max(self._unused - 1, 0)
        self._free.append(buffer)
        self._free_bytes = free_bytes
        if not self._is_timed:
            self._is_timed = True
            self._loop.call_later(REST_S, self._rest)

    def _rest(self) -> None:
        """Free the buffers that were not used since the last call."""
        for _ in range(self._unused):
            self._free_bytes -= len(self._free.popleft())
        self._unused = len(self._free)
        self._is_timed = bool(self._free)
        if self._is_timed:
            self._loop.call_later(REST_S, self._rest)
