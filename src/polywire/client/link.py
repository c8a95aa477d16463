"""The way to a broker: one connection at a time, made anew with back-off when it is lost.

Promises: everybody who asks while there is no connection waits for the same one; a broker that is back within ``reconnect_s`` is found, and
a login that is refused is not tried again. Must not know: any one wire, what is asked.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.errors import Busy, ErrorCode, Unavailable

CONNECT_S: Final = 10.0  # a broker that is started beside its clients, and the address of none at all soon noticed
RECONNECT_S: Final = 60.0  # a broker's restart with a long recovery
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
BACKOFF_JITTER: Final = 0.25  # of a pause: clients of a broker that comes back do not all come at once

T = TypeVar("T")


class Link:
    """The connection of one client, producer or consumer. Guards: there is at most one connection, and none once it is closed."""

    __slots__ = ("_closed", "_connect_s", "_opening", "_wire", "reconnect_s", "url")

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
        end = asyncio.get_running_loop().time() + self.reconnect_s
        while True:
            wire = await self.wire()
            try:
                return await work(wire)
            except Unavailable:
                await self.lost(wire)
                if self._closed or asyncio.get_running_loop().time() >= end:
                    raise

    async def once(self, work: Callable[[WireClient], Awaitable[T]]) -> T:
        """Do something that must not be done twice. Raises Unavailable when nobody knows whether it was done."""
        wire = await self.wire()
        try:
            return await work(wire)
        except Unavailable:
            await self.lost(wire)
            raise

    async def _search(self, limit_s: float) -> WireClient:
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        pause_s = BACKOFF_MIN_S
        while True:
            try:
                self._wire = await connect(self.url)
                return self._wire
            except (Unavailable, Busy):
                if loop.time() + pause_s > end:
                    raise
            await asyncio.sleep(pause_s * random.uniform(1 - BACKOFF_JITTER, 1 + BACKOFF_JITTER))
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)
