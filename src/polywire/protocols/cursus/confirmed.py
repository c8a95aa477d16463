"""Which generation each member of a group has used last: how a member that was fenced is known when it joins again
(spec: cursus#joining-again).

Promises: forgetting costs at most one more member, which expires. Must not know: sessions, the broker.
"""

from __future__ import annotations

from collections.abc import Collection

GroupKey = tuple[str, str]
"""A group's topic and name."""


class Confirmed:
    """Generations by group and member.

    Invariant: holds at most as many groups as ``keep`` was told, and of each those who were members when somebody last joined, or since.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[GroupKey, dict[str, int]] = {}

    def mark(self, group: GroupKey, member: str, generation: int) -> None:
        """A member has used a generation."""
        self._groups.setdefault(group, {})[member] = generation

    def has(self, group: GroupKey, member: str, generation: int) -> bool:
        """Whether a member has used this generation."""
        return self._groups.get(group, {}).get(member) == generation

    def keep(self, group: GroupKey, members: Collection[str], groups_max: int) -> None:
        """Forget those who are no longer members, and the oldest groups when there are too many."""
        known = self._groups.get(group, {})
        for member in known.keys() - set(members):
            del known[member]
        while len(self._groups) > groups_max:
            del self._groups[next(iter(self._groups))]
