"""What every pipeline does the same way: a topic as a stream, a stream into a topic, and running a query to its end.

Promises: a run that was stopped, ``kill -9`` included, goes on with the same checkpoint where it was; what a query left out is counted.
Must not know: any one pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from polywire.spark.functions import Parse, parser
from polywire.spark.progress import BatchProgress, Told, follow

SOURCE: Final = "polywire"

# Settings that several pipelines share, with what they mean; ``registry`` shows these words.
Address = Annotated[str, "host:port of the broker's polywire wire"]
Topic = Annotated[str, "topic to read"]
Checkpoint = Annotated[str | Path, "folder that remembers how far the job is; one for each job"]
BatchRecordsMax = Annotated[int | None, "most records of one micro-batch"]
AvailableNow = Annotated[bool, "end when everything that was there at the start is done, else run until stopped"]
Parser = Annotated[
    Parse | str | None,
    "json:DDL, events:DDL, avro:FILE, avro-file:FILE, text, or module:function; how values become columns",
]


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run did. ``late`` counts rows that stateful operators left out because they came behind the watermark."""

    records: int
    batches: int
    late: int = 0


def topic_stream(
    spark: SparkSession, address: str, topic: str, *, batch_records_max: int | None = None, headers: bool = False
) -> DataFrame:
    """A topic as a stream from its beginning, or from where the query's checkpoint says."""
    reader = spark.readStream.format(SOURCE).option("address", address)
    reader = reader.option("subscribe", topic).option("startingOffsets", "earliest")
    reader = reader.option("includeHeaders", str(headers).lower())
    if batch_records_max is not None:
        reader = reader.option("maxOffsetsPerTrigger", batch_records_max)
    return reader.load()


def topic_rows(spark: SparkSession, address: str, topic: str, *, headers: bool = False) -> DataFrame:
    """Everything a topic holds now."""
    reader = spark.read.format(SOURCE).option("address", address).option("subscribe", topic)
    return reader.option("includeHeaders", str(headers).lower()).load()


def into_topic(frame: DataFrame, address: str, topic: str | None = None) -> DataStreamWriter:
    """A stream of records (columns key, value, headers, topic, partition) written exactly once; ``topic`` None: the column says."""
    writer = frame.writeStream.format(SOURCE).option("address", address)
    return writer if topic is None else writer.option("topic", topic)


def as_parser(parse: Parse | str) -> Parse:
    """A parser, or the one its text names."""
    return parser(parse) if isinstance(parse, str) else parse


def run_query(
    writer: DataStreamWriter, name: str, checkpoint: str | Path, *, available_now: bool, told: Told | None
) -> Ran:
    """Start the query and follow it until it ends. Raises what the query failed with."""
    writer = writer.queryName(name).option("checkpointLocation", str(checkpoint))
    if available_now:
        writer = writer.trigger(availableNow=True)
    batches = late = 0

    def count(batch: BatchProgress) -> None:
        nonlocal batches, late
        batches += 1
        late += batch.late
        if told is not None:
            told(batch)

    records = follow(writer.start(), count)
    return Ran(records, batches, late)
