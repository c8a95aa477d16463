"""Where an application is in the records that it is being handed: ``async for`` without a coroutine for each record.

What ``__anext__`` returns is the cursor itself as long as there is a record: awaited, it hands that over at once. Only where there is none a
coroutine waits for more.

Promises: ``row`` counts the records that were handed out of ``records``. Must not know: what records are, where they come from.
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
    """Set the error that an iterator ends with, without one being made, traced or chained each time."""
    if cython.compiled:
        if Py_REFCNT(cursor._end) > 1:  # somebody kept the last one
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
    """Records and a row in them. ``more`` returns the first record of the next ones, or raises StopAsyncIteration."""

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
        """End at once: an awaited iterator ends with its result."""
        record = self.records[self.row]
        self.row += 1
        if cython.compiled:
            _end_with(self, record)
            raise StopIteration  # which Cython leaves to the error that is set
        raise StopIteration(record)
