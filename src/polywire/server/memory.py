"""Memory for incomplete requests: decide which connections get it, which wait, and which are closed to free it.

This module is compiled.

* All connections read into one shared chunk, one after the other. A connection without an incomplete request therefore
  needs no memory of its own. An incomplete request takes memory in proportion to the bytes received.
* All incomplete requests together stay within a limit. One request at a time may exceed it, so that at least one
  request can be completed. Meanwhile, other requests that make progress wait and are not closed.
* When memory is short, connections with stalled requests are closed: first those of unauthenticated clients, then those
  of the address that uses most memory, the slowest first. Bytes that have arrived at the socket but were not read yet
  count as received. If a connection that had waited for memory does not complete its request, some of those that still
  wait are closed as well, because they would hold the memory for just as long.
* Memory is reused only when no uncommitted batch refers to it any more. Buffers that are not reused for a while are
  returned to the allocator.
* ``Arena.take`` and ``Arena.give`` run no other Python code, so the ``get_buffer`` callback of the event loop may call
  them.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Final, Protocol

import cython

from polywire.records.allocation import allocate
from polywire.server.logins import Standing

BUFFER_BYTES_MIN: Final = 2 * 1024  # large enough for the beginning of a request
# Larger buffers are allocated with mmap, because the allocator's heap may not return freed memory to the system.
MAPPED_BYTES_MIN: Final = 16 * 1024
WASTED_MAX: Final = 10  # limits the connections that are closed at once to 1,023
POOLED_BYTES_MAX: Final = 16 * 1024 * 1024  # limit for the size of free buffers in the pool

Memory = bytearray | mmap.mmap


def rounded(size: int) -> int:
    return max(BUFFER_BYTES_MIN, 1 << (size - 1).bit_length())


@cython.cclass
class Arena:
    """The receive buffers of one server, and a pool of free ones.

    Attributes:
        bytes_max: limit for ``out_bytes``, which the callers of ``take`` check.
        out_bytes: size of all buffers in use.
        pooled_bytes: size of all free buffers in the pool.
        viewed: buffers that were freed since the last commit. Uncommitted batches may still refer to them.
    """

    __slots__ = ("_free", "_rested", "bytes_max", "out_bytes", "pooled_bytes", "viewed")

    def __init__(self, bytes_max: int) -> None:
        self._free: dict[int, list[Memory]] = {}  # committed buffers by size, freed since the last sweep
        self._rested: dict[int, list[Memory]] = {}  # buffers by size, freed before the last sweep
        self.viewed: list[Memory] = []
        self.bytes_max: Final = bytes_max
        self.pooled_bytes = 0
        self.out_bytes = 0

    def fits(self, size: int) -> bool:
        """Return whether another buffer of this size would be within the limit."""
        return self.out_bytes + size <= self.bytes_max

    def take(self, size: int) -> Memory:
        """Return a buffer of at least this size, with arbitrary content."""
        buffer_size = rounded(size)
        self.out_bytes += buffer_size
        free = self._free.get(buffer_size) or self._rested.get(buffer_size)
        if not free:
            return allocate(buffer_size, mapped_bytes_min=MAPPED_BYTES_MIN)
        self.pooled_bytes -= buffer_size
        return free.pop()

    def give(self, buffer: Memory) -> None:
        """Free a buffer. Uncommitted batches may still refer to it."""
        size = len(buffer)
        self.out_bytes -= size
        if self.pooled_bytes + size <= POOLED_BYTES_MAX:
            self.pooled_bytes += size
            self.viewed.append(buffer)

    def release_viewed(self) -> None:
        """Allow reuse of all buffers in ``viewed``."""
        for buffer in self.viewed:
            self._free.setdefault(len(buffer), []).append(buffer)
        self.viewed.clear()

    def sweep(self) -> None:
        """Return buffers to the allocator that were not reused for a second. Call it once a second."""
        self.pooled_bytes -= sum(size * len(buffers) for size, buffers in self._rested.items())
        self._rested, self._free = self._free, {}


READ_BYTES: Final = 16 * 1024  # size of one read; a connection that fills it gets its own buffer
CHUNK_BYTES: Final = 8 * READ_BYTES
LAST_READ_AT: Final = CHUNK_BYTES - READ_BYTES  # beyond this position, the next read needs another chunk, or a commit


@cython.cclass
class SharedChunk:
    """The memory into which all connections without a receive buffer read.

    Attributes:
        position: start of the free memory.
        lent: memory of the last read. After the read, it is shortened to the received bytes.
        lent_at: start of ``lent`` in the chunk.
        reader: the connection that is processing the received bytes.
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
        """Do not overwrite the bytes of the last read before the next commit, because a batch may refer to them."""
        self.reader = None
        end = self.lent_at + len(self.lent)
        if end > self.position:
            self.position = end

    def hand_over(self) -> Memory:
        """Return the chunk to a caller that keeps using a part of it and frees it later.

        The next read uses a new chunk.
        """
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
    """The methods of a connection that ``ReceiveMemory`` uses."""

    @property
    def host(self) -> str:
        """Address of the client, without its port."""

    @property
    def standing(self) -> Standing: ...

    @property
    def is_receiving(self) -> bool: ...

    @property
    def is_stalled(self) -> bool:
        """Whether a request arrives too slowly."""

    @property
    def rate(self) -> float:
        """Arrival rate of the incomplete request in bytes per second."""

    @property
    def held_bytes(self) -> int:
        """Size of the connection's receive buffer."""

    def resume_receiving(self) -> None: ...

    def free_idle_buffer(self) -> None: ...

    def abort(self, reason: str = "") -> None: ...

    def release(self) -> None: ...


@cython.cclass
class ReceiveMemory:
    """The memory for the incomplete requests of a server.

    Attributes:
        arena: all buffers.
        shared_chunk: memory for connections without a buffer.
        tick: seconds since the start, as counted by ``Hub.tick``.
        write_batch: number that increases with each commit. Only batches of the current one can refer to receive
            memory.
    """

    __slots__ = (
        "_beyond",
        "_connections",
        "_feeding",
        "_looked",
        "_soon",
        "_waiting",
        "_wasted",
        "arena",
        "shared_chunk",
        "tick",
        "write_batch",
    )

    def __init__(
        self, bytes_max: int, connections: Collection[Receiver], soon: Callable[[Callable[[], None]], object]
    ) -> None:
        """``soon`` calls a function in the loop's next pass."""
        self.arena: Final = Arena(bytes_max)
        self.shared_chunk: Final = SharedChunk(self.arena)
        self._connections: Final = connections
        self._soon: Final = soon
        # connections that are paused until they get memory; the longest waiting is first
        self._waiting: dict[Receiver, None] = {}
        self._feeding = False
        self._beyond: Receiver | None = None  # the one connection that may exceed the limit
        self._looked = -1
        self._wasted = 0  # how many of the latest connections beyond the limit did not complete their request
        self.tick = 0
        self.write_batch = 0

    @property
    def is_short(self) -> bool:
        """Whether a connection waits for memory, or the limit is exceeded."""
        return bool(self._waiting) or not self.arena.fits(0)

    def batch_committed(self) -> None:
        """Allow reuse of all memory that was consumed or freed. Call it when all accepted batches are committed."""
        self.write_batch += 1
        self.shared_chunk.position = 0
        if self.arena.viewed:
            self.arena.release_viewed()

    def grant(self, grown: int, asking: Receiver) -> bool:
        """Return whether a connection may allocate ``grown`` more bytes.

        If not, ``asking`` is called back when it may try again.
        """
        if self._beyond is not None and not self._beyond.is_receiving:
            self._end_beyond(is_wasted=self._beyond.is_stalled)
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

        The one connection that may exceed the limit is not counted, so that others can continue meanwhile.
        """
        return self.arena.fits(grown if self._beyond is None else grown - self._beyond.held_bytes)

    def freed(self) -> None:
        """Let waiting connections try again, because memory was freed."""
        if self._waiting and not self._feeding:
            self._feeding = True
            self._soon(self._feed)

    def leave(self, connection: Receiver) -> None:
        self._waiting.pop(connection, None)
        if self._beyond is connection:
            self._end_beyond(is_wasted=connection.is_receiving)
        self.freed()

    def _end_beyond(self, *, is_wasted: bool) -> None:
        self._beyond = None
        self._wasted = min(self._wasted + 1, WASTED_MAX) if is_wasted else 0

    def _feed(self) -> None:
        """Let waiting connections try again, the longest waiting first, until one of them gets no memory."""
        self._feeding = False
        while self._waiting:
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            connection.resume_receiving()
            if connection in self._waiting:
                later = list(self._waiting)
                self._waiting = dict.fromkeys([later[-1], *later[:-1]])
                return

    def _reclaim(self, grown: int, asking: Receiver) -> None:
        """Free idle buffers, then close stalled connections, until ``grown`` more bytes are within the limit.

        It does this at most once a second, because stalls are measured in seconds.

        A connection that waits for memory is not stalled. If connections that got it did not complete their requests,
        others of those that wait for longest probably would not either, so some are closed: twice as many each time.
        """
        if self._looked == self.tick:
            return
        for connection in self._connections:
            if connection is not asking:
                connection.free_idle_buffer()
        for connection in self._worst([other for other in self._connections if other.is_stalled], asking):
            if self._fits(grown):
                return
            self._close(connection)
        self._looked = self.tick
        waiting = [connection for connection in self._waiting if connection.held_bytes > BUFFER_BYTES_MIN]
        for connection in self._worst(waiting, asking)[: (1 << self._wasted) - 1]:
            self._close(connection)

    def _worst(self, connections: Iterable[Receiver], asking: Receiver) -> list[Receiver]:
        """Return connections other than ``asking``. The first one should be closed first."""
        others = [connection for connection in connections if connection is not asking]
        held: Counter[str] = Counter()
        for connection in others:
            held[connection.host] += connection.held_bytes
        others.sort(key=lambda connection: (connection.standing, -held[connection.host], connection.rate))
        return others

    def _close(self, connection: Receiver) -> None:
        connection.abort("receive memory is short, and this request arrives too slowly")
        connection.release()
