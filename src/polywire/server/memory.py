"""Memory for requests that have begun to arrive: who gets some, who waits for it, and who has to give it back. Compiled.

Promises: an unfinished request takes memory in proportion to what of it has come; together they stay within a limit, and one that goes on
arriving is held back at worst, never cut: one at a time may go beyond the limit until it is handled, beside the others, so that there is
always one that comes to its end. Short of memory, those that hardly arrive have to go: first of peers that nobody knows, then of the
address that holds most, the slowest first; nobody goes for what the loop has not read yet. Must not know: sessions, wires.
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
    """A connection, as far as its memory is concerned."""

    @property
    def host(self) -> str:
        """Address of the peer, without its port."""

    @property
    def standing(self) -> Standing:
        """How well the peer is known."""

    @property
    def is_receiving(self) -> bool:
        """Whether a request has begun to arrive."""

    @property
    def is_stalled(self) -> bool:
        """Whether that request hardly arrives."""

    @property
    def rate(self) -> float:
        """Bytes a second of it."""

    @property
    def held_bytes(self) -> int:
        """What it takes."""

    def go_on_receiving(self) -> None:
        """There may be memory now."""

    def give_back_idle(self) -> None:
        """Give back a buffer that holds no request."""

    def abort(self, reason: str = "") -> None:
        """Close at once."""

    def let_go(self) -> None:
        """Have nothing received any more."""


@cython.cclass
class ReceiveMemory:
    """What the unfinished requests of one server take.

    Invariant: ``_waiting`` are connections that are paused until they get memory, the one waiting longest first; ``_beyond`` is the one that
    may take what it needs. Nothing views bytes that were handed on while ``write_batch`` was smaller.
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
        """soon: calls back in the loop's next pass."""
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
        """Whether somebody waits for memory, or more is taken than should be."""
        return bool(self._waiting) or not self.arena.fits(0)

    def settle(self) -> None:
        """Nothing views what was handed on, or given back, so far."""
        self.write_batch += 1
        self.shared_chunk.position = 0
        if self.arena.viewed:
            self.arena.settle()

    def grant(self, grown: int, asking: Receiver) -> bool:
        """Whether a connection may hold so much more; if not it waits, and is called when it may try again."""
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
        """Whether so much more may be taken: what the one beyond the limit takes does not count, so that others are served meanwhile."""
        return self.arena.fits(grown if self._beyond is None else grown - self._beyond.held_bytes)

    def given_back(self) -> None:
        """A request has come to its end, or its connection has."""
        if self._waiting and not self._feeding:
            self._feeding = True
            self._soon(self._feed)

    def leave(self, connection: Receiver) -> None:
        """The connection is gone."""
        self._waiting.pop(connection, None)
        if self._beyond is connection:
            self._beyond = None
        self.given_back()

    def _feed(self) -> None:
        """Let those that wait try again, the one waiting longest first, until one has to go on waiting."""
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
        """Take back what holds no request, then close what hardly arrives; who that is changes with the seconds only."""
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
            connection.abort("receive memory is short, and this request hardly arrives")
            connection.let_go()
        self._looked = self.tick
