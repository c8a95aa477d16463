"""Forward connections of a standby to the leader, byte for byte, for every protocol.

* Bytes stay in order. Only bytes that one socket has sent and the other has not accepted yet are buffered.
* If there is no leader, a new connection waits for ``HOLD_S`` and is then closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, cast

import structlog

from polywire.errors import ErrorCode, Unavailable
from polywire.server.config import Address
from polywire.server.listener import listening_sockets

RELAYED_MAX: Final = 10_000  # maximum number of forwarded connections; each needs two descriptors
CONNECT_TIMEOUT_S: Final = 5.0
# A killed leader is replaced within this time. If connections were closed at once, clients would suspect the wrong
# port.
HOLD_S: Final = 3.0
LOOK_S: Final = 0.1  # pause between two attempts of one connection to reach a leader
# Limit for the attempts of all waiting connections together. A killed leader may have had thousands of connections, and
# the new leader is busy recovering.
LOOKS_PER_S_MAX: Final = 500
FIRST_BYTES_S: Final = 5.0  # time limit for the first bytes of a connection that the standby may answer itself
BUFFERED_BYTES: Final = 256 * 1024  # unread bytes of one side at which reading from the other side pauses

log = structlog.get_logger("polywire.server")

Find = Callable[[str], tuple[str, int] | None]
"""Returns the leader's address for a listener, or None if there is no leader."""

Connect = Callable[["_End", tuple[str, int]], Awaitable[object]]
"""Connects one side of a forwarded connection to the leader. Raises OSError."""

Answer = Callable[[str, bytes], bytes | None]
"""Returns the standby's own response to the first bytes of a connection, or None to forward the connection."""


def _forward_all(_: str, __: bytes) -> None:
    pass


class Relay:
    """Forwards connections to the leader until ``stop`` is called, at most ``RELAYED_MAX`` at the same time."""

    def __init__(
        self,
        find: Find,
        answer: Answer = _forward_all,
        *,
        answered: Container[str] = (),
        connects: Mapping[str, Connect] | None = None,
    ) -> None:
        """Create a relay.

        Args:
            find: returns the leader's address.
            answer: returns the standby's own response.
            answered: listeners for which ``answer`` is called.
            connects: how to connect to the leader, by listener; plain TCP for listeners that are missing.
        """
        self._find = find
        self._answer = answer
        self._answered = answered
        self._connects: Final[Mapping[str, Connect]] = connects or {}
        self._servers: list[asyncio.Server] = []
        self._ends: set[_End] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, addresses: Mapping[str, Address], *, shared: bool = False) -> dict[str, Address]:
        """Listen on these addresses, and return them with their actual ports.

        ``shared`` is whether other processes listen there, too. Raises Unavailable if an address cannot be used.
        """
        loop, found = asyncio.get_running_loop(), {}
        for name, address in addresses.items():
            try:
                sockets = await listening_sockets(address, shared=shared)
                servers = [await loop.create_server(partial(_End, self, name), sock=listening) for listening in sockets]
            except OSError as error:
                await self.stop()
                raise Unavailable(
                    ErrorCode.STORAGE_FAILED, f"cannot listen: {error.strerror} listener={name} address={address}"
                ) from error
            self._servers += servers
            found[name] = Address(address.host, sockets[0].getsockname()[1])
        return found

    async def listen_on(self, name: str, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(lambda: _End(self, name), sock=listening))

    async def stop(self) -> None:
        """Close all listeners and connections. Clients then reconnect to the leader."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        for end in list(self._ends):
            end.abort()
        await asyncio.sleep(0)
        self._servers.clear()

    def opened(self, end: _End, listener: str) -> None:
        self._ends.add(end)
        if len(self._ends) > 2 * RELAYED_MAX:
            end.abort()
            return
        task = asyncio.create_task(self._connect(end, listener))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def closed(self, end: _End) -> None:
        self._ends.discard(end)

    async def _connect(self, end: _End, listener: str) -> None:
        if listener in self._answered and await end.has_response(lambda first: self._answer(listener, first)):
            return
        loop = asyncio.get_running_loop()
        held_until = loop.time() + HOLD_S
        other = await self._reach(listener)
        while other is None and not end.is_closed and loop.time() < held_until:
            await asyncio.sleep(max(LOOK_S, len(self._tasks) / LOOKS_PER_S_MAX))
            other = await self._reach(listener)
        if other is None:
            log.info("connection rejected: no leader answers", listener=listener)
            end.abort()
            return
        self._ends.add(other)
        end.connect_to(other)

    async def _reach(self, listener: str) -> _End | None:
        """Connect to the leader. Return None if there is no leader or it does not respond."""
        address = self._find(listener)
        if address is None:
            return None
        other, connect = _End(self, ""), self._connects.get(listener, _connect)
        try:
            await asyncio.wait_for(connect(other, address), CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError):
            return None
        return other


async def _connect(end: _End, address: tuple[str, int]) -> None:
    """Connect with plain TCP. Raises OSError if that fails."""
    await asyncio.get_running_loop().create_connection(lambda: end, *address)


class _End(asyncio.Protocol):
    """One side of a forwarded connection. It is read only while the other side accepts bytes."""

    def __init__(self, relay: Relay, listener: str) -> None:
        self._relay = relay
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._other: _End | None = None
        self._early = b""
        self._first_bytes: asyncio.Future[None] | None = None
        """Set while ``has_response`` waits for the first bytes."""

    @property
    def is_closed(self) -> bool:
        """Whether the socket is closed. A close by the client is not noticed while reading is paused."""
        return self._transport is None or self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses of it
        made.set_write_buffer_limits(BUFFERED_BYTES)
        if self._listener:
            self._relay.opened(self, self._listener)

    def connect_to(self, other: _End) -> None:
        if self._transport is None or self._transport.is_closing() or other.is_closed:
            other.abort()
            self.abort()
            return
        self._other, other._other = other, self
        if self._early and other._transport is not None:
            other._transport.write(self._early)
            self._early = b""
        self._transport.resume_reading()

    async def has_response(self, answer: Callable[[bytes], bytes | None]) -> bool:
        """Wait for the first bytes. If ``answer`` returns a response to them, send it and close.

        Returns False if the connection must be forwarded.
        """
        if not self._early and self._transport is not None:
            self._first_bytes = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait_for(self._first_bytes, FIRST_BYTES_S)
            except TimeoutError:
                self.abort()
        response = answer(self._early)
        if response is None or self._transport is None:
            return self.is_closed
        self._transport.write(response)
        self._transport.close()
        return True

    def data_received(self, data: bytes) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.write(data)
        elif self._transport is not None:  # the connection to the leader does not exist yet
            self._early += data
            self._transport.pause_reading()
            self._wake()

    def eof_received(self) -> bool:
        """Forward the end of the stream. The other direction stays open."""
        other = None if self._other is None else self._other._transport
        if other is not None and not other.is_closing() and other.can_write_eof():
            with suppress(OSError, RuntimeError):
                other.write_eof()
                return True
        return False

    def pause_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.resume_reading()

    def _wake(self) -> None:
        if self._first_bytes is not None and not self._first_bytes.done():
            self._first_bytes.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._relay.closed(self)
        self._wake()
        other, self._other, self._transport = self._other, None, None
        if other is not None and other._transport is not None:
            other._other = None
            other._transport.close() if error is None else other._transport.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
