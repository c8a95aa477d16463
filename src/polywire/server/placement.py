"""Find the directory of each shard, and the shard that owns a topic (decision 0126).

The first shard's directory is the data directory itself. The others are in its subdirectory ``shards``. On a data
directory, a symbolic link for each topic name stores the topic's shard. With a bucket, the hash of the name determines
the shard.

If several processes claim a name at the same time, exactly one succeeds, because creating a symbolic link is atomic.
The links are only a cache: each shard's log stores its topics, and the links are created again at every start.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

from polywire.errors import Busy, ErrorCode, Invalid, Unavailable
from polywire.log.opening import JOURNAL
from polywire.store.data_directory import MARK_FILE
from polywire.types import SHARDS_MAX, shard_name

SHARDS: Final = "shards"
DATA_MARKS: Final = (MARK_FILE, JOURNAL, SHARDS)
"""File names by which a data directory is recognised. A copied or restored directory may lack the mark file."""

NAMES: Final = "names"  # subdirectory with a symbolic link for each topic name
_WORDS: Final = 2  # words of each process: its stage, and its number of topics
_WORD_BYTES: Final = 8
NAME_HASH_BYTES: Final = 16
INTERNAL: Final = "__"  # prefix of internal topics; every shard has its own


def directory_of(data_dir: Path, shard: int) -> Path:
    return data_dir / SHARDS / shard_name(shard) if shard else data_dir


def count_shards(data_dir: Path) -> int:
    """Return how many shards a data directory has; 1 if it does not exist yet."""
    return next(number for number in range(1, SHARDS_MAX + 1) if not directory_of(data_dir, number).is_dir())


def check_count(data_dir: Path, count: int) -> None:
    """Raise Invalid(INVALID_REQUEST) if the data directory has more than ``count`` shards.

    The topics of the other shards would be missing.
    """
    found = count_shards(data_dir)
    if found > count:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the data directory has {found} shards (start with --processes {found} or more) path={str(data_dir)!r}",
        )


class Stage(IntEnum):
    """Progress of the process of a shard: starting, log recovered, or serving clients."""

    STARTING = 0
    RECOVERED = 1
    """The process has recovered its log and registered its topics, so other processes can find them."""
    SERVING = 2


class Board:
    """Shared memory with the ``Stage`` and the number of topics of each process of the broker.

    The parent process creates it, and its children inherit it. The entry of a restarted process keeps its old values
    until the process sets them.
    """

    __slots__ = ("_words", "count")

    def __init__(self, count: int) -> None:
        self.count: Final = count
        self._words: Final = memoryview(mmap.mmap(-1, (count * _WORDS + 1) * _WORD_BYTES)).cast("q")

    def reach(self, shard: int, stage: Stage) -> None:
        self._words[shard * _WORDS] = max(self._words[shard * _WORDS], stage)

    def all_have(self, stage: Stage) -> bool:
        return all(self._words[shard * _WORDS] >= stage for shard in range(self.count))

    def set_topics(self, shard: int, count: int) -> None:
        self._words[shard * _WORDS + 1] = count

    def fewest_topics(self) -> int:
        """Return the shard with the fewest topics; the lowest number if there are several."""
        return min(range(self.count), key=lambda shard: self._words[shard * _WORDS + 1])

    def may_hand_over(self, now_s: float, pause_s: float) -> bool:
        """Return whether this process may hand its shard to another machine now.

        It may if no process has handed over a shard for ``pause_s`` seconds, so that not all clients reconnect at once.
        Two processes that call this at the same moment can both get True, which is harmless.
        """
        now_us = int(now_s * 1_000_000)
        if self._words[-1] and now_us - self._words[-1] < pause_s * 1_000_000:
            return False
        self._words[-1] = now_us
        return True


class Names(Protocol):
    """Assigns topic names to shards."""

    @property
    def waits(self) -> bool:
        """Whether no client may be served until all shards have started."""

    def shard_of(self, full_name: str) -> int | None:
        """Return the shard that has the topic.

        If the topic does not exist, return the shard that must create it, or None if any shard can.
        """

    def claim(self, full_name: str) -> None:
        """Reserve the name of a new topic for this shard.

        Raises Busy(BUSY) if another shard has a topic with this name, and Unavailable(STORAGE_FAILED).
        """

    def release(self, full_name: str) -> None:
        """Release the name of a deleted topic of this shard."""

    def begin(self, names: Iterable[str]) -> list[str]:
        """Register the recovered topics of this shard. Return the names that another shard has registered, too.

        Raises Unavailable if the names cannot be stored.
        """


class HashedNames:
    """Names in a bucket: the hash of a name determines its shard, which never changes."""

    __slots__ = ("_count", "_own")

    waits: Final = False

    def __init__(self, own: int, count: int) -> None:
        self._own: Final = own
        self._count: Final = count

    def shard_of(self, full_name: str) -> int | None:
        return None if full_name.startswith(INTERNAL) else shard_by_hash(full_name, self._count)

    def claim(self, full_name: str) -> None:
        if shard_by_hash(full_name, self._count) != self._own:
            raise Busy(ErrorCode.BUSY, f"another shard has a topic with this name name={full_name!r}")

    def release(self, full_name: str) -> None:
        pass

    def begin(self, names: Iterable[str]) -> list[str]:
        """Return the names whose hash belongs to another shard, which only a software error can cause."""
        return [name for name in names if shard_by_hash(name, self._count) != self._own]


class Placement:
    """Names on a data directory: a symbolic link for each name stores its shard."""

    __slots__ = ("_directory", "_own")

    waits: Final = True

    def __init__(self, directory: Path, own: int) -> None:
        self._directory: Final = directory
        self._own: Final = own

    def shard_of(self, full_name: str) -> int | None:
        return None if full_name.startswith(INTERNAL) else self._read(_link_name(full_name))

    def claim(self, full_name: str) -> None:
        link = _link_name(full_name)
        try:
            os.symlink(shard_name(self._own), self._directory / link)
        except FileExistsError:
            if self._read(link) != self._own:
                raise Busy(
                    ErrorCode.BUSY, f"another process is creating a topic with this name (retry) name={full_name!r}"
                ) from None
        except OSError as error:
            raise Unavailable(
                ErrorCode.STORAGE_FAILED, f"cannot reserve the topic name reason={error.strerror!r}"
            ) from error

    def release(self, full_name: str) -> None:
        self._remove(_link_name(full_name))

    def begin(self, names: Iterable[str]) -> list[str]:
        """Register the topics. Also remove links of this shard for topics that do not exist any more."""
        conflicts = []
        current = {_link_name(name) for name in names}
        for link in os.listdir(self._directory):
            if link not in current:
                self._remove(link)
        for name in names:
            try:
                self.claim(name)
            except Busy:
                conflicts.append(name)
        return conflicts

    def _remove(self, link: str) -> None:
        if self._read(link) == self._own:
            (self._directory / link).unlink(missing_ok=True)

    def _read(self, link: str) -> int | None:
        try:
            return int(os.readlink(self._directory / link), 16)
        except FileNotFoundError:
            return None


def shard_by_hash(full_name: str, count: int) -> int:
    """Return the shard that the hash of a name determines.

    The result is the same in every process and after every start.
    """
    return int.from_bytes(_hash(full_name)[:8], "little") % count


def _hash(full_name: str) -> bytes:
    return blake2b(full_name.encode("utf-8", "surrogateescape"), digest_size=NAME_HASH_BYTES).digest()


def _link_name(full_name: str) -> str:
    return _hash(full_name).hex()
