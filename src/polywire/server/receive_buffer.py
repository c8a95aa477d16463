"""Where bytes land: one chunk of memory that all connections read into, one after the other.

Promises: a connection without an unfinished request holds no memory; what a write batch may view is not overwritten. Must not know:
connections, wires.
"""

from __future__ import annotations

from typing import Final

from polywire.server.arena import Arena, Memory

READ_BYTES: Final = 16 * 1024  # of one read; who fills that sends much, and gets a buffer of its own
FREE_BYTES_MIN: Final = 4 * 1024  # of a buffer; less is not worth a read where other memory can be had
CHUNK_BYTES: Final = 8 * READ_BYTES


class ReceiveBuffer:
    """Invariant: nothing views the chunk behind ``_position``."""

    __slots__ = ("_arena", "_chunk", "_position", "_view")

    def __init__(self, arena: Arena) -> None:
        self._arena: Final = arena
        self._chunk: Memory | None = None
        self._view = memoryview(b"")
        self._position = 0

    def lend(self) -> tuple[memoryview, int]:
        """A view that ends ``READ_BYTES`` behind a position, and the position: from there on it is free."""
        position = self._position
        if position + READ_BYTES > len(self._view):
            self._renew()
            position = 0
        return self._view[: position + READ_BYTES], position

    def used(self, end: int) -> None:
        """What was lent last is used up to there."""
        if end > self._position:
            self._position = end

    def settle(self) -> None:
        """Nothing views what landed so far."""
        self._position = 0

    def hand_over(self) -> Memory:
        """Give the chunk, with all that landed in it, to whoever looks at a part of it for longer; it goes back to the arena from there."""
        chunk, self._chunk = self._chunk, None
        assert chunk is not None, "something has landed"
        self._view = memoryview(b"")
        self._position = 0
        return chunk

    def _renew(self) -> None:
        if self._chunk is not None:
            self._arena.give(self._chunk)
        self._chunk = self._arena.take(CHUNK_BYTES)
        self._view = memoryview(self._chunk)
        self._position = 0
