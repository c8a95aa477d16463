"""When the leader of a shard hands it to another machine: so that none leads all of them (decision 0075), or because its own is drained.

Promises: who should lead follows from who is there, for everybody the same; a machine has to have stood by for a while, and a shard stays
where it is for a while, so that a machine that comes and goes moves nothing twice. Must not know: how a shard is handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from polywire.cluster.nodes import Candidate, Node, NodeState, Wish, order_of

PAUSE_S: Final = 600.0  # between two moves of one shard
MACHINE_PAUSE_S: Final = 10.0  # between two shards that a machine hands over: clients of one find their way first
DRAIN_PAUSE_S: Final = 1.0  # the same of one that is drained: somebody waits for it
AGAIN_S: Final = 10.0  # before a shard of a drained machine is offered anew: who was asked may be gone


class Balance:
    """Of one shard, for the life of a process. Guards: ``_since`` are the nodes that stand by, by name and start of their process, each with
    the moment at which it was first seen to; ``_moved_at`` is when the shard was last moved because somebody asked for it."""

    def __init__(self, candidate: Candidate, wait_s: float, may_hand_over: Callable[[float], bool]) -> None:
        """wait_s: for how long a machine must have stood by; 0 for never. may_hand_over: whether this machine has handed over no shard for so
        many seconds; that this one is handed over is taken for said."""
        self._candidate = candidate
        self._wait_s = wait_s
        self._may_hand_over = may_hand_over
        self._since: dict[tuple[str, str], float] = {}
        self._moved_at = float("-inf")
        self._wish: Wish | None = None
        self._has_looked = False

    def wished(self, wish: Wish | None, now: float) -> None:
        """What a broker that stands by sees asked for. What was asked for before its first look may be years old."""
        if self._has_looked and wish != self._wish:
            self._moved_at = now
        self._wish, self._has_looked = wish, True

    def moved(self, now: float) -> None:
        """The shard moves because somebody asked for it."""
        self._moved_at = now

    def target(self, seen: Sequence[tuple[Node, NodeState]], now: float) -> Node | None:
        """Whom the leader, which asks, should hand the shard to, if to anybody; call it every so often."""
        idle = {node.machine: node for node, state in seen if state is NodeState.STANDS_BY and not node.drained}
        known, self._since = self._since, {}
        for node in idle.values():
            place = node.name, node.id
            self._since[place] = known.get(place, now)
        candidate = self._candidate
        if any(node.name == candidate.name and node.drained for node, _ in seen):
            return self._heir(idle, now)
        found = idle.get(order_of(candidate.shard, {*idle, candidate.machine})[0])
        if candidate.shards == 1 or self._wait_s <= 0 or found is None or found.machine == candidate.machine:
            return None
        if now - self._since[found.name, found.id] < self._wait_s or now - self._moved_at < PAUSE_S:
            return None
        return found if self._may_hand_over(MACHINE_PAUSE_S) else None

    def _heir(self, idle: Mapping[str, Node], now: float) -> Node | None:
        """Whom a drained machine hands the shard to: whoever should lead it of those that stand by, however short a time."""
        if not idle or now - self._moved_at < AGAIN_S or not self._may_hand_over(DRAIN_PAUSE_S):
            return None
        return idle[order_of(self._candidate.shard, idle)[0]]
