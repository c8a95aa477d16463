"""Receive memory: the buffers of unfinished requests, and which connections get them, wait, or are closed to free them.

This module is compiled.

* All connections read into one shared chunk, one after the other. A connection without an unfinished request therefore
  needs no memory of its own. An unfinished request takes memory in proportion to the bytes received.
* All unfinished requests together stay within a limit. One request at a time may exceed it, so that at least one
  request can be completed. Meanwhile, other requests that make progress wait and are not closed.
* When memory is short, stalled requests are closed: first those of unauthenticated clients, then those of the address
  that uses most memory, the slowest first. Unread bytes in the socket count as received.
* Memory is reused only when no write batch refers to it any more. Buffers that are not reused for a while are returned
  to the allocator.
* ``Arena.take`` and ``Arena.give`` run no other Python code, so the ``get_buffer`` callback of the event loop may call
  them.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, Protocol

import cython

from polywire.records.allocation import allocate
from polywire.server.logins import Standing

BUFFER_BYTES_MIN: Final = 2 * 1024  # large enough for the beginning of a request
# Larger buffers are allocated with mmap, because the allocator's heap may not return freed memory to the system.
MAPPED_BYTES_MIN: Final = 16 * 1024
KEPT_BYTES_MAX: Final = 16 * 1024 * 1024  # limit for the size of free buffers in the pool

Memory = bytearray | mmap.mmap


def rounded(size: int) -> int:
    return max(BUFFER_BYTES_MIN, 1 << (size - 1).bit_length())


@cython.cclass
class Arena:
    """The buffers of one server.

    * ``out_bytes``: size of all buffers in use.
    * ``kept_bytes``: size of all buffers in the pool.
    * ``_free``: buffers freed since the last sweep.
    * ``_rested``: buffers freed before the last sweep.
    * ``viewed``: buffers freed since the last ``settle``; the uncommitted write batch may still refer to them.
    """

    __slots__ = ("_free", "_rested", "bytes_max", "kept_bytes", "out_bytes", "viewed")

    def __init__(self, bytes_max: int) -> None:
        self._free: dict[int, list[Memory]] = {}
        self._rested: dict[int, list[Memory]] = {}
        self.viewed: list[Memory] = []
        self.bytes_max: Final = bytes_max
        self.kept_bytes = 0
        self.out_bytes = 0

    def fits(self, size: int) -> bool:
        """Return whether a buffer of this size is within the limit."""
        return self.out_bytes + size <= self.bytes_max

    def take(self, size: int) -> Memory:
        """Return a buffer of at least this size, with arbitrary content."""
        buffer_size = rounded(size)
        self.out_bytes += buffer_size
        free = self._free.get(buffer_size) or self._rested.get(buffer_size)
        if not free:
            return allocate(buffer_size, mapped_bytes_min=MAPPED_BYTES_MIN)
        self.kept_bytes -= buffer_size
        return free.pop()

    def give(self, buffer: Memory) -> None:
        """Free a buffer. The current write batch may still refer to it."""
        size = len(buffer)
        self.out_bytes -= size
        if self.kept_bytes + size <= KEPT_BYTES_MAX:
            self.kept_bytes += size
            self.viewed.append(buffer)

    def settle(self) -> None:
        """Allow reuse of all freed buffers. Call it when the write batch is committed."""
        for buffer in self.viewed:
            self._free.setdefault(len(buffer), []).append(buffer)
        self.viewed.clear()

    def sweep(self) -> None:
        """Return buffers to the allocator that were not reused for a second. Call it once a second."""
        self.kept_bytes -= sum(size * len(buffers) for size, buffers in self._rested.items())
        self._rested, self._free = self._free, {}


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


class Receiver(Protocol):
    """A connection that receives requests."""

    @property
    def host(self) -> str:
        """Address of the client, without its port."""

    @property
    def standing(self) -> Standing: ...

    @property
    def is_receiving(self) -> bool: ...

    @property
    def is_stalled(self) -> bool:
        """Whether the request that is arriving arrives too slowly."""

    @property
    def rate(self) -> float:
        """Arrival rate of that request in bytes per second."""

    @property
    def held_bytes(self) -> int:
        """Size of the connection's receive buffer."""

    def go_on_receiving(self) -> None: ...

    def give_back_idle(self) -> None: ...

    def abort(self, reason: str = "") -> None: ...

    def let_go(self) -> None: ...


@cython.cclass
class ReceiveMemory:
    """The memory for unfinished requests of a server.

    * ``_waiting``: connections that are paused until they get memory; the one that has waited longest is first.
    * ``_beyond``: the one connection that may exceed the limit.
    * ``write_batch``: number of the current write batch. Only this batch can still refer to receive memory.
    """

    __slots__ = (
        "_beyond",
        "_connections",
        "_feeding",
        "_looked",
        "_soon",
        "_waiting",
        "arena",
        "shared_chunk",
        "tick",
        "write_batch",
    )

    def __init__(
        self, bytes_max: int, connections: Collection[Receiver], soon: Callable[[Callable[[], None]], object]
    ) -> None:
        """``soon`` calls back in the loop's next pass."""
        self.arena: Final = Arena(bytes_max)
        self.shared_chunk: Final = SharedChunk(self.arena)
        self._connections: Final = connections
        self._soon: Final = soon
        self._waiting: dict[Receiver, None] = {}
        self._feeding = False
        self._beyond: Receiver | None = None
        self._looked = -1
        self.tick = 0
        self.write_batch = 0

    @property
    def is_short(self) -> bool:
        """Whether a connection waits for memory, or the limit is exceeded."""
        return bool(self._waiting) or not self.arena.fits(0)

    def settle(self) -> None:
        """Allow reuse of all memory that was consumed or freed. Call it when the write batch is committed."""
        self.write_batch += 1
        self.shared_chunk.position = 0
        if self.arena.viewed:
            self.arena.settle()

    def grant(self, grown: int, asking: Receiver) -> bool:
        """Return whether a connection may use ``grown`` more bytes.

        If not, ``asking`` is called back when it may call this again.
        """
        if self._beyond is not None and not self._beyond.is_receiving:
            self._beyond = None
        if self._beyond is asking or self._fits(grown):
            return True
        self._reclaim(grown, asking)
        if self._fits(grown):
            return True
        if self._beyond is None:
            self._beyond = asking
            return True
        self._waiting[asking] = None
        return False

    def _fits(self, grown: int) -> bool:
        """Return whether ``grown`` more bytes are within the limit.

        The connection that may exceed the limit is not counted, so that others can continue meanwhile.
        """
        return self.arena.fits(grown if self._beyond is None else grown - self._beyond.held_bytes)

    def given_back(self) -> None:
        """Let waiting connections request memory again, because a request or a connection has ended."""
        if self._waiting and not self._feeding:
            self._feeding = True
            self._soon(self._feed)

    def leave(self, connection: Receiver) -> None:
        self._waiting.pop(connection, None)
        if self._beyond is connection:
            self._beyond = None
        self.given_back()

    def _feed(self) -> None:
        """Let waiting connections request memory again, the longest waiting first, until one of them gets none."""
        self._feeding = False
        while self._waiting:
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            connection.go_on_receiving()
            if connection in self._waiting:
                later = list(self._waiting)
                self._waiting = dict.fromkeys([later[-1], *later[:-1]])
                return

    def _reclaim(self, grown: int, asking: Receiver) -> None:
        """Free buffers that contain no request, then close stalled connections.

        Does nothing if it ran less than a second ago, because stalls are measured in seconds.
        """
        if self._looked == self.tick:
            return
        for connection in self._connections:
            if connection is not asking:
                connection.give_back_idle()
        slow = [connection for connection in self._connections if connection is not asking and connection.is_stalled]
        held: Counter[str] = Counter()
        for connection in slow:
            held[connection.host] += connection.held_bytes
        slow.sort(key=lambda connection: (connection.standing, -held[connection.host], connection.rate))
        for connection in slow:
            if self._fits(grown):
                return
            connection.abort("receive memory is short, and this request arrives too slowly")
            connection.let_go()
        self._looked = self.tick
