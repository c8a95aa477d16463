"""An ``async for`` loop over records without a coroutine for each record.

While records are available, ``__anext__`` returns the cursor itself, and awaiting it returns the next record at once. A
coroutine waits only if no record is left. ``row`` is the number of records that were returned from ``records``.
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
    """Set the StopIteration that ends an iterator, without creating one each time."""
    if cython.compiled:
        if Py_REFCNT(cursor._end) > 1:  # the last one is still referenced
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
    """Records and the current row. ``more`` returns the first of the next records, or raises StopAsyncIteration."""

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
        """End at once: the result of an awaited iterator is the value of its StopIteration."""
        record = self.records[self.row]
        self.row += 1
        if cython.compiled:
            _end_with(self, record)
            raise StopIteration  # Cython leaves the error that is already set
        raise StopIteration(record)
