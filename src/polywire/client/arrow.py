"""Convert stored batches to Arrow record batches and back, without a Python object per record.

A large stored batch is used without a copy. Small batches are copied into record batches of a convenient size, with one
compiled call per column. Columns have the names of Spark's Kafka source.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import pyarrow as pa

from polywire.client import gather
from polywire.client.bulk import StoredChunk
from polywire.errors import ErrorCode, Invalid
from polywire.records.allocation import BLOCK_BYTES, Arena
from polywire.records.batch import from_columns, layout, walk
from polywire.records.columns import (
    BATCH_BYTES_MAX,
    COLUMN_COUNT,
    HEADER_BYTES,
    RECORD_COUNT_MAX,
    BatchFlags,
    Column,
    Event,
    Header,
    HeaderKind,
    text_of,
)
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields
from polywire.records.rows import Rows
from polywire.types import Buffer

HEADER_TYPES: Final = tuple(kind.name.lower() for kind in HeaderKind)
TYPED_HEADER_LIST: Final = pa.list_(
    pa.struct([pa.field("key", pa.string()), pa.field("type", pa.string()), pa.field("value", pa.binary())])
)
HEADER_LIST: Final = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
CONSTANT_ROWS_MIN: Final = 1 << 16  # capacity of a constant column, which is made once and sliced
ALIGNMENT: Final = 64  # Arrow's recommendation for every buffer

_arena: Final = Arena()
ROWS_MAX: Final = 50_000  # rows per record batch: the fastest for Spark with 100-byte records
BYTES_MAX: Final = 4 << 20  # limit for keys plus values of one record batch, about the size of one fetched frame
# Stored batches of this size are used in place; for smaller ones, copying is cheaper.
WRAP_BYTES_MIN: Final = 512 << 10
EXPANDED_BYTES_MAX: Final = 64 << 20  # limit for the size of a decompressed body
FRAME_ROOM_BYTES: Final = 4096  # upper bound for the size of a batch without its columns
# Batches made here are large enough to be used in place by readers, and small enough to be fetched in one frame.
STORED_BYTES_MAX: Final = 4 << 20
COLUMNS: Final = (
    "key",
    "value",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "timestampType",
    "headers",
    "typedHeaders",
)
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
TIMESTAMP_TYPE_CREATE: Final = 0  # Kafka's CreateTime
TIMESTAMP_TYPE_APPEND: Final = 1  # Kafka's LogAppendTime
# Plain integers, because enum members in the loop over batches are slow.
_COMPRESSED: Final = int(BatchFlags.LZ4 | BatchFlags.ZSTD)
_COMPACTED: Final = int(BatchFlags.COMPACTED)
_VALUE_SIZE: Final = 2 * int(Column.VALUE_BYTES) + 1
_KEY_SIZE: Final = 2 * int(Column.KEY_BYTES) + 1
_NO_COLUMNS: Final = (-1,) * (2 * COLUMN_COUNT)
# Decision 0101: u32 length at 4, flags at 8, record count at 28, u64 base offset at 32, i64 append time at 48, u32 offset span at 84.
_facts: Final = header_fields("length", "flags", "record_count", "base_offset", "append_time_us", "offset_span")


class Space:
    """Memory for the buffers of one record batch, allocated in a few blocks."""

    __slots__ = ("_at", "_block")

    def __init__(self) -> None:
        self._block = memoryview(b"")
        self._at = 0

    def cut(self, size: int) -> memoryview:
        """Return an aligned buffer of ``size`` bytes with arbitrary content."""
        if size > len(self._block) - self._at:
            self._block = _arena.take(max(size, BLOCK_BYTES))
            self._at = 0
        view = self._block[self._at : self._at + size]
        self._at += -(-size // ALIGNMENT) * ALIGNMENT
        return view

    def cut_bits(self, count: int) -> memoryview:
        """Return a buffer for ``count`` bits, all 0."""
        view = self.cut((count + 7) // 8)
        view[:] = bytes(len(view))
        return view


def binary_column(
    source: memoryview,
    plan: memoryview,
    row_count: int,
    offsets_column: Column,
    validity_column: Column | None,
    space: Space,
) -> pa.Array[Any]:
    """Return a binary column with selected rows of ``source``, the stored batches.

    ``plan`` is the selection, in the format of ``client.gather``. If ``validity_column`` is None, no row is null.
    """
    offsets = space.cut(4 * row_count + 4)
    gather.gather_offsets(source, plan, offsets_column, offsets)
    data = space.cut(gather.binary_bytes(source, plan, offsets_column))
    gather.gather_bytes(source, plan, offsets_column, data)
    bits, nulls = None, 0
    if validity_column is not None:
        marks = space.cut_bits(row_count)
        nulls = gather.gather_validity(source, plan, offsets_column, validity_column, marks)
        bits = pa.py_buffer(marks) if nulls else None
    return pa.Array.from_buffers(pa.binary(), row_count, [bits, pa.py_buffer(offsets), pa.py_buffer(data)], nulls)


def fixed(kind: pa.DataType, row_count: int, data: memoryview) -> pa.Array[Any]:
    """Return a column of fixed width without nulls."""
    return pa.Array.from_buffers(kind, row_count, [None, pa.py_buffer(data)], 0)


def constant(value: str | int, kind: pa.DataType, row_count: int) -> pa.Array[Any]:
    """Return a column with the same value in every row."""
    capacity = max(CONSTANT_ROWS_MIN, 1 << max(0, row_count - 1).bit_length())
    return _constant(value, kind, capacity).slice(0, row_count)


@lru_cache(maxsize=64)
def _constant(value: str | int, kind: pa.DataType, capacity: int) -> pa.Array[Any]:
    if isinstance(value, str):
        return strings([value] * capacity)
    numbers = array("i", [value]) * capacity
    return pa.Array.from_buffers(pa.int32(), capacity, [None, pa.py_buffer(numbers)]).cast(kind)


def strings(texts: Sequence[str]) -> pa.Array[Any]:
    """Return a text column, built without ``pa.array``, which would import pandas (half a second per worker)."""
    data = [text.encode() for text in texts]
    offsets = array("i", accumulate([len(item) for item in data], initial=0))
    return pa.Array.from_buffers(pa.string(), len(data), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(data))])


def as_type(column: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Convert a column to another type. Bytes that are not UTF-8 become text with replacement characters."""
    if column.type == kind:
        return column
    if pa.types.is_string(kind) and pa.types.is_binary(column.type):
        return _as_text(column)
    return column.cast(kind)


def _as_text(column: pa.Array[Any]) -> pa.Array[Any]:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if item is None else item.decode("utf-8", "replace") for item in column.to_pylist()]
        return pa.array(texts, type=pa.string())


def headers_column(
    source: memoryview, plan: memoryview, row_count: int, space: Space, *, typed: bool = False
) -> pa.Array[Any]:
    """Return the headers of each row as a list of (key, value), or of (key, type, value) if ``typed`` is set.

    A row without headers is null, as in Spark's Kafka source. Types are the names of ``HeaderKind`` in lower case. The
    value of a numeric header is its bytes, little-endian.
    """
    kind = TYPED_HEADER_LIST if typed else HEADER_LIST
    inner = memoryview(gather.inner_plan(source, plan, Column.HEADER_COUNTS)).cast("q")
    if _needs_slow_headers(source, plan, inner):
        return _slow_headers(source, plan, kind)
    offsets = space.cut(4 * row_count + 4)
    gather.gather_offsets(source, plan, Column.HEADER_COUNTS, offsets)
    marks = space.cut_bits(row_count)
    nulls = gather.mark_lists(offsets, row_count, marks)
    if nulls == row_count:
        return pa.nulls(row_count, kind)
    count = offsets[4 * row_count :].cast("i")[0]
    keys = _as_text(binary_column(source, inner, count, Column.HEADER_KEY_OFFSETS, None, space))
    values = binary_column(source, inner, count, Column.HEADER_VALUE_OFFSETS, None, space)
    bits = space.cut_bits(count)
    if empty := gather.gather_kinds(source, inner, Column.HEADER_VALUE_KINDS, bits):
        values = pa.Array.from_buffers(pa.binary(), count, [pa.py_buffer(bits), *values.buffers()[1:]], empty)
    children = [keys, _kind_names(source, inner), values] if typed else [keys, values]
    pairs = pa.Array.from_buffers(kind.value_type, count, [None], 0, children=children)
    buffers = [pa.py_buffer(marks) if nulls else None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, row_count, buffers, nulls, children=[pairs])


def _kind_names(source: memoryview, inner: memoryview) -> pa.Array[Any]:
    at = gather.PLAN_FACTS + 2 * Column.HEADER_VALUE_KINDS
    lines = range(0, len(inner), gather.PLAN_WIDTH)
    kinds = b"".join([source[inner[n + at] + inner[n + 1] : inner[n + at] + inner[n + 2]] for n in lines])
    numbers = pa.Array.from_buffers(pa.uint8(), len(kinds), [None, pa.py_buffer(kinds)])
    return strings(HEADER_TYPES).take(numbers)


def _needs_slow_headers(source: memoryview, plan: memoryview, inner: memoryview) -> bool:
    """Return whether a row has a numeric header key or event fields, which only ``_slow_headers`` supports."""
    kinds_position = gather.PLAN_FACTS + 2 * Column.HEADER_KEY_KINDS
    for line in range(0, len(inner), gather.PLAN_WIDTH):
        start, stop, position = inner[line + 1], inner[line + 2], inner[line + kinds_position]
        if max(source[position + start : position + stop], default=0) > HeaderKind.STRING:
            return True
    events_place = gather.PLAN_FACTS + 2 * Column.EVENT_TYPE_OFFSETS
    return any(plan[line + events_place] >= 0 for line in range(0, len(plan), gather.PLAN_WIDTH))


def _slow_headers(source: memoryview, plan: memoryview, kind: pa.ListType[Any]) -> pa.Array[Any]:
    """Return the headers column for rows with numeric header keys or event fields.

    Only the headers are decoded, because there may be a million such rows.
    """
    ends: list[int | None] = []
    keys: list[str] = []
    types: list[str] = []
    values: list[bytes | None] = []
    for line in range(0, len(plan), gather.PLAN_WIDTH):
        rows = Rows(source[plan[line] :])
        for index in range(plan[line + 1], plan[line + 2]):
            begin = len(keys)
            for header in chain(rows.headers(index), _event_headers(rows.event(index))):
                keys.append(text_of(header.key, header.key_kind))
                types.append(HEADER_TYPES[header.value_kind])
                values.append(header.value)
            ends.append(begin if len(keys) > begin else None)
    children: list[pa.Array[Any]] = [pa.array(keys, pa.string()), pa.array(values, pa.binary())]
    if kind == TYPED_HEADER_LIST:
        children.insert(1, pa.array(types, pa.string()))
    pairs = pa.StructArray.from_arrays(children, fields=list(kind.value_type))
    return pa.ListArray.from_arrays(pa.array([*ends, len(keys)], pa.int32()), pairs).cast(kind)


def _event_headers(event: Event | None) -> Iterator[Header]:
    if event is None:
        return
    yield _event_header(b"type", event.type.encode())
    yield _event_header(b"schema_version", str(event.schema_version).encode())
    yield _event_header(b"aggregate_version", str(event.aggregate_version).encode())
    if event.metadata is not None:
        yield Header(b"event.metadata", event.metadata)


def _event_header(name: bytes, value: bytes) -> Header:
    return Header(b"event." + name, value, value_kind=HeaderKind.STRING)


class _BatchRows(NamedTuple):
    """The rows of one stored batch that are inside the requested range.

    Attributes:
        source: memory with the batch.
        numbers: what ``client.gather`` needs to know to copy these rows.
        row_count: number of rows.
        byte_count: size of their keys and values.
    """

    source: memoryview
    numbers: list[int]
    row_count: int
    byte_count: int


def chunk_to_arrow(
    chunk: StoredChunk,
    columns: Sequence[str],
    schema: pa.Schema,
    *,
    rows_max: int = ROWS_MAX,
    create_times: bool = False,
) -> list[pa.RecordBatch]:
    """Return the chunk's rows inside its range of offsets as record batches of ``schema``.

    Args:
        chunk: stored batches.
        columns: names of the columns in the order of the schema's fields, out of ``COLUMNS``.
        schema: types of the columns. Keys and values can be binary or string. Other columns can have any type that
            Arrow can cast to.
        rows_max: maximum number of rows of a record batch.
        create_times: whether times are the producer's timestamps where records have one, rounded down to milliseconds.
            The chunk must then have bodies.

    Raises Invalid(INVALID_REQUEST) if ``columns`` is empty or has an unknown name, and Invalid(INVALID_BATCH) for
    invalid batches.
    """
    unknown = [column for column in columns if column not in COLUMNS]
    if unknown or not columns:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"unknown or no columns unknown={','.join(unknown)} known={','.join(COLUMNS)}"
        )
    batches = []
    for group in _groups(_runs(chunk), rows_max):
        rows = _Rows(chunk, group, create_times=create_times)
        arrays = [as_type(rows.column(column), field.type) for column, field in zip(columns, schema, strict=True)]
        batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return batches


def _runs(chunk: StoredChunk) -> Iterator[_BatchRows]:
    if not chunk.bodies:
        yield from _bodiless_runs(chunk)
        return
    data = chunk.data
    for at in walk(data).tolist():
        length, flags, record_count, base_offset, append_time_us, offset_span = _facts(data, at)
        if base_offset + offset_span <= chunk.offset or base_offset >= chunk.offset_end:
            continue
        source, position = data, at
        if flags & _COMPRESSED:
            source, position = memoryview(expand_body(data[at : at + length], EXPANDED_BYTES_MAX)), 0
        layout_numbers = layout(source, position).tolist()
        start, stop = max(0, chunk.offset - base_offset), min(record_count, chunk.offset_end - base_offset)
        if flags & _COMPACTED:
            deltas = _column(source, layout_numbers, Column.OFFSET_DELTAS).cast("I")
            start = bisect_left(deltas, chunk.offset - base_offset)
            stop = bisect_left(deltas, chunk.offset_end - base_offset)
        if start < stop:
            size = layout_numbers[_VALUE_SIZE] + layout_numbers[_KEY_SIZE]
            share = size * (stop - start) // record_count
            yield _BatchRows(
                source, [position, start, stop, base_offset, append_time_us, *layout_numbers], stop - start, share
            )


def _bodiless_runs(chunk: StoredChunk) -> Iterator[_BatchRows]:
    """Yield the rows of batches that were fetched without bodies, and so have no columns.

    Compacted batches are always fetched with bodies.
    """
    at = 0
    while at + HEADER_BYTES <= len(chunk.data):
        length, flags, record_count, base_offset, append_time_us, _ = _facts(chunk.data, at)
        size = length if flags & _COMPACTED else HEADER_BYTES
        if flags & _COMPACTED:
            yield from _runs(replace(chunk, data=chunk.data[at : at + size], bodies=True))
        else:
            start, stop = max(0, chunk.offset - base_offset), min(record_count, chunk.offset_end - base_offset)
            if start < stop:
                yield _BatchRows(
                    chunk.data, [at, start, stop, base_offset, append_time_us, *_NO_COLUMNS], stop - start, 0
                )
        at += size


def _column(source: memoryview, layout_numbers: Sequence[int], column: Column) -> memoryview:
    return source[layout_numbers[2 * column] : layout_numbers[2 * column] + layout_numbers[2 * column + 1]]


def _groups(runs: Iterator[_BatchRows], rows_max: int) -> Iterator[list[_BatchRows]]:
    """Yield the rows of each record batch. Small stored batches are combined.

    A large stored batch is not combined with others. It is split into record batches of at most ``rows_max`` rows.
    """
    group: list[_BatchRows] = []
    rows = size = 0
    for run in runs:
        alone = run.byte_count >= WRAP_BYTES_MIN or run.row_count > rows_max
        full = rows + run.row_count > rows_max or size + run.byte_count > BYTES_MAX
        if group and (alone or full or run.source is not group[0].source):
            yield group
            group, rows, size = [], 0, 0
        if alone:
            yield from ([piece] for piece in _pieces(run, rows_max))
            continue
        group.append(run)
        rows += run.row_count
        size += run.byte_count
    if group:
        yield group


def _pieces(run: _BatchRows, rows_max: int) -> Iterator[_BatchRows]:
    start, stop = run.numbers[1], run.numbers[2]
    for first in range(start, stop, rows_max):
        last = min(first + rows_max, stop)
        numbers = [run.numbers[0], first, last, *run.numbers[3:]]
        yield _BatchRows(run.source, numbers, last - first, run.byte_count)


class _Rows:
    """The rows of one record batch, which become its columns."""

    __slots__ = ("_alone", "_chunk", "_create_times", "_plan", "_source", "_space", "row_count")

    def __init__(self, chunk: StoredChunk, runs: list[_BatchRows], *, create_times: bool) -> None:
        self._create_times: Final = create_times
        self._chunk: Final = chunk
        self._source: Final = runs[0].source
        self._plan: Final = memoryview(array("q", [number for run in runs for number in run.numbers]))
        self._alone: Final = len(runs) == 1 and runs[0].byte_count >= WRAP_BYTES_MIN
        self._space: Final = Space()
        self.row_count: Final = sum([run.row_count for run in runs])

    def column(self, name: str) -> pa.Array[Any]:
        """Return a column in its native Arrow type, before the cast to the schema."""
        match name:
            case "value":
                return self._binary(Column.VALUE_OFFSETS, Column.VALUE_VALIDITY)
            case "key":
                return self._binary(Column.KEY_OFFSETS, Column.KEY_VALIDITY)
            case "topic":
                return constant(self._chunk.topic, pa.string(), self.row_count)
            case "partition":
                return constant(self._chunk.partition, pa.int32(), self.row_count)
            case "timestampType":
                kind = TIMESTAMP_TYPE_CREATE if self._create_times else TIMESTAMP_TYPE_APPEND
                return constant(kind, pa.int32(), self.row_count)
            case "offset":
                target = self._space.cut(8 * self.row_count)
                gather.number_rows(self._source, self._plan, Column.OFFSET_DELTAS, target)
                return fixed(pa.int64(), self.row_count, target)
            case "timestamp":
                target = self._space.cut(8 * self.row_count)
                if self._create_times:
                    gather.create_time_rows(self._source, self._plan, Column.ORIGIN_TIMES_US, target)
                else:
                    gather.time_rows(self._plan, target)
                return fixed(TIMESTAMP, self.row_count, target)
            case _:
                typed = name == "typedHeaders"
                return headers_column(self._source, self._plan, self.row_count, self._space, typed=typed)

    def _binary(self, offsets_column: Column, validity_column: Column) -> pa.Array[Any]:
        if not self._alone:
            return binary_column(self._source, self._plan, self.row_count, offsets_column, validity_column, self._space)
        layout_numbers = self._plan[gather.PLAN_FACTS :].tolist()
        if layout_numbers[2 * offsets_column] < 0:
            return pa.nulls(self.row_count, pa.binary())
        whole = pa.py_buffer(self._source)
        buffers = [
            whole.slice(layout_numbers[2 * column], layout_numbers[2 * column + 1])
            if layout_numbers[2 * column] >= 0
            else None
            for column in (validity_column, offsets_column, offsets_column + 1)
        ]
        nulls = 0 if buffers[0] is None else -1
        return pa.Array.from_buffers(pa.binary(), self.row_count, buffers, nulls, self._plan[1])


def arrow_to_batches(
    data: pa.Table | pa.RecordBatch, *, value: str = "value", key: str | None = "key", headers: str | None = "headers"
) -> list[bytearray]:
    """Return a table's rows as stored batches that are ready to produce, in order. Each has at most about 4 MiB.

    Args:
        data: the table. Keys and values are binary or string. Headers are a list of (key, value) or (key, type, value).
        value: name of the value column.
        key: name of the key column; None, or a column that is missing, for no keys.
        headers: name of the headers column; None, or a column that is missing, for no headers.

    Raises Invalid(INVALID_REQUEST) if the value column is missing, and Invalid(RECORD_TOO_LARGE) for a record that does
    not fit a batch.
    """
    if value not in data.schema.names:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the table has no column for values column={value!r} columns={','.join(data.schema.names)}",
        )
    chosen = [value, *(name for name in (key, headers) if name is not None and name in data.schema.names)]
    batches = data.select(chosen).to_batches() if isinstance(data, pa.Table) else [data.select(chosen)]
    made: list[bytearray] = []
    for batch in batches:
        keys = batch.column(chosen.index(key)) if key in chosen else None
        lists = batch.column(chosen.index(headers)) if headers in chosen else None
        for rows in _bounded(batch):
            made.append(
                _stored(
                    _as_binary(batch.column(0).slice(*rows)),
                    None if keys is None else _as_binary(keys.slice(*rows)),
                    None if lists is None else lists.slice(*rows),
                )
            )
    return made


def _bounded(batch: pa.RecordBatch) -> list[tuple[int, int]]:
    """Split a record batch into parts of at most ``STORED_BYTES_MAX``. Return first row and number of rows of each.

    Parts are halved until they fit. A part of one row may be larger, up to the broker's limit for a batch.
    """
    pieces: list[tuple[int, int]] = []
    waiting = [(0, batch.num_rows)] if batch.num_rows else []
    while waiting:
        first, count = waiting.pop()
        size = batch.slice(first, count).nbytes
        if count == 1 and size > BATCH_BYTES_MAX - FRAME_ROOM_BYTES:
            raise Invalid(
                ErrorCode.RECORD_TOO_LARGE, f"record is too large for a batch bytes={size} limit={BATCH_BYTES_MAX}"
            )
        if count > 1 and (size > STORED_BYTES_MAX or count > RECORD_COUNT_MAX):
            half = count // 2
            waiting += [(first + half, count - half), (first, half)]
        else:
            pieces.append((first, count))
    return pieces


def _as_binary(column: pa.Array[Any]) -> pa.Array[Any]:
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return column
    if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    raise Invalid(ErrorCode.INVALID_REQUEST, f"keys and values must be binary or string type={kind}")


def _stored(values: pa.Array[Any], keys: pa.Array[Any] | None, headers: pa.Array[Any] | None) -> bytearray:
    count = len(values)
    columns: dict[int, Buffer] = {}
    _put_binary(columns, values, Column.VALUE_OFFSETS, Column.VALUE_VALIDITY)
    if keys is not None and keys.null_count < count:
        _put_binary(columns, keys, Column.KEY_OFFSETS, Column.KEY_VALIDITY)
    if headers is not None:
        _put_headers(columns, headers)
    return from_columns(columns, count)


def _put_binary(
    columns: dict[int, Buffer], column: pa.Array[Any], offsets_column: Column, validity_column: Column | None
) -> None:
    if column.null_count:
        if validity_column is not None:
            columns[validity_column] = _bits(column)
        # A null has length 0 in a stored batch, which Arrow does not guarantee.
        column = column.fill_null("" if pa.types.is_string(column.type) else b"")
    _, offsets, data = column.buffers()
    if offsets is None or not len(column):
        columns[offsets_column], columns[offsets_column + 1] = bytes(4 * len(column) + 4), b""
        return
    start = column.offset
    rebased = gather.rebase_offsets(memoryview(offsets), start, len(column))
    first = memoryview(offsets).cast("B")[4 * start : 4 * start + 4].cast("i")[0]
    size = memoryview(rebased)[-4:].cast("i")[0]
    columns[offsets_column] = rebased
    columns[offsets_column + 1] = memoryview(data).cast("B")[first : first + size] if data is not None else b""


def _bits(column: pa.Array[Any]) -> Buffer:
    """Return the validity bits of a column. Bit 0 is its first row, and the bits after the last row are 0."""
    marks = column.is_valid().buffers()[1]
    assert marks is not None, "a boolean column has its bits"
    bits = bytearray(memoryview(marks)[: (len(column) + 7) // 8])
    if len(column) % 8:
        bits[-1] &= (1 << len(column) % 8) - 1
    return bits


def _put_headers(columns: dict[int, Buffer], lists: Any) -> None:
    pairs = lists.flatten()
    if not len(pairs):
        return
    keys, *types, values = pairs.flatten()
    keys, values = _as_binary(keys), _as_binary(values)
    if keys.null_count:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"header has no key (set it, or remove the header) null_keys={keys.null_count}",
        )
    import pyarrow.compute as pc  # its import takes as long as that of all other modules here

    lengths = lists.value_lengths().fill_null(0)
    columns[Column.HEADER_COUNTS] = bytes(4) + _fixed_bytes(pc.cumulative_sum(lengths.cast(pa.int32())), 4)
    columns[Column.HEADER_KEY_KINDS] = bytes([HeaderKind.STRING]) * len(pairs)
    _put_binary(columns, keys, Column.HEADER_KEY_OFFSETS, None)
    columns[Column.HEADER_VALUE_KINDS] = _fixed_bytes(_kinds_of(values, types[0] if types else None), 1)
    _put_binary(columns, values, Column.HEADER_VALUE_OFFSETS, None)


def _kinds_of(values: pa.Array[Any], types: pa.Array[Any] | None) -> pa.Array[Any]:
    """Return the type of each header value, as stored in batches.

    Without ``types``, a value is RAW, or NULL if it is null. The numbers of these types are 1 and 0, the same as those
    of "is not null".
    """
    there = values.is_valid().cast(pa.uint8())
    if types is None:
        return there
    import pyarrow.compute as pc

    kinds = pc.index_in(types, value_set=strings(HEADER_TYPES))
    if kinds.null_count:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"header has an unknown type types={','.join(HEADER_TYPES)}")
    return pc.multiply(kinds.cast(pa.uint8()), there)


def _fixed_bytes(column: pa.Array[Any], width: int) -> bytes:
    """Return the bytes of a fixed-width column without nulls that was computed by Arrow."""
    data = column.buffers()[1]
    assert data is not None, "a column of numbers has its bytes"
    return bytes(memoryview(data).cast("B")[width * column.offset : width * (column.offset + len(column))])
