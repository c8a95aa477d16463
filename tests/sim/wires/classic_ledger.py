"""The members' view of a classic group: its leader, the assignments, and the current members.

Every answer is checked; of concurrent requests either may have come first. A generation is settled when all members
have their assignments and no change was requested since. Its members stay members, also over kills, while none is
silent for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from polywire.broker.groups.classic_groups import KEEP_AGAIN_S
from tests.sim.promises import require
from tests.sim.wires.group_ledger import GroupLedger, Move
from tests.sim.wires.network import Link

STATIC: Final = "s"  # prefix of the names of static members
KEPT_S: Final = KEEP_AGAIN_S + 2.0  # until an unstored generation is stored, with some steps of the loop
NOTHING: Final[tuple[int, ...]] = ()


def name_of(member_id: str) -> str:
    """Return the name in a member id; the broker derives ids from names."""
    return member_id.partition("-")[0]


def _seat(member_id: str) -> str:
    """Return what identifies a member over generations: the name of a static one, the id of another."""
    name = name_of(member_id)
    return name if name.startswith(STATIC) else member_id


@dataclass(frozen=True, slots=True)
class Place:
    """A member's view of itself. asked_s: time of its request, in seconds."""

    member_id: str
    generation: int
    asked_s: float = 0.0


@dataclass(slots=True)
class Generation:
    """One generation, as its members see it.

    ids: all members, None until the leader knows them. reported: names of members that know it. synced: ids of members with
    their assignments. visitors: names of others that try to join. moving: names of members that are rejoining. until_s:
    until when each name counts as alive. has_stored: whether a position was stored after all had their assignments.
    """

    number: int
    visitors: set[str]
    is_disturbed: bool
    ids: frozenset[str] | None = None
    reported: set[str] = field(default_factory=set)
    synced: set[str] = field(default_factory=set)
    moving: set[str] = field(default_factory=set)
    until_s: dict[str, float] = field(default_factory=dict)
    has_stored: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether all members have their assignments and no change was requested since."""
        return self.ids is not None and self.ids <= self.synced and not self.visitors and not self.is_disturbed


NONE: Final = Generation(-1, set(), is_disturbed=True)
"""The state before the first generation."""


class ClassicLedger:
    """Guards: ``_generations`` are those of this process, and the earlier one that it must have restored."""

    def __init__(self, positions: GroupLedger, time_s: Callable[[], float], patience_s: float) -> None:
        """patience_s: how long a member may be silent."""
        self.positions: Final = positions
        self._time_s = time_s
        self.patience_s: Final = patience_s
        self._started_s = 0.0
        self._may_lack = False
        self._behind_s = -KEPT_S
        self._generations: dict[int, Generation] = {}
        self._first_reported: list[tuple[int, int]] = []
        """When each generation was first seen; both ascend."""
        self._stored = -1
        """The last generation in which a position was stored."""
        self._leaders: dict[int, str] = {}
        self._owners: dict[tuple[int, int], str] = {}
        self._assigned: dict[tuple[int, str], set[tuple[int, ...]]] = {}
        self._gone: dict[str, int] = {}
        """When an id became invalid."""
        self._ids: dict[str, str] = {}
        """The last id of each name."""
        self._asking: set[str] = set()
        """Names with an outstanding request for a change."""
        self._ghosts: list[Link] = []
        """Connections that ended with such a request."""

    def now_s(self) -> float:
        """The time in seconds."""
        return self._time_s()

    # Requests

    def asks(self, name: str, *, comes_back: bool = False) -> int:
        """Note a request to join or leave; return its moment. comes_back: an unchanged static member rejoins."""
        self._asking.add(name)
        for generation in self._generations.values():
            if comes_back and generation.is_settled and name in generation.reported and name not in generation.moving:
                generation.moving.add(name)
            elif name in generation.reported:
                generation.is_disturbed = True
            else:
                generation.visitors.add(name)
        return self.positions.tick()

    def answered(self, name: str) -> None:
        """Note that the request was answered, or cannot be any more."""
        self._asking.discard(name)
        for generation in self._generations.values():
            if name in generation.moving:  # it got no assignment
                generation.is_disturbed = True

    def cut(self, name: str, link: Link | None) -> None:
        """Note the end of a connection."""
        if name in self._asking:
            self.answered(name)
            if link is not None:
                self._ghosts.append(link)

    def joined(self, name: str, place: Place, leader: str, members: Collection[str], asked: int) -> None:
        """Check the answer to a join. members: the list for a leader."""
        number, now_s = place.generation, self._time_s()
        later = [reported for at, reported in self._first_reported if at < asked and reported > number]
        require(not later, "generations go on", member=name, reported=number, later=later[:1])
        led = self._leaders.setdefault(number, _seat(leader))
        require(led == _seat(leader), "a generation has one leader", generation=number, leaders=(led, leader))
        before = self._settled(name)
        if before is not None and name in before.moving:
            kept = number == before.number
            require(kept, "who comes back keeps its place", member=name, had=before.number, reported=number)
        if not self._first_reported or self._first_reported[-1][1] < number:
            self._first_reported.append((self.positions.tick(), number))
        self._ghosts = [link for link in self._ghosts if not link.transport.lost]
        known = self._generations.get(number)
        if known is None:
            known = Generation(number, self._asking - {name}, is_disturbed=bool(self._ghosts))
            self._generations[number] = known
        self._enters(known, name, place.member_id)
        known.until_s[name] = max(known.until_s.get(name, 0.0), place.asked_s + self.patience_s)
        if members and known.ids is None:
            known.ids = frozenset(members)
            for one in map(name_of, members):
                known.until_s.setdefault(one, now_s)
        self._asking.discard(name)
        if members:
            require(place.member_id in members, "who leads is a member", member=place.member_id)

    def _enters(self, known: Generation, name: str, member_id: str) -> None:
        known.visitors.discard(name)
        if name in known.moving:
            known.moving.discard(name)
            was = {one for one in known.ids or () if name_of(one) == name}
            known.ids = (known.ids or frozenset()) - was | {member_id}
            known.synced = known.synced - was | {member_id}  # its assignment stays
            known.has_stored = False
        known.reported.add(name)
        before, self._ids[name] = self._ids.get(name, member_id), member_id
        if before != member_id and name.startswith(STATIC):  # a static member has a new id now
            self.left(before)

    def assigns(self, generation: int, assigned: Mapping[str, tuple[int, ...]]) -> None:
        """Note a leader's assignments."""
        for member_id, partitions in assigned.items():
            self._assigned.setdefault((generation, _seat(member_id)), set()).add(partitions)

    def synced(self, name: str, place: Place, partitions: tuple[int, ...]) -> None:
        """Check a member's assignment."""
        seat = _seat(place.member_id)
        allowed = self._assigned.get((place.generation, seat), set())
        fine = partitions in allowed
        require(fine, "a member has what its leader assigned", member=name, reported=partitions, assigned=allowed)
        for partition in partitions:
            owner = self._owners.setdefault((place.generation, partition), seat)
            facts = {"generation": place.generation, "partition": partition, "owners": (owner, seat)}
            require(owner == seat, "a partition has one owner in a generation", **facts)
        known = self._generations.get(place.generation)
        if known is not None:
            known.synced.add(place.member_id)
        self.heard(name, place)

    def heard(self, name: str, place: Place) -> None:
        """Note a successful heartbeat."""
        known = self._generations.get(place.generation)
        if known is not None:
            known.until_s[name] = max(known.until_s.get(name, 0.0), place.asked_s + self.patience_s)

    def left(self, member_id: str) -> None:
        """Note a successful departure."""
        self._gone.setdefault(member_id, self.positions.tick())

    def refused(self, name: str, place: Place, error: str) -> None:
        """Check a refusal because the group has changed or the caller is not a member."""
        known = self._settled(name)
        if known is None or known.number != place.generation or known.ids is None or name in known.moving:
            return
        stays = place.member_id not in known.ids
        require(stays, "members of a settled group stay members", member=name, generation=known.number, error=error)

    def _settled(self, name: str) -> Generation | None:
        """Return the newest generation if all of its members certainly exist."""
        known = self._generations.get(max(self._generations, default=-1), NONE)
        if not known.is_settled or known.moving - {name}:
            return None
        return known if min(known.until_s.values()) > self._time_s() else None

    # Positions

    def moved(self, name: str, place: Place, move: Move) -> None:
        """Check a stored position."""
        facts = {"member": name, "generation": place.generation}
        later = [
            reported for at, reported in self._first_reported if at < move.asked_at and reported > place.generation
        ]
        require(not later, "no position is stored under an old generation", **facts, later=later[:1])
        gone_at = self._gone.get(place.member_id, move.asked_at)
        require(gone_at >= move.asked_at, "who is no member stores no position", **facts)
        self.positions.answered(move)
        self._stored = max(self._stored, place.generation)
        known = self._generations.get(place.generation)
        if known is not None and place.member_id in known.synced:
            known.has_stored |= known.is_settled
            self.heard(name, place)

    # Processes

    def may_lack(self) -> None:
        """Note that storage has failed: later generations may not be stored."""
        self._may_lack = True

    def is_behind(self) -> None:
        """Note that the log is congested: generations are stored later."""
        self._behind_s = self._time_s()

    def meets(self) -> None:
        """Note that a process has started."""
        self._started_s = self._time_s()

    def started(self, *, powerless: bool) -> None:
        """Check the restored group: a settled generation must survive; after a power loss, one in which a position was
        stored.
        """
        is_lost = self.positions.is_lost(powerless=powerless)
        known = self._generations.get(max(self._generations, default=-1), NONE)
        goes_on = known.is_settled and not known.moving and (known.has_stored or not powerless)
        goes_on = goes_on and not is_lost and not self._may_lack
        goes_on = goes_on and self._behind_s + KEPT_S <= self._started_s < min(known.until_s.values())
        self._generations.clear()
        self._leaders.clear()
        self._owners.clear()
        self._first_reported.clear()
        self._asking.clear()
        self._ghosts.clear()
        self._may_lack = False
        self._stored = -1 if is_lost else self._stored
        if goes_on:
            self._generations[known.number] = known
            known.until_s = dict.fromkeys(known.until_s, self._started_s + self.patience_s)
        else:
            self._gone.clear()
            self._ids.clear()
        self._first_reported.append((self.positions.tick(), known.number if goes_on else self._stored))
