"""Reject late commits to topics of a group that another shard coordinates (decision 0128).

After a commit of one generation is stored, no commit of an earlier generation is stored.
"""

from __future__ import annotations

from typing import Final

from polywire.errors import Conflict, ErrorCode

GROUPS_MAX: Final = 100_000  # groups that are remembered; the one that has been idle longest is dropped first


class Turns:
    """Numbers the generations of groups at their coordinator, in the order in which it sees them.

    No number is used twice, even if a group was dropped in between.
    """

    __slots__ = ("_latest", "_next")

    def __init__(self) -> None:
        self._latest: dict[str, tuple[tuple[int, ...], int]] = {}
        self._next = 0

    def number(self, group: str, generation: tuple[int, ...]) -> int:
        """Return the number of a group's current generation.

        ``generation`` identifies the generation and is never used again.
        """
        latest = self._latest.pop(group, None)
        if latest is None or latest[0] != generation:
            self._next += 1
            latest = generation, self._next
        self._latest[group] = latest
        if len(self._latest) > GROUPS_MAX:
            del self._latest[next(iter(self._latest))]
        return latest[1]


class Fences:
    """The latest generation of each group that has committed over a link.

    A generation is the start number of the coordinator's process, and the number from ``Turns``. It never decreases. It
    is not stored: a late request can only arrive over a link, and links end with this process.
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
