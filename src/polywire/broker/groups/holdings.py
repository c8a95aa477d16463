"""Partitions of a topic that members hold until they release them (concepts: groups#handing-over).

A member that learns of its assignment only with its next heartbeat continues to read its old partitions until then. No
other member gets these partitions before the member confirms the release or leaves. A partition has at most one holder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from itertools import count
from typing import Final

_NOTHING: Final[frozenset[int]] = frozenset()
TURNS_MAX: Final = 100_000  # groups for which the last change of a holder is remembered; the oldest are forgotten first


class Holdings:
    """The held partitions of one group in one topic. ``releases`` counts all releases so far.

    Invariant: ``_held`` and ``_holder`` agree.
    """

    __slots__ = ("_held", "_holder", "_on_release", "_released", "releases")

    def __init__(self, on_release: Callable[[], None]) -> None:
        """on_release: called after each partition that is released."""
        self._on_release: Final = on_release
        self._held: dict[str, set[int]] = {}
        self._holder: dict[int, str] = {}
        self._released: set[int] = set()
        self.releases = 0

    def __contains__(self, member: str) -> bool:
        return member in self._held

    @property
    def members(self) -> Collection[str]:
        """The members that must release partitions before other members get them."""
        return self._held.keys()

    def enter(self, member: str) -> None:
        """Track a member: from now on it may read the partitions that it holds instead of its share."""
        self._held.setdefault(member, set())

    def of(self, member: str) -> Set[int]:
        """Return the partitions that a member holds."""
        return self._held.get(member, _NOTHING)

    def holder(self, partition: int) -> str | None:
        """Return the member that holds a partition, if any."""
        return self._holder.get(partition)

    def take(self, member: str, partitions: Iterable[int]) -> None:
        """Let a member hold those of the given partitions that are free."""
        held = self._held.setdefault(member, set())
        for partition in partitions:
            if self._holder.setdefault(partition, member) == member:
                held.add(partition)

    def release(self, member: str, partitions: Iterable[int]) -> None:
        """Release those of the given partitions that the member holds."""
        held = self._held.get(member, set())
        for partition in [partition for partition in partitions if partition in held]:
            held.discard(partition)
            del self._holder[partition]
            self._released.add(partition)
            self.releases += 1
            self._on_release()

    def take_released(self) -> set[int]:
        """Return the partitions that were released since the last call and are still free."""
        released, self._released = self._released - self._holder.keys(), set()
        return released

    def leave(self, member: str) -> None:
        """Release all partitions of a member and stop tracking it."""
        self.release(member, list(self.of(member)))
        self._held.pop(member, None)

    def owned(self, member: str, share: range) -> Sequence[int]:
        """Return the partitions that a member with this share may read now, ascending."""
        if member in self._held:
            return tuple(sorted(self._held[member]))
        return tuple([partition for partition in share if partition not in self._holder]) if self._holder else share


class AllHoldings:
    """The holdings of all groups and topics, with a number per group for its last change of a holder.

    Invariant: a number in ``_turns`` is never used again.
    """

    __slots__ = ("_by_place", "_numbers", "_turns")

    def __init__(self) -> None:
        self._by_place: dict[tuple[bytes, str], Holdings] = {}
        self._turns: dict[str, int] = {}
        self._numbers = count(1)

    def __bool__(self) -> bool:
        return bool(self._by_place)

    def find(self, group: str, topic_id: bytes) -> Holdings | None:
        """Return the holdings of a topic; None if no member must release partitions there."""
        return self._by_place.get((topic_id, group))

    def held(self, group: str, topic_id: bytes) -> Holdings:
        """Return the holdings of a topic, created if missing."""
        found = self._by_place.get((topic_id, group))
        if found is None:
            found = self._by_place[topic_id, group] = Holdings(partial(self.turned, group))
        return found

    def forget(self, group: str, topic_id: bytes) -> None:
        """Forget the holdings of a topic if no member is tracked there."""
        held = self._by_place.get((topic_id, group))
        if held is not None and not held.members:
            del self._by_place[topic_id, group]

    def turned(self, group: str) -> None:
        """Record that a partition of a group passed to another member."""
        self._turns.pop(group, None)
        self._turns[group] = next(self._numbers)
        if len(self._turns) > TURNS_MAX:
            del self._turns[next(iter(self._turns))]

    def turn(self, group: str) -> int:
        """Return a number that changes whenever a partition of the group passes to another member.

        Returns 0 if no such change is remembered.
        """
        return self._turns.get(group, 0)
