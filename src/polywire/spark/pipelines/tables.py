"""Append streams to tables: Parquet folders, Delta and Iceberg.

Spark's file sink lists valid Parquet files in ``_spark_metadata``. A killed run may leave files that are not listed, so
read such a table with Spark or use that list.

Delta tables are written by Spark if Delta's package is on the class path, and otherwise by the library ``deltalake`` on
the driver. Iceberg requires its package for Spark. In all formats, a repeated micro-batch does not add its rows again.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql.streaming.readwriter import DataStreamWriter

from polywire.choices import unknown
from polywire.errors import ErrorCode, Invalid, Unavailable
from polywire.spark.pipelines.queries import query_id

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

CLASSES: Final = {
    "delta": "org.apache.spark.sql.delta.sources.DeltaDataSource",
    "iceberg": "org.apache.iceberg.spark.source.IcebergSource",
}
# Added columns, whose names no field may have by chance.
DELETED: Final = "polywire=deleted"  # of rows to merge: whether the record has no value
_RANK: Final = "polywire=rank"
COMPACTED_EVERY: Final = 64  # the small files of a Delta table are merged after this many micro-batches


class TableFormat(Enum):
    """Kind of table."""

    PARQUET = "parquet"
    DELTA = "delta"
    ICEBERG = "iceberg"


@dataclass(frozen=True, slots=True)
class Table:
    """A table to write to: a folder, its format, the columns that partition it, and those that identify a row.

    If ``merge_by`` is empty, each row is added.
    """

    path: Path
    format: TableFormat = TableFormat.PARQUET
    partition_by: tuple[str, ...] = ()
    merge_by: tuple[str, ...] = ()


def into_table(rows: DataFrame, table: Table) -> DataStreamWriter:
    """Append a stream to a table, or merge it.

    Raises Invalid(INVALID_REQUEST) if no installed library can write its format, or if it cannot be merged.
    """
    if table.merge_by:
        _check_merge(rows, table)
        return rows.writeStream.foreachBatch(lambda batch, number: write_delta(batch, number, table))
    _refuse_other_types(rows, table)
    writer = rows.writeStream
    if table.format is TableFormat.PARQUET or has_package(rows.sparkSession, table.format):
        writer = writer.format(table.format.value).partitionBy(*table.partition_by).option("path", str(table.path))
        return writer.option("mergeSchema", "true")
    if table.format is TableFormat.DELTA and importlib.util.find_spec("deltalake") is not None:
        return writer.foreachBatch(lambda batch, number: write_delta(batch, number, table))
    raise Invalid(
        ErrorCode.INVALID_REQUEST,
        f"no library for this table format (start Spark with its package on spark.jars"
        f"{', or pip install deltalake' if table.format is TableFormat.DELTA else ''} format={table.format.value}",
    )


def _refuse_other_types(rows: DataFrame, table: Table) -> None:
    """Raise Invalid(INVALID_REQUEST) for a column whose type differs from the table's.

    Otherwise readers would fail, or read nulls.
    """
    files = sorted(listed_files(table.path) or (), key=lambda file: file.stat().st_mtime if file.exists() else 0.0)
    new = {field.name: field.dataType for field in rows.schema.fields if field.name not in table.partition_by}
    for file in {*files[:1], *files[-1:]}:
        for field in rows.sparkSession.read.parquet(str(file)).schema.fields:
            if field.name in new and new[field.name].simpleString() != field.dataType.simpleString():
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    f"a column has another type in the table (use its type, another name, or another path) column={field.name!r} "
                    f"old={field.dataType.simpleString()} new={new[field.name].simpleString()} path={table.path}",
                )


def has_package(spark: SparkSession, table_format: TableFormat) -> bool:
    """Return whether Spark itself can write this format."""
    try:
        spark._jvm.java.lang.Class.forName(CLASSES[table_format.value])  # type: ignore[union-attr]
    except Py4JError:
        return False
    return True


def _check_merge(rows: DataFrame, table: Table) -> None:
    """Raise Invalid(INVALID_REQUEST) if rows cannot be merged into the table."""
    if table.format is not TableFormat.DELTA or importlib.util.find_spec("deltalake") is None:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"merge_by needs table_format=delta and the library deltalake (pip install deltalake) format={table.format.value}",
        )
    for name in table.merge_by:
        if name not in rows.columns:
            raise unknown("column", name, rows.columns)


def write_delta(batch: DataFrame, number: int, table: Table) -> None:
    """Append a micro-batch to a Delta table, or merge it, once per query and batch number.

    Delta stores the last number of each writer, by which a repeated batch is detected. The rows pass through the
    driver, so a micro-batch must fit its memory. Raises Unavailable if the table cannot be written.
    """
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
    from deltalake.exceptions import DeltaError

    writer = query_id(batch.sparkSession)
    path = str(table.path)
    known = DeltaTable(path) if DeltaTable.is_deltatable(path) else None
    last = None if known is None else known.transaction_version(writer)
    if last is not None and number <= last:
        return
    done = CommitProperties(app_transactions=[Transaction(writer, number)])
    options: dict[str, Any] = {"partition_by": list(table.partition_by)} if table.partition_by and known is None else {}
    try:
        if table.merge_by and known is not None:
            _merge(known, _latest(batch, table), table, done)
        else:
            rows = _latest(batch, table).where(~f.col(DELETED)).drop(DELETED) if table.merge_by else batch
            write_deltalake(path, rows.toArrow(), mode="append", schema_mode="merge", commit_properties=done, **options)
        if number % COMPACTED_EVERY == COMPACTED_EVERY - 1:
            DeltaTable(path).optimize.compact()
    except DeltaError as error:
        raise Unavailable(ErrorCode.STORAGE_FAILED, f"cannot write the table reason={error} path={path}") from error


def _latest(batch: DataFrame, table: Table) -> DataFrame:
    """Return the last row of each identity. Rows with a null in it have none, and all remain."""
    found = [name if name in batch.columns else name[1:] for name in ("_timestamp", "_partition", "_offset")]
    latest = Window.partitionBy(*table.merge_by).orderBy(*[f.col(name).desc() for name in found])
    is_whole = f.lit(True)
    for name in table.merge_by:
        is_whole = is_whole & f.col(name).isNotNull()
    return batch.withColumn(_RANK, f.row_number().over(latest)).where(~is_whole | (f.col(_RANK) == 1)).drop(_RANK)


def _merge(known: DeltaTable, rows: DataFrame, table: Table, done: CommitProperties) -> None:
    """Replace, add and delete rows in one commit."""
    columns = {f"`{name}`": f"s.`{name}`" for name in rows.columns if name != DELETED}
    merging = known.merge(
        rows.toArrow(),
        " AND ".join(f"t.`{name}` = s.`{name}`" for name in table.merge_by),
        source_alias="s",
        target_alias="t",
        merge_schema=True,
        commit_properties=done,
    )
    merging = merging.when_matched_delete(f"s.`{DELETED}`").when_matched_update(columns)
    merging.when_not_matched_insert(columns, f"NOT s.`{DELETED}`").execute()


def listed_files(path: Path) -> list[Path] | None:
    """Return the valid files of a streaming Parquet table, or None if it has no list of them."""
    log = path / "_spark_metadata"
    if not log.is_dir():
        return None
    entries = [line for file in sorted(log.iterdir()) if not file.name.startswith(".") for line in _entries(file)]
    return sorted({Path(str(entry["path"]).removeprefix("file://")) for entry in entries})


def _entries(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
