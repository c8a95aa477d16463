"""The members' view of one group: owners by generation, and the group's positions.

Every answer and every start is checked; of concurrent requests either may have come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

from polywire.types import Level, PositionKind
from tests.sim.promises import require
from tests.sim.wires.ledger import TOPICS, Owner

TOPIC: Final = "a"
GROUP: Final[Owner] = PositionKind.GROUP, "g"


@dataclass(frozen=True, slots=True)
class Membership:
    """An assignment: the generation and its partitions. name: the member's id on the broker. holds: whether it holds
    them until it confirms their release, in whatever generation others are.
    """

    name: str
    generation: int
    partitions: tuple[int, ...]
    holds: bool = False


@dataclass(slots=True)
class Move:
    """A requested position, from one moment to another. answered_at: None until it is answered."""

    partition: int
    offset: int
    asked_at: int
    answered_at: int | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """When a request was made, and until when its caller counts as alive, in seconds."""

    tick: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Reader:
    """When a member asked for its assignment, when it got a partition, and until when it counts as alive, in seconds."""

    asked_at: int
    reported_at: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a partition, when it got it, and until when it holds it without another heartbeat, in seconds."""

    name: str
    reported_at: int
    until_s: float


class GroupLedger:
    """Guards: ``_moves`` are those that may be the group's position, or may become it."""

    def __init__(self, durability: Level, time_s: Callable[[], float], patience_s: float) -> None:
        """patience_s: how long a member may be silent."""
        self._durability = durability
        self._time_s = time_s
        self._patience_s = patience_s
        self._is_synced = False
        """Whether a power loss loses nothing acknowledged."""
        self.has_holders = False
        """Whether some members hold what they read, so others wait until the process ends, and then get it without a
        notice.
        """
        self._was_lost = False
        """Whether a power loss may have lost generations, so that earlier assignments are valid."""
        self._now = 0
        self._owners: dict[tuple[int, int], str] = {}
        self._reported: list[tuple[int, int]] = []
        """When each generation was first seen; both ascend."""
        self._moves: list[Move] = []
        self._begun: dict[int, int | None] = dict.fromkeys(range(TOPICS[TOPIC]))
        """Positions at the start of the process."""
        self._holders: dict[int, Holder] = {}
        self._kept: dict[str, list[tuple[int, Collection[int]]]] = {}
        """When a member released partitions, and which it retained."""
        self._readers: dict[int, dict[str, Reader]] = {}
        """The last reader of each partition."""

    def tick(self) -> int:
        """Return the next moment."""
        self._now += 1
        return self._now

    def begins(self) -> Moment:
        """Note the begin of a request."""
        return Moment(self.tick(), self._time_s() + self._patience_s)

    def placed(self, place: Membership, asked: Moment) -> None:
        """Check an assignment, requested at that moment."""
        later = [kept for at, kept in self._kept.get(place.name, ()) if at > asked.tick]
        partitions = [one for one in place.partitions if all(one in kept for kept in later)]
        for partition in partitions:
            holder = self._holders.get(partition)
            if holder is not None and holder.name != place.name and holder.reported_at < asked.tick:
                gone = holder.until_s <= self._time_s()
                facts = {"partition": partition, "holder": holder.name, "assigned": place.name}
                require(gone, "a partition is assigned once no member holds it", **facts)
            if place.holds:
                self._holders[partition] = Holder(place.name, self.tick(), asked.until_s)
            self._readers.setdefault(partition, {})[place.name] = Reader(asked.tick, self.tick(), asked.until_s)
        if not place.holds:
            self._in_generation(place)

    def lets_go(self, name: str, kept: Collection[int] = ()) -> None:
        """Note that a member reads only these partitions."""
        self._kept.setdefault(name, []).append((self.tick(), kept))
        gone = [one for one, holder in self._holders.items() if holder.name == name and one not in kept]
        for partition in gone:
            del self._holders[partition]
        for one, readers in self._readers.items():
            if one not in kept and name in readers:
                readers[name] = replace(readers[name], until_s=0.0)

    def _in_generation(self, place: Membership) -> None:
        for partition in place.partitions:
            owner = self._owners.setdefault((place.generation, partition), place.name)
            require(
                owner == place.name,
                "a partition has one owner in a generation",
                generation=place.generation,
                partition=partition,
                owners=(owner, place.name),
            )
        if not self._reported or self._reported[-1][1] < place.generation:
            self._reported.append((self.tick(), place.generation))

    def asks(self, partition: int, offset: int) -> Move:
        """Note a request to store a position."""
        move = Move(partition, offset, self.tick())
        self._moves.append(move)
        return move

    def moved(self, place: Membership, move: Move) -> None:
        """Check a position that was stored for a member."""
        self.answered(move)
        if place.holds:
            others = self._later_readers(place.name, move)
            require(not others, "only the owner stores a position", member=place.name, owners=others)
            return
        later = [
            generation for at, generation in self._reported if at < move.asked_at and generation > place.generation
        ]
        require(
            not later,
            "no position is stored under an old generation",
            member=place.name,
            generation=place.generation,
            later=later[:1],
        )
        key = place.generation, move.partition
        may_be_unreported = self._was_lost or self.has_holders
        owner = self._owners.setdefault(key, place.name) if may_be_unreported else self._owners.get(key)
        require(
            owner == place.name,
            "only the owner stores a position",
            member=place.name,
            owner=owner,
            partition=move.partition,
        )

    def answered(self, move: Move) -> None:
        """Check a position that was stored by any caller."""
        move.answered_at = self.tick()

    def _later_readers(self, name: str, move: Move) -> list[str]:
        """Return the members that got a partition after this member and before its commit, and are not silent for too
        long.
        """
        readers, now_s = self._readers.get(move.partition, {}), self._time_s()
        reported_at = readers[name].reported_at if name in readers else 0
        return [
            other
            for other, reader in readers.items()
            if reported_at < reader.asked_at and reader.reported_at < move.asked_at and reader.until_s > now_s
        ]

    def refused(self, move: Move) -> None:
        """Note a refused position, which must not be visible."""
        self._moves = [other for other in self._moves if other is not move]

    def furthest(self, partition: int) -> int:
        """Return the highest position that may be stored."""
        asked = [move.offset for move in self._moves if move.partition == partition]
        return max([self._begun[partition] or 0, *asked])

    def finds(self, partition: int, found: int | None, asked_at: int) -> None:
        """Check a position that was fetched at that moment."""
        allowed = self._allowed(partition, asked_at)
        require(found in allowed, "a group's position is one that was stored", partition=partition, found=found)

    def _allowed(self, partition: int, asked_at: int) -> list[int | None]:
        """Return the possible positions: those that no later completed request has replaced."""
        moves = [move for move in self._moves if move.partition == partition]
        last = max((move.asked_at for move in moves if (move.answered_at or asked_at) < asked_at), default=0)
        found: list[int | None] = [move.offset for move in moves if move.answered_at is None or move.answered_at > last]
        return found if last else [self._begun[partition], *found]

    def stopped(self) -> None:
        """Note a clean stop: everything acknowledged is synced."""
        self._is_synced = True

    def is_lost(self, *, powerless: bool) -> bool:
        """Return whether a start may lack acknowledged data."""
        return powerless and not self._is_synced

    def settle(self, partition: int, found: int | None, *, powerless: bool) -> None:
        """Check the position after a start."""
        if self.is_lost(powerless=powerless):
            asked = [move.offset for move in self._moves if move.partition == partition]
            allowed = found in (self._begun[partition], *asked)
            require(allowed, "a group's position is one that was stored", partition=partition, found=found)
        else:
            self.finds(partition, found, self.tick())
        self._moves = [move for move in self._moves if move.partition != partition]
        self._begun[partition] = found

    def started(self, *, powerless: bool) -> None:
        """Note a new process, which does not know who holds what; after a power loss, generations may be repeated."""
        self._holders.clear()
        self._kept.clear()
        self._readers.clear()
        if self.is_lost(powerless=powerless):
            self._was_lost = True
            self._owners.clear()
            self._reported.clear()
        self._is_synced = self._durability is Level.SYNCED
