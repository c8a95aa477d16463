"""Typed columns as readers of table and log see them: a row has the same columns before and after it is in the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars
import pytest

import polywire
from polywire.client.bulk import BulkConnection
from polywire.errors import Invalid
from polywire.records.columns import Record
from polywire.tables.reading import scan_files, scan_tail, snapshot
from tests.unit.client.served import Served
from tests.unit.tables.tabled import configure, produce, write_table

LISTED = "id long, total decimal(10,2), at timestamp, `the customer` string, Timestamp string, b boolean, day date"
FIRST = [
    b'{"id": 1, "total": 1.5, "at": "2026-11-27T03:00:00Z", "the customer": "a", "Timestamp": "t", "b": true}',
    b'{"id": "x", "total": "1.555", "the customer": {"n": [1, 2]}, "day": "2026-11-27"}',
    None,
    b"no JSON",
]
SECOND = [b'{"id": 2, "city": "Bern", "total": 99999999999}', b'{"id": 3, "the customer": 5}']
NAMES = ("value", "_error", "id", "total", "at", "the_customer", "value_Timestamp", "b", "day")


def send(connection: BulkConnection, values: Sequence[bytes | None]) -> None:
    for partition in range(3):
        produce(connection, "orders", partition, [Record(value) for value in values])


def rows(batches: Any) -> list[dict[str, Any]]:
    found = [row for batch in batches for row in batch.to_pylist()]
    return sorted(found, key=lambda row: (row["partition"], row["offset"]))


def rows_of_all(tabled: Served, connection: BulkConnection) -> list[dict[str, Any]]:
    """Return the rows of table and log, which all readers agree about."""
    found = snapshot(tabled.address, "orders")
    expected = rows([*scan_files(found), *scan_tail(connection, found)])
    assert rows([polywire.sql("from orders", address=tabled.address)]) == expected
    names = ["partition", "offset", "timestamp", "value", *(column.name for column in found.columns)]
    chosen = [{name: row[name] for name in names} for row in expected]
    assert rows([polywire.read_arrow(tabled.address, "orders", columns=names, table=True)]) == chosen
    every = rows([polywire.read_arrow(tabled.address, "orders", table=True)])
    assert [{name: row[name] for name in names} for row in every] == chosen
    lazy = polywire.scan_polars(tabled.address, "orders", table=True)
    assert rows([lazy.select(names).collect().to_arrow()]) == chosen
    some = polywire.sql(f'select partition, "offset", "{names[-1]}" from orders', address=tabled.address)
    assert rows([some]) == [{name: row[name] for name in ("partition", "offset", names[-1])} for row in expected]
    return expected


def test_a_row_is_the_same_before_and_after_it_is_in_the_table(tabled: Served, connection: BulkConnection) -> None:
    configure(tabled.address, "orders", LISTED)
    send(connection, FIRST)
    before = rows_of_all(tabled, connection)
    assert tuple(before[0])[5] == "value"
    assert tuple(before[0])[7:] == NAMES[1:]
    write_table(connection, "orders")
    assert not snapshot(tabled.address, "orders").tail
    assert rows_of_all(tabled, connection) == before
    send(connection, SECOND)
    both = rows_of_all(tabled, connection)
    write_table(connection, "orders")
    assert rows_of_all(tabled, connection) == both
    errors = [row["_error"] for row in both if row["partition"] == 0]
    assert errors == [
        None,
        'id: expected long, found string "x"; total: expected decimal(10,2), found string "1.555"',
        None,
        "value is not JSON: JSON is malformed: invalid character (byte 4)",
        "total: expected decimal(10,2), found number 99999999999",
        None,
    ]


def test_columns_that_are_added_later_are_null_before(tabled: Served, connection: BulkConnection) -> None:
    send(connection, FIRST)
    write_table(connection, "orders")
    configure(tabled.address, "orders", "id long")
    assert rows_of_all(tabled, connection)[0]["id"] is None  # the files were written before
    send(connection, SECOND)
    write_table(connection, "orders")
    configure(tabled.address, "orders", "total double")
    send(connection, SECOND)
    found = [(row["id"], row["total"]) for row in rows_of_all(tabled, connection) if row["partition"] == 0]
    assert found[4:] == [(2, None), (3, None), (None, 99999999999.0), (None, None)]
    write_table(connection, "orders")
    configure(tabled.address, "orders", "")
    send(connection, SECOND)
    for _ in range(2):
        typed = [(row["id"], row["total"]) for row in rows_of_all(tabled, connection) if row["partition"] == 0]
        assert typed == [*found, (None, None), (None, None)]
        write_table(connection, "orders")


def test_inferred_columns(tabled: Served, connection: BulkConnection) -> None:
    configure(tabled.address, "orders", "infer")
    send(connection, FIRST[:1])
    assert "id" not in rows_of_all(tabled, connection)[0]  # only the table finds columns
    write_table(connection, "orders")
    send(connection, SECOND)
    row = rows_of_all(tabled, connection)[1]
    assert (row["id"], row["_error"]) == (2, None)
    write_table(connection, "orders")
    assert rows_of_all(tabled, connection)[1]["city"] == "Bern"


def test_unknown_columns_are_an_error(tabled: Served, connection: BulkConnection) -> None:
    configure(tabled.address, "orders", "id long")
    with pytest.raises(Invalid, match="unknown or no columns unknown=city"):
        polywire.read_arrow(tabled.address, "orders", columns=["id", "city"], table=True)
    with pytest.raises(Invalid, match="unknown or no columns unknown=id"):
        polywire.read_arrow(tabled.address, "orders", columns=["id"])


def test_a_filter_of_polars_works_on_typed_columns(tabled: Served, connection: BulkConnection) -> None:
    configure(tabled.address, "orders", "id long")
    for _ in range(2):
        send(connection, SECOND)
        write_table(connection, "orders")
    send(connection, SECOND)
    frame = polywire.scan_polars(tabled.address, "orders", table=True)
    assert frame.filter(polars.col("id") == 3).collect().height == 9
