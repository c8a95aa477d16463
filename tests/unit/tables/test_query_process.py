"""Results of SQL as JSON."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from polywire.client.bulk import BulkConnection
from polywire.errors import Invalid
from polywire.table_orders import SqlOrder
from polywire.tables.query_process import CELL_BYTES_MAX, JsonRows, answer

pytest.importorskip("duckdb", reason="NOT TRIED: DuckDB is not installed (extra duckdb)")


def cell(value: Any) -> Any:
    rows = JsonRows(1, 1 << 20)
    assert rows.add([value])
    (found,) = json.loads(bytes(rows.rows[0]))
    return found


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        (True, True),
        (2**53 - 1, 2**53 - 1),
        (2**53, "9007199254740992"),
        (-(2**100), str(-(2**100))),
        (1.5, 1.5),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ("text", "text"),
        ("grüße\n".encode(), "grüße\n"),
        (b"\xff\x00", {"hex": "ff00"}),
        (b"a\x00", {"hex": "6100"}),
        (b"", ""),
        (Decimal("1.50"), "1.50"),
        (Decimal(4950), 4950),
        (Decimal(2**53), str(2**53)),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02 00:00:00+00:00"),
        ([1, [b"x"]], [1, ["x"]]),
        ({"key": b"\xff"}, {"key": {"hex": "ff"}}),
        ([("a", 1)], [["a", 1]]),
    ],
)
def test_values_as_json(value: Any, shown: Any) -> None:
    assert cell(value) == shown


@pytest.mark.parametrize("long", ["ü" * CELL_BYTES_MAX, b"\xc3\xbc" * CELL_BYTES_MAX, b"\xff" * 2 * CELL_BYTES_MAX])
def test_long_values_are_cut(long: str | bytes) -> None:
    rows = JsonRows(10, 1 << 20)
    assert rows.add([long * 2])
    assert rows.is_cut
    assert len(bytes(rows.rows[0])) < 5 * CELL_BYTES_MAX


def test_results_have_limits() -> None:
    rows = JsonRows(2, 1 << 20)
    assert [rows.add([n]) for n in range(3)] == [True, True, False]
    assert (rows.limit, len(rows.rows)) == ("rows", 2)
    rows = JsonRows(1_000, 100)
    while rows.add(["0123456789"]):
        pass
    assert (rows.limit, len(rows.rows)) == ("bytes", 6)


def order(statement: str, **changes: Any) -> SqlOrder:
    limits: dict[str, Any] = {"rows_max": 100, "result_bytes_max": 1 << 20, "memory_bytes_max": 1 << 28}
    return SqlOrder(statement, **(limits | {"seconds_max": 10.0, "threads": 1} | changes))


def result(connection: BulkConnection, statement: str, **changes: Any) -> Any:
    return json.loads(answer(connection, order(statement, **changes)))


def test_a_result_has_columns_rows_and_the_limit_that_shortened_it(connection: BulkConnection) -> None:
    found = result(connection, "select range as n, 'a' as n from range(1000)", rows_max=3)
    assert found["columns"] == [{"name": "n", "type": "BIGINT"}, {"name": "n", "type": "VARCHAR"}]
    assert found["rows"] == [[0, "a"], [1, "a"], [2, "a"]]
    assert (found["more"], found["limit"], found["cut"]) == (True, "rows", False)
    found = result(connection, "select 1 as n where false")
    assert (found["columns"], found["rows"], found["more"]) == ([{"name": "n", "type": "INTEGER"}], [], False)


def test_a_row_that_exceeds_the_limit_is_an_error(connection: BulkConnection) -> None:
    with pytest.raises(Invalid, match="row of the result is too large"):
        result(connection, "select repeat('x', 2000)", result_bytes_max=1000)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("timestamp_ns '2020-01-01 00:00:00.123456789'", "2020-01-01 00:00:00.123456789"),
        ("[timestamp_ns '2020-01-01 00:00:00.123456789']", None),
        ("date '2020-01-02'", "2020-01-02"),
        ("date '-infinity'", None),
        ("timestamptz '2020-01-01 00:00:00Z'", "2020-01-01 00:00:00.000000Z"),
        ("1.50::decimal(10, 2)", "1.50"),
        ("interval 3 days", None),
        ("{'a': 1, 'b': null}", {"a": 1, "b": None}),
        ("map {'k': 2}", [["k", 2]]),
        (r"'\xff'::blob", {"hex": "ff"}),
        ("""'{"a": 1}'::json""", '{"a": 1}'),
        ("'b'::enum('a', 'b')", "b"),
        ("9007199254740993", "9007199254740993"),
    ],
)
def test_every_type_has_a_value(connection: BulkConnection, expression: str, shown: Any) -> None:
    ((value,),) = result(connection, f"select {expression}")["rows"]
    assert value is not None
    if shown is not None:
        assert value == shown


def test_every_type_of_duckdb_is_shown(connection: BulkConnection) -> None:
    assert len(result(connection, "from test_all_types()")["rows"]) == 3


def test_a_missing_library_is_reported(connection: BulkConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(Invalid, match=r"SQL needs DuckDB \(pip install 'polywire\[duckdb\]'\)"):
        result(connection, "select 1")
