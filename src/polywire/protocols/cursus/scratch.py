"""Arrays that all Cursus connections share to parse a frame.

The arrays are used only while one frame is handled.
"""

from __future__ import annotations

from array import array
from typing import Final

from polywire.protocols.cursus import decoder

_MESSAGES_MIN: Final = 1024


class ScratchArrays:
    """Arrays that grow up to a limit. ``spans`` and ``details`` have space for the same number of messages.

    Attributes:
        reserved_bytes: size of a frame for which there is enough space.
    """

    __slots__ = ("_capacity", "details", "head", "reserved_bytes", "spans")

    def __init__(self) -> None:
        self.head = memoryview(array("q", bytes(8 * decoder.HEAD_WORDS)))
        self._capacity = 0
        self.reserved_bytes = 0
        self.reserve(_MESSAGES_MIN * decoder.MESSAGE_BYTES_MIN)

    def reserve(self, size: int) -> None:
        self.reserved_bytes = max(self.reserved_bytes, size)
        wanted = min(size // decoder.MESSAGE_BYTES_MIN + 1, decoder.RECORDS_MAX)
        if wanted > self._capacity:
            self._capacity = min(max(wanted, 2 * self._capacity), decoder.RECORDS_MAX)
            self.spans = memoryview(array("q", bytes(32 * self._capacity)))
            self.details = memoryview(array("q", bytes(8 * decoder.DETAIL_WORDS * self._capacity)))
