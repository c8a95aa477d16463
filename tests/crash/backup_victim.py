"""A backup or a restore that kills itself before its n-th operation on the file system.

Arguments: ``create`` or ``restore``, n, source, target. If n is not reached, it prints the number of operations.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

from polywire.cli import backup
from polywire.clock import SystemClock
from polywire.store.system_files import SystemFile, SystemFiles
from tests.unit.log.rig import Memory, RigLoop

VERBS: Final = (
    (SystemFiles, ("open", "link", "rename", "unlink", "sync_directory", "make_directory")),
    (SystemFile, ("write", "sync", "truncate")),
)


def dying(verb: Callable[..., Any], numbers: count[int], last: int) -> Callable[..., Any]:
    """Wrap the operation so that the n-th call kills the process."""

    def called(*args: Any, **kept: Any) -> Any:
        if next(numbers) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return verb(*args, **kept)

    return called


def main(what: str, last: int, source: Path, target: Path) -> None:
    numbers = count()
    for owner, names in VERBS:
        for name in names:
            setattr(owner, name, dying(getattr(owner, name), numbers, last))
    loop = RigLoop()
    if what == "create":
        backup.take_backup(source, target, replay=Memory, loop=loop, clock=SystemClock())
    else:
        backup.restore_backup(backup.find_backup(source), target, replay=Memory, loop=loop)
    print(next(numbers))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
