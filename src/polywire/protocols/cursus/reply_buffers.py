"""Arrays and reply buffers that all connections of the wire use in turn.

Promises: arrays grow with what has really come and have a limit; nothing in them outlives the handling of one frame. Must not know: sessions.
"""

from __future__ import annotations

from array import array
from typing import Final

from polywire.protocols.cursus import decoder

REPLY_BUFFERS_MAX: Final = 8  # reply buffers kept for reuse
REPLY_BYTES: Final = 256 * 1024  # such a buffer at first
REPLY_BYTES_KEPT: Final = 16 * 1024 * 1024  # larger ones are not kept
_MESSAGES_MIN: Final = 1024


class Scratch:
    """Reused memory. Invariant: ``spans`` and ``details`` have room for the same number of messages."""

    __slots__ = ("_replies", "_room", "details", "head", "spans")

    def __init__(self) -> None:
        self.head = memoryview(array("q", bytes(8 * decoder.HEAD_WORDS)))
        self._room = 0
        self._replies: list[bytearray] = []
        self.reserve(_MESSAGES_MIN * decoder.MESSAGE_BYTES_MIN)

    def reserve(self, size: int) -> None:
        """Make room for the messages of a batch of this many bytes."""
        wanted = min(size // decoder.MESSAGE_BYTES_MIN + 1, decoder.RECORDS_MAX)
        if wanted > self._room:
            self._room = min(max(wanted, 2 * self._room), decoder.RECORDS_MAX)
            self.spans = memoryview(array("q", bytes(32 * self._room)))
            self.details = memoryview(array("q", bytes(8 * decoder.DETAIL_WORDS * self._room)))

    def take_reply(self) -> bytearray:
        """A buffer for a large reply."""
        return self._replies.pop() if self._replies else bytearray(REPLY_BYTES)

    def give_reply(self, buffer: bytearray) -> None:
        """The reply was sent."""
        if len(self._replies) < REPLY_BUFFERS_MAX and len(buffer) <= REPLY_BYTES_KEPT:
            self._replies.append(buffer)
