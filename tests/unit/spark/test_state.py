"""Folding events of one key: order, duplicates, gaps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import Row

from polywire.spark.pipelines.state import Current, FoldProcessor, fold_events, merge


def event(
    version: int | None, *, offset: int = 0, reason: str | None = None, key: bytes | None = b"k", **fields: Any
) -> dict[str, Any]:
    return {
        "key": key,
        "value": json.dumps(fields).encode(),
        "version": version,
        "offset": offset,
        "event": json.dumps({name: value for name, value in fields.items() if value is not None}),
        "nulls": [name for name in ("a", "b", "n") if fields.get(name) is None],
        "reason": reason,
    }


class Kept:
    """The stored state of a key without events."""

    def exists(self) -> bool:
        return False


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


def test_a_null_replaces_a_field_and_an_absent_field_stays() -> None:
    merged, _ = fold_events(Current(), [event(1, a=1, b={"c": None}), event(2, a=None), event(3, b=3)], merge)
    assert json.loads(merged.state) == {"a": None, "b": 3}
    again, _ = fold_events(merged, [event(4, a=4, b=None)], merge)
    assert json.loads(again.state) == {"a": 4, "b": None}


@pytest.mark.parametrize(
    "value", [None, b"", b"\xff", b"[null]", b"null", b"a", b"[" * 100_000, b'{"b": null, "c": 1}']
)
def test_only_nulls_of_json_objects_are_fields(value: bytes | None) -> None:
    merged, _ = fold_events(Current(), [{**event(1, n=1), "value": value}], merge)
    assert json.loads(merged.state) == ({"n": 1, "b": None} if value and b"null," in value else {"n": 1})


def test_dead_letters_have_the_headers_for_a_redrive(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = FoldProcessor(merge, "states", "dead", every=1)
    monkeypatch.setattr(processor, "_kept", Kept(), raising=False)
    rows = [Row(**event(2, n=1, offset=7), headers=[Row(key="h", value=b"1")], topic="events", partition=3)]
    [letter] = processor.handleInputRows((b"k",), rows, None)
    assert (letter["key"], letter["value"], letter["topic"]) == (b"k", b'{"n": 1}', "dead")
    assert [(header["key"], bytes(header["value"])) for header in letter["headers"]] == [
        ("h", b"1"),
        ("dead.reason", b"versions are missing expected=1 got=2"),
        ("dead.topic", b"events"),
        ("dead.partition", b"3"),
        ("dead.offset", b"7"),
    ]


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
