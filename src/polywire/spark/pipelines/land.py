"""Write a topic to a partitioned table.

Every record of the topic is in the table exactly once, however often the job is stopped and restarted with the same
checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pyspark.sql import DataFrame, SparkSession

from polywire.choices import choice
from polywire.spark.functions import table_columns
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
from polywire.spark.pipelines.tables import Table, TableFormat, into_table
from polywire.spark.progress import OnProgress


def land(
    spark: SparkSession,
    address: Address,
    topic: Topic,
    path: Annotated[str | Path, "folder of the table"],
    checkpoint: Checkpoint,
    partition_by: Annotated[Sequence[str], "columns of the table that make its folders"] = (),
    *,
    parse: Parser = None,
    table_format: Annotated[TableFormat | str, "kind of table"] = TableFormat.PARQUET,
    files_max: Annotated[int | None, "most files one micro-batch adds to a folder"] = None,
    batch_records_max: BatchRecordsMax = None,
    headers: Annotated[bool, "read headers too"] = False,
    available_now: AvailableNow = True,
    on_progress: OnProgress | None = None,
) -> Ran:
    """Read a topic from its beginning, or from where the checkpoint says, and append it to a table.

    ``parse`` turns the source's columns into the table's; columns that a later version of it adds are null in what was landed before.

    ``table_format`` is a ``TableFormat`` or its word, such as "delta".
    ``on_progress`` is called with every micro-batch. Raises what the query failed with.
    """
    table = Table(Path(path), choice(TableFormat, table_format, "table format"), tuple(partition_by))
    records = topic_stream(spark, address, topic, batch_records_max=batch_records_max, headers=headers)
    rows = records if parse is None else table_columns(parsed(records, parse))
    writer = into_table(_gathered(rows, files_max, partition_by), table)
    return run_query(writer, f"land-{topic}", checkpoint, available_now=available_now, on_progress=on_progress)


def _gathered(rows: DataFrame, files_max: int | None, partition_by: Sequence[str]) -> DataFrame:
    """Repartition rows, because each task with rows of a folder writes a file there."""
    if files_max is None:
        return rows
    # One file per folder needs no single task: all rows of a folder go to the same task.
    return rows.repartition(*partition_by) if partition_by and files_max == 1 else rows.coalesce(files_max)
