"""Topics in SQL."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import polywire
from polywire.broker.access import ConfiguredUser
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import parse_grants
from polywire.broker.settings import BrokerSettings
from polywire.cli.main import run
from polywire.client.bulk import BulkConnection, connect
from polywire.errors import Invalid, Missing, Unavailable
from polywire.records.columns import Record
from polywire.tables.reading import snapshot
from polywire.tables.sql import EngineLimits, isolated_rows, query
from tests.s3_server import BUCKET, s3_server
from tests.unit.client.served import Served
from tests.unit.tables.tabled import produce, rows_of, rows_of_log, write_table
from tests.unit.tables.test_reading import deleted_files, fill

pytest.importorskip("duckdb", reason="NOT TRIED: DuckDB is not installed (extra duckdb)")


def one(connection: BulkConnection, statement: str) -> object:
    """Return the only value of a result."""
    (row,) = query(connection, statement).to_pylist()
    (value,) = row.values()
    return value


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("has_tail", [False, True])
def test_a_statement_sees_table_and_tail(
    tabled: Served, connection: BulkConnection, has_table: bool, has_tail: bool
) -> None:
    if has_table:
        fill(connection, 0)
        write_table(connection, "orders")
    if has_tail:
        fill(connection, 100)
    expected = rows_of_log(tabled.address, "orders")
    assert len(expected) == 60 * (has_table + has_tail)
    assert rows_of(polywire.sql("from orders", address=tabled.address).to_batches()) == expected
    pairs = 'select count(*) from orders a join orders b using (partition, "offset")'
    assert one(connection, pairs) == len(expected)  # the tail is read twice


def test_names_of_topics(connection: BulkConnection) -> None:
    for number, topic in enumerate(("shop.orders", "shop.my-topic", 'a "b"', "select"), 1):
        connection.create_topic(topic, 1)
        produce(connection, topic, 0, [Record(b"v")] * number)
    fill(connection, 0)
    write_table(connection, "orders")
    assert one(connection, "select count(*) from orders") == 60
    assert one(connection, "select count(*) from shop.orders") == 1
    assert one(connection, 'select count(*) from "shop.orders"') == 1
    assert one(connection, 'select count(*) from shop."my-topic", orders') == 120
    assert one(connection, 'select count(*) from "a ""b"""') == 3
    assert one(connection, 'select count(*) from "select"') == 4
    assert one(connection, "with orders as (select 7 as n) select n from orders") == 7
    assert one(connection, "create temp table t as from orders; select count(*) from t") == 60
    assert set(query(connection, "pivot orders on partition using count(*) group by timestamp_type").column_names) == {
        "timestamp_type",
        "0",
        "1",
        "2",
    }
    assert query(connection, "describe orders").num_rows == 7


def test_topics_of_a_stream_that_is_named_like_a_schema_of_duckdb(connection: BulkConnection) -> None:
    for number, topic in enumerate(("main.ev", "ev", "main.only", "temp.ev"), 1):
        connection.create_topic(topic, 1)
        produce(connection, topic, 0, [Record(b"v")] * number)
    assert one(connection, "select count(*) from main.ev") == 1
    assert one(connection, "select count(*) from ev") == 2
    assert one(connection, 'select count(*) from "default".ev') == 2
    assert one(connection, 'select count(*) from main.only, "main.ev", ev') == 6
    assert one(connection, 'select count(*) from "temp.ev"') == 4
    with pytest.raises(Missing):
        query(connection, "select count(*) from main.orders")


def test_topics_whose_names_differ_only_in_case(connection: BulkConnection) -> None:
    for number, topic in enumerate(("Sales", "sales", "Shop.a", "shop.A"), 1):
        connection.create_topic(topic, 1)
        produce(connection, topic, 0, [Record(b"v")] * number)
    assert [one(connection, f"select count(*) from {name}") for name in ("Sales", "sales", "Shop.a")] == [1, 2, 3]
    with pytest.raises(Invalid, match="differ only in case topics=Sales,sales"):
        query(connection, 'select (select count(*) from "Sales"), (select count(*) from sales)')
    with pytest.raises(Invalid, match="differ only in case"):
        query(connection, "from Shop.a, shop.A")


def test_wrong_statements_are_reported(connection: BulkConnection) -> None:
    with pytest.raises(Missing, match="did you mean 'orders'"):
        query(connection, "from order_s")
    with pytest.raises(Missing, match="no such topic"):
        query(connection, "from missing.topic")
    with pytest.raises(Invalid, match=r'query failed: .*write "offset" for the column'):
        query(connection, "select offset from orders")
    with pytest.raises(Invalid, match=r"query failed: Binder Error: .*valeu[^\n]*$"):
        query(connection, "select valeu from orders")


def test_variables_of_the_process_are_no_tables(connection: BulkConnection) -> None:
    statement = "select * from found"
    found = query(connection, "select 1 as a")
    assert found.num_rows == 1
    with pytest.raises(Missing, match="no such topic"):
        query(connection, statement)


def test_an_isolated_statement_reaches_only_its_topics(connection: BulkConnection, tmp_path: Path) -> None:
    fill(connection, 0)
    write_table(connection, "orders")
    fill(connection, 100)
    other = tmp_path / "other.csv"
    other.write_text("a\n1\n", encoding="utf-8")
    assert one(connection, f"select a from '{other}'") == 1
    assert query(connection, "from orders", isolated=True).num_rows == 120
    target = tmp_path / "target.csv"
    file = snapshot(connection, "orders").paths[0]
    content = Path(file).read_bytes()
    for statement in (
        f"copy (select 1) to '{target}'",
        f"copy (select 1) to '{file}'",
        f"explain analyze copy (select 1) to '{file}'",
        f"attach '{target}'",
        f"export database '{target}'",
        "attach ':memory:' as other",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "reset enable_external_access",
        "pragma database_list",
        "call pragma_version()",
        "create table t as from orders",
        "prepare p as select 1",
        "select 1; select 2",
        "",
    ):
        with pytest.raises(Invalid, match="only a single SELECT"):
            query(connection, statement, isolated=True)
    for statement in (
        f"select a from '{other}'",
        f"select content from read_text('{other}')",
        f"from read_csv('{other}')",
        f"from read_blob('{other}')",
        f"from sniff_csv('{other}')",
        f"from read_parquet('{tmp_path}/**')",
        f"from read_duckdb('{target}')",
        f"from glob('{tmp_path}/*')",
        "from glob('/proc/self/fd/*')",
        "from read_text('/proc/self/environ')",
        "from duckdb_secrets()",
        "select getenv('HOME')",
        "from 'http://127.0.0.1:1/a.parquet'",
        "from sqlite_scan('a', 'b')",
        f"from query('copy (select 1) to \\'{file}\\'')",
        "from enable_logging(storage = 'file')",
        "from force_checkpoint()",
        "from arrow_scan(1, 2, 3)",
        "from pandas_scan(1)",
        f"from query('from read_text(''{other}'')')",
        f"from json_execute_serialized_sql(json_serialize_sql('from read_text(''{other}'')'))",
    ):
        with pytest.raises((Invalid, Missing)):
            query(connection, statement, isolated=True)
    assert not target.exists()
    assert Path(file).read_bytes() == content


def test_an_isolated_statement_sees_only_topics_that_its_user_may_consume(tmp_path: Path) -> None:
    with Served(BrokerSettings(tables_url=f"{tmp_path.as_uri()}/tables")) as served:
        root = connect(served.address)
        for topic in ("orders", "salaries"):
            root.create_topic(topic, 3, {"table": "delta"})
            produce(root, topic, 0, [Record(b"v")])
            write_table(root, topic)
        root.close()
        grants = [("reader", "consume@default/orders"), ("writer", "produce")]
        users = [ConfiguredUser(name, hash_password("secret"), parse_grants([given])) for name, given in grants]
        served.run(lambda: served.broker.access.configure(users))
        for name, topic in (("reader", "salaries"), ("writer", "orders")):
            connection = connect(f"polywire://{name}:secret@{served.address}")
            with pytest.raises(Missing, match="no such topic") as missing:
                query(connection, f"select count(*) from {topic}", isolated=True)
            assert f"known={topic}" not in str(missing.value)
            connection.close()
        connection = connect(f"polywire://reader:secret@{served.address}")
        assert query(connection, "select value from orders", isolated=True).to_pylist() == [{"value": b"v"}]
        connection.close()


def test_an_isolated_statement_has_limits(connection: BulkConnection) -> None:
    limits = EngineLimits(memory_bytes_max=64 * 1024 * 1024, threads=1)
    with isolated_rows(connection, "from range(1000000000000)", limits, batch_rows=100) as found:
        assert (found.names, found.types) == (["range"], ["BIGINT"])
        assert found.reader.read_next_batch().num_rows == 100
    with (
        pytest.raises(Invalid, match="too much memory"),
        isolated_rows(connection, "select list(range) from range(1000000000)", limits) as found,
    ):
        found.reader.read_all()
    with (
        pytest.raises(Invalid, match=r"query failed: .*Conversion Error"),
        isolated_rows(connection, "select 'a'::int + range from range(10)", limits) as found,
    ):
        found.reader.read_all()


def test_a_statement_is_repeated_after_a_file_was_deleted(
    connection: BulkConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    outdated = deleted_files(connection)
    current = snapshot(connection, "orders")
    found = iter([outdated, current, outdated, outdated, outdated, current])
    monkeypatch.setattr("polywire.tables.sql.snapshot", lambda *_, **__: next(found))
    assert one(connection, "select count(*) from orders") == 120
    with pytest.raises(Unavailable, match="deleted while it was read"):
        query(connection, "from orders")
    with pytest.raises(Unavailable, match="deleted while it was read"):
        query(connection, "create table t as select 1; from orders")  # the first statement would run twice
    assert next(found) is current


def test_errors_of_reading_the_log_are_not_hidden(connection: BulkConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(connection, 0)

    def replaced(*_: object, **__: object) -> None:
        raise polywire.errors.Conflict(polywire.errors.ErrorCode.TOPIC_REPLACED, "topic was replaced")

    monkeypatch.setattr(BulkConnection, "fetch_range", replaced)
    with pytest.raises(polywire.errors.Conflict, match="topic was replaced"):
        query(connection, "select sum(partition) from orders")


def test_ctrl_c_ends_a_statement(connection: BulkConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB reports the interrupt as an error of its own."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    fill(connection, 0)
    monkeypatch.setattr(BulkConnection, "fetch_range", interrupted)
    with pytest.raises(KeyboardInterrupt):
        query(connection, "select sum(partition) from orders")


def test_the_command_prints_values_as_text(
    tabled: Served,
    connection: BulkConnection,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    produce(connection, "orders", 0, [Record(b"\xff", key=b"k")])
    address = f"polywire://{tabled.address}"
    statement = (
        "select value, key, headers, [1.5, null] as list, date '2026-01-02' as \"day\", sum(partition) as sum, "
        "'nan'::float as nan, 1 as key, 12345678901234567.89 as decimal "
        "from orders group by all"
    )
    assert run(["sql", statement, "-a", address, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "value": "\\xff",
            "key": "k",
            "headers": None,
            "list": [1.5, None],
            "day": "2026-01-02",
            "sum": 0,
            "nan": "nan",
            "key_1": 1,
            "decimal": "12345678901234567.89",
        }
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("select [1] as a, {'b': 'c'} as d"))
    assert run(["sql", "-a", address, "-o", "csv"]) == 0
    assert capsys.readouterr().out == 'a,d\n[1],"{""b"": ""c""}"\n'
    assert run(["sql", "from missing", "-a", address]) == 1
    assert "no such topic" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * (1 << 20) + "y"))
    assert run(["sql", "-a", address]) == 1
    assert "statement is too long" in capsys.readouterr().err


def test_a_table_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(tmp_path / "s3") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with Served(BrokerSettings(tables_url=f"s3://{BUCKET}/tables")) as server:
            connection = connect(server.address)
            connection.create_topic("orders", 3, {"table": "delta"})
            fill(connection, 0)
            write_table(connection, "orders")
            fill(connection, 100)
            expected = rows_of_log(server.address, "orders")
            assert rows_of(query(connection, "from orders", isolated=True).to_batches()) == expected
            assert polywire.read_polars(server.address, "orders", table=True).height == len(expected)
