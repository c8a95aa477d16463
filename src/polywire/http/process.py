"""The interface through which HTTP gets statistics of the process: connections, traffic, durations, bucket,
settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from polywire.broker.owners import Caller
from polywire.durations import Durations
from polywire.link_orders import LinkDefinition, LinkPlan, LinkView
from polywire.table_orders import TableReport

if TYPE_CHECKING:
    from polywire.cluster.opening import ShardState

PRICED_REQUESTS: Final = 1_000  # stores list prices per this number of requests


class ConnectionView(msgspec.Struct, frozen=True):
    """A connection as shown in lists."""

    wire: str
    dialect: str
    peer: str
    user: str
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of one protocol since the start, including closed connections.

    Attributes:
        connections: number of open connections.
        accepted: number of connections since the start.
    """

    connections: int = 0
    accepted: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Rates per second of one interval of the history. Requests over HTTP do not count as traffic.

    Attributes:
        number: time of the end of the interval, divided by the interval, so that samples of several processes can be added.
    """

    number: int
    records: float
    received_bytes: float
    sent_bytes: float


class BucketRequests(msgspec.Struct, frozen=True):
    """Durations of the requests to the bucket with one method and one outcome."""

    verb: str
    outcome: str
    durations: Durations


class BucketCharge(msgspec.Struct, frozen=True):
    """Requests to the bucket that have the same price.

    Attributes:
        kind: name of the price.
        requests: number of requests since the start.
        price: price of 1,000 requests; None if not configured.
    """

    kind: str
    requests: int
    price: float | None

    @property
    def cost(self) -> float | None:
        """The cost of the requests since the start, in the currency of the price; None without a price."""
        return None if self.price is None else self.requests * self.price / PRICED_REQUESTS


class BucketNode(msgspec.Struct, frozen=True):
    """A broker that uses the bucket. ``start`` is the number of its latest start as leader."""

    name: str
    state: str
    start: int | None


class BucketView(msgspec.Struct, frozen=True):
    """Statistics of the bucket that stores the log.

    ``led`` and ``deposed`` are how often this process became leader and lost leadership.
    """

    url: str
    id: str
    node: str
    shard: ShardState
    objects_max: int
    cached_bytes_max: int
    led: int
    deposed: int
    put_bytes: int
    got_bytes: int
    requests: Sequence[BucketRequests]
    charges: Sequence[BucketCharge]
    nodes: Sequence[BucketNode]


class Queries(Protocol):
    """Runs SQL statements; ``server.queries`` implements it."""

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Return the number of statements since the start, by outcome: ``done``, ``failed`` or ``rejected``."""

    async def run(self, caller: Caller, statement: str, *, rows_max: int, name: str) -> bytes:
        """Return the result of a statement as JSON. Raises BrokerError."""

    def cancel(self, caller: Caller, name: str) -> bool:
        """Cancel a query of this caller. Return whether there was one."""


class Links(Protocol):
    """The links of the broker; ``server.links`` implements it."""

    def all(self) -> Sequence[LinkView]:
        """Return all links, sorted by name."""

    def find(self, name: str) -> LinkView:
        """Return a link. Raises Missing(LINK_MISSING)."""

    async def create(self, link: LinkDefinition, *, dry_run: bool) -> LinkPlan:
        """Check a link against its source and store it. Return what it does with each topic. Raises BrokerError."""

    async def pause(self, name: str, *, paused: bool) -> LinkView:
        """Pause or resume a link. Raises Missing(LINK_MISSING)."""

    async def cut_over(self, name: str, patterns: Sequence[str], *, quiet_ms: int, reverse: bool = False) -> LinkView:
        """Cut over topics as soon as everything is copied. Return the state of these topics after a short wait.

        Raises Missing(LINK_MISSING, TOPIC_MISSING), Conflict(TOPIC_LINKED), Invalid(INVALID_REQUEST), Busy(BUSY).
        """

    async def fall_back(self, name: str, patterns: Sequence[str], *, quiet_ms: int) -> LinkView:
        """Follow topics again that were cut over with ``reverse``. Return their state after a short wait.

        Raises Missing(LINK_MISSING, TOPIC_MISSING), Conflict(TOPIC_LINKED), Busy(BUSY).
        """

    async def cancel_cut_over(self, name: str, patterns: Sequence[str]) -> LinkView:
        """Cancel requested cut-overs, so that the link follows these topics again.

        Raises Missing(LINK_MISSING, TOPIC_MISSING).
        """

    async def delete(self, name: str) -> None:
        """Delete a link. Topics and positions remain. Raises Missing(LINK_MISSING)."""


class Process(Protocol):
    """The server process; ``server.overview`` implements it."""

    @property
    def stopping(self) -> bool:
        """Whether the process is stopping and accepts no more requests."""

    @property
    def refused(self) -> int:
        """Number of connections rejected since the start."""

    @property
    def connections_max(self) -> int:
        """Limit of open connections."""

    @property
    def receive_buffer_bytes(self) -> int:
        """Bytes of memory that incomplete requests use."""

    @property
    def links(self) -> Links | None:
        """The links of the broker; None while the process starts."""

    @property
    def queries(self) -> Queries | None:
        """Runs SQL statements; None while the process starts."""

    def connections(self) -> Iterable[ConnectionView]:
        """Return the open connections."""

    def traffic(self) -> Mapping[str, Traffic]:
        """Return the traffic of each protocol."""

    def work(self) -> Mapping[str, Durations]:
        """Return the durations of the jobs of the log's threads, by name of the thread."""

    def requests(self) -> Mapping[tuple[str, str], Durations]:
        """Return the durations of requests, by protocol and kind of request."""

    def bucket(self) -> BucketView | None:
        """Return statistics of the bucket that stores the log; None without a bucket or while not leading."""

    def tables(self) -> Mapping[str, TableReport]:
        """Return the state of the tables that this process writes, by full name of the topic."""

    def listeners(self) -> Mapping[str, str]:
        """Return the address of each listener, by its name."""

    def history(self) -> Sequence[Sample]:
        """Return the activity of the last hour, the oldest interval first."""

    def settings(self) -> Sequence[tuple[str, object]]:
        """Return the names and values of the effective settings."""
