"""Where memory lies, and whether the system holds it: what cold reads need to stay off the event loop.

Promises: an answer in microseconds without touching the memory itself; "cold" where the system cannot tell. Must not know: blobs.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any, Final

from polywire.types import Buffer

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


def _find_mincore() -> Any:
    """The system's mincore, called with the interpreter lock held: it is too short to be worth giving the lock away."""
    if sys.platform == "win32":
        return None
    function = getattr(ctypes.PyDLL(None), "mincore", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        function.restype = ctypes.c_int
    return function


_mincore: Final = _find_mincore()


def address_of(buffer: Buffer) -> int:
    """Address of a buffer's first byte; valid while the buffer lives."""
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), 0)
    address = int(view.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return address


def is_resident(address: int, start: int, stop: int) -> bool:
    """Whether bytes [start, stop) of the mapping that begins at ``address`` are in memory."""
    if stop <= start:
        return True
    if _mincore is None:
        return False
    start -= start % _PAGE
    count = -(-(stop - start) // _PAGE)
    states = bytearray(count)
    if _mincore(address + start, stop - start, ctypes.addressof(ctypes.c_char.from_buffer(states))) != 0:
        return False
    return states.count(1) == count
