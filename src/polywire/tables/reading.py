"""Read the table of a topic, followed by the records that only the log has.

* A snapshot is one version of the table and, for each partition, the range of the log after it. Together they have
  each record once, up to the synced end of the log when the snapshot was taken.
* A range names the incarnation of its partition, so a topic that was deleted and created again is never mistaken for
  the old one.
* Files that a later version does not have are deleted after ``table_history_hours``, so take a snapshot for each query.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from polywire.client.arrow import chunk_to_arrow
from polywire.client.bulk import BulkConnection, PartitionRange, TopicDetail, connect
from polywire.errors import Conflict, ErrorCode, Invalid, Unavailable
from polywire.store.base import BlobMissing
from polywire.store.objects import Objects
from polywire.store.url import FILE, open_bucket
from polywire.table_columns import TypedColumn, plan_columns
from polywire.tables.columns import ARROW_SCHEMA, OFFSET, READ_NAMES, STATISTICS, VALUE, arrow_schema, conformed
from polywire.tables.delta_log import NEW, DeltaLog, PartitionKey, TableState
from polywire.tables.typed import ColumnMaker

SNAPSHOT_TRIES: Final = 3  # a topic can be deleted and created again while its snapshot is taken
BATCH_ROWS: Final = 50_000
BUFFER_BYTES: Final = 1 << 20
OBJECT_TIMEOUT_S: Final = 60.0  # longest wait for one request to a bucket
OUTDATED: Final = frozenset(
    {ErrorCode.STORAGE_FAILED, ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.TOPIC_REPLACED, ErrorCode.EPOCH_ENDED}
)
"""Codes of errors after which a new snapshot may succeed: files or records were deleted, or the topic was replaced."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """Records of one partition that the table does not have: from ``offset`` to ``offset_end`` (exclusive).

    It is empty if the table has them all.
    """

    partition: int
    incarnation: int
    epoch: int
    offset: int
    offset_end: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All records of a topic at one point in time.

    Attributes:
        topic: full name.
        url: URL of the table; empty if the topic has none.
        version: version of the table; NEW if it has none.
        files: names of its files, relative to ``url``.
        row_count: number of rows in the files.
        ranges: the log after the table, for each partition.
        columns: typed columns, ``_error`` first.
        active: those that are made from values of the log.
        present: names of all columns that at least one file has.
    """

    topic: str
    url: str
    version: int
    files: tuple[str, ...]
    row_count: int
    ranges: tuple[LogRange, ...]
    columns: tuple[TypedColumn, ...] = ()
    active: tuple[TypedColumn, ...] = ()
    present: frozenset[str] = frozenset()

    @property
    def schema(self) -> pa.Schema:
        """All columns."""
        return arrow_schema(self.columns)

    def schema_of(self, columns: Sequence[str]) -> pa.Schema:
        """Return the schema of these columns. Raises Invalid for an unknown one."""
        schema = self.schema
        unknown = [name for name in columns if name not in schema.names]
        if unknown or not columns:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"unknown or no columns unknown={','.join(unknown)} known={','.join(schema.names)}",
            )
        return pa.schema([schema.field(name) for name in columns])

    @property
    def tail(self) -> list[LogRange]:
        """The ranges that have records."""
        return [part for part in self.ranges if part.offset < part.offset_end]

    @property
    def is_local(self) -> bool:
        """Whether the files are in a directory of this machine."""
        return urlsplit(self.url).scheme == FILE

    @property
    def paths(self) -> list[str]:
        """Absolute paths of the files, or their URLs if they are in a bucket."""
        root = str(_directory(self.url)) if self.is_local else self.url.rstrip("/")
        return [f"{root}/{name}" for name in self.files]


def snapshot(broker: BulkConnection | str, topic: str, *, required: bool = True) -> Snapshot:
    """Return the newest version of a topic's table, and the ranges of the log after it.

    Args:
        broker: connection or address of the `polywire` protocol.
        topic: full name.
        required: whether a topic without a table is an error. Otherwise the whole log is the tail.

    Raises:
        Invalid: the topic has no table, or the client may not get the path of its files.
        Missing: TOPIC_MISSING.
        Unavailable: the files or the broker cannot be reached.
        Conflict: TOPIC_REPLACED: the topic was deleted and created again several times.
    """
    connection = connect(broker) if isinstance(broker, str) else broker
    for _ in range(SNAPSHOT_TRIES):
        detail = connection.describe(topic)
        if required and not detail.table:
            raise _no_table(topic)
        state = _load(topic, detail.table) if detail.table else TableState()
        partitions = connection.bounds([topic])
        if all(partition.topic_id == detail.id for partition in partitions):
            return _joined(detail, state, partitions)
    raise Conflict(ErrorCode.TOPIC_REPLACED, f"topic was deleted and created again: read it again topic={topic!r}")


def _no_table(topic: str) -> Invalid:
    return Invalid(
        ErrorCode.INVALID_REQUEST,
        "topic has no table, or this client may not get the path of its files "
        f"(turn it on with: polywire topic alter {topic} --table delta) topic={topic!r}",
    )


def _load(topic: str, url: str) -> TableState:
    try:
        return DeltaLog(open_objects(url)).load()
    except Unavailable as error:
        raise Unavailable(
            ErrorCode.STORAGE_FAILED, f"table cannot be read: {error.message} topic={topic!r} table={url}"
        ) from error


def _joined(detail: TopicDetail, state: TableState, partitions: Sequence[PartitionRange]) -> Snapshot:
    if state.version == NEW:
        _check_reachable(detail, partitions)
    if state.topic_id != detail.id:  # its rows are of a deleted topic
        state = TableState(version=state.version)
    known, files = state.offsets, state.files
    plan = plan_columns(state.columns, str(detail.settings.get("table_columns") or "") if detail.table else "")
    ranges = []
    for found in partitions:
        offset = known.get(PartitionKey(found.topic_id, found.partition, found.incarnation), 0)
        offset = max(offset, found.first_offset)
        ranges.append(LogRange(found.partition, found.incarnation, found.epoch, offset, max(offset, found.next_offset)))
    row_count = sum(file.row_count for file in files.values())
    return Snapshot(
        topic=detail.name,
        url=detail.table,
        version=state.version,
        files=tuple(files),
        row_count=row_count,
        ranges=tuple(ranges),
        columns=plan.columns,
        active=plan.active,
        present=frozenset(name for file in files.values() for name in file.nulls),
    )


def _check_reachable(detail: TopicDetail, partitions: Sequence[PartitionRange]) -> None:
    """Raise Unavailable if the directory of a table is missing here and the log no longer has all records.

    A directory is missing before the table's first commit, or because the broker runs on another machine.
    """
    is_deleted = any(partition.first_offset for partition in partitions)
    if is_deleted and urlsplit(detail.table).scheme == FILE and not os.path.isdir(_directory(detail.table)):
        raise Unavailable(
            ErrorCode.STORAGE_FAILED,
            "directory of the table does not exist on this machine: wait for its first commit, run on the broker's "
            f"machine, or write tables to a bucket with --tables-url topic={detail.name!r} table={detail.table}",
        )


def _directory(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def open_objects(url: str) -> Objects:
    """Return the files of a table. Raises Invalid."""
    return open_bucket(url, timeout_s=OBJECT_TIMEOUT_S, make=False)


# Rows


def scan_files(
    found: Snapshot, columns: Sequence[str] | None = None, where: pc.Expression | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the table's files, file by file. Columns that a file does not have are null.

    Args:
        found: the snapshot.
        columns: columns of the table, at least one; None for all.
        where: condition on partition, offset and timestamp. Row groups of local files without such rows are skipped.

    Raises:
        Invalid: a column is unknown.
        Unavailable: STORAGE_FAILED: a file was deleted since the snapshot was taken, or cannot be read.
    """
    schema = found.schema if columns is None else found.schema_of(columns)
    try:
        yield from _file_rows(found, schema, where)
    except FileNotFoundError as error:
        raise removed(found, error) from error
    except BlobMissing as error:
        raise removed(found, error) from error
    except OSError as error:
        raise Unavailable(
            ErrorCode.STORAGE_FAILED, f"table cannot be read: {error} topic={found.topic!r} table={found.url}"
        ) from error


def removed(found: Snapshot, error: Exception) -> Unavailable:
    """Return the error for a file that was deleted since a snapshot was taken."""
    return Unavailable(
        ErrorCode.STORAGE_FAILED,
        "a file of the table was deleted while it was read: read it again, or raise table_history_hours "
        f"topic={found.topic!r} version={found.version} reason={str(error)!r}",
    )


def _file_rows(found: Snapshot, schema: pa.Schema, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
    objects = open_objects(found.url) if found.files and not found.is_local else None
    for name, path in zip(found.files, found.paths, strict=True):
        source: Any = path if objects is None else _ObjectFile(objects, name)
        # Buffering a few MiB of each column takes a tenth of the memory of reading whole row groups.
        buffering: dict[str, Any] = {"pre_buffer": False, "buffer_size": BUFFER_BYTES} if objects is None else {}
        groups = _row_groups(path, where) if objects is None and where is not None else None
        with pq.ParquetFile(source, **buffering) as file:
            names = _read_columns(found, schema, where)
            if not any(name in file.schema_arrow.names for name in names):
                names.append(OFFSET)  # for the number of rows
            for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=names):
                yield from _chosen(batch, schema, where)


def _row_groups(path: str, where: pc.Expression) -> list[int]:
    """Return the row groups that may have rows for which a condition holds, according to their statistics."""
    fragment: Any = ds.ParquetFileFormat().make_fragment(path, LocalFileSystem())
    return [group.id for group in fragment.subset(where, schema=ARROW_SCHEMA).row_groups]


def scan_tail(
    connection: BulkConnection,
    found: Snapshot,
    columns: Sequence[str] | None = None,
    where: pc.Expression | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the records that only the log has, with the columns of the table: partition by partition, in offset order.

    Raises:
        Invalid: a column is unknown.
        Missing: OFFSET_OUT_OF_RANGE: records were deleted since the snapshot was taken.
        Conflict: the topic was replaced, or records were lost.
        Unavailable: no broker responded.
    """
    schema = found.schema if columns is None else found.schema_of(columns)
    names = _read_columns(found, schema, where)
    typed = ColumnMaker(found.active, names) if any(name not in ARROW_SCHEMA.names for name in names) else None
    fixed = [name for name in ARROW_SCHEMA.names if name in names or (name == VALUE and typed is not None)]
    source_schema = pa.schema([ARROW_SCHEMA.field(name) for name in fixed])
    source_columns = [READ_NAMES.get(name, name) for name in fixed]
    for wanted in found.tail:
        chunks = connection.fetch_range(
            found.topic,
            wanted.partition,
            wanted.incarnation,
            wanted.offset,
            wanted.offset_end,
            epoch=wanted.epoch,
        )
        for chunk in chunks:
            for batch in chunk_to_arrow(chunk, source_columns, source_schema):
                yield from _chosen(batch if typed is None else typed.added(batch), schema, where)


def _read_columns(found: Snapshot, schema: pa.Schema, where: pc.Expression | None) -> list[str]:
    """Return the columns to read, with those that a condition may need."""
    wanted = {*schema.names, *(STATISTICS if where is not None else ())}
    return [name for name in found.schema.names if name in wanted]


def _chosen(batch: pa.RecordBatch, schema: pa.Schema, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
    for part in [batch] if where is None else pa.Table.from_batches([batch]).filter(where).to_batches():
        if part.num_rows:
            yield conformed(part, schema)


class _ObjectFile(io.RawIOBase):
    """A readable file over an object of a bucket. Each read is one request."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects: Final = objects
        self._name: Final = name
        self._size: Final = objects.size(name)
        self._at = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        content = self._objects.read_range(self._name, self._at, stop) if stop > self._at else b""
        self._at += len(content)
        return content
