"""Parse record values into columns: JSON, Avro, text, and the formats that clients of each protocol commonly use.

The input of a parser is a data frame with the columns of the source ``polywire``. The result has the fields of the
value, then these columns about the record:

* ``_key``, ``_value`` (the original bytes), ``_topic``, ``_partition``, ``_offset``, ``_timestamp``
* ``_headers``, if the source has them
* ``_corrupt``: why the value could not be parsed, or null

A parser returns a row for every record, so no record is dropped silently. If a value cannot be parsed, its fields are
null, and the row has the original bytes and the reason. A record without a value (a deletion) is not corrupt.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DataType, DoubleType, LongType, StructType

from polywire.errors import ErrorCode, Invalid
from polywire.spark import avro
from polywire.spark.schema import value_columns

Parse = Callable[[DataFrame], DataFrame]

CORRUPT: Final = "_corrupt"
VALUE: Final = "_value"
PLACE: Final = (
    "key",
    "value",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "headers",
)  # columns of the source, each with a leading ``_``
# each field costs an expression in the query plan, and another parse if a value is corrupt
FIELDS_EXPLAINED: Final = 100
INT_BYTES: Final = 8  # size of an int in a header
FIELD_CHARS_SHOWN: Final = 60  # maximum number of characters of a wrong value in the reason
_MALFORMED: Final = "_malformed"  # column for input that Spark's JSON reader could not read

_ESCAPED: Final = r"\\(?:[\"'\\/bfnrt]|u[0-9a-fA-F]{4})"
_VALUE: Final = (
    rf'(?:"(?:[^"\\\x00-\x1f]++|{_ESCAPED})*+"|\'(?:[^\'\\\x00-\x1f]++|{_ESCAPED})*+\''
    r"|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+|true|false|null)"
)
_SPACE: Final = r"[ \t\r\n]*+"
# The longest beginning of a text whose neighbouring tokens may follow each other in JSON, so that its end is where the
# text is not JSON. Nesting is not checked. Every repetition is possessive: linear, and without recursion in Java.
READABLE: Final = (
    rf"^{_SPACE}(?:[{{\[]{_SPACE}(?:{_VALUE}{_SPACE})?+|[,:]{_SPACE}(?:{_VALUE}{_SPACE}|(?![}}\]]))|[}}\]]{_SPACE})*+"
)

# Numbers in headers are little-endian; the names are those of ``records.columns.HeaderKind``.
_NUMBERS: Final = {
    "bool": "?", "int8": "<i1", "int16": "<i2", "int32": "<i4", "int64": "<i8", "uint8": "<u1", "uint16": "<u2", "uint32": "<u4",
    "float32": "<f4", "float64": "<f8",
}  # fmt: skip


def parse_json(records: DataFrame, schema: str) -> DataFrame:
    """Return the fields of JSON objects as columns.

    Args:
        records: rows with the columns of the source.
        schema: in Spark's notation (``id long, carrier string``). A field with a different type makes its record
            corrupt. An absent field is null. Fields that the schema does not name are only in ``_value``.

    Raises:
        Invalid: the schema is invalid, or a name in it begins with ``_``.

    Example:
        orders = spark.readStream.format("polywire").option("subscribe", "orders").load()
        parsed = parse_json(orders, "id long, carrier string")
    """
    kind = read_schema(schema)
    text = f.col("value").cast("string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _MALFORMED}
    with_malformed = StructType([*kind.fields]).add(_MALFORMED, "string")
    parsed = records.withColumn("_parsed", f.when(f.is_valid_utf8(text), f.from_json(text, with_malformed, options)))
    # Input that is not an object gives null, or a struct of nulls whose malformed field is null, too.
    reason = (
        f.when(f.col("value").isNull(), None)
        .when(~f.is_valid_utf8(text), "not UTF-8")
        .when(~f.ltrim(text).startswith("{"), "not a JSON object")
        .when(f.col("_parsed").isNull() | f.col(f"_parsed.{_MALFORMED}").isNotNull(), _malformed(text, kind))
    )
    return _spread(parsed, kind, f.col("_parsed"), reason)


def _malformed(text: Column, kind: StructType) -> Column:
    """Return why a text that begins like an object does not match the schema.

    The reason is the first field of another type, or the position at which the text is not JSON.
    """
    fields = f.from_json(text, "map<string, string>")

    def is_wrong(name: str, type_: DataType) -> Column:
        alone = StructType().add(name, type_).add(_MALFORMED, "string")
        read = f.from_json(text, alone, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _MALFORMED})
        return read[_MALFORMED].isNotNull()

    named = [
        f.when(
            is_wrong(field.name, field.dataType),
            f.concat(
                f.lit(f"the field {field.name!r} must be {field.dataType.simpleString()}, not "),
                f.coalesce(f.substring(fields[field.name], 1, FIELD_CHARS_SHOWN), f.lit("null")),
            ),
        )
        for field in kind.fields[:FIELDS_EXPLAINED]
    ]
    # Spark evaluates this only for rejected rows, unlike a function in Python.
    readable = f.regexp_extract(text, READABLE, 0)
    where = f.when(readable == text, ": brackets, commas or colons do not match").otherwise(
        f.concat(f.lit(" at byte "), f.octet_length(readable).cast("string"))
    )
    return f.when(fields.isNull(), f.concat(f.lit("not JSON"), where)).otherwise(
        f.coalesce(*named, f.lit("JSON that does not match the schema"))
    )


def parse_avro(records: DataFrame, schema: str) -> DataFrame:
    """Return the fields of Avro records as columns.

    Requires fastavro (extra ``avro``) on the driver and on the workers.

    Args:
        records: rows with the columns of the source. Each value is a bare record, a record in single-object encoding,
            or a record after the five bytes of a schema registry, which are skipped.
        schema: the schema with which the values were written, as Avro's JSON.

    Raises:
        Invalid: the schema has no columns for Spark.
    """
    kind = avro.spark_schema(schema)
    decoded = records.withColumn("_parsed", avro.datum_udf(schema, kind)(f.col("value")))
    return _spread(decoded, kind, f.col("_parsed.row"), f.col("_parsed.error"))


def parse_avro_files(records: DataFrame, schema: str) -> DataFrame:
    """Return the fields of values that are whole Avro files (Object Container) as columns.

    There is one row for each record of a file, numbered in ``_part``. A file that cannot be read to its end becomes one
    corrupt row.

    Args:
        records: rows with the columns of the source. Each file is read with the schema it contains.
        schema: the schema to which records are converted, as Avro's JSON.

    Raises:
        Invalid: the schema has no columns for Spark.
    """
    kind = avro.spark_schema(schema)
    decoded = records.withColumn("_parsed", avro.file_udf(schema, kind)(f.col("value")))
    exploded = decoded.select("*", f.posexplode_outer("_parsed.rows").alias("_part", "_row"))
    return _spread(exploded, kind, f.col("_row"), f.col("_parsed.error"), f.coalesce("_part", f.lit(0)).alias("_part"))


def parse_text(records: DataFrame) -> DataFrame:
    """Return values as a column ``text``, for protocols that transport text (FLUX, Cursus).

    Invalid UTF-8 is corrupt.
    """
    text = f.col("value").cast("string")
    parsed = records.withColumn("_parsed", f.struct(f.when(f.is_valid_utf8(text), text).alias("text")))
    reason = f.when(~f.is_valid_utf8(text), "not UTF-8")
    return _spread(parsed, StructType().add("text", "string"), f.col("_parsed"), reason)


def parse_events(records: DataFrame, schema: str) -> DataFrame:
    """Return the fields of event-sourced records (Cursus) as columns.

    The columns ``_type``, ``_schema_version``, ``_version`` (of the aggregate) and ``_metadata`` are added to the
    fields of the JSON payload. An event without a version is corrupt.

    Args:
        records: rows read with the option ``includeHeaders``.
        schema: schema of the payload, as for ``parse_json``.

    Raises:
        Invalid: the records have no headers, or what ``parse_json`` raises.
    """
    _require_headers(records)
    parsed = parse_json(records, schema)
    version = header_text("_headers", "event.aggregate_version").cast("long")
    missing = f.when(f.col(VALUE).isNotNull() & version.isNull(), "no event.aggregate_version")
    return parsed.withColumns(
        {
            "_type": header_text("_headers", "event.type"),
            "_schema_version": header_text("_headers", "event.schema_version").cast("int"),
            "_version": version,
            "_metadata": header("_headers", "event.metadata"),
            CORRUPT: f.coalesce(f.col(CORRUPT), missing),
        }
    )


def header(headers: str, name: str) -> Column:
    """Return the bytes of the last header with this name, or null. ``headers`` is the name of the column."""
    return f.try_element_at(f.filter(f.col(headers), lambda pair: pair["key"] == name), f.lit(-1))["value"]


def header_text(headers: str, name: str) -> Column:
    """Return the last header with this name as text, or null. ``headers`` is the name of the column."""
    return header(headers, name).cast("string")


def header_number(headers: str, name: str, kind: str) -> Column:
    """Return a header that was stored as a number (Iggy).

    The result is null if the header's size does not fit ``kind``.

    Args:
        headers: name of the column.
        name: name of the header.
        kind: bool, int8 to int64, uint8 to uint32, float32 or float64.

    Raises:
        Invalid: unknown kind.
    """
    layout = _NUMBERS.get(kind)
    if layout is None:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"unknown numeric header type kind={kind!r} known={','.join(_NUMBERS)}"
        )
    kind_read = np.dtype(layout)
    is_float = kind_read.kind == "f"
    arrow = pa.float64() if is_float else pa.int64()

    def read(values: pa.Array) -> pa.Array:  # type: ignore[type-arg]
        wide = [item if item is not None and len(item) == kind_read.itemsize else None for item in values.to_pylist()]
        numbers = np.frombuffer(b"".join(item or bytes(kind_read.itemsize) for item in wide), kind_read)
        return pa.array(
            numbers.astype("f8" if is_float else "i8"), arrow, mask=np.array([item is None for item in wide])
        )

    result = DoubleType() if is_float else LongType()
    # PySpark evaluates the annotations, so they must be real types, not strings.
    read.__annotations__ = {"values": pa.Array, "return": pa.Array}
    number: Column = arrow_udf(read, result)(header(headers, name))  # type: ignore[call-overload]
    return number


def dead_letter(headers: str) -> Column:
    """Return what the headers of a dead letter say, as a struct. It is null for other records.

    Fields: ``reason``, ``attempts`` (from queues), ``group`` (from queues), and ``topic``, ``partition`` and ``offset``
    of the original record. A field is null if its header is missing or malformed.

    Args:
        headers: name of the column: ``headers`` or ``typedHeaders`` of the source, ``_headers`` of a parser.

    Example:
        records.select("value", dead_letter("headers").alias("dead")).select("value", "dead.*")
    """
    fields = f.struct(
        header_text(headers, "dead.reason").alias("reason"),
        _whole_number(headers, "dead.deliveries").try_cast("int").alias("attempts"),
        header_text(headers, "dead.group").alias("group"),
        header_text(headers, "dead.topic").alias("topic"),
        _whole_number(headers, "dead.partition").try_cast("int").alias("partition"),
        _whole_number(headers, "dead.offset").alias("offset"),
    )
    return f.when(header(headers, "dead.reason").isNotNull(), fields)


def _whole_number(headers: str, name: str) -> Column:
    """Return a header that is a number as text, as brokers and pipelines write it, or an int of the Python client."""
    stored = header(headers, name)
    digits = f.hex(stored)
    reversed_digits = f.concat(*(f.substring(digits, at, 2) for at in range(2 * INT_BYTES - 1, 0, -2)))
    as_int = f.when(f.octet_length(stored) == INT_BYTES, f.conv(reversed_digits, 16, 10).try_cast("long"))
    return f.coalesce(stored.cast("string").try_cast("long"), as_int)


def sound(parsed: DataFrame) -> DataFrame:
    """Return the rows whose value could be parsed."""
    return parsed.where(f.col(CORRUPT).isNull())


def corrupt(parsed: DataFrame) -> DataFrame:
    """Return the rows whose value could not be parsed, with its bytes in ``_value`` and the reason in ``_corrupt``."""
    return parsed.where(f.col(CORRUPT).isNotNull())


def table_columns(parsed: DataFrame) -> DataFrame:
    """Return a parser's columns for a table. ``_value`` is null if the value could be parsed."""
    if CORRUPT not in parsed.columns or VALUE not in parsed.columns:
        return parsed
    return parsed.withColumn(VALUE, f.when(f.col(CORRUPT).isNotNull(), f.col(VALUE)))


def parser(text: str) -> Parse:
    """Return the parser that a text names.

    Args:
        text: ``json:DDL``, ``avro:FILE``, ``avro-file:FILE``, ``events:DDL``, ``text``, or ``module:function`` for your
            own function.

    Raises:
        Invalid: INVALID_REQUEST: the text has another form, or a file cannot be read.
    """
    form, _, rest = text.partition(":")
    match form:
        case "json":
            return _with_schema(parse_json, rest)
        case "events":
            return _with_schema(parse_events, rest)
        case "avro":
            return _with_schema(parse_avro, _file_text(rest))
        case "avro-file":
            return _with_schema(parse_avro_files, _file_text(rest))
        case "text" if not rest:
            return parse_text
        case _:
            return imported(text)


def imported(text: str) -> Callable[..., Any]:
    """Return the function ``module:function``. Raises Invalid(INVALID_REQUEST)."""
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "cannot import the function (polywire pipeline run searches installed packages, PYTHONPATH and the current"
            f" folder) reason={error} name={text!r}",
        ) from error
    if not callable(found):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"imported object is not a function name={text!r}")
    function: Callable[..., Any] = found
    return function


def read_schema(text: str) -> StructType:
    """Parse the schema of a value's columns.

    Raises Invalid for names that begin with ``_``, which are reserved for columns about the record.
    """
    try:
        kind = StructType.fromDDL(text)
    except PySparkException as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"invalid schema reason={error} schema={text!r}") from error
    return value_columns(kind)


def _spread(parsed: DataFrame, kind: StructType, row: Column, reason: Column, *more: Column) -> DataFrame:
    """Return the fields of ``row`` and the columns about the record. If ``reason`` is not null, the fields are null."""
    fields = [f.when(reason.isNull(), row[name]).alias(name) for name in kind.fieldNames()]
    location = [f.col(name).alias(f"_{name}") for name in PLACE if name in parsed.columns]
    return parsed.select(*fields, *location, *more, reason.alias(CORRUPT))


def _with_schema(parse: Callable[[DataFrame, str], DataFrame], schema: str) -> Parse:
    return lambda records: parse(records, schema)


def _file_text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"cannot read the schema file reason={error}") from error


def _require_headers(records: DataFrame) -> None:
    if "headers" not in records.columns:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, "event columns come from headers (read with the option includeHeaders=true)"
        )
