"""Columns of the source, exactly those of Spark's Kafka source, and columns of a value.

A user's schema may select any of these columns, in any order. Any other column raises an error that suggests the right
one.
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
        if _type_name(field.dataType) != _type_name(expected):
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"a column has another type (cast it after loading) column={field.name!r} "
                f"given={_type_name(field.dataType)} expected={_type_name(expected)}",
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema (types, names and order) with which Spark compares the first record batch."""
    return to_arrow_schema(schema, timezone="UTC")


def _type_name(data_type: DataType) -> str:
    return data_type.simpleString()


def value_columns(kind: DataType) -> StructType:
    """Return the columns of a value.

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
