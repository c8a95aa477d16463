"""Memory for requests that have begun to arrive: who gets some, who waits for it, and who has to give it back.

Promises: an unfinished request takes memory in proportion to what of it has come; together they stay within a limit, and one that goes on
arriving is held back at worst, never cut: one at a time may go beyond the limit until it is handled, beside the others, so that there is
always one that comes to its end. Short of memory, those that hardly arrive have to go: first of peers that nobody knows, then of the
address that holds most, the slowest first; nobody goes for what the loop has not read yet. Must not know: sessions, wires.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, Protocol

from polywire.server.arena import Arena
from polywire.server.logins import Standing
from polywire.server.receive_buffer import ReceiveBuffer
from polywire.server.unread import unread_bytes

SMALL_BYTES: Final = 4 * 1024  # so much of a request may always wait: requests of most kinds are no longer
STALLED_TICKS: Final = 2  # more than one second, at most two, after which a request that hardly arrives may have to go
SHORT_BYTES_PER_S_MIN: Final = 16 * 1024  # less is "hardly" while memory is short
BYTES_PER_S_MIN: Final = 64  # less is "not at all", memory or not


class Progress:
    """How quickly an unfinished request arrives. Guards: both fields are of when it began, or was last taken up."""

    __slots__ = ("_began", "_bytes")

    def __init__(self) -> None:
        self._began = 0
        self._bytes = 0

    def begin(self, tick: int, size: int) -> None:
        """So much of it is there."""
        self._began = tick
        self._bytes = size

    def rate(self, tick: int, size: int) -> float:
        """Bytes a second since it began."""
        return (size - self._bytes) / max(tick - self._began, 1)

    def is_slow(self, tick: int, size: int, ticks: int, bytes_per_s: int) -> bool:
        """Whether for so long less than so much has come."""
        return tick - self._began >= ticks and self.rate(tick, size) < bytes_per_s

    def goes_on(self, tick: int, size: int, transport: object) -> bool:
        """Whether it arrives well enough while memory is short, if what lies unread is counted."""
        unread = unread_bytes(transport)
        return unread > 0 and self.rate(tick, size + unread) >= SHORT_BYTES_PER_S_MIN


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

    def abort(self, reason: str) -> None:
        """Close at once."""

    def let_go(self) -> None:
        """Have nothing received any more."""


class ReceiveMemory:
    """What the unfinished requests of one server take.

    Invariant: ``_waiting`` are connections that are paused until they get memory, the one waiting longest first; ``_beyond`` is the one that
    may take what it needs.
    """

    __slots__ = (
        "_beyond",
        "_connections",
        "_feeding",
        "_looked",
        "_soon",
        "_waiting",
        "arena",
        "receive_buffer",
        "tick",
    )

    def __init__(
        self, bytes_max: int, connections: Collection[Receiver], soon: Callable[[Callable[[], None]], object]
    ) -> None:
        """soon: calls back in the loop's next pass."""
        self.arena: Final = Arena(bytes_max)
        self.receive_buffer: Final = ReceiveBuffer(self.arena)
        self._connections: Final = connections
        self._soon: Final = soon
        self._waiting: dict[Receiver, None] = {}
        self._feeding = False
        self._beyond: Receiver | None = None
        self._looked = -1
        self.tick = 0

    @property
    def is_short(self) -> bool:
        """Whether somebody waits for memory, or more is taken than should be."""
        return bool(self._waiting) or not self.arena.fits(0)

    def settle(self) -> None:
        """Nothing views what landed, or was given back, so far."""
        self.arena.settle()
        self.receive_buffer.settle()

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
