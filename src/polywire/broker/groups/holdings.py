"""Who reads which partitions of a topic until it has let go of them (concepts: groups#handing-over).

A member that learns of its partitions by asking now and then goes on reading what it was given before. What it holds is nobody else's until
it says that it has let go, or is no member any more.

Promises: a partition has at most one holder; pure. Must not know: generations, clocks, wires, who should have what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from itertools import count
from typing import Final

_NOTHING: Final[frozenset[int]] = frozenset()
TURNS_MAX: Final = 100_000  # groups whose last turn is remembered; of others it is as if there had been none


class Holdings:
    """Those of one group in one topic. ``releases`` goes up whenever somebody lets go, of what ``take_released`` tells.

    Invariant: ``_held`` and ``_holder`` say the same.
    """

    __slots__ = ("_held", "_holder", "_on_release", "_released", "releases")

    def __init__(self, on_release: Callable[[], None]) -> None:
        """on_release: called whenever somebody has let go of something."""
        self._on_release: Final = on_release
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
            self._on_release()

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


class AllHoldings:
    """Those of all groups and topics, and when something in a group last changed hands.

    Invariant: no number in ``_turns`` was given twice.
    """

    __slots__ = ("_by_place", "_numbers", "_turns")

    def __init__(self) -> None:
        self._by_place: dict[tuple[bytes, str], Holdings] = {}
        self._turns: dict[str, int] = {}
        self._numbers = count(1)

    def __bool__(self) -> bool:
        return bool(self._by_place)

    def find(self, group: str, topic_id: bytes) -> Holdings | None:
        """Who has to let go of which partitions of a topic before others have them; None where nobody has to."""
        return self._by_place.get((topic_id, group))

    def held(self, group: str, topic_id: bytes) -> Holdings:
        """The same, and from now on somebody may have to."""
        found = self._by_place.get((topic_id, group))
        if found is None:
            found = self._by_place[topic_id, group] = Holdings(partial(self.turned, group))
        return found

    def forget(self, group: str, topic_id: bytes) -> None:
        """Nothing is kept of a group in which nobody has to let go of anything."""
        held = self._by_place.get((topic_id, group))
        if held is not None and not held.members:
            del self._by_place[topic_id, group]

    def turned(self, group: str) -> None:
        """Somebody may read from now on what was another member's."""
        self._turns.pop(group, None)
        self._turns[group] = next(self._numbers)
        if len(self._turns) > TURNS_MAX:
            del self._turns[next(iter(self._turns))]

    def turn(self, group: str) -> int:
        """Another number than when it was last asked for, if something has changed hands since; 0 where nothing is remembered."""
        return self._turns.get(group, 0)
