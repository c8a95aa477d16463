"""The way to a broker: one connection at a time, made anew with back-off when it is lost.

Promises: everybody who asks while there is no connection waits for the same one; a broker that is back within ``reconnect_s`` is found, and
what waiting does not mend is not tried again: a login that is refused, TLS that fails, a port that hangs up at once, again and again, and has
never answered. Must not know: any one wire, what is asked.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.login import split_login
from polywire.client.unreachable import is_hanging_up, is_silent, silent
from polywire.errors import Busy, ErrorCode, NotOwner, Unavailable

CONNECT_S: Final = 10.0  # a broker that is started beside its clients, and the address of none at all soon noticed
RECONNECT_S: Final = 60.0  # a broker's restart with a long recovery
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
BACKOFF_JITTER: Final = 0.25  # of a pause: clients of a broker that comes back do not all come at once
HANG_UPS_MAX: Final = (
    5  # in a row, of a port that never answered: another wire's, or one with TLS, and not a broker that restarts
)
AT_ONCE_S: Final = 1.0  # a broker that stands by holds connections for longer, until somebody leads

ATTEMPT_S_MIN: Final = (
    1.0  # for one attempt, however little time is left: a loaded broker takes some tenths to accept a login
)
IN_PROCESS: Final = (
    "memory://"  # a broker for tests, which is started when it is first asked for: that is no wait for a peer
)

GONE: Final = (Unavailable, NotOwner)
"""The broker is gone, or leads no longer and has not done what it was asked: whoever leads now is found by connecting anew."""

T = TypeVar("T")


class Link:
    """The connection of one client, producer or consumer. Guards: there is at most one connection, and none once it is closed."""

    __slots__ = (
        "_closed",
        "_connect_s",
        "_hang_ups",
        "_is_answered",
        "_opening",
        "_tried_at",
        "_wire",
        "reconnect_s",
        "url",
    )

    def __init__(self, url: str, *, connect_s: float = CONNECT_S, reconnect_s: float = RECONNECT_S) -> None:
        """Remember where the broker is.

        Args:
            url: as for ``connect``.
            connect_s: limits the search for a broker that is not there yet, in seconds.
            reconnect_s: limits each search for one that is gone, in seconds.
        """
        self.url: Final = url
        self._connect_s: Final = connect_s
        self.reconnect_s: Final = reconnect_s
        self._wire: WireClient | None = None
        self._opening: asyncio.Task[WireClient] | None = None
        self._closed = False
        self._hang_ups = 0
        self._tried_at = 0.0
        self._is_answered = False

    @property
    def is_mistaken(self) -> bool:
        """Whether what listens there has hung up at once so often, and never answered, that it will not be what was meant."""
        return not self._is_answered and self._hang_ups >= HANG_UPS_MAX

    def answered(self) -> None:
        """Remember that a broker is there which understands what it is asked."""
        self._is_answered = True

    async def open(self) -> None:
        """Connect, to a broker that is there within ``connect_s``. Raises Invalid, Unavailable, Denied."""
        await self._search(self._connect_s)

    async def wire(self) -> WireClient:
        """Return the connection, made anew if it was lost.

        Raises Unavailable when the broker was not reached in time or the link is closed, Denied and Invalid.
        """
        if self._wire is not None:
            return self._wire
        if self._closed:
            raise Unavailable(ErrorCode.STOPPING, "client was closed")
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._search(self.reconnect_s))
        return await asyncio.shield(self._opening)

    async def lost(self, wire: WireClient) -> None:
        """Forget a connection that failed; somebody may have replaced it already."""
        if wire is self._wire:
            self._wire = None
            self._hang_ups += self._is_at_once()
        await wire.close()

    async def close(self) -> None:
        """Close the connection, and make no other. Calling it again does nothing."""
        self._closed = True
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    async def read(self, work: Callable[[WireClient], Awaitable[T]]) -> T:
        """Do something that may safely be done twice, again if the connection is lost meanwhile. Raises what it raises."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.reconnect_s
        pause_s = 0.0
        while True:
            wire = await self.wire()
            try:
                result = await work(wire)
            except GONE as error:
                await self.lost(wire)
                is_hopeless = self.is_mistaken or (not self._is_answered and is_silent(error))
                if self._closed or is_hopeless or loop.time() + pause_s >= end:
                    raise
            else:
                self.answered()
                return result
            await asyncio.sleep(pause_s)
            pause_s = _longer(pause_s)

    async def once(self, work: Callable[[WireClient], Awaitable[T]]) -> T:
        """Do something that must not be done twice. Raises Unavailable when nobody knows whether it was done, NotOwner when it was not."""
        wire = await self.wire()
        try:
            result = await work(wire)
        except GONE:
            await self.lost(wire)
            raise
        self.answered()
        return result

    def _is_at_once(self) -> bool:
        """Whether the connection that failed now was only just tried."""
        return asyncio.get_running_loop().time() - self._tried_at < AT_ONCE_S

    async def _attempt(self, limit_s: float) -> WireClient:
        """Connect once. A port that says nothing is given up at the end of the search, not at that of the wire's own wait."""
        if self.url.startswith(IN_PROCESS):
            return await connect(self.url)
        try:
            async with asyncio.timeout(max(limit_s, ATTEMPT_S_MIN)):
                return await connect(self.url)
        except TimeoutError:
            raise silent(split_login(self.url)[1].rpartition("://")[2]) from None

    async def _search(self, limit_s: float) -> WireClient:
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        pause_s = BACKOFF_MIN_S
        while True:
            self._tried_at = loop.time()
            try:
                self._wire = await self._attempt(end - loop.time())
                return self._wire
            except (Unavailable, Busy) as error:
                self._hang_ups += is_hanging_up(error) and self._is_at_once()
                if self.is_mistaken or loop.time() + pause_s > end:
                    raise
            await asyncio.sleep(pause_s * random.uniform(1 - BACKOFF_JITTER, 1 + BACKOFF_JITTER))
            pause_s = _longer(pause_s)


def _longer(pause_s: float) -> float:
    """The pause after this one."""
    return min(max(2 * pause_s, BACKOFF_MIN_S), BACKOFF_MAX_S)
