"""Check a topic or a table for gaps and duplicates, by partition and producer, and write a page with charts.

Spark counts all rows, not a sample. ``sound`` means that nothing is missing and nothing is duplicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from polywire.errors import ErrorCode, Invalid
from polywire.spark.functions import CORRUPT, VALUE
from polywire.spark.pipelines.quality_facts import PartitionFacts, ProducerFacts, Quality
from polywire.spark.pipelines.quality_page import page
from polywire.spark.pipelines.queries import Parser, parsed, topic_rows

TIME_BARS: Final = 60
SIZE_BARS: Final = 24


def quality(
    spark: SparkSession,
    *,
    address: Annotated[str | None, "host:port of the broker's polywire protocol, for a topic"] = None,
    topic: Annotated[str | None, "topic to read"] = None,
    path: Annotated[str | Path | None, "folder of a landed table, instead of a topic"] = None,
    parse: Parser = None,
    sequence: Annotated[str | None, "SQL expression of the producer's sequence number of a record, from 0"] = None,
    producer: Annotated[str, "SQL expression that identifies a record's producer"] = "''",
    expected: Annotated[int | None, "expected number of records"] = None,
    offsets: Annotated[bool, "check for gaps and duplicates of offsets (not for a table of derived records)"] = True,
    report: Annotated[str | Path | None, "file for the report, a single HTML page"] = None,
) -> Quality:
    """Count the records of a topic or the rows of a table and report problems.

    Raises Invalid unless a topic (with an address) or a path is given.
    """
    if (topic is None) == (path is None) or (topic is not None and address is None):
        raise Invalid(ErrorCode.INVALID_REQUEST, "quality needs the settings address and topic, or path")
    if topic is not None and address is not None:
        rows = parsed(topic_rows(spark, address, topic, headers=True), parse or "text")
    else:
        rows = _of_table(spark.read.parquet(str(path)))
    rows = _measured(rows, sequence, producer).persist()
    try:
        partitions = tuple(_partitions(rows, offsets=offsets))
        rate, interval_s = _rate(rows, partitions)
        found = Quality(
            title=topic or str(path),
            partitions=partitions,
            producers=tuple(_producers(rows)) if sequence is not None else (),
            rate=rate,
            interval_s=interval_s,
            sizes=_sizes(rows),
            expected=expected,
        )
    finally:
        rows.unpersist()
    if report is not None:
        Path(report).write_text(page(found), encoding="utf-8")
    return found


def _of_table(table: DataFrame) -> DataFrame:
    """Return a landed table with the column names of a parser, whether its records were parsed or not."""
    names = table.columns
    source = ("topic", "partition", "offset", "timestamp", "value")
    renamed = [f.col(name).alias(f"_{name}") for name in source if name in names]
    table = table.select("*", *[column for column in renamed if f"_{column}" not in names])
    absent = {
        "_topic": "string", "_partition": "int", "_offset": "long", "_timestamp": "timestamp", VALUE: "binary", CORRUPT: "string",
    }  # fmt: skip
    return table.withColumns(
        {name: f.lit(None).cast(kind) for name, kind in absent.items() if name not in table.columns}
    )


def _measured(rows: DataFrame, sequence: str | None, producer: str) -> DataFrame:
    own = f.expr(sequence).cast("long") if sequence is not None else f.lit(None).cast("long")
    return rows.select(
        f.coalesce("_topic", f.lit("")).alias("topic"),
        f.coalesce("_partition", f.lit(0)).alias("partition"),
        f.col("_offset").alias("offset"),
        f.col("_timestamp").alias("time"),
        f.coalesce(f.length(VALUE), f.lit(0)).cast("long").alias("bytes"),
        f.col(CORRUPT).isNotNull().alias("corrupt"),
        f.expr(producer).cast("string").alias("producer"),
        own.alias("sequence"),
    )


def _partitions(rows: DataFrame, *, offsets: bool) -> list[PartitionFacts]:
    grouped = rows.groupBy("topic", "partition").agg(
        f.count("*").alias("records"),
        f.min("offset").alias("first"),
        f.max("offset").alias("last"),
        # Exact, in constant memory per row: Spark counts distinct values with a second shuffle.
        f.countDistinct("offset").alias("distinct"),
        f.count_if("corrupt").alias("corrupt"),
        f.sum("bytes").alias("bytes"),
    )
    return [_partition(row, offsets=offsets) for row in grouped.orderBy("topic", "partition").collect()]


def _partition(row: Any, *, offsets: bool) -> PartitionFacts:
    known = row["first"] is not None
    first, last = (row["first"], row["last"]) if known else (0, -1)
    counted = known and offsets
    return PartitionFacts(
        row["topic"], row["partition"], row["records"], first, last,
        missing=last - first + 1 - row["distinct"] if counted else 0,
        repeated=row["records"] - row["distinct"] if counted else 0,
        corrupt=row["corrupt"], bytes=row["bytes"],
    )  # fmt: skip


def _producers(rows: DataFrame) -> list[ProducerFacts]:
    """Count gaps and duplicates by producer. Sequence numbers begin at 0, so missing first numbers are detected."""
    numbered = rows.where("sequence is not null").groupBy("producer")
    counted = numbered.agg(
        f.count("*").alias("records"),
        f.min("sequence").alias("first"),
        f.max("sequence").alias("last"),
        f.countDistinct("sequence").alias("distinct"),
    )
    return [
        ProducerFacts(
            row["producer"], row["records"], row["first"], row["last"],
            missing=row["last"] + 1 - row["distinct"], repeated=row["records"] - row["distinct"],
        )
        for row in counted.orderBy("producer").collect()
    ]  # fmt: skip


def _rate(rows: DataFrame, partitions: Sequence[PartitionFacts]) -> tuple[tuple[tuple[float, int, int], ...], float]:
    """Count records by interval of append time and partition, in at most ``TIME_BARS`` intervals."""
    seconds = f.unix_micros("time") / 1e6
    ends = rows.agg(f.min(seconds).alias("first"), f.max(seconds).alias("last")).first()
    if ends is None or ends["first"] is None:
        return (), 0.0
    first = float(ends["first"])
    interval_s = max((float(ends["last"]) - first) / (TIME_BARS - 1), 0.001)
    number = f.floor((seconds - first) / interval_s).alias("number")
    counted = rows.where("time is not null").groupBy(number, "topic", "partition").count().collect()
    places = {(part.topic, part.partition): index for index, part in enumerate(partitions)}
    bars = [
        (first + row["number"] * interval_s, places[row["topic"], row["partition"]], row["count"]) for row in counted
    ]
    return tuple(sorted(bars)), interval_s


def _sizes(rows: DataFrame) -> tuple[tuple[int, int], ...]:
    power = f.ceil(f.log2(f.greatest("bytes", f.lit(1)))).cast("int").alias("power")
    counted = rows.groupBy(power).count().collect()
    return tuple(sorted((1 << min(row["power"], SIZE_BARS), row["count"]) for row in counted))
