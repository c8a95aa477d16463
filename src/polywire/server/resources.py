"""Resources of this process: memory limit, host name, file descriptors and garbage collections (decision 0106).

* File descriptors are divided between the log and connections. The log can always open files to write and read
  segments, even if many clients connect.
* A full garbage collection visits every object, which takes 120 ms for half a million objects. Python starts one each
  time the number of objects has grown by a quarter. Most objects belong to the broker's state and are never freed.
  Therefore, objects that survive a full collection are frozen (``gc.freeze``), and later collections visit only newer
  objects.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from polywire.errors import ErrorCode, Invalid
from polywire.store.base import OPEN_BLOBS_MAX

WILDCARDS: Final = frozenset({"0.0.0.0", "::"})
_GROUPS: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")
RESERVED_BYTES: Final = 160 * 1024 * 1024  # code and libraries, and one request of the maximum size
_UNKNOWN_BYTES: Final = 1024 * 1024 * 1024  # used if the system does not report its memory

# File descriptors
PROCESS: Final = 24  # standard streams, the event loop, listeners, the lock of the data directory
LOG: Final = 12  # a segment, a snapshot and a journal file being written, their directories, files being deleted
PER_SLOT: Final = 2  # descriptors of a journal file: one to write, one for the mapping
PER_BLOB: Final = 2  # descriptors of a segment file: one for normal reads, one for direct I/O
BLOBS_MIN: Final = 2  # one to read, one to merge
BOUNDLESS: Final = 1 << 20  # stands for "no limit": more than the broker can use
BLOB_SHARE: Final = 4  # a quarter of the remaining descriptors may go to segments
CONNECTIONS_MIN: Final = 8  # with fewer connections, an operator could not connect to diagnose the problem

# Garbage collections
YOUNG_MAX: Final = 700  # new objects before a collection of the youngest generation; Python's own default
YOUNGER_RUNS: Final = 5  # collections of the youngest generation before one of the middle generation
# Seconds without a connection before all objects are collected. A client that connects at that moment has to wait.
ALONE_S: Final = 60
MIDDLE_RUNS: Final = 1  # collections of the middle generation before a full one, which then visits some 10,000 objects


class MemoryShares(msgspec.Struct, frozen=True):
    """Upper limits for the parts of one process's memory, in bytes.

    Attributes:
        cache: records most recently moved to segments.
        journal_file: one of up to four mapped journal files.
        state: groups, committed offsets, writers and protocol state.
        requests: incomplete requests of all connections.
        responses: unsent responses of all connections.
        query: one SQL query, in a process of its own.
    """

    cache: int
    journal_file: int
    state: int
    requests: int
    responses: int
    query: int


def memory_shares(total: int, *, processes: int) -> MemoryShares:
    """Divide ``total`` bytes of memory among processes, and among the parts of each.

    Each process keeps ``RESERVED_BYTES`` for itself, or half of its memory if that is less.
    """
    own = total // max(processes, 1)
    divided = max(own - RESERVED_BYTES, own // 2)
    return MemoryShares(
        cache=divided // 4,
        journal_file=divided // 16,
        state=divided // 8,
        requests=divided // 16,
        responses=divided // 16,
        query=divided // 8,
    )


def memory_bytes(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return how many bytes of memory this process can use: the limit of its control group, or all of the machine.

    ``groups`` is the mount point of control groups, version 1 or 2. ``membership`` is the file that names this
    process's groups.
    """
    try:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        limit = _UNKNOWN_BYTES
    for file in _limit_files(groups, membership):
        with suppress(OSError, ValueError):  # ValueError for "max", which means no limit
            limit = min(limit, int(file.read_text()))
    return limit


def reached_at(host: str) -> str:
    """Return the host name or address at which other machines reach a listener on ``host``."""
    return socket.gethostname() if host in WILDCARDS else host


def _limit_files(groups: Path, membership: Path) -> list[Path]:
    """Return the memory limits of this process's control groups and their parents. Each of them can set one."""
    found: list[Path] = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                root, name = groups, "memory.max"
            elif "memory" in controllers.split(","):
                root, name = groups / "memory", "memory.limit_in_bytes"
            else:
                continue
            inner = root / path.lstrip("/")
            found += [above / name for above in (inner, *inner.parents) if above.is_relative_to(root)]
    return found


class Shares(msgspec.Struct, frozen=True):
    """Division of the process's file descriptors.

    Attributes:
        blobs: number of segment files that can be open.
        connections: number of connections.
    """

    blobs: int
    connections: int


def share(limit: int, *, slots: int) -> Shares:
    """Divide ``limit`` file descriptors among files and connections. ``slots``: the number of journal files.

    Raises Invalid(INVALID_REQUEST) if there are too few.
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
    """Raise this process's limit of file descriptors as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return BOUNDLESS if soft == resource.RLIM_INFINITY else soft


class Collector:
    """Excludes objects that survive a full garbage collection from later ones."""

    __slots__ = ("_alone", "_before", "_has_frozen")

    def __init__(self) -> None:
        self._before = gc.get_threshold()
        self._has_frozen = False  # whether objects were frozen since all objects were collected
        self._alone = 0  # seconds without any connection

    def start(self) -> None:
        """Freeze the objects created at start-up. Call it before the first client is served.

        Almost all of them are needed until the end, so they are not collected first.
        """
        self._freeze()
        self._has_frozen = True
        gc.set_threshold(YOUNG_MAX, YOUNGER_RUNS, MIDDLE_RUNS)
        gc.callbacks.append(self._collected)

    def stop(self) -> None:
        """Restore Python's settings."""
        gc.callbacks.remove(self._collected)
        gc.set_threshold(*self._before)
        gc.unfreeze()

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()
            self._has_frozen = True

    def sweep(self, *, alone: bool) -> None:
        """Collect all objects if no client has been connected for a while. Call it once a second.

        This frees frozen objects that later became unreachable in a cycle. Objects that clients create and delete, such
        as topics, are not in cycles.
        """
        self._alone = self._alone + 1 if alone else 0
        if self._alone >= ALONE_S and self._has_frozen:
            self._collect_everything()

    def _collect_everything(self) -> None:
        gc.unfreeze()
        gc.collect()
        self._freeze()
        self._has_frozen = False

    def _freeze(self) -> None:
        gc.freeze()
        # There is nothing left to collect. The call resets Python's count of surviving objects, which triggers full
        # collections.
        gc.collect()
