"""Statistics about a bucket and the brokers that use it.

They include the requests and their cost, the shard that this process leads, and the other brokers. One ``BucketWatch``
exists as long as the process, both as leader and as standby, so losing leadership does not reset the counters.
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from polywire.clock import SystemClock
from polywire.cluster.balance import Balance
from polywire.cluster.journal_chain import NODE_BYTES_MAX
from polywire.cluster.nodes import DRAINED, Candidate, Nodes, interval_s
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.http.process import BucketCharge, BucketNode, BucketRequests, BucketView
from polywire.names import is_simple
from polywire.server.config import ServeConfig, parse_prices
from polywire.store.bucket import REQUEST_TIMEOUT_S
from polywire.store.identity import find_identity, join_log
from polywire.store.metered import Charge, Meter, MeteredObjects, RequestCounts
from polywire.store.objects import FIRST, Objects
from polywire.store.url import open_bucket

if TYPE_CHECKING:
    from polywire.cluster.nodes import Node, NodeState
    from polywire.cluster.opening import ShardState
    from polywire.store.identity import Identity


class BucketWatch:
    """Statistics of the bucket and of the requests to it, for metrics and the console."""

    def __init__(
        self,
        config: ServeConfig,
        candidate: Candidate | None = None,
        may_hand_over: Callable[[float], bool] = lambda _: True,
    ) -> None:
        """Create the statistics.

        Args:
            config: settings of the process.
            candidate: name of this process in the bucket; by default that of the only process of the machine.
            may_hand_over: returns whether this machine has handed over no shard for the given number of seconds.
        """
        self.candidate: Final = candidate or candidate_of(config)
        self.process_id: Final = secrets.token_hex(16)  # by which a process recognizes its own node object
        self.balance: Final = Balance(self.candidate, config.balance_s, may_hand_over)
        self._url: Final = config.bucket
        self._interval_s: Final = interval_s(config.node_timeout_s)
        self._cached_bytes_max: Final = int(config.cache_gib * 2**30)
        self._meter: Final = Meter(SystemClock())
        self._prices: Final = parse_prices(config.bucket_prices)
        self._nodes: Sequence[tuple[Node, NodeState]] = ()
        self._shard: Callable[[], ShardState] | None = None  # set while this process is the leader
        self._id = self._node = ""
        self._led = 0
        self._deposed = 0
        self._directory: Final = config.data_dir
        self._is_tested = self.candidate.shards > 1  # with several shards, the parent process does it
        self._is_joined = False

    @property
    def is_checked(self) -> bool:
        """Whether the bucket's conditional writes were tested, and this broker has noted which log is there."""
        return self._is_tested and self._is_joined

    def check(self) -> None:
        """Test the bucket's conditional writes, unless that was done, and note which log it has.

        Raises Invalid, Unavailable and OSError.
        """
        from polywire.cluster.bucket_probe import check

        objects = self.open(timeout_s=REQUEST_TIMEOUT_S)
        if not self._is_tested:
            check(objects)
            self._is_tested = True
        if not self._is_joined:
            self.join(objects)

    def join(self, objects: Objects, make: Callable[[], Identity] | None = None) -> Identity | None:
        """Return the identity of the log in the bucket; see ``join_log``."""
        identity = join_log(objects, self._directory, make)
        self._is_joined = identity is not None
        return identity

    def open(self, *, timeout_s: float) -> Objects:
        """Open the bucket. Requests to it are counted.

        Raises Invalid for an invalid URL, and OSError.
        """
        return MeteredObjects(open_bucket(self._url, timeout_s=timeout_s), self._meter)

    def leads(self, *, bucket_id: str, node: str, shard: Callable[[], ShardState]) -> None:
        self._id, self._node, self._shard = bucket_id, node, shard
        self._led += 1

    def has_log(self, objects: Objects) -> bool:
        """Return whether the bucket has the log that this process leads. Raises Unavailable, and Invalid."""
        identity = find_identity(objects)
        return identity is not None and identity.id == self._id

    def deposed(self) -> None:
        if self._shard is not None:
            self._deposed += 1
        self._shard = None

    def undrain(self) -> None:
        """Cancel the drain of this machine, if an operator has started one."""
        with suppress(BrokerError, OSError):
            Nodes(open_bucket(self._url, timeout_s=self._interval_s)).undrain(self.candidate.machine)

    def sees(self, nodes: Sequence[tuple[Node, NodeState]]) -> None:
        """Set the brokers that use the bucket, and their states. May be called in any thread."""
        self._nodes = nodes

    def view(self) -> BucketView | None:
        """Return the statistics; None while this process is not the leader."""
        from polywire.cluster.uploader import OBJECTS_MAX

        if self._shard is None:
            return None
        counts = self._meter.counts()
        return BucketView(
            url=self._url,
            id=self._id,
            node=self._node,
            shard=self._shard(),
            objects_max=OBJECTS_MAX,
            cached_bytes_max=self._cached_bytes_max,
            led=self._led,
            deposed=self._deposed,
            put_bytes=counts.put_bytes,
            got_bytes=counts.got_bytes,
            requests=_requests(counts),
            charges=[BucketCharge(kind.value, counts.charged[kind], self._price(kind)) for kind in Charge],
            nodes=[
                BucketNode(node.name, state.value, node.start if node.start > 0 else None)
                for node, state in self._nodes
            ],
        )

    def _price(self, kind: Charge) -> float | None:
        """Return the price of a kind of request.

        Returns None if no prices are configured, and 0 if only other kinds have a price.
        """
        return self._prices.get(kind, 0.0) if self._prices else None


def _requests(counts: RequestCounts) -> list[BucketRequests]:
    found = [BucketRequests(verb, outcome.value, durations) for (verb, outcome), durations in counts.taken.items()]
    return sorted(found, key=lambda row: (row.verb, row.outcome))


def candidate_of(config: ServeConfig, shard: int = FIRST, shards: int = 1) -> Candidate:
    """Return the name of this process as a candidate for leading a shard.

    Raises Invalid if the node name is invalid.
    """
    candidate = Candidate(_machine(config), shard, shards)
    if len(candidate.name) > NODE_BYTES_MAX:
        limit = NODE_BYTES_MAX - len(candidate.name) + len(candidate.machine)
        raise Invalid(
            ErrorCode.INVALID_NAME,
            f"node name is invalid: with several processes, use at most {limit} plain characters name={candidate.machine!r}",
        )
    return candidate


def _machine(config: ServeConfig) -> str:
    """Return the configured node name, or the host name. Raises Invalid if it is not a valid node name."""
    name = config.node or platform.node() or "node"
    if not is_simple(name) or not 0 < len(name) <= NODE_BYTES_MAX or name.startswith(DRAINED):
        raise Invalid(
            ErrorCode.INVALID_NAME,
            f"node name is invalid (use at most {NODE_BYTES_MAX} plain characters, not beginning with {DRAINED!r}) name={name!r}",
        )
    return name
