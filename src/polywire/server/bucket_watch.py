"""What this process knows of its bucket: what it asked it, what that costs, the shard that it leads, and who else is there.

Promises: one for the life of the process, whether it leads or stands by, so that nothing that was counted is lost when it is deposed; values,
taken when asked for. Must not know: what is made of them, how the log is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from polywire.clock import SystemClock
from polywire.cluster.balance import Balance
from polywire.cluster.nodes import NODE_INTERVAL_S, Candidate, Nodes
from polywire.errors import BrokerError
from polywire.http.process import BucketCharge, BucketNode, BucketRequests, BucketView
from polywire.server.candidates import candidate_of
from polywire.server.config import ServeConfig
from polywire.server.prices import parse_prices
from polywire.store.metered import Charge, Meter, MeteredObjects, RequestCounts
from polywire.store.objects import Objects
from polywire.store.url import open_bucket

if TYPE_CHECKING:
    from polywire.cluster.nodes import Node, NodeState
    from polywire.cluster.opening import ShardState


class BucketWatch:
    """Guards: ``_shard`` is there from when this process begins to lead until it is deposed."""

    def __init__(
        self,
        config: ServeConfig,
        candidate: Candidate | None = None,
        may_hand_over: Callable[[float], bool] = lambda _: True,
    ) -> None:
        """candidate: who this process is; without one the only process of its machine. may_hand_over: see ``Balance``."""
        self.candidate: Final = candidate or candidate_of(config)
        self.balance: Final = Balance(self.candidate, config.balance_s, may_hand_over)
        self._url: Final = config.bucket
        self._cached_bytes_max: Final = int(config.cache_gib * 2**30)
        self._meter: Final = Meter(SystemClock())
        self._prices: Final = parse_prices(config.bucket_prices)
        self._nodes: Sequence[tuple[Node, NodeState]] = ()
        self._shard: Callable[[], ShardState] | None = None
        self._id = self._node = ""
        self._led = 0
        self._deposed = 0

    def open(self, *, timeout_s: float) -> Objects:
        """The objects of the bucket; what is asked of them is counted. Raises Invalid, OSError."""
        return MeteredObjects(open_bucket(self._url, timeout_s=timeout_s), self._meter)

    def leads(self, *, bucket_id: str, node: str, shard: Callable[[], ShardState]) -> None:
        """This process leads from now on. shard: how it is doing, asked on the loop."""
        self._id, self._node, self._shard = bucket_id, node, shard
        self._led += 1

    def deposed(self) -> None:
        """It leads no longer."""
        if self._shard is not None:
            self._deposed += 1
        self._shard = None

    def undrain(self) -> None:
        """What was said of this machine ends with it."""
        with suppress(BrokerError, OSError):
            Nodes(open_bucket(self._url, timeout_s=NODE_INTERVAL_S)).undrain(self.candidate.machine)

    def sees(self, nodes: Sequence[tuple[Node, NodeState]]) -> None:
        """Who is there, and what they do; from any thread."""
        self._nodes = nodes

    def view(self) -> BucketView | None:
        """Everything; None while this process does not lead."""
        from polywire.cluster.uploader import OBJECTS_MAX

        if self._shard is None:
            return None
        asked = self._meter.counts()
        return BucketView(
            url=self._url,
            id=self._id,
            node=self._node,
            shard=self._shard(),
            objects_max=OBJECTS_MAX,
            cached_bytes_max=self._cached_bytes_max,
            led=self._led,
            deposed=self._deposed,
            put_bytes=asked.put_bytes,
            got_bytes=asked.got_bytes,
            requests=_requests(asked),
            charges=[BucketCharge(kind.value, asked.charged[kind], self._price(kind)) for kind in Charge],
            nodes=[
                BucketNode(node.name, state.value, node.start if node.start > 0 else None)
                for node, state in self._nodes
            ],
        )

    def _price(self, kind: Charge) -> float | None:
        """Of a kind that is not named among prices: nothing."""
        return self._prices.get(kind, 0.0) if self._prices else None


def _requests(asked: RequestCounts) -> list[BucketRequests]:
    found = [BucketRequests(verb, outcome.value, durations) for (verb, outcome), durations in asked.taken.items()]
    return sorted(found, key=lambda one: (one.verb, one.outcome))
