"""Carries connections of a broker that stands by to the one that leads: bytes as they are, on every wire.

Promises: bytes keep their order and nothing is held but what one socket has given and the other not yet taken; who comes while nobody leads
waits a little for who will, and is turned away then. Must not know: any wire's bytes; what may be answered here is for others to say.
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
from polywire.server.listener import bound

RELAYED_MAX: Final = 10_000  # connections: each takes two descriptors
CONNECT_TIMEOUT_S: Final = 5.0
HOLD_S: Final = (
    3.0  # a leader that was killed is followed within: clients take a port that hangs up at once for another wire's
)
LOOK_S: Final = 0.1  # between two looks for a leader
LOOKS_PER_S_MAX: Final = (
    500  # of all that wait: thousands may come at once from a leader that was killed, and who follows it has work to do
)
FIRST_BYTES_S: Final = 5.0  # for the first bytes of who may be answered here
BUFFERED_BYTES: Final = 256 * 1024  # unread by one side, before the other is read no further

log = structlog.get_logger("polywire.server")

Find = Callable[[str], tuple[str, int] | None]
"""Where the leader listens for what comes to this listener, if anybody leads."""

Connect = Callable[["_End", tuple[str, int]], Awaitable[object]]
"""Connects one side to the leader in a way of its own. Raises OSError."""

Answer = Callable[[str, bytes], bytes | None]
"""What who comes to this listener is told here, by the first bytes that came; None for who is carried."""


def _answers_nobody(_: str, __: bytes) -> None:
    """Everybody is carried."""


class Relay:
    """Guards: at most ``RELAYED_MAX`` connections; all end with ``stop``."""

    def __init__(
        self,
        find: Find,
        answer: Answer = _answers_nobody,
        *,
        asked: Container[str] = (),
        ways: Mapping[str, Connect] | None = None,
    ) -> None:
        """asked: listeners of whose peers ``answer`` sees the first bytes, before anything is done with them. ways: to the leader, for
        listeners whose peers are not carried there as they came."""
        self._find = find
        self._answer = answer
        self._asked = asked
        self._ways: Final[Mapping[str, Connect]] = ways or {}
        self._servers: list[asyncio.Server] = []
        self._ends: set[_End] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, addresses: Mapping[str, Address], *, shared: bool = False) -> dict[str, Address]:
        """Accept on these addresses; returns them with their real ports. shared: other processes listen there, too. Raises Unavailable."""
        loop, found = asyncio.get_running_loop(), {}
        for name, address in addresses.items():
            try:
                sockets = await bound(address, shared=shared)
                servers = [await loop.create_server(partial(_End, self, name), sock=one) for one in sockets]
            except OSError as error:
                await self.stop()
                raise Unavailable(
                    ErrorCode.STORAGE_FAILED, f"cannot listen: {error.strerror} listener={name} address={address}"
                ) from error
            self._servers += servers
            found[name] = Address(address.host, sockets[0].getsockname()[1])
        return found

    async def listen_on(self, name: str, listening: socket.socket) -> None:
        """Accept on a socket that listens already."""
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(lambda: _End(self, name), sock=listening))

    async def stop(self) -> None:
        """Accept nobody any more, and end every connection: its client finds whoever leads."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        for end in list(self._ends):
            end.abort()
        await asyncio.sleep(0)
        self._servers.clear()

    def came(self, end: _End, listener: str) -> None:
        """A client has connected."""
        self._ends.add(end)
        if len(self._ends) > 2 * RELAYED_MAX:
            end.abort()
            return
        task = asyncio.create_task(self._connect(end, listener))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def went(self, end: _End) -> None:
        """An end is closed."""
        self._ends.discard(end)

    async def _connect(self, end: _End, listener: str) -> None:
        if listener in self._asked and await end.is_answered(lambda first: self._answer(listener, first)):
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
        end.meet(other)

    async def _reach(self, listener: str) -> _End | None:
        """A connection to the leader, if one is known and answers."""
        place = self._find(listener)
        if place is None:
            return None
        other, connect = _End(self, ""), self._ways.get(listener, _connect)
        try:
            await asyncio.wait_for(connect(other, place), CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError):
            return None
        return other


async def _connect(end: _End, place: tuple[str, int]) -> None:
    """As everybody does. Raises OSError."""
    await asyncio.get_running_loop().create_connection(lambda: end, *place)


class _End(asyncio.Protocol):
    """One side of a carried connection. It is read only while the other side takes what comes."""

    def __init__(self, relay: Relay, listener: str) -> None:
        self._relay = relay
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._other: _End | None = None
        self._early = b""
        self._came: asyncio.Future[None] | None = None
        """Of who waits for the first bytes."""

    @property
    def is_closed(self) -> bool:
        """Whether the peer is gone, as far as is known: who is not read is not seen to go."""
        return self._transport is None or self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast("asyncio.Transport", transport)  # uvloop's derive from no class of asyncio's
        made.set_write_buffer_limits(BUFFERED_BYTES)
        if self._listener:
            self._relay.came(self, self._listener)

    def meet(self, other: _End) -> None:
        """The other side is there."""
        if self._transport is None or self._transport.is_closing() or other.is_closed:
            other.abort()
            self.abort()
            return
        self._other, other._other = other, self
        if self._early and other._transport is not None:
            other._transport.write(self._early)
            self._early = b""
        self._transport.resume_reading()

    async def is_answered(self, answer: Callable[[bytes], bytes | None]) -> bool:
        """Whether the peer is told something by its first bytes, and hung up on; who says nothing for long is gone."""
        if not self._early and self._transport is not None:
            self._came = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait_for(self._came, FIRST_BYTES_S)
            except TimeoutError:
                self.abort()
        told = answer(self._early)
        if told is None or self._transport is None:
            return self.is_closed
        self._transport.write(told)
        self._transport.close()
        return True

    def data_received(self, data: bytes) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.write(data)
        elif self._transport is not None:  # the leader is being connected to
            self._early += data
            self._transport.pause_reading()
            self._wake()

    def eof_received(self) -> bool:
        """One direction is over; answers may still come in the other."""
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
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._relay.went(self)
        self._wake()
        other, self._other, self._transport = self._other, None, None
        if other is not None and other._transport is not None:
            other._other = None
            other._transport.close() if error is None else other._transport.abort()

    def abort(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()
