"""Read the table of a topic, followed by the records that only the log has.

* A snapshot is one version of the table and, for each partition, the range of the log after it. Together they have each
  record once, up to the synced end of the log when the snapshot was taken.
* A range names the incarnation of its partition, so a topic that was deleted and created again is never mistaken for
  the old one.
* Files that later versions do not need are deleted after ``table_history_hours``, so take a snapshot for each query.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
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
from polywire.tables import deletion_vectors, latest
from polywire.tables.columns import (
    ARROW_SCHEMA,
    KEY,
    OFFSET,
    PARTITION,
    READ_NAMES,
    STATISTICS,
    VALUE,
    arrow_schema,
    conformed,
)
from polywire.tables.delta_log import NEW, DataFile, DeltaLog, PartitionKey, TableState
from polywire.tables.parquet import ObjectFile
from polywire.tables.typed import ColumnMaker

if TYPE_CHECKING:
    from pyroaring import BitMap

SNAPSHOT_TRIES: Final = 3  # a topic can be deleted and created again while its snapshot is taken
BATCH_ROWS: Final = 50_000
BUFFER_BYTES: Final = 1 << 20
OBJECT_TIMEOUT_S: Final = 60.0  # longest wait for one request to a bucket
OUTDATED: Final = frozenset(
    {ErrorCode.STORAGE_FAILED, ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.TOPIC_REPLACED, ErrorCode.EPOCH_ENDED}
)
"""Codes of errors after which a new snapshot may succeed: files or records were deleted, or the topic was replaced."""

# Queries join these columns with those of the table. No typed column has a name with "=".
PATH: Final = "polywire=path"
ROW: Final = "polywire=row"
FIRST_ROW: Final = "polywire=first_row"
_DELETED: Final = pa.schema(
    [(PATH, pa.dictionary(pa.int32(), pa.string())), (ROW, pa.int64()), (FIRST_ROW, pa.int64())]
)


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
        files: its files.
        is_latest: whether only the latest record of each key has a row.
        row_count: number of rows in the files.
        ranges: the log after the table, for each partition.
        columns: typed columns, ``_error`` first.
        active: typed columns that are made from values of the log.
        present: names of all columns that at least one file has.
    """

    topic: str
    url: str
    version: int
    files: tuple[DataFile, ...]
    is_latest: bool
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
        return [f"{root}/{file.path}" for file in self.files]

    @property
    def has_deleted(self) -> bool:
        """Whether files have rows that the table does not have any more."""
        return any(file.deleted is not None for file in self.files)


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
    is_latest = state.is_latest
    if state.topic_id != detail.id:  # there is no table yet, or one of a deleted topic with the same name
        state = TableState(version=state.version)
        is_latest = bool(detail.table) and bool(detail.settings.get("compaction"))
    plan = plan_columns(state.columns, str(detail.settings.get("table_columns") or "") if detail.table else "")
    ranges = []
    for found in partitions:
        offset = state.offsets.get(PartitionKey(found.topic_id, found.partition, found.incarnation), 0)
        offset = max(offset, found.first_offset)
        ranges.append(LogRange(found.partition, found.incarnation, found.epoch, offset, max(offset, found.next_offset)))
    return Snapshot(
        topic=detail.name,
        url=detail.table,
        version=state.version,
        files=tuple(state.files.values()),
        is_latest=is_latest,
        row_count=state.row_count,
        ranges=tuple(ranges),
        columns=plan.columns,
        active=plan.active,
        present=frozenset(name for file in state.files.values() for name in file.nulls),
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
    found: Snapshot,
    columns: Sequence[str] | None = None,
    where: pc.Expression | None = None,
    *,
    newest: pa.Table | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the table's files, file by file. Columns that a file does not have are null.

    Args:
        found: the snapshot.
        columns: columns of the table, at least one; None for all.
        where: condition on partition, offset and timestamp. Row groups of local files without such rows are skipped.
        newest: what ``newest_of_tail`` returned. Rows with these keys are not returned.

    Raises:
        Invalid: a column is unknown.
        Unavailable: STORAGE_FAILED: a file was deleted since the snapshot was taken, or cannot be read.
        Corrupt: a deletion vector cannot be read.
    """
    schema = found.schema if columns is None else found.schema_of(columns)
    keys = {} if newest is None else latest.by_partition(newest, KEY)
    try:
        yield from _file_rows(found, schema, where, keys)
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


def _file_rows(
    found: Snapshot, schema: pa.Schema, where: pc.Expression | None, keys: latest.ByPartition
) -> Iterator[pa.RecordBatch]:
    if not found.files:
        return
    objects = open_objects(found.url)
    wanted = _read_columns(found, schema, where, (PARTITION, KEY) if keys else ())
    for file, path in zip(found.files, found.paths, strict=True):
        source: Any = path if found.is_local else ObjectFile(objects, file.path)
        # Buffering a few MiB of each column takes a tenth of the memory of reading whole row groups.
        buffering: dict[str, Any] = {"pre_buffer": False, "buffer_size": BUFFER_BYTES} if found.is_local else {}
        groups = _row_groups(path, where) if found.is_local and where is not None else None
        with pq.ParquetFile(source, **buffering) as opened:
            names = [name for name in wanted if name in opened.schema_arrow.names] or [OFFSET]  # to count rows
            if file.deleted is None:
                batches = opened.iter_batches(BATCH_ROWS, row_groups=groups, columns=names)
            else:
                deleted = deletion_vectors.read(objects, file.deleted)
                batches = _remaining(opened, groups, names, deleted)
            for batch in batches:
                rest = batch.filter(pc.invert(latest.has_key(batch, keys))) if keys else batch
                yield from _chosen(rest, schema, where)


def _remaining(
    opened: pq.ParquetFile, groups: Sequence[int] | None, columns: list[str], deleted: BitMap
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of some row groups, or of all, without those that are deleted."""
    first = 0
    for group in range(opened.num_row_groups):
        stop = first + opened.metadata.row_group(group).num_rows
        if groups is None or group in groups:
            for batch in opened.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
                yield deletion_vectors.remaining(batch, first, deleted)
                first += batch.num_rows
        first = stop


def _row_groups(path: str, where: pc.Expression) -> list[int]:
    """Return the row groups that may have rows for which a condition holds, according to their statistics."""
    fragment: Any = ds.ParquetFileFormat().make_fragment(path, LocalFileSystem())
    return [group.id for group in fragment.subset(where, schema=ARROW_SCHEMA).row_groups]


def deleted_rows(found: Snapshot) -> pa.Table:
    """Return the deleted rows of the files: path, number in the file, and number of the file's first row among all.

    Raises:
        Unavailable: STORAGE_FAILED: a deletion vector was deleted since the snapshot was taken, or cannot be read.
        Corrupt: a deletion vector cannot be read.
    """
    objects, parts, first_row = open_objects(found.url), [_DELETED.empty_table()], 0
    for file, path in zip(found.files, found.paths, strict=True):
        if file.deleted is not None:
            try:
                rows = pa.array(deletion_vectors.read(objects, file.deleted).to_array(), pa.int64())
            except BlobMissing as error:
                raise removed(found, error) from error
            paths, firsts = pa.array([path]).dictionary_encode(), pa.array([first_row], pa.int64())
            first = pa.repeat(0, len(rows))
            parts.append(pa.table([paths.take(first), rows, firsts.take(first)], schema=_DELETED))
        first_row += file.row_count
    return pa.concat_tables(parts).unify_dictionaries()


def newest_of_tail(connection: BulkConnection, found: Snapshot) -> pa.Table | None:
    """Return the partition, key and offset of the latest record of each key that only the log has.

    It is None if the table has a row for every record, or has all records already. Raises the same errors as ``scan_tail``.
    """
    if not (found.is_latest and found.tail):
        return None
    return latest.newest(scan_tail(connection, found, [PARTITION, KEY, OFFSET]))


def scan_tail(
    connection: BulkConnection,
    found: Snapshot,
    columns: Sequence[str] | None = None,
    where: pc.Expression | None = None,
    *,
    newest: pa.Table | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the records that only the log has, with the columns of the table: partition by partition, in offset order.

    With ``newest``, which ``newest_of_tail`` returned, yield only the latest record of each key, without tombstones.

    Raises:
        Invalid: a column is unknown.
        Missing: OFFSET_OUT_OF_RANGE: records were deleted since the snapshot was taken.
        Conflict: the topic was replaced, or records were lost.
        Unavailable: no broker responded.
    """
    schema = found.schema if columns is None else found.schema_of(columns)
    offsets = {} if newest is None else latest.by_partition(newest, OFFSET)
    names = _read_columns(found, schema, where, (PARTITION, OFFSET, KEY, VALUE) if newest is not None else ())
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
                rest = batch if newest is None else batch.filter(latest.has_row(batch, offsets))
                yield from _chosen(rest if typed is None else typed.added(rest), schema, where)


def _read_columns(found: Snapshot, schema: pa.Schema, where: pc.Expression | None, also: Collection[str]) -> list[str]:
    """Return the columns to read, with those that a condition may need."""
    wanted = {*schema.names, *also, *(STATISTICS if where is not None else ())}
    return [name for name in found.schema.names if name in wanted]


def _chosen(batch: pa.RecordBatch, schema: pa.Schema, where: pc.Expression | None) -> Iterator[pa.RecordBatch]:
    for part in [batch] if where is None else pa.Table.from_batches([batch]).filter(where).to_batches():
        if part.num_rows:
            yield conformed(part, schema)
