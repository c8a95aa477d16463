"""Links between processes: simulated asyncio transports over the networks of the accepting processes.

The bytes of a link stay in order, and none is lost before a reset. Bytes for a process that is being started wait, as in a socket of its
parent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import coroutine
from typing import Any, Final, Protocol

from tests.sim.chance import Chance
from tests.sim.schedule import Schedule
from tests.sim.story import Story
from tests.sim.wires.network import Caller, Link
from tests.sim.wires.sockets import KERNEL_BYTES


class Reach(Protocol):
    """The connections between processes."""

    def is_cut(self, shard: int) -> bool:
        """Return whether that shard's process is unreachable."""

    def is_there(self, shard: int) -> bool:
        """Return whether a process of that shard accepts connections."""

    def accept(self, shard: int, caller: Caller) -> Link:
        """Let that process accept a connection."""

    def crossed(self, shard: int) -> None:
        """Note that the process of a shard has sent a message to another one."""


class LinkTransport:
    """The asyncio transport of a connecting end; implements ``Caller``.

    Guards: it calls nothing once it is lost, nor inside a call of the network, which belongs to another process.
    """

    def __init__(self, protocol: asyncio.Protocol, own: int, shard: int, loop: Schedule, reach: Reach) -> None:
        """own: the process of this end. shard: the process at the other end."""
        self._protocol: Final = protocol
        self._own: Final = own
        self._reach: Final = reach
        self._loop: Final = loop
        self.shard: Final = shard
        self.link: Link | None = None
        """None until it is accepted."""
        self._waiting = bytearray()
        self._arrived = bytearray()
        self._is_closing = False
        self.is_lost = False

    # Called by the protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return itself as the socket."""
        return self if name == "socket" else default

    def setsockopt(self, *_: int) -> None:
        """Accept any option."""

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if not self.is_lost and not self._is_closing:
            self._waiting += data

    def close(self) -> None:
        """Send the buffered bytes, then end."""
        self._is_closing = True

    def abort(self) -> None:
        """End now."""
        self._is_closing = True
        self._waiting.clear()
        if self.link is not None:
            self.link.cut()
        self._lose_soon()

    # Called by the accepting process

    @property
    def reads(self) -> bool:
        return self.is_lost or len(self._arrived) < KERNEL_BYTES

    def received(self, data: bytes) -> None:
        if self.is_lost:
            return
        self._arrived += data
        self._loop.call_soon(self._deliver)
        self._reach.crossed(self.shard)

    def hung_up(self, *, is_aborted: bool) -> None:
        self._lose_soon()

    def _deliver(self) -> None:
        if self._arrived and not self.is_lost and not self._is_closing:
            data = bytes(self._arrived)
            self._arrived.clear()
            self._protocol.data_received(data)

    def _lose_soon(self) -> None:
        self._loop.call_soon(self._lose)

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = self._is_closing = True
            self._protocol.connection_lost(None)

    # Events in between

    def next_event(self) -> Callable[[], None] | None:
        """Return the next event of its kernel, if there is one."""
        link = self.link
        if link is None or self.is_lost or link.is_cut or link.is_over:
            return None
        if self._waiting:
            return self._push if link.free > 0 else None
        return self._finish if self._is_closing and not link.finished else None

    def _push(self) -> None:
        assert self.link is not None, "it was accepted"
        count = min(self.link.free, len(self._waiting))
        self.link.send(bytes(self._waiting[:count]))
        del self._waiting[:count]
        self._reach.crossed(self._own)

    def _finish(self) -> None:
        assert self.link is not None, "it was accepted"
        self.link.finish()

    def left(self, *, is_reset: bool) -> None:
        """Note that its process has ended; a reset drops the bytes on their way."""
        self.is_lost = True
        if self.link is not None and is_reset:
            self.link.cut()
        elif self.link is not None:
            self.link.finish()


class LinkEnds:
    """The link ends of one process.

    They replace asyncio's loop for it, and act between two callbacks (``schedule.Actor``).
    """

    name = "links"

    def __init__(self, own: int, loop: Schedule, reach: Reach, story: Story) -> None:
        self.weight = 1.0
        self._own: Final = own
        self._loop: Final = loop
        self._reach: Final = reach
        self._story: Final = story
        self._transports: list[LinkTransport] = []
        loop.workers.append(self)

    # Called instead of asyncio's loop

    def create_task(self, work: Coroutine[Any, Any, None]) -> _Task:
        """Start a coroutine."""
        return _Task(work, self._loop)

    async def create_connection(self, make: Callable[[], asyncio.Protocol], host: str, port: int) -> None:
        """Connect to the process of the shard whose number is the port. Raises ConnectionRefusedError."""
        await _later()
        if self._reach.is_cut(port):
            raise ConnectionRefusedError(111, "Connection refused")
        protocol = make()
        transport = LinkTransport(protocol, self._own, port, self._loop, self._reach)
        self._transports.append(transport)
        self._story.tell("connected", f"to s{port}")
        protocol.connection_made(transport)  # type: ignore[arg-type]  # it has what is asked of it

    # Events in between

    @property
    def idle(self) -> bool:
        return not self._events()

    def step(self, chance: Chance) -> None:
        before, self._story.actor = self._story.actor, self.name
        self._transports = [one for one in self._transports if not one.is_lost]
        events = self._events()
        if events:
            chance.one_of(events)()
        self._story.actor = before

    def _events(self) -> list[Callable[[], None]]:
        found = list[Callable[[], None]]()
        for transport in self._transports:
            event = transport.next_event()
            if event is not None:
                found.append(event)
            elif transport.link is None and not transport.is_lost and self._reach.is_there(transport.shard):
                found.append(lambda one=transport: self._be_accepted(one))  # type: ignore[misc]
        return found

    def _be_accepted(self, transport: LinkTransport) -> None:
        transport.link = self._reach.accept(transport.shard, transport)

    def lose(self, shard: int) -> None:
        """Break the network between this process and another."""
        for transport in self._transports:
            if transport.shard == shard and not transport.is_lost:
                transport.abort()

    def left(self, chance: Chance) -> None:
        """Note the end of the process: its kernel sends what it has, or resets."""
        for transport in self._transports:
            transport.left(is_reset=chance.happens(0.5))


class _Task:
    """A running coroutine. Guards: it does nothing once it is cancelled."""

    def __init__(self, work: Coroutine[Any, Any, None], loop: Schedule) -> None:
        self._work: Final = work
        self._loop: Final = loop
        self._is_over = False
        self._go_on()

    def _go_on(self) -> None:
        if self._is_over:
            return
        try:
            self._work.send(None)
        except StopIteration:
            self._is_over = True
            return
        self._loop.call_soon(self._go_on)

    def cancel(self) -> None:
        """Do nothing more."""
        self._is_over = True
        self._work.close()


@coroutine
def _later() -> Iterator[None]:
    """Continue in a later callback."""
    yield


@contextmanager
def running(ends: LinkEnds) -> Iterator[None]:
    """Return this as asyncio's running loop."""
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(ends)  # type: ignore[arg-type]  # what is asked of it it has
    try:
        yield
    finally:
        asyncio._set_running_loop(before)
