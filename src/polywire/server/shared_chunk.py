"""The chunk of memory that all connections read into, one after the other. This module is compiled.

A connection without an unfinished request therefore needs no receive memory. Bytes are not overwritten while a write
batch may refer to them.
"""

from __future__ import annotations

from typing import Final

import cython

from polywire.server.arena import Arena, Memory

READ_BYTES: Final = 16 * 1024  # size of one read; a connection that fills it gets its own buffer
CHUNK_BYTES: Final = 8 * READ_BYTES
LAST_READ_AT: Final = CHUNK_BYTES - READ_BYTES  # beyond this position, the next read needs another chunk, or a commit


@cython.cclass
class SharedChunk:
    """The shared chunk.

    * ``position``: the memory after it is free.
    * ``lent``: memory of the last read, which begins at ``lent_at``. It is shortened when the number of received bytes
      is known.
    * ``reader``: the connection that is processing those bytes.
    """

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
        position = self.position
        if position + READ_BYTES > len(self._view):
            self._renew()
            position = 0
        self.lent_at = position
        self.lent = lent = self._view[position : position + READ_BYTES]
        return lent

    def used(self) -> None:
        """Preserve the bytes of the last read until the commit.

        The session may have appended them to the write batch.
        """
        self.reader = None
        end = self.lent_at + len(self.lent)
        if end > self.position:
            self.position = end

    def hand_over(self) -> Memory:
        """Return the chunk to a caller that pins a part of it. The caller frees it later."""
        chunk, self._chunk = self._chunk, None
        assert chunk is not None, "there was a read"
        self._view = memoryview(b"")
        self.position = 0
        return chunk

    def _renew(self) -> None:
        if self._chunk is not None:
            self._arena.give(self._chunk)
        self._chunk = self._arena.take(CHUNK_BYTES)
        self._view = memoryview(self._chunk)
        self.position = 0
