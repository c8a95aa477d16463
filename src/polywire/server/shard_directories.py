"""The directories of the shards of a data directory (decision 0126).

The first shard's directory is the data directory itself. The others are in ``shards``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from polywire.errors import ErrorCode, Invalid
from polywire.log.opening import JOURNAL
from polywire.store.data_directory import MARK_FILE
from polywire.types import SHARDS_MAX, shard_name

SHARDS: Final = "shards"
DATA_MARKS: Final = (MARK_FILE, JOURNAL, SHARDS)
"""Names of entries that identify a data directory. A copied or restored directory may lack the mark file."""

NAMES: Final = "names"  # subdirectory with a symbolic link for each topic name (``server.placement``)


def directory_of(data_dir: Path, shard: int) -> Path:
    return data_dir / SHARDS / shard_name(shard) if shard else data_dir


def count_shards(data_dir: Path) -> int:
    """Return how many shards a data directory has; 1 if it does not exist yet."""
    return next(number for number in range(1, SHARDS_MAX + 1) if not directory_of(data_dir, number).is_dir())


def check_alone(data_dir: Path) -> None:
    check_count(data_dir, 1)


def check_count(data_dir: Path, count: int) -> None:
    """Raise Invalid(INVALID_REQUEST) if the data directory has more shards than ``count``.

    Some topics would not be served otherwise.
    """
    found = count_shards(data_dir)
    if found > count:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the data directory has {found} shards (start with --processes {found} or more) path={str(data_dir)!r}",
        )
