"""Readers of other projects over one table: each has the rows of the log, in the newest and in an older version.

``POLYWIRE_DUCKDB`` names a Python with ``duckdb``, ``duckdb-extension-delta``, ``duckdb-extension-iceberg`` and
``duckdb-extension-avro`` of the same version, and ``pytz``. ``POLYWIRE_S3_SERVER`` names the binary of versitygw.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import deltalake
import polars
import pyarrow as pa
import pytest
from pyiceberg.table import StaticTable

import polywire
from polywire.client.bulk import connect
from polywire.records.columns import Record
from polywire.store.url import open_bucket
from polywire.table_orders import ICEBERG_HINT, iceberg_metadata_name
from polywire.tables.delta_log import DeltaLog
from tests.broker_process import BrokerProcess
from tests.histories.tables import wait_for_records
from tests.s3_server import BUCKET, s3_server
from tests.unit.tables.tabled import configure, produce

DRIVER = Path(__file__).parent / "duckdb_tables.driver"
COLUMNS = ("partition", "offset", "key", "value")
ROUNDS = 20  # with a commit each, and more than are merged at once
ROUND_RECORDS = 50
KEYS = 37
SECONDS_MAX = 120.0

Row = tuple[object, ...]


@dataclass(frozen=True)
class Written:
    """A table that has all records of its topic.

    Attributes:
        url: as the broker reports it.
        rows: of the log, or the latest of each key.
        older: a version before the last, with its number of rows.
        is_latest: whether the topic is compacted.
    """

    url: str
    rows: list[Row]
    older: tuple[int, int]
    is_latest: bool

    @property
    def place(self) -> str:
        """The directory, or the URL in a bucket."""
        return unquote(urlsplit(self.url).path) if self.url.startswith("file:") else self.url


@contextmanager
def written(folder: Path, *options: str, is_latest: bool = False) -> Iterator[Written]:
    """Run a broker, produce in rounds, and wait for the table after each."""
    tables = ("--table", "delta,iceberg", "--table-freshness-s", "1")
    with BrokerProcess(folder / "data", *tables, *options, wires=["polywire"]) as broker:
        connection = connect(broker.url())
        connection.create_topic("orders", 3, {"compaction": int(is_latest)})
        url = connection.describe("orders").table
        versions: list[tuple[int, int]] = []
        for number in range(ROUNDS):
            with polywire.connect_sync(broker.url()) as client, client.producer() as producer:
                values = [None if at % 7 == 6 else f"{number} {at}".encode() for at in range(ROUND_RECORDS)]
                keys = [None if at % 5 == 0 else b"%d" % (at * (number + 1) % KEYS) for at in range(ROUND_RECORDS)]
                producer.send_many("orders", values, keys=keys)
            version = wait_for_records(url, (number + 1) * ROUND_RECORDS)
            rows = sorted_rows(polywire.read_arrow(broker.url(), "orders", columns=COLUMNS).to_pylist())
            if is_latest:
                rows = latest(rows)
            versions.append((version, len(rows)))
        wait_for_metadata(url)
    yield Written(url, rows, versions[ROUNDS // 2], is_latest)  # the broker does not run any more


def latest(rows: list[Row]) -> list[Row]:
    """Return the last row of each key of a partition, unless it is a tombstone, and rows without a key."""
    last = {(row[0], row[2]): row for row in rows}
    return [row for row in rows if row[2] is None or (last[row[0], row[2]] == row and row[3] is not None)]


def sorted_rows(rows: list[dict[str, Any]]) -> list[Row]:
    return sorted((tuple(row[name] for name in COLUMNS) for row in rows), key=lambda row: row[:2])


def metadata_of(url: str) -> str:
    objects = open_bucket(url)
    return f"{url}/{iceberg_metadata_name(int(objects.read(ICEBERG_HINT).content))}"


def wait_for_metadata(url: str) -> None:
    """Wait until the Iceberg metadata has the newest version of the Delta log."""
    objects = open_bucket(url)

    def is_current() -> bool:
        number = int(objects.read(ICEBERG_HINT).content)
        newest = json.loads(objects.read(iceberg_metadata_name(number)).content)["snapshots"][-1]
        return int(newest["summary"]["polywire.delta-version"]) == DeltaLog(objects).load().version

    wait_for(is_current)


def check(table: Written, environment: Mapping[str, str]) -> None:
    """Check what delta-rs, Polars and pyiceberg read."""
    options = dict(environment)
    newest = deltalake.DeltaTable(table.place, storage_options=options)
    assert sorted_rows(delta_rows(newest).to_pylist()) == table.rows
    if not table.is_latest:  # that method does not support deletion vectors
        assert sorted_rows(newest.to_pyarrow_table(columns=list(COLUMNS)).to_pylist()) == table.rows
    frame = polars.read_delta(table.place, columns=list(COLUMNS), storage_options=options)
    assert sorted_rows(frame.to_dicts()) == table.rows
    properties = {
        "s3.endpoint": options.get("AWS_ENDPOINT_URL", ""),
        "s3.access-key-id": options.get("AWS_ACCESS_KEY_ID", ""),
        "s3.secret-access-key": options.get("AWS_SECRET_ACCESS_KEY", ""),
        "s3.region": options.get("AWS_REGION", ""),
    }
    found = StaticTable.from_metadata(metadata_of(table.url), properties if options else {})
    assert sorted_rows(found.scan(selected_fields=COLUMNS).to_arrow().to_pylist()) == table.rows
    version, count = table.older
    older = deltalake.DeltaTable(table.place, version=version, storage_options=options)
    assert delta_rows(older).num_rows == count
    (snapshot,) = [
        item for item in found.snapshots() if item.summary and item.summary["polywire.delta-version"] == str(version)
    ]
    assert found.scan(snapshot_id=snapshot.snapshot_id, selected_fields=("offset",)).to_arrow().num_rows == count


def delta_rows(table: deltalake.DeltaTable) -> pa.Table:
    return pa.table(
        deltalake.QueryBuilder().register("t", table).execute('select partition, "offset", key, value from t')
    )


TYPED_COLUMNS = "id long, who string, total decimal(10,2), at timestamp, day date, ok boolean, f float, d double, i int"
TYPED_NAMES = ("partition", "offset", "_error", "id", "who", "total", "at", "day", "ok", "f", "d", "i", "later")
TYPED_VALUES = (
    b'{"id":1,"who":"\\u00e9","total":1.5,"at":"2026-11-27T03:00:00Z","day":"2026-11-27","ok":true,"f":0.5,"d":2,"i":3}',
    b'{"id":"x","who":{"n":[1]},"total":1.555}',
    None,
    b"no JSON",
    b'{"id":2,"later":7}',
)


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A table whose third commit adds a column, with rows from before it had typed columns."""
    folder = tmp_path_factory.mktemp("typed")
    tables = ("--table", "delta,iceberg", "--table-freshness-s", "1")
    with BrokerProcess(folder / "data", *tables, wires=["polywire"]) as broker:
        connection = connect(broker.url())
        connection.create_topic("orders", 3)
        url = connection.describe("orders").table
        versions: list[tuple[int, int]] = []
        settings = (("", ""), (TYPED_COLUMNS, "id"), (f"{TYPED_COLUMNS}, later long", "later"), ("infer", "later"))
        for number, (columns, last) in enumerate(settings):
            configure(broker.url(), "orders", columns)
            wait_for(partial(_has_column, url, last))
            for partition in range(3):
                produce(connection, "orders", partition, [Record(value) for value in TYPED_VALUES])
            versions.append((wait_for_records(url, 15 * (number + 1)), 15 * (number + 1)))
        wait_for(lambda: not _lacks_columns(url))
        rows = polywire.read_arrow(broker.url(), "orders", columns=TYPED_NAMES, table=True).to_pylist()
        wait_for_metadata(url)
    return Written(url, typed_rows(rows), versions[1], is_latest=False)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _has_column(url: str, name: str) -> bool:
    return not name or any(column.name == name for column in DeltaLog(open_bucket(url)).load().columns)


def _lacks_columns(url: str) -> bool:
    state = DeltaLog(open_bucket(url)).load()
    return any("later" not in file.nulls and not file.has_all_fields for file in state.files.values())


def typed_rows(rows: list[dict[str, Any]]) -> list[Row]:
    return sorted((tuple(row[name] for name in TYPED_NAMES) for row in rows), key=lambda row: row[:2])


def test_readers_agree_on_typed_columns(typed: Written) -> None:
    moment = datetime(2026, 11, 27, 3, tzinfo=UTC)
    first = (None, 1, "\u00e9", Decimal("1.50"), moment, date(2026, 11, 27), True, 0.5, 2.0, 3, None)
    wrong = 'id: expected long, found string "x"; total: expected decimal(10,2), found number 1.555'
    for at in range(0, 60, 5):
        assert typed.rows[at][2:] == first
        assert typed.rows[at + 1][2:] == (wrong, None, '{"n":[1]}', *[None] * 8)
        assert typed.rows[at + 4][-1] == 7
    newest = deltalake.DeltaTable(typed.place)
    assert typed_rows(newest.to_pyarrow_table(columns=list(TYPED_NAMES)).to_pylist()) == typed.rows
    assert typed_rows(polars.read_delta(typed.place, columns=list(TYPED_NAMES)).to_dicts()) == typed.rows
    found = StaticTable.from_metadata(metadata_of(typed.url))
    assert typed_rows(found.scan(selected_fields=TYPED_NAMES).to_arrow().to_pylist()) == typed.rows
    assert found.scan(row_filter="later = 7").to_arrow().num_rows == 12
    version, count = typed.older
    older = deltalake.DeltaTable(typed.place, version=version).to_pyarrow_table()
    assert (older.num_rows, "id" in older.column_names, "later" in older.column_names) == (count, True, False)
    (snapshot,) = [
        item for item in found.snapshots() if item.summary and item.summary["polywire.delta-version"] == str(version)
    ]
    old = found.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
    assert (old.num_rows, "id" in old.column_names, "later" in old.column_names) == (count, True, False)


def test_duckdb_agrees_on_typed_columns(typed: Written) -> None:
    columns = '"_error", id, who, total::text, epoch_us("at"), day::text, ok, f, d, i, later'
    for rows in duckdb_rows(typed, columns).values():
        assert sorted(rows, key=lambda row: row[:2]) == [_plain(row) for row in typed.rows]


def _plain(row: Row) -> list[object]:
    total, moment, day = row[5:8]
    time_us = (
        (moment - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1) if isinstance(moment, datetime) else None
    )
    return [*row[:5], total and str(total), time_us, day and str(day), *row[8:]]


@pytest.fixture(scope="module", params=[False, True], ids=["all records", "latest records"])
def on_a_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    with written(tmp_path_factory.mktemp("table"), is_latest=request.param) as table:
        yield table


def test_readers_agree_on_a_directory(on_a_directory: Written) -> None:
    check(on_a_directory, {})


@pytest.mark.parametrize("is_latest", [False, True])
def test_readers_agree_on_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_latest: bool) -> None:
    with s3_server(tmp_path / "s3") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with written(tmp_path, "--bucket", f"s3://{BUCKET}/log", is_latest=is_latest) as table:
            check(table, environment)


def test_duckdb_agrees(on_a_directory: Written) -> None:
    expected = [[*row[:2], *(_text(item) for item in row[2:])] for row in on_a_directory.rows]
    found = duckdb_rows(on_a_directory, "decode(key), decode(value)")
    assert sorted(found["delta"]) == expected
    assert sorted(found["iceberg"]) == expected


def duckdb_rows(table: Written, columns: str) -> dict[str, list[list[Any]]]:
    """Return partition, offset and the columns of each row, by extension."""
    python = os.environ.get("POLYWIRE_DUCKDB")
    if not python:
        pytest.skip("POLYWIRE_DUCKDB is not set: tables were NOT read with DuckDB's extensions")
    command = [python, str(DRIVER), table.place, columns]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[list[Any]]] = json.loads(ended.stdout)
    return found


def _text(item: object) -> str | None:
    return item.decode() if isinstance(item, bytes) else None
