"""State that all connections of a server share: limits, memory, connection slots, logins and latency statistics.

This module is compiled. Some limits apply to all connections together. When one of these limits is reached, the
connection that has stalled longest is closed first.

A latency is the time from receiving a request to writing its response. A busy server measures only about a hundred
requests a second, because measuring takes time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import cython
import structlog

from polywire.broker.client_quotas import ClientQuotas
from polywire.clock import SYSTEM_CLOCK, Clock
from polywire.durations import Durations
from polywire.log.base import Handle, Pressure
from polywire.server.connection_slots import ConnectionSlots, SlotHolder
from polywire.server.logins import Identities, LoginHolder, Logins
from polywire.server.memory import ReceiveMemory, Receiver
from polywire.server.scheduling import IdlePoll, RunQueue

SAMPLES_PER_S: Final = 100
SWEEP_S: Final = 1.0  # interval of ``Hub.sweep``
BOUNDS_S: Final = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
PRODUCE: Final = "produce"
OTHER: Final = "other"


@cython.cclass
class RequestTimes:
    """Samples request latencies.

    Attributes:
        skip: number of reads to skip before the next one is timed.
        weight: number of reads that one timed read stands for.
        appended: the broker's count of batches before the timed read, to detect whether the request produced; -1 if no
            read is being timed.
    """

    __slots__ = ("_taken", "appended", "by_kind", "skip", "weight")

    def __init__(self) -> None:
        self.skip = 0
        self.weight = 1
        self._taken = 0  # reads timed in this second
        self.appended = -1
        self.by_kind: Final[dict[tuple[str, str], Durations]] = {}
        """Latencies by protocol and by kind of request: ``PRODUCE`` or ``OTHER``."""

    def begin(self) -> None:
        """Count a read that is timed. If too many were timed in this second, halve the sampling rate."""
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
        """Adapt the sampling rate to the last second. Call it once a second."""
        if self._taken < SAMPLES_PER_S // 2:
            self.weight = max(1, self.weight // 2)
        self.skip = min(self.skip, self.weight - 1)
        self._taken = 0


Later = Callable[[float, Callable[[], None]], Handle]
log = structlog.get_logger("polywire.server")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        connections_max: open connections.
        receive_bytes_max: largest shared receive buffer; a longer frame gets its own buffer.
        quantum_bytes_max: bytes read from one connection before other connections are read.
        backlog_bytes_max: unsent response bytes of a connection above which the broker stops reading from it.
        receive_total_bytes_max: bytes of all incomplete requests. Above it, requests that make progress wait, and
            stalled requests are closed.
        backlog_total_bytes_max: unsent response bytes of all connections. Above it, the broker closes the connection
            whose client has not read for the longest time.
        stalled_s: seconds for which a client may read no response bytes, or a request may make hardly any progress.
        unknown_s: seconds until a connection must have sent enough bytes to detect its protocol.
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
    """The methods of the broker that connections use for flow control."""

    @property
    def appended(self) -> int:
        """Number of batches accepted so far. A request that increases it is a produce request."""

    @property
    def uncommitted(self) -> bool:
        """Whether batches wait for ``commit``. They may refer to the connections' receive memory."""

    @property
    def pressure(self) -> Pressure:
        """Its ``congested`` is whether connections that produce must not be read, because the log cannot write or sync
        fast enough.
        """

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, on the loop, when ``congested`` becomes false."""

    def hold(self, holding: bool, /) -> None:
        """While ``holding``, do not commit automatically. The caller must end it and call ``commit`` soon."""

    def commit(self) -> None:
        """Write all accepted batches to the log now."""


class Peer(Receiver, SlotHolder, LoginHolder, Protocol):
    """The methods of a connection that ``Hub`` uses."""

    @property
    def backlog(self) -> int:
        """Number of response bytes that the kernel has not accepted yet."""

    @property
    def clogged_tick(self) -> int:
        """The second since which response bytes are waiting, as counted by ``Hub.tick``."""

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

    def choose_meter(self) -> None:
        """Count traffic for the quotas that apply now."""

    def close(self) -> None:
        """Close once all responses are sent."""


@cython.cclass
class Hub:
    """The shared state of a server's connections.

    Attributes:
        connections: all open connections, oldest first.
        tick: seconds since the start, counted by ``sweep``.
        lending: whether the event loop is requesting a buffer from a connection, during which no other code may run.
        moved: bytes received and sent by closed connections, by protocol.
        closed: number of closed connections, by protocol.
    """

    __slots__ = (
        "_held",
        "closed",
        "connections",
        "draining",
        "idle",
        "ingest",
        "later",
        "lending",
        "limits",
        "logins",
        "memory",
        "moved",
        "pressure",
        "quotas",
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
        later: Later | None = None,
        clock: Clock = SYSTEM_CLOCK,
        identities: Identities | None = None,
        quotas: ClientQuotas | None = None,
    ) -> None:
        """Create the shared state.

        Args:
            ingest: the broker.
            limits: limits of the connections.
            idle: polls for more requests before the loop sleeps.
            soon: calls a function in the loop's next pass; None uses the running loop.
            later: calls a function after some seconds; None uses the running loop.
            clock: measures latencies.
            identities: the users.
            quotas: the quotas of users and client ids.
        """
        self.limits: Final = limits or ConnectionLimits()
        self.ingest: Final = ingest
        self.pressure: Final = ingest.pressure
        self.idle: Final = idle
        self.soon: Final = soon or _call_soon
        self.later: Final = later or _call_later
        self.logins: Final = Logins(identities, self.limits.connections_max)
        self.lending = False
        self._held: dict[Peer, None] = {}  # connections that wait until the log is no longer congested, in order
        self.connections: dict[Peer, None] = {}
        self.memory: Final = ReceiveMemory(self.limits.receive_total_bytes_max, self.connections, self.soon)
        self.run_queue: Final = RunQueue(clock, self.soon)
        self.slots: Final = ConnectionSlots(self.limits.connections_max, self.connections)
        self.request_times: Final = RequestTimes()
        self.draining = False
        self.refused = 0
        self.refused_before = 0
        """Value of ``refused`` when it was last logged."""
        self.closed: Counter[str] = Counter()
        self.moved: dict[str, tuple[int, int]] = {}
        self.quotas: Final = ClientQuotas() if quotas is None else quotas
        self.quotas.watch(self._quotas_changed)
        self.tick = 0

    @cython.ccall
    def commit(self) -> None:
        """Write all accepted batches to the log now.

        A failed log stops the broker and reports the failure itself (decision 0107). This method does not raise the
        exception, because that would interrupt the read or drain that called it.
        """
        assert not self.lending, "the loop asks for a buffer"
        self.memory.batch_committed()  # before the commit's callbacks, which may append to the next batch
        try:
            self.ingest.commit()
        except Exception as error:
            log.error("internal error of the log", exc_info=error)

    def sweep(self) -> None:
        """Close stalled connections and free the buffers of idle ones. Call it once a second."""
        self.tick += 1
        self.memory.tick = self.slots.tick = self.tick
        for connection in list(self.connections):
            connection.sweep()
        self.logins.sweep()
        self.request_times.sweep()
        if not self.ingest.uncommitted:
            self.memory.batch_committed()
        self.memory.arena.sweep()
        self.memory.freed()
        if self.refused:
            log.warning("connections rejected: limit reached", count=self.refused, limit=self.limits.connections_max)
            self.refused_before += self.refused
            self.refused = 0

    def _quotas_changed(self) -> None:
        for connection in list(self.connections):
            connection.choose_meter()

    def hold(self, connection: Peer) -> None:
        """Stop reading from a connection that produces until the log is no longer congested."""
        if not self._held:
            self.ingest.on_relief(self._relieved)
        self._held[connection] = None

    def _relieved(self) -> None:
        held, self._held = self._held, {}
        for connection in held:
            connection.relieve()

    def enter(self, connection: Peer) -> bool:
        """Register a new connection. Return False if there are too many."""
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
            self.closed[connection.wire] += 1

    def check_backlog(self) -> None:
        """Close the connection with the oldest backlog while the unsent bytes of all connections exceed the limit."""
        clogged = [connection for connection in self.connections if connection.backlog]
        total = sum(connection.backlog for connection in clogged)
        while clogged and total > self.limits.backlog_total_bytes_max:
            slowest = min(clogged, key=_clogged_tick)
            clogged.remove(slowest)
            total -= slowest.backlog
            slowest.abort("unsent responses exceed their limit, and this client has not read for the longest time")


def _call_soon(callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(callback)


def _call_later(seconds: float, callback: Callable[[], None]) -> Handle:
    return asyncio.get_running_loop().call_later(seconds, callback)


def _clogged_tick(connection: Peer) -> int:
    return connection.clogged_tick
