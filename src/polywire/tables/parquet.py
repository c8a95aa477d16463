"""Write the records of a topic as Parquet files in memory, with the statistics that both table formats store."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polywire.store.objects import Objects
from polywire.tables.columns import (
    ARROW_SCHEMA,
    HEADERS,
    KEY,
    OFFSET,
    STATISTICS,
    TIMESTAMP,
    TIMESTAMP_TYPE,
    VALUE,
    conformed,
)

ROW_GROUP_ROWS: Final = 1_000_000  # few enough for parallel scans of one file, many enough for compression
ROW_GROUP_BYTES: Final = 128 << 20  # bytes of keys and values, to limit the memory for a group of large records
TYPED_STATISTICS_MAX: Final = 32  # typed columns with statistics, which each commit contains; Delta's default
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_WITHOUT_DICTIONARY: Final = frozenset({OFFSET, TIMESTAMP, KEY, VALUE, HEADERS})
_WITHOUT_STATISTICS: Final = frozenset({TIMESTAMP_TYPE, VALUE, HEADERS})
_TIME_MAX_US: Final = 253_402_300_799_999_000  # the last millisecond that can be written as text
_DATE_CHARS: Final = len("2026-11-27")
_OPTIONS: Final[dict[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "column_encoding": {OFFSET: "DELTA_BINARY_PACKED", TIMESTAMP: "DELTA_BINARY_PACKED"},
}


class Measure(Enum):
    """The unit of the bounds of a column."""

    NUMBER = "number"
    TIME = "time"
    DATE = "date"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Smallest and largest value of one column.

    Attributes:
        kind: kind of the values: numbers, microseconds since 1970, or days since 1970.
    """

    lower: int
    upper: int
    kind: Measure = Measure.NUMBER

    def joined(self, other: Bounds) -> Bounds:
        """Return bounds that include both."""
        return Bounds(min(self.lower, other.lower), max(self.upper, other.upper), self.kind)


@dataclass(frozen=True, slots=True)
class Written:
    """A complete Parquet file in memory.

    Attributes:
        bounds: bounds of columns, for the columns in ``STATISTICS`` and the first typed columns with numbers and times.
        nulls: number of nulls by column, for all columns of the file.
    """

    content: memoryview
    row_count: int
    bounds: dict[str, Bounds]
    nulls: dict[str, int]


class ParquetWriter:
    """Collects record batches of one schema into one file in memory.

    Attributes:
        schema: schema of the batches.
        row_count: rows so far.
        byte_count: bytes of the rows so far, uncompressed.
    """

    def __init__(self, schema: pa.Schema = ARROW_SCHEMA) -> None:
        self.schema = schema
        self._sink = io.BytesIO()
        self._writer: pq.ParquetWriter | None = None  # without row groups
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self._measured = _measured(schema)
        self._bounds: dict[str, Bounds] = {}
        self._nulls: Counter[str] = Counter()
        self.row_count = 0
        self.byte_count = 0

    @property
    def file_bytes(self) -> int:
        """Compressed bytes so far, without rows that still wait for their row group."""
        return self._sink.tell()

    @property
    def is_fixed(self) -> bool:
        """Whether rows were written, so that the schema cannot change any more."""
        return self._writer is not None

    def widen(self, schema: pa.Schema) -> None:
        """Change the schema before it is fixed. Columns that the rows so far lack are null there."""
        assert not self.is_fixed
        self._pending = [conformed(batch, schema) for batch in self._pending]
        self.schema, self._measured = schema, _measured(schema)

    def add(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Append rows."""
        for batch in batches:
            self._pending.append(batch)
            self._pending_rows += batch.num_rows
            self._pending_bytes += batch.nbytes
            self.row_count += batch.num_rows
            self.byte_count += batch.nbytes
            if self._pending_rows >= ROW_GROUP_ROWS or self._pending_bytes >= ROW_GROUP_BYTES:
                self._flush()

    def _flush(self) -> None:
        if not self._pending_rows:
            return
        table = pa.Table.from_batches(self._pending, self.schema)
        for name in self._measured:
            found = _bounds(table.column(name))
            if found is not None:
                known = self._bounds.get(name)
                self._bounds[name] = found if known is None else known.joined(found)
        for name in self.schema.names:
            self._nulls[name] += table.column(name).null_count
        self._open().write_table(table, row_group_size=ROW_GROUP_ROWS)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0

    def finish(self) -> Written:
        """Return the file. Nothing may be added afterwards."""
        self._flush()
        self._open().close()
        return Written(memoryview(self._sink.getvalue()), self.row_count, self._bounds, dict(self._nulls))

    def _open(self) -> pq.ParquetWriter:
        if self._writer is None:
            names: dict[str, Any] = {
                "use_dictionary": [name for name in self.schema.names if name not in _WITHOUT_DICTIONARY],
                "write_statistics": [name for name in self.schema.names if name not in _WITHOUT_STATISTICS],
            }
            self._writer = pq.ParquetWriter(self._sink, self.schema, **names, **_OPTIONS)
        return self._writer


def _measured(schema: pa.Schema) -> list[str]:
    """Return the columns whose bounds a file reports."""
    typed = [field.name for field in schema if field.name not in ARROW_SCHEMA.names and _has_order(field.type)]
    return [*STATISTICS, *typed[:TYPED_STATISTICS_MAX]]


def _has_order(kind: pa.DataType) -> bool:
    # not floating-point numbers, because readers differ in how they compare 0.0 and -0.0
    return pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _bounds(column: pa.ChunkedArray[Any]) -> Bounds | None:
    """Return the bounds of a column; None if all its values are null."""
    kind = Measure.NUMBER
    if pa.types.is_timestamp(column.type):
        kind, column = Measure.TIME, column.cast(pa.int64())
    elif pa.types.is_date(column.type):
        kind, column = Measure.DATE, column.cast(pa.int32())
    found: Any = pc.min_max(column)
    lower, upper = found["min"].as_py(), found["max"].as_py()
    return None if lower is None else Bounds(lower, upper, kind)


def stated(found: Bounds) -> tuple[int, int] | tuple[str, str] | None:
    """Convert bounds to the form of the Delta log's statistics; None if they cannot be represented."""
    match found.kind:
        case Measure.NUMBER:
            return found.lower, found.upper
        case Measure.DATE:
            lower, upper = (_EPOCH.date() + timedelta(days=days) for days in (found.lower, found.upper))
            return lower.isoformat(), upper.isoformat()
        case Measure.TIME if found.upper <= _TIME_MAX_US:
            return time_text(found.lower), time_text(found.upper, up=True)
    return None


def bounds_of(lower: int | str, upper: int | str) -> Bounds:
    """Decode bounds from the Delta log's statistics."""
    if not isinstance(lower, str) or not isinstance(upper, str):
        return Bounds(int(lower), int(upper))
    if len(lower) == len(upper) == _DATE_CHARS:
        first, last = ((date.fromisoformat(text) - _EPOCH.date()).days for text in (lower, upper))
        return Bounds(first, last, Measure.DATE)
    return Bounds(time_of(lower), time_of(upper), Measure.TIME)


def time_text(time_us: int, *, up: bool = False) -> str:
    """Return a time in ISO 8601 with milliseconds, as in the Delta log's statistics, rounded down or ``up``."""
    time_ms = -(-time_us // 1000) if up else time_us // 1000
    return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_of(text: str) -> int:
    """Return the microseconds since 1970 of a time in the Delta log's statistics."""
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)


class ObjectFile(io.RawIOBase):
    """A readable file over an object. Each read is one request. Raises BlobMissing, Unavailable."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects: Final = objects
        self._name: Final = name
        self._size: Final = objects.size(name)
        self._at = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        content = self._objects.read_range(self._name, self._at, stop) if stop > self._at else b""
        self._at += len(content)
        return content
