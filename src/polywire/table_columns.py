"""The setting ``table_columns``: columns of a topic's table that are made from fields of its JSON values.

Everything here works without pyarrow, because the broker checks the setting (concepts: tables#typed-columns).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from polywire.errors import ErrorCode, Invalid

INFER: Final = "infer"
COLUMNS_MAX: Final = 200  # typed columns of a table: each commit, schema and file describes them all
SETTING_BYTES_MAX: Final = 16 << 10
FIELD_BYTES_MAX: Final = 255  # of the name of a field, which the metadata of every file repeats
DECIMAL_PRECISION_MAX: Final = 38
ERROR: Final = "_error"
FIXED: Final = ("partition", "offset", "timestamp", "timestamp_type", "key", "value", "headers", ERROR)
"""Names of columns that no field may have."""
TYPES: Final = ("boolean", "int", "long", "float", "double", "string", "date", "timestamp")
"""All types but ``decimal(precision,scale)``."""
FIRST_TYPED_ID: Final = 100
ERROR_ID: Final = 11
_SYNONYMS: Final = {"integer": "int", "bigint": "long", "real": "float", "dec": "decimal", "numeric": "decimal"}
# Delta and Parquet forbid most of these. Spark and Iceberg take a dot for a nested field.
_FORBIDDEN: Final = re.compile(r"[ ,;{}()=.\x00-\x1f\x7f]")
_COLUMN: Final = re.compile(
    r"\s*(?:`((?:[^`]|``)*)`|([^\s,:`()]+))(?:\s*:\s*|\s+)(\w+)\s*(?:\(\s*(\d{1,3})\s*(?:,\s*(\d{1,3})\s*)?\))?\s*(?:,|$)"
)


@dataclass(frozen=True, slots=True)
class TypedColumn:
    """A column that is made from one field of JSON values.

    Attributes:
        field: name of the field; empty for the column ``_error``.
        type: one of ``TYPES`` or ``decimal(precision,scale)``.
        name: name of the column.
        field_id: identifies the column for as long as the table exists; 0 before it is in a table.
    """

    field: str
    type: str
    name: str
    field_id: int = 0


ERROR_COLUMN: Final = TypedColumn("", "string", ERROR, ERROR_ID)
"""Why fields of a value are not in their columns; null if they all are."""


def parse_columns(setting: str) -> tuple[TypedColumn, ...]:
    """Return the columns that a setting lists; none if it is empty or ``infer``. Raises Invalid(INVALID_REQUEST)."""
    if len(setting.encode("utf-8", "replace")) > SETTING_BYTES_MAX:
        raise _invalid(f"it is too long limit={SETTING_BYTES_MAX} bytes")
    if not setting.strip() or is_inferred(setting):
        return ()
    found: dict[str, TypedColumn] = {}
    for column in _listed(setting):
        if column.name.casefold() in found:
            raise _invalid(f"two columns have the same name: {column.name!r:.100}")
        found[column.name.casefold()] = column
    if len(found) > COLUMNS_MAX:
        raise _invalid(f"there are too many columns columns={len(found)} limit={COLUMNS_MAX}")
    return tuple(found.values())


def is_inferred(setting: str) -> bool:
    """Return whether fields of values become columns on their own."""
    return setting.strip().casefold() == INFER


def column_name(name: str) -> str | None:
    """Return the name of the column of a field; None if the field cannot be a column."""
    if not name or len(name.encode("utf-8", "replace")) > FIELD_BYTES_MAX:
        return None
    plain = _FORBIDDEN.sub("_", name)
    return f"value_{plain}" if plain.casefold() in FIXED else plain


def _listed(setting: str) -> Iterator[TypedColumn]:
    at = 0
    while at <= len(setting):
        found = _COLUMN.match(setting, at)
        if found is None:
            raise _invalid(f"use infer, or name and type, such as id long, total decimal(10,2) at={setting[at:]!r:.60}")
        quoted, plain, kind, precision, scale = found.groups()
        name = plain if quoted is None else quoted.replace("``", "`")
        column = column_name(name)
        if column is None or not _is_text(name):
            raise _invalid(f"a name is empty, too long or no text name={name!a:.60} limit={FIELD_BYTES_MAX} bytes")
        yield TypedColumn(name, _type(kind, precision, scale), column)
        if not found[0].endswith(","):
            return
        at = found.end()


def _type(word: str, precision: str | None, scale: str | None) -> str:
    kind = _SYNONYMS.get(word.lower(), word.lower())
    if kind in TYPES and precision is None:
        return kind
    if kind != "decimal":
        raise _invalid(f"unknown type {word!r:.60} (use {', '.join(TYPES)} or decimal(precision,scale))")
    digits, decimals = int(precision or 10), int(scale or 0)
    if not 1 <= digits <= DECIMAL_PRECISION_MAX or decimals > digits:
        raise _invalid(f"decimal({digits},{decimals}) is out of range (use at most {DECIMAL_PRECISION_MAX} digits)")
    return f"decimal({digits},{decimals})"


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _invalid(reason: str) -> Invalid:
    return Invalid(ErrorCode.INVALID_REQUEST, f"topic setting is invalid: table_columns ({reason})")


class ColumnPlan(msgspec.Struct):
    """The typed columns of a table under a setting.

    Attributes:
        columns: all typed columns of the table, ``_error`` first; empty if the table never had typed columns.
        active: the columns that new rows fill, without ``_error``.
        is_inferred: whether other fields become columns, too.
        last_id: greatest field id that any column of the table ever had.
        notes: what the table does differently from the setting.
    """

    columns: tuple[TypedColumn, ...] = ()
    active: tuple[TypedColumn, ...] = ()
    is_inferred: bool = False
    last_id: int = FIRST_TYPED_ID - 1
    notes: list[str] = msgspec.field(default_factory=list)

    def add(self, name: str, kind: str) -> str:
        """Add a column for a field, and make it active. Return the reason if that is impossible, otherwise nothing."""
        column = column_name(name)
        if column is None:
            return f"{name!a:.60} is not added: the name is empty or too long"
        if len(self.columns) > COLUMNS_MAX:
            return f"{column:.60} is not added: the table has {COLUMNS_MAX} typed columns"
        if any(known.name.casefold() == column.casefold() for known in self.columns):
            return f"{column:.60} is not added: the column of another field has this name"
        self.last_id += 1
        made = TypedColumn(name, kind, column, self.last_id)
        self.columns, self.active = (*self.columns, made), (*self.active, made)
        return ""


def plan_columns(known: Sequence[TypedColumn], setting: str, last_id: int = 0) -> ColumnPlan:
    """Return the columns of a table that has ``known`` columns, under a setting.

    A column keeps its type, because files cannot be changed. Columns that the setting does not have stay in the table
    and are not made from values any more.
    """
    plan = ColumnPlan(tuple(known), last_id=max(last_id, FIRST_TYPED_ID - 1, *(column.field_id for column in known), 0))
    if not setting.strip():
        return plan
    plan.columns = plan.columns or (ERROR_COLUMN,)
    by_field = {column.field: column for column in plan.columns if column.field}
    if is_inferred(setting):
        plan.active, plan.is_inferred = tuple(by_field.values()), True
        return plan
    for wanted in parse_columns(setting):
        found = by_field.get(wanted.field)
        if found is None:
            reason = plan.add(wanted.field, wanted.type)
            plan.notes += [reason] if reason else []
            continue
        plan.active = (*plan.active, found)
        if found.type != wanted.type:
            plan.notes.append(f"{found.name} stays {found.type}")
    return plan
