"""Arrays that all connections of the wire use in turn.

Promises: they grow with what has really come and have a limit; nothing in them outlives the handling of one frame. Must not know: sessions.
"""

from __future__ import annotations

from array import array
from typing import Final

from polywire.protocols.cursus import decoder

_MESSAGES_MIN: Final = 1024


class Scratch:
    """Reused arrays. Invariant: ``spans`` and ``details`` have room for the same number of messages."""

    __slots__ = ("_room", "details", "head", "spans")

    def __init__(self) -> None:
        self.head = memoryview(array("q", bytes(8 * decoder.HEAD_WORDS)))
        self._room = 0
        self.reserve(_MESSAGES_MIN * decoder.MESSAGE_BYTES_MIN)

    def reserve(self, size: int) -> None:
        """Make room for the messages of a batch of this many bytes."""
        wanted = min(size // decoder.MESSAGE_BYTES_MIN + 1, decoder.RECORDS_MAX)
        if wanted > self._room:
            self._room = min(max(wanted, 2 * self._room), decoder.RECORDS_MAX)
            self.spans = memoryview(array("q", bytes(32 * self._room)))
            self.details = memoryview(array("q", bytes(8 * decoder.DETAIL_WORDS * self._room)))
