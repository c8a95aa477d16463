"""Decode Avro values in Spark without a schema registry and without Spark's own Avro package, which is not on PyPI.

If a value cannot be decoded, or bytes remain after its record, the result contains the reason.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NoReturn

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_type
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
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from polywire.errors import ErrorCode, Invalid
from polywire.spark.schema import value_columns

SINGLE_OBJECT: Final = b"\xc3\x01"  # Avro's specification, "single-object encoding": then 8 bytes of fingerprint
REGISTRY_HEAD_BYTES: Final = 5  # a zero byte and the id of a schema in a schema registry
FILE_RECORDS_MAX: Final = 1_000_000  # maximum number of records in one value that is an Avro file
NESTING_MAX: Final = 64  # Spark has no recursive types

_PRIMITIVES: Final[dict[str, DataType]] = {
    "boolean": BooleanType(), "int": IntegerType(), "long": LongType(), "float": FloatType(), "double": DoubleType(),
    "bytes": BinaryType(), "string": StringType(), "enum": StringType(), "fixed": BinaryType(), "null": StringType(),
}  # fmt: skip
_LOGICAL: Final[dict[str, DataType]] = {
    "date": DateType(), "timestamp-millis": TimestampType(), "timestamp-micros": TimestampType(), "uuid": StringType(),
}  # fmt: skip
_WIDENED: Final[list[tuple[set[str], DataType]]] = [
    ({"int", "long"}, LongType()),
    ({"float", "double"}, DoubleType()),
]


def spark_schema(schema: str) -> StructType:
    """Return Spark's columns for an Avro record schema.

    Raises Invalid(INVALID_REQUEST) if the schema is not a record, or has a type without a column, such as a union of
    several types.
    """
    try:
        document = json.loads(schema)
    except ValueError as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"invalid Avro schema reason={error}") from error
    return value_columns(_kind(document, {}, "", 0))


def datum_udf(schema: str, kind: StructType) -> Callable[[Column], Column]:
    """Return a function that decodes a binary column.

    Its result has ``row``, of type ``kind``, or ``error``, the reason.
    """
    result = StructType().add("row", kind).add("error", StringType())
    return _udf(result, lambda value: _read_datum(schema, value))


def file_udf(schema: str, kind: StructType) -> Callable[[Column], Column]:
    """Return a function that decodes a binary column of whole Avro files.

    Its result has ``rows``, of type ``kind``, or ``error``, the reason.
    """
    result = StructType().add("rows", ArrayType(kind)).add("error", StringType())
    return _udf(result, lambda value: _read_file(schema, value))


def _udf(result: StructType, read: Callable[[bytes], dict[str, Any]]) -> Callable[[Column], Column]:
    arrow = to_arrow_type(result, timezone="UTC")

    def decode(values: pa.Array) -> pa.Array:  # type: ignore[type-arg]
        return pa.array([None if value is None else read(value) for value in values.to_pylist()], arrow)

    # PySpark evaluates the annotations, so they must be real types, not strings.
    decode.__annotations__ = {"values": pa.Array, "return": pa.Array}
    made: Callable[[Column], Column] = arrow_udf(decode, result)  # type: ignore[call-overload]
    return made


def _read_datum(schema: str, value: bytes) -> dict[str, Any]:
    import fastavro

    parsed, fingerprint = _prepared(schema)
    start = 0
    if value[:2] == SINGLE_OBJECT:
        if value[2:10] != fingerprint:
            return {"error": f"another Avro schema was used to write it fingerprint={value[2:10].hex()}"}
        start = 10
    stream = io.BytesIO(value)
    row, reason = _attempt(fastavro, stream, start, parsed)
    if reason and value[:1] == b"\0" and len(value) > REGISTRY_HEAD_BYTES:
        row, again = _attempt(fastavro, stream, REGISTRY_HEAD_BYTES, parsed)
        reason = reason if again else None
    return {"error": reason} if reason else {"row": row}


def _attempt(fastavro: Any, stream: io.BytesIO, start: int, parsed: Any) -> tuple[Any, str | None]:
    """Return the record at ``start`` and None, or None and the reason why there is no record."""
    stream.seek(start)
    try:
        row = fastavro.schemaless_reader(stream, parsed, None)
    except (EOFError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        return None, f"the value does not match this Avro schema ({type(error).__name__})"
    left = len(stream.getbuffer()) - stream.tell()
    return (None, f"{left} bytes follow the Avro record") if left else (row, None)


def _read_file(schema: str, value: bytes) -> dict[str, Any]:
    import fastavro

    rows: list[Any] = []
    try:
        for row in fastavro.reader(io.BytesIO(value), _prepared(schema)[0]):
            rows.append(row)
            if len(rows) > FILE_RECORDS_MAX:
                return {"error": f"more than {FILE_RECORDS_MAX} records in one Avro file"}
    except (EOFError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        return {"error": f"the value is not an Avro file that matches this schema ({type(error).__name__})"}
    except fastavro.read.SchemaResolutionError:
        return {"error": "the file's schema cannot be converted to the requested one"}
    return {"rows": rows}


@lru_cache(maxsize=32)
def _prepared(schema: str) -> tuple[Any, bytes]:
    """Return the parsed schema and its fingerprint for single-object encoding."""
    from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

    document = json.loads(schema)
    canonical = to_parsing_canonical_form(document)
    return parse_schema(document), bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO"))


def _kind(node: Any, named: dict[str, DataType], namespace: str, depth: int) -> DataType:
    if depth > NESTING_MAX:
        _refuse("is recursive, but Spark has no recursive types", node)
    if isinstance(node, list):
        return _union(node, named, namespace, depth)
    if isinstance(node, str):
        return _named(node, named, namespace)
    if not isinstance(node, dict) or "type" not in node:
        _refuse("is not an Avro type", node)
    logical = node.get("logicalType")
    if logical == "decimal":
        return DecimalType(int(node["precision"]), int(node.get("scale", 0)))
    if logical in _LOGICAL:
        return _LOGICAL[logical]
    match node["type"]:
        case "record":
            return _record(node, named, namespace, depth)
        case "array":
            return ArrayType(_kind(node["items"], named, namespace, depth + 1))
        case "map":
            return MapType(StringType(), _kind(node["values"], named, namespace, depth + 1))
        case "enum" | "fixed" as form:
            return named.setdefault(_full_name(node, namespace), _PRIMITIVES[form])
        case inner:
            return _kind(inner, named, namespace, depth + 1)


def _record(node: dict[str, Any], named: dict[str, DataType], namespace: str, depth: int) -> DataType:
    name = _full_name(node, namespace)
    inside = name.rpartition(".")[0]
    made = StructType()
    for field in node["fields"]:
        made = made.add(field["name"], _kind(field["type"], named, inside, depth + 1))
    return named.setdefault(name, made)


def _union(types: list[Any], named: dict[str, DataType], namespace: str, depth: int) -> DataType:
    others = [type_ for type_ in types if type_ != "null"]
    if len(others) == 1:
        return _kind(others[0], named, namespace, depth + 1)
    for names, wide in _WIDENED:
        if others and all(isinstance(type_, str) and type_ in names for type_ in others):
            return wide
    _refuse("is a union of several types, which has no column in Spark", types)


def _named(name: str, named: dict[str, DataType], namespace: str) -> DataType:
    if name in _PRIMITIVES:
        return _PRIMITIVES[name]
    found = named.get(name) or named.get(f"{namespace}.{name}")
    if found is None:
        _refuse("is unknown (or recursive, but Spark has no recursive types)", name)
    return found


def _full_name(node: dict[str, Any], namespace: str) -> str:
    name = str(node.get("name", ""))
    space = str(node.get("namespace", namespace))
    return name if "." in name or not space else f"{space}.{name}"


def _refuse(why: str, node: Any) -> NoReturn:
    raise Invalid(ErrorCode.INVALID_REQUEST, f"a type of the Avro schema {why} type={json.dumps(node)[:200]}")
