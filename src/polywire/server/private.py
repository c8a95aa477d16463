"""Who else on this machine may read what a broker keeps: nobody.

Promises: files that are made are their owner's alone; a data directory that others may enter is closed to them and told of; a file of users
that others may read is refused. Must not know: what is in any of them.
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
FOUND_ON_DISKS: Final = "lost+found"  # in the uppermost directory of one that is new
PRIVATE_DIRECTORY: Final = 0o700
PRIVATE_FILE: Final = 0o600
ROOT_UID: Final = 0

log = structlog.get_logger("polywire.server")


def make_private() -> None:
    """What this process makes from now on is its owner's alone, unless it says otherwise."""
    os.umask(OTHERS)


def close_to_others(directory: Path, *, marks: Collection[str]) -> None:
    """Make a directory, or take others' rights to it away where it is ours; what is not ours is told of.

    marks: patterns of names, any of which shows that the directory is what it is said to be, and not, say, the system's for temporary files.
    Raises Invalid(INVALID_REQUEST) for a file, and for a directory of something else that others may enter; OSError.
    """
    try:
        directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"path is a file, or below one path={str(directory)!r}") from None
    _refuse_foreign(directory, marks)
    for path in (directory, *directory.glob("seed*"), *directory.glob("*/seed*")):
        _tighten(path)


def _refuse_foreign(directory: Path, marks: Collection[str]) -> None:
    if not stat.S_IMODE(directory.stat().st_mode) & OTHERS:
        return
    held = min((path.name for path in directory.iterdir() if path.name != FOUND_ON_DISKS), default=None)
    if held is not None and not any(found for mark in marks for found in directory.glob(mark)):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "the directory is not empty and other users can access it; starting here would lock them out (choose another directory,"
            f" or run chmod 700) path={str(directory.absolute())!r} holds={held!r}",
        )


def _tighten(path: Path) -> None:
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not mode & OTHERS:
        return
    if found.st_uid != os.geteuid():
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
    """Refuse a file with hashes of passwords that others may read or write. The group may read what root owns: so systems hand out secrets.

    Raises Invalid(INVALID_REQUEST), OSError.
    """
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    allowed = stat.S_IRGRP if found.st_uid == ROOT_UID != os.geteuid() else 0
    if mode & OTHERS & ~allowed:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"other users can access the users file (run chmod 600 {path}) file={str(path)!r} mode={mode:o}",
        )


def warn_of_readable(path: Path) -> None:
    """Tell of a key that others may read. Raises OSError."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (OTHERS & ~stat.S_IRGRP):
        log.warning(
            "other users of this machine can read the private key of the certificate", path=str(path), mode=oct(mode)
        )
