"""Refine a topic: write records that can be parsed to one topic, and all others to a dead-letter topic.

One query writes both topics in one publish, so each record is written exactly once, to one of them.

* A record is dropped as a duplicate if a record with the same id was appended within ``delay`` before it.
* A record that is older than the watermark is dropped, counted and reported.
* A record without a value (a deletion) is written like one that meets all expectations.
* A record that cannot be parsed goes to the dead-letter topic with its bytes, key and headers. Added headers contain
  the reason and the original topic, partition and offset.
"""

from __future__ import annotations

from typing import Annotated

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from polywire.spark.functions import CORRUPT, VALUE
from polywire.spark.pipelines.expectations import Expect, Expectations, ExpectOrDrop, ExpectOrFail
from polywire.spark.pipelines.queries import (
    HEADERS,
    Address,
    AvailableNow,
    BatchRecordsMax,
    Checkpoint,
    Parser,
    Ran,
    Topic,
    into_topic,
    parsed,
    run_query,
    stateful,
    topic_stream,
)
from polywire.spark.progress import OnProgress


def refine(
    spark: SparkSession,
    address: Address,
    topic: Topic,
    output: Annotated[str, "topic for records that could be parsed"],
    checkpoint: Checkpoint,
    parse: Parser,
    *,
    id: Annotated[str | None, "SQL expression that identifies a record; without it, duplicates are not removed"] = None,
    delay: Annotated[str, "how long ids are stored, and how much partitions may differ in append time"] = "1 hour",
    dead: Annotated[
        str | None, "topic for records that could not be parsed (default: the output's name and .dead)"
    ] = None,
    as_json: Annotated[bool, "write the parsed fields as JSON instead of the original value"] = False,
    expect: Expect = None,
    expect_or_drop: ExpectOrDrop = None,
    expect_or_fail: ExpectOrFail = None,
    target: Annotated[str | None, "host:port of the broker of the output topics, if it is another one"] = None,
    batch_records_max: BatchRecordsMax = None,
    available_now: AvailableNow = True,
    on_progress: OnProgress | None = None,
) -> Ran:
    """Parse a topic's records, drop duplicates, and write the remaining ones.

    Records that ``expect_or_drop`` drops go to the dead-letter topic, too.

    Raises the error with which the query failed.
    """
    expectations = Expectations(expect, expect_or_drop, expect_or_fail)
    records = topic_stream(stateful(spark), address, topic, batch_records_max=batch_records_max, headers=True)
    rows = expectations.marked(parsed(records, parse or "text"), deleted=f.col(VALUE).isNull())
    unique = rows if id is None else distinct(rows, id, delay=delay)
    refined = outgoing(unique, output, dead or f"{output}.dead", as_json=as_json)
    writer = into_topic(refined, target or address)
    return run_query(writer, f"refine-{topic}", checkpoint, available_now=available_now, on_progress=on_progress)


def distinct(rows: DataFrame, id: str, *, delay: str) -> DataFrame:
    """Return the rows without duplicates: another row with the same id was appended up to ``delay`` earlier.

    A row without an id is never a duplicate.
    """
    location = f.concat_ws("/", "_topic", "_partition", "_offset", *(["_part"] if "_part" in rows.columns else []))
    row_id = f.when(f.col(CORRUPT).isNull(), f.expr(id).cast("string"))
    known = f.coalesce(f.concat(f.lit("i"), row_id), f.concat(f.lit("p"), location))
    # Append time: every record has one, and within a partition it never decreases.
    timed = rows.withColumn("_id", known).withWatermark("_timestamp", delay)
    return timed.dropDuplicatesWithinWatermark(["_id"]).drop("_id")


def outgoing(rows: DataFrame, output: str, dead: str, *, as_json: bool) -> DataFrame:
    """Return records for the sink: key, value, headers, topic."""
    bad = f.col(CORRUPT).isNotNull()
    fields = [name for name in rows.columns if not name.startswith("_")]
    # If a value contains several records, none of them can be represented by the whole value.
    rewritten = as_json or "_part" in rows.columns
    value = f.when(bad | f.col(VALUE).isNull(), f.col(VALUE)).otherwise(f.to_json(f.struct(*fields)).cast("binary"))
    headers = f.coalesce(f.col("_headers"), f.array().cast(HEADERS))
    return rows.select(
        f.col("_key").alias("key"),
        (value if rewritten else f.col(VALUE)).alias("value"),
        f.when(bad, f.concat(headers, _reason())).otherwise(f.col("_headers")).alias("headers"),
        f.when(bad, dead).otherwise(output).alias("topic"),
    )


def _reason() -> Column:
    """Return the headers that are added to a dead letter."""
    columns = {"reason": CORRUPT, "topic": "_topic", "partition": "_partition", "offset": "_offset"}
    pairs = [
        f.struct(f.lit(f"dead.{name}").alias("key"), f.col(column).cast("string").cast("binary").alias("value"))
        for name, column in columns.items()
    ]
    return f.array(*pairs).cast(HEADERS)
