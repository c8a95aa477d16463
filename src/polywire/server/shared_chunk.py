"""Where bytes land: one chunk of memory that all connections read into, one after the other. Compiled.

Promises: a connection without an unfinished request holds no memory; what a write batch may view is not overwritten. Must not know:
connections, wires.
"""

from __future__ import annotations

from typing import Final

import cython

from polywire.server.arena import Arena, Memory

READ_BYTES: Final = 16 * 1024  # of one read; who fills that sends much, and gets a buffer of its own
CHUNK_BYTES: Final = 8 * READ_BYTES
LAST_READ_AT: Final = (
    CHUNK_BYTES - READ_BYTES
)  # behind it the next read needs another chunk, or that this one be settled


@cython.cclass
class SharedChunk:
    """Invariant: nothing views the chunk behind ``position``. ``lent`` is what was lent last, cut to what landed there once that is known;
    ``lent_at`` is where it begins. ``reader`` is whose bytes they are, while they are offered."""

    __slots__ = ("_arena", "_chunk", "_view", "lent", "lent_at", "position", "reader")

    def __init__(self, arena: Arena) -> None:
        self._arena: Final = arena
        self._chunk: Memory | None = None
        self._view = memoryview(b"")
        self.position = 0
        self.lent = self._view
        self.lent_at = 0
        self.reader: object = None

    def lend(self) -> memoryview:
        """Memory for one read."""
        position = self.position
        if position + READ_BYTES > len(self._view):
            self._renew()
            position = 0
        self.lent_at = position
        self.lent = lent = self._view[position : position + READ_BYTES]
        return lent

    def used(self) -> None:
        """What landed last was offered and may be viewed, also if everything before was settled meanwhile."""
        self.reader = None
        end = self.lent_at + len(self.lent)
        if end > self.position:
            self.position = end

    def hand_over(self) -> Memory:
        """Give the chunk, with all that landed in it, to whoever looks at a part of it for longer; it goes back to the arena from there."""
        chunk, self._chunk = self._chunk, None
        assert chunk is not None, "something has landed"
        self._view = memoryview(b"")
        self.position = 0
        return chunk

    def _renew(self) -> None:
        if self._chunk is not None:
            self._arena.give(self._chunk)
        self._chunk = self._arena.take(CHUNK_BYTES)
        self._view = memoryview(self._chunk)
        self.position = 0
