"""``polywire cluster drain``: what it reports while leadership moves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from polywire.cli import cluster
from polywire.cluster.nodes import Node, Nodes
from polywire.testing.memory_objects import MemoryObjects


class Scripted(Nodes):
    """Returns one list of brokers after another, and then always the last."""

    def __init__(self, *reads: Sequence[Node]) -> None:
        super().__init__(MemoryObjects())
        self._reads = list(reads)

    def read(self) -> list[Node]:
        return list(self._reads.pop(0) if len(self._reads) > 1 else self._reads[0])


def node(name: str, start: int, *, drained: bool = False) -> Node:
    return Node(name, name, {}, start=start, machine=name, drained=drained)


def test_drain_reports_the_new_leader_once_it_leads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    others = [node("other", 0)]
    nodes = Scripted(
        [node("one", 1, drained=True), node("two", 0), *others],
        [node("one", 1, drained=True), node("two", -1), *others],
        [node("one", 0, drained=True), node("two", -1), *others],
        [node("one", 0, drained=True), node("two", 2), *others],
    )
    assert cluster._await_drained(nodes, "one", 1, 60) == set()
    assert capsys.readouterr().err == "two is now the leader of shard 0000 start=2\n"


def test_drain_returns_the_shards_that_the_broker_still_leads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    assert cluster._await_drained(Scripted([node("one", 3, drained=True)]), "one", 2, 0.01) == {0}
    assert capsys.readouterr().err == "there is no other broker that could take over\n"
