"""Which shard of a data directory has a topic: a symbolic link for each name, made only where there is none (decision 0072).

Promises: of those who claim a name at the same time one gets it. Links are no record: a shard's own log says which topics it has, and every
start makes them anew. Must not know: processes, wires.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final

from polywire.errors import Busy, ErrorCode, Unavailable

NAME_HASH_BYTES: Final = 16
INTERNAL: Final = "__"  # names of topics that every shard has for itself begin so


class Placement:
    """The links of one directory. Guards: a link is made once and says who made it until it is removed."""

    __slots__ = ("_directory", "_own")

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
                    ErrorCode.BUSY, f"a topic of this name begins in another process, ask again name={full_name!r}"
                ) from None
        except OSError as error:
            raise Unavailable(
                ErrorCode.STORAGE_FAILED, f"cannot claim a topic's name reason={error.strerror!r}"
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


def shard_name(number: int) -> str:
    """A shard's number as it stands in names of files: four hexadecimal digits."""
    return f"{number:04x}"


def home_of(full_name: str, count: int) -> int:
    """Which of so many shards a name falls to, the same on every process and at every start."""
    return int.from_bytes(_hash(full_name)[:8], "little") % count


def _hash(full_name: str) -> bytes:
    return blake2b(full_name.encode("utf-8", "surrogateescape"), digest_size=NAME_HASH_BYTES).digest()


def _link_name(full_name: str) -> str:
    return _hash(full_name).hex()
