"""Heartbeats of brokers and the detection of dead ones by the watcher's own clock."""

from __future__ import annotations

from polywire.cluster.nodes import (
    DIRECTORY,
    NODE_FORGOTTEN_S,
    WISH,
    Candidate,
    Node,
    Nodes,
    NodeState,
    TakeoverRequest,
    Watch,
    interval_s,
    node_of,
    states,
    wait_s,
)
from polywire.testing.memory_objects import MemoryObjects
from polywire.types import NODE_TIMEOUT_S


def test_nodes_round_trip() -> None:
    objects = MemoryObjects()
    nodes = Nodes(objects)
    one, two = Node("one", "a", {"flux": ("h", 1)}, start=2, counter=1), Node("two", "b", {})
    for node in (two, one):
        nodes.put(node)
    objects.put(f"{DIRECTORY}three", b"no json")
    objects.put(f"{DIRECTORY}four", b'{"name": "foreign", "id": "x", "addresses": {}}')
    objects.put(f"{DIRECTORY}five", b'{"name": "five", "id": 7, "addresses": []}')
    assert nodes.read() == [one, two]


def test_a_machine_is_drained_until_that_is_undone() -> None:
    objects = MemoryObjects()
    shards = [Nodes(objects, Candidate("one", shard, 2)) for shard in range(2)]
    for shard, nodes in enumerate(shards):
        for machine in ("one", "two"):
            nodes.put(node_of(Candidate(machine, shard, 2), "x", {}, start=0, counter=1))
    everybody = Nodes(objects)
    everybody.drain("one")
    assert [(node.name, node.drained) for node in everybody.read()] == [
        ("one-0000", True),
        ("one-0001", True),
        ("two-0000", False),
        ("two-0001", False),
    ]
    assert [[node.drained for node in nodes.read()] for nodes in shards] == [[True, False]] * 2
    everybody.undrain("one")
    everybody.undrain("one")
    assert not any(node.drained for node in everybody.read())


def test_drained_machines_take_over_last() -> None:
    nodes = [Node(name, name, {}, drained=name in "ab") for name in "abcd"]
    ranks = {}
    for name in "abcd":
        watch = Watch(name)
        watch.leader(nodes, 0.0)
        ranks[name] = watch.rank(nodes)
    assert ranks == {"c": 0, "d": 1, "a": 2, "b": 3}


def test_a_leader_is_alive_while_its_object_changes() -> None:
    watch = Watch("me")
    for number in range(20):
        assert watch.leader([Node("one", "a", {}, start=3, counter=number)], 5.0 * number) is not None
    silent = [Node("one", "a", {}, start=3, counter=19)]
    assert watch.leader(silent, 95.0 + NODE_TIMEOUT_S - 0.1) is not None
    assert watch.leader(silent, 95.0 + NODE_TIMEOUT_S) is None
    assert watch.leader([Node("one", "a", {}, start=3, counter=20)], 200.0) is not None


def test_the_node_with_the_latest_start_leads_and_candidates_count() -> None:
    watch = Watch("me")
    old, new, candidate, idle = (
        Node(name, name, {}, start=start) for name, start in zip("onci", (3, 4, -1, 0), strict=True)
    )
    assert watch.leader([old, new, candidate, idle], 0.0) == new
    assert watch.leader([candidate, idle], 0.0) == candidate
    assert watch.leader([idle], 0.0) is None


def test_candidates_take_turns() -> None:
    watch, nodes = Watch("c"), [Node(name, name, {}) for name in "abcd"]
    assert watch.leader(nodes, 0.0) is None
    assert watch.rank(nodes) == 2
    living = [Node("a", "a", {}), Node("b", "b", {}, counter=1)]
    assert watch.leader(living, NODE_TIMEOUT_S) is None
    assert watch.rank(living) == 1


def test_a_node_that_is_gone_for_long_is_forgotten() -> None:
    watch, gone, here = Watch("me"), Node("gone", "a", {}), Node("here", "b", {})
    watch.see([gone, here], 0.0)
    later = Node("here", "b", {}, counter=1)
    watch.see([gone, later], NODE_FORGOTTEN_S - 1)
    assert watch.forgotten([gone, later]) == []
    watch.see([gone, later], NODE_FORGOTTEN_S)
    assert watch.forgotten([gone, later]) == ["gone"]
    watch.see([later], NODE_FORGOTTEN_S)
    watch.see([gone, later], NODE_FORGOTTEN_S + 1)
    assert watch.forgotten([gone, later]) == [], "it is back"


def test_a_wish_is_read_and_an_invalid_one_ignored() -> None:
    objects = MemoryObjects()
    nodes = Nodes(objects)
    assert nodes.takeover_request() is None
    nodes.request_takeover(TakeoverRequest("one", 3))
    nodes.request_takeover(TakeoverRequest("two", 4))
    assert nodes.takeover_request() == TakeoverRequest("two", 4)
    objects.put(WISH, b"{}")
    assert nodes.takeover_request() is None


def test_states_of_nodes() -> None:
    nodes = [Node(name, name, {}, start=start) for name, start in zip("oncis", (3, 4, -1, 0, 2), strict=True)]
    assert [state for _, state in states(nodes, {"o", "n", "c", "i"})] == [
        NodeState.DEPOSED,
        NodeState.LEADS,
        NodeState.TAKES_OVER,
        NodeState.STANDBY,
        NodeState.SILENT,
    ]
    assert states([], set()) == []


def test_a_node_is_alive_until_the_timeout() -> None:
    watch, node = Watch("me"), Node("one", "a", {})
    watch.see([node], 5.0)
    watch.see([node], 5.0 + NODE_TIMEOUT_S - 0.1)
    assert watch.alive([node]) == {"one"}
    watch.see([node], 5.0 + NODE_TIMEOUT_S)
    assert watch.alive([node]) == frozenset()


def test_a_broker_is_judged_by_its_own_timeout() -> None:
    objects = MemoryObjects()
    for name, timeout_s in (("quick", 1.0), ("slow", 60.0)):
        Nodes(objects).put(node_of(Candidate(name), name, {}, start=1, counter=0, timeout_s=timeout_s))
    quick, slow = Nodes(objects).read()
    watch = Watch("me")
    watch.see([quick, slow], 0.0)
    watch.see([quick, slow], 0.9)
    assert watch.alive([quick, slow]) == {"quick", "slow"}
    watch.see([quick, slow], 1.0)
    assert watch.alive([quick, slow]) == {"slow"}
    watch.see([quick, slow], 60.0)
    assert watch.alive([quick, slow]) == frozenset()
    assert interval_s(1.0) < wait_s([quick]) < wait_s([quick, slow])


def test_a_node_without_a_timeout_has_the_default() -> None:
    objects = MemoryObjects()
    objects.put(f"{DIRECTORY}old", b'{"name": "old", "id": "x", "addresses": {}}')
    assert [node.timeout_s for node in Nodes(objects).read()] == [NODE_TIMEOUT_S]


def test_every_shard_has_its_own_nodes_and_wishes() -> None:
    objects = MemoryObjects()
    candidates = [Candidate(machine, shard, 12) for machine in ("a", "b") for shard in (0, 1, 11)]
    for candidate in candidates:
        Nodes(objects, candidate).put(node_of(candidate, "x", {}, start=0, counter=1))
    found = Nodes(objects, candidates[1]).read()
    assert [(node.name, node.machine, node.shard) for node in found] == [("a-0001", "a", 1), ("b-0001", "b", 1)]
    assert len(Nodes(objects).read()) == len(candidates)
    Nodes(objects, candidates[2]).request_takeover(TakeoverRequest("b-000b", 3))
    assert [Nodes(objects, one).takeover_request() for one in candidates[:3]] == [
        None,
        None,
        TakeoverRequest("b-000b", 3),
    ]


def test_nodes_of_a_single_shard_keep_their_old_names() -> None:
    objects, candidate = MemoryObjects(), Candidate("one")
    Nodes(objects, candidate).put(node_of(candidate, "x", {}, start=0, counter=1))
    Nodes(objects, candidate).request_takeover(TakeoverRequest("one", 3))
    objects.put(f"{DIRECTORY}two", b'{"name":"two","id":"y","addresses":{},"start":4,"counter":1,"version":1}')
    objects.put(f"{DIRECTORY}three", b'{"name":"three","id":"y","addresses":{},"shard":-1}')
    assert [node.name for node in Nodes(objects, candidate).read()] == ["one", "two"]
    assert objects.list(DIRECTORY)[0] == "nodes/one"
    assert Nodes(objects).takeover_request() == TakeoverRequest("one", 3)


def test_each_shard_has_its_own_leader() -> None:
    nodes = [
        Node("a-0000", "x", {}, start=3),
        Node("a-0001", "y", {}, start=9, shard=1),
        Node("b-0000", "z", {}, start=2),
    ]
    assert [state for _, state in states(nodes, {node.name for node in nodes})] == [
        NodeState.LEADS,
        NodeState.LEADS,
        NodeState.DEPOSED,
    ]


def test_candidates_for_consecutive_shards_start_with_different_machines() -> None:
    ranks = []
    for shard in range(3):
        nodes, watch = [Node(name, name, {}) for name in "abc"], Watch("b", shard)
        watch.leader(nodes, 0.0)
        ranks.append(watch.rank(nodes))
    assert ranks == [1, 0, 2]
