"""A table and the log after it have each record once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc
import pytest

from polywire.broker.settings import BrokerSettings
from polywire.client.bulk import BulkConnection, connect
from polywire.client.connect import connect as connect_wire
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode, Invalid, Missing, Unavailable
from polywire.records.columns import Header, HeaderKind, Record
from polywire.store.file_objects import FileObjects
from polywire.tables import reading
from polywire.tables.delta_log import DeltaLog, TableState
from polywire.tables.frames import read_arrow, read_polars, scan, scan_polars
from polywire.tables.reading import Snapshot, scan_files, scan_tail, snapshot
from tests.unit.client.served import Served
from tests.unit.tables.rig import merge
from tests.unit.tables.tabled import produce, rows_of_log, rows_of_snapshot, write_table

BY_OFFSET: list[tuple[str, Literal["ascending", "descending"]]] = [("partition", "ascending"), ("offset", "ascending")]


def records(first: int, count: int) -> list[Record]:
    """Return records with and without key, headers and value."""
    header = Header(b"n", b"1", value_kind=HeaderKind.STRING)
    return [
        Record(
            None if number % 5 == 4 else b"value %d" % number,
            key=None if number % 3 == 2 else b"key %d" % number,
            headers=(header,) if number % 2 else (),
        )
        for number in range(first, first + count)
    ]


def fill(connection: BulkConnection, first: int, *, partitions: tuple[int, ...] = (0, 1, 2), count: int = 20) -> None:
    for partition in partitions:
        produce(connection, "orders", partition, records(first, count))


@pytest.mark.parametrize(
    ("in_table", "in_tail"), [((), ()), ((0, 1, 2), ()), ((), (0, 2)), ((0, 1), (1, 2)), ((0, 1, 2), (0, 1, 2))]
)
def test_table_and_tail_have_each_record_once(
    tabled: Served, connection: BulkConnection, in_table: tuple[int, ...], in_tail: tuple[int, ...]
) -> None:
    fill(connection, 0, partitions=in_table)
    write_table(connection, "orders")
    fill(connection, 100, partitions=in_tail)
    found = snapshot(tabled.address, "orders")
    assert (bool(found.files), found.row_count) == (bool(in_table), 20 * len(in_table))
    assert [part.partition for part in found.tail] == list(in_tail)
    assert rows_of_snapshot(tabled.address, found) == rows_of_log(tabled.address, "orders")


def test_a_table_before_its_first_commit_is_all_tail(tabled: Served, connection: BulkConnection) -> None:
    fill(connection, 0)
    found = snapshot(tabled.address, "orders")
    assert (found.files, found.row_count) == ((), 0)
    assert rows_of_snapshot(tabled.address, found) == rows_of_log(tabled.address, "orders")


def test_a_new_partition_is_all_tail(tabled: Served, connection: BulkConnection) -> None:
    fill(connection, 0)
    write_table(connection, "orders")

    async def grow() -> None:
        client = await connect_wire(tabled.address)
        assert isinstance(client, PolywireClient)
        await client.grow_topic("orders", 5)
        await client.close()

    asyncio.run(grow())
    produce(connection, "orders", 4, records(0, 3))
    found = snapshot(connection, "orders")
    assert [(part.partition, part.offset, part.offset_end) for part in found.tail] == [(4, 0, 3)]
    assert rows_of_snapshot(tabled.address, found) == rows_of_log(tabled.address, "orders")


@pytest.mark.parametrize("is_written_again", [False, True])
def test_rows_of_a_deleted_topic_are_not_read(
    tabled: Served, connection: BulkConnection, is_written_again: bool
) -> None:
    fill(connection, 0)
    write_table(connection, "orders")
    connection.delete_topic("orders")
    connection.create_topic("orders", 3, {"table": "delta"})
    fill(connection, 500, count=30)
    if is_written_again:
        write_table(connection, "orders")
        fill(connection, 900, count=1)
    found = snapshot(connection, "orders")
    assert bool(found.files) is is_written_again
    rows = rows_of_snapshot(tabled.address, found)
    assert len(rows) == 3 * (31 if is_written_again else 30)
    assert rows == rows_of_log(tabled.address, "orders")


def test_a_snapshot_does_not_change_while_records_arrive(tabled: Served, connection: BulkConnection) -> None:
    fill(connection, 0)
    write_table(connection, "orders")
    fill(connection, 100)
    found = snapshot(connection, "orders")
    expected = rows_of_log(tabled.address, "orders")
    fill(connection, 200)
    write_table(connection, "orders")
    assert rows_of_snapshot(tabled.address, found) == expected


def test_a_commit_between_table_and_log_changes_nothing(
    tabled: Served, connection: BulkConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(connection, 0)
    write_table(connection, "orders")
    load = DeltaLog.load

    def load_before_a_commit(log: DeltaLog) -> TableState:
        state = load(log)
        monkeypatch.setattr(DeltaLog, "load", load)
        fill(connection, 100)
        write_table(connection, "orders")
        fill(connection, 200)
        return state

    monkeypatch.setattr(DeltaLog, "load", load_before_a_commit)
    found = snapshot(connection, "orders")
    assert found.row_count == 60
    assert rows_of_snapshot(tabled.address, found) == rows_of_log(tabled.address, "orders")


def test_conditions_and_columns_apply_to_files_and_tail(tabled: Served, connection: BulkConnection) -> None:
    fill(connection, 0)
    write_table(connection, "orders")
    fill(connection, 100)
    found = snapshot(connection, "orders")
    where = (pc.field("partition") == 1) & (pc.field("offset") >= 15) & (pc.field("offset") < 25)
    for batches in (scan_files(found, ["value"], where), scan_tail(connection, found, ["value"], where)):
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert [set(row) for row in rows] == [{"value"}] * 5


def test_a_deleted_file_is_a_retryable_error(tabled: Served, connection: BulkConnection) -> None:
    found = deleted_files(connection)
    with pytest.raises(Unavailable, match="deleted while it was read") as raised:
        list(scan_files(found))
    assert raised.value.code is ErrorCode.STORAGE_FAILED


def deleted_files(connection: BulkConnection) -> Snapshot:
    """Return a snapshot whose files were merged and then deleted."""
    for number in range(20):
        fill(connection, number, count=2)
        table = write_table(connection, "orders")
    found = snapshot(connection, "orders")
    assert merge(table)
    table.vacuum(-60_000)
    return found


def test_arrow_tables_are_read_again_after_a_file_was_deleted(
    tabled: Served, connection: BulkConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    outdated = deleted_files(connection)
    found = iter([outdated, snapshot(connection, "orders")])
    monkeypatch.setattr("polywire.tables.frames.snapshot", lambda *_: next(found))
    assert read_arrow(tabled.address, "orders", table=True).num_rows == 120
    found = iter([outdated, outdated])
    with pytest.raises(Unavailable, match="deleted while it was read"):
        read_arrow(tabled.address, "orders", table=True)


def test_frames_of_a_table_have_the_rows_of_the_log(tabled: Served, connection: BulkConnection) -> None:
    fill(connection, 0)
    write_table(connection, "orders")
    fill(connection, 100)
    address = tabled.address
    middle = read_arrow(address, "orders")["timestamp"][70].as_py()
    everything: list[dict[str, Any]] = [
        {},
        {"start": 5, "end": 30},
        {"start": "latest"},
        {"end": "earliest"},
        {"text": True},
        {"start": middle},
        {"end": middle, "text": True},
    ]
    for options in everything:
        expected = read_arrow(address, "orders", **options).sort_by(BY_OFFSET)
        assert read_arrow(address, "orders", table=True, **options).sort_by(BY_OFFSET) == expected, options
        frame = read_polars(address, "orders", table=True, **options).sort("partition", "offset")
        lazy = scan_polars(address, "orders", table=True, **options).collect().sort("partition", "offset")
        assert frame.to_arrow().cast(expected.schema) == expected
        assert lazy.equals(frame)
    topics = read_arrow(address, "orders", table=True, columns=["topic"])
    assert topics.column("topic").to_pylist() == ["orders"] * 120


def test_a_table_in_a_bucket_is_read_through_its_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = FileObjects(tmp_path)
    monkeypatch.setattr(reading, "open_objects", lambda _: objects)
    with Served(BrokerSettings(tables_url="s3://bucket/tables")) as server:
        connection = connect(server.address)
        connection.create_topic("orders", 3, {"table": "delta"})
        fill(connection, 0)
        write_table(connection, "orders", objects)
        fill(connection, 100)
        found = snapshot(connection, "orders")
        assert not found.is_local
        assert found.paths[0].startswith("s3://bucket/tables/default/orders/data/")
        assert rows_of_snapshot(server.address, found) == rows_of_log(server.address, "orders")
        expected = read_arrow(server.address, "orders", start=10).sort_by(BY_OFFSET)
        assert read_arrow(server.address, "orders", table=True, start=10).sort_by(BY_OFFSET) == expected
        lazy = scan_polars(server.address, "orders", table=True, start=10).select("value")
        assert lazy.collect().height == expected.num_rows
        (tmp_path / found.files[0].path).unlink()
        with pytest.raises(Unavailable, match="deleted while it was read"):
            list(scan_files(found))


def test_errors_name_the_setting(tabled: Served, connection: BulkConnection, tmp_path: Path) -> None:
    connection.create_topic("plain", 1, {"table": None})
    with pytest.raises(Invalid, match="polywire topic alter plain --table delta"):
        snapshot(connection, "plain")
    assert snapshot(connection, "plain", required=False).url == ""
    with pytest.raises(Invalid, match="has no table"):
        list(scan(tabled.address, "plain", table=True))
    with pytest.raises(Missing):
        snapshot(connection, "missing")


def test_a_directory_of_another_machine_is_not_mistaken_for_an_empty_table(
    tabled: Served, connection: BulkConnection
) -> None:
    fill(connection, 0)
    assert len(snapshot(connection, "orders").tail) == 3

    async def purge() -> None:
        client = await connect_wire(tabled.address)
        assert isinstance(client, PolywireClient)
        await client.purge_topic("orders")
        await client.close()

    asyncio.run(purge())
    with pytest.raises(Unavailable, match="--tables-url"):
        snapshot(connection, "orders")
    write_table(connection, "orders")
    fill(connection, 100)
    found = snapshot(connection, "orders")
    assert rows_of_snapshot(tabled.address, found) == rows_of_log(tabled.address, "orders")


def test_a_damaged_or_unreadable_table_is_reported(
    tabled: Served, connection: BulkConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Unavailable(ErrorCode.STORAGE_FAILED, "cannot read object: Permission denied")

    monkeypatch.setattr(FileObjects, "read", fail)
    with pytest.raises(Unavailable, match=r"table cannot be read: .*Permission denied topic='orders' table=file:"):
        snapshot(connection, "orders")
