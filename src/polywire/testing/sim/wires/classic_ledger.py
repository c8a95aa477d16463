"""What members of a classic group know of it: who leads, what the leader assigned, who is a member still.

Promises: judges every answer; of what was under way at once either may have come first. While nobody has asked for a change since all members
of a generation have what was assigned, and nobody is silent for too long, they are members, over kills as well. Must not know: wires, which
bytes are an assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from polywire.broker.groups.classic_groups import KEEP_AGAIN_S
from polywire.testing.sim.promises import require
from polywire.testing.sim.wires.group_ledger import GroupLedger, Move
from polywire.testing.sim.wires.network import Link

STATIC: Final = "s"  # what names of members begin with that keep their place while they are away
KEPT_S: Final = KEEP_AGAIN_S + 2.0  # until what could not be kept is, some steps of the loop included
NOTHING: Final[tuple[int, ...]] = ()


def name_of(member_id: str) -> str:
    """Whose id it is: the broker makes ids of what members call themselves."""
    return member_id.partition("-")[0]


def _seat(member_id: str) -> str:
    """What stays the same of a member in a generation: the name of one that keeps its place, or its id."""
    name = name_of(member_id)
    return name if name.startswith(STATIC) else member_id


@dataclass(frozen=True, slots=True)
class Place:
    """What a member was told of itself. asked_s: when it had asked for that, in seconds."""

    member_id: str
    generation: int
    asked_s: float = 0.0


@dataclass(slots=True)
class Generation:
    """One generation, as its members tell of it.

    ids: all members, None before the leader was told. told: names of those that were told of it. synced: ids of those that have what was
    assigned. visitors: names of others that want to be in it. moving: names of those that are on their way back to their place.
    until_s: for how long each name counts as alive. has_stored: whether a position was stored since all had what was assigned.
    """

    number: int
    visitors: set[str]
    is_disturbed: bool
    ids: frozenset[str] | None = None
    told: set[str] = field(default_factory=set)
    synced: set[str] = field(default_factory=set)
    moving: set[str] = field(default_factory=set)
    until_s: dict[str, float] = field(default_factory=dict)
    has_stored: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether all members have what was assigned, and nobody has asked for a change since."""
        return self.ids is not None and self.ids <= self.synced and not self.visitors and not self.is_disturbed


NONE: Final = Generation(-1, set(), is_disturbed=True)
"""What there was before the first one."""


class ClassicLedger:
    """Guards: ``_generations`` are those of this process, and the one of before that it must have gone on with."""

    def __init__(self, positions: GroupLedger, time_s: Callable[[], float], patience_s: float) -> None:
        """patience_s: for how long a member may be silent."""
        self.positions: Final = positions
        self._time_s = time_s
        self.patience_s: Final = patience_s
        self._started_s = 0.0
        self._may_lack = False
        self._behind_s = -KEPT_S
        self._generations: dict[int, Generation] = {}
        self._first_told: list[tuple[int, int]] = []
        """When which generation was told first; both ascend."""
        self._stored = -1
        """The last generation under which a position was stored."""
        self._leaders: dict[int, str] = {}
        self._owners: dict[tuple[int, int], str] = {}
        self._assigned: dict[tuple[int, str], set[tuple[int, ...]]] = {}
        self._gone: dict[str, int] = {}
        """When an id was known to be nobody's."""
        self._ids: dict[str, str] = {}
        """What each name was told last that it is."""
        self._asking: set[str] = set()
        """Names of those whose request for a change is not answered."""
        self._ghosts: list[Link] = []
        """Connections that ended with such a request on them."""

    def now_s(self) -> float:
        """Seconds."""
        return self._time_s()

    # What members ask for

    def asks(self, name: str, *, comes_back: bool = False) -> int:
        """Somebody wants to join or leave; returns the moment. comes_back: as the one that it was, without a word of what it was."""
        self._asking.add(name)
        for generation in self._generations.values():
            if comes_back and generation.is_settled and name in generation.told and name not in generation.moving:
                generation.moving.add(name)
            elif name in generation.told:
                generation.is_disturbed = True
            else:
                generation.visitors.add(name)
        return self.positions.tick()

    def answered(self, name: str) -> None:
        """That was answered, or cannot be any more."""
        self._asking.discard(name)
        for generation in self._generations.values():
            if name in generation.moving:  # told nothing of its place
                generation.is_disturbed = True

    def cut(self, name: str, link: Link | None) -> None:
        """A connection has ended."""
        if name in self._asking:
            self.answered(name)
            if link is not None:
                self._ghosts.append(link)

    def joined(self, name: str, place: Place, leader: str, members: Collection[str], asked: int) -> None:
        """A member was told of a generation. members: what its leader was told of all."""
        number, now_s = place.generation, self._time_s()
        later = [told for at, told in self._first_told if at < asked and told > number]
        require(not later, "generations go on", member=name, told=number, later=later[:1])
        led = self._leaders.setdefault(number, _seat(leader))
        require(led == _seat(leader), "a generation has one leader", generation=number, leaders=(led, leader))
        before = self._settled(name)
        if before is not None and name in before.moving:
            kept = number == before.number
            require(kept, "who comes back keeps its place", member=name, had=before.number, told=number)
        if not self._first_told or self._first_told[-1][1] < number:
            self._first_told.append((self.positions.tick(), number))
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
            known.synced = known.synced - was | {member_id}  # it has what it had
            known.has_stored = False
        known.told.add(name)
        before, self._ids[name] = self._ids.get(name, member_id), member_id
        if before != member_id and name.startswith(STATIC):  # whose place has another id now
            self.left(before)

    def assigns(self, generation: int, assigned: Mapping[str, tuple[int, ...]]) -> None:
        """A leader says what all members of its generation have."""
        for member_id, partitions in assigned.items():
            self._assigned.setdefault((generation, _seat(member_id)), set()).add(partitions)

    def synced(self, name: str, place: Place, partitions: tuple[int, ...]) -> None:
        """A member was told what it has."""
        seat = _seat(place.member_id)
        allowed = self._assigned.get((place.generation, seat), set())
        fine = partitions in allowed
        require(fine, "a member has what its leader assigned", member=name, told=partitions, assigned=allowed)
        for partition in partitions:
            owner = self._owners.setdefault((place.generation, partition), seat)
            facts = {"generation": place.generation, "partition": partition, "owners": (owner, seat)}
            require(owner == seat, "a partition has one owner in a generation", **facts)
        known = self._generations.get(place.generation)
        if known is not None:
            known.synced.add(place.member_id)
        self.heard(name, place)

    def heard(self, name: str, place: Place) -> None:
        """A sign of life was answered that had been given then."""
        known = self._generations.get(place.generation)
        if known is not None:
            known.until_s[name] = max(known.until_s.get(name, 0.0), place.asked_s + self.patience_s)

    def left(self, member_id: str) -> None:
        """It was told that it is no member any more."""
        self._gone.setdefault(member_id, self.positions.tick())

    def refused(self, name: str, place: Place, error: str) -> None:
        """A member's request was refused because the group has changed, or it is none."""
        known = self._settled(name)
        if known is None or known.number != place.generation or known.ids is None or name in known.moving:
            return
        stays = place.member_id not in known.ids
        require(stays, "members of a settled group stay members", member=name, generation=known.number, error=error)

    def _settled(self, name: str) -> Generation | None:
        """The newest generation, where all of its members are sure to be there."""
        known = self._generations.get(max(self._generations, default=-1), NONE)
        if not known.is_settled or known.moving - {name}:
            return None
        return known if min(known.until_s.values()) > self._time_s() else None

    # Positions

    def moved(self, name: str, place: Place, move: Move) -> None:
        """A member stored a position."""
        facts = {"member": name, "generation": place.generation}
        later = [told for at, told in self._first_told if at < move.asked_at and told > place.generation]
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
        """Storage has failed: what members settle on from here on may not be kept."""
        self._may_lack = True

    def is_behind(self) -> None:
        """The log takes no more now: what members settle on is kept later."""
        self._behind_s = self._time_s()

    def meets(self) -> None:
        """A process has started."""
        self._started_s = self._time_s()

    def started(self, *, powerless: bool) -> None:
        """What it must have gone on with: a generation that all had settled on, before a position was stored if the power went."""
        is_lost = self.positions.is_lost(powerless=powerless)
        known = self._generations.get(max(self._generations, default=-1), NONE)
        goes_on = known.is_settled and not known.moving and (known.has_stored or not powerless)
        goes_on = goes_on and not is_lost and not self._may_lack
        goes_on = goes_on and self._behind_s + KEPT_S <= self._started_s < min(known.until_s.values())
        self._generations.clear()
        self._leaders.clear()
        self._owners.clear()
        self._first_told.clear()
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
        self._first_told.append((self.positions.tick(), known.number if goes_on else self._stored))
