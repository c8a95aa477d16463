"""Topics in Polars and DuckDB."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import polywire
from polywire.errors import Invalid, Missing
from polywire.tables.frames import read_polars, scan, scan_polars, to_duckdb
from tests.unit.client.served import Served

polars = pytest.importorskip("polars", reason="NOT TRIED: Polars is not installed (extra polars)")
duckdb = pytest.importorskip("duckdb", reason="NOT TRIED: DuckDB is not installed (extra duckdb)")


@pytest.fixture
def filled(served: Served) -> str:
    with polywire.connect_sync(served.address) as client, client.producer() as producer:
        for partition in range(3):
            producer.send_many("t", [f"{partition}-{n}" for n in range(100)], keys=["k"] * 100, partition=partition)
    return served.address


def test_a_topic_is_read_into_a_polars_frame(filled: str) -> None:
    frame = read_polars(filled, "t", text=True)
    assert frame.columns == ["key", "value", "partition", "offset", "timestamp"]
    assert frame.height == 300
    assert frame.filter(polars.col("partition") == 2)["value"].to_list() == [f"2-{n}" for n in range(100)]


def test_a_lazy_frame_reads_only_needed_columns(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def noted(*args: Any, **named: Any) -> Any:
        asked.append(list(named["columns"]))
        return scan(*args, **named)

    monkeypatch.setattr("polywire.tables.frames.scan", noted)
    lazy = scan_polars(filled, "t", text=True)
    assert asked == []
    found = lazy.filter(polars.col("partition") == 1).select("value").collect()
    assert found["value"].to_list() == [f"1-{n}" for n in range(100)]
    assert sorted(asked[0]) == ["partition", "value"]
    assert lazy.head(150).collect().height == 150
    assert lazy.select(polars.len()).collect().item() == 300


def test_a_topic_is_read_into_a_duckdb_table(filled: str) -> None:
    with duckdb.connect() as connection:
        for _ in range(2):  # the second replaces the first
            orders = to_duckdb(connection, filled, "t", table='a "table"', text=True)
        counts = orders.aggregate("partition, count(*) AS n", "partition").order("partition").fetchall()
        assert counts == [(0, 100), (1, 100), (2, 100)]
        assert connection.execute('SELECT max("offset") FROM "a ""table"""').fetchall() == [(99,)]
        assert to_duckdb(connection, filled, "t", columns=["value"], start=98).fetchall()[0] == (b"0-98",)


def test_a_missing_topic_or_package_is_reported(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Missing):
        read_polars(filled, "missing")
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(Invalid, match=r"polywire\[polars\]"):
        read_polars(filled, "t")
