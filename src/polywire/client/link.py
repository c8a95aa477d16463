"""One connection to a broker, which is opened again with back-off after it is lost.

* Callers that need the connection at the same time wait for the same attempt to open it.
* Attempts continue for ``reconnect_s``.
* Errors that a retry cannot fix are raised immediately: rejected logins, TLS failures, and a port that closes every
  connection at once and has never sent a response.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from polywire.client.address import split_login
from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.failures import is_connection_closed, is_no_reply, no_reply
from polywire.client.notices import ConnectionNotices, OnConnect, OnDisconnect
from polywire.client.tracing import Place
from polywire.errors import BrokerError, Busy, ErrorCode, NotOwner, Unavailable

CONNECT_S: Final = 10.0  # enough if broker and client start together, but short enough to notice a wrong address soon
RECONNECT_S: Final = 60.0  # enough for a restart with a long recovery
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
BACKOFF_JITTER: Final = 0.25  # random share of a pause, so that clients do not all reconnect at the same moment
# after this many connections in a row were closed without a response, the port is considered wrong
CLOSED_MAX: Final = 5
# closing within this time is "at once"; a standby without a leader waits longer before it closes connections
AT_ONCE_S: Final = 1.0

# minimum for one attempt, because a busy broker needs some tenths of a second to accept a login
ATTEMPT_S_MIN: Final = 1.0
# a broker in this process, for tests; it starts on connecting, which must not count against a timeout
IN_PROCESS: Final = "memory://"

GONE: Final = (Unavailable, NotOwner)
"""Errors after which a request is retried over a new connection, possibly to another broker.

The connection was lost, or the broker does not lead the log any more and did not execute the request.
"""

T = TypeVar("T")


class Link:
    """Keeps the connection of a client, producer or consumer open: reconnects and retries."""

    __slots__ = (
        "_closed",
        "_closed_count",
        "_connect_s",
        "_has_response",
        "_notices",
        "_opening",
        "_tried_at",
        "_wire",
        "place",
        "reconnect_s",
        "url",
    )

    def __init__(
        self,
        url: str,
        *,
        connect_s: float = CONNECT_S,
        reconnect_s: float = RECONNECT_S,
        on_connect: OnConnect | None = None,
        on_disconnect: OnDisconnect | None = None,
    ) -> None:
        """Create a link that is not connected yet.

        Args:
            url: as for ``connect``.
            connect_s: how long to retry the first connection, in seconds.
            reconnect_s: how long to retry after a lost connection, in seconds.
            on_connect: called with the address, without the login, of each connection that was opened.
            on_disconnect: called with the address and the error when a connection was lost.
        """
        self.url: Final = url
        self.place: Final = Place.of(url)
        self._connect_s: Final = connect_s
        self.reconnect_s: Final = reconnect_s
        self._wire: WireClient | None = None
        self._opening: asyncio.Task[WireClient] | None = None
        self._closed = False
        self._closed_count = 0
        self._tried_at = 0.0
        self._has_response = False
        self._notices: Final = ConnectionNotices(url, on_connect, on_disconnect)

    @property
    def is_wrong_port(self) -> bool:
        """Whether several connections were closed at once and no request got a response: the port is probably wrong."""
        return not self._has_response and self._closed_count >= CLOSED_MAX

    def note_response(self) -> None:
        """Record that the broker has responded to a request, so that the port is right."""
        self._has_response = True
        self._notices.responded()

    async def open(self) -> None:
        """Connect, with retries for ``connect_s``. Raises Invalid, Unavailable, Denied."""
        await self._search(self._connect_s)

    async def wire(self) -> WireClient:
        """Return the connected client, and reconnect if the connection was lost.

        Raises Unavailable if the broker was not reached in time or the link is closed, Denied and Invalid.
        """
        while self._wire is not None:
            if self._wire.loss is None:
                return self._wire
            await self.lost(self._wire, self._wire.loss)  # nothing was sent over it since then
        if self._closed:
            raise Unavailable(ErrorCode.STOPPING, "client was closed")
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._search(self.reconnect_s))
        return await asyncio.shield(self._opening)

    async def lost(self, wire: WireClient, error: BrokerError) -> None:
        """Close a connection that failed with ``error``. The next call of ``wire`` opens another one."""
        if wire is self._wire:
            self._wire = None
            self._closed_count += self._is_at_once()
            self._notices.lost(error)
        await wire.close()

    async def close(self) -> None:
        """Close the connection. ``wire`` then fails."""
        self._closed = True
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    async def read(self, work: Callable[[WireClient], Awaitable[T]]) -> T:
        """Run an operation that is safe to repeat. Retry it if the connection is lost. Raises its errors."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.reconnect_s
        pause_s = 0.0
        while True:
            wire = await self.wire()
            try:
                result = await work(wire)
            except GONE as error:
                await self.lost(wire, error)
                is_hopeless = self.is_wrong_port or (not self._has_response and is_no_reply(error))
                if self._closed or is_hopeless or loop.time() + pause_s >= end:
                    raise
            else:
                self.note_response()
                return result
            await asyncio.sleep(pause_s)
            pause_s = _longer(pause_s)

    async def once(self, work: Callable[[WireClient], Awaitable[T]]) -> T:
        """Run an operation that must not be repeated.

        Raises Unavailable if the connection was lost, so that the outcome is unknown, and NotOwner if it was not
        executed.
        """
        wire = await self.wire()
        try:
            result = await work(wire)
        except GONE as error:
            await self.lost(wire, error)
            raise
        self.note_response()
        return result

    def _is_at_once(self) -> bool:
        return asyncio.get_running_loop().time() - self._tried_at < AT_ONCE_S

    async def _attempt(self, limit_s: float) -> WireClient:
        """Connect once, within ``limit_s`` instead of the protocol's own time limit."""
        if self.url.startswith(IN_PROCESS):
            return await connect(self.url)
        try:
            async with asyncio.timeout(max(limit_s, ATTEMPT_S_MIN)):
                return await connect(self.url)
        except TimeoutError:
            raise no_reply(split_login(self.url)[1].rpartition("://")[2]) from None

    async def _search(self, limit_s: float) -> WireClient:
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        pause_s = BACKOFF_MIN_S
        while True:
            self._tried_at = loop.time()
            try:
                wire = await self._attempt(end - loop.time())
            except (Unavailable, Busy) as error:
                self._closed_count += is_connection_closed(error) and self._is_at_once()
                if self.is_wrong_port or loop.time() + pause_s > end:
                    raise
                self._notices.failed(error)
            else:
                self._wire = wire
                self._notices.connected()
                return wire
            await asyncio.sleep(pause_s * random.uniform(1 - BACKOFF_JITTER, 1 + BACKOFF_JITTER))
            pause_s = _longer(pause_s)


def _longer(pause_s: float) -> float:
    return min(max(2 * pause_s, BACKOFF_MIN_S), BACKOFF_MAX_S)
