"""Read topics into Polars and DuckDB.

* Lazy Polars frames and DuckDB tables are filled in bounded memory.
* A lazy frame reads only the columns that the query uses, and stops when it has enough rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from polywire.client.assignment import EARLIEST, LATEST
from polywire.client.tables import READ_COLUMNS, Bound, read_arrow, scan, schema_of
from polywire.errors import ErrorCode, Invalid

if TYPE_CHECKING:
    import duckdb
    import polars


def read_polars(
    address: str,
    topic: str,
    *,
    columns: Sequence[str] = READ_COLUMNS,
    start: Bound = EARLIEST,
    end: Bound = LATEST,
    text: bool = False,
) -> polars.DataFrame:
    """Return a topic as a Polars ``DataFrame``.

    Arguments and errors are the same as in ``scan``. Raises Invalid(INVALID_REQUEST) if polars is not installed.

    Example:
        frame = read_polars("127.0.0.1:9555", "orders", text=True)
        print(frame.group_by("key").len())
    """
    library = _polars()
    frame: polars.DataFrame = library.from_arrow(
        read_arrow(address, topic, columns=columns, start=start, end=end, text=text)
    )
    return frame


def scan_polars(
    address: str, topic: str, *, start: Bound = EARLIEST, end: Bound = LATEST, text: bool = False
) -> polars.LazyFrame:
    """Return a topic as a Polars ``LazyFrame``. Each query reads the topic again, but only the columns that it uses.

    Arguments and errors are the same as in ``scan``. Errors are raised when a query is collected. Raises
    Invalid(INVALID_REQUEST) if polars is not installed.

    Example:
        orders = scan_polars("127.0.0.1:9555", "orders", text=True)
        print(orders.filter(polars.col("key") == "alice").select("value").head(10).collect())
    """
    library = _polars()

    def source(
        with_columns: list[str] | None, predicate: polars.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[polars.DataFrame]:
        left = n_rows
        for batch in scan(address, topic, columns=with_columns or READ_COLUMNS, start=start, end=end, text=text):
            frame = library.from_arrow(batch if left is None else batch.slice(0, left))
            yield frame if predicate is None else frame.filter(predicate)
            if left is not None:
                left -= min(left, batch.num_rows)
                if left == 0:
                    return

    from polars.io.plugins import register_io_source

    schema = library.from_arrow(schema_of(READ_COLUMNS, text=text).empty_table()).schema
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
    try:
        import polars
    except ImportError as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, "data frames need polars (pip install 'polywire[polars]')") from error
    return polars
