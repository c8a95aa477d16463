"""Reject outdated offset commits of groups that another shard coordinates (decision 0128).

The coordinator forwards commits to the shards of the topics. After a commit of one generation was stored there, commits
of earlier generations are rejected.
"""

from __future__ import annotations

from typing import Final

from polywire.errors import Conflict, ErrorCode

GROUPS_MAX: Final = 100_000  # groups that are remembered; the one that has been idle longest is dropped first


class Turns:
    """Numbers the generations of groups at their coordinator, in the order in which they occur.

    No number is used twice, even if a group's entry was evicted.
    """

    __slots__ = ("_latest", "_next")

    def __init__(self) -> None:
        self._latest: dict[str, tuple[tuple[int, ...], int]] = {}
        self._next = 0

    def number(self, group: str, generation: tuple[int, ...]) -> int:
        """Return the number of a group's current generation. ``generation`` identifies it and is never used again."""
        latest = self._latest.pop(group, None)
        if latest is None or latest[0] != generation:
            self._next += 1
            latest = generation, self._next
        self._latest[group] = latest
        if len(self._latest) > GROUPS_MAX:
            del self._latest[next(iter(self._latest))]
        return latest[1]


class Fences:
    """The latest generation of each group that has committed offsets from another shard.

    A generation is the start number of the coordinator's process, and the number from ``Turns``. The entries are not
    stored, because late requests do not survive a restart of this process: its links end with it.
    """

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, int]] = {}

    def check(self, group: str, start: int, number: int) -> None:
        """Raise Conflict(GENERATION_STALE) if a later generation of the group has committed offsets."""
        latest = max(self._latest.pop(group, (start, number)), (start, number))
        self._latest[group] = latest
        if len(self._latest) > GROUPS_MAX:
            del self._latest[next(iter(self._latest))]
        if latest != (start, number):
            raise Conflict(ErrorCode.GENERATION_STALE, f"a later generation has committed offsets group={group!r}")
