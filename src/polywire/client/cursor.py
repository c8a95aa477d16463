"""An iterator that makes ``async for`` over fetched records fast: it creates no coroutine per record.

While records are available, ``__anext__`` returns the cursor itself, and awaiting it returns the next record at once.
Only when no record is left does a coroutine wait for more. ``row`` is the number of records already returned from
``records``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import cython

if cython.compiled:
    from cython.cimports.cpython.ref import Py_DECREF, Py_INCREF, Py_REFCNT, PyObject
    from cython.cimports.polywire.client.stop_iteration import (
        PyErr_Restore,
        PyExc_StopIteration,
        PyStopIterationObject,
    )


@cython.cfunc
@cython.exceptval(check=False)
def _end_with(cursor: Cursor, record: object) -> cython.void:
    """Raise a StopIteration with this value. The exception object is reused unless it is still referenced."""
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
    """Fetched records and the current row.

    ``more`` waits for the next records and returns the first of them, or raises StopAsyncIteration.
    """

    records: list[Any] = cython.declare(list, visibility="public")
    row = cython.declare(cython.Py_ssize_t, visibility="public")
    _more = cython.declare(object)
    _end = cython.declare(object)

    def __init__(self, more: Callable[[], Awaitable[Any]]) -> None:
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
        """Raise StopIteration with the next record, which makes it the result of the ``await``."""
        record = self.records[self.row]
        self.row += 1
        if cython.compiled:
            _end_with(self, record)
            raise StopIteration  # Cython: the exception that _end_with has set is propagated
        raise StopIteration(record)
