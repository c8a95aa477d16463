"""A broker whose threads have their Python names in the system, and the processor time of each of its threads.

Run as ``python -m benchmarks.threads serve …``, with the command line of ``polywire`` (Linux).
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

from polywire.cli.main import main

LOOP: Final = "loop"
ENDED: Final = "ended"
"""All threads that have ended."""

_SET_NAME: Final = 15  # prctl's PR_SET_NAME (linux/prctl.h)
_NAME_BYTES_MAX: Final = 15
_STEP_S: Final = 1 / os.sysconf("SC_CLK_TCK")

Times = Counter[tuple[str, str]]
"""Seconds by (thread, "user" or "system")."""


def thread_times(pid: int) -> Times:
    """Return the processor time of a process by thread, in steps of 10 ms. Threads of one name are added up."""
    times: Times = Counter()
    process = Path(f"/proc/{pid}")
    for task in process.glob("task/[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            stat = (task / "stat").read_text()
            name = stat[stat.index("(") + 1 : stat.rindex(")")].removeprefix("polywire-")
            name = LOOP if task.name == process.name else re.sub(r"_\d+$", "", name)
            _add(times, name, stat, 1)
            _add(times, ENDED, stat, -1)
    _add(times, ENDED, (process / "stat").read_text(), 1)
    return times


def _add(times: Times, name: str, stat: str, sign: int) -> None:
    user, system = stat.rpartition(")")[2].split()[11:13]
    times[name, "user"] += sign * int(user) * _STEP_S  # type: ignore[assignment]  # a Counter of floats
    times[name, "system"] += sign * int(system) * _STEP_S  # type: ignore[assignment]


def _named() -> None:
    """Give every thread that starts its Python name in the system. Python 3.14 does this itself."""
    run = threading.Thread.run

    def renamed(self: threading.Thread) -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, self.name.encode()[:_NAME_BYTES_MAX], 0, 0, 0)
        run(self)

    threading.Thread.run = renamed  # type: ignore[method-assign]


if __name__ == "__main__":
    _named()
    main()
