"""The one connection driver, for all wires: moves bytes between a socket and a session. Compiled.

Promises: a session is offered its bytes in order, each exactly once beyond what it left; it is not called while it is paused or while too
many of its answers wait for the peer; bytes handed to the broker are not overwritten before their write batch was committed. Whatever one
peer does, floods, stalls or garbage, costs the others nothing but time: every buffer has a limit. Must not know: any wire, messages, the
broker's verbs.

**No callback of ours runs while the loop asks for a buffer.** libuv asks for memory and reads into it without looking again whether the
connection still is open and still reads (its issue 2399): a connection paused or closed in between ends the process. To commit is to answer
peers, this one among them, and an answer may pause or close. So ``get_buffer`` only finds memory: it commits nothing, and pauses, writes to
and closes no connection, its own or another; ``Hub.lending`` is true meanwhile, and whoever does so is stopped by an assertion. What needs
more is done at the end of ``buffer_updated``, when the loop expects anything. Memory that a write batch may still view is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cython
import structlog

from polywire.errors import Busy, PeerError
from polywire.protocols.runtime.session import Session, SessionFactory
from polywire.server.ended import EndedTransport
from polywire.server.logins import Standing
from polywire.server.phases import CLOSED, ENDING, OPEN, SILENT, TRANSITIONS, UNKNOWN, Pause, Phase
from polywire.server.receive_buffer import BYTES_PER_S_MIN, SHORT_BYTES_PER_S_MIN, STALLED_TICKS, ReceiveBuffer
from polywire.server.recognition import host_and_port, recognise
from polywire.server.run_queue import HEAVY_S
from polywire.server.shared_chunk import LAST_READ_AT, READ_BYTES

if cython.compiled:
    from cython.cimports.polywire.server.hub import Hub
    from cython.cimports.polywire.server.sending import SendingHalf
else:
    from polywire.server.hub import Hub
    from polywire.server.sending import SendingHalf

if TYPE_CHECKING:
    from polywire.broker.access import Principal

log = structlog.get_logger("polywire.server")


@cython.cclass
class BareConnection(SendingHalf):
    """One socket. Implements ``protocols.runtime.session.Output``.

    Invariant: ``_phase`` changes as ``TRANSITIONS`` says; there is a session in OPEN and, where one wire only may be spoken, before.
    ``_pauses``: why nothing is read. ``_buffer``: what was received and not consumed, or what a flow is read into; without either there is
    none, and bytes are read into the chunk that all share. ``_produces``, ``_is_heavy``: whether the peer produces and asks for
    much, as far as the last offer showed.
    """

    _buffer: ReceiveBuffer | None
    _factories: Sequence[SessionFactory]
    _is_heavy: cython.bint
    _pauses = cython.declare(cython.int, visibility="public")
    _phase: Phase
    _session: Session | None
    _taken: cython.longlong
    _taken_before: cython.longlong
    certified = cython.declare(object, visibility="public")
    host = cython.declare(str, visibility="public")
    seen_tick = cython.declare(cython.longlong, visibility="public")

    def __init__(self, hub: Hub, factories: Sequence[SessionFactory]) -> None:
        """factories: the wires that may be spoken here; with one, nothing has to be recognised."""
        super().__init__(hub)
        self._factories = factories
        self._phase = SILENT
        self._pauses = 0
        self._session = None
        self._buffer = None
        self._taken = 0
        self._taken_before = 0
        self._is_heavy = False
        self.seen_tick = hub.tick
        self.host = ""
        self.certified = None

    def _enter(self, phase: Phase) -> None:
        """Go on to another phase."""
        assert phase in TRANSITIONS[self._phase], f"no transition from {self._phase.name} to {phase.name}"
        self._phase = phase

    def _stop_offering(self) -> None:
        """Offer nothing more."""
        if self._phase < ENDING:
            self._enter(ENDING)

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
        memory = hub.memory
        hub.lending = True
        try:
            buffer, chunk = self._buffer, memory.shared_chunk
            is_needed = buffer is not None or chunk.position > LAST_READ_AT or memory.arena.viewed
            if is_needed and not hub.ingest.uncommitted:
                memory.settle()
            if buffer is None:
                return chunk.lend()
            self._buffer = buffer = buffer.with_free()
            return buffer.view[buffer.end :]
        finally:
            hub.lending = False

    def buffer_updated(self, nbytes: int) -> None:
        self.received(nbytes)
        if self._hub.idle is not None:
            self._hub.idle.came()

    def received(self, nbytes: int) -> None:
        """So much was read into the memory that was asked for last."""
        hub = self._hub
        self.seen_tick = hub.tick
        if self._phase is SILENT:
            self._enter(UNKNOWN if self._session is None else OPEN)
            hub.slots.spoke(self)
        buffer = self._buffer
        if buffer is None:
            chunk = hub.memory.shared_chunk
            chunk.reader = self
            chunk.lent = data = chunk.lent[:nbytes]
            count = 0 if self._pauses else self._offer(data)
            chunk.used()
            if count < nbytes or nbytes == READ_BYTES or self._buffer is not None:
                self._keep(data[count:], nbytes)
        else:
            is_new, start = buffer.start == buffer.end, buffer.start
            buffer.filled(nbytes, flow_bytes_max=hub.limits.receive_bytes_max)
            if not self._pauses:
                buffer.consumed(self._offer(buffer.view[buffer.start : buffer.end]))
            if buffer.start < buffer.end and (is_new or buffer.start != start):
                buffer.begin()
            if self._phase is OPEN:
                self._prepare(buffer)
        self._taken += nbytes
        if self._taken >= hub.limits.quantum_bytes_max:
            self._let_others_read()

    def _keep(self, left: memoryview, read: int) -> None:
        """Have a buffer for what is left of so much that landed, or for a flow that fills its reads."""
        hub, pinned = self._hub, self._buffer
        if pinned is not None:
            pinned.consumed(read - len(left))
            pinned.begin()
        elif self._phase < ENDING:
            self._buffer = ReceiveBuffer.of_landed(
                hub.memory, left, read=read, flow_bytes_max=hub.limits.receive_bytes_max
            )
            if left and self._phase is OPEN and not self._pauses:
                self._grow()

    def _prepare(self, buffer: ReceiveBuffer) -> None:
        """Have memory for the next read, as long as others may still be answered and closed for it."""
        hub = self._hub
        if buffer.end == len(buffer.view):
            if hub.ingest.uncommitted:  # the loop reads on at once: let it be into the same memory
                hub.commit()
            else:
                hub.memory.settle()
            if self._phase is not OPEN:
                return
        if buffer.start == buffer.end:
            self._buffer = buffer.for_flow(hub.limits.receive_bytes_max)
        elif not self._pauses:
            self._grow()

    def _grow(self) -> bool:
        """Have memory for more of an unfinished request; False when that has to wait, and then nothing is read."""
        buffer = self._buffer
        assert buffer is not None, "a request is unfinished"
        size, wanted = len(buffer.view), self._wanted_size(buffer)
        if wanted > size:
            if not self._hub.memory.grant(wanted - size, self):
                self._pause(Pause.STARVED)
                return False
            self._buffer = buffer.replaced(wanted)
        return True

    def _wanted_size(self, buffer: ReceiveBuffer) -> int:
        session = self._session
        assert session is not None, "somebody has taken the beginning"
        return buffer.wanted_size(
            needed=session.wanted(),
            request_bytes_max=session.frame_bytes_max,
            flow_bytes_max=self._hub.limits.receive_bytes_max,
        )

    def go_on_receiving(self) -> None:
        """There may be memory now."""
        if self._phase is OPEN and self._buffer is not None and self._grow():
            self._buffer.begin()
            self.seen_tick = self._hub.tick
            self._take_up(Pause.STARVED)

    def _let_others_read(self) -> None:
        """libuv reads up to 32 buffers from a socket that is never empty before it looks at anything else: tens of milliseconds."""
        self._taken_before += self._taken
        self._taken = 0
        if not self._pauses:
            self._pause(Pause.YIELDING)
            self._hub.soon(self._read_again)

    def _read_again(self) -> None:
        """The others had their turn."""
        self._take_up(Pause.YIELDING)

    def eof_received(self) -> bool:
        """The peer will send nothing more; answers still go out, the session closes when it owes none."""
        self._stop_offering()
        self.seen_tick = self._hub.tick
        session, buffer = self._session, self._buffer
        if session is None:
            return False
        left = b"" if buffer is None else buffer.view[buffer.start : buffer.end]
        try:
            session.finish(memoryview(left))
        except Exception as error:
            self._fail(error)
        self._drop_left()
        return True

    def _drop_left(self) -> None:
        """What was received is not wanted any more; the buffer may be looked at still."""
        if self._buffer is not None:
            self._buffer.start = self._buffer.end

    def resume_writing(self) -> None:
        self._unclog()
        if self._session is not None:
            self._session.drained()
            self._take_up(Pause.OWING)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clogged = False  # nothing is owed to anybody, as far as the slot is concerned
        self.vacate()
        self._unclog()
        self._transport = EndedTransport(self._transport)

    def let_go(self) -> None:
        """Have nothing received any more: the transport has ended, or will without another read."""
        assert not self._hub.lending, "the loop asks for a buffer"
        if self._phase is CLOSED:
            return
        self._enter(CLOSED)
        session, self._session = self._session, None
        if session is not None:
            session.close()
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.give_back()

    def give_back_idle(self) -> None:
        """Give back a buffer that holds no request."""
        if self._buffer is not None:
            self._buffer = self._buffer.given_back()

    def vacate(self) -> None:
        """The transport was ended: the place is free, though the loop has not said so yet."""
        self._hub.leave(self)
        self.let_go()

    def pin(self) -> Callable[[], None]:
        """Keep what was received as it is."""
        memory = self._hub.memory
        if self._buffer is None and memory.shared_chunk.reader is self:
            self._buffer = ReceiveBuffer.of_chunk(memory)
        return (lambda: None) if self._buffer is None else self._buffer.pin()  # a copy stays as it is

    # Bytes to the session

    def _offer(self, data: memoryview) -> int:
        """Let the session take what it can of this; returns how many bytes that were."""
        session = self._session if self._phase is OPEN else self._recognise(data)
        if session is None:
            return 0
        ingest, queue = self._hub.ingest, self._hub.run_queue
        if queue.spent_s and queue.current is not self and not queue.has_time(heavy=self._is_heavy):
            queue.put(self)
            self._pause(Pause.QUEUED)
            return 0
        if self._produces and ingest.congested:
            self._wait_for_relief()
            return 0
        appended = ingest.appended
        now, times = queue.now, self._hub.request_times
        begun = now()
        try:
            if times.skip and not self._asked_at:
                times.skip -= 1
                count = session.receive(data)
            else:
                count = self._receive_timed(session, data, begun)
        except Exception as error:
            self._fail(error)
            return len(data)
        took = now() - begun
        if took > HEAVY_S:
            queue.spend(took, heavy=self._is_heavy)
            self._is_heavy = True
        elif self._is_heavy:
            self._is_heavy = False
        self._produces = ingest.appended != appended
        if self._produces and ingest.congested:
            self._wait_for_relief()
        elif session.paused() or (self._clogged and self.backlog > self.backlog_max):
            self._pause(Pause.OWING)
        return count

    def take_turn(self) -> None:
        """It is this connection's turn again."""
        self._take_up(Pause.QUEUED)

    def _recognise(self, data: memoryview) -> Session | None:
        """Find out which wire the peer speaks."""
        if self._phase is not UNKNOWN:
            return None
        try:
            factory = recognise(self._factories, data)
        except PeerError as error:
            self.abort(error.message)
            return None
        if factory is None:
            return None
        self._enter(OPEN)
        return self._open_session(factory)

    def fail(self, error: PeerError) -> None:
        """The session gave up outside of ``receive``."""
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The session gave up: answers already owed go out, then the connection closes."""
        if isinstance(error, PeerError):
            log.info("connection closed: protocol error", peer=self.peer, reason=error.message)
        else:
            log.error("connection closed: unexpected error", peer=self.peer, exc_info=error)
        self._stop_offering()
        self._drop_left()
        self._pause(Pause.ENDED)
        self._hub.commit()
        self.close()

    # Reading and not

    def _pause(self, reason: int) -> None:
        """Read nothing as long as there is this reason not to."""
        assert not self._hub.lending, "the loop asks for a buffer"
        if not self._pauses and not self._transport.is_closing():
            self._transport.pause_reading()
        self._pauses |= reason

    def _take_up(self, reason: int) -> None:
        """A reason not to read has gone: without another, offer what has waited, and read on unless that gave one."""
        if not self._pauses & reason:
            return
        self._pauses &= ~reason
        session = self._session
        if self._phase is not OPEN or session is None or self._pauses & ~Pause.DRAINING:
            return
        if session.paused() or self.backlog > self.backlog_max:
            self._pauses |= Pause.OWING
            return
        self._pauses |= Pause.OFFERING
        buffer = self._buffer
        if buffer is not None and buffer.left:
            buffer.consumed(self._offer(buffer.view[buffer.start : buffer.end]))
            self.seen_tick = self._hub.tick
            buffer.begin()
        self._pauses &= ~Pause.OFFERING
        if not self._pauses and self._phase is OPEN:
            self._read_on()

    def _read_on(self) -> None:
        """Nothing stands against reading, unless there is no memory for it."""
        buffer = self._buffer
        if buffer is not None and buffer.left:
            if self._wanted_size(buffer) > buffer.size:
                self._pauses |= Pause.STARVED  # others may have to go: not from inside of what resumed this one
                self._hub.soon(self.go_on_receiving)
                return
        elif buffer is not None:
            self._buffer = buffer.for_flow(self._hub.limits.receive_bytes_max)
        self._transport.resume_reading()

    def resume(self) -> None:
        """The session takes requests again."""
        self._take_up(Pause.OWING)

    def _wait_for_relief(self) -> None:
        """Wait, with what was not offered yet, until the intake has caught up."""
        self._hub.hold(self)
        self._pause(Pause.CONGESTED)

    def relieve(self) -> None:
        """The intake has caught up."""
        self._take_up(Pause.CONGESTED)

    def stop_reading(self) -> None:
        """Take no further request; those that have come are carried out."""
        self._pause(Pause.DRAINING)

    # What the session may do

    def identified(self, principal: Principal | None) -> None:
        """Say who the peer is."""
        self._hub.logins.identify(self, principal or self.certified)

    # What the hub asks

    @property
    def received_bytes(self) -> int:
        """Read from the peer so far."""
        return self._taken_before + self._taken

    @property
    def dialect(self) -> str:
        """See ``Session.spoken_dialect``; empty before it is known which wire it is."""
        return "" if self._session is None else self._session.spoken_dialect

    @property
    def held_bytes(self) -> int:
        """Size of the receive buffer."""
        return 0 if self._buffer is None else self._buffer.size

    @property
    def rate(self) -> float:
        """Bytes a second in which an unfinished request arrives."""
        return 0.0 if self._buffer is None else self._buffer.rate()

    @property
    def is_stalled(self) -> bool:
        """Whether a request hardly arrives, for no reason of ours: what lies unread has arrived, too."""
        buffer = self._buffer
        if buffer is None or not buffer.left or self._pauses:
            return False
        return self._is_slow(buffer, STALLED_TICKS, SHORT_BYTES_PER_S_MIN) and not buffer.goes_on(self._transport)

    def _is_slow(self, buffer: ReceiveBuffer, ticks: int, bytes_per_s: int) -> bool:
        """Whether nothing came for so long, or for longer than that less than so much."""
        return self._hub.tick - self.seen_tick >= ticks or buffer.is_slow(ticks, bytes_per_s)

    @property
    def is_receiving(self) -> bool:
        """Whether a request is arriving, or will be read on, or is kept while it is prepared beside the loop."""
        buffer = self._buffer
        if buffer is None or buffer.is_pinned:
            return buffer is not None
        return bool(buffer.left) and self._phase < ENDING and not self._is_owing and not self.is_stalled

    @property
    def standing(self) -> Standing:
        """How well the peer is known."""
        return Standing.SILENT if self._phase is SILENT else self._hub.logins.standing(self)

    @property
    def is_waiting(self) -> bool:
        """Whether the session owes an answer that holds up its next request, or will when its turn comes, or answers wait for the peer."""
        return bool(self._pauses & Pause.QUEUED) or self._is_owing

    @property
    def _is_owing(self) -> bool:
        return self._clogged or (self._session is not None and self._session.paused())

    def sweep(self) -> None:
        """A second has passed."""
        hub, buffer, quiet = self._hub, self._buffer, self._hub.tick - self.seen_tick
        if self._clogged and hub.tick - self.clogged_tick > hub.limits.stalled_s:
            self.abort("the peer does not read its answers")
        elif self._phase >= ENDING:
            if hub.tick - max(self.seen_tick, self.clogged_tick) > hub.limits.stalled_s:
                self.abort("the peer has finished and nothing is left to say")
        elif self._session is None and quiet > hub.limits.unknown_s:
            self.abort("the peer did not say which wire it speaks")
        elif buffer is None or self._pauses:
            return
        elif not buffer.left:
            if quiet > 1:
                self.give_back_idle()
        elif self._is_slow(buffer, hub.limits.stalled_s + 1, BYTES_PER_S_MIN):
            self.abort("a request stands still in its middle")

    def end(self, reason: str) -> None:
        """Carry out nothing more, and close once everything written was sent."""
        log.info("connection closed", peer=self.peer, reason=reason)
        self._pause(Pause.ENDED)
        self.let_go()
        self._transport.close()

    def abort(self, reason: str = "") -> None:
        """Close at once, dropping what was not sent; without a reason nothing is logged."""
        assert not self._hub.lending, "the loop asks for a buffer"
        if reason:
            log.info("connection dropped", peer=self.peer, reason=reason)
        self._stop_offering()
        self._transport.abort()


class Connection(BareConnection, asyncio.BufferedProtocol):
    """One socket, of the class that asyncio's loops ask for."""

    __slots__ = ()
