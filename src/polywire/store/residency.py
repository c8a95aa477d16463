"""Where memory lies, and whether the system holds it: what cold reads need to stay off the event loop.

Promises: an answer in microseconds without touching the memory itself; "cold" where the system cannot tell. Must not know: blobs.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import Final

from polywire.store.libc import find_call
from polywire.types import Buffer

BELIEVED_S: Final = (
    0.1  # reclaiming memory that was used so lately is not worth asking about; a mistake costs one read of a disk
)

_PAGE: Final = mmap.PAGESIZE


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer`` (C API reference, "Buffer Protocol")."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_mincore: Final = find_call("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, brief=True)


def address_of(buffer: Buffer) -> int:
    """Address of a buffer's first byte; valid while the buffer lives."""
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), 0)
    address = int(view.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return address


class Residency:
    """Which bytes of one mapping are in memory.

    Invariant: bytes [``_start``, ``_stop``) were there when last asked for; that is believed until ``_until``, because they have just been
    used: who reads on from where he was asks the system for the new part alone.
    """

    __slots__ = ("_address", "_start", "_states", "_states_at", "_stop", "_until")

    def __init__(self, mapping: memoryview) -> None:
        self._address: Final = address_of(mapping) if len(mapping) else 0
        self._states: Final = bytearray(len(mapping) // _PAGE + 1)
        self._states_at: Final = address_of(self._states)
        self._start = self._stop = 0
        self._until = 0.0

    def holds(self, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) of the mapping are in memory. For one thread."""
        now = time.monotonic()
        is_known = self._start <= start <= self._stop and now < self._until
        if is_known and stop <= self._stop:
            return True
        if not self._ask(self._stop if is_known else start, stop):
            return False
        self._start, self._stop, self._until = start, stop, now + BELIEVED_S
        return True

    def _ask(self, start: int, stop: int) -> bool:
        if stop <= start:
            return True
        if _mincore is None:
            return False
        start -= start % _PAGE
        count = -(-(stop - start) // _PAGE)
        if _mincore(self._address + start, stop - start, self._states_at) != 0:
            return False
        return self._states.count(1, 0, count) == count
