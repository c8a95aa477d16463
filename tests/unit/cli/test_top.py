"""What ``polywire top`` makes of two looks."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.cli.main import run
from polywire.cli.top import Look, view
from polywire.cli.usage import EXIT_FAILED


def look(at: float, *, received: int, topics: dict[str, int], lags: dict[str, int]) -> Look:
    told: dict[str, Any] = {
        "overview": {"wires": {"kafka": {"connections": 2, "received_bytes": received, "sent_bytes": 0}}},
        "topics": {
            "topics": [{"name": n, "partitions": 1, "records": count, "stored_bytes": 9} for n, count in topics.items()]
        },
        "groups": {
            "groups": [
                {"group": name, "topic": "a", "members": 1, "lag_records": lag, "lag_seconds": 0.5}
                for name, lag in lags.items()
            ]
        },
    }
    return Look(at, told)


def test_rates_are_what_changed() -> None:
    before = look(10.0, received=1000, topics={"a": 5, "b": 5}, lags={})
    now = look(12.0, received=5000, topics={"a": 5, "b": 25, "new": 3}, lags={"near": 1, "far": 7})
    rows = view(before, now)
    assert rows["wires"] == [{"wire": "kafka", "connections": 2, "received_per_s": 2000.0, "sent_per_s": 0.0}]
    assert [(row["topic"], row["records_per_s"]) for row in rows["topics"]] == [("b", 10.0), ("new", 1.5), ("a", 0.0)]
    assert [row["group"] for row in rows["groups"]] == ["far", "near"]


def test_what_has_begun_anew_has_no_negative_rate() -> None:
    rows = view(look(0, received=9000, topics={"a": 50}, lags={}), look(1, received=0, topics={"a": 0}, lags={}))
    assert rows["wires"][0]["received_per_s"] == rows["topics"][0]["records_per_s"] == 0


@pytest.mark.parametrize(
    "address", ["127.0.0.1:9080", "ftp://127.0.0.1:9080", "http://127.0.0.1:1", "http://127.0.0.1:99999"]
)
def test_where_there_is_no_http_it_says_so(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--once", "--http", address]) == EXIT_FAILED
    assert address.rpartition("/")[2] in capsys.readouterr().err
