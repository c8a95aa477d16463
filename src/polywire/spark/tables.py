"""Read a topic as a table in Spark: its Parquet files by Spark's own reader, and newer records by the data source.

The two parts have each record once. Filters and selected columns reach the files. Of a table with the latest record of
each key, joins with small frames remove rows that are deleted or replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql.functions import broadcast, col, desc, row_number, when
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from polywire.client import bulk
from polywire.client.bulk import BulkConnection
from polywire.errors import Conflict, ErrorCode, Invalid
from polywire.names import escape
from polywire.spark import options as source_options
from polywire.spark.options import ADDRESS_DEFAULT
from polywire.table_columns import TypedColumn
from polywire.tables.columns import ARROW_SCHEMA, READ_NAMES, arrow_schema, conformed, decimal_of
from polywire.tables.delta_log import TableState
from polywire.tables.reading import PATH, ROW, Snapshot, deleted_rows, snapshot
from polywire.tables.typed import ColumnMaker

SCHEMA: Final = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestamp_type", IntegerType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField(
            "headers", ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
        ),
    ]
)
"""Columns of a table without typed columns (concepts: tables#columns)."""
_TYPES: Final[Mapping[str, DataType]] = {
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "string": StringType(),
    "date": DateType(),
    "timestamp": TimestampType(),
}
SPARK_SCHEMES: Final[Mapping[str, str]] = {"s3": "s3a", "az": "abfs"}
"""Schemes of buckets that Hadoop spells differently."""
_COLUMNS: Final = [f"{READ_NAMES.get(name, name)} as {name}" for name in ARROW_SCHEMA.names]
_AGE: Final = "polywire=age"  # no typed column has a name with "="
_GLOB: Final = re.compile(r"[\\{}\[\]*?]")


def table(
    spark: SparkSession, topic: str, *, address: str = ADDRESS_DEFAULT, tail: bool = True, **options: str
) -> DataFrame:
    """Return a topic as a table: the rows of the table's files, and newer records from the broker.

    The frame has the records that were synced when this function was called, and the columns ``partition``, ``offset``,
    ``timestamp``, ``timestamp_type``, ``key``, ``value`` and ``headers``, followed by the table's typed columns. Use it
    before ``table_history_hours`` have passed, because its files may be deleted then.

    Args:
        spark: a session, for example from ``polywire.spark.session``.
        topic: full name.
        address: one or several brokers, as for the option ``address`` of the data source.
        tail: whether to include records that only the log has.
        **options: further options of the data source, such as ``user`` and ``password``.

    Raises:
        Invalid: the topic has no table, this client may not get the path of its files, or Spark cannot read its bucket.
        Missing: TOPIC_MISSING.
        Unavailable: the files or the broker cannot be reached.

    Example:
        orders = table(spark, "orders", address="127.0.0.1:9555")
        orders.where("partition = 0").selectExpr("cast(value as string)").show()
    """
    given = {"address": address, **options}
    found = snapshot(_connection(given), topic)
    schema = _schema(found.columns)
    parts = [_current_files(spark, found)] if found.files else []
    if tail and found.tail:
        newer = _tail(spark, found, given)
        if found.is_latest:
            newer = _latest(newer)
            keys = broadcast(newer.select("partition", "key"))
            parts = [part.join(keys, ["partition", "key"], "left_anti").select(*_selected(schema)) for part in parts]
            newer = newer.where("value is not null or key is null")
        parts.append(newer)
    if not parts:
        return _files(spark, [], schema)
    return parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])


def stream_table(
    spark: SparkSession,
    topic: str,
    each_batch: Callable[[DataFrame, int], object],
    *,
    checkpoint: str,
    address: str = ADDRESS_DEFAULT,
    trigger: Mapping[str, Any] | None = None,
    **options: str,
) -> StreamingQuery:
    """Pass the files of a topic's table to a function, and then each micro-batch of newer records.

    ``each_batch(frame, number)`` gets the table's rows with number 0, before this function returns. Micro-batches have
    the numbers from 1 on. For a compacted topic they have all newer records, including those that a later one replaces
    and tombstones. After a failure, a batch is repeated with the same number and the same rows, so a function that
    ignores numbers it has finished processes each record once.

    Args:
        spark: a session, for example from ``polywire.spark.session``.
        topic: full name.
        each_batch: called with a frame that has the columns of ``table``, and its number. It has the typed columns that
            the table has when this function is called.
        checkpoint: directory in which the progress of this query is stored.
        address: as for ``table``.
        trigger: arguments of ``DataStreamWriter.trigger``, such as ``{"availableNow": True}``.
        **options: further options of the data source, such as ``maxOffsetsPerTrigger``.

    Raises:
        Conflict: TOPIC_REPLACED: the topic was deleted and created again since the query began.
        Invalid: the same as ``table``.
        Missing: TOPIC_MISSING.
        Unavailable: the files or the broker cannot be reached.

    Example:
        def save(frame, number):
            frame.write.mode("overwrite").parquet(f"copy/batch={number}")

        stream_table(spark, "orders", save, checkpoint="copy.checkpoint").awaitTermination()
    """
    given = {"address": address, **options}
    found = snapshot(_connection(given), topic)
    begun, offsets = _begin(spark, found, f"{checkpoint}/polywire-table")
    finished = f"{checkpoint}/polywire-table-finished"
    if _stored(spark, finished) is None:
        each_batch(_current_files(spark, begun), 0)
        _store(spark, finished, {})
    reader = spark.readStream.format("polywire").options(
        **given,
        subscribe=escape(topic, ","),
        startingOffsets=json.dumps({topic: offsets}),
        includeHeaders="true",
    )

    def micro_batch(frame: DataFrame, number: int) -> None:
        each_batch(frame, number + 1)

    writer = _typed(reader.load().selectExpr(*_COLUMNS), found).writeStream.foreachBatch(micro_batch)
    writer = writer.option("checkpointLocation", checkpoint)
    return (writer.trigger(**trigger) if trigger else writer).start()


def _connection(given: Mapping[str, str]) -> BulkConnection:
    login = source_options.login(given)
    urls = [found if "://" in found else f"polywire://{found}" for found in source_options.addresses(given)]
    return bulk.connect(",".join(urls), login=login)


def _begin(spark: SparkSession, found: Snapshot, place: str) -> tuple[Snapshot, dict[str, int]]:
    """Return the files and the offsets by partition with which a query begins.

    They are stored when it starts for the first time.
    """
    incarnations = {str(part.partition): part.incarnation for part in found.ranges}
    stored = _stored(spark, place)
    if stored is None:
        offsets = {str(part.partition): part.offset for part in found.ranges}
        files = [file.add(data_change=False) for file in found.files]
        stored = {"url": found.url, "files": files, "offsets": offsets, "incarnations": incarnations}
        _store(spark, place, stored)
    elif any(incarnations.get(number) != known for number, known in stored["incarnations"].items()):
        raise Conflict(
            ErrorCode.TOPIC_REPLACED,
            "topic was deleted and created again since the query began: start the query with a new checkpoint location"
            f" topic={found.topic!r}",
        )
    begun = TableState()
    begun.apply(stored["files"])
    # partitions may have been added
    offsets = dict.fromkeys(incarnations, source_options.EARLIEST_OFFSET) | stored["offsets"]
    return replace(found, url=stored["url"], files=tuple(begun.files.values()), ranges=()), offsets


def _stored(spark: SparkSession, place: str) -> dict[str, Any] | None:
    """Return what ``_store`` has stored in a directory; None if nothing, or if storing was interrupted."""
    try:
        row = spark.read.text(place).first()
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return None
    found: dict[str, Any] | None = None if row is None else json.loads(row["value"])
    return found


def _store(spark: SparkSession, place: str, content: Mapping[str, Any]) -> None:
    frame = spark.createDataFrame([(json.dumps(content),)], "value string")
    frame.coalesce(1).write.mode("overwrite").text(place)


def _schema(columns: Sequence[TypedColumn]) -> StructType:
    return StructType([*SCHEMA.fields, *(StructField(column.name, _type(column)) for column in columns)])


def _type(column: TypedColumn) -> DataType:
    return _TYPES[column.type] if column.type in _TYPES else DecimalType(*decimal_of(column.type))


def _files(spark: SparkSession, paths: Sequence[str], schema: StructType) -> DataFrame:
    return spark.read.schema(schema).parquet(*paths) if paths else spark.createDataFrame([], schema)


def _typed(frame: DataFrame, found: Snapshot) -> DataFrame:
    """Add the typed columns of a table to records of the log."""
    columns, active = found.columns, found.active
    if not columns:
        return frame

    def add(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        typed, schema = ColumnMaker(active, [column.name for column in columns]), arrow_schema(columns)
        for batch in batches:
            yield conformed(typed.added(batch), schema)

    return frame.mapInArrow(add, _schema(columns))


def _current_files(spark: SparkSession, found: Snapshot) -> DataFrame:
    """Return the rows of the files that the table has."""
    files = _files(spark, _paths(spark, found), _schema(found.columns))
    if not found.has_deleted:
        return files
    rows = deleted_rows(found)
    names = [str(path).rsplit("/", 1)[-1] for path in rows.column(PATH).to_pylist()]
    deleted = spark.createDataFrame(pa.table({PATH: names, ROW: rows.column(ROW)}))
    metadata = files.metadataColumn("_metadata")  # unlike col("_metadata"), it is not a typed column with this name
    numbered = files.select("*", metadata["file_name"].alias(PATH), metadata["row_index"].alias(ROW))
    return numbered.join(broadcast(deleted), [PATH, ROW], "left_anti").drop(PATH, ROW)


def _selected(schema: StructType) -> list[Column]:
    """Return the columns of a schema, whose names may have characters that mean something else in Spark."""
    return [col(f"`{name.replace('`', '``')}`") for name in schema.names]


def _latest(frame: DataFrame) -> DataFrame:
    """Return the latest record of each key, and records without a key."""
    window = Window.partitionBy("partition", "key").orderBy(desc("offset"))
    numbered = frame.withColumn(_AGE, when(col("key").isNull(), 1).otherwise(row_number().over(window)))
    return numbered.where(col(_AGE) == 1).drop(_AGE)


def _paths(spark: SparkSession, found: Snapshot) -> list[str]:
    """Return the files as Spark names them."""
    if found.is_local:
        return [f"file://{_escaped(path)}" for path in found.paths]
    scheme = urlsplit(found.url).scheme
    hadoop_scheme = SPARK_SCHEMES.get(scheme, scheme)
    check_file_system(spark, hadoop_scheme, found.url)
    return [_escaped(path.replace(scheme, hadoop_scheme, 1)) for path in found.paths]


def _escaped(path: str) -> str:
    return _GLOB.sub(r"\\\g<0>", path)


def check_file_system(spark: SparkSession, scheme: str, url: str) -> None:
    """Raise Invalid if the session has no Hadoop file system for a bucket."""
    context = getattr(spark, "sparkContext", None)
    if context is None:
        return  # Spark Connect: the server reports it
    java, hadoop = context._jvm, context._jsc.hadoopConfiguration()
    try:
        java.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, hadoop)
    except Py4JError as error:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"Spark cannot read the bucket of this table: add org.apache.hadoop:hadoop-aws to spark.jars.packages, or read "
            f"the log with format('polywire') scheme={scheme!r} table={url}",
        ) from error


def _tail(spark: SparkSession, found: Snapshot, given: Mapping[str, str]) -> DataFrame:
    """Return the records that only the log has."""
    starts = {str(part.partition): part.offset for part in found.tail}
    ends = {str(part.partition): part.offset_end for part in found.tail}
    reader = spark.read.format("polywire").options(
        **given,
        assign=json.dumps({found.topic: sorted(map(int, starts))}),
        startingOffsets=json.dumps({found.topic: starts}),
        endingOffsets=json.dumps({found.topic: ends}),
        includeHeaders="true",
    )
    return _typed(reader.load().selectExpr(*_COLUMNS), found)
