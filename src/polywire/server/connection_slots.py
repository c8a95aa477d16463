"""Slots for connections: who gets one when all are taken, and who gives way.

Promises: a peer that never said anything gives way to one that comes, the one silent longest first; then one that nobody knows and that has
been quiet for a while; and no address that has most of the slots keeps an address that has few from getting one. Must not know: sockets,
wires.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from typing import Final, Protocol

from polywire.server.logins import Standing

QUIET_TICKS: Final = 10  # seconds without a byte after which an idle peer may have to give way
MOST: Final = 2  # an address with more than this share of all slots gives way to one with less than half as many


class SlotHolder(Protocol):
    """A connection, as far as its slot is concerned."""

    @property
    def host(self) -> str:
        """Address of the peer, without its port."""

    @property
    def standing(self) -> Standing:
        """How well the peer is known."""

    @property
    def seen_tick(self) -> int:
        """When the peer last sent something."""

    @property
    def is_waiting(self) -> bool:
        """Whether it is owed an answer."""

    def abort(self, reason: str) -> None:
        """Close at once."""

    def vacate(self) -> None:
        """Free the slot."""


class ConnectionSlots:
    """Invariant: ``_silent`` are the connections that never said anything, in the order they came; ``_by_host`` counts all of an address."""

    __slots__ = ("_by_host", "_connections", "_looked", "_quiet", "_silent", "count_max", "tick")

    def __init__(self, count_max: int, connections: Collection[SlotHolder]) -> None:
        self.count_max: Final = count_max
        self._connections: Final = connections
        self._silent: dict[SlotHolder, None] = {}
        self._by_host: Counter[str] = Counter()
        self._quiet: deque[SlotHolder] = deque()
        self._looked = -1
        self.tick = 0

    def enter(self, connection: SlotHolder) -> bool:
        """Give a new connection a slot; False when there is none and nobody gives way."""
        if len(self._connections) >= self.count_max and not self._give_way(connection.host):
            return False
        self._silent[connection] = None
        self._by_host[connection.host] += 1
        return True

    def spoke(self, connection: SlotHolder) -> None:
        """A peer has said something."""
        self._silent.pop(connection, None)

    def leave(self, connection: SlotHolder) -> None:
        """The connection is gone."""
        self._silent.pop(connection, None)
        self._by_host[connection.host] -= 1
        if not self._by_host[connection.host]:
            del self._by_host[connection.host]

    def _give_way(self, host: str) -> bool:
        """Have somebody go for a peer from this address."""
        going = next(iter(self._silent), None) or self._quietest(host)
        if going is None:
            return False
        self._silent.pop(going, None)
        going.abort("all connection slots are taken, and this peer has been quiet longest")
        going.vacate()
        return True

    def _quietest(self, host: str) -> SlotHolder | None:
        """Who has been quiet for a while; who that is changes with the seconds only."""
        if self._looked != self.tick:
            self._looked = self.tick
            known = [connection for connection in self._connections if connection.standing < Standing.IDENTIFIED]
            known.sort(key=lambda connection: (-self._by_host[connection.host], connection.seen_tick))
            self._quiet = deque(known)
        few = self._by_host[host] < self.count_max // (2 * MOST)
        while self._quiet:
            connection = self._quiet[0]
            if connection not in self._connections or connection.is_waiting:
                self._quiet.popleft()
                continue
            many = self._by_host[connection.host] > self.count_max // MOST
            if self.tick - connection.seen_tick < QUIET_TICKS and not (few and many):
                return None
            return self._quiet.popleft()
        return None
