"""Hash and verify passwords with Argon2id in a thread, because hashing is slow on purpose.

* The event loop never waits for a hash.
* At most ``waiting_max`` attempts are queued, round-robin by address. Addresses with failures are delayed.
* Each hash takes 19 MiB of memory while it is computed.
* Verified passwords are cached as keyed digests, so a client that sends its password with every command is hashed once.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Final, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import Argon2Error, InvalidHashError

from polywire.broker.login_queue import Attempt, Backoff, LoginQueue, Origin
from polywire.clock import Clock
from polywire.errors import Busy, ErrorCode
from polywire.log.base import Handle, Loop

THREADS: Final = 1  # a second thread would take a core from connected clients
# the minimum that OWASP recommends: some 40 ms
HASHER: Final = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1)
PASSWORD_BYTES_MAX: Final = 1024

NOWHERE: Final = Origin()  # the origin of work that no client requested

Result = TypeVar("Result")


def hash_password(password: str) -> str:
    """Return the hash to store, which includes salt and parameters."""
    return HASHER.hash(password)


def check_password(kept: str, password: str) -> bool:
    """Return whether the password matches the hash."""
    try:
        return HASHER.verify(kept, password)
    except (Argon2Error, InvalidHashError):
        return False


class Passwords:
    """Hashes and verifies in a thread, one job at a time.

    Invariant: while ``_running`` or ``_timer`` is set, the queue will be checked again.
    """

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
        self._digest_key = secrets.token_bytes(32)
        self._verified: OrderedDict[bytes, None] = OrderedDict()
        self._verifying: Final[Counter[str]] = Counter()

    def is_verifying(self, peer: str) -> bool:
        """Return whether a login of this connection is queued or being verified."""
        return peer in self._verifying

    def known(self, kept: str, password: str) -> bool:
        """Return whether this hash and password were verified recently; False proves nothing."""
        digest = self._digest(kept, password)
        if digest not in self._verified:
            return False
        self._verified.move_to_end(digest)
        return True

    def hash(self, password: str, done: Callable[[str | Busy], None]) -> None:
        """Hash a password and call ``done`` on the loop; with Busy if another attempt displaced it.

        Raises Busy(BUSY) if the queue is full.
        """
        self._wait(NOWHERE, lambda: hash_password(password), done)

    def verify(
        self, kept: str, password: str, done: Callable[[bool | Busy], None], *, origin: Origin = NOWHERE
    ) -> None:
        """Verify a password and call ``done`` on the loop; with Busy if another attempt displaced it.

        Raises Busy(BUSY) if the queue is full.
        """

        def verified(right: bool | Busy) -> None:
            if right is True:
                self._remember(self._digest(kept, password))
            done(right)

        self.prove(lambda: check_password(kept, password), verified, origin=origin)

    def prove(self, check: Callable[[], bool], done: Callable[[bool | Busy], None], *, origin: Origin) -> None:
        """Run a check in the thread when its turn comes, and call ``done`` as ``verify`` does. Raises Busy(BUSY)."""

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
        """Call ``done`` with a result that needs no thread, but later, never from inside this call."""
        self._loop.call_soon(done, result)

    def close(self) -> None:
        """Start no more jobs; callbacks of queued jobs may never be called."""
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
        given_up = self._queue.add(attempt)
        if given_up is attempt:
            raise self._busy()
        if given_up is not None:
            given_up.refuse()
        self._go_on()

    def _busy(self) -> Busy:
        return Busy(ErrorCode.BUSY, f"too many logins at once limit={self._waiting_max}", retry_after_ms=1_000)

    def _go_on(self) -> None:
        """Start the next job, now or at the time when it is ready."""
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
        self._go_on()

    def _run(self, work: Callable[[], Result], done: Callable[[Result | Busy], None]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="polywire-passwords")
        self._running = True

        def finished(result: Result) -> None:
            self._running = False
            self._go_on()
            done(result)

        self._threads.submit(lambda: self._loop.call_soon_threadsafe(finished, work()))

    def _digest(self, kept: str, password: str) -> bytes:
        return blake2b(f"{kept}\0{password}".encode(), key=self._digest_key, digest_size=32).digest()

    def _remember(self, digest: bytes) -> None:
        self._verified[digest] = None
        while len(self._verified) > self._cached_max:
            self._verified.popitem(last=False)
