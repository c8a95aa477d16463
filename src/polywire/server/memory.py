"""Memory for unfinished requests: which connections get memory, wait for it, or are closed to free it.

This module is compiled.

* An unfinished request takes memory in proportion to the bytes received.
* All unfinished requests together stay within a limit. One request at a time may exceed it, so that at least one
  request can be completed. Meanwhile, other requests that make progress wait and are not closed.
* When memory is short, stalled requests are closed: first those of unauthenticated clients, then those of the address
  that uses most memory, the slowest first. Unread bytes in the socket count as received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, Protocol

import cython

from polywire.server.arena import Arena
from polywire.server.logins import Standing
from polywire.server.shared_chunk import SharedChunk


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
