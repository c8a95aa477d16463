"""What HTTP may see of the process around the broker.

Promises: values. Must not know: sockets, pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from polywire.durations import Durations

if TYPE_CHECKING:
    from polywire.cluster.opening import ShardState

PRICED_REQUESTS: Final = 1_000  # that a price is for, as stores list them


@dataclass(frozen=True, slots=True)
class ConnectionView:
    """A connection, as lists show it."""

    wire: str
    dialect: str
    peer: str
    user: str
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What connections of one wire have moved since the start, those that are gone included."""

    connections: int = 0
    accepted: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BucketRequests:
    """What was asked of the bucket with one verb and ended in one way."""

    verb: str
    outcome: str
    durations: Durations


@dataclass(frozen=True, slots=True)
class BucketCharge:
    """Requests that stores charge for alike. price: for 1,000 of them, None where nobody has told it."""

    kind: str
    requests: int
    price: float | None

    @property
    def cost(self) -> float | None:
        """What they cost so far, in the currency of the price."""
        return None if self.price is None else self.requests * self.price / PRICED_REQUESTS


@dataclass(frozen=True, slots=True)
class BucketNode:
    """A broker of the bucket, as it is seen from here. start: the one it leads or has led under."""

    name: str
    state: str
    start: int | None


@dataclass(frozen=True, slots=True)
class BucketView:
    """The bucket that holds the log, and this broker at it. led, deposed: how often this process has begun to lead, and was made to end."""

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


class Process(Protocol):
    """The process that serves; ``server.overview`` is one."""

    @property
    def stopping(self) -> bool:
        """Whether no further request is taken."""

    @property
    def refused(self) -> int:
        """Connections turned away since the start."""

    @property
    def connections_max(self) -> int:
        """How many may be open at once."""

    @property
    def receive_buffer_bytes(self) -> int:
        """Memory in which unfinished requests lie."""

    def connections(self) -> Iterable[ConnectionView]:
        """Those that are open."""

    def traffic(self) -> Mapping[str, Traffic]:
        """By wire."""

    def work(self) -> Mapping[str, Durations]:
        """What the log's threads did, by name."""

    def requests(self) -> Mapping[tuple[str, str], Durations]:
        """What requests took until they were answered, by wire and by what they asked for."""

    def bucket(self) -> BucketView | None:
        """The bucket that holds the log; None where none does."""

    def listeners(self) -> Mapping[str, str]:
        """Addresses by name of the listener."""

    def settings(self) -> Sequence[tuple[str, object]]:
        """How the process was started: names and values."""
