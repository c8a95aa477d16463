"""Shared parts of the pipelines: read a topic as a stream, write a stream to a topic, run a query until it ends.

A stopped or killed run resumes from its checkpoint. Skipped rows are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pyspark.sql import DataFrame, DataFrameReader, DataFrameWriter, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter

from polywire.client.address import split_login
from polywire.spark.functions import CORRUPT, Parse, parser
from polywire.spark.progress import BatchProgress, OnProgress, follow, observed

SOURCE: Final = "polywire"
HEADERS: Final = "array<struct<key: string, value: binary>>"
QUERY_ID: Final = "sql.streaming.queryId"  # a local property of the thread that runs a micro-batch

STATE_SETTINGS: Final = {
    # Keep state on disk: in the executors' memory it would eventually stop a long run. `transformWithState` requires
    # this.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # The provider requires Hadoop's own class for local files, but our sessions use a faster one. Without Hadoop's
    # cache, each keeps its own class.
    "fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}

# Settings that several pipelines share, with their descriptions; ``registry`` displays these texts.
Address = Annotated[
    str, "host:port of the broker's polywire protocol, name@host:port to log in with the password in POLYWIRE_PASSWORD"
]
Topic = Annotated[str, "topic to read"]
Checkpoint = Annotated[str | Path, "folder that stores the job's progress; each job needs its own"]
BatchRecordsMax = Annotated[int | None, "maximum number of records in one micro-batch"]
AvailableNow = Annotated[
    bool, "end when all records that existed at the start are processed; otherwise run until stopped"
]
Parser = Annotated[
    Parse | str | None,
    "json:DDL, events:DDL, avro:FILE, avro-file:FILE, text, or module:function; how values become columns",
]


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of one run of a pipeline.

    Attributes:
        left_out: number of rows that could not be processed (late, or without a time).
        corrupt: number of values that could not be parsed.
        unmet: number of rows that do not meet an expectation, by its name.
    """

    records: int
    batches: int
    left_out: int = 0
    corrupt: int = 0
    unmet: Mapping[str, int] = field(default_factory=dict)

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems with the result, as sentences."""
        counted = ((self.left_out, "rows were skipped"), (self.corrupt, "values could not be read"))
        unmet = [(count, f"rows do not meet the expectation {name!r}") for name, count in self.unmet.items()]
        return tuple(f"{count:,} {problem}" for count, problem in (*counted, *unmet) if count)


_Placed = TypeVar("_Placed", DataFrameReader, DataStreamReader, DataFrameWriter, DataStreamWriter)


def located(placed: _Placed, address: str) -> _Placed:
    """Set the broker's address on a reader or writer.

    The login is set as separate options, which Spark redacts in logs.
    """
    login, bare = split_login(address)
    placed = placed.option("address", bare)
    return placed if login is None else placed.option("user", login.name).option("password", login.password)


def topic_stream(
    spark: SparkSession, address: str, topic: str, *, batch_records_max: int | None = None, headers: bool = False
) -> DataFrame:
    """Return topics as a stream from their beginning, or from where the query's checkpoint ends.

    ``topic`` is a value of the option ``subscribe``.
    """
    _activate(spark)
    reader = located(spark.readStream.format(SOURCE), address)
    reader = reader.option("subscribe", topic).option("startingOffsets", "earliest")
    reader = reader.option("includeHeaders", str(headers).lower())
    if batch_records_max is not None:
        reader = reader.option("maxOffsetsPerTrigger", batch_records_max)
    return reader.load()


def topic_rows(spark: SparkSession, address: str, topic: str, *, headers: bool = False) -> DataFrame:
    """Return all records that topics contain now. ``topic`` is a value of the option ``subscribe``."""
    _activate(spark)
    reader = located(spark.read.format(SOURCE), address).option("subscribe", topic)
    return reader.option("includeHeaders", str(headers).lower()).load()


def into_topic(frame: DataFrame, address: str, topic: str | None = None) -> DataStreamWriter:
    """Write a stream of records (columns key, value, headers, topic, partition) exactly once.

    If ``topic`` is None, the column topic is used.
    """
    writer = located(sendable(frame).writeStream.format(SOURCE), address)
    return writer if topic is None else writer.option("topic", topic)


def sendable(records: DataFrame) -> DataFrame:
    """Return records with an empty list instead of null headers, which the sink treats alike.

    Null lists make the conversion to Arrow slow: Spark computes the size of the batch after every row, and then visits
    all previous rows each time.
    """
    if "headers" not in records.columns:
        return records
    return records.withColumn("headers", f.coalesce("headers", f.array().cast(HEADERS)))


def changes_into_topic(frame: DataFrame, address: str, topic: str) -> DataStreamWriter:
    """Write a stream of records that replace earlier ones with the same key, exactly once.

    It uses foreachBatch, because Spark's Python sinks do not support output mode update.
    """

    def write(batch: DataFrame, number: int) -> None:
        writer = located(batch.write.format(SOURCE), address).mode("append").option("topic", topic)
        writer.option("txnAppId", query_id(batch.sparkSession)).option("txnId", number).save()

    return frame.writeStream.outputMode("update").foreachBatch(write)


def query_id(spark: SparkSession) -> str:
    """Return the id of the query whose micro-batch is being written. It is the same for all runs with one checkpoint."""
    known = spark.sparkContext.getLocalProperty(QUERY_ID)
    assert known is not None, "must be called inside a micro-batch"
    return known


def stateful(spark: SparkSession) -> SparkSession:
    """Return a new session with the settings for stateful queries. ``spark`` is unchanged."""
    cloned = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
    for name, value in STATE_SETTINGS.items():
        cloned.conf.set(name, value)
    return cloned


def parsed(records: DataFrame, parse: Parse | str, *, time: str | None = None) -> DataFrame:
    """Parse records with a parser, or with its text form.

    Counts rows that could not be parsed, and rows without ``time``, while the query runs.
    """
    rows = (parser(parse) if isinstance(parse, str) else parse)(records)
    corrupt = f.col(CORRUPT).isNotNull() if CORRUPT in rows.columns else f.lit(False)
    left_out = f.col(time).isNull() if time is not None else f.lit(False)
    return observed(rows, corrupt=corrupt, left_out=left_out)


def run_query(
    writer: DataStreamWriter, name: str, checkpoint: str | Path, *, available_now: bool, on_progress: OnProgress | None
) -> Ran:
    """Start the query and wait until it ends. Raises the error with which it failed."""
    writer = writer.queryName(name).option("checkpointLocation", str(checkpoint))
    if available_now:
        writer = writer.trigger(availableNow=True)
    batches = left_out = corrupt = 0
    unmet: Counter[str] = Counter()

    def count(batch: BatchProgress) -> None:
        nonlocal batches, left_out, corrupt
        batches += 1
        left_out += batch.left_out
        corrupt += batch.corrupt
        unmet.update(batch.unmet)
        if on_progress is not None:
            on_progress(batch)

    records = follow(writer.start(), count)
    return Ran(records, batches, left_out, corrupt, unmet)


def _activate(spark: SparkSession) -> None:
    """Activate the session in this thread.

    Spark's Python sinks need an active session, and new threads have none.
    """
    if SparkSession.getActiveSession() is None:
        spark._jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)  # type: ignore[union-attr]
