"""Write a topic to a partitioned table.

Every record of the topic is in the table exactly once, even if the job is stopped and restarted repeatedly with the
same checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from polywire.choices import choice
from polywire.spark.functions import VALUE, table_columns
from polywire.spark.pipelines.expectations import Expect, Expectations, ExpectOrDrop, ExpectOrFail
from polywire.spark.pipelines.queries import (
    Address,
    AvailableNow,
    BatchRecordsMax,
    Checkpoint,
    Parser,
    Ran,
    Topic,
    parsed,
    run_query,
    topic_stream,
)
from polywire.spark.pipelines.tables import DELETED, Table, TableFormat, into_table
from polywire.spark.progress import OnProgress


def land(
    spark: SparkSession,
    address: Address,
    topic: Topic,
    path: Annotated[str | Path, "folder of the table"],
    checkpoint: Checkpoint,
    partition_by: Annotated[Sequence[str], "columns of the table by which it is divided into folders"] = (),
    *,
    parse: Parser = None,
    table_format: Annotated[TableFormat | str, "kind of table"] = TableFormat.PARQUET,
    files_max: Annotated[int | None, "maximum number of files that one micro-batch adds to a folder"] = None,
    batch_records_max: BatchRecordsMax = None,
    headers: Annotated[bool, "read headers, too"] = False,
    merge_by: Annotated[
        Sequence[str], "columns that identify a row: a later record replaces it, one without a value deletes it (Delta)"
    ] = (),
    expect: Expect = None,
    expect_or_drop: ExpectOrDrop = None,
    expect_or_fail: ExpectOrFail = None,
    available_now: AvailableNow = True,
    on_progress: OnProgress | None = None,
) -> Ran:
    """Read a topic from its beginning, or from the checkpoint, and append it to a table.

    ``parse`` converts the source's columns to the table's. If a later version of ``parse`` adds columns, they are null
    in earlier rows. ``table_format`` is a ``TableFormat`` or its value, such as "delta". ``on_progress`` is called for
    every micro-batch. Raises the error with which the query failed.
    """
    expectations = Expectations(expect, expect_or_drop, expect_or_fail)
    kind = choice(TableFormat, table_format, "table format")
    table = Table(Path(path), kind, tuple(partition_by), tuple(merge_by))
    records = topic_stream(spark, address, topic, batch_records_max=batch_records_max, headers=headers)
    rows = records if parse is None else parsed(records, parse)
    if merge_by:
        rows = rows.withColumn(DELETED, f.col(VALUE if VALUE in rows.columns else "value").isNull())
    rows = expectations.applied(rows, deleted=f.col(DELETED) if merge_by else None)
    rows = rows if parse is None else table_columns(rows)
    writer = into_table(_limit_files(rows, files_max, partition_by), table)
    return run_query(writer, f"land-{topic}", checkpoint, available_now=available_now, on_progress=on_progress)


def _limit_files(rows: DataFrame, files_max: int | None, partition_by: Sequence[str]) -> DataFrame:
    """Repartition rows so that a micro-batch adds at most ``files_max`` files to each folder."""
    if files_max is None:
        return rows
    # One file per folder does not require a single task: it is enough that all rows of a folder go to the same task.
    return rows.repartition(*partition_by) if partition_by and files_max == 1 else rows.coalesce(files_max)
