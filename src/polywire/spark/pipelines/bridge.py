"""Copy a topic into another topic, on the same broker or another one.

Every record arrives exactly once, with key, value and headers. If partitions are preserved, the order within each
partition is preserved, too. Otherwise the records of each key stay in order.
"""

from __future__ import annotations

from typing import Annotated

from pyspark.sql import SparkSession

from polywire.spark.pipelines.queries import (
    Address,
    AvailableNow,
    BatchRecordsMax,
    Checkpoint,
    Ran,
    Topic,
    into_topic,
    run_query,
    topic_stream,
)
from polywire.spark.progress import OnProgress


def bridge(
    spark: SparkSession,
    address: Address,
    topic: Topic,
    output: Annotated[str, "topic to write"],
    checkpoint: Checkpoint,
    *,
    target: Annotated[str | None, "host:port of the broker to write to, if it is another one"] = None,
    keep_partitions: Annotated[
        bool, "keep the partition numbers of records; otherwise the key selects the partition"
    ] = False,
    batch_records_max: BatchRecordsMax = None,
    available_now: AvailableNow = True,
    on_progress: OnProgress | None = None,
) -> Ran:
    """Copy a topic into another, from its beginning or from the checkpoint.

    Raises the error with which the query failed.
    """
    records = topic_stream(spark, address, topic, batch_records_max=batch_records_max, headers=True)
    columns = ["key", "value", "headers", *(["partition"] if keep_partitions else [])]
    writer = into_topic(records.select(*columns), target or address, output)
    return run_query(writer, f"bridge-{topic}", checkpoint, available_now=available_now, on_progress=on_progress)
