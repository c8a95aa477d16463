"""Copy the last record of each key into a new topic.

Keys whose last record has no value were deleted. These keys are skipped unless requested. A second run with the same
name and output writes nothing.
"""

from __future__ import annotations

from typing import Annotated

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from polywire.client import bulk
from polywire.spark.options import Transaction
from polywire.spark.pipelines.queries import SOURCE, Address, Ran, Topic, located, sendable, topic_rows
from polywire.spark.sink import transaction_write


def compact(
    spark: SparkSession,
    address: Address,
    topic: Topic,
    output: Annotated[str, "topic to write"],
    *,
    target: Annotated[str | None, "host:port of the broker to write to, if it is another one"] = None,
    deletions: Annotated[bool, "also write keys whose last record has no value"] = False,
    name: Annotated[str | None, "name of this run; another run with the same name and output writes nothing"] = None,
) -> Ran:
    """Write the last record of every key that a topic contains now.

    Records without a key are skipped, because they replace no other record.
    """
    transaction = None if name is None else Transaction(f"compact-{name}", 0)
    if transaction is not None and _is_written(target or address, output, transaction):
        return Ran(0, 0)
    last = last_by_key(topic_rows(spark, address, topic, headers=True))
    kept = last if deletions else last.where("value is not null")
    records = sendable(kept.select("key", "value", "headers")).persist()
    try:
        count = records.count()
        writer = located(records.write.format(SOURCE), target or address).mode("append").option("topic", output)
        if transaction is not None:
            writer = writer.option("txnAppId", transaction.application).option("txnId", transaction.number)
        writer.save()
    finally:
        records.unpersist()
    return Ran(count, 1)


def _is_written(address: str, output: str, transaction: Transaction) -> bool:
    """Return whether the broker has already published a write. The sink would publish nothing, and not report it."""
    write = transaction_write(transaction, output)
    last = bulk.connect(address).last_publish(write.writer)
    return last is not None and last >= write.number


def last_by_key(records: DataFrame) -> DataFrame:
    """Return the last stored record of each key.

    If a key is in several partitions, it is the record with the latest append time; if these are equal, that with the
    highest partition and offset.
    """
    order = f.struct("timestamp", "partition", "offset")
    row = f.max_by(f.struct(*records.columns), order)
    return records.where("key is not null").groupBy("key").agg(row.alias("_row")).select("_row.*")
