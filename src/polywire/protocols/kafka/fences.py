"""Which generation of a group may still store positions where a topic lies, when the group's home is elsewhere (decision 0077).

Promises: what an earlier generation asked for never comes behind what a later one has stored. Must not know: links, members.
"""

from __future__ import annotations

from typing import Final

from polywire.errors import Conflict, ErrorCode

GROUPS_MAX: Final = 100_000  # that are remembered; the longest idle one is forgotten first


class Turns:
    """Numbers the generations of groups whose home this is, in the order in which they are seen: a group that is forgotten and begins anew
    goes on behind all that it had. Guards: no number is given twice."""

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
    """The latest generation of each group that has stored positions over a link: the start of the broker at its home, and the number there.
    Guards: it never goes back.

    In memory: whoever could come late over a link ends with this process.
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
