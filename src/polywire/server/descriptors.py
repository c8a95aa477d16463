"""Divide the process's limit of file descriptors between the log and connections.

The log can always open files to write and read segments, even if many clients connect.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from typing import Final

from polywire.errors import ErrorCode, Invalid
from polywire.store.base import OPEN_BLOBS_MAX

PROCESS: Final = 24  # standard streams, the event loop, listeners, the lock of the data directory
LOG: Final = 12  # a segment, a snapshot and a journal file being written, their directories, files being deleted
PER_SLOT: Final = 2  # descriptors of a journal file: one to write, one for the mapping
PER_BLOB: Final = 2  # descriptors of a segment file: one for normal reads, one for direct I/O
BLOBS_MIN: Final = 2  # one to read, one to merge
BOUNDLESS: Final = 1 << 20  # stands for "no limit": more than the broker can use
BLOB_SHARE: Final = 4  # a quarter of the remaining descriptors may go to segments
CONNECTIONS_MIN: Final = 8  # with fewer connections, an operator could not connect to diagnose the problem


@dataclass(frozen=True, slots=True)
class Shares:
    """The limits. ``blobs``: segment files that stay open. ``connections``: open connections."""

    blobs: int
    connections: int


def share(limit: int, *, slots: int) -> Shares:
    """Divide ``limit`` descriptors.

    ``slots`` is the number of journal files. Raises Invalid(INVALID_REQUEST) if they are too few.
    """
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
    """Raise the process's limit of descriptors to the highest that the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return BOUNDLESS if soft == resource.RLIM_INFINITY else soft
