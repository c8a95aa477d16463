"""Columns that a write accepts: those of Spark's Kafka sink. Error messages suggest a fix."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import DataType, StructType

from polywire.errors import ErrorCode, Invalid

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
