"""Hash and verify passwords with Argon2id in a thread, and decide the order in which logins are verified.

* The event loop never waits for a hash. Each hash takes 19 MiB of memory while it is computed.
* Logins are verified round-robin by client address, with delays after failures. An address with many logins delays each
  login of another address by at most one verification.
* At most ``waiting_max`` attempts are queued. A full queue drops an attempt of the address that has most attempts: the
  attempt with most failures, or the newest of several such attempts.
* Verified passwords are cached as keyed digests, so a client that sends its password with every command is hashed once.
* The cache and all other tables have a size limit.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import blake2b
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from polywire.clock import Clock
from polywire.errors import Busy, ErrorCode
from polywire.log.base import Handle, Loop
from polywire.types import host_of

if TYPE_CHECKING:  # imported when the first password is hashed, because a broker without users needs no hashes
    from argon2 import PasswordHasher

FAILURES_KEPT_MAX: Final = (
    4_096  # addresses, connections and names with recent failures, some 200 bytes each; the oldest is dropped first
)
FAILURES_FORGOTTEN_S: Final = 60.0  # seconds without a new failure after which failures are forgotten
ADDRESS_FREE: Final = 5  # failures of one address without a delay, because users mistype passwords
NAME_FREE: Final = 10  # failures of one name, from all addresses, without a delay
DELAY_MIN_S: Final = 0.25  # seconds; doubles with each failure
# short enough that a user who shares an address with an attacker can log in before the client times out
ADDRESS_DELAY_MAX_S: Final = 2.0
NAME_DELAY_MAX_S: Final = 1.0  # short, because guesses of a name's password must not lock out its owner
PREFIX_OF_SITE: Final = 64  # bits of an IPv6 address that identify a site; it controls all addresses with this prefix
THREADS: Final = 1  # a second thread would take a core from connected clients
PASSWORD_BYTES_MAX: Final = 1024
Result = TypeVar("Result")


class Origin(msgspec.Struct, frozen=True):
    """The connection, address and user name of a login. Failures are counted for each of them that is not empty.

    Attributes:
        peer: connection, as ``host:port``.
        address: address of the connection.
        name: name of the user.
    """

    peer: str = ""
    address: str = ""
    name: str = ""


def origin_of(peer: str, name: str) -> Origin:
    """Return the origin of a login with this name on a connection from ``host:port``."""
    host = host_of(peer)
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return Origin(peer, host, name)
    if isinstance(address, IPv6Address) and not address.is_loopback:
        return Origin(peer, str(int(address) >> (128 - PREFIX_OF_SITE)), name)
    return Origin(peer, host, name)


class Failures:
    """Number and time of recent login failures by connection, address and user name.

    At most ``FAILURES_KEPT_MAX`` entries.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        # the key with the latest failure is at the end
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def count(self, key: str, now: float) -> int:
        count, at = self._counts.get(key, (0, now))
        return count if now - at < FAILURES_FORGOTTEN_S else 0

    def add(self, key: str, now: float) -> None:
        if key:
            self._counts[key] = self.count(key, now) + 1, now
            self._counts.move_to_end(key)
            while len(self._counts) > FAILURES_KEPT_MAX:
                self._counts.popitem(last=False)

    def forget(self, key: str) -> None:
        self._counts.pop(key, None)


class Backoff:
    """Computes how long a login must wait after failures of the same connection, address or user name."""

    __slots__ = ("_addresses", "_good", "_names", "_peers")

    def __init__(self) -> None:
        self._addresses: Final = Failures()
        self._names: Final = Failures()
        self._peers: Final = Failures()
        # pairs of address and name that have logged in; failures from other addresses do not delay them
        self._good: OrderedDict[tuple[str, str], None] = OrderedDict()

    def delay_s(self, origin: Origin, now: float) -> float:
        if (origin.address, origin.name) in self._good:
            return 0.0
        address = _delay_s(self._addresses.count(origin.address, now) - ADDRESS_FREE, ADDRESS_DELAY_MAX_S)
        return max(address, _delay_s(self._names.count(origin.name, now) - NAME_FREE, NAME_DELAY_MAX_S))

    def strikes(self, origin: Origin, now: float) -> int:
        return self._peers.count(origin.peer, now)

    def wrong(self, origin: Origin, now: float) -> None:
        self._addresses.add(origin.address, now)
        self._names.add(origin.name, now)
        self._peers.add(origin.peer, now)
        if self._peers.count(origin.peer, now) > 1:
            self._good.pop((origin.address, origin.name), None)

    def right(self, origin: Origin) -> None:
        self._peers.forget(origin.peer)
        if origin.address:
            self._good[origin.address, origin.name] = None
            self._good.move_to_end((origin.address, origin.name))
            while len(self._good) > FAILURES_KEPT_MAX:
                self._good.popitem(last=False)


def _delay_s(failures: int, longest_s: float) -> float:
    if failures < 0:
        return 0.0
    doublings = min(failures, 16)  # more than the longest delay needs, and small enough not to overflow
    return min(DELAY_MIN_S * float(1 << doublings), longest_s)


class Attempt(msgspec.Struct, eq=False):
    """A queued login, or another job that hashes a password.

    Attributes:
        ready_at: time before which it must not run.
        strikes: number of recent failures of its connection, address and user name.
        run: function that executes it.
        refuse: called instead if the queue drops it.
        turn, name_turn, order: positions in the queue, set by ``LoginQueue``.
    """

    origin: Origin
    ready_at: float
    strikes: int
    run: Callable[[], None]
    refuse: Callable[[], object]
    turn: int = 0
    name_turn: int = 0
    order: int = 0


class LoginQueue:
    """Queued attempts, at most ``waiting_max``.

    Addresses take turns: each gets one attempt before any address gets another. Within an address, attempts with fewer
    failures are first; among those with equally many, names take turns.
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
        """Queue an attempt. If the queue is full, return the attempt that is dropped, which may be the new one."""
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
        """Return the attempt to drop.

        It belongs to the address with most attempts. Among these attempts, it is the one with most failures. If there are
        several, it is the newest attempt for the name with most attempts.
        """
        addresses = Counter(attempt.origin.address for attempt in self._attempts)
        names = Counter((attempt.origin.address, attempt.origin.name) for attempt in self._attempts)

        def burden(attempt: Attempt) -> tuple[int, int, int, int]:
            origin = attempt.origin
            return addresses[origin.address], attempt.strikes, names[origin.address, origin.name], attempt.order

        return max(self._attempts, key=burden)

    def take(self, now: float) -> Attempt | None:
        """Remove and return the next attempt, None if none is ready."""
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
        return min((attempt.ready_at for attempt in self._attempts), default=None)

    def _remove(self, attempt: Attempt) -> None:
        self._attempts.remove(attempt)
        address = attempt.origin.address
        if not any(other.origin.address == address for other in self._attempts):
            self._last_turns.pop(address, None)
            self._name_turns.pop(address, None)


NOWHERE: Final = Origin()  # the origin of work that no client requested


@cache
def _hasher() -> PasswordHasher:
    from argon2 import PasswordHasher

    # the minimum that OWASP recommends: some 40 ms
    return PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1)


def hash_password(password: str) -> str:
    """Return the hash to store, which includes salt and parameters."""
    return _hasher().hash(password)


def check_password(kept: str, password: str) -> bool:
    from argon2.exceptions import Argon2Error, InvalidHashError

    try:
        return _hasher().verify(kept, password)
    except (Argon2Error, InvalidHashError):
        return False


class Passwords:
    """Hashes and verifies passwords in a thread, one job at a time."""

    __slots__ = (
        "_backoff",
        "_cached_max",
        "_clock",
        "_digest_key",
        "_loop",
        "_queue",
        "_running",
        "_threads",
        "_timer",
        "_verified",
        "_verifying",
        "_waiting_max",
    )

    def __init__(self, loop: Loop, clock: Clock, *, waiting_max: int, cached_max: int) -> None:
        self._loop = loop
        self._clock = clock
        self._threads: ThreadPoolExecutor | None = None
        self._running = False
        self._timer: Handle | None = None
        self._backoff: Final = Backoff()
        self._queue: Final = LoginQueue(waiting_max)
        self._waiting_max = waiting_max
        self._cached_max = cached_max
        # key of the digests in ``_verified``
        self._digest_key = secrets.token_bytes(32)
        self._verified: OrderedDict[bytes, None] = OrderedDict()
        self._verifying: Final[Counter[str]] = Counter()

    def is_verifying(self, peer: str) -> bool:
        """Return whether a login of this connection is queued or being verified."""
        return peer in self._verifying

    def known(self, kept: str, password: str) -> bool:
        """Return True if this password was recently verified against the hash ``kept``.

        False means that it must be verified.
        """
        digest = self._digest(kept, password)
        if digest not in self._verified:
            return False
        self._verified.move_to_end(digest)
        return True

    def hash(self, password: str, done: Callable[[str | Busy], None]) -> None:
        """Hash a password and call ``done`` on the loop with the hash.

        If the queue of logins drops this job, ``done`` is called with Busy. Raises Busy(BUSY) if the queue is full.
        """
        self._wait(NOWHERE, lambda: hash_password(password), done)

    def verify(
        self, kept: str, password: str, done: Callable[[bool | Busy], None], *, origin: Origin = NOWHERE
    ) -> None:
        """Verify a password and call ``done`` on the loop with whether it matches the hash ``kept``.

        If the queue of logins drops this job, ``done`` is called with Busy. Raises Busy(BUSY) if the queue is full.
        """

        def verified(right: bool | Busy) -> None:
            if right is True:
                self._remember(self._digest(kept, password))
            done(right)

        self.prove(lambda: check_password(kept, password), verified, origin=origin)

    def prove(self, check: Callable[[], bool], done: Callable[[bool | Busy], None], *, origin: Origin) -> None:
        """Queue a check of credentials, run it in the thread, and call ``done`` on the loop with its result.

        If the queue of logins drops this job, ``done`` is called with Busy. Raises Busy(BUSY) if the queue is full.
        """

        def proved(right: bool | Busy) -> None:
            self._end_verifying(origin.peer)
            if right is True:
                self._backoff.right(origin)
            elif right is False:
                self._backoff.wrong(origin, self._clock.monotonic())
            done(right)

        self._verifying[origin.peer] += 1
        try:
            self._wait(origin, check, proved)
        except Busy:
            self._end_verifying(origin.peer)
            raise

    def _end_verifying(self, peer: str) -> None:
        self._verifying[peer] -= 1
        if not self._verifying[peer]:
            del self._verifying[peer]

    def soon(self, done: Callable[[Result], None], result: Result) -> None:
        """Call ``done`` with a known result in a later pass of the loop."""
        self._loop.call_soon(done, result)

    def close(self) -> None:
        """Start no more jobs. The callbacks of queued jobs may then never be called."""
        if self._timer is not None:
            self._timer.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _wait(self, origin: Origin, work: Callable[[], Result], done: Callable[[Result | Busy], None]) -> None:
        now = self._clock.monotonic()
        attempt = Attempt(
            origin,
            ready_at=now + self._backoff.delay_s(origin, now),
            strikes=self._backoff.strikes(origin, now),
            run=lambda: self._run(work, done),
            refuse=lambda: self._loop.call_soon(done, self._busy()),
        )
        displaced = self._queue.add(attempt)
        if displaced is attempt:
            raise self._busy()
        if displaced is not None:
            displaced.refuse()
        self._start_next()

    def _busy(self) -> Busy:
        return Busy(ErrorCode.BUSY, f"too many logins at once limit={self._waiting_max}", retry_after_ms=1_000)

    def _start_next(self) -> None:
        """Start the next job, or set a timer for the time at which it may start."""
        if self._running:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock.monotonic()
        attempt = self._queue.take(now)
        if attempt is not None:
            attempt.run()
            return
        ready_at = self._queue.next_at()
        if ready_at is not None:
            self._timer = self._loop.call_later(max(ready_at - now, 0.0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._start_next()

    def _run(self, work: Callable[[], Result], done: Callable[[Result | Busy], None]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="polywire-passwords")
        self._running = True

        def finished(result: Result) -> None:
            self._running = False
            self._start_next()
            done(result)

        self._threads.submit(lambda: self._loop.call_soon_threadsafe(finished, work()))

    def _digest(self, kept: str, password: str) -> bytes:
        return blake2b(f"{kept}\0{password}".encode(), key=self._digest_key, digest_size=32).digest()

    def _remember(self, digest: bytes) -> None:
        self._verified[digest] = None
        while len(self._verified) > self._cached_max:
            self._verified.popitem(last=False)
