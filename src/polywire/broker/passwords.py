"""Passwords: hashed with Argon2id, in threads of their own, because a hash is slow on purpose.

Promises: the loop never waits for a hash; at most ``waiting_max`` wait for a thread, and each costs 19 MiB while it runs; what was verified
is remembered by a keyed digest, never as it was given, so that a client that sends its password with every command pays once.
Must not know: users, wires.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Final, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import Argon2Error, InvalidHashError

from polywire.errors import Busy, ErrorCode
from polywire.log.base import Loop

THREADS: Final = 1  # a second one would take the last core from those who are let in already
HASHER: Final = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1)  # OWASP's least: some 40 ms
PASSWORD_BYTES_MAX: Final = 1024

Result = TypeVar("Result")


def hash_password(password: str) -> str:
    """The hash to keep, with its salt and parameters in it."""
    return HASHER.hash(password)


def check_password(kept: str, password: str) -> bool:
    """Whether this is the password that was hashed."""
    try:
        return HASHER.verify(kept, password)
    except (Argon2Error, InvalidHashError):
        return False


class Passwords:
    """Hashes and verifies in the background.

    Invariant: ``_waiting`` is the number of jobs whose callback has not been called.
    """

    __slots__ = ("_cached_max", "_digest_key", "_loop", "_threads", "_verified", "_waiting", "_waiting_max")

    def __init__(self, loop: Loop, *, waiting_max: int, cached_max: int) -> None:
        self._loop = loop
        self._threads: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._waiting_max = waiting_max
        self._cached_max = cached_max
        self._digest_key = secrets.token_bytes(32)
        self._verified: OrderedDict[bytes, None] = OrderedDict()

    def known(self, kept: str, password: str) -> bool:
        """Whether this very pair was verified before; False proves nothing."""
        digest = self._digest(kept, password)
        if digest not in self._verified:
            return False
        self._verified.move_to_end(digest)
        return True

    def hash(self, password: str, done: Callable[[str], None]) -> None:
        """Hash, then call ``done`` on the loop. Raises Busy(BUSY)."""
        self._run(lambda: hash_password(password), done)

    def verify(self, kept: str, password: str, done: Callable[[bool], None]) -> None:
        """Verify, then call ``done`` on the loop. Raises Busy(BUSY)."""

        def verified(right: bool) -> None:
            if right:
                self._remember(self._digest(kept, password))
            done(right)

        self._run(lambda: check_password(kept, password), verified)

    def soon(self, done: Callable[[Result], None], result: Result) -> None:
        """Tell what needs no thread, as late as everything else is told: never from inside the call."""
        self._loop.call_soon(done, result)

    def close(self) -> None:
        """Start nothing more; callbacks that are owed may never come."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        if self._waiting >= self._waiting_max:
            raise Busy(ErrorCode.BUSY, f"too many logins at once limit={self._waiting_max}", retry_after_ms=1_000)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="polywire-passwords")
        self._waiting += 1

        def finished(result: Result) -> None:
            self._waiting -= 1
            done(result)

        self._threads.submit(lambda: self._loop.call_soon_threadsafe(finished, work()))

    def _digest(self, kept: str, password: str) -> bytes:
        return blake2b(f"{kept}\0{password}".encode(), key=self._digest_key, digest_size=32).digest()

    def _remember(self, digest: bytes) -> None:
        self._verified[digest] = None
        while len(self._verified) > self._cached_max:
            self._verified.popitem(last=False)
