"""Announce the brokers that use a bucket: one small object per broker and shard, rewritten regularly.

These objects only determine which broker tries to lead, and when. The journal determines which broker leads. Invalid
objects are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

import msgspec

from polywire.clock import SystemClock
from polywire.store.base import BlobMissing
from polywire.store.objects import FIRST, Objects
from polywire.types import NODE_TIMEOUT_S, NODE_TIMEOUT_S_MAX, NODE_TIMEOUT_S_MIN, SHARDS_MAX, shard_name

DIRECTORY: Final = "nodes/"
NODES_MAX: Final = 64  # maximum number of objects of one shard
UPDATES_PER_TIMEOUT: Final = 4
MARGIN_S: Final = 1.5  # how much later than after one interval an update of a live broker may be seen
POLL_S: Final = 0.25  # seconds between two reads that wait for heartbeats
# seconds without an update after which the object is deleted, because names of pods are not reused
NODE_FORGOTTEN_S: Final = 3600.0
NODE_BYTES_MAX: Final = 4096
WISH: Final = "takeover"
DRAINED: Final = "drain."  # prefix of the object that marks a machine as drained; node names never begin with it


class NodeState(Enum):
    """State of a broker, derived from its object in the bucket and the time since that changed."""

    LEADS = "leads"
    TAKES_OVER = "takes over"
    STANDBY = "standby"
    DEPOSED = "deposed"
    """The broker led the shard, another broker has taken over, and the former leader has not recorded that yet."""
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process that may lead a shard.

    Attributes:
        machine: name of its machine.
        shards: number of shards of the bucket.
    """

    machine: str
    shard: int = FIRST
    shards: int = 1

    @property
    def name(self) -> str:
        """Unique name of the process. It is the machine's name if the bucket has a single shard."""
        return self.machine if self.shards == 1 else f"{self.machine}-{shard_name(self.shard)}"


def interval_s(timeout_s: float) -> float:
    """Return the seconds between two updates of a broker with this timeout. Each is a PUT request."""
    return timeout_s / UPDATES_PER_TIMEOUT


class Node(msgspec.Struct, frozen=True):
    """Content of the object with which a broker announces itself in the bucket.

    Attributes:
        addresses: (host, port) by listener.
        start: number of the start under which the broker leads, -1 while it tries to become the leader, 0 on a standby.
        counter: increases with every update.
        drained: whether its machine should lead no shard. Set when the object is read, not by the broker.
        timeout_s: seconds without an update after which the others consider this broker dead. The broker itself stops
            leading earlier, so brokers with different timeouts can share a bucket.
    """

    name: str
    id: str
    addresses: dict[str, tuple[str, int]]
    start: int = 0
    counter: int = 0
    version: int = 1
    shard: Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)] = FIRST
    machine: str = ""
    drained: bool = False
    timeout_s: Annotated[float, msgspec.Meta(ge=NODE_TIMEOUT_S_MIN, le=NODE_TIMEOUT_S_MAX)] = NODE_TIMEOUT_S


def node_of(
    candidate: Candidate,
    id_: str,
    addresses: dict[str, tuple[str, int]],
    *,
    start: int,
    counter: int,
    timeout_s: float = NODE_TIMEOUT_S,
) -> Node:
    return Node(
        candidate.name,
        id_,
        addresses,
        start,
        counter,
        shard=candidate.shard,
        machine=candidate.machine,
        timeout_s=timeout_s,
    )


def wait_s(nodes: Iterable[Node]) -> float:
    """Return how long to wait until each of these brokers, if it is alive, has been updated."""
    return max((interval_s(node.timeout_s) for node in nodes), default=0.0) + MARGIN_S


class TakeoverRequest(msgspec.Struct, frozen=True):
    """A request that a node take over from the current leader. It is invalid once a later start exists.

    Attributes:
        start: number of the leader's start.
    """

    node: str
    start: int
    version: int = 1


class Nodes:
    """The objects of all brokers in a bucket, or of one shard's brokers. Call the methods from threads.

    Args:
        candidate: this process, which selects its shard. With None, ``read`` returns the nodes of all shards, and
            ``request_takeover`` refers to the first shard.
    """

    def __init__(self, objects: Objects, candidate: Candidate | None = None) -> None:
        self._objects = objects
        self._shard = FIRST if candidate is None else candidate.shard
        self._end = "" if candidate is None or candidate.shards == 1 else f"-{shard_name(self._shard)}"
        self._max = NODES_MAX * SHARDS_MAX if candidate is None else NODES_MAX

    def put(self, node: Node) -> None:
        """Write this broker's object. Raises Unavailable."""
        self._objects.put(DIRECTORY + node.name, msgspec.json.encode(node))

    def read(self) -> list[Node]:
        """Return all nodes, by name. Raises Unavailable."""
        listed, found = self._objects.list(DIRECTORY), []
        drained = {name.removeprefix(_mark("")) for name in listed if name.startswith(_mark(""))}
        names = [name for name in listed if name.endswith(self._end) and not name.startswith(_mark(""))]
        for name in names[: self._max]:
            node = self._node(name)
            if node is not None:
                found.append(msgspec.structs.replace(node, drained=node.machine in drained))
        return found

    def remove(self, name: str) -> None:
        """Delete the object of a node. Raises Unavailable."""
        self._objects.delete(DIRECTORY + name)

    def drain(self, machine: str) -> None:
        """Mark a machine as drained. Raises Unavailable.

        The mark is an object in the nodes' directory, so that readers of the nodes need no additional request.
        """
        self._objects.put(_mark(machine), b"")

    def undrain(self, machine: str) -> None:
        """Remove the mark that a machine is drained. Raises Unavailable."""
        self._objects.delete(_mark(machine))

    def request_takeover(self, request: TakeoverRequest) -> None:
        """Store a takeover request. Raises Unavailable."""
        self._objects.put(takeover_name(self._shard), msgspec.json.encode(request))

    def takeover_request(self) -> TakeoverRequest | None:
        """Return the last takeover request, or None. Raises Unavailable."""
        try:
            return msgspec.json.decode(
                self._objects.read(takeover_name(self._shard)).content[:NODE_BYTES_MAX], type=TakeoverRequest
            )
        except (BlobMissing, msgspec.DecodeError):
            return None

    def _node(self, name: str) -> Node | None:
        try:
            content = self._objects.read(name).content
        except BlobMissing:
            return None
        try:
            node = msgspec.json.decode(content[:NODE_BYTES_MAX], type=Node)
        except msgspec.DecodeError:
            return None
        return node if DIRECTORY + node.name == name else None


def _mark(machine: str) -> str:
    return f"{DIRECTORY}{DRAINED}{machine}"


def takeover_name(shard: int) -> str:
    return WISH if shard == FIRST else f"{WISH}-{shard_name(shard)}"


def states(nodes: Sequence[Node], heard: Container[str]) -> list[tuple[Node, NodeState]]:
    """Return the state of each node.

    Args:
        heard: names of nodes with recent updates.
    """
    leaders: dict[int, int] = {}
    for node in nodes:
        leaders[node.shard] = max(leaders.get(node.shard, 0), node.start)
    return [(node, _state(node, leaders[node.shard]) if node.name in heard else NodeState.SILENT) for node in nodes]


def order_of(shard: int, names: Collection[str]) -> list[str]:
    """Return these node names in order of preference as leaders of a shard.

    The first name differs from shard to shard.
    """
    ordered = sorted(names)
    first = shard % len(ordered) if ordered else 0
    return ordered[first:] + ordered[:first]


def _state(node: Node, leader: int) -> NodeState:
    if node.start == 0:
        return NodeState.STANDBY
    if node.start < 0:
        return NodeState.TAKES_OVER
    return NodeState.LEADS if node.start == leader else NodeState.DEPOSED


class Watch:
    """Detects whether the leader is alive, by a standby's own clock.

    Args:
        name: name of the standby.
    """

    def __init__(self, name: str, shard: int = FIRST) -> None:
        self._name = name
        self._shard = shard
        self._now = 0.0
        self._seen: dict[str, tuple[Node, float]] = {}

    def see(self, nodes: Sequence[Node], now: float) -> None:
        """Record which of these nodes were updated since the last call."""
        self._now = now
        for node in nodes:
            known = self._seen.get(node.name)
            if known is None or known[0] != node:
                self._seen[node.name] = (node, now)
        for name in self._seen.keys() - {node.name for node in nodes}:
            del self._seen[name]

    def silent_s(self, node: Node) -> float:
        return self._now - self._seen[node.name][1]

    def alive(self, nodes: Sequence[Node]) -> frozenset[str]:
        """Return the names of nodes with an update within the timeout."""
        return frozenset(node.name for node in nodes if self._is_alive(node))

    def forgotten(self, nodes: Sequence[Node]) -> list[str]:
        """Return the names of nodes whose objects should be deleted."""
        return [node.name for node in nodes if self.silent_s(node) >= NODE_FORGOTTEN_S]

    def leader(self, nodes: Sequence[Node], now: float) -> Node | None:
        """Return the node that leads or tries to become the leader, or None if it sent no update within the timeout."""
        self.see(nodes, now)
        leaders = [node for node in nodes if node.start and self._is_alive(node)]
        return max(leaders, key=lambda node: node.start, default=None)

    def _is_alive(self, node: Node) -> bool:
        return self.silent_s(node) < node.timeout_s

    def rank(self, nodes: Sequence[Node]) -> int:
        """Return how many living brokers should become the leader before this one.

        Brokers on drained machines come last.
        """
        others = {node.name for node in nodes if not node.start and self._is_alive(node)}
        drained = {node.name for node in nodes if node.drained}
        names = others | {self._name}
        order = order_of(self._shard, names - drained) + order_of(self._shard, names & drained)
        return order.index(self._name)


def observed_nodes(objects: Objects) -> list[tuple[Node, NodeState]]:
    """Return all brokers with their states.

    Waits for a heartbeat of each broker, but no longer than a live broker takes to send one.
    """
    nodes, clock, watch = Nodes(objects), SystemClock(), Watch("")
    brokers, begun = nodes.read(), clock.monotonic()
    watch.see(brokers, begun)
    now, heard, end = begun, set[str](), begun + wait_s(brokers)
    while now < end and not heard.issuperset(node.name for node in brokers):
        time.sleep(POLL_S)
        brokers, now = nodes.read(), clock.monotonic()
        watch.see(brokers, now)
        heard.update(node.name for node in brokers if watch.silent_s(node) == 0)
    return states(brokers, heard)
