"""Choose which connection to close when a new one arrives and all connection slots are taken.

The first of these that exists is closed:

1. The oldest connection that has never sent anything.
2. An unauthenticated connection that has sent nothing for ``QUIET_TICKS`` seconds, from the address with most
   connections.
3. If one address has more than half of the slots: one of its connections, even if it is active. This is done only in
   favour of an address that has few connections.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from typing import Final, Protocol

from polywire.server.logins import Standing

QUIET_TICKS: Final = 10  # seconds without a byte after which an idle connection can be closed
MOST: Final = 2  # an address with more than half of all slots loses connections to one with less than a quarter


class SlotHolder(Protocol):
    @property
    def host(self) -> str:
        """Address of the client, without its port."""

    @property
    def standing(self) -> Standing: ...

    @property
    def seen_tick(self) -> int:
        """The second in which the client last sent something, as counted by ``Hub.tick``."""

    @property
    def is_waiting(self) -> bool:
        """Whether the client still expects a response."""

    def abort(self, reason: str) -> None: ...

    def free_slot(self) -> None: ...


class ConnectionSlots:
    """Limits the number of connections. If there are too many, the quietest one is closed."""

    __slots__ = ("_by_host", "_connections", "_looked", "_quiet", "_silent", "count_max", "tick")

    def __init__(self, count_max: int, connections: Collection[SlotHolder]) -> None:
        self.count_max: Final = count_max
        self._connections: Final = connections
        self._silent: dict[SlotHolder, None] = {}  # connections that have never sent anything, oldest first
        self._by_host: Counter[str] = Counter()  # number of connections by address
        self._quiet: deque[SlotHolder] = deque()
        self._looked = -1
        self.tick = 0

    def enter(self, connection: SlotHolder) -> bool:
        """Register a new connection. Return False if there are too many and none may be closed."""
        if len(self._connections) >= self.count_max and not self._evict(connection.host):
            return False
        self._silent[connection] = None
        self._by_host[connection.host] += 1
        return True

    def spoke(self, connection: SlotHolder) -> None:
        self._silent.pop(connection, None)

    def leave(self, connection: SlotHolder) -> None:
        self._silent.pop(connection, None)
        self._by_host[connection.host] -= 1
        if not self._by_host[connection.host]:
            del self._by_host[connection.host]

    def _evict(self, host: str) -> bool:
        """Close a connection in favour of a new one from ``host``. Return False if none may be closed."""
        evicted = next(iter(self._silent), None) or self._quietest(host)
        if evicted is None:
            return False
        self._silent.pop(evicted, None)
        evicted.abort("all connection slots are taken, and this client has been quiet longest")
        evicted.free_slot()
        return True

    def _quietest(self, host: str) -> SlotHolder | None:
        """Return the connection to close for a new one from ``host``; None if none may be closed.

        Connections are sorted at most once a second, because the time of their last byte is measured in seconds.
        """
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
