"""Topics with tables, and their records as a client reads them from the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import polywire
from polywire.client.bulk import BulkConnection, connect
from polywire.client.connect import connect as connect_wire
from polywire.client.polywire import PolywireClient
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.store.objects import Objects
from polywire.tables.delta_log import CommitConflict
from polywire.tables.reading import Snapshot, open_objects, scan_files, scan_tail
from polywire.tables.writer import TopicTable

Row = tuple[Any, ...]


def table_of(connection: BulkConnection, topic: str, objects: Objects | None = None) -> TopicTable:
    """Return the writer of a topic's table."""
    detail = connection.describe(topic)
    columns, is_latest = str(detail.settings["table_columns"]), bool(detail.settings["compaction"])
    found = objects or open_objects(detail.table)
    return TopicTable(topic, found, connection, pause=lambda _: None, columns=columns, is_latest=is_latest)


def write_table(connection: BulkConnection, topic: str, objects: Objects | None = None) -> TopicTable:
    """Bring the table of a topic up to the end of its log. The broker may write it at the same time."""
    table = table_of(connection, topic, objects)
    while True:
        try:
            if not table.append().behind:
                return table
        except CommitConflict:
            table = table_of(connection, topic, objects)


def configure(address: str, topic: str, columns: str) -> None:
    """Set the typed columns of a topic's table."""

    async def work() -> None:
        client = await connect_wire(address)
        assert isinstance(client, PolywireClient)
        await client.configure_topic(topic, {"table_columns": columns})
        await client.close()

    asyncio.run(work())


def produce(connection: BulkConnection, topic: str, partition: int, records: Sequence[Record]) -> None:
    connection.produce(topic, partition, [from_records(records)])


def rows_of_log(address: str, topic: str) -> list[Row]:
    """Return what a client reads: partition, offset, time, key, value and headers, in this order."""
    rows: list[Row] = []
    with polywire.connect_sync(address) as client:
        for bounds in client.bounds(topic):
            offset = bounds.first_offset
            while records := client.fetch(topic, bounds.partition, offset):
                rows += [_row(record) for record in records]
                offset = records[-1].offset + 1
    return rows


def latest_of(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that the table of a compacted topic has: the latest of each key, without deleted keys."""
    last = {(row[0], row[3]): row[1] for row in rows}
    return [row for row in rows if row[3] is None or (last[row[0], row[3]] == row[1] and row[4] is not None)]


def _row(record: polywire.Record) -> Row:
    headers = [(name, str(value).encode()) for name, value in record.headers.items()] or None
    return record.partition, record.offset, record.time, record.key, record.value, headers


def rows_of(batches: Any) -> list[Row]:
    """Return the rows of record batches or of a table, sorted by partition and offset, in the same form."""
    found = [row for batch in batches for row in batch.to_pylist()]
    return sorted(
        (
            (
                row["partition"],
                row["offset"],
                row["timestamp"],
                row["key"],
                row["value"],
                row["headers"] and [(pair["key"], pair["value"]) for pair in row["headers"]],
            )
            for row in found
        ),
        key=lambda row: row[:2],
    )


def rows_of_snapshot(address: str, found: Snapshot) -> list[Row]:
    return rows_of([*scan_files(found), *scan_tail(connect(address), found)])


READER_NAMES = (
    *("row", "ROW_INDEX", "file", "path", "first_row", "age", "topic", "files", "deleted", "index"),
    *("filename", "_metadata", "file_name", "timestampType", "a`b", "*", "polywire=row"),
)
"""Names of fields that readers of tables use, or may use, for something else."""


def fill_named(connection: BulkConnection, topic: str, names: Sequence[str], *, has_tail: bool) -> list[Row]:
    """Write a compacted topic, with a column for each name, and return the values of the columns in its table."""
    settings: dict[str, int | str | None] = {"table": "delta", "compaction": 1, "table_columns": "infer"}
    connection.create_topic(topic, 1, settings)
    latest: dict[int, Row] = {}
    for keys in ((0, 1, 2, 3, 4, 5), (0, 1), (2, 5)):
        rows = {key: tuple(100 * len(keys) + 10 * key + at for at in range(len(names))) for key in keys}
        values = {key: json.dumps(dict(zip(names, row, strict=True))).encode() for key, row in rows.items()}
        produce(connection, topic, 0, [Record(value, key=b"%d" % key) for key, value in values.items()])
        latest |= rows
        if not has_tail or len(keys) > 2 or 0 in keys:
            write_table(connection, topic)
    return sorted(latest.values())
