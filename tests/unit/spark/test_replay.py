"""The checkpoint of a replay, which belongs to one table and one topic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polywire.errors import Invalid
from polywire.spark.pipelines.replay import Position, Span, _position, _remember

SPAN = Span(0, 100, 10)


def position(path: Path, *, output: str = "orders", span: Span = SPAN, topic_id: str = "1a") -> Position:
    return _position(path, output, span, lambda: topic_id)


def test_a_replay_resumes_after_the_last_slice(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint" / "replayed.json"
    first = position(path)
    assert (first.output, first.topic_id, first.done, first.span) == ("orders", "1a", 0, [0, 100, 10])
    assert position(path) == first
    _remember(path, Position(first.name, "orders", "1a", 3, [0, 100, 10]))
    assert position(path) == Position(first.name, "orders", "1a", 3, [0, 100, 10])


def test_a_checkpoint_of_another_replay_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "replayed.json"
    before = position(path)
    with pytest.raises(Invalid, match=r"another topic .*checkpoint='orders' requested='copies'"):
        position(path, output="copies")
    with pytest.raises(Invalid, match=r"another table .*checkpoint=\[0, 100, 10\] requested=\[0, 100, 5\]"):
        position(path, span=Span(0, 100, 5))
    with pytest.raises(Invalid, match=r"is on another broker.* topic='orders' checkpoint=1a found=2b"):
        position(path, topic_id="2b")
    assert position(path) == before


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "replayed.json"
    path.write_text(json.dumps({"name": "replay-my-orders-18c2f", "done": 2, "span": [0, 100, 10]}))
    assert position(path, output="my-orders") == Position("replay-my-orders-18c2f", "my-orders", "1a", 2, [0, 100, 10])
    with pytest.raises(Invalid, match="checkpoint='my-orders' requested='orders'"):
        position(path)
