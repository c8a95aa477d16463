"""Read a topic as a table in Spark: its Parquet files by Spark's own reader, and newer records by the data source.

The two parts have each record once. Filters and selected columns reach the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from polywire.client import bulk
from polywire.errors import ErrorCode, Invalid
from polywire.spark import options as source_options
from polywire.spark.options import ADDRESS_DEFAULT
from polywire.tables.columns import ARROW_SCHEMA, READ_NAMES
from polywire.tables.reading import Snapshot, snapshot

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
"""Columns of a table (concepts: tables#columns)."""
SPARK_SCHEMES: Final[Mapping[str, str]] = {"s3": "s3a", "az": "abfs"}
"""Schemes of buckets that Hadoop spells differently."""
_GLOB: Final = re.compile(r"[\\{}\[\]*?]")


def table(
    spark: SparkSession, topic: str, *, address: str = ADDRESS_DEFAULT, tail: bool = True, **options: str
) -> DataFrame:
    """Return a topic as a table: the files of its table, and from the broker the records that these do not have yet.

    The frame has the records that were synced when this function was called, and the columns ``partition``, ``offset``,
    ``timestamp``, ``timestamp_type``, ``key``, ``value`` and ``headers``. Use it before ``table_history_hours`` have
    passed, because its files may be deleted then.

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
    login = source_options.login(given)
    urls = [found if "://" in found else f"polywire://{found}" for found in source_options.addresses(given)]
    found = snapshot(bulk.connect(",".join(urls), login=login), topic)
    parts = [_files(spark, found)]
    if tail and found.tail:
        parts.append(_tail(spark, found, given))
    chosen = [part for part in parts if part is not None]
    if not chosen:
        return spark.createDataFrame([], SCHEMA)
    return chosen[0] if len(chosen) == 1 else chosen[0].unionByName(chosen[1])


def _files(spark: SparkSession, found: Snapshot) -> DataFrame | None:
    """Return the rows of the files; None if there are none."""
    if not found.files:
        return None
    scheme = urlsplit(found.url).scheme
    hadoop_scheme = SPARK_SCHEMES.get(scheme, scheme)
    if not found.is_local:
        check_file_system(spark, hadoop_scheme, found.url)
    paths = [
        f"file://{_escaped(path)}" if found.is_local else _escaped(path.replace(scheme, hadoop_scheme, 1))
        for path in found.paths
    ]
    return spark.read.schema(SCHEMA).parquet(*paths)


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
    columns = [f"{READ_NAMES.get(name, name)} as {name}" for name in ARROW_SCHEMA.names]
    return reader.load().selectExpr(*columns)
