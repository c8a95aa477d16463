"""The columns of a topic's table, as Arrow, Delta and Iceberg describe them (concepts: tables#columns).

Field ids are never reused, because Iceberg finds columns in Parquet files by id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from polywire.table_columns import TypedColumn

PARTITION: Final = "partition"
OFFSET: Final = "offset"
TIMESTAMP: Final = "timestamp"
TIMESTAMP_TYPE: Final = "timestamp_type"
KEY: Final = "key"
VALUE: Final = "value"
HEADERS: Final = "headers"
READ_NAMES: Final[Mapping[str, str]] = {TIMESTAMP_TYPE: "timestampType"}
"""Names of columns in ``client.arrow``, where they differ."""

FIELD_IDS: Final[Mapping[str, int]] = {
    PARTITION: 1,
    OFFSET: 2,
    TIMESTAMP: 3,
    TIMESTAMP_TYPE: 4,
    KEY: 5,
    VALUE: 6,
    HEADERS: 7,
}
"""Ids of the columns that every table has. ``_error`` has 11, and typed columns begin at 100."""
ELEMENT_ID: Final = 8
HEADER_KEY_ID: Final = 9
HEADER_VALUE_ID: Final = 10
STATISTICS: Final = (PARTITION, OFFSET, TIMESTAMP)
"""Columns whose smallest and largest value each file reports, so that queries skip files."""
FIELD: Final = "polywire.field"
FIELD_ID: Final = "polywire.id"
"""Key of a typed column's field id in the schema of the Delta log."""
_NOT_NULL: Final = frozenset({PARTITION, OFFSET, TIMESTAMP, TIMESTAMP_TYPE})


class _Kind(NamedTuple):
    """A type of columns, as each format names it."""

    arrow: pa.DataType
    delta: str
    iceberg: str


_KINDS: Final[Mapping[str, _Kind]] = {
    "boolean": _Kind(pa.bool_(), "boolean", "boolean"),
    "int": _Kind(pa.int32(), "integer", "int"),
    "long": _Kind(pa.int64(), "long", "long"),
    "float": _Kind(pa.float32(), "float", "float"),
    "double": _Kind(pa.float64(), "double", "double"),
    "string": _Kind(pa.string(), "string", "string"),
    "date": _Kind(pa.date32(), "date", "date"),
    "timestamp": _Kind(pa.timestamp("us", tz="UTC"), "timestamp", "timestamptz"),
    "binary": _Kind(pa.binary(), "binary", "binary"),
}
_WORDS: Final = {kind.delta: word for word, kind in _KINDS.items()}
_FIXED: Final[Mapping[str, str]] = {
    PARTITION: "int",
    OFFSET: "long",
    TIMESTAMP: "timestamp",
    TIMESTAMP_TYPE: "int",
    KEY: "binary",
    VALUE: "binary",
}


def _kind(word: str) -> _Kind:
    if not word.startswith("decimal("):
        return _KINDS[word]
    precision, scale = decimal_of(word)
    return _Kind(pa.decimal128(precision, scale), word, f"decimal({precision}, {scale})")


def decimal_of(word: str) -> tuple[int, int]:
    """Return precision and scale of ``decimal(precision,scale)``."""
    precision, scale = word.removeprefix("decimal(").removesuffix(")").split(",")
    return int(precision), int(scale)


def arrow_type(column: TypedColumn) -> pa.DataType:
    """Return the type of a column in Arrow."""
    return _kind(column.type).arrow


def _field(name: str, kind: pa.DataType, field_id: int, *, nullable: bool = True) -> pa.Field[Any]:
    return pa.field(name, kind, nullable=nullable, metadata={"PARQUET:field_id": str(field_id)})


_PAIR: Final = pa.struct([_field("key", pa.string(), HEADER_KEY_ID), _field("value", pa.binary(), HEADER_VALUE_ID)])
_ARROW_TYPES: Final[Mapping[str, pa.DataType]] = {
    **{name: _kind(word).arrow for name, word in _FIXED.items()},
    HEADERS: pa.list_(_field("element", _PAIR, ELEMENT_ID)),
}
ARROW_SCHEMA: Final = pa.schema(
    [_field(name, kind, FIELD_IDS[name], nullable=name not in _NOT_NULL) for name, kind in _ARROW_TYPES.items()]
)
"""Schema of the Parquet files of a table without typed columns, with Iceberg's field ids."""


def arrow_schema(columns: Iterable[TypedColumn]) -> pa.Schema:
    """Return the schema of files with these typed columns."""
    typed = [_field(column.name, arrow_type(column), column.field_id) for column in columns]
    return pa.schema([*ARROW_SCHEMA, *typed]) if typed else ARROW_SCHEMA


def conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns of ``schema``. Columns that it lacks are null."""
    arrays = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        column = pa.nulls(batch.num_rows, field.type) if at < 0 else batch.column(at)
        # if an integer column becomes a float column, some numbers may not be exact
        arrays.append(column if column.type == field.type else column.cast(field.type, safe=False))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _delta_field(
    name: str, kind: object, *, nullable: bool = True, metadata: Mapping[str, object] | None = None
) -> dict[str, object]:
    return {"name": name, "type": kind, "nullable": nullable, "metadata": dict(metadata or {})}


def delta_schema(columns: Iterable[TypedColumn] = ()) -> str:
    """Return the schema as JSON text, as the Delta log stores it (Delta protocol: Schema Serialization Format)."""
    pair = {"type": "struct", "fields": [_delta_field("key", "string"), _delta_field("value", "binary")]}
    headers = {"type": "array", "elementType": pair, "containsNull": True}
    kinds: dict[str, object] = {**{name: _kind(word).delta for name, word in _FIXED.items()}, HEADERS: headers}
    fields = [_delta_field(name, kinds[name], nullable=name not in _NOT_NULL) for name in ARROW_SCHEMA.names]
    for column in columns:
        facts = {FIELD: column.field, FIELD_ID: column.field_id}
        fields.append(_delta_field(column.name, _kind(column.type).delta, metadata=facts))
    return json.dumps({"type": "struct", "fields": fields})


def typed_columns(schema: str) -> tuple[TypedColumn, ...]:
    """Return the typed columns of a schema of the Delta log."""
    found = []
    for item in json.loads(schema)["fields"]:
        facts = item.get("metadata") or {}
        if FIELD_ID in facts:
            word = _WORDS.get(item["type"], item["type"])
            found.append(TypedColumn(facts[FIELD], word, item["name"], int(facts[FIELD_ID])))
    return tuple(found)


def _iceberg_field(name: str, kind: object, field_id: int) -> dict[str, object]:
    return {"id": field_id, "name": name, "required": name in _NOT_NULL, "type": kind}


def iceberg_schema(columns: Iterable[TypedColumn] = (), schema_id: int = 0) -> dict[str, Any]:
    """Return the schema as Iceberg metadata stores it (Iceberg specification: Appendix C)."""
    pair = {
        "type": "struct",
        "fields": [
            _iceberg_field("key", "string", HEADER_KEY_ID),
            _iceberg_field("value", "binary", HEADER_VALUE_ID),
        ],
    }
    headers = {"type": "list", "element-id": ELEMENT_ID, "element-required": False, "element": pair}
    kinds: dict[str, object] = {**{name: _kind(word).iceberg for name, word in _FIXED.items()}, HEADERS: headers}
    fields = [_iceberg_field(name, kinds[name], FIELD_IDS[name]) for name in ARROW_SCHEMA.names]
    fields += [_iceberg_field(column.name, _kind(column.type).iceberg, column.field_id) for column in columns]
    return {"type": "struct", "schema-id": schema_id, "fields": fields}
