"""Access the memory of a buffer: bytes, bytearray, memoryview or array, of any item format.

While a ``Lent`` object exists, its buffer can be neither resized nor freed. Ranges are not checked here, so callers
must check them.

Its attribute ``p`` is a pointer in compiled code, and a memoryview of bytes in uncompiled code. Code uses ``p`` in the
same way in both cases. In compiled code, the functions that load and store values are inlined from ``memory.pxd``.
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Any, TypeAlias

import cython

from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.cpython.buffer import PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
    from cython.cimports.cpython.bytearray import PyByteArray_FromStringAndSize

Lendable: TypeAlias = "Buffer | array[int]"
"""Buffers that can be borrowed, including arrays of numbers."""


@cython.final
@cython.freelist(16)
@cython.cclass
class Lent:
    """A buffer that cannot move or be freed while this object exists.

    Attributes:
        p: the memory: a pointer in compiled code, a memoryview otherwise.
        size: its size in bytes.
    """

    if not cython.compiled:  # in the compiled module, memory.pxd declares these fields
        p: memoryview
        size: int
        view: Any

    def __dealloc__(self) -> None:
        if cython.compiled:
            PyBuffer_Release(cython.address(self.view))


@cython.cfunc
def filled(p: cython.p_const_uchar, size: cython.Py_ssize_t) -> bytearray:
    """Return a bytearray with a copy of the first ``size`` bytes at ``p``; much faster than the type's constructor."""
    if cython.compiled:
        return PyByteArray_FromStringAndSize(cython.cast(cython.p_char, p), size)
    else:  # Cython reports a plain return as unreachable
        return bytearray(p[:size])


@cython.cfunc
def lend(data: Lendable) -> Lent:
    """Borrow a contiguous buffer for reading. Raises BufferError or TypeError for anything else."""
    lent: Lent = Lent.__new__(Lent)
    if cython.compiled:
        PyObject_GetBuffer(data, cython.address(lent.view), PyBUF_SIMPLE)
        lent.p = cython.cast(cython.p_uchar, lent.view.buf)
        lent.size = lent.view.len
    else:
        lent.p = memoryview(data).cast("B")
        lent.size = len(lent.p)
    return lent


@cython.cfunc
def lend_writable(data: Lendable) -> Lent:
    """Borrow a contiguous buffer for writing. Raises BufferError if it is read-only."""
    lent: Lent = Lent.__new__(Lent)
    if cython.compiled:
        PyObject_GetBuffer(data, cython.address(lent.view), PyBUF_WRITABLE)
        lent.p = cython.cast(cython.p_uchar, lent.view.buf)
        lent.size = lent.view.len
    else:
        lent.p = memoryview(data).cast("B")
        lent.size = len(lent.p)
        if lent.p.readonly:
            raise BufferError("buffer is read-only")
    return lent


if not cython.compiled:
    _U32 = Struct("<I")
    _I32 = Struct("<i")
    _U64 = Struct("<Q")
    _I64 = Struct("<q")

    def load_u32(p: memoryview, at: int) -> int:
        x: int = _U32.unpack_from(p, at)[0]
        return x

    def load_i32(p: memoryview, at: int) -> int:
        x: int = _I32.unpack_from(p, at)[0]
        return x

    def load_u64(p: memoryview, at: int) -> int:
        x: int = _U64.unpack_from(p, at)[0]
        return x

    def load_i64(p: memoryview, at: int) -> int:
        x: int = _I64.unpack_from(p, at)[0]
        return x

    def store_u32(p: memoryview, at: int, x: int) -> None:
        _U32.pack_into(p, at, x)

    def store_u64(p: memoryview, at: int, x: int) -> None:
        _U64.pack_into(p, at, x)

    def store_i64(p: memoryview, at: int, x: int) -> None:
        _I64.pack_into(p, at, x)

    def move(target: memoryview, target_at: int, source: memoryview, source_at: int, size: int) -> None:
        """Copy ``size`` bytes between buffers that do not overlap."""
        target[target_at : target_at + size] = source[source_at : source_at + size]

    def clear(p: memoryview, at: int, size: int) -> None:
        """Write ``size`` zero bytes."""
        p[at : at + size] = bytes(size)
