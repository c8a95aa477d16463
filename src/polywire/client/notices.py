"""Report events of a client: with messages of the logger ``polywire.client``, and with callbacks of the application.

* Without a configuration of ``logging``, Python prints warnings to standard error.
* Callbacks run in the event loop after the event. If one fails, asyncio logs its exception.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, TypeAlias

from polywire.client.address import split_login
from polywire.errors import BrokerError, ErrorCode, Unavailable

WARN_AFTER_S: Final = 1.0  # shorter interruptions, such as a failover, are not worth a warning
WARN_INTERVAL_S: Final = 10.0

log: Final = logging.getLogger("polywire.client")

OnConnect: TypeAlias = Callable[[str], object]
OnDisconnect: TypeAlias = Callable[[str, BrokerError], object]


@dataclass(frozen=True, slots=True)
class Rebalance:
    """A change of the partitions that a consumer reads, each as (topic, partition), in order.

    Attributes:
        assigned: partitions that it did not read before.
        revoked: partitions that it does not read any more.
        partitions: all partitions that it reads now.
    """

    assigned: tuple[tuple[str, int], ...]
    revoked: tuple[tuple[str, int], ...]
    partitions: tuple[tuple[str, int], ...]


OnRebalance: TypeAlias = Callable[[Rebalance], object]


def rebalance(before: Collection[tuple[str, int]], after: Collection[tuple[str, int]]) -> Rebalance:
    """Return the change from some partitions to others."""
    old, new = set(before), set(after)
    return Rebalance(tuple(sorted(new - old)), tuple(sorted(old - new)), tuple(sorted(new)))


def call_soon(function: Callable[..., object] | None, *args: object) -> None:
    """Schedule a callback of the application, if there is one."""
    if function is not None:
        asyncio.get_running_loop().call_soon(function, *args)


def failure_of(task: asyncio.Task[None], what: str) -> BrokerError | None:
    """Return the error for the application when a task of a client has ended. It is None if the task was cancelled."""
    error = None if task.cancelled() else task.exception()
    if error is None or isinstance(error, BrokerError):
        return error
    failure = Unavailable(ErrorCode.STOPPING, f"{what} stopped reason={error!r}")
    failure.__cause__ = error
    return failure


class ConnectionNotices:
    """Reports on the connections of one client, producer or consumer, of which it has one at a time."""

    __slots__ = ("_address", "_failing_since", "_on_connect", "_on_disconnect", "_warned_at")

    def __init__(self, url: str, on_connect: OnConnect | None, on_disconnect: OnDisconnect | None) -> None:
        self._address: Final = split_login(url)[1]
        self._on_connect: Final = on_connect
        self._on_disconnect: Final = on_disconnect
        self._failing_since: float | None = None
        self._warned_at: float | None = None

    def connected(self) -> None:
        """Report that a connection was opened."""
        log.info("connected address=%s", self._address)
        call_soon(self._on_connect, self._address)

    def lost(self, error: BrokerError) -> None:
        """Report that the connection has failed."""
        log.info("connection lost: connecting again address=%s reason=%s", self._address, error.message)
        call_soon(self._on_disconnect, self._address, error)
        self.failed(error)

    def failed(self, error: BrokerError) -> None:
        """Report a failed attempt to connect, or to use the connection. The caller will try again."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        last = self._failing_since if self._warned_at is None else self._warned_at
        if now - last >= (WARN_AFTER_S if self._warned_at is None else WARN_INTERVAL_S):
            self._warned_at = now
            log.warning(
                "no broker for %.0f s: trying again address=%s reason=%s",
                now - self._failing_since,
                self._address,
                error.message,
            )
        else:
            log.debug("attempt failed: trying again address=%s reason=%s", self._address, error.message)

    def responded(self) -> None:
        """Report that the broker has responded, which ends a series of failures."""
        if self._failing_since is None:
            return
        seconds = time.monotonic() - self._failing_since
        level = logging.INFO if self._warned_at is None else logging.WARNING  # as visible as the failure
        log.log(level, "the broker responds again after %.1f s address=%s", seconds, self._address)
        self._failing_since = self._warned_at = None
