"""Memory for what is large: used once, or read into again and again.

Promises: fresh memory costs time where it is first written, not where it is taken (64 MiB of a ``bytearray`` are zeroed for 35 ms while no
other thread of the interpreter runs). Must not know: what is put there.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

MAPPED_BYTES_MIN: Final = 1024 * 1024  # below, the allocator's own memory is quicker

LARGE_PAGE_BYTES = 2 * 1024 * 1024  # of x86-64, and of ARM with pages of 4 KiB

_PRIVATE: Final = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def allocate(size: int, *, mapped_bytes_min: int = MAPPED_BYTES_MIN) -> bytearray | mmap.mmap:
    """Writable memory of ``size`` bytes, all zero, at least one; from ``mapped_bytes_min`` on it is mapped."""
    if size < mapped_bytes_min:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=_PRIVATE) if _PRIVATE else mmap.mmap(-1, size)


def allocate_lasting(size: int) -> mmap.mmap:
    """Writable memory of ``size`` bytes that begins on a page, all zero, to be read into again and again: in large pages, where the system
    has them.

    A disk is asked for as much at once as lies together in memory. Of 4 MiB in small pages, which lie anywhere, a direct read makes four to
    six requests; in large ones it is one, which took a third of the time and a fifth of the processor's.
    """
    if size < LARGE_PAGE_BYTES or not _PRIVATE:
        return mmap.mmap(-1, size)
    mapped = (
        -(-size // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    )  # Linux lays out such sizes so that their pages can be large
    block = mmap.mmap(-1, mapped, flags=_PRIVATE)
    with suppress(OSError, AttributeError):  # advice only; some systems do not take it
        block.madvise(mmap.MADV_HUGEPAGE, 0, size - size % LARGE_PAGE_BYTES)
    return block
