"""File descriptors, of which the system gives a process only so many: who may have how many of them.

Promises: however many peers connect, the log finds a descriptor when it has to write a segment or open one. Must not know: the log's files,
connections.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from typing import Final

from polywire.errors import ErrorCode, Invalid
from polywire.store.base import OPEN_BLOBS_MAX

PROCESS: Final = 24  # standard streams, the loop's own, listeners, the lock of the data directory
LOG: Final = 12  # a segment, a snapshot and a slot being written, their directories, what is being deleted
PER_SLOT: Final = 2  # open, and mapped
PER_BLOB: Final = 2  # open, and open past the page cache
BLOBS_MIN: Final = 2  # one to read from, one to merge with
BOUNDLESS: Final = 1 << 20  # counts as no limit: more than any of our own
BLOB_SHARE: Final = 4  # of what is left, this part may go to segments
CONNECTIONS_MIN: Final = 8  # with fewer, nobody could look what is wrong


@dataclass(frozen=True, slots=True)
class Shares:
    """Who may have how many. blobs: files of the log kept open. connections: open at once."""

    blobs: int
    connections: int


def share(limit: int, *, slots: int) -> Shares:
    """Divide so many descriptors. ``slots``: files of the journal. Raises Invalid(INVALID_REQUEST) where they do not do."""
    left = limit - PROCESS - LOG - PER_SLOT * slots
    blobs = min(max(left // (BLOB_SHARE * PER_BLOB), BLOBS_MIN), OPEN_BLOBS_MAX)
    connections = left - PER_BLOB * blobs
    if connections < CONNECTIONS_MIN:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "the limit of open files is too low (raise it with ulimit -n, or LimitNOFILE of systemd)"
            f" limit={limit} needed={limit + CONNECTIONS_MIN - connections}",
        )
    return Shares(blobs, connections)


def raise_limit() -> int:
    """Have as many descriptors as the system lets us, and return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return BOUNDLESS if soft == resource.RLIM_INFINITY else soft
