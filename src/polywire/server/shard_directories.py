"""Where the shards of a data directory lie: the first is the directory itself, the others are below ``shards`` (decision 0072).

Promises: a directory is never served with fewer shards than it has. Must not know: processes, what a shard is.
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
"""Names by which a data directory is known; one that was copied or restored may have no mark."""

NAMES: Final = "names"  # below it, the links by which names are found


def directory_of(data_dir: Path, shard: int) -> Path:
    """Where a shard lies."""
    return data_dir / SHARDS / shard_name(shard) if shard else data_dir


def count_shards(data_dir: Path) -> int:
    """How many shards a directory has; 1 for one that has yet to be made."""
    return next(number for number in range(1, SHARDS_MAX + 1) if not directory_of(data_dir, number).is_dir())


def check_alone(data_dir: Path) -> None:
    """Refuse a directory whose topics lie in several shards. Raises Invalid(INVALID_REQUEST)."""
    check_count(data_dir, 1)


def check_count(data_dir: Path, count: int) -> None:
    """Refuse to serve a directory with so few processes. Raises Invalid(INVALID_REQUEST)."""
    found = count_shards(data_dir)
    if found > count:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the data directory has {found} shards (start with --processes {found} or more) path={str(data_dir)!r}",
        )
