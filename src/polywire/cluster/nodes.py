"""Who is there: one small object per broker and shard, written anew every so often.

Promises: nothing here decides who is right, only who tries when; what makes no sense is nobody. Must not know: the journal.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

import msgspec

from polywire.cluster.shards import FIRST
from polywire.store.base import BlobMissing
from polywire.store.objects import Objects
from polywire.types import SHARDS_MAX, shard_name

DIRECTORY: Final = "nodes/"
NODES_MAX: Final = 64  # of one shard
NODE_INTERVAL_S: Final = 2.0  # between two writes: a put each, however many look
NODE_TIMEOUT_S: Final = 8.0  # without a new one, its broker is taken for dead
LOOK_S: Final = NODE_INTERVAL_S + 1.5  # between two looks that tell who lives
NODE_FORGOTTEN_S: Final = 3600.0  # without a new one, it is removed: names of pods are never used again
NODE_BYTES_MAX: Final = 4096
WISH: Final = "takeover"
DRAINED: Final = "drain."  # before the name of a machine that is to lead nothing; no node's name begins so


class NodeState(Enum):
    """What a broker does, as its object and its silence tell."""

    LEADS = "leads"
    TAKES_OVER = "takes over"
    STANDS_BY = "stands by"
    DEPOSED = "deposed"
    """It led, another does since, and it has not said that it knows."""
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who may lead a shard: a machine's process for it. ``shards``: how many the bucket has."""

    machine: str
    shard: int = FIRST
    shards: int = 1

    @property
    def name(self) -> str:
        """What it is called among all: as its machine, where that has no other process."""
        return self.machine if self.shards == 1 else f"{self.machine}-{shard_name(self.shard)}"


class Node(msgspec.Struct, frozen=True):
    """One broker, as it says. ``addresses`` by listener; ``start`` is the one it leads its shard under, -1 while it tries to, 0 when it
    does not; ``counter`` grows. ``drained`` is said of its machine, not by it: it should lead nothing, and be asked for nothing."""

    name: str
    id: str
    addresses: dict[str, tuple[str, int]]
    start: int = 0
    counter: int = 0
    version: int = 1
    shard: Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)] = FIRST
    machine: str = ""
    drained: bool = False


def node_of(candidate: Candidate, id_: str, addresses: dict[str, tuple[str, int]], *, start: int, counter: int) -> Node:
    """What a candidate says of itself."""
    return Node(candidate.name, id_, addresses, start, counter, shard=candidate.shard, machine=candidate.machine)


class Wish(msgspec.Struct, frozen=True):
    """Somebody wants this node to take over from the leader of this start. It means nothing once there is a later one."""

    node: str
    start: int
    version: int = 1


class Nodes:
    """The node objects of a bucket, or of one shard. Call from threads."""

    def __init__(self, objects: Objects, candidate: Candidate | None = None) -> None:
        """candidate: whose shard's nodes and wishes these are; without one those of all shards, and wishes of the first."""
        self._objects = objects
        self._shard = FIRST if candidate is None else candidate.shard
        self._end = "" if candidate is None or candidate.shards == 1 else f"-{shard_name(self._shard)}"
        self._max = NODES_MAX * SHARDS_MAX if candidate is None else NODES_MAX

    def put(self, node: Node) -> None:
        """Say something of oneself. Raises Unavailable."""
        self._objects.put(DIRECTORY + node.name, msgspec.json.encode(node))

    def read(self) -> list[Node]:
        """Everybody, by name. Raises Unavailable."""
        listed, found = self._objects.list(DIRECTORY), []
        drained = {name.removeprefix(_mark("")) for name in listed if name.startswith(_mark(""))}
        names = [name for name in listed if name.endswith(self._end) and not name.startswith(_mark(""))]
        for name in names[: self._max]:
            node = self._node(name)
            if node is not None:
                found.append(msgspec.structs.replace(node, drained=node.machine in drained))
        return found

    def remove(self, name: str) -> None:
        """Forget a node. Raises Unavailable."""
        self._objects.delete(DIRECTORY + name)

    def drain(self, machine: str) -> None:
        """Say that a machine is to lead nothing. Beside the nodes, so that whoever reads them asks for nothing more. Raises Unavailable."""
        self._objects.put(_mark(machine), b"")

    def undrain(self, machine: str) -> None:
        """Say so no longer. Raises Unavailable."""
        self._objects.delete(_mark(machine))

    def wish(self, wish: Wish) -> None:
        """Ask a node to take over. Raises Unavailable."""
        self._objects.put(wish_name(self._shard), msgspec.json.encode(wish))

    def wished(self) -> Wish | None:
        """Who was asked to take over last, if anybody. Raises Unavailable."""
        try:
            return msgspec.json.decode(self._objects.read(wish_name(self._shard)).content[:NODE_BYTES_MAX], type=Wish)
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
    """Where it is said that a machine is drained."""
    return f"{DIRECTORY}{DRAINED}{machine}"


def wish_name(shard: int) -> str:
    """Where it is said who is to take a shard over."""
    return WISH if shard == FIRST else f"{WISH}-{shard_name(shard)}"


def states(nodes: Sequence[Node], heard: Container[str]) -> list[tuple[Node, NodeState]]:
    """What each does. heard: names of those that have said something of late."""
    leaders: dict[int, int] = {}
    for node in nodes:
        leaders[node.shard] = max(leaders.get(node.shard, 0), node.start)
    return [(node, _state(node, leaders[node.shard]) if node.name in heard else NodeState.SILENT) for node in nodes]


def order_of(shard: int, names: Collection[str]) -> list[str]:
    """Who should lead a shard rather than the next, of these; shards that follow each other begin with different ones."""
    ordered = sorted(names)
    first = shard % len(ordered) if ordered else 0
    return ordered[first:] + ordered[:first]


def _state(node: Node, leader: int) -> NodeState:
    if node.start == 0:
        return NodeState.STANDS_BY
    if node.start < 0:
        return NodeState.TAKES_OVER
    return NodeState.LEADS if node.start == leader else NodeState.DEPOSED


class Watch:
    """Whether the leader is alive, as seen by one who waits. Guards: by the watcher's own clock, whatever others' say."""

    def __init__(self, name: str, shard: int = FIRST) -> None:
        """name: the watcher's own."""
        self._name = name
        self._shard = shard
        self._now = 0.0
        self._seen: dict[str, tuple[Node, float]] = {}

    def see(self, nodes: Sequence[Node], now: float) -> None:
        """Note who is there, and who has said something new."""
        self._now = now
        for node in nodes:
            known = self._seen.get(node.name)
            if known is None or known[0] != node:
                self._seen[node.name] = (node, now)
        for name in self._seen.keys() - {node.name for node in nodes}:
            del self._seen[name]

    def silent_s(self, node: Node) -> float:
        """How long a node that was seen just now has said nothing."""
        return self._now - self._seen[node.name][1]

    def alive(self, nodes: Sequence[Node]) -> frozenset[str]:
        """Names of those that were seen just now and were heard of within the timeout."""
        return frozenset(node.name for node in nodes if self._is_alive(node))

    def forgotten(self, nodes: Sequence[Node]) -> list[str]:
        """Names of those that have said nothing for so long that nobody misses them."""
        return [node.name for node in nodes if self.silent_s(node) >= NODE_FORGOTTEN_S]

    def leader(self, nodes: Sequence[Node], now: float) -> Node | None:
        """The broker that leads, or is about to, if one does that was heard of within the timeout."""
        self.see(nodes, now)
        leaders = [node for node in nodes if node.start and self._is_alive(node)]
        return max(leaders, key=lambda node: node.start, default=None)

    def _is_alive(self, node: Node) -> bool:
        return self.silent_s(node) < NODE_TIMEOUT_S

    def rank(self, nodes: Sequence[Node]) -> int:
        """How many other brokers come before this one when all want to lead: those that were heard of lately, drained machines last."""
        others = {node.name for node in nodes if not node.start and self._is_alive(node)}
        drained = {node.name for node in nodes if node.drained}
        names = others | {self._name}
        order = order_of(self._shard, names - drained) + order_of(self._shard, names & drained)
        return order.index(self._name)
