"""The machine that this process is on: how much memory it may count on, its own or what its control group leaves it, and its name.

Promises: reads files of the system, and falls back to what is known without them. Must not know: what the memory is for, who asks for a name.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

WILDCARDS: Final = frozenset({"0.0.0.0", "::"})
_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
_UNKNOWN_BYTES: Final = 1024 * 1024 * 1024  # where the system does not say


def memory_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """Bytes of memory that this process may use at most. groups, own: where version 2 of control groups shows itself."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        found = _UNKNOWN_BYTES
    for directory in _own_groups(groups, own):
        with suppress(OSError, ValueError):  # ValueError: "max"
            found = min(found, int((directory / "memory.max").read_text()))
    return found


def reached_at(host: str) -> str:
    """By which name others reach what listens on a host."""
    return socket.gethostname() if host in WILDCARDS else host


def _own_groups(groups: Path, own: Path) -> list[Path]:
    """The directory of this process's control group, and those above it: each sets a limit."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            number, _, path = line.partition("::")
            if number == "0":
                inner = groups / path.lstrip("/")
                return [inner, *(above for above in inner.parents if above.is_relative_to(groups))]
    return []
