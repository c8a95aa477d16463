"""The one connection driver, for all wires: moves bytes between a socket and a session.

Promises: a session is offered its bytes in order, each exactly once beyond what it left; it is not called while it is paused or while too
many of its answers wait for the peer; bytes handed to the broker are not overwritten before their turn was committed. Whatever one peer
does, floods, stalls or garbage, costs the others nothing but time: every buffer has a limit. Must not know: any wire, messages, the
broker's verbs.

**No callback of ours runs while the loop asks for a buffer.** libuv asks for memory and reads into it without looking again whether the
connection still is open and still reads (its issue 2399): a connection paused or closed in between ends the process. To commit is to answer
peers, this one among them, and an answer may pause or close. So ``get_buffer`` only finds memory: it commits nothing, and pauses, writes to
and closes no connection, its own or another; ``Hub.lending`` is true meanwhile, and whoever does so is stopped by an assertion. What needs
more is done at the end of ``buffer_updated``, when the loop expects anything. Memory that a write batch may still view is not waited for:
``get_buffer`` finds other memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from polywire.errors import Busy, PeerError
from polywire.protocols.runtime.session import Session, SessionFactory
from polywire.server.arena import BUFFER_BYTES_MIN, Memory, rounded
from polywire.server.ended import EndedTransport
from polywire.server.hub import Hub
from polywire.server.logins import Standing
from polywire.server.memory import BYTES_PER_S_MIN, SHORT_BYTES_PER_S_MIN, STALLED_TICKS, Progress
from polywire.server.receive_buffer import FREE_BYTES_MIN, READ_BYTES
from polywire.server.recognition import format_address, host_and_port, is_loopback, recognise
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.broker.access import Principal

log = structlog.get_logger("polywire.server")


class Connection(asyncio.BufferedProtocol):
    """One socket. Implements ``protocols.base.Output``.

    Invariant: ``_buffer[_start:_end]`` is what the session has not consumed; the write batch ``_gathering`` may view what lies before.
    """

    __slots__ = (
        "_buffer",
        "_clogged",
        "_end",
        "_ended",
        "_factories",
        "_gathering",
        "_held",
        "_hub",
        "_landed",
        "_paused",
        "_pins",
        "_produces",
        "_progress",
        "_receiving",
        "_released",
        "_session",
        "_spoke",
        "_start",
        "_starved",
        "_taken",
        "_transport",
        "_view",
        "_want",
        "backlog_max",
        "certified",
        "clogged_tick",
        "host",
        "seen_tick",
        "wire",
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
        self._landed = False
        self._want = BUFFER_BYTES_MIN
        self._progress = Progress()
        self._starved = False
        self._spoke = False
        self._gathering = hub.gathering
        self._taken = 0
        self._paused = False
        self._held = False
        self._produces = False  # as far as the last offer showed
        self._receiving = False
        self._ended = False
        self._clogged = False
        self.clogged_tick = 0
        self.seen_tick = hub.tick
        self.host = ""
        self._released: list[Callable[[], None]] = []
        self.backlog_max = hub.limits.backlog_bytes_max
        self.certified: Principal | None = None
        self.wire = ""
        """Name of the wire that is spoken, empty until that is known."""

    # The socket's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.host = host_and_port(transport.get_extra_info("peername"))[0]
        if not self._hub.enter(self):
            self._transport.abort()
            return
        # Above 0 the transport says so at once, and writes without waiting for the end of the pass.
        self._transport.set_write_buffer_limits(high=0)
        if len(self._factories) == 1:
            self._open_session(self._factories[0])

    def _open_session(self, factory: SessionFactory) -> Session:
        self.wire = factory.wire
        self._session = session = factory.open(self, self.resume)
        return session

    def certify(self, name: str) -> bool:
        """The peer has proved by its TLS certificate what its name is; whether it may go on."""
        logins = self._hub.logins
        try:
            self.certified = logins.certify(self, name)
        except Busy as error:
            self.abort(error.message)
            return False
        if self.certified is None and not logins.is_open:
            self.abort(f"the peer's certificate names no user name={name!r}")
            return False
        return True

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
        """Memory for what comes next. Nothing of ours may happen in here (see above)."""
        hub = self._hub
        hub.lending = True
        try:
            if not hub.ingest.uncommitted:
                hub.settle()
            if self._buffer is None:
                self._view, self._start = hub.memory.receive_buffer.lend()
                self._end = self._start
                self._landed = True
            else:
                self._make_free()
            return self._view[self._end :]
        finally:
            hub.lending = False

    def _make_free(self) -> None:
        """Have free memory behind what the session has not consumed; no more of it than there is."""
        if self._start == self._end and self._gathering < self._hub.gathering:
            self._start = self._end = 0
        left, size = self._end - self._start, len(self._view)
        if size - self._end < (1 if left else FREE_BYTES_MIN):
            self._replace(max(size, left + 1))

    def buffer_updated(self, nbytes: int) -> None:
        hub, landed, start = self._hub, self._landed, self._start
        is_new = start == self._end
        self._end = end = self._end + nbytes
        self.seen_tick = hub.tick
        if not self._spoke:
            self._spoke = True
            hub.slots.spoke(self)
        if end == len(self._view) and (filled := READ_BYTES if landed else end) < hub.limits.receive_bytes_max:
            self._want = 4 * filled
        self._offer()
        if self._start < self._end and (is_new or self._start != start):
            self._note_progress()
        if landed:
            self._take_off(end)
        self._taken += nbytes
        if self._taken >= hub.limits.quantum_bytes_max:
            self._let_others_read()
        if self._buffer is not None or self._want > READ_BYTES:
            self._prepare()
        if hub.idle is not None:
            hub.idle.came()

    def _note_progress(self) -> None:
        """What is left is the beginning of a request, or goes on from here."""
        self.seen_tick = self._hub.tick
        self._progress.begin(self.seen_tick, self._end - self._start)

    def _take_off(self, end: int) -> None:
        """Leave the landing, which was used up to ``end``, with what is left."""
        receive_buffer = self._hub.memory.receive_buffer
        receive_buffer.used(end)
        self._landed = False
        if self._pins:
            self._buffer = receive_buffer.hand_over()
            self._view = memoryview(self._buffer)
            return
        left = self._view[self._start : self._end]
        self._view = memoryview(b"")
        self._start = self._end = 0
        if left:
            self._view = left
            self._end = len(left)
            self._replace(len(left) + 1)

    def _replace(self, size: int) -> None:
        """Have a buffer of at least this size with what is left at its front."""
        left = self._view[self._start : self._end]
        size = rounded(size)
        old, arena = self._buffer, self._hub.memory.arena
        if old is not None and len(old) == size and self._gathering < self._hub.gathering and not self._pins:
            self._view[: len(left)] = left
            self._start, self._end = 0, len(left)
            return
        self._buffer = None
        self._view = memoryview(b"")
        if old is not None:
            arena.give(old)
        self._buffer = arena.take(size)
        self._view = memoryview(self._buffer)
        self._view[: len(left)] = left
        self._start, self._end = 0, len(left)

    def _prepare(self) -> None:
        """Have memory for the next read, as long as others may still be answered and closed for it."""
        hub = self._hub
        if self._buffer is not None and self._end == len(self._view):
            if hub.ingest.uncommitted:  # the loop reads on at once: let it be into the same memory
                hub.commit()
            else:
                hub.settle()
        if self._ended or self._session is None:
            return
        if self._start < self._end:
            if not self._paused:
                self._grow()
            return
        wanted = min(self._want, hub.limits.receive_bytes_max)
        if wanted <= READ_BYTES or hub.memory.is_short:
            self.give_back_idle()
        elif wanted > len(self._view) and hub.memory.arena.fits(wanted - len(self._view)):
            self._replace(wanted)

    def _grow(self) -> bool:
        """Have room for more of an unfinished request; False when that has to wait, and then nothing is read."""
        size, memory = len(self._view), self._hub.memory
        wanted = self._growth()
        if wanted > size:
            if not memory.grant(wanted - size, self):
                self._starved = True
                self._pause()
                return False
            self._replace(wanted)
        return True

    def _growth(self) -> int:
        """Size of the buffer that a request deserves: what the flow so far does, and what it says it needs, but of that no more than four
        times what has come."""
        session, left, size = self._session, self._end - self._start, len(self._view)
        assert session is not None, "somebody has taken the beginning"
        flow = min(self._want, self._hub.limits.receive_bytes_max) if self._want > READ_BYTES else 0
        most = min(max(session.frame_bytes_max, self._hub.limits.receive_bytes_max), 4 * left)
        wanted = 2 * size if left == size else session.wanted()
        return rounded(max(flow, min(wanted, most), left + 1))

    def go_on_receiving(self) -> None:
        """There may be memory now."""
        self._starved = False
        if self._session is not None and not self._ended and self._grow():
            self._note_progress()
            self._take_up()

    def _let_others_read(self) -> None:
        """libuv reads up to 32 buffers from a socket that is never empty before it looks at anything else: tens of milliseconds."""
        self._taken = 0
        if not self._paused:
            self._pause()
            self._hub.soon(self._take_up)

    def eof_received(self) -> bool:
        """The peer will send nothing more; answers still go out, the session closes when it owes none."""
        self._ended = True
        self.seen_tick = self._hub.tick
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
        self.clogged_tick = self._hub.tick

    def resume_writing(self) -> None:
        self._clogged = False
        self._release()
        if self._session is not None:
            self._session.drained()
            self._take_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clogged = False
        self._ended = True
        self.vacate()
        self._release()
        self._transport = EndedTransport(self._transport)

    def let_go(self) -> None:
        """Have nothing received any more: the transport has ended, or will without another read."""
        assert not self._hub.lending, "the loop asks for a buffer"
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
            self._hub.memory.arena.give(self._buffer)
            self._buffer = None
        self._hub.memory.given_back()

    def give_back_idle(self) -> None:
        """Give back a buffer that holds no request."""
        if self._start == self._end and not self._landed and self._buffer is not None and not self._pins:
            self._give_buffer()
            self._want = BUFFER_BYTES_MIN

    def vacate(self) -> None:
        """The transport was ended: the place is free, though the loop has not said so yet."""
        self._hub.leave(self)
        self.let_go()

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
        ingest = self._hub.ingest
        if self._produces and ingest.congested:
            self._hold()
            return
        appended = ingest.appended
        self._receiving = True
        try:
            self._start += session.receive(self._view[self._start : self._end])
        except Exception as error:
            self._fail(error)
            return
        finally:
            self._receiving = False
            self._gathering = self._hub.gathering
        self._produces = ingest.appended != appended
        if self._produces and ingest.congested:
            self._hold()
        elif session.paused() or (self._clogged and self.backlog > self.backlog_max):
            self._pause()

    def _recognise(self) -> Session | None:
        """Find out which wire the peer speaks."""
        try:
            factory = recognise(self._factories, self._view[self._start : self._end])
        except PeerError as error:
            self.abort(error.message)
            return None
        return None if factory is None else self._open_session(factory)

    def fail(self, error: PeerError) -> None:
        """The session gave up outside of ``receive``."""
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The session gave up: answers already owed go out, then the connection closes."""
        if isinstance(error, PeerError):
            log.info("connection closed: protocol error", peer=self.peer, reason=error.message)
        else:
            log.error("connection closed: unexpected error", peer=self.peer, exc_info=error)
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
        if session is None or self._ended or not self._paused or self._held or self._starved:
            return
        if session.paused() or self.backlog > self.backlog_max:
            return
        self._paused = False
        if self._start < self._end:
            self._offer()
            self._note_progress()
        if self._paused or self._hub.draining or self._ended:
            self._paused = True
        elif self._start < self._end and self._growth() > len(self._view):
            self._paused = self._starved = True  # others may have to go: not from inside of what resumed this one
            self._hub.soon(self.go_on_receiving)
        else:
            if self._want <= READ_BYTES or self._hub.memory.is_short:
                self.give_back_idle()
            self._transport.resume_reading()

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
        assert not self._hub.lending, "the loop asks for a buffer"
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
        return format_address(self._transport.get_extra_info("peername"))

    @property
    def local(self) -> tuple[str, int]:
        """Host and port that the peer connected to."""
        return host_and_port(self._transport.get_extra_info("sockname"))

    @property
    def on_loopback(self) -> bool:
        """Whether the peer is on this machine."""
        return is_loopback(self._transport.get_extra_info("peername"))

    def write(self, data: Buffer) -> None:
        """Send bytes."""
        assert not self._hub.lending, "the loop asks for a buffer"
        if not self._transport.is_closing():
            self._transport.write(data)
            if self._clogged:
                self._check_backlog()

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """Send parts in order; ``released`` once the kernel has them."""
        assert not self._hub.lending, "the loop asks for a buffer"
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
        assert not self._hub.lending, "the loop asks for a buffer"
        self._transport.close()

    def identified(self, principal: Principal | None) -> None:
        """Say who the peer is."""
        self._hub.logins.identify(self, principal or self.certified)

    # What the hub asks

    @property
    def held_bytes(self) -> int:
        """Size of the receive buffer."""
        return 0 if self._buffer is None else len(self._buffer)

    @property
    def rate(self) -> float:
        """Bytes a second in which an unfinished request arrives."""
        return self._progress.rate(self._hub.tick, self._end - self._start)

    @property
    def is_stalled(self) -> bool:
        """Whether a request hardly arrives, for no reason of ours: what lies unread has arrived, too."""
        unfinished = self._start < self._end and not self._paused and not self._landed
        slow = unfinished and self._is_slow(STALLED_TICKS, SHORT_BYTES_PER_S_MIN)
        return slow and not self._progress.goes_on(self._hub.tick, self._end - self._start, self._transport)

    def _is_slow(self, ticks: int, bytes_per_s: int) -> bool:
        """Whether nothing came for so long, or for longer than that less than so much."""
        quiet = self._hub.tick - self.seen_tick
        return quiet >= ticks or self._progress.is_slow(self._hub.tick, self._end - self._start, ticks, bytes_per_s)

    @property
    def is_receiving(self) -> bool:
        """Whether a request is arriving, or will be read on, or is kept while it is prepared beside the loop."""
        if self._pins:
            return True
        return self._start < self._end and not self._ended and not self.is_waiting and not self.is_stalled

    @property
    def standing(self) -> Standing:
        """How well the peer is known."""
        return self._hub.logins.standing(self) if self._spoke else Standing.SILENT

    @property
    def is_waiting(self) -> bool:
        """Whether the session owes an answer that holds up its next request, or answers wait for the peer."""
        return self._clogged or (self._session is not None and self._session.paused())

    def stop_reading(self) -> None:
        """Take no further request."""
        self._pause()

    def sweep(self) -> None:
        """A second has passed."""
        hub, quiet = self._hub, self._hub.tick - self.seen_tick
        if self._clogged and hub.tick - self.clogged_tick > hub.limits.stalled_s:
            self.abort("the peer does not read its answers")
        elif self._session is None and quiet > hub.limits.unknown_s:
            self.abort("the peer did not say which wire it speaks")
        elif self._ended and hub.tick - max(self.seen_tick, self.clogged_tick) > hub.limits.stalled_s:
            self.abort("the peer has finished and nothing is left to say")
        elif self._start < self._end and not self._paused:
            if self._is_slow(hub.limits.stalled_s + 1, BYTES_PER_S_MIN):
                self.abort("a request stands still in its middle")
        elif quiet > 1 and not self._paused:
            self.give_back_idle()

    def end(self, reason: str) -> None:
        """Carry out nothing more, and close once everything written was sent."""
        log.info("connection closed", peer=self.peer, reason=reason)
        self._ended = True
        self._pause()
        self.let_go()
        self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once, dropping what was not sent."""
        assert not self._hub.lending, "the loop asks for a buffer"
        log.info("connection dropped", peer=self.peer, reason=reason)
        self._ended = True
        self._transport.abort()
