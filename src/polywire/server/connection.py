"""The one connection driver, for all wires: moves bytes between a socket and a session.

Promises: a session is offered its bytes in order, each exactly once beyond what it left; it is not called while it is paused or while too
many of its answers wait for the peer; bytes handed to the broker are not overwritten before their turn was committed. Whatever one peer
does, floods, stalls or garbage, costs the others nothing but time: every buffer has a limit. Must not know: any wire, messages, the
broker's verbs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, Protocol

import structlog

from polywire.errors import PeerError
from polywire.protocols.base import Session, SessionFactory
from polywire.server.arena import BUFFER_BYTES_MIN, Arena, Memory, rounded
from polywire.server.idle import IdlePoll
from polywire.types import Buffer

log = structlog.get_logger("polywire.server")

PREFIX_BYTES_MAX: Final = 64  # within which every wire is recognised
SMALL_FRAME_BYTES: Final = 64 * 1024  # an unfinished frame up to this size may wait for ever


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    connections_max: open at once; each may cost a buffer. receive_bytes_max: largest buffer for throughput alone; a longer frame gets a
    larger one. turn_bytes_max: read from one connection before the others have their turn. backlog_bytes_max: unsent answers of one
    connection above which nothing more is read from it. receive_total_bytes_max, backlog_total_bytes_max: of all connections; when
    passed, the one stalled longest is closed. stalled_s: how long a large unfinished frame, or answers nobody takes, may stand still.
    unknown_s: how long a connection may hide its wire.
    """

    connections_max: int = 4_096
    receive_bytes_max: int = 1024 * 1024
    turn_bytes_max: int = 2 * 1024 * 1024
    backlog_bytes_max: int = 1024 * 1024
    receive_total_bytes_max: int = 64 * 1024 * 1024
    backlog_total_bytes_max: int = 64 * 1024 * 1024
    stalled_s: int = 30
    unknown_s: int = 10


class Intake(Protocol):
    """What takes the bytes that sessions hand on, as far as its pace concerns connections; the broker is one."""

    @property
    def appended(self) -> int:
        """Batches taken so far; it grows while a session is offered bytes that produce."""

    @property
    def congested(self) -> bool:
        """Whether peers that produce should be read no further for now."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when there is no congestion (any more)."""

    def commit(self) -> None:
        """Write this turn now."""


class Hub:
    """What the connections of one server share.

    Invariant: ``connections`` holds every open connection; ``tick`` counts the seconds since the start, as ``sweep`` is called each second;
    ``_held`` are those that wait for the intake.
    """

    __slots__ = ("_held", "arena", "connections", "draining", "idle", "intake", "limits", "refused", "soon", "tick")

    def __init__(
        self,
        intake: Intake,
        limits: ConnectionLimits | None = None,
        *,
        idle: IdlePoll | None = None,
        soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """idle: told whenever bytes came. soon: calls back in the loop's next pass, the running loop's by itself."""
        self.limits: Final = limits or ConnectionLimits()
        self.intake: Final = intake
        self.idle: Final = idle
        self.soon: Final = soon or _call_soon
        self.arena: Final = Arena(self.commit, self.limits.receive_total_bytes_max)
        self._held: set[Connection] = set()
        self.connections: set[Connection] = set()
        self.draining = False
        self.refused = 0
        self.tick = 0

    def commit(self) -> None:
        """Write this turn now. What goes wrong while answers of the turn are told is not the fault of the peer that is being read."""
        try:
            self.intake.commit()
        except Exception as error:
            log.error("an answer could not be told", exc_info=error)

    def sweep(self) -> None:
        """Close what has stood still too long, take buffers from idle connections; to be called once a second."""
        self.tick += 1
        for connection in list(self.connections):
            connection.sweep()
        if self.refused:
            log.warning(
                "connections refused, the limit is reached", count=self.refused, limit=self.limits.connections_max
            )
            self.refused = 0

    def hold(self, connection: Connection) -> None:
        """Let a connection whose peer produces wait until the intake has caught up."""
        if not self._held:
            self.intake.on_relief(self._relieved)
        self._held.add(connection)

    def _relieved(self) -> None:
        held, self._held = self._held, set()
        for connection in held:
            connection.relieve()

    def make_room(self, size: int, asking: Connection) -> None:
        """See to it that a buffer of this size may be taken. Raises PeerError when nobody else holds a large one."""
        while not self.arena.fits(size):
            others = [
                other for other in self.connections if other is not asking and other.held_bytes > SMALL_FRAME_BYTES
            ]
            if not others:
                raise PeerError(f"no memory for a longer request bytes={size}", fatal=True)
            slowest = min(others, key=_seen_tick)
            slowest.abort("receive memory is short, this request has stood still longest")
            slowest.let_go()

    def check_backlog(self) -> None:
        """Close the connection whose answers have waited longest while all of them together wait for too much."""
        clogged = [connection for connection in self.connections if connection.backlog]
        total = sum(connection.backlog for connection in clogged)
        while clogged and total > self.limits.backlog_total_bytes_max:
            slowest = min(clogged, key=_clogged_tick)
            clogged.remove(slowest)
            total -= slowest.backlog
            slowest.abort("answers of all connections take too much memory, this peer has not read longest")


class Connection(asyncio.BufferedProtocol):
    """One socket. Implements ``protocols.base.Output``.

    Invariant: ``_buffer[_start:_end]`` is what the session has not consumed; what lies before may be viewed until the next commit.
    """

    __slots__ = (
        "_buffer",
        "_clogged",
        "_clogged_tick",
        "_end",
        "_ended",
        "_factories",
        "_held",
        "_hub",
        "_paused",
        "_pins",
        "_produces",
        "_receiving",
        "_released",
        "_seen_tick",
        "_session",
        "_start",
        "_taken",
        "_transport",
        "_view",
        "_want",
        "backlog_max",
    )

    def __init__(self, hub: Hub, factories: Sequence[SessionFactory]) -> None:
        """factories: the wires that may be spoken here; with one, nothing has to be recognised."""
        self._hub = hub
        self._factories = factories
        self._session: Session | None = None
        self._transport: Any = None  # uvloop's is no asyncio.Transport subclass
        self._buffer: Memory | None = None
        self._pins = 0
        self._view = memoryview(b"")
        self._start = 0
        self._end = 0
        self._want = BUFFER_BYTES_MIN
        self._taken = 0
        self._paused = False
        self._held = False
        self._produces = False  # as far as the last offer showed
        self._receiving = False
        self._ended = False
        self._clogged = False
        self._clogged_tick = 0
        self._seen_tick = hub.tick
        self._released: list[Callable[[], None]] = []
        self.backlog_max = hub.limits.backlog_bytes_max

    # The socket's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        hub = self._hub
        if hub.draining or len(hub.connections) >= hub.limits.connections_max:
            hub.refused += 1
            self._transport.abort()
            return
        hub.connections.add(self)
        # Above 0 the transport says so at once, and writes without waiting for the end of the pass.
        self._transport.set_write_buffer_limits(high=0)
        if len(self._factories) == 1:
            self._session = self._factories[0].open(self, self.resume)

    def move_to(self, transport: Any, received: bytes) -> None:
        """Go on with another transport of the same socket, from which these bytes came."""
        self._transport = transport
        transport.set_protocol(self)
        while received and not transport.is_closing():
            room = self.get_buffer(-1)
            count = min(len(room), len(received))
            room[:count] = received[:count]
            received = received[count:]
            self.buffer_updated(count)

    def get_buffer(self, sizehint: int) -> memoryview:
        start, end = self._start, self._end
        if start == end:
            if start:
                self._hub.commit()
                self._start = self._end = 0
            if self._buffer is None or len(self._buffer) < self._want:
                self._replace(self._want)
            return self._view
        if self._buffer is None or self._want > len(self._buffer) or end == len(self._buffer):
            self._replace(max(self._want, 2 * (end - start)))
        return self._view[self._end :]

    def _replace(self, size: int) -> None:
        """Take a buffer of at least this size and move what is left to its front."""
        left = self._view[self._start : self._end]
        session = self._session
        most = self._hub.limits.receive_bytes_max if session is None else session.frame_bytes_max
        size = max(min(rounded(size), rounded(max(most, self._hub.limits.receive_bytes_max))), rounded(len(left) + 1))
        old, self._buffer = self._buffer, None
        self._view = memoryview(b"")
        if old is not None:
            self._hub.arena.give(old)
        if not self._hub.arena.fits(size):
            size = rounded(len(left) + 1) if rounded(len(left) + 1) <= SMALL_FRAME_BYTES else size
            self._make_room(size)
        self._buffer = self._hub.arena.take(size)
        self._view = memoryview(self._buffer)
        self._view[: len(left)] = left  # which may be the same memory: then it is moved
        self._start, self._end = 0, len(left)
        self._want = min(self._want, size)

    def _make_room(self, size: int) -> None:
        try:
            self._hub.make_room(size, self)
        except PeerError as error:  # uvloop is about to read: ending the transport here would end the process
            asyncio.get_running_loop().call_soon(self.abort, error.message)

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self._seen_tick = self._hub.tick
        if self._end == len(self._view) and self._end < self._hub.limits.receive_bytes_max:
            self._want = 4 * self._end
        self._offer()
        self._taken += nbytes
        if self._taken >= self._hub.limits.turn_bytes_max:
            self._let_others_read()
        if self._hub.idle is not None:
            self._hub.idle.came()

    def _let_others_read(self) -> None:
        """libuv reads up to 32 buffers from a socket that is never empty before it looks at anything else: tens of milliseconds."""
        self._taken = 0
        if not self._paused:
            self._pause()
            self._hub.soon(self._take_up)

    def eof_received(self) -> bool:
        """The peer will send nothing more; answers still go out, the session closes when it owes none."""
        self._ended = True
        self._seen_tick = self._hub.tick
        session = self._session
        if session is None:
            return False
        try:
            session.finish(self._view[self._start : self._end])
        except Exception as error:
            self._fail(error)
        self._start = self._end
        return True

    def pause_writing(self) -> None:
        self._clogged = True
        self._clogged_tick = self._hub.tick

    def resume_writing(self) -> None:
        self._clogged = False
        self._release()
        if self._session is not None:
            self._session.drained()
            self._take_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hub.connections.discard(self)
        self._clogged = False
        self._ended = True
        self.let_go()
        self._release()

    def let_go(self) -> None:
        """Have nothing received any more: the transport has ended, or will without another read."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        self._give_buffer()

    def _give_buffer(self) -> None:
        if self._pins:
            return
        self._view = memoryview(b"")
        self._start = self._end = 0
        if self._buffer is not None:
            self._hub.arena.give(self._buffer)
            self._buffer = None

    def pin(self) -> Callable[[], None]:
        """Keep what was received as it is."""
        self._pins += 1
        return self._unpin

    def _unpin(self) -> None:
        self._pins -= 1
        if self._session is None:
            self._give_buffer()

    # Bytes to the session

    def _offer(self) -> None:
        """Let the session take what it can."""
        session = self._session or self._recognise()
        if session is None or self._ended:
            return
        intake = self._hub.intake
        if self._produces and intake.congested:
            self._hold()
            return
        appended = intake.appended
        self._receiving = True
        try:
            self._start += session.receive(self._view[self._start : self._end])
        except Exception as error:
            self._fail(error)
            return
        finally:
            self._receiving = False
        self._produces = intake.appended != appended
        if self._produces and intake.congested:
            self._hold()
        elif session.paused() or (self._clogged and self.backlog > self.backlog_max):
            self._pause()
        elif self._start < self._end:
            self._want = max(self._want, rounded(session.wanted()))

    def _recognise(self) -> Session | None:
        """Find out which wire the peer speaks."""
        prefix = bytes(self._view[self._start : min(self._end, self._start + PREFIX_BYTES_MAX)])
        undecided = False
        for factory in self._factories:
            known = factory.recognise(prefix)
            if known:
                self._session = factory.open(self, self.resume)
                return self._session
            undecided = undecided or known is None
        if not undecided or len(prefix) >= PREFIX_BYTES_MAX:
            self.abort("no wire begins with these bytes")
        return None

    def fail(self, error: PeerError) -> None:
        """The session gave up outside of ``receive``."""
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The session gave up: answers already owed go out, then the connection closes."""
        if isinstance(error, PeerError):
            log.info("connection closed: the peer made no sense", peer=self.peer, reason=error.message)
        else:
            log.error("connection closed: a request failed in an unforeseen way", peer=self.peer, exc_info=error)
        self._ended = True
        self._start = self._end
        self._pause()
        self._hub.commit()
        self.close()

    def resume(self) -> None:
        """The session takes requests again."""
        if not self._receiving:
            self._take_up()

    def _take_up(self) -> None:
        """Offer what waited, then read on, unless the session pauses again."""
        session = self._session
        if session is None or self._ended or not self._paused or self._held:
            return
        if session.paused() or self.backlog > self.backlog_max:
            return
        self._paused = False
        if self._start < self._end:
            self._offer()
        if not self._paused and not self._hub.draining and not self._ended:
            self._transport.resume_reading()
        else:
            self._paused = True

    def _hold(self) -> None:
        """Wait, with what was not offered yet, until the intake has caught up."""
        if not self._held:
            self._held = True
            self._hub.hold(self)
            self._pause()

    def relieve(self) -> None:
        """The intake has caught up."""
        self._held = False
        self._take_up()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            if not self._transport.is_closing():
                self._transport.pause_reading()

    # What the session may do

    @property
    def backlog(self) -> int:
        """Bytes the kernel has not taken."""
        return int(self._transport.get_write_buffer_size()) if self._clogged else 0

    @property
    def peer(self) -> str:
        """Address of the peer."""
        name = self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)

    @property
    def local(self) -> tuple[str, int]:
        """Host and port that the peer connected to; a host of IPv6 digits as a name where there is one, because wires split at colons."""
        name = self._transport.get_extra_info("sockname")
        if not isinstance(name, tuple):
            return "localhost", 0
        return "localhost" if name[0] == "::1" else name[0], name[1]

    @property
    def on_loopback(self) -> bool:
        """Whether the peer is on this machine."""
        name = self._transport.get_extra_info("peername")
        return not isinstance(name, tuple) or ip_address(name[0].partition("%")[0]).is_loopback

    def write(self, data: Buffer) -> None:
        """Send bytes."""
        if not self._transport.is_closing():
            self._transport.write(data)
            if self._clogged:
                self._check_backlog()

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """Send parts in order; ``released`` once the kernel has them."""
        if not self._transport.is_closing():
            self._transport.writelines(parts)
            if self._clogged:
                if released is not None:
                    self._released.append(released)
                self._check_backlog()
                return
        if released is not None:
            released()

    def _check_backlog(self) -> None:
        if self.backlog > self.backlog_max:
            self._hub.check_backlog()

    def _release(self) -> None:
        released, self._released = self._released, []
        for release in released:
            release()

    def close(self) -> None:
        """Close once everything written was sent."""
        self._transport.close()

    # What the hub asks

    @property
    def held_bytes(self) -> int:
        """Size of the receive buffer, if it can be had back."""
        return 0 if self._buffer is None or (self._session is None and self._pins) else len(self._buffer)

    @property
    def is_waiting(self) -> bool:
        """Whether the session owes an answer that holds up its next request, or answers wait for the peer."""
        return self._clogged or (self._session is not None and self._session.paused())

    def stop_reading(self) -> None:
        """Take no further request."""
        self._pause()

    def sweep(self) -> None:
        """A second has passed."""
        hub, quiet = self._hub, self._hub.tick - self._seen_tick
        if self._clogged and hub.tick - self._clogged_tick > hub.limits.stalled_s:
            self.abort("the peer does not read its answers")
        elif self._session is None and quiet > hub.limits.unknown_s:
            self.abort("the peer did not say which wire it speaks")
        elif self._ended and quiet > hub.limits.stalled_s:
            self.abort("the peer has finished and nothing is left to say")
        elif self._start < self._end and not self._paused:
            if self.held_bytes > SMALL_FRAME_BYTES and quiet > hub.limits.stalled_s:
                self.abort("a request stands still in its middle")
        elif quiet > 1 and self._start == self._end and self._buffer is not None and not self._paused:
            self._start = self._end = 0
            self._view = memoryview(b"")
            hub.arena.give(self._buffer)
            self._buffer = None
            self._want = BUFFER_BYTES_MIN

    def abort(self, reason: str) -> None:
        """Close at once, dropping what was not sent."""
        log.info("connection dropped", peer=self.peer, reason=reason)
        self._ended = True
        self._transport.abort()


def _call_soon(callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(callback)


def _seen_tick(connection: Connection) -> int:
    return connection._seen_tick


def _clogged_tick(connection: Connection) -> int:
    return connection._clogged_tick
