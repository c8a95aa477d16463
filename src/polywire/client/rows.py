"""Return fetched records to the application without a Python call or coroutine per record. This module is compiled.

* ``rows_of`` converts the records of a stored batch to instances of a subclass of ``tuple``, with one call. Each tuple
  is (value, key, headers, topic, partition, offset, append time, None). The batch must be valid. The garbage collector
  does not track the tuples, which cannot be part of reference cycles. Otherwise it would visit a million tuples several
  times.
* ``Cursor`` makes ``async for`` over records fast. While records are available, ``__anext__`` returns the cursor itself,
  and awaiting it returns the next record at once. Only when no record is left does a coroutine wait for more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import cython

from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_FromStringAndSize
    from cython.cimports.cpython.ref import Py_DECREF, Py_INCREF, Py_REFCNT, PyObject
    from cython.cimports.cpython.tuple import PyTuple_SET_ITEM
    from cython.cimports.polywire.client.collector import PyObject_GC_UnTrack, PyType_GenericAlloc
    from cython.cimports.polywire.client.stop_iteration import (
        PyErr_Restore,
        PyExc_StopIteration,
        PyStopIterationObject,
    )
    from cython.cimports.polywire.records.memory import Lent, lend, load_i32, load_i64
else:
    from polywire.records.memory import Lent, lend, load_i32, load_i64

_FIELDS = cython.declare(cython.Py_ssize_t, 8)
_VALUE_OFFSETS = cython.declare(cython.Py_ssize_t, 0)  # byte position of a column's offset in a layout
_VALUE_BYTES = cython.declare(cython.Py_ssize_t, 16)
_KEY_OFFSETS = cython.declare(cython.Py_ssize_t, 48)
_KEY_BYTES = cython.declare(cython.Py_ssize_t, 64)


@cython.cfunc
def _part(source: Lent, offsets_at: cython.Py_ssize_t, bytes_at: cython.Py_ssize_t, row: cython.Py_ssize_t) -> object:
    """Return the value of a row in a binary column, or None if the batch does not have the column."""
    start: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    if offsets_at < 0:
        return None
    start = bytes_at + load_i32(source.p, offsets_at + 4 * row)
    stop = bytes_at + load_i32(source.p, offsets_at + 4 * row + 4)
    if cython.compiled:
        return PyBytes_FromStringAndSize(cython.cast(cython.p_char, source.p) + start, stop - start)
    return bytes(source.p[start:stop])


@cython.cfunc
@cython.inline
def _set_field(made: object, index: cython.Py_ssize_t, field: object) -> cython.void:
    """Set a field of a tuple that is being built. The tuple owns the reference."""
    if cython.compiled:
        Py_INCREF(field)
        PyTuple_SET_ITEM(made, index, field)


def rows_of(
    kind: Any,
    batch: Buffer,
    layout: Lendable,
    first: int,
    record_count: int,
    base_offset: int,
    *,
    headers: object,
    topic: str,
    partition: int,
    append_time_us: int,
) -> list[Any]:
    """Return rows ``first`` to ``record_count`` of a batch that has only keys and values, as objects of ``kind``.

    ``layout`` has the positions of the columns, as returned by ``batch.layout``.
    """
    source: Lent = lend(batch)
    positions: Lent = lend(layout)
    count: cython.Py_ssize_t = record_count
    begin: cython.Py_ssize_t = first
    base: cython.longlong = base_offset
    value_offsets: cython.Py_ssize_t = load_i64(positions.p, _VALUE_OFFSETS)
    value_bytes: cython.Py_ssize_t = load_i64(positions.p, _VALUE_BYTES)
    key_offsets: cython.Py_ssize_t = load_i64(positions.p, _KEY_OFFSETS)
    key_bytes: cython.Py_ssize_t = load_i64(positions.p, _KEY_BYTES)
    row: cython.Py_ssize_t
    number: object = partition
    time_us: object = append_time_us
    row_type: type[Any] = kind
    rows: list[Any] = []
    for row in range(begin, count):
        value: object = _part(source, value_offsets, value_bytes, row)
        key: object = _part(source, key_offsets, key_bytes, row)
        offset: object = base + row
        if cython.compiled:
            made = PyType_GenericAlloc(row_type, _FIELDS)
            _set_field(made, 0, value)
            _set_field(made, 1, key)
            _set_field(made, 2, headers)
            _set_field(made, 3, topic)
            _set_field(made, 4, number)
            _set_field(made, 5, offset)
            _set_field(made, 6, time_us)
            _set_field(made, 7, None)
            PyObject_GC_UnTrack(cython.cast(cython.p_void, made))
            rows.append(made)
        else:
            rows.append(tuple.__new__(kind, (value, key, headers, topic, number, offset, time_us, None)))
    return rows


@cython.cfunc
@cython.exceptval(check=False)
def _end_with(cursor: Cursor, record: object) -> cython.void:
    """Raise StopIteration with a value.

    To avoid an allocation, the last exception is reused unless something refers to it.
    """
    if cython.compiled:
        if Py_REFCNT(cursor._end) > 1:  # the exception of the previous record is still referenced
            cursor._end = StopIteration()
        slot = cython.cast(cython.pointer(PyStopIterationObject), cursor._end)
        last: cython.pointer(PyObject) = slot.value
        Py_INCREF(record)
        slot.value = cython.cast(cython.pointer(PyObject), record)
        if last != cython.NULL:
            Py_DECREF(cython.cast(object, last))
        Py_INCREF(cursor._end)
        Py_INCREF(cython.cast(object, PyExc_StopIteration))
        PyErr_Restore(PyExc_StopIteration, cython.cast(cython.pointer(PyObject), cursor._end), cython.NULL)


@cython.cclass
class Cursor:
    """Iterator over fetched records, compiled because it runs once for each record."""

    records: list[Any] = cython.declare(list, visibility="public")
    row = cython.declare(cython.Py_ssize_t, visibility="public")
    _more = cython.declare(object)
    _end = cython.declare(object)

    def __init__(self, more: Callable[[], Awaitable[Any]]) -> None:
        """``more`` waits for the next records and returns the first of them, or raises StopAsyncIteration."""
        self.records = []
        self.row = 0
        self._more = more
        self._end = StopIteration()

    def __aiter__(self) -> Cursor:
        return self

    def __anext__(self) -> Awaitable[Any]:
        if self.row < len(self.records):
            return self
        found: Awaitable[Any] = self._more()
        return found

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> None:
        """Raise StopIteration with the next record, which is then the result of ``await``."""
        record = self.records[self.row]
        self.row += 1
        if cython.compiled:
            _end_with(self, record)
            raise StopIteration  # Cython: the exception that _end_with has set is propagated
        raise StopIteration(record)
