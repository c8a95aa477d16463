"""Build Arrow columns from stored batches: copied columns, constants, and lists of headers.

Memory blocks are reused only when Arrow no longer references them. Bytes that are not UTF-8 are replaced in text
columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, Final

import pyarrow as pa

from polywire.client import gather
from polywire.records.allocation import BLOCK_BYTES, Arena
from polywire.records.columns import Column, Event, Header, HeaderKind, text_of
from polywire.records.rows import Rows

HEADER_TYPES: Final = tuple(kind.name.lower() for kind in HeaderKind)
TYPED_HEADER_LIST: Final = pa.list_(
    pa.struct([pa.field("key", pa.string()), pa.field("type", pa.string()), pa.field("value", pa.binary())])
)
HEADER_LIST: Final = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
CONSTANT_ROWS_MIN: Final = 1 << 16  # capacity of a constant column, which is made once and sliced
ALIGNMENT: Final = 64  # Arrow's recommendation for every buffer

_arena: Final = Arena()


class Space:
    """Memory for the buffers of one record batch, allocated in a few blocks. Buffers do not overlap."""

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


def gathered_binary(
    source: memoryview,
    plan: memoryview,
    row_count: int,
    offsets_column: Column,
    validity_column: Column | None,
    space: Space,
) -> pa.Array[Any]:
    """Return a binary column with all rows that a plan selects.

    If ``validity_column`` is None, no row is null.
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
    """Return a column in the requested type. Bytes that are not UTF-8 become text with replacement characters."""
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
    if _is_odd(source, plan, inner):
        return _slow_headers(source, plan, kind)
    offsets = space.cut(4 * row_count + 4)
    gather.gather_offsets(source, plan, Column.HEADER_COUNTS, offsets)
    marks = space.cut_bits(row_count)
    nulls = gather.mark_lists(offsets, row_count, marks)
    if nulls == row_count:
        return pa.nulls(row_count, kind)
    count = offsets[4 * row_count :].cast("i")[0]
    keys = _as_text(gathered_binary(source, inner, count, Column.HEADER_KEY_OFFSETS, None, space))
    values = gathered_binary(source, inner, count, Column.HEADER_VALUE_OFFSETS, None, space)
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


def _is_odd(source: memoryview, plan: memoryview, inner: memoryview) -> bool:
    """Return whether any row has a numeric header key, or event fields. Then ``_slow_headers`` is needed."""
    kinds_place = gather.PLAN_FACTS + 2 * Column.HEADER_KEY_KINDS
    for line in range(0, len(inner), gather.PLAN_WIDTH):
        start, stop, place = inner[line + 1], inner[line + 2], inner[line + kinds_place]
        if max(source[place + start : place + stop], default=0) > HeaderKind.STRING:
            return True
    events_place = gather.PLAN_FACTS + 2 * Column.EVENT_TYPE_OFFSETS
    return any(plan[line + events_place] >= 0 for line in range(0, len(plan), gather.PLAN_WIDTH))


def _slow_headers(source: memoryview, plan: memoryview, kind: pa.ListType[Any]) -> pa.Array[Any]:
    """Return the headers column for rows with numeric header keys or event fields.

    A batch may have a million such rows, so only the needed fields are decoded.
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
                keys.append(header_key_text(header))
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


def header_key_text(header: Header) -> str:
    """Return a header's key as text. A numeric key is returned in decimal."""
    return text_of(header.key, header.key_kind)
