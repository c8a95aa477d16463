"""The memory limit and the host name of this machine, as seen by this process."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

WILDCARDS: Final = frozenset({"0.0.0.0", "::"})
_GROUPS: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_UNKNOWN_BYTES: Final = 1024 * 1024 * 1024  # used if the system does not report its memory


def memory_bytes(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return how many bytes of memory this process can use: that of the machine, or less if a control group limits it.

    ``groups`` is the mount point of control groups, version 2. ``membership`` is the file that names this process's
    group.
    """
    try:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        limit = _UNKNOWN_BYTES
    for directory in _group_directories(groups, membership):
        with suppress(OSError, ValueError):  # ValueError for "max", which means no limit
            limit = min(limit, int((directory / "memory.max").read_text()))
    return limit


def reached_at(host: str) -> str:
    """Return the host name or address at which other machines reach a listener on ``host``."""
    return socket.gethostname() if host in WILDCARDS else host


def _group_directories(groups: Path, membership: Path) -> list[Path]:
    """Return the directories of this process's control group and its parents. Each of them can set a limit."""
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            number, _, path = line.partition("::")
            if number == "0":
                inner = groups / path.lstrip("/")
                return [inner, *(above for above in inner.parents if above.is_relative_to(groups))]
    return []
