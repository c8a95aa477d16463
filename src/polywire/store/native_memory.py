"""Copy memory, find its address, and call functions of the C library that Python does not expose.

* A function that the system lacks is None, and callers do without it.
* Long copies release the GIL. Short ones do not, because releasing it takes longer.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, Final

from polywire.types import Buffer

LONG_BYTES: Final = 64 * 1024  # takes some 5 µs; shorter copies keep the GIL


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
    """Return the address of a buffer's first byte. It is valid while the buffer exists."""
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), 0)
    address = int(view.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return address


def find_call(name: str, *arguments: Any, brief: bool = False) -> Callable[..., int] | None:
    """Return a C function with these ctypes as arguments and an ``int`` result.

    Errors are in ``ctypes.get_errno()``.

    Args:
        brief: the function is so short that releasing the GIL would cost more.
    """
    if sys.platform == "win32":
        return None
    library = ctypes.PyDLL(None) if brief else ctypes.CDLL(None, use_errno=True)
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return function


_memmove: Final = find_call("memmove", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memset: Final = find_call("memset", ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


def touch(block: memoryview) -> None:
    """Write zeros to memory, which makes the system provide its pages before they are needed.

    This may take milliseconds per page.
    """
    if _memset is not None:
        _memset(address_of(block), 0, len(block))


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` to the start of the writable ``target``. Both are contiguous bytes."""
    size = len(source)
    assert size <= len(target), "the copy must fit"
    if size < LONG_BYTES or _memmove is None:
        target[:size] = source
    else:
        _memmove(address_of(target), address_of(source), size)
