"""Memory addresses of buffers, for system calls that take one."""

from __future__ import annotations

import ctypes

from polywire.types import Buffer


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


def address_of(buffer: Buffer) -> int:
    """Return the address of a buffer's first byte; valid while the buffer exists."""
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), 0)
    address = int(view.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return address
