"""A network: bytes between clients and the connections of one process, a few at a time, in any order among connections.

Each step does what a kernel might do: some bytes arrive, some are accepted, an end or a reset is noticed. Each
direction has a buffer limit. A process drives its connections either by an asyncio loop, whose transports buffer what
does not fit, or by the readiness driver over sockets.

The bytes of one connection stay in order, and none is lost before a reset. Callbacks are called as by an asyncio loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from polywire.server.connection import Connection
from polywire.server.hub import Hub
from polywire.server.memory import CHUNK_BYTES
from polywire.server.readiness import ReadinessDriver
from polywire.types import Buffer
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.schedule import Schedule
from tests.sim.story import Story
from tests.sim.wires.sockets import KERNEL_BYTES, SimulatedEpoll, SimulatedSocket, WatchingLoop

BACKLOG_BYTES_MAX: Final = (
    512 * 1024
)  # what may wait, plus the longest response in progress then: all of a topic, over Cursus
HELD_BYTES_MAX: Final = (
    32 * 1024
)  # received of one connection: twice the longest request, unless it retains the chunk that has all of it
BURST: Final = 12  # events between two callbacks of the loop
SERVER: Final = ("10.0.0.1", 9000)


class Caller(Protocol):
    """The client's end of a connection."""

    @property
    def reads(self) -> bool:
        """Whether it accepts what has arrived."""

    def received(self, data: bytes) -> None:
        """Handle bytes that have arrived."""

    def hung_up(self, *, is_aborted: bool) -> None:
        """Note the end: nothing more arrives or is accepted. is_aborted: unread bytes are lost."""


class End(Protocol):
    """The process's end of a connection."""

    @property
    def lost(self) -> bool:
        """Whether the process no longer has this connection."""

    @property
    def is_aborted(self) -> bool:
        """Whether the client may have lost bytes that were sent to it."""

    def ready(self) -> Event | None:
        """Return the next possible event here."""

    def went(self) -> None:
        """Note that the client has accepted bytes."""


Event = Callable[[Chance], None]


class SimulatedConnection(Connection):
    """A connection that records whether it was aborted."""

    __slots__ = ("is_aborted",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_aborted = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.is_aborted = self not in self._hub.connections  # there is no slot

    def abort(self, reason: str = "") -> None:
        self.is_aborted = True
        super().abort(reason)


class SimulatedTransport:
    """An asyncio transport. Guards: no callback comes after ``connection_lost``."""

    def __init__(self, link: Link, loop: Schedule) -> None:
        self._link = link
        self._loop = loop
        self._extra: Final = {"peername": link.address, "sockname": SERVER}
        self._waiting = bytearray()
        self._is_full = False
        self._closing = False
        self.reading = True
        self.lost = False
        self.is_aborted = False

    # Called by the connection

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the client's address."""
        return self._extra.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Check that the limits are those that connections use."""

    def get_write_buffer_size(self) -> int:
        """Return the buffered bytes."""
        return len(self._waiting)

    def is_closing(self) -> bool:
        """Return whether it was closed or lost."""
        return self._closing

    def pause_reading(self) -> None:
        """Stop to deliver bytes."""
        self.reading = False

    def resume_reading(self) -> None:
        """Deliver bytes again."""
        self.reading = not self._closing

    def write(self, data: Buffer) -> None:
        """Send bytes; buffer those that do not fit."""
        if self.lost:
            return
        self._waiting += data
        self.push()
        require(
            len(self._waiting) <= BACKLOG_BYTES_MAX, "what waits for a peer has a limit", waiting=len(self._waiting)
        )
        if self._waiting and not self._is_full:
            self._is_full = True
            self._link.connection.pause_writing()

    def writelines(self, parts: Sequence[Buffer]) -> None:
        """Send parts in order."""
        self.write(b"".join(parts))

    def close(self) -> None:
        """Send the buffered bytes, then end."""
        if not self._closing:
            self._closing, self.reading = True, False
            if not self._waiting:
                self._loop.call_soon(self.lose, None)

    def abort(self) -> None:
        """End now."""
        self._waiting.clear()
        self.is_aborted = True
        if not self.lost:
            self._closing, self.reading = True, False
            self._link.reset()
            self._loop.call_soon(self.lose, None)

    # Called by the network

    def ready(self) -> Event | None:
        """Return the arrival of bytes, an end or a reset."""
        link = self._link
        if self.lost:
            return None
        if link.is_cut:
            return self._reset
        if self.reading and link.up:
            return self._arrive
        return self._end if self.reading and link.finished and not link.was_reported else None

    def _arrive(self, chance: Chance) -> None:
        link = self._link
        view = link.connection.get_buffer(-1)
        most = min(len(view), len(link.up))
        count = chance.one_of((1 + chance.below(min(most, 40)), 1 + chance.below(most), most, most))
        link.story.tell("arrive", f"c{link.number} size={count} of={len(link.up)}")
        view[:count] = link.up[:count]
        del link.up[:count]
        link.connection.buffer_updated(count)
        link.check_held()

    def _end(self, chance: Chance) -> None:
        self._link.was_reported = True
        self._link.story.tell("eof", f"c{self._link.number}")
        if not self._link.connection.eof_received():
            self.close()

    def _reset(self, chance: Chance) -> None:
        self._link.story.tell("reset", f"c{self._link.number}")
        self.lose(ConnectionResetError(104, "Connection reset by peer"))

    def push(self) -> None:
        """Move buffered bytes into the kernel."""
        room = KERNEL_BYTES - len(self._link.down)
        if room > 0 and self._waiting:
            self._link.down += self._waiting[:room]
            del self._waiting[:room]

    def went(self) -> None:
        """Note that the client has accepted bytes."""
        self.push()
        if self._waiting or self.lost:
            return
        if self._is_full:
            self._is_full = False
            self._link.connection.resume_writing()
        if self._closing and not self._waiting:
            self._loop.call_soon(self.lose, None)

    def lose(self, error: Exception | None) -> None:
        """Report the loss to the connection, once."""
        if self.lost:
            return
        self.lost = self._closing = True
        self.reading = False
        self._waiting.clear()
        self._link.connection.connection_lost(error)


class SocketEnd:
    """A socket that the readiness driver has accepted. Guards: bytes arrive in the socket in order."""

    def __init__(self, link: Link, opened: SimulatedSocket) -> None:
        self._link = link
        self._socket = opened

    @property
    def lost(self) -> bool:
        return not self._socket.is_open

    @property
    def is_aborted(self) -> bool:
        return self._socket.left_unread or self._link.connection.is_aborted

    def went(self) -> None:
        """Make the socket writable for epoll."""

    def ready(self) -> Event | None:
        """Return the arrival of bytes in the kernel, an end or a reset."""
        link, opened = self._link, self._socket
        if self.lost or opened.is_reset:
            return None
        if link.is_cut:
            return self._reset
        if link.up:
            return self._arrive if len(opened.up) < KERNEL_BYTES else None
        return self._end if link.finished and not opened.is_over else None

    def _arrive(self, chance: Chance) -> None:
        link, opened = self._link, self._socket
        count = min(1 + chance.below(len(link.up)), KERNEL_BYTES - len(opened.up))
        link.story.tell("arrive", f"c{link.number} size={count} of={len(link.up)}")
        opened.up += link.up[:count]
        del link.up[:count]

    def _end(self, chance: Chance) -> None:
        self._link.story.tell("eof", f"c{self._link.number}")
        self._socket.is_over = True

    def _reset(self, chance: Chance) -> None:
        """Reset: bytes that arrived before remain readable, or are lost."""
        self._link.story.tell("reset", f"c{self._link.number}")
        self._socket.is_reset = True
        if chance.happens(0.5):
            self._socket.up.clear()


class Link:
    """One connection of a client. Guards: ``up`` and ``down`` are the bytes on the way to the process and to the
    client.
    """

    transport: End

    def __init__(self, caller: Caller, connection: SimulatedConnection, number: int, story: Story) -> None:
        self.caller: Final = caller
        self.connection: Final = connection
        self.number: Final = number
        self.story: Final = story
        self.address: Final = (f"10.0.1.{number % 200}", 40_000 + number)
        self.up = bytearray()
        self.down = bytearray()
        self.finished = False
        """Whether the client sends nothing more."""
        self.was_reported = False
        """Whether the connection knows that."""
        self.is_cut = False
        """Whether the client has reset it, or is gone."""
        self.is_over = False
        """Whether the client knows that the process has ended it."""

    @property
    def free(self) -> int:
        """Bytes that the client may send now."""
        return 0 if self.finished or self.is_cut or self.is_over else KERNEL_BYTES - len(self.up)

    def send(self, data: bytes) -> None:
        """Send bytes of the client; they must fit."""
        self.up += data

    def finish(self) -> None:
        """Half-close by the client."""
        self.finished = True

    def cut(self) -> None:
        """Reset by the client, with answers unread."""
        self.is_cut = True
        self.up.clear()
        self.down.clear()

    def reset(self) -> None:
        """Reset by the process."""
        self.down.clear()

    def check_held(self) -> None:
        """Check the limits of what is buffered for this connection."""
        held, waiting = self.connection.held_bytes, self.connection.backlog
        fine = held <= HELD_BYTES_MAX or held == CHUNK_BYTES
        require(fine, "what is received of a peer has a limit", held=held)
        require(waiting <= BACKLOG_BYTES_MAX, "what waits for a peer has a limit", waiting=waiting)


class Network:
    """All connections of one process; an ``schedule.Actor`` of its loop."""

    name = "network"

    def __init__(self, loop: Schedule, story: Story) -> None:
        self.weight = 1.0
        self._loop = loop
        self._story = story
        self._links: list[Link] = []
        self._count = 0
        self._driven: Driven | None = None
        self._found: list[Event] = []
        loop.workers.append(self)

    def drive(self, hub: Hub, chance: Chance) -> None:
        """Use the readiness driver for connections from now on."""
        self._driven = Driven(hub, chance, self._loop, self._check_all)

    def connect(self, caller: Caller, connection: SimulatedConnection) -> Link:
        """Connect a client."""
        self._count += 1
        link = Link(caller, connection, self._count, self._story)
        self._links.append(link)
        if self._driven is None:
            transport = SimulatedTransport(link, self._loop)
            link.transport = transport
            connection.connection_made(transport)
        else:
            self._driven.connect(link)
        return link

    def leave(self, chance: Chance) -> None:
        """End with the process: bytes in its kernel may still arrive, then every connection ends."""
        for link in self._links:
            if link.is_cut or link.is_over:
                continue
            if link.down and link.caller.reads and chance.happens(0.5):
                self._take(link, chance)
            link.is_over = True
            link.caller.hung_up(is_aborted=True)

    def _check_all(self) -> None:
        for link in self._links:
            if not link.transport.lost:
                link.check_held()

    @property
    def open(self) -> int:
        """The number of open connections."""
        return sum([not link.transport.lost for link in self._links])

    @property
    def idle(self) -> bool:
        """Whether no event is possible. The possible events are remembered for the next step."""
        self._found = self._ready()
        return not self._found

    def step(self, chance: Chance) -> None:
        """Run an event of one connection, or of several in one pass of the loop."""
        before, self._story.actor = self._story.actor, self.name
        ready, self._found = self._found or self._ready(), []
        for left in reversed(range(chance.one_of((1, 1, 1, BURST)))):
            if not ready:
                break
            chance.one_of(ready)(chance)
            ready = self._ready() if left else []
        self._story.actor = before
        self._links = [link for link in self._links if not (link.transport.lost and (link.is_over or link.is_cut))]

    def _ready(self) -> list[Event]:
        found = list[Event]()
        for link in self._links:
            transport = link.transport
            event = transport.ready()
            if event is not None:
                found.append(event)
            if link.down and link.caller.reads and not link.is_cut:
                found.append(partial(self._take, link))
            if transport.lost and not link.down and not link.is_over and not link.is_cut:
                found.append(partial(self._hang_up, link))
        if self._driven is not None and self._driven.is_ready:
            found.append(self._driven.notice)
        return found

    def _take(self, link: Link, chance: Chance) -> None:
        count = chance.one_of((1 + chance.below(len(link.down)), len(link.down)))
        data = bytes(link.down[:count])
        del link.down[:count]
        self._story.tell("take", f"c{link.number} size={count}")
        link.caller.received(data)
        if not link.is_cut:
            link.transport.went()

    def _hang_up(self, link: Link, chance: Chance) -> None:
        link.is_over = True
        self._story.tell("disconnected", f"c{link.number}")
        link.caller.hung_up(is_aborted=link.transport.is_aborted)


class Driven:
    """The readiness driver of a process. Guards: after each of its passes every connection is within its limits."""

    def __init__(self, hub: Hub, chance: Chance, loop: Schedule, check: Callable[[], None]) -> None:
        self._chance = chance
        self._check = check
        self._epoll = SimulatedEpoll(chance)
        self._loop = WatchingLoop(loop)
        self._driver = ReadinessDriver(hub, self._loop, self._epoll)
        self._pass = self._loop.reader
        self._loop.reader = self._make_pass

    def _make_pass(self) -> None:
        self._epoll.begin_pass()
        self._pass()
        self._check()

    def connect(self, link: Link) -> None:
        """Let the driver accept a connection."""
        opened = SimulatedSocket(self._epoll, self._chance, link.down, SERVER)
        link.transport = SocketEnd(link, opened)
        self._driver.accepted(opened, link.address, link.connection)  # type: ignore[arg-type]

    @property
    def is_ready(self) -> bool:
        """Return whether the loop would notice a ready socket."""
        return self._loop.is_waiting and self._epoll.is_ready

    def notice(self, chance: Chance) -> None:
        """Let the loop notice it."""
        self._loop.notice()
