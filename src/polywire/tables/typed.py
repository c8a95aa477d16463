"""Make typed columns from JSON values (decision 0133).

* Each column of a row depends on the value of the row and the type of the column only. So a row that is read from the
  log has the same columns as in the table later.
* No value stops a table. A field that does not fit its column is null there, and ``_error`` of the row says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from decimal import Decimal
from operator import attrgetter
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta, Raw

from polywire.table_columns import COLUMNS_MAX, ERROR_COLUMN, ColumnPlan, TypedColumn
from polywire.tables.columns import OFFSET, PARTITION, VALUE, arrow_schema, arrow_type

ERROR_CHARS_MAX: Final = 200
EXCERPT_CHARS_MAX: Final = 60  # length of an excerpt of a value in an error
WATCHED_MAX: Final = 200  # number of fields without a column that the fast decoder also knows
NOTES_MAX: Final = 5
_FLOAT_MAX: Final = 3.4028234663852886e38
_INT_MAX: Final = 2**31 - 1
_LONG_MAX: Final = 2**63 - 1
# The times that Python can represent. A time with a zone may be outside even if its text seems to be inside.
_TIMES_US: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)
_DECODED: Final[dict[str, Any]] = {
    "boolean": bool,
    "int": Annotated[int, Meta(ge=-_INT_MAX - 1, le=_INT_MAX)],
    "long": Annotated[int, Meta(ge=-_LONG_MAX - 1, le=_LONG_MAX)],
    "float": Annotated[float, Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)],
    "double": float,
    "string": str,
    "date": date,
    "timestamp": datetime,
}
_REJECTED: Final = (msgspec.DecodeError, ValueError, ArithmeticError, RecursionError)
"""Errors that the decoders raise for values that they reject."""
_UNFIT: Final = (pa.ArrowException, ValueError, ArithmeticError, TypeError)
"""Errors that Arrow raises if a column cannot have a decoded value."""
_object: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_text: Final = msgspec.json.Decoder(str).decode


@dataclass(slots=True)
class Extracted:
    """Typed columns of a batch, and the parts of its values that do not fit the columns.

    Attributes:
        arrays: one for each column.
        errors: the column ``_error``.
        rejected: number of rows with an error.
        sample: number and error of the last such row.
        unknown: fields without a column, with the number of their values by type.
        wider: fields of integer columns with numbers that only a ``double`` column can have.
    """

    arrays: list[pa.Array[Any]]
    errors: pa.Array[Any]
    rejected: int = 0
    sample: tuple[int, str] = (-1, "")
    unknown: dict[str, Counter[str]] = field(default_factory=dict)
    wider: set[str] = field(default_factory=set)


class Extractor:
    """Makes columns from values. It learns which fields to expect besides columns, so use one for many batches.

    Args:
        columns: without ``_error``.
        reports_unknown: whether to report fields without a column.
    """

    def __init__(self, columns: Sequence[TypedColumn], *, reports_unknown: bool = False) -> None:
        self._mixed: Final[set[str]] = set()  # string columns that also have values of other types
        self._null: Final[set[str]] = set()  # fields that were always null
        self._ignored: Final[set[str]] = set()
        self.change(columns, reports_unknown=reports_unknown)

    def change(self, columns: Sequence[TypedColumn], *, reports_unknown: bool) -> None:
        """Make these columns from now on."""
        self._columns: tuple[TypedColumn, ...] = tuple(columns)
        self._reports_unknown = reports_unknown
        self._decoders: list[Callable[[Raw], Any]] = [
            msgspec.json.Decoder(_decoded(column) | None).decode for column in self._columns
        ]
        self._prepare()

    def ignore(self, name: str) -> None:
        """Do not report a field any more."""
        if len(self._ignored) < WATCHED_MAX:
            self._ignored.add(name)
            self._prepare()

    def _prepare(self) -> None:
        """Make the decoder, which knows all fields that the extractor has learned of."""
        kinds: dict[str, Any] = {}
        if self._reports_unknown:
            kinds = {**dict.fromkeys(self._ignored, Raw), **dict.fromkeys(self._null, type(None))}
        for column in self._columns:
            kinds[column.field] = Raw if column.field in self._mixed else _decoded(column) | None
        names = {name: f"f{number}" for number, name in enumerate(kinds)}
        self._names: list[str] = [names[column.field] for column in self._columns]
        self._row: Any = msgspec.defstruct(
            "Row",
            [(names[name], kind, None) for name, kind in kinds.items()],
            rename={short: name for name, short in names.items()},
            gc=False,
            forbid_unknown_fields=self._reports_unknown,
        )
        self._decode = msgspec.json.Decoder(self._row).decode
        self._has_learned = False

    def extract(self, values: pa.Array[Any]) -> Extracted:
        """Return the columns of a batch."""
        batch = _Batch(values)
        rows: list[Any] = []
        decode, append, empty = self._decode, rows.append, self._row()
        for value in batch.values:
            if value is None:
                append(empty)
                continue
            try:
                append(decode(value))
            except _REJECTED:
                append(self._converted(batch, len(rows), value))
        arrays = [self._array(batch, number, rows) for number in range(len(self._columns))]
        if self._has_learned:
            self._prepare()
        return batch.finished(arrays)

    def _converted(self, batch: _Batch, row: int, value: bytes) -> Any:
        """Convert each field of a value alone."""
        try:
            fields = _object(value)
        except msgspec.ValidationError:
            batch.reject(row, -1, "value is not a JSON object")
            return self._row()
        except RecursionError:
            batch.reject(row, -1, "value is nested too deeply")
            return self._row()
        except _REJECTED as error:
            batch.reject(row, -1, f"value is not JSON: {error}")
            return self._row()
        found: dict[str, Any] = {}
        for number, column in enumerate(self._columns):
            raw = fields.pop(column.field, None)
            if raw is not None:
                found[self._names[number]] = self._one(batch, row, number, raw)
        if self._reports_unknown:
            self._report(batch, fields)
        return self._row(**found)

    def _one(self, batch: _Batch, row: int, number: int, raw: Raw) -> Any:
        """Return the decoded value of one field; None if it does not fit its column."""
        column = self._columns[number]
        try:
            return self._decoders[number](raw)
        except _REJECTED:
            if column.type == "string" and bytes(raw)[:1] != b'"':
                self._mixed.add(column.field)
                self._has_learned = True
                return raw
        batch.reject(row, number, _unfit(column, raw))
        if column.type == "long" and _kind_of(raw) == "double":
            batch.wider.add(column.field)
        return None

    def _report(self, batch: _Batch, fields: dict[str, Raw]) -> None:
        for name, raw in fields.items():
            if name in self._ignored:
                continue
            kind = _kind_of(raw)
            if kind:
                batch.unknown.setdefault(name, Counter())[kind] += 1
                self._null.discard(name)
            elif len(self._null) < WATCHED_MAX:
                self._null.add(name)
                self._has_learned = True

    def _array(self, batch: _Batch, number: int, rows: list[Any]) -> pa.Array[Any]:
        column = self._columns[number]
        found = list(map(attrgetter(self._names[number]), rows))
        if column.field in self._mixed:
            found = [self._string(batch, row, number, item) for row, item in enumerate(found)]
        try:
            return _array(column, found)
        except _UNFIT:
            return _array(column, [self._fitting(batch, row, number, item) for row, item in enumerate(found)])

    def _string(self, batch: _Batch, row: int, number: int, item: Raw | str | None) -> str | None:
        """Return a string, or other JSON as its text."""
        if item is None or isinstance(item, str):
            return item
        text = bytes(item)
        try:
            return None if text == b"null" else _text(text) if text[:1] == b'"' else text.decode()
        except _REJECTED:
            batch.reject(row, number, _unfit(self._columns[number], item))
            return None

    def _fitting(self, batch: _Batch, row: int, number: int, item: Any) -> Any:
        """Return a value, or None if its column cannot have it."""
        column = self._columns[number]
        try:
            _array(column, [item])
        except _UNFIT:
            batch.reject(row, number, _unfit(column, _object(batch.values[row])[column.field]))
            return None
        return item


class _Batch:
    """The values of a batch, and their errors."""

    __slots__ = ("_errors", "unknown", "values", "wider")

    def __init__(self, values: pa.Array[Any]) -> None:
        self.values: Final[list[Any]] = values.to_pylist()
        self.unknown: Final[dict[str, Counter[str]]] = {}
        self.wider: Final[set[str]] = set()
        self._errors: Final[dict[int, list[tuple[int, str]]]] = {}
        # The decoders check only the text that they use. Without this check, a row would depend on the set of columns.
        try:
            values.cast(pa.string())
        except pa.ArrowInvalid:
            self._remove_other_than_text()

    def _remove_other_than_text(self) -> None:
        for row, value in enumerate(self.values):
            try:
                if value is not None:
                    value.decode()
            except UnicodeDecodeError:
                self.reject(row, -1, "value is not UTF-8")
                self.values[row] = None

    def reject(self, row: int, column: int, reason: str) -> None:
        self._errors.setdefault(row, []).append((column, reason))

    def finished(self, arrays: list[pa.Array[Any]]) -> Extracted:
        count = len(self.values)
        if not self._errors:
            return Extracted(arrays, pa.nulls(count, pa.string()), unknown=self.unknown, wider=self.wider)
        texts: list[str | None] = [None] * count
        for row, reasons in self._errors.items():
            texts[row] = "; ".join([reason for _, reason in sorted(reasons)])[:ERROR_CHARS_MAX]
        last = max(self._errors)
        sample = last, texts[last] or ""
        return Extracted(arrays, pa.array(texts, pa.string()), len(self._errors), sample, self.unknown, self.wider)


def _decoded(column: TypedColumn) -> Any:
    return _DECODED.get(column.type, Decimal)


def _array(column: TypedColumn, found: list[Any]) -> pa.Array[Any]:
    """Return an array of decoded values. Raises one of ``_UNFIT`` if the column cannot have one of them."""
    array: pa.Array[Any] = pa.array(found, arrow_type(column))
    if column.type == "timestamp":
        ends: Any = pc.min_max(array.cast(pa.int64()))
        lowest, highest = ends["min"].as_py(), ends["max"].as_py()
        if lowest is not None and (lowest < _TIMES_US[0] or highest > _TIMES_US[1]):
            raise ValueError("time is out of range")
    return array


def _kind_of(raw: Raw) -> str:
    """Return the type of the column that a JSON value needs; empty for null."""
    text = bytes(raw)
    match text[:1]:
        case b"n":
            return ""
        case b"t" | b"f":
            return "boolean"
        case b'"' | b"{" | b"[":
            return "string"
    if any(mark in text for mark in (b".", b"e", b"E")) or len(text) > 20:
        return "double"
    return "long" if -_LONG_MAX - 1 <= int(text) <= _LONG_MAX else "double"


_JSON_WORDS: Final = {b'"': "string", b"{": "object", b"[": "array", b"t": "boolean", b"f": "boolean"}


def _unfit(column: TypedColumn, raw: Raw) -> str:
    text = bytes(raw)
    word = _JSON_WORDS.get(text[:1], "number")
    excerpt = text[: 4 * EXCERPT_CHARS_MAX].decode("utf-8", "replace")[:EXCERPT_CHARS_MAX]
    shown = "".join([char if char.isprintable() else "\ufffd" for char in excerpt])
    return f"{column.name[:EXCERPT_CHARS_MAX]}: expected {column.type}, found {word} {shown}"


class TypedRows:
    """Adds the typed columns to the rows of a table, and finds new columns.

    Attributes:
        plan: the columns. Those that were found since ``freeze`` may still change their type.
        schema: of the rows.
    """

    def __init__(self, plan: ColumnPlan) -> None:
        self.plan: Final = plan
        self._rejected = 0
        self._sample = ""
        self._found: Final[set[str]] = set()
        self._extractor: Final = Extractor(plan.active, reports_unknown=self._is_open)
        self.schema = self._schema()

    @property
    def notes(self) -> str:
        """Differences between the columns and the setting; empty if there are none."""
        is_full = self.plan.is_inferred and not self._is_open
        full = [f"other fields are ignored: the table has {COLUMNS_MAX} typed columns"] if is_full else []
        return "; ".join([*self.plan.notes[:NOTES_MAX], *full])

    @property
    def _is_open(self) -> bool:
        return self.plan.is_inferred and len(self.plan.columns) <= COLUMNS_MAX

    def _schema(self) -> pa.Schema:
        return arrow_schema((ERROR_COLUMN, *self.plan.active))

    def freeze(self) -> None:
        """Fix the types of all columns, because rows with them were written."""
        self._found.clear()

    def take_rejected(self) -> tuple[int, str]:
        """Return the number of rows with an error since the last call, and the last such error."""
        taken = self._rejected, self._sample
        self._rejected, self._sample = 0, ""
        return taken

    def typed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with their typed columns. It may change ``schema``."""
        found = self._extractor.extract(batch.column(VALUE))
        while self._learn(found):
            found = self._extractor.extract(batch.column(VALUE))
        if found.rejected:
            row, reason = found.sample
            self._rejected += found.rejected
            self._sample = f"{reason} partition={batch.column(PARTITION)[row]} offset={batch.column(OFFSET)[row]}"
        return pa.RecordBatch.from_arrays([*batch.columns, found.errors, *found.arrays], schema=self.schema)

    def _learn(self, found: Extracted) -> bool:
        """Add the columns that a batch needs. Return False if it needs none."""
        known = self.plan.active
        for name, kinds in found.unknown.items():
            reason = self.plan.add(name, _common(kinds))
            if not reason:
                self._found.add(name)
                continue
            if not self._is_open:
                break
            if len(self.plan.notes) < NOTES_MAX:
                self.plan.notes.append(reason)
            self._extractor.ignore(name)
        self._widen(found.wider & self._found)
        if self.plan.active == known:
            return False
        self._extractor.change(self.plan.active, reports_unknown=self._is_open)
        self.schema = self._schema()
        return True

    def _widen(self, names: Iterable[str]) -> None:
        wanted = set(names)

        def wider(columns: tuple[TypedColumn, ...]) -> tuple[TypedColumn, ...]:
            return tuple([replace(column, type="double") if column.field in wanted else column for column in columns])

        self.plan.columns, self.plan.active = wider(self.plan.columns), wider(self.plan.active)


def _common(kinds: Counter[str]) -> str:
    """Return the type that most values of a field have."""
    if kinds.keys() >= {"long", "double"}:
        return "double" if kinds["long"] + kinds["double"] >= kinds.total() / 2 else kinds.most_common(1)[0][0]
    return kinds.most_common(1)[0][0]


class ColumnMaker:
    """Makes typed columns of rows.

    Args:
        columns: all columns that are made from values.
    names: names of the columns to make.
    """

    def __init__(self, columns: Iterable[TypedColumn], names: Iterable[str]) -> None:
        wanted = set(names)
        self._has_errors: Final = ERROR_COLUMN.name in wanted
        self._columns: Final = [column for column in columns if self._has_errors or column.name in wanted]
        self._extractor: Final = Extractor(self._columns)

    def added(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with these columns, which replace those with the same name."""
        found = self._extractor.extract(batch.column(VALUE))
        made = dict(zip(batch.schema.names, batch.columns, strict=True))
        made.update(zip([column.name for column in self._columns], found.arrays, strict=True))
        if self._has_errors:
            made[ERROR_COLUMN.name] = found.errors
        return pa.RecordBatch.from_pydict(made)
