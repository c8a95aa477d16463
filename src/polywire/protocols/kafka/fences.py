"""Reject late commits to topics of a group that another shard coordinates (decision 0128).

A commit of an earlier generation is never stored after one of a later generation.
"""

from __future__ import annotations

from typing import Final

from polywire.errors import Conflict, ErrorCode

GROUPS_MAX: Final = 100_000  # that are remembered; the longest idle one is forgotten first


class Turns:
    """Numbers the generations of groups at their home in the order in which they are seen.

    Guards: no number is assigned twice, even after a group was forgotten.
    """

    __slots__ = ("_latest", "_next")

    def __init__(self) -> None:
        self._latest: dict[str, tuple[tuple[int, ...], int]] = {}
        self._next = 0

    def number(self, group: str, generation: tuple[int, ...]) -> int:
        """The number of the generation that a group has now; generation: what there is of it, which never comes back."""
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

    A generation is the start of its home's broker and the number there. Guards: it never decreases. Memory suffices,
    because late requests end with this process.
    """

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, int]] = {}

    def check(self, group: str, start: int, number: int) -> None:
        """Let a group store positions. Raises Conflict(GENERATION_STALE) where a later generation has."""
        latest = max(self._latest.pop(group, (start, number)), (start, number))
        self._latest[group] = latest
        if len(self._latest) > GROUPS_MAX:
            del self._latest[next(iter(self._latest))]
        if latest != (start, number):
            raise Conflict(ErrorCode.GENERATION_STALE, f"a later generation has committed offsets group={group!r}")
