"""What is told of a bucket's brokers while they change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from polywire.cli import cluster
from polywire.cluster.nodes import Node, Nodes
from polywire.testing.memory_objects import MemoryObjects


class Scripted(Nodes):
    """Says one thing after the other, and stays with the last."""

    def __init__(self, *looks: Sequence[Node]) -> None:
        super().__init__(MemoryObjects())
        self._looks = list(looks)

    def read(self) -> list[Node]:
        return list(self._looks.pop(0) if len(self._looks) > 1 else self._looks[0])


def node(name: str, start: int, *, drained: bool = False) -> Node:
    return Node(name, name, {}, start=start, machine=name, drained=drained)


def test_who_follows_a_drained_broker_is_told_once_it_leads(
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
    assert capsys.readouterr().err == "two leads shard 0000 now start=2\n"


def test_what_a_drained_broker_still_leads_is_told_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    assert cluster._await_drained(Scripted([node("one", 3, drained=True)]), "one", 2, 0.01) == {0}
    assert capsys.readouterr().err == "nobody else is there to take over\n"
