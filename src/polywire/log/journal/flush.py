"""Flushing some bytes of a file to the disk, and leaving alone what else waits there.

Promises: on return the bytes are on the disk; the interpreter lock is free meanwhile. Must not know: slots, who waits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Final

from polywire.store.address import address_of
from polywire.store.libc import find_call

_MS_SYNC: Final = 16 if sys.platform == "darwin" else 4  # sys/mman.h


_msync: Final = find_call("msync", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def flush(descriptor: int, view: memoryview, start: int, stop: int) -> None:
    """Flush bytes [start, stop) of a file, of which ``view`` maps the whole. Where the system cannot choose, the whole file. Raises OSError.

    ``fdatasync`` writes every changed page of a file. A journal slot that was sealed and is used again may have many that nobody needs;
    ``msync`` of a shared mapping writes those of a range, with the same guarantee (Linux: both end in ``vfs_fsync_range``).
    """
    if _msync is None:
        os.fdatasync(descriptor)
        return
    start -= start % mmap.PAGESIZE
    if _msync(address_of(view) + start, stop - start, _MS_SYNC) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
