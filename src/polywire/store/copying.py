"""Large memory, copied or touched while other threads run.

Promises: the interpreter lock is given away for what takes longer than giving it away does. Must not know: what memory holds.
"""

from __future__ import annotations

import ctypes
from typing import Final

from polywire.store.address import address_of
from polywire.store.libc import find_call

LONG_BYTES: Final = 64 * 1024  # some 5 us; what is shorter is copied at once

_memmove: Final = find_call("memmove", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memset: Final = find_call("memset", ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


def touch(block: memoryview) -> None:
    """Have the system give writable memory its pages, all zero, before somebody waits for them: of some machines each takes milliseconds."""
    if _memset is not None:
        _memset(address_of(block), 0, len(block))


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` to the beginning of the writable ``target``, which has space for it; both are bytes that lie together."""
    size = len(source)
    assert size <= len(target), "what is copied fits"
    if size < LONG_BYTES or _memmove is None:
        target[:size] = source
    else:
        _memmove(address_of(target), address_of(source), size)
