"""Read topics as Arrow record batches, Arrow tables, pandas or Polars frames, or into DuckDB, without Spark.

* A read covers the offsets that exist when it starts, so it ends even if the topic is growing.
* ``scan``, lazy Polars frames and DuckDB tables need a few MiB of memory, however large the topic is.
* A lazy frame reads only the columns that the query uses, and stops when it has enough rows.
* With ``table=True``, rows come from the topic's table, and from the log for records that the table does not have yet.
  That is faster, and it includes records that the log no longer retains. Rows are not in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from polywire.client.assignment import EARLIEST, LATEST, checked_start
from polywire.client.bulk import BulkConnection, PartitionRange, connect
from polywire.client.record import EPOCH, MICROSECOND
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.extras import required

if TYPE_CHECKING:
    import duckdb
    import polars

try:
    import pyarrow as pa
    import pyarrow.compute as pc

    from polywire.client.arrow import TIMESTAMP, as_type, chunk_to_arrow, constant
    from polywire.tables.columns import KEY, PARTITION
    from polywire.tables.reading import (
        FIRST_ROW,
        OUTDATED,
        ROW,
        Snapshot,
        deleted_rows,
        newest_of_tail,
        scan_files,
        scan_tail,
        snapshot,
    )
except ImportError as error:
    raise Invalid(ErrorCode.INVALID_REQUEST, "tables need pyarrow (pip install 'polywire[arrow]')") from error

T = TypeVar("T")
Bound: TypeAlias = Literal["earliest", "latest"] | int | datetime

READ_COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp")
TYPES: Final[dict[str, Any]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": TIMESTAMP,
}


def scan(
    address: str,
    topic: str,
    *,
    columns: Sequence[str] | None = None,
    start: Bound = EARLIEST,
    end: Bound = LATEST,
    text: bool = False,
    table: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield a topic as Arrow record batches: partition by partition, in offset order, in bounded memory.

    Args:
        address: ``host:port`` or URL of the `polywire` protocol, as for ``polywire.connect``.
        topic: full name.
        columns: any of key, value, topic, partition, offset and timestamp (append time) and, with ``table``, the other
            columns of the table. Batches have them in this order. None selects all except topic; with ``table``, also
            the typed columns. If the table has a typed column ``topic``, it is returned instead of the topic's name.
        start: "earliest", "latest", an offset, or a datetime with a time zone. It applies to each partition. Deleted
            offsets are skipped.
        end: exclusive end, as for ``start``. "latest" is the end of the topic when reading starts.
        text: return keys and values as text instead of bytes.
        table: read the files of the topic's table, and from the log only newer records. Rows are then in no particular
            order, and records that the log no longer retains are included. This needs some 100 MiB of memory.

    Raises:
        Invalid: INVALID_REQUEST: unknown column, invalid bound, or a topic without a table if ``table`` is set.
        Missing: TOPIC_MISSING.
        Unavailable: no broker responded, or the table's files cannot be read.

    Example:
        for batch in scan("127.0.0.1:9555", "orders", columns=["value"]):
            print(batch.num_rows)
    """
    schema = schema_of(READ_COLUMNS if columns is None or table else columns, text=text)
    times = [_time_us(bound) for bound in (checked_start(start), checked_start(end)) if isinstance(bound, datetime)]
    with closing(connect(address)) as connection:
        if table:
            found = snapshot(connection, topic)
            yield from _table_rows(connection, found, table_schema(found, columns, text=text), start, end)
            return
        for partition in connection.bounds([topic], times_us=times):
            time_offsets = iter(partition.time_offsets)
            first, last = (_offset(bound, partition, time_offsets) for bound in (start, end))
            yield from _partition(connection, partition, first, last, schema)


def read_arrow(
    address: str,
    topic: str,
    *,
    columns: Sequence[str] | None = None,
    start: Bound = EARLIEST,
    end: Bound = LATEST,
    text: bool = False,
    table: bool = False,
) -> pa.Table:
    """Return a topic as one Arrow table. Arguments and errors are the same as in ``scan``.

    If files of the topic's table are deleted meanwhile, the read is repeated once.

    Example:
        table = read_arrow("127.0.0.1:9555", "orders", text=True)
        print(table.num_rows, table.column("value")[0])
    """

    def read() -> pa.Table:
        with closing(connect(address)) as connection:
            found = snapshot(connection, topic)
            schema = table_schema(found, columns, text=text)
            return pa.Table.from_batches(list(_table_rows(connection, found, schema, start, end)), schema)

    if table:
        checked_start(start), checked_start(end)
        return with_new_snapshot(read)
    batches = scan(address, topic, columns=columns, start=start, end=end, text=text)
    return pa.Table.from_batches(list(batches), schema_of(columns or READ_COLUMNS, text=text))


def read_pandas(
    address: str,
    topic: str,
    *,
    columns: Sequence[str] | None = None,
    start: Bound = EARLIEST,
    end: Bound = LATEST,
    text: bool = False,
    table: bool = False,
) -> Any:
    """Return a topic as a pandas ``DataFrame``.

    Arguments and errors are the same as in ``scan``. Raises Invalid(INVALID_REQUEST) if pandas is not installed.

    Example:
        frame = read_pandas("127.0.0.1:9555", "orders", text=True)
        print(frame.groupby("key").size())
    """
    try:
        import pandas  # noqa: F401 - check that it is installed
    except ImportError as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, "data frames need pandas (pip install pandas)") from error
    return read_arrow(address, topic, columns=columns, start=start, end=end, text=text, table=table).to_pandas()


def schema_of(columns: Sequence[str], *, text: bool) -> pa.Schema:
    """Return the Arrow schema for these columns. Raises Invalid(INVALID_REQUEST)."""
    unknown = [column for column in columns if column not in TYPES]
    if unknown or not columns:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"unknown or no columns unknown={','.join(unknown)} known={','.join(TYPES)}"
        )
    payload = pa.string() if text else pa.binary()
    return pa.schema([(name, payload if name in ("key", "value") else TYPES[name]) for name in columns])


def _time_us(bound: datetime) -> int:
    return (bound - EPOCH) // MICROSECOND


def _offset(bound: Bound, partition: PartitionRange, time_offsets: Iterator[int]) -> int:
    """Return the offset in a partition for ``start`` or ``end``. It is limited to the retained records."""
    if isinstance(bound, datetime):
        return next(time_offsets)
    if isinstance(bound, int):
        return min(max(bound, partition.first_offset), partition.next_offset)
    return partition.first_offset if bound == EARLIEST else partition.next_offset


def _partition(
    connection: BulkConnection, partition: PartitionRange, first: int, last: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    if first >= last:
        return
    chunks = connection.fetch_range(
        partition.topic, partition.partition, partition.incarnation, first, last, epoch=partition.epoch
    )
    for chunk in chunks:
        yield from chunk_to_arrow(chunk, schema.names, schema)


# Tables


def table_schema(found: Snapshot, columns: Sequence[str] | None, *, text: bool) -> pa.Schema:
    """Return the Arrow schema for columns of a table. Raises Invalid(INVALID_REQUEST)."""
    known = {"topic": pa.string(), **{field.name: field.type for field in found.schema}}
    names = [*READ_COLUMNS, *(column.name for column in found.columns)] if columns is None else columns
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"unknown or no columns unknown={','.join(unknown)} known={','.join(known)}"
        )
    payload = pa.string() if text else pa.binary()
    return pa.schema([(name, payload if name in ("key", "value") else known[name]) for name in names])


def _table_rows(
    connection: BulkConnection, found: Snapshot, schema: pa.Schema, start: Bound, end: Bound
) -> Iterator[pa.RecordBatch]:
    if start == LATEST or end == EARLIEST:
        return
    where = _condition(start, end)
    columns = [name for name in schema.names if name in found.schema.names] or [PARTITION]
    newest = newest_of_tail(connection, found)
    files = scan_files(found, columns, where, newest=newest)
    for batch in chain(files, scan_tail(connection, found, columns, where, newest=newest)):
        arrays = [
            constant(found.topic, field.type, batch.num_rows)
            if field.name not in columns
            else as_type(batch.column(field.name), field.type)
            for field in schema
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _condition(start: Bound, end: Bound) -> pc.Expression | None:
    """Return the condition for rows between two bounds; None for all rows.

    Neither bound excludes every row: the caller has checked that.
    """
    found: pc.Expression | None = None
    for bound, is_end in ((start, False), (end, True)):
        if isinstance(bound, str):
            continue
        is_time = isinstance(bound, datetime)
        column = pc.field("timestamp" if is_time else "offset")
        limit: pa.Scalar[Any] = pa.scalar(bound, TIMESTAMP if is_time else pa.int64())
        part = column < limit if is_end else column >= limit
        found = part if found is None else found & part
    return found


def _table_frame(
    library: Any, broker: BulkConnection, found: Snapshot, start: Bound, end: Bound, *, text: bool
) -> polars.LazyFrame:
    """Return a frame in which Polars scans the files of a directory, followed by the newer records."""
    names = [*READ_COLUMNS, *(column.name for column in found.columns)]
    newest = newest_of_tail(broker, found)
    rows = list(scan_tail(broker, found, names, newest=newest))
    tail = library.from_arrow(pa.Table.from_batches(rows, found.schema_of(names)))
    parts = [_scan_files(library, found, names, newest)] if found.files else []
    frame: polars.LazyFrame = library.concat([*parts, tail.lazy()])
    if start == LATEST or end == EARLIEST:
        return frame.clear()
    for bound, is_end in ((start, False), (end, True)):
        if not isinstance(bound, str):
            column = library.col("timestamp" if isinstance(bound, datetime) else "offset")
            frame = frame.filter(column < bound if is_end else column >= bound)
    return frame.with_columns(library.col("key", "value").cast(library.String)) if text else frame


def _scan_files(library: Any, found: Snapshot, names: Sequence[str], newest: pa.Table | None) -> polars.LazyFrame:
    options: dict[str, Any] = {}
    if found.columns:
        schema = library.from_arrow(found.schema.empty_table()).schema
        options |= {"schema": schema, "missing_columns": "insert", "extra_columns": "ignore"}
    if found.has_deleted:
        options["row_index_name"] = ROW
    frame: polars.LazyFrame = library.scan_parquet(found.paths, glob=False, **options)
    if found.has_deleted:
        deleted = library.from_arrow(deleted_rows(found)).with_columns(library.col(ROW) + library.col(FIRST_ROW))
        frame = frame.join(deleted.lazy(), on=ROW, how="anti")
    if newest is not None:
        frame = frame.join(library.from_arrow(newest).lazy(), on=[PARTITION, KEY], how="anti")
    return frame.select(library.selectors.by_name(names))  # as text, "*" would be all columns


def with_new_snapshot(read: Callable[[], T]) -> T:
    """Return the result of ``read``. Repeat it once if files or records were deleted while it ran."""
    try:
        return read()
    except BrokerError as error:
        if error.code not in OUTDATED:
            raise
    return read()


def read_polars(
    address: str,
    topic: str,
    *,
    columns: Sequence[str] | None = None,
    start: Bound = EARLIEST,
    end: Bound = LATEST,
    text: bool = False,
    table: bool = False,
) -> polars.DataFrame:
    """Return a topic as a Polars ``DataFrame``.

    Arguments and errors are the same as in ``scan``. Raises Invalid(INVALID_REQUEST) if polars is not installed.

    Example:
        frame = read_polars("127.0.0.1:9555", "orders", text=True)
        print(frame.group_by("key").len())
    """
    library = _polars()
    frame: polars.DataFrame = library.from_arrow(
        read_arrow(address, topic, columns=columns, start=start, end=end, text=text, table=table)
    )
    return frame


def scan_polars(
    address: str,
    topic: str,
    *,
    start: Bound = EARLIEST,
    end: Bound = LATEST,
    text: bool = False,
    table: bool = False,
) -> polars.LazyFrame:
    """Return a topic as a Polars ``LazyFrame``. Each query reads the topic again, but only the columns that it uses.

    Arguments and errors are the same as in ``scan``. Errors are raised when a query is collected. Raises
    Invalid(INVALID_REQUEST) if polars is not installed.

    With ``table``, Polars itself scans the files of a directory, so filters skip row groups. The frame then has the
    records of the moment at which it was made, and values that are not UTF-8 raise an error of Polars if ``text`` is
    set. Collect it before ``table_history_hours`` have passed.

    Example:
        orders = scan_polars("127.0.0.1:9555", "orders", text=True)
        print(orders.filter(polars.col("key") == "alice").select("value").head(10).collect())
    """
    library = _polars()
    if table:
        checked_start(start), checked_start(end)
        with closing(connect(address)) as connection:
            found = snapshot(connection, topic)
            if found.is_local:
                return _table_frame(library, connection, found, start, end, text=text)

        names = [*READ_COLUMNS, *(column.name for column in found.columns)]
        arrow = table_schema(found, names, text=text)
    else:
        arrow = schema_of(READ_COLUMNS, text=text)

    def source(
        with_columns: list[str] | None, predicate: polars.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[polars.DataFrame]:
        left = n_rows
        columns = with_columns or arrow.names
        for batch in scan(address, topic, columns=columns, start=start, end=end, text=text, table=table):
            frame = library.from_arrow(batch if left is None else batch.slice(0, left))
            yield frame if predicate is None else frame.filter(predicate)
            if left is not None:
                left -= min(left, batch.num_rows)
                if left == 0:
                    return

    from polars.io.plugins import register_io_source

    schema = library.from_arrow(arrow.empty_table()).schema
    frame: polars.LazyFrame = register_io_source(source, schema=schema)
    return frame


def to_duckdb(
    connection: duckdb.DuckDBPyConnection,
    address: str,
    topic: str,
    *,
    table: str | None = None,
    columns: Sequence[str] = READ_COLUMNS,
    start: Bound = EARLIEST,
    end: Bound = LATEST,
    text: bool = False,
) -> duckdb.DuckDBPyRelation:
    """Copy a topic into a DuckDB table, replacing an existing one, and return the table.

    Args:
        connection: a connection from ``duckdb.connect``.
        address: as for ``scan``.
        topic: full name.
        table: name of the table; None uses the name of the topic.
        columns: as for ``scan``.
        start: as for ``scan``.
        end: as for ``scan``.
        text: as for ``scan``.

    Example:
        orders = to_duckdb(duckdb.connect(), "127.0.0.1:9555", "orders", text=True)
        print(orders.aggregate("key, count(*)"))
    """
    batches = scan(address, topic, columns=columns, start=start, end=end, text=text)
    reader = pa.RecordBatchReader.from_batches(schema_of(columns, text=text), batches)
    name = f'"{(table or topic).replace(chr(34), chr(34) * 2)}"'
    relation = connection.from_arrow(reader)
    connection.execute(f"DROP TABLE IF EXISTS {name}")
    relation.create(name)
    return connection.query(f"FROM {name}")


def _polars() -> Any:
    return required("polars", "data frames need polars", "polars")
