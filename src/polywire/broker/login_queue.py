"""Who is verified next: logins are taken round-robin by address, and who has guessed wrong waits longer.

Promises: pure; an address with many logins holds up those of others by one each; when there are too many, the last come of the address
with the most, which have failed most, are given up first; every table has a limit. Must not know: passwords, users, threads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Final

from polywire.types import host_of

FAILURES_KEPT_MAX: Final = (
    4_096  # addresses, connections and names that failed of late, some 200 bytes each; the oldest is forgotten first
)
FAILURES_FORGOTTEN_S: Final = 60.0  # since the last one
ADDRESS_FREE: Final = 5  # wrong logins of one address before others of it wait: people mistype
NAME_FREE: Final = 10  # of one name, from wherever they come
DELAY_MIN_S: Final = 0.25  # then it doubles
ADDRESS_DELAY_MAX_S: Final = 2.0  # who shares an address with a guesser still gets in before a client gives up
NAME_DELAY_MAX_S: Final = 1.0  # a name that is guessed at must not lock its owner out
PREFIX_OF_SITE: Final = 64  # bits of an IPv6 address that one peer has for itself


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a login comes from: its connection, that one's address, and the name it gives. Empty ones are nobody's and never wait."""

    peer: str = ""
    address: str = ""
    name: str = ""


def origin_of(peer: str, name: str) -> Origin:
    """peer: ``host:port``, as connections have it."""
    host = host_of(peer)
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return Origin(peer, host, name)
    if isinstance(address, IPv6Address) and not address.is_loopback:
        return Origin(peer, str(int(address) >> (128 - PREFIX_OF_SITE)), name)
    return Origin(peer, host, name)


class Failures:
    """How often something failed lately.

    Invariant: at most ``FAILURES_KEPT_MAX`` keys, the one that failed last at the end.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def count(self, key: str, now: float) -> int:
        """Failures of late."""
        count, at = self._counts.get(key, (0, now))
        return count if now - at < FAILURES_FORGOTTEN_S else 0

    def add(self, key: str, now: float) -> None:
        """One more."""
        if key:
            self._counts[key] = self.count(key, now) + 1, now
            self._counts.move_to_end(key)
            while len(self._counts) > FAILURES_KEPT_MAX:
                self._counts.popitem(last=False)

    def forget(self, key: str) -> None:
        """It went well."""
        self._counts.pop(key, None)


class Backoff:
    """How long a login has to wait for what others of its kind did wrong.

    ``_good`` are addresses with the name that was right there lately: who guesses at a name elsewhere does not hold up its owner.
    """

    __slots__ = ("_addresses", "_good", "_names", "_peers")

    def __init__(self) -> None:
        self._addresses: Final = Failures()
        self._names: Final = Failures()
        self._peers: Final = Failures()
        self._good: OrderedDict[tuple[str, str], None] = OrderedDict()

    def delay_s(self, origin: Origin, now: float) -> float:
        """Seconds before it may be verified."""
        if (origin.address, origin.name) in self._good:
            return 0.0
        address = _delay_s(self._addresses.count(origin.address, now) - ADDRESS_FREE, ADDRESS_DELAY_MAX_S)
        return max(address, _delay_s(self._names.count(origin.name, now) - NAME_FREE, NAME_DELAY_MAX_S))

    def strikes(self, origin: Origin, now: float) -> int:
        """Wrong logins of its connection."""
        return self._peers.count(origin.peer, now)

    def wrong(self, origin: Origin, now: float) -> None:
        """A login failed."""
        self._addresses.add(origin.address, now)
        self._names.add(origin.name, now)
        self._peers.add(origin.peer, now)
        if self._peers.count(origin.peer, now) > 1:
            self._good.pop((origin.address, origin.name), None)

    def right(self, origin: Origin) -> None:
        """A login succeeded."""
        self._peers.forget(origin.peer)
        if origin.address:
            self._good[origin.address, origin.name] = None
            self._good.move_to_end((origin.address, origin.name))
            while len(self._good) > FAILURES_KEPT_MAX:
                self._good.popitem(last=False)


def _delay_s(failures: int, longest_s: float) -> float:
    if failures < 0:
        return 0.0
    doublings = min(failures, 16)  # more than the longest delay has, and no float overflows
    return min(DELAY_MIN_S * float(1 << doublings), longest_s)


@dataclass(slots=True, eq=False)
class Attempt:
    """A login, or another hash, that waits. ``turn``, ``name_turn`` and ``order`` are the queue's."""

    origin: Origin
    ready_at: float
    strikes: int
    run: Callable[[], None]
    refuse: Callable[[], object]
    turn: int = field(default=0)
    name_turn: int = field(default=0)
    order: int = field(default=0)


class LoginQueue:
    """Attempts that wait, at most ``waiting_max`` of them.

    Each gets a turn one above the last of its address, or that of whoever was taken last; the lowest turn goes first. Of one address names
    take turns in the same way, among those who have failed alike.
    """

    __slots__ = ("_attempts", "_last_turns", "_name_turns", "_order", "_turn", "_waiting_max")

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max: Final = waiting_max
        self._attempts: list[Attempt] = []
        self._last_turns: dict[str, int] = {}
        self._name_turns: dict[str, int] = {}
        self._turn = 0
        self._order = 0

    def __len__(self) -> int:
        return len(self._attempts)

    def add(self, attempt: Attempt) -> Attempt | None:
        """Let an attempt wait; returns the one that has to go for it, which may be itself."""
        address = attempt.origin.address
        attempt.turn = max(self._turn, self._last_turns.get(address, self._turn)) + 1
        same = sum(
            other.origin.address == address and other.origin.name == attempt.origin.name for other in self._attempts
        )
        attempt.name_turn = self._name_turns.get(address, 0) + 1 + same
        self._order += 1
        attempt.order = self._order
        self._attempts.append(attempt)
        self._last_turns[address] = attempt.turn
        if len(self._attempts) <= self._waiting_max:
            return None
        worst = self._worst()
        self._remove(worst)
        return worst

    def _worst(self) -> Attempt:
        """Of the address with the most: who has failed most, or else came last for the name that is tried most."""
        addresses = Counter(attempt.origin.address for attempt in self._attempts)
        names = Counter((attempt.origin.address, attempt.origin.name) for attempt in self._attempts)

        def burden(attempt: Attempt) -> tuple[int, int, int, int]:
            origin = attempt.origin
            return addresses[origin.address], attempt.strikes, names[origin.address, origin.name], attempt.order

        return max(self._attempts, key=burden)

    def take(self, now: float) -> Attempt | None:
        """The attempt whose turn it is, None while none is ready."""
        ready = [attempt for attempt in self._attempts if attempt.ready_at <= now]
        if not ready:
            return None
        first = min(ready, key=lambda attempt: (attempt.turn, attempt.order))
        same = [attempt for attempt in ready if attempt.origin.address == first.origin.address]
        best = min(same, key=lambda attempt: (attempt.strikes, attempt.name_turn, attempt.order))
        self._name_turns[best.origin.address] = best.name_turn
        best.turn, first.turn = first.turn, best.turn
        self._turn = best.turn
        self._remove(best)
        return best

    def next_at(self) -> float | None:
        """When the next attempt is ready."""
        return min((attempt.ready_at for attempt in self._attempts), default=None)

    def _remove(self, attempt: Attempt) -> None:
        self._attempts.remove(attempt)
        address = attempt.origin.address
        if not any(other.origin.address == address for other in self._attempts):
            self._last_turns.pop(address, None)
            self._name_turns.pop(address, None)
