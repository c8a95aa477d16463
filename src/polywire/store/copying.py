"""Copy large memory, or fault in its pages ahead of use.

The GIL is released if the work takes longer than releasing it.
"""

from __future__ import annotations

import ctypes
from typing import Final

from polywire.store.address import address_of
from polywire.store.libc import find_call

LONG_BYTES: Final = 64 * 1024  # takes some 5 µs; shorter copies keep the GIL

_memmove: Final = find_call("memmove", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memset: Final = find_call("memset", ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


def touch(block: memoryview) -> None:
    """Write zeros to memory, which makes the system provide its pages before they are needed; this may take
    milliseconds per page.
    """
    if _memset is not None:
        _memset(address_of(block), 0, len(block))


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` to the start of the writable ``target``; both are contiguous bytes."""
    size = len(source)
    assert size <= len(target), "what is copied fits"
    if size < LONG_BYTES or _memmove is None:
        target[:size] = source
    else:
        _memmove(address_of(target), address_of(source), size)
