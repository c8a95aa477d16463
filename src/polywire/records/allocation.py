"""Memory for what is large and used once.

Promises: fresh memory costs time where it is first written, not where it is taken (64 MiB of a ``bytearray`` are zeroed for 35 ms while no
other thread of the interpreter runs). Must not know: what is put there.
"""

from __future__ import annotations

import mmap
from typing import Final

MAPPED_BYTES_MIN: Final = 1024 * 1024  # below, the allocator's own memory is quicker

_PRIVATE: Final = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def allocate(size: int, *, mapped_bytes_min: int = MAPPED_BYTES_MIN) -> bytearray | mmap.mmap:
    """Writable memory of ``size`` bytes, all zero, at least one; from ``mapped_bytes_min`` on it is mapped."""
    if size < mapped_bytes_min:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=_PRIVATE) if _PRIVATE else mmap.mmap(-1, size)
