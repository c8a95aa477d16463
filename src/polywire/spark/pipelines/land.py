"""Land a topic as a partitioned table of Parquet files.

Promises: every record of the topic is in the table exactly once, whenever and however often the job is stopped and started again with
the same checkpoint. Spark's file sink keeps the list of files that count in ``_spark_metadata`` beside them: a killed run may leave
files that nobody lists, so read the table with Spark (or by that list). Must not know: what the records mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from polywire.spark.progress import BatchProgress, Told, follow

Parse = Callable[[DataFrame], DataFrame]


@dataclass(frozen=True, slots=True)
class Landed:
    """What one run did."""

    records: int
    batches: int


def land(
    spark: SparkSession,
    address: str,
    topic: str,
    path: str | Path,
    checkpoint: str | Path,
    partition_by: Sequence[str],
    *,
    parse: Parse | None = None,
    batch_records_max: int | None = None,
    available_now: bool = True,
    told: Told | None = None,
) -> Landed:
    """Read a topic from its beginning, or from where ``checkpoint`` says, and append it to the table at ``path``.

    ``parse`` turns the source's columns into the table's; ``partition_by`` names columns of its result. A micro-batch has at most
    ``batch_records_max`` records. With ``available_now`` it ends when everything that was there at the start has landed, otherwise it
    runs until it is stopped. ``told`` hears of every micro-batch. Raises what the query failed with.
    """
    reader = spark.readStream.format("polywire").option("address", address)
    reader = reader.option("subscribe", topic).option("startingOffsets", "earliest")
    if batch_records_max is not None:
        reader = reader.option("maxOffsetsPerTrigger", batch_records_max)
    records = reader.load()
    table = records if parse is None else parse(records)
    writer = table.writeStream.format("parquet").queryName(f"land-{topic}").partitionBy(*partition_by)
    writer = writer.option("path", str(path)).option("checkpointLocation", str(checkpoint))
    if available_now:
        writer = writer.trigger(availableNow=True)
    batches = 0

    def count(batch: BatchProgress) -> None:
        nonlocal batches
        batches += 1
        if told is not None:
            told(batch)

    return Landed(follow(writer.start(), count), batches)
