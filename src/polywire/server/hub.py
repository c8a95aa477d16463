"""What the connections of one server share: limits, memory, whose turn it is to go. Compiled.

Promises: every connection is known here from its first moment to its last; what all of them together may cost has a limit, and whoever stands
still longest goes first when it is reached. Must not know: sockets, sessions, wires.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import cython
import structlog

from polywire.clock import SYSTEM_CLOCK, Clock
from polywire.server.connection_slots import ConnectionSlots, SlotHolder
from polywire.server.idle import IdlePoll
from polywire.server.logins import Guest, Identities, Logins
from polywire.server.memory import ReceiveMemory, Receiver
from polywire.server.request_times import RequestTimes
from polywire.server.run_queue import RunQueue

log = structlog.get_logger("polywire.server")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    connections_max: open connections.
    receive_bytes_max: largest shared receive buffer; a longer frame gets its own.
    quantum_bytes_max: bytes read from one connection before others get their turn.
    backlog_bytes_max: unsent response bytes of one connection above which the broker stops reading from it.
    receive_total_bytes_max: bytes of all incomplete requests. Above it, requests that make progress wait, and stalled ones are closed.
    backlog_total_bytes_max: unsent response bytes of all connections. Above it, the connection that has not read for the longest time is
    closed.
    stalled_s: how long a client may accept no response bytes, or a request make hardly any progress.
    unknown_s: how long a connection may take to identify its protocol.
    """

    connections_max: int = 16_384
    receive_bytes_max: int = 1024 * 1024
    quantum_bytes_max: int = 2 * 1024 * 1024
    backlog_bytes_max: int = 1024 * 1024
    receive_total_bytes_max: int = 64 * 1024 * 1024
    backlog_total_bytes_max: int = 64 * 1024 * 1024
    stalled_s: int = 30
    unknown_s: int = 10


class Ingest(Protocol):
    """What takes the bytes that sessions hand on, as far as its pace concerns connections; the broker is one."""

    @property
    def appended(self) -> int:
        """Batches taken so far; it grows while a session is offered bytes that produce."""

    @property
    def uncommitted(self) -> bool:
        """Whether something waits for ``commit``; it may view bytes that were handed on."""

    @property
    def congested(self) -> bool:
        """Whether peers that produce should be read no further for now."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when there is no congestion (any more)."""

    def hold(self) -> None:
        """A commit follows soon, and need not be scheduled."""

    def commit(self) -> None:
        """Write this turn now."""


class Peer(Receiver, SlotHolder, Guest, Protocol):
    """A connection, as far as others are concerned."""

    @property
    def backlog(self) -> int:
        """Bytes of answers the kernel has not taken."""

    @property
    def clogged_tick(self) -> int:
        """Since when that is so."""

    @property
    def received_bytes(self) -> int:
        """Read from the peer so far."""

    @property
    def sent_bytes(self) -> int:
        """Written to the peer so far."""

    def sweep(self) -> None:
        """Close what has stood still too long; called once a second."""

    def stop_reading(self) -> None:
        """Take no further request."""

    def relieve(self) -> None:
        """The intake has caught up."""

    def close(self) -> None:
        """Close once everything written was sent."""


@cython.cclass
class Hub:
    """What the connections of one server share.

    Invariant: ``connections`` holds every open connection, in the order they came; ``tick`` counts the seconds since the start, as ``sweep``
    is called each second; ``_held`` are those that wait for the intake, in the order they came; ``lending`` is true while the loop asks a
    connection for a buffer.
    """

    __slots__ = (
        "_held",
        "accepted",
        "connections",
        "draining",
        "idle",
        "ingest",
        "lending",
        "limits",
        "logins",
        "memory",
        "moved",
        "refused",
        "refused_before",
        "request_times",
        "run_queue",
        "slots",
        "soon",
        "tick",
    )

    def __init__(
        self,
        ingest: Ingest,
        limits: ConnectionLimits | None = None,
        *,
        idle: IdlePoll | None = None,
        soon: Callable[[Callable[[], None]], object] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        identities: Identities | None = None,
    ) -> None:
        """idle: told whenever bytes came. soon: calls back in the loop's next pass, the running loop's by itself. clock: what offers take is
        measured by. identities: who may log in."""
        self.limits: Final = limits or ConnectionLimits()
        self.ingest: Final = ingest
        self.idle: Final = idle
        self.soon: Final = soon or _call_soon
        self.logins: Final = Logins(identities, self.limits.connections_max)
        self.lending = False
        self._held: dict[Peer, None] = {}
        self.connections: dict[Peer, None] = {}
        self.memory: Final = ReceiveMemory(self.limits.receive_total_bytes_max, self.connections, self.soon)
        self.run_queue: Final = RunQueue(clock, self.soon)
        self.slots: Final = ConnectionSlots(self.limits.connections_max, self.connections)
        self.request_times: Final = RequestTimes()
        self.draining = False
        self.refused = 0
        self.refused_before = 0
        """Those that were told of."""
        self.accepted: Counter[str] = Counter()
        self.moved: dict[str, tuple[int, int]] = {}
        """Bytes received from and sent to connections that are gone, by wire, and how many of them there were in ``accepted``."""
        self.tick = 0

    def commit(self) -> None:
        """Write this turn now. A log that breaks over it has ended and told so (decision 0020): that is not the fault of the peer that is
        being read, and no reason to leave its connection, or a drain, half way."""
        assert not self.lending, "the loop asks for a buffer"
        self.memory.settle()  # the batch is written before anybody is told; what is handed on then belongs to the next one
        try:
            self.ingest.commit()
        except Exception as error:
            log.error("internal error of the log", exc_info=error)

    def sweep(self) -> None:
        """Close what has stood still too long, take buffers from idle connections; to be called once a second."""
        self.tick += 1
        self.memory.tick = self.slots.tick = self.tick
        for connection in list(self.connections):
            connection.sweep()
        self.logins.sweep()
        self.request_times.sweep()
        if not self.ingest.uncommitted:
            self.memory.settle()
        self.memory.arena.sweep()
        self.memory.given_back()
        if self.refused:
            log.warning("connections rejected: limit reached", count=self.refused, limit=self.limits.connections_max)
            self.refused_before += self.refused
            self.refused = 0

    def hold(self, connection: Peer) -> None:
        """Let a connection whose peer produces wait until the intake has caught up."""
        if not self._held:
            self.ingest.on_relief(self._relieved)
        self._held[connection] = None

    def _relieved(self) -> None:
        held, self._held = self._held, {}
        for connection in held:
            connection.relieve()

    def enter(self, connection: Peer) -> bool:
        """Give a new connection a slot; False when there is none."""
        if self.draining or not self.logins.enter(connection):
            self.refused += 1
            return False
        if not self.slots.enter(connection):
            self.logins.leave(connection)
            self.refused += 1
            return False
        self.connections[connection] = None
        return True

    def leave(self, connection: Peer) -> None:
        """The connection is gone, or as good as gone."""
        if connection in self.connections:
            del self.connections[connection]
            self.slots.leave(connection)
            self.logins.leave(connection)
            self.memory.leave(connection)
            received, sent = self.moved.get(connection.wire, (0, 0))
            self.moved[connection.wire] = received + connection.received_bytes, sent + connection.sent_bytes
            self.accepted[connection.wire] += 1

    def check_backlog(self) -> None:
        """Close the connection whose answers have waited longest while all of them together wait for too much."""
        clogged = [connection for connection in self.connections if connection.backlog]
        total = sum(connection.backlog for connection in clogged)
        while clogged and total > self.limits.backlog_total_bytes_max:
            slowest = min(clogged, key=_clogged_tick)
            clogged.remove(slowest)
            total -= slowest.backlog
            slowest.abort("answers of all connections take too much memory, this peer has not read longest")


def _call_soon(callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(callback)


def _clogged_tick(connection: Peer) -> int:
    return connection.clogged_tick
