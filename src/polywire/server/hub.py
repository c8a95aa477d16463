"""Limits, memory, slots, logins and request latencies that the connections of a server share. This module is compiled.

Some limits apply to all connections together. When one is reached, the connection that has stalled longest is closed
first.

A latency is the time from receiving a request to writing its response. A busy server measures about a hundred requests
a second. An idle server measures all requests. For a request that is not measured, the cost is one comparison.
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
from polywire.durations import Durations
from polywire.server.connection_slots import ConnectionSlots, SlotHolder
from polywire.server.logins import Guest, Identities, Logins
from polywire.server.memory import ReceiveMemory, Receiver
from polywire.server.scheduling import IdlePoll, RunQueue

SAMPLES_PER_S: Final = 100
BOUNDS_S: Final = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
PRODUCE: Final = "produce"
OTHER: Final = "other"


@cython.cclass
class RequestTimes:
    """A sample of request latencies.

    * ``skip``: number of reads to skip before the next one is timed.
    * ``weight``: number of reads that a timed read represents.
    * ``_taken``: reads timed in this second.
    * ``appended``: the broker's count of batches before the current read, to detect produce requests; -1 if the read is
      not timed.
    """

    __slots__ = ("_taken", "appended", "by_kind", "skip", "weight")

    def __init__(self) -> None:
        self.skip = 0
        self.weight = 1
        self._taken = 0
        self.appended = -1
        self.by_kind: Final[dict[tuple[str, str], Durations]] = {}
        """Latencies by protocol and by kind of request: ``PRODUCE`` or ``OTHER``."""

    def begin(self) -> None:
        """Measure this read. If too many reads were measured in this second, double the number of reads to skip."""
        self._taken += 1
        if self._taken % SAMPLES_PER_S == 0:
            self.weight *= 2
        self.skip = self.weight - 1

    def observe(self, wire: str, seconds: float, *, produced: bool) -> None:
        key = wire, PRODUCE if produced else OTHER
        durations = self.by_kind.get(key)
        if durations is None:
            durations = self.by_kind[key] = Durations(BOUNDS_S)
        durations.observe(seconds, count=self.weight)

    def sweep(self) -> None:
        """Adapt the sampling rate to the last second; call it once a second."""
        if self._taken < SAMPLES_PER_S // 2:
            self.weight = max(1, self.weight // 2)
        self.skip = min(self.skip, self.weight - 1)
        self._taken = 0


log = structlog.get_logger("polywire.server")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    * ``connections_max``: open connections.
    * ``receive_bytes_max``: largest shared receive buffer; a longer frame gets its own buffer.
    * ``quantum_bytes_max``: bytes read from one connection before other connections are read.
    * ``backlog_bytes_max``: unsent response bytes of a connection above which the broker stops reading from it.
    * ``receive_total_bytes_max``: bytes of all incomplete requests. Above it, requests that make progress wait, and
      stalled requests are closed.
    * ``backlog_total_bytes_max``: unsent response bytes of all connections. Above it, the broker closes the
      connection whose client has not read for the longest time.
    * ``stalled_s``: how long a client may accept no response bytes, or a request make hardly any progress.
    * ``unknown_s``: how long a connection may take to identify its protocol.
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
    """The operations of the broker with which connections slow down producers."""

    @property
    def appended(self) -> int:
        """Batches accepted so far.

        A connection compares it before and after a request to detect that the request produced.
        """

    @property
    def uncommitted(self) -> bool:
        """Whether batches wait for ``commit``; they may refer to the connections' receive memory."""

    @property
    def congested(self) -> bool:
        """Whether the broker should not read from producing connections for now."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when there is no congestion any more."""

    def hold(self) -> None:
        """Suspend the scheduling of commits. The caller must call ``commit`` soon."""

    def commit(self) -> None:
        """Write the batches of this pass now."""


class Peer(Receiver, SlotHolder, Guest, Protocol):
    """A connection as the hub sees it."""

    @property
    def backlog(self) -> int:
        """Bytes of responses that the kernel has not accepted."""

    @property
    def clogged_tick(self) -> int:
        """The second since which there is a backlog."""

    @property
    def received_bytes(self) -> int:
        """Bytes received so far."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far."""

    def sweep(self) -> None:
        """Close the connection if it has stalled for too long; called once a second."""

    def stop_reading(self) -> None: ...

    def relieve(self) -> None: ...

    def close(self) -> None:
        """Close once everything is sent."""


@cython.cclass
class Hub:
    """The shared state of a server's connections.

    * ``connections``: all open connections, oldest first.
    * ``tick``: seconds since the start, counted by ``sweep``.
    * ``_held``: connections that wait for the log to catch up, in order.
    * ``lending``: set while the event loop asks a connection for a buffer.
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
        """Create the shared state.

        Args:
            ingest: the broker, as far as connections use it.
            limits: limits of the connections.
            idle: polls the loop for a moment after bytes arrive.
            soon: calls back in the loop's next pass; None uses the running loop.
            clock: measures how long sessions take.
            identities: the users.
        """
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
        """Rejected connections that have been logged already."""
        self.accepted: Counter[str] = Counter()
        self.moved: dict[str, tuple[int, int]] = {}
        """Traffic of closed connections by protocol: bytes received and sent. ``accepted`` counts the connections."""
        self.tick = 0

    def commit(self) -> None:
        """Write the batches of this pass now.

        If the log fails, it stops and reports the failure itself (decision 0107). This method does not raise the
        exception, because that would interrupt the read or drain that called it.
        """
        assert not self.lending, "the loop asks for a buffer"
        self.memory.settle()  # before the commit's callbacks, which may append to the next batch
        try:
            self.ingest.commit()
        except Exception as error:
            log.error("internal error of the log", exc_info=error)

    def sweep(self) -> None:
        """Close stalled connections and free the buffers of idle ones; call it once a second."""
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
        """Pause a producing connection until the log has caught up."""
        if not self._held:
            self.ingest.on_relief(self._relieved)
        self._held[connection] = None

    def _relieved(self) -> None:
        held, self._held = self._held, {}
        for connection in held:
            connection.relieve()

    def enter(self, connection: Peer) -> bool:
        """Register a new connection. Return False if there is no free slot."""
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
        """Unregister a connection that is closed or about to close."""
        if connection in self.connections:
            del self.connections[connection]
            self.slots.leave(connection)
            self.logins.leave(connection)
            self.memory.leave(connection)
            received, sent = self.moved.get(connection.wire, (0, 0))
            self.moved[connection.wire] = received + connection.received_bytes, sent + connection.sent_bytes
            self.accepted[connection.wire] += 1

    def check_backlog(self) -> None:
        """While too many response bytes are unsent, close the connection with the oldest backlog."""
        clogged = [connection for connection in self.connections if connection.backlog]
        total = sum(connection.backlog for connection in clogged)
        while clogged and total > self.limits.backlog_total_bytes_max:
            slowest = min(clogged, key=_clogged_tick)
            clogged.remove(slowest)
            total -= slowest.backlog
            slowest.abort("unsent responses exceed their limit, and this client has not read for the longest time")


def _call_soon(callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(callback)


def _clogged_tick(connection: Peer) -> int:
    return connection.clogged_tick
