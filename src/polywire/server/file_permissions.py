"""File permissions: no other user of the machine can read the broker's data.

* New files are accessible to their owner only.
* If other users can access the data directory, the broker removes their permissions and logs a warning.
* If other users can access the users file, it is rejected.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

import structlog

from polywire.errors import ErrorCode, Invalid

OTHERS: Final = 0o077
FOUND_ON_DISKS: Final = "lost+found"  # exists in the root directory of a new file system
PRIVATE_DIRECTORY: Final = 0o700
PRIVATE_FILE: Final = 0o600
ROOT_UID: Final = 0

log = structlog.get_logger("polywire.server")


def make_private() -> None:
    """Set the umask, so that new files and directories are accessible to their owner only."""
    os.umask(OTHERS)


def close_to_others(directory: Path, *, marks: Collection[str]) -> None:
    """Create a directory for its owner only. If it exists, remove the permissions of other users.

    Logs a warning if another user owns the directory. Raises OSError.

    ``marks`` are patterns of the file names in a directory of the broker. A directory without such a file may belong to
    something else, such as /tmp, and removing permissions would lock other users out. In that case, and if the path is
    a file, Invalid(INVALID_REQUEST) is raised.
    """
    try:
        directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"path is a file, or below one path={str(directory)!r}") from None
    _check_marks(directory, marks)
    for path in (directory, *directory.glob("seed*"), *directory.glob("*/seed*")):
        _restrict(path)


def _check_marks(directory: Path, marks: Collection[str]) -> None:
    if not stat.S_IMODE(directory.stat().st_mode) & OTHERS:
        return
    held = min((path.name for path in directory.iterdir() if path.name != FOUND_ON_DISKS), default=None)
    if held is not None and not any(found for mark in marks for found in directory.glob(mark)):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "the directory is not empty and other users can access it; starting here would lock them out (choose another directory,"
            f" or run chmod 700) path={str(directory.absolute())!r} holds={held!r}",
        )


def _restrict(path: Path) -> None:
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if not mode & OTHERS:
        return
    if status.st_uid != os.geteuid():
        log.warning(
            "other users of this machine can access the data, and its permissions cannot be changed",
            path=str(path),
            mode=oct(mode),
        )
        return
    path.chmod(PRIVATE_DIRECTORY if path.is_dir() else PRIVATE_FILE)
    log.warning(
        "restricted permissions: other users of this machine could access the data", path=str(path), was=oct(mode)
    )


def check_secret(path: Path) -> None:
    """Raise Invalid(INVALID_REQUEST) if other users can read or write a file with password hashes.

    If root owns the file, its group may read it, because container platforms mount secrets like that. Raises OSError if
    the file cannot be read.
    """
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    allowed = stat.S_IRGRP if status.st_uid == ROOT_UID != os.geteuid() else 0
    if mode & OTHERS & ~allowed:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"other users can access the users file (run chmod 600 {path}) file={str(path)!r} mode={mode:o}",
        )


def warn_of_readable(path: Path) -> None:
    """Log a warning if other users can read the private key at ``path``. Raises OSError if it cannot be read."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (OTHERS & ~stat.S_IRGRP):
        log.warning(
            "other users of this machine can read the private key of the certificate", path=str(path), mode=oct(mode)
        )
