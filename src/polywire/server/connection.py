"""The connection driver of all protocols: moves bytes between a socket and a session. This module is compiled.

* A session receives its bytes in order. Bytes that it does not consume are passed again, together with the bytes that
  arrive after them.
* A session gets no bytes while it is paused, or while too many of its responses wait to be sent.
* Bytes that were passed to the broker are not overwritten before they are committed to the log.
* Every buffer has a size limit, so no client can exhaust the broker's memory.

**No callback of the broker may run while the event loop asks for a buffer.** The event loop (libuv) asks for memory and
then reads into it. If the connection is paused or closed in between, the process crashes (libuv issue 2399). A commit
sends responses, which can pause or close a connection.

So ``get_buffer`` only finds memory; it does not commit, pause, write or close. ``buffer_updated`` does all other work.
``Hub.lending`` is true while it runs, and assertions fail if anything else happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cython
import structlog

from polywire.broker.users import LINKS, ROOT, TABLES
from polywire.errors import Busy, PeerError
from polywire.protocols.runtime.session import Session, SessionFactory
from polywire.server.logins import Standing
from polywire.server.memory import LAST_READ_AT, READ_BYTES
from polywire.server.phases import CLOSED, ENDING, OPEN, SILENT, TRANSITIONS, UNKNOWN, EndedTransport, Pause, Phase
from polywire.server.receive_buffer import BYTES_PER_S_MIN, SHORT_BYTES_PER_S_MIN, STALLED_TICKS, ReceiveBuffer
from polywire.server.recognition import host_and_port, recognise
from polywire.server.scheduling import HEAVY_S
from polywire.server.socket_state import was_reset

if cython.compiled:
    from cython.cimports.polywire.server.hub import Hub
    from cython.cimports.polywire.server.sending import SendingHalf
else:
    from polywire.server.hub import Hub
    from polywire.server.sending import SendingHalf

if TYPE_CHECKING:
    from polywire.broker.access import Principal

CHECK_TICKS = 4  # seconds between two checks whether the client of a paused connection is gone
# seconds after which the debt of a delayed connection is checked again
DELAY_S_MAX = 60.0
UNMETERED = frozenset({"link"})  # connections between processes of the broker; clients' connections are metered instead
log = structlog.get_logger("polywire.server")


@cython.cclass
class BareConnection(SendingHalf):
    """One socket and its session. Implements ``protocols.runtime.session.Output``."""

    _buffer: ReceiveBuffer | None  # unconsumed bytes, or memory for large reads; None to read into the shared chunk
    _client_id: str | None  # as sent by the client
    _factories: Sequence[SessionFactory]
    _is_heavy: cython.bint  # whether the session's last call took long
    _pauses = cython.declare(cython.int, visibility="public")  # reasons not to read (``Pause``)
    _phase: Phase  # changes as in ``TRANSITIONS``
    _session: Session | None  # set in OPEN; before that if the listener has only one protocol
    _taken: cython.longlong
    _taken_before: cython.longlong
    _throttle: Any  # timer that ends the delay of a client that has exceeded a quota
    _user: Principal | None  # for quotas
    certified = cython.declare(object, visibility="public")
    host = cython.declare(str, visibility="public")
    seen_tick = cython.declare(cython.longlong, visibility="public")

    def __init__(self, hub: Hub, factories: Sequence[SessionFactory]) -> None:
        """``factories`` are the protocols of the listener. If there is only one, the session is opened at once."""
        super().__init__(hub)
        self._factories = factories
        self._phase = SILENT
        self._pauses = 0
        self._session = None
        self._buffer = None
        self._taken = 0
        self._taken_before = 0
        self._is_heavy = False
        self._client_id = None
        self._throttle = None
        self._user = None
        self.seen_tick = hub.tick
        self.host = ""
        self.certified = None

    def _enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self._phase], f"no transition from {self._phase.name} to {phase.name}"
        self._phase = phase

    def _stop_offering(self) -> None:
        if self._phase < ENDING:
            self._enter(ENDING)

    # Called by the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.host = host_and_port(transport.get_extra_info("peername"))[0]
        if not self._hub.enter(self):
            self._transport.abort()
            return
        # With a limit of 0, the transport reports unsent bytes at once, and writes immediately instead of at the end of
        # the loop's pass.
        self._transport.set_write_buffer_limits(high=0)
        if len(self._factories) == 1:
            self._open_session(self._factories[0])

    def _open_session(self, factory: SessionFactory) -> Session:
        self.wire = factory.wire
        self._session = session = factory.open(self, self.resume)
        self.choose_meter()
        return session

    def certify(self, name: str) -> bool:
        """Log in as the user that a TLS certificate names.

        Returns False, and closes the connection, if there is no such user or the user has too many connections.
        """
        logins = self._hub.logins
        try:
            self.certified = logins.certify(self, name)
        except Busy as error:
            self.abort(error.message)
            return False
        if self.certified is None and not logins.is_open:
            self.abort(f"the client's certificate does not name a user name={name!r}")
            return False
        return True

    def move_to(self, transport: Any, received: bytes) -> None:
        """Continue with another transport of the same socket.

        ``received`` are bytes that the old transport has read.
        """
        self._transport = transport
        transport.set_protocol(self)
        while received and not transport.is_closing():
            room = self.get_buffer(-1)
            count = min(len(room), len(received))
            room[:count] = received[:count]
            received = received[count:]
            self.buffer_updated(count)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return memory for the next read. It must not call other code (see the module docstring)."""
        hub = self._hub
        memory = hub.memory
        hub.lending = True
        try:
            buffer, chunk = self._buffer, memory.shared_chunk
            is_needed = buffer is not None or chunk.position > LAST_READ_AT or memory.arena.viewed
            if is_needed and not hub.ingest.uncommitted:
                memory.batch_committed()
            if buffer is None:
                return chunk.lend()
            self._buffer = buffer = buffer.with_free()
            return buffer.view[buffer.end :]
        finally:
            hub.lending = False

    def buffer_updated(self, nbytes: int) -> None:
        self.received(nbytes)
        if self._hub.idle is not None:
            self._hub.idle.bytes_arrived()

    def received(self, nbytes: int) -> None:
        """Process ``nbytes`` bytes that were read into the memory of the last ``get_buffer``."""
        hub = self._hub
        self.seen_tick = hub.tick
        if self.meter is not None:
            self.meter.received(nbytes)
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
        """Move unconsumed bytes into a buffer of this connection.

        After a large read, a buffer is allocated even if no bytes are left, because more large reads are likely.
        """
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
        """Find memory for the next read, and pause if there is none.

        This cannot be done in ``get_buffer``, which must neither commit nor close connections.
        """
        hub = self._hub
        if buffer.end == len(buffer.view):
            if hub.ingest.uncommitted:  # the loop reads again immediately; a commit allows it to reuse this memory
                hub.commit()
            else:
                hub.memory.batch_committed()
            if self._phase is not OPEN:
                return
        if buffer.start == buffer.end:
            self._buffer = buffer.for_flow(hub.limits.receive_bytes_max)
        elif not self._pauses:
            self._grow()

    def _grow(self) -> bool:
        """Enlarge the buffer of an incomplete request. If there is no memory, pause and return False."""
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
        assert session is not None, "a session has read the beginning of the request"
        return buffer.wanted_size(
            needed=session.wanted(),
            request_bytes_max=session.frame_bytes_max,
            flow_bytes_max=self._hub.limits.receive_bytes_max,
        )

    def resume_receiving(self) -> None:
        if self._phase is OPEN and self._buffer is not None and self._grow():
            self._buffer.begin()
            self.seen_tick = self._hub.tick
            self._unpause(Pause.STARVED)

    def _let_others_read(self) -> None:
        """Pause until the next pass of the loop.

        Without the pause, libuv reads up to 32 buffers from one socket before it serves the next, which takes tens of
        milliseconds.
        """
        self._taken_before += self._taken
        self._taken = 0
        if not self._pauses:
            self._pause(Pause.YIELDING)
            self._hub.soon(self._read_again)

    def _read_again(self) -> None:
        self._unpause(Pause.YIELDING)

    def eof_received(self) -> bool:
        """Handle the end of the client's stream: send pending responses, then close the session."""
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
        """Discard unconsumed bytes. The buffer is freed later, because its memory may be in use."""
        if self._buffer is not None:
            self._buffer.start = self._buffer.end

    def resume_writing(self) -> None:
        self._unclog()
        if self._session is not None:
            self._session.drained()
            self._unpause(Pause.OWING)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clogged = False  # otherwise leaving the slot would wait for unsent responses
        self.free_slot()
        self._unclog()
        self._transport = EndedTransport(self._transport)

    def release(self) -> None:
        """Close the session and free the buffer, after which nothing is read any more."""
        assert not self._hub.lending, "the loop asks for a buffer"
        if self._phase is CLOSED:
            return
        self._enter(CLOSED)
        if self._throttle is not None:
            self._throttle.cancel()
            self._throttle = None
        self.meter = None
        session, self._session = self._session, None
        if session is not None:
            session.close()
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.free()

    def free_idle_buffer(self) -> None:
        """Free the buffer if it contains no request."""
        if self._buffer is not None:
            self._buffer = self._buffer.freed()

    def free_slot(self) -> None:
        """Stop counting an aborted connection at once, because the loop calls ``connection_lost`` only later."""
        self._hub.leave(self)
        self.release()

    def pin(self) -> Callable[[], None]:
        memory = self._hub.memory
        if self._buffer is None and memory.shared_chunk.reader is self:
            self._buffer = ReceiveBuffer.of_chunk(memory)
        return (lambda: None) if self._buffer is None else self._buffer.pin()  # without a buffer, the bytes were copied

    # Bytes to the session

    def _offer(self, data: memoryview) -> int:
        """Pass bytes to the session. Return how many of them it consumed."""
        session = self._session if self._phase is OPEN else self._recognise(data)
        if session is None:
            return 0
        ingest, pressure, queue = self._hub.ingest, self._hub.pressure, self._hub.run_queue
        if queue.spent_s and queue.current is not self and not queue.has_time(heavy=self._is_heavy):
            queue.put(self)
            self._pause(Pause.QUEUED)
            return 0
        if self._produces and pressure.congested:
            self._wait_for_relief()
            return 0
        appended = ingest.appended
        now, times = queue.now, self._hub.request_times
        begun = now()
        try:
            if times.skip and not self._timed_since:
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
        if self._produces and pressure.congested:
            self._wait_for_relief()
        elif session.paused() or (self._clogged and self.backlog > self.backlog_max):
            self._pause(Pause.OWING)
        if self.meter is not None and count:
            self.meter.executed(session.requests)
            self._delay()
        return count

    def take_turn(self) -> None:
        self._unpause(Pause.QUEUED)

    def _recognise(self, data: memoryview) -> Session | None:
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
        """Close the connection after an error that the session found while no bytes were passed to it."""
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Send pending responses, and close the connection after an error of the session."""
        if isinstance(error, PeerError):
            log.info("connection closed: protocol error", peer=self.peer, reason=error.message)
        else:
            log.error("connection closed: unexpected error", peer=self.peer, exc_info=error)
        self._stop_offering()
        self._drop_left()
        self._pause(Pause.ENDED)
        self._hub.commit()
        self.close()

    # Pausing and resuming

    def _pause(self, reason: int) -> None:
        """Stop reading. ``reason`` is a bit of ``Pause``."""
        assert not self._hub.lending, "the loop asks for a buffer"
        if not self._pauses and not self._transport.is_closing():
            self._transport.pause_reading()
        self._pauses |= reason

    def _unpause(self, reason: int) -> None:
        """Remove a reason for the pause. After the last one, pass waiting bytes to the session and resume reading."""
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
            self._resume_reading()

    def _resume_reading(self) -> None:
        buffer = self._buffer
        if buffer is not None and buffer.left:
            if self._wanted_size(buffer) > buffer.size:
                # Freeing memory can close other connections, which must not happen during the call that resumed this
                # connection.
                self._pauses |= Pause.STARVED
                self._hub.soon(self.resume_receiving)
                return
        elif buffer is not None:
            self._buffer = buffer.for_flow(self._hub.limits.receive_bytes_max)
        self._transport.resume_reading()

    def resume(self) -> None:
        """Called by the session when it accepts requests again."""
        self._unpause(Pause.OWING)

    def _wait_for_relief(self) -> None:
        self._hub.hold(self)
        self._pause(Pause.CONGESTED)

    def relieve(self) -> None:
        self._unpause(Pause.CONGESTED)

    def stop_reading(self) -> None:
        """Read nothing more. Requests that were already received are executed, without the delays of quotas."""
        self._pause(Pause.DRAINING)
        self._end_delay()

    # Called by the session

    def identified(self, principal: Principal | None) -> None:
        """Set the user after a login.

        None stands for a logout, and restores the user of the TLS certificate if there is one.
        """
        principal = principal or self.certified
        self._hub.logins.identify(self, principal)
        if principal is not self._user:
            self._user = principal
            self._change_client()

    def set_client_id(self, client_id: str | None) -> None:
        self._client_id = client_id
        self._change_client()

    def _change_client(self) -> None:
        before = self.meter
        if before is not None and self._session is not None:
            before.executed(self._session.requests)
        self.choose_meter()
        if before is not None and self.meter is not None:
            self.meter.succeed(before)

    # Quotas

    def choose_meter(self) -> None:
        """Count traffic for the quotas that apply now. A delay that has begun ends, because they may have changed."""
        session = self._session
        if session is None or self.wire in UNMETERED or self._user is TABLES or self._user is LINKS:
            self.meter = None
        else:
            user = None if self._user is None or self._user is ROOT else self._user.name
            self.meter = self._hub.quotas.meter(user, self._client_id, self.host, session.requests)
        if self._throttle is not None:
            self._hub.soon(self._end_delay)  # later, because the session may be executing a request

    def delay_ms(self, size: int) -> int:
        """See ``Output``."""
        meter, session = self.meter, self._session
        if meter is None or session is None:
            return 0
        meter.executed(session.requests)
        return int(meter.delay_ms(size))

    def _delay(self) -> None:
        """Stop reading and sending if the client has exceeded a quota, until its debt is paid."""
        if self.meter is None or self._throttle is not None or self._phase is CLOSED or self._hub.draining:
            return
        seconds = self.meter.delay()
        if seconds > 0:
            self.backlog_max = -1
            self._pause(Pause.THROTTLED)
            self._delay_for(seconds)

    def _delay_for(self, seconds: float) -> None:
        assert self.meter is not None, "a quota applies"
        seconds = min(seconds, DELAY_S_MAX)
        self.meter.delayed(seconds)
        self._throttle = self._hub.later(seconds, self._delay_over)

    def _delay_over(self) -> None:
        """Continue, unless other connections with the same quota have caused a new debt in the meantime."""
        seconds = self.meter.remaining() if self.meter is not None else 0.0
        if seconds > 0:
            self._delay_for(seconds)
        else:
            self._end_delay()

    def _end_delay(self) -> None:
        if self._throttle is None:
            return
        self._throttle.cancel()
        self._throttle = None
        self.backlog_max = self._hub.limits.backlog_bytes_max
        self.seen_tick = self.clogged_tick = self._hub.tick
        self._unpause(Pause.THROTTLED)
        if self._session is not None:
            self._session.drained()
            self._unpause(Pause.OWING)

    # Called by the hub

    @property
    def received_bytes(self) -> int:
        return self._taken_before + self._taken

    @property
    def dialect(self) -> str:
        """The dialect of the protocol, as in ``Session.spoken_dialect``; empty before the protocol is detected."""
        return "" if self._session is None else self._session.spoken_dialect

    @property
    def held_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.size

    @property
    def rate(self) -> float:
        return 0.0 if self._buffer is None else self._buffer.rate()

    @property
    def is_stalled(self) -> bool:
        """Whether a request arrives too slowly while the connection is not paused.

        Bytes in the socket that were not read yet count as arrived.
        """
        buffer = self._buffer
        if buffer is None or not buffer.left or self._pauses:
            return False
        return self._is_slow(buffer, STALLED_TICKS, SHORT_BYTES_PER_S_MIN) and not buffer.is_fast_enough(
            self._transport
        )

    def _is_slow(self, buffer: ReceiveBuffer, ticks: int, bytes_per_s: int) -> bool:
        return self._hub.tick - self.seen_tick >= ticks or buffer.is_slow(ticks, bytes_per_s)

    @property
    def is_receiving(self) -> bool:
        """Whether the buffer is in use: a request is arriving or waits to be read, or a thread uses its bytes."""
        buffer = self._buffer
        if buffer is None or buffer.is_pinned:
            return buffer is not None
        return bool(buffer.left) and self._phase < ENDING and not self._is_owing and not self.is_stalled

    @property
    def standing(self) -> Standing:
        return Standing.SILENT if self._phase is SILENT else self._hub.logins.standing(self)

    @property
    def is_waiting(self) -> bool:
        """Whether the client still expects a response.

        That is the case if the session has one to send, a request waits for a later pass, or bytes are unsent.
        """
        return bool(self._pauses & Pause.QUEUED) or self._is_owing

    @property
    def _is_owing(self) -> bool:
        return self._clogged or (self._session is not None and self._session.paused())

    def sweep(self) -> None:
        """Close the connection if it has stalled for too long. Called once a second."""
        hub, buffer, quiet = self._hub, self._buffer, self._hub.tick - self.seen_tick
        is_deaf = self._pauses or self._phase >= ENDING
        if is_deaf and quiet and quiet % CHECK_TICKS == 0 and was_reset(self._transport):
            self._transport.abort()
            return
        if self._throttle is not None:
            return
        if self._clogged and hub.tick - self.clogged_tick > hub.limits.stalled_s:
            self.abort("the client does not read its responses")
        elif self._phase >= ENDING:
            if hub.tick - max(self.seen_tick, self.clogged_tick) > hub.limits.stalled_s:
                self.abort("the client has closed its side and no response is pending")
        elif self._session is None and quiet > hub.limits.unknown_s:
            self.abort("the protocol could not be detected in time")
        elif buffer is None or self._pauses:
            return
        elif not buffer.left:
            if quiet > 1:
                self.free_idle_buffer()
        elif self._is_slow(buffer, hub.limits.stalled_s + 1, BYTES_PER_S_MIN):
            self.abort("a request is incomplete and arrives too slowly")

    def end(self, reason: str) -> None:
        """Execute no more requests, send all pending responses, and close. ``reason`` is logged."""
        log.info("connection closed", peer=self.peer, reason=reason)
        self._pause(Pause.ENDED)
        self.release()
        self._transport.close()

    def abort(self, reason: str = "") -> None:
        """Close immediately and discard unsent bytes. ``reason`` is logged unless it is empty."""
        assert not self._hub.lending, "the loop asks for a buffer"
        if reason:
            log.info("connection dropped", peer=self.peer, reason=reason)
        self._stop_offering()
        self._transport.abort()


class Connection(BareConnection, asyncio.BufferedProtocol):
    """A connection as an asyncio protocol.

    The compiled class cannot extend ``asyncio.BufferedProtocol``, so this one extends both.
    """

    __slots__ = ()
