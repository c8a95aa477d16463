"""Folding events of one key: order, duplicates, gaps."""

from __future__ import annotations

import json
from typing import Any

from polywire.spark.pipelines.state import Current, fold_events, merge


def event(
    version: int | None, *, offset: int = 0, reason: str | None = None, key: bytes | None = b"k", **fields: Any
) -> dict[str, Any]:
    return {"key": key, "version": version, "offset": offset, "event": json.dumps(fields), "reason": reason}


def add(state: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    return {"sum": state.get("sum", 0) + event["n"]}


def test_events_are_folded_once_and_in_order() -> None:
    current, refused = fold_events(
        Current(), [event(2, n=5), event(1, n=2), event(2, n=5, offset=1), event(3, n=1)], add
    )
    assert (current.version, json.loads(current.state), refused) == (3, {"sum": 8}, [])
    again, refused = fold_events(current, [event(1, n=2), event(3, n=1)], add)
    assert (again, refused) == (current, [])
    merged, _ = fold_events(Current(), [event(1, a=1, b=1), event(2, b=2)], merge)
    assert json.loads(merged.state) == {"a": 1, "b": 2}


def test_events_that_cannot_be_folded_are_refused_with_a_reason() -> None:
    rows = [event(1, n=1), event(4, n=1), event(None), event(2, reason="not JSON"), event(1, key=None)]
    current, refused = fold_events(Current(), rows, add)
    assert current.version == 1
    assert sorted(reason for _, reason in refused) == [
        "no key",
        "no version",
        "not JSON",
        "versions are missing expected=2 got=4",
    ]
