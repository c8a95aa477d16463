"""Decide when the leader of a shard hands it over to another broker (decision 0126).

A shard is handed over to balance the load of the machines, or because its leader's machine is about to be stopped
(drained). All brokers compute the same preferred leader from the set of live brokers.

A machine must have been a standby for some time, and a shard stays with its leader for some time. So a machine that
restarts repeatedly does not cause repeated moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from polywire.cluster.nodes import Candidate, Node, NodeState, TakeoverRequest, order_of

PAUSE_S: Final = 600.0  # seconds between two moves of one shard
# seconds between two handovers by one machine, so that clients of the first shard reconnect before the second moves
MACHINE_PAUSE_S: Final = 10.0
DRAIN_PAUSE_S: Final = 1.0  # the same while the machine is drained; short, because an operator waits
# seconds before a shard of a drained machine is offered again, because the first candidate may be gone
AGAIN_S: Final = 10.0


class Balance:
    """Decides for one process when to hand over leadership of its shard to a standby.

    Args:
        candidate: this process.
        wait_s: seconds for which a machine must have been a standby; 0 disables balancing.
        may_hand_over: returns whether this machine has handed over no shard for the given number of seconds. If it
            returns True, a handover counts as made.
    """

    def __init__(self, candidate: Candidate, wait_s: float, may_hand_over: Callable[[float], bool]) -> None:
        self._candidate = candidate
        self._wait_s = wait_s
        self._may_hand_over = may_hand_over
        # when each standby, by name and process start, was first seen
        self._since: dict[tuple[str, str], float] = {}
        # time of the last requested move
        self._moved_at = float("-inf")
        self._request: TakeoverRequest | None = None
        self._has_read_request = False

    def note_request(self, request: TakeoverRequest | None, now: float) -> None:
        """Record the takeover request in the bucket, as read by a standby.

        A request that exists at the first call may be years old and is ignored.
        """
        if self._has_read_request and request != self._request:
            self._moved_at = now
        self._request, self._has_read_request = request, True

    def moved(self, now: float) -> None:
        """Record that leadership of the shard is being handed over, because an operator requested it."""
        self._moved_at = now

    def target(self, seen: Sequence[tuple[Node, NodeState]], now: float) -> Node | None:
        """Return the standby to which the leader should hand over the shard now, or None.

        The leader calls this regularly.
        """
        idle = {node.machine: node for node, state in seen if state is NodeState.STANDBY and not node.drained}
        known, self._since = self._since, {}
        for node in idle.values():
            place = node.name, node.id
            self._since[place] = known.get(place, now)
        candidate = self._candidate
        if any(node.name == candidate.name and node.drained for node, _ in seen):
            return self._drain_target(idle, now)
        found = idle.get(order_of(candidate.shard, {*idle, candidate.machine})[0])
        if candidate.shards == 1 or self._wait_s <= 0 or found is None or found.machine == candidate.machine:
            return None
        if now - self._since[found.name, found.id] < self._wait_s or now - self._moved_at < PAUSE_S:
            return None
        return found if self._may_hand_over(MACHINE_PAUSE_S) else None

    def _drain_target(self, idle: Mapping[str, Node], now: float) -> Node | None:
        """Return the standby to which the leader on a drained machine should hand over the shard, or None.

        Unlike for balancing, the standby may have been started a moment ago.
        """
        if not idle or now - self._moved_at < AGAIN_S or not self._may_hand_over(DRAIN_PAUSE_S):
            return None
        return idle[order_of(self._candidate.shard, idle)[0]]
