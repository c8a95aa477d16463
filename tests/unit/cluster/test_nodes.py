"""Who is there, and who is taken for dead: by the watcher's own clock."""

from __future__ import annotations

from polywire.cluster.nodes import (
    DIRECTORY,
    NODE_FORGOTTEN_S,
    NODE_TIMEOUT_S,
    WISH,
    Node,
    Nodes,
    NodeState,
    Watch,
    Wish,
    states,
)
from polywire.testing.memory_objects import MemoryObjects


def test_nodes_are_read_as_they_were_written() -> None:
    objects = MemoryObjects()
    nodes = Nodes(objects)
    one, two = Node("one", "a", {"flux": ("h", 1)}, start=2, counter=1), Node("two", "b", {})
    for node in (two, one):
        nodes.put(node)
    objects.put(f"{DIRECTORY}three", b"no json")
    objects.put(f"{DIRECTORY}four", b'{"name": "somebody else", "id": "x", "addresses": {}}')
    objects.put(f"{DIRECTORY}five", b'{"name": "five", "id": 7, "addresses": []}')
    assert nodes.read() == [one, two]


def test_a_leader_lives_while_its_object_changes() -> None:
    watch = Watch("me")
    for number in range(20):
        assert watch.leader([Node("one", "a", {}, start=3, counter=number)], 5.0 * number) is not None
    silent = [Node("one", "a", {}, start=3, counter=19)]
    assert watch.leader(silent, 95.0 + NODE_TIMEOUT_S - 0.1) is not None
    assert watch.leader(silent, 95.0 + NODE_TIMEOUT_S) is None
    assert watch.leader([Node("one", "a", {}, start=3, counter=20)], 200.0) is not None


def test_the_latest_start_leads_and_who_tries_counts() -> None:
    watch = Watch("me")
    old, new, candidate, idle = (
        Node(name, name, {}, start=start) for name, start in zip("onci", (3, 4, -1, 0), strict=True)
    )
    assert watch.leader([old, new, candidate, idle], 0.0) == new
    assert watch.leader([candidate, idle], 0.0) == candidate
    assert watch.leader([idle], 0.0) is None


def test_candidates_come_one_after_the_other() -> None:
    watch, nodes = Watch("c"), [Node(name, name, {}) for name in "abcd"]
    assert watch.leader(nodes, 0.0) is None
    assert watch.rank(nodes) == 2
    living = [Node("a", "a", {}), Node("b", "b", {}, counter=1)]
    assert watch.leader(living, NODE_TIMEOUT_S) is None
    assert watch.rank(living) == 1


def test_who_is_gone_for_long_is_forgotten() -> None:
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


def test_a_wish_is_found_and_nonsense_is_none() -> None:
    objects = MemoryObjects()
    nodes = Nodes(objects)
    assert nodes.wished() is None
    nodes.wish(Wish("one", 3))
    nodes.wish(Wish("two", 4))
    assert nodes.wished() == Wish("two", 4)
    objects.put(WISH, b"{}")
    assert nodes.wished() is None


def test_what_each_does() -> None:
    nodes = [Node(name, name, {}, start=start) for name, start in zip("oncis", (3, 4, -1, 0, 2), strict=True)]
    assert [state for _, state in states(nodes, {"o", "n", "c", "i"})] == [
        NodeState.DEPOSED,
        NodeState.LEADS,
        NodeState.TAKES_OVER,
        NodeState.STANDS_BY,
        NodeState.SILENT,
    ]
    assert states([], set()) == []


def test_who_was_heard_of_is_alive() -> None:
    watch, node = Watch("me"), Node("one", "a", {})
    watch.see([node], 5.0)
    watch.see([node], 5.0 + NODE_TIMEOUT_S - 0.1)
    assert watch.alive([node]) == {"one"}
    watch.see([node], 5.0 + NODE_TIMEOUT_S)
    assert watch.alive([node]) == frozenset()
