"""Who reads which partitions of a topic until it has let go of them (concepts: groups#handing-over).

A member that learns of its partitions by asking now and then goes on reading what it was given before. What it holds is nobody else's until
it says that it has let go, or is no member any more.

Promises: a partition has at most one holder; pure. Must not know: generations, clocks, wires, who should have what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from typing import Final

_NOTHING: Final[frozenset[int]] = frozenset()


class Holdings:
    """Those of one group in one topic. ``releases`` goes up whenever somebody lets go, of what ``take_released`` tells.

    Invariant: ``_held`` and ``_holder`` say the same.
    """

    __slots__ = ("_held", "_holder", "_released", "releases")

    def __init__(self) -> None:
        self._held: dict[str, set[int]] = {}
        self._holder: dict[int, str] = {}
        self._released: set[int] = set()
        self.releases = 0

    def __contains__(self, member: str) -> bool:
        return member in self._held

    @property
    def members(self) -> Collection[str]:
        """Those who have to let go before others may begin."""
        return self._held.keys()

    def enter(self, member: str) -> None:
        """From now on it has what it holds, not what it should have."""
        self._held.setdefault(member, set())

    def of(self, member: str) -> Set[int]:
        """What a member holds."""
        return self._held.get(member, _NOTHING)

    def holder(self, partition: int) -> str | None:
        """Who holds a partition."""
        return self._holder.get(partition)

    def take(self, member: str, partitions: Iterable[int]) -> None:
        """It holds those of these partitions that nobody else holds."""
        held = self._held.setdefault(member, set())
        for partition in partitions:
            if self._holder.setdefault(partition, member) == member:
                held.add(partition)

    def release(self, member: str, partitions: Iterable[int]) -> None:
        """It has let go of these, if it held them."""
        held = self._held.get(member, set())
        for partition in [partition for partition in partitions if partition in held]:
            held.discard(partition)
            del self._holder[partition]
            self._released.add(partition)
            self.releases += 1

    def take_released(self) -> set[int]:
        """What was let go of since this was last asked, and nobody has taken."""
        released, self._released = self._released - self._holder.keys(), set()
        return released

    def leave(self, member: str) -> None:
        """It holds nothing, and is not asked to let go any more."""
        self.release(member, list(self.of(member)))
        self._held.pop(member, None)

    def owned(self, member: str, share: range) -> Sequence[int]:
        """What a member that should have ``share`` may read now, ascending."""
        if member in self._held:
            return tuple(sorted(self._held[member]))
        return tuple([partition for partition in share if partition not in self._holder]) if self._holder else share
