"""Which shard has a topic: of a data directory a symbolic link for each name says it, made only where there is none (decision 0072), of a
bucket the name alone (decision 0075).

Promises: of those who claim a name at the same time one gets it. Links are no record: a shard's own log says which topics it has, and every
start makes them anew. Must not know: processes, wires.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

from polywire.errors import Busy, ErrorCode, Unavailable
from polywire.types import shard_name

NAME_HASH_BYTES: Final = 16
INTERNAL: Final = "__"  # names of topics that every shard has for itself begin so


class Names(Protocol):
    """Which shard has the topic of a name."""

    @property
    def waits(self) -> bool:
        """Whether nobody may be served before all shards have begun."""

    def shard_of(self, full_name: str) -> int | None:
        """Where the topic of a name lies, or would; None when nobody can tell before there is one."""

    def claim(self, full_name: str) -> None:
        """A topic of this name is about to begin in our shard. Raises Busy(BUSY) where it is another's, Unavailable(STORAGE_FAILED)."""

    def release(self, full_name: str) -> None:
        """Ours has ended."""

    def begin(self, names: Iterable[str]) -> list[str]:
        """Our shard was recovered, with topics of these names; returns those that another shard has as well. Raises Unavailable."""


class HashedNames:
    """A name's hash says which shard has it, for ever: nobody claims, records or asks (decision 0075)."""

    __slots__ = ("_count", "_own")

    waits: Final = False

    def __init__(self, own: int, count: int) -> None:
        self._own: Final = own
        self._count: Final = count

    def shard_of(self, full_name: str) -> int | None:
        """Where it lies, or would."""
        return None if full_name.startswith(INTERNAL) else home_of(full_name, self._count)

    def claim(self, full_name: str) -> None:
        """Find that a name is ours. Raises Busy(BUSY)."""
        if home_of(full_name, self._count) != self._own:
            raise Busy(ErrorCode.BUSY, f"another shard has a topic with this name name={full_name!r}")

    def release(self, full_name: str) -> None:
        """It stays ours."""

    def begin(self, names: Iterable[str]) -> list[str]:
        """Those whose hash says otherwise: no broker that keeps to it has made them."""
        return [name for name in names if home_of(name, self._count) != self._own]


class Placement:
    """The links of one directory. Guards: a link is made once and says who made it until it is removed."""

    __slots__ = ("_directory", "_own")

    waits: Final = True

    def __init__(self, directory: Path, own: int) -> None:
        self._directory: Final = directory
        self._own: Final = own

    def shard_of(self, full_name: str) -> int | None:
        """Who has claimed a name."""
        return None if full_name.startswith(INTERNAL) else self._read(_link_name(full_name))

    def claim(self, full_name: str) -> None:
        """Claim a name, or find that it is ours. Raises Busy(BUSY) where it is another's, Unavailable(STORAGE_FAILED)."""
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
        """Give up a name that is ours."""
        self._remove(_link_name(full_name))

    def begin(self, names: Iterable[str]) -> list[str]:
        """Have what our shard has, and no more; returns names that another shard has as well. Raises Unavailable."""
        taken = []
        wanted = {_link_name(name) for name in names}
        for link in os.listdir(self._directory):
            if link not in wanted:
                self._remove(link)
        for name in names:
            try:
                self.claim(name)
            except Busy:
                taken.append(name)
        return taken

    def _remove(self, link: str) -> None:
        if self._read(link) == self._own:
            (self._directory / link).unlink(missing_ok=True)

    def _read(self, link: str) -> int | None:
        try:
            return int(os.readlink(self._directory / link), 16)
        except FileNotFoundError:
            return None


def home_of(full_name: str, count: int) -> int:
    """Which of so many shards a name falls to, the same on every process and at every start."""
    return int.from_bytes(_hash(full_name)[:8], "little") % count


def _hash(full_name: str) -> bytes:
    return blake2b(full_name.encode("utf-8", "surrogateescape"), digest_size=NAME_HASH_BYTES).digest()


def _link_name(full_name: str) -> str:
    return _hash(full_name).hex()
