"""``polywire top``: the view of two samples."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, Group

from polywire.cli.admin import default_http
from polywire.cli.main import run
from polywire.cli.top import Sample, _tables, view
from polywire.cli.usage import EXIT_FAILED


def sample(at: float, *, received: int, topics: dict[str, int], lags: Mapping[str, int | None]) -> Sample:
    responses: dict[str, Any] = {
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
    return Sample(at, responses)


def test_rates_are_differences_between_samples() -> None:
    before = sample(10.0, received=1000, topics={"a": 5, "b": 5}, lags={})
    now = sample(12.0, received=5000, topics={"a": 5, "b": 25, "new": 3}, lags={"near": 1, "far": 7})
    rows = view(before, now)
    assert rows["wires"] == [{"wire": "kafka", "connections": 2, "received_per_s": 2000.0, "sent_per_s": 0.0}]
    assert [(row["topic"], row["records_per_s"]) for row in rows["topics"]] == [("b", 10.0), ("new", 1.5), ("a", 0.0)]
    assert [row["group"] for row in rows["groups"]] == ["far", "near"]


def test_a_restarted_broker_has_no_negative_rate() -> None:
    rows = view(sample(0, received=9000, topics={"a": 50}, lags={}), sample(1, received=0, topics={"a": 0}, lags={}))
    assert rows["wires"][0]["received_per_s"] == rows["topics"][0]["records_per_s"] == 0


def bucket(*, requests: int, price: float | None = 0.005) -> dict[str, Any]:
    return {
        "node": "one",
        "shard": "0000",
        "epoch": 3,
        "unstored_bytes": 4096,
        "unstored_seconds": 0.25,
        "journal_objects": 9,
        "cache_bytes": 0,
        "put_bytes": 1000 * requests,
        "got_bytes": 0,
        "nodes": [{"name": "one", "state": "leads", "epoch": 3}, {"name": "two", "state": "standby", "epoch": None}],
        "requests": [
            {"verb": "create", "outcome": "done", "requests": requests, "seconds": requests * 0.04, "p99_s": 0.05},
            {"verb": "read", "outcome": "failed", "requests": 1, "seconds": 99.0, "p99_s": None},
        ],
        "charges": [{"kind": "put", "requests": requests, "price": price, "cost": price and requests * price / 1000}],
    }


def test_the_bucket_view_has_rates_and_costs() -> None:
    before, now = (sample(at, received=0, topics={}, lags={}) for at in (10.0, 12.0))
    assert "bucket" not in view(before, now)
    now.responses["overview"]["bucket"] = bucket(requests=300)
    assert view(before, now)["requests"][0]["requests_per_s"] == 0  # the broker became the leader between the samples
    before.responses["overview"]["bucket"] = bucket(requests=280)
    rows = view(before, now)
    assert rows["bucket"][0]["put_bytes_per_s"] == 10_000
    assert [row["state"] for row in rows["brokers"]] == ["leads", "standby"]
    assert [(row["requests_per_s"], row["mean_ms"], row["p99_ms"]) for row in rows["requests"]] == [
        (10, 40, 50),
        (0, None, None),
    ]
    (charge,) = rows["charges"]
    assert (charge["cost"], charge["cost_of_30_days"]) == (0.0015, 129.6)  # 10 a second are 25.92 million
    console = Console(width=200, record=True, file=StringIO())
    console.print(Group(*_tables(rows)))
    text = console.export_text()
    assert all(word in text for word in ("9.8 KiB", "standby", "129.6", "–"))
    now.responses["overview"]["bucket"] = bucket(requests=30, price=None)
    assert "cost" not in view(before, now)["charges"][0]


@pytest.mark.parametrize(
    "address", ["127.0.0.1:9080", "ftp://127.0.0.1:9080", "http://127.0.0.1:1", "http://127.0.0.1:99999"]
)
def test_an_address_without_http_is_reported(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--once", "--http", address]) == EXIT_FAILED
    assert address.rpartition("/")[2] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "http"),
    [
        ("", "http://127.0.0.1:9080"),
        ("polywire://broker.example:9555", "http://broker.example:9080"),
        ("broker.example:9555", "http://broker.example:9080"),
        ("kafka+tls://me@broker.example:9093", "https://me@broker.example:9080"),
        ("polywire://me:secret@[::1]:9555,other:9555", "http://me:secret@[::1]:9080"),
    ],
)
def test_the_default_http_address_uses_the_host_of_the_client_address(address: str, http: str) -> None:
    assert default_http(address) == http


def test_the_command_connects_to_the_host_of_the_client_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("polywire.cli.admin.HTTP_PORT", 1)
    monkeypatch.delenv("POLYWIRE_HTTP", raising=False)
    monkeypatch.setenv("POLYWIRE_ADDRESS", "polywire://127.0.0.2:9555")
    assert run(["top", "--once"]) == EXIT_FAILED
    assert "address=127.0.0.2:1" in capsys.readouterr().err


def test_an_https_address_without_tls_suggests_http(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--once", "--http", "https://127.0.0.1:1"]) == EXIT_FAILED
    assert "(if the HTTP listener has no TLS, use --http http://127.0.0.1:1)" in capsys.readouterr().err


def test_a_group_without_committed_offsets_has_no_lag() -> None:
    before, now = (sample(at, received=0, topics={}, lags={"a": None, "b": 3}) for at in (10.0, 12.0))
    assert [(row["group"], row["lag_records"]) for row in view(before, now)["groups"]] == [("b", 3), ("a", None)]


def test_the_view_is_printed_again_into_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [sample(at, received=0, topics={"orders": int(at)}, lags={}) for at in (10.0, 12.0, 16.0)]
    monkeypatch.setattr("polywire.cli.top._sample", lambda admin: samples.pop(0))
    monkeypatch.setattr("polywire.cli.top.time.sleep", lambda seconds: None)
    with pytest.raises(IndexError):
        run(["top"])
    assert capsys.readouterr().out.count("orders") == 2
