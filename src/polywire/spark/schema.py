"""The columns of the source and the sink, which are those of Spark's Kafka source and sink.

A user's schema may select any column of the source, in any order. Error messages suggest the right column, or a fix.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from polywire.choices import unknown
from polywire.errors import ErrorCode, Invalid
from polywire.spark.options import Headers

_HEADER: Final = StructType([StructField("key", StringType()), StructField("value", BinaryType())])

_TYPED_HEADER: Final = StructType(
    [StructField("key", StringType()), StructField("type", StringType()), StructField("value", BinaryType())]
)

COLUMNS: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(_HEADER),
    "typedHeaders": ArrayType(_TYPED_HEADER),
}
ACCEPTED: Final[dict[str, tuple[str, ...]]] = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "headers": ("array<struct<key:string,value:binary>>",),
    "typedHeaders": ("array<struct<key:string,type:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
}
# Columns of the source that are allowed when one topic is copied to another; the broker assigns new values.
IGNORED: Final = ("offset", "timestamp", "timestampType")


def source_schema(headers: Headers) -> StructType:
    """Return the default schema."""
    left_out = {
        Headers.NONE: ("headers", "typedHeaders"),
        Headers.PLAIN: ("typedHeaders",),
        Headers.TYPED: ("headers",),
    }
    names = [name for name in COLUMNS if name not in left_out[headers]]
    return StructType([StructField(name, COLUMNS[name]) for name in names])


def check_schema(schema: StructType) -> None:
    """Raise Invalid(INVALID_REQUEST) for columns that the source does not have."""
    if not schema.fields:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"the schema has no columns columns={','.join(COLUMNS)}")
    for field in schema.fields:
        expected = COLUMNS.get(field.name)
        if expected is None:
            raise unknown("column", field.name, COLUMNS)
        if field.dataType.simpleString() != expected.simpleString():
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"a column has another type (cast it after loading) column={field.name!r} "
                f"given={field.dataType.simpleString()} expected={expected.simpleString()}",
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema (types, names and order) that Spark expects of the first record batch."""
    return to_arrow_schema(schema, timezone="UTC")


def value_columns(kind: DataType) -> StructType:
    """Return the columns into which a value is parsed.

    Raises Invalid if the type is not a struct, and for names that begin with ``_``, which are reserved.
    """
    if not isinstance(kind, StructType):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"schema is not a struct (Avro: record) type={kind.simpleString()}")
    reserved = [name for name in kind.fieldNames() if name.startswith("_")]
    if reserved:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"column names that begin with _ are reserved names={','.join(reserved)}"
        )
    return kind


def check_rows(schema: StructType, topic: str | None) -> None:
    """Raise Invalid(INVALID_REQUEST) for rows that cannot be written. ``topic`` is the value of the option topic."""
    names = [field.name for field in schema.fields]
    if "value" not in names:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "there is no column value (create it, for example with to_json(struct(*)) as value) "
            f"columns={','.join(names) or 'none'}",
        )
    if topic is None and "topic" not in names:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the target topic is missing (set the option topic, or add a column topic) columns={','.join(names)}",
        )
    if "headers" in names and "typedHeaders" in names:
        raise Invalid(ErrorCode.INVALID_REQUEST, "rows have headers and typedHeaders; drop one of the two columns")
    for field in schema.fields:
        if names.count(field.name) > 1:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"several columns have the same name column={field.name!r}")
        _check_column(field.name, field.dataType)


def _check_column(name: str, kind: DataType) -> None:
    if name in IGNORED:
        return
    accepted = ACCEPTED.get(name)
    if accepted is None:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "rows have a column that records do not have (drop it, or include it in the value with to_json(struct(...))) "
            f"column={name!r} columns={','.join(ACCEPTED)}",
        )
    if kind.simpleString() not in accepted:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"a column has a type that cannot be written (cast it) column={name!r} given={kind.simpleString()} "
            f"accepted={' or '.join(accepted)}",
        )
