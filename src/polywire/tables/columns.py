"""The columns of a topic's table, as Arrow, Delta and Iceberg describe them (concepts: tables#columns).

Field ids are never reused, because Iceberg finds columns in Parquet files by id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

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
ELEMENT_ID: Final = 8
HEADER_KEY_ID: Final = 9
HEADER_VALUE_ID: Final = 10
LAST_FIELD_ID: Final = HEADER_VALUE_ID
STATISTICS: Final = (PARTITION, OFFSET, TIMESTAMP)
"""Columns whose smallest and largest value each file reports, so that queries skip files."""
_DELTA_TYPES: Final[Mapping[str, str]] = {
    PARTITION: "integer",
    OFFSET: "long",
    TIMESTAMP: "timestamp",
    TIMESTAMP_TYPE: "integer",
    KEY: "binary",
    VALUE: "binary",
}
_ICEBERG_TYPES: Final[Mapping[str, str]] = {
    PARTITION: "int",
    OFFSET: "long",
    TIMESTAMP: "timestamptz",
    TIMESTAMP_TYPE: "int",
    KEY: "binary",
    VALUE: "binary",
}
_NOT_NULL: Final = frozenset({PARTITION, OFFSET, TIMESTAMP, TIMESTAMP_TYPE})


def _field(name: str, kind: pa.DataType, field_id: int, *, nullable: bool = True) -> pa.Field[Any]:
    return pa.field(name, kind, nullable=nullable, metadata={"PARQUET:field_id": str(field_id)})


_PAIR: Final = pa.struct([_field("key", pa.string(), HEADER_KEY_ID), _field("value", pa.binary(), HEADER_VALUE_ID)])
_ARROW_TYPES: Final[Mapping[str, pa.DataType]] = {
    PARTITION: pa.int32(),
    OFFSET: pa.int64(),
    TIMESTAMP: pa.timestamp("us", tz="UTC"),
    TIMESTAMP_TYPE: pa.int32(),
    KEY: pa.binary(),
    VALUE: pa.binary(),
    HEADERS: pa.list_(_field("element", _PAIR, ELEMENT_ID)),
}
ARROW_SCHEMA: Final = pa.schema(
    [_field(name, kind, FIELD_IDS[name], nullable=name not in _NOT_NULL) for name, kind in _ARROW_TYPES.items()]
)
"""Schema of the Parquet files, with Iceberg's field ids."""


def _delta_field(name: str, kind: object, *, nullable: bool) -> dict[str, object]:
    return {"name": name, "type": kind, "nullable": nullable, "metadata": {}}


def delta_schema() -> str:
    """Return the schema as JSON text, as the Delta log stores it (Delta protocol: Schema Serialization Format)."""
    pair = {
        "type": "struct",
        "fields": [_delta_field("key", "string", nullable=True), _delta_field("value", "binary", nullable=True)],
    }
    headers = {"type": "array", "elementType": pair, "containsNull": True}
    kinds: dict[str, object] = {**_DELTA_TYPES, HEADERS: headers}
    fields = [_delta_field(name, kinds[name], nullable=name not in _NOT_NULL) for name in ARROW_SCHEMA.names]
    return json.dumps({"type": "struct", "fields": fields})


def _iceberg_field(name: str, kind: object, field_id: int) -> dict[str, object]:
    return {"id": field_id, "name": name, "required": name in _NOT_NULL, "type": kind}


def iceberg_schema() -> dict[str, object]:
    """Return the schema as Iceberg metadata stores it (Iceberg specification: Appendix C)."""
    pair = {
        "type": "struct",
        "fields": [
            _iceberg_field("key", "string", HEADER_KEY_ID),
            _iceberg_field("value", "binary", HEADER_VALUE_ID),
        ],
    }
    headers = {"type": "list", "element-id": ELEMENT_ID, "element-required": False, "element": pair}
    kinds: dict[str, object] = {**_ICEBERG_TYPES, HEADERS: headers}
    fields = [_iceberg_field(name, kinds[name], FIELD_IDS[name]) for name in ARROW_SCHEMA.names]
    return {"type": "struct", "schema-id": 0, "fields": fields}
