"""What members of one group know of it: who owns what in which generation, and where the group stands.

Promises: judges every answer and every start; of two things that were under way at once either may have come first. Must not know: wires,
connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polywire.testing.sim.promises import require
from polywire.testing.sim.wires.ledger import TOPICS, Owner
from polywire.types import Level, PositionKind

TOPIC: Final = "a"
GROUP: Final[Owner] = PositionKind.GROUP, "g"


@dataclass(frozen=True, slots=True)
class Membership:
    """What a member was told: the generation, and the partitions it has in it. name: its own, as the broker knows it."""

    name: str
    generation: int
    partitions: tuple[int, ...]


@dataclass(slots=True)
class Move:
    """A position that was asked for, from one moment to another. answered_at: None while it is not answered."""

    partition: int
    offset: int
    asked_at: int
    answered_at: int | None = None


class GroupLedger:
    """Guards: ``_moves`` are those that may be what the group's position is, or may become it."""

    def __init__(self, durability: Level) -> None:
        self._durability = durability
        self._is_synced = False
        """Whether a power loss takes nothing that was answered."""
        self._was_lost = False
        """Whether a power loss may have taken generations, so that places are true that were told before it."""
        self._now = 0
        self._owners: dict[tuple[int, int], str] = {}
        self._told: list[tuple[int, int]] = []
        """When which generation was told first; both ascend."""
        self._moves: list[Move] = []
        self._begun: dict[int, int | None] = dict.fromkeys(range(TOPICS[TOPIC]))
        """Positions that the process has started with."""

    def tick(self) -> int:
        """The moment that something begins or ends."""
        self._now += 1
        return self._now

    def placed(self, place: Membership) -> None:
        """A member was told its place."""
        for partition in place.partitions:
            owner = self._owners.setdefault((place.generation, partition), place.name)
            require(
                owner == place.name,
                "a partition has one owner in a generation",
                generation=place.generation,
                partition=partition,
                owners=(owner, place.name),
            )
        if not self._told or self._told[-1][1] < place.generation:
            self._told.append((self.tick(), place.generation))

    def asks(self, partition: int, offset: int) -> Move:
        """A position is to be stored."""
        move = Move(partition, offset, self.tick())
        self._moves.append(move)
        return move

    def moved(self, place: Membership, move: Move) -> None:
        """It was stored, for a member in that place."""
        later = [generation for at, generation in self._told if at < move.asked_at and generation > place.generation]
        require(
            not later,
            "no position is stored under an old generation",
            member=place.name,
            generation=place.generation,
            later=later[:1],
        )
        key = place.generation, move.partition
        owner = self._owners.setdefault(key, place.name) if self._was_lost else self._owners.get(key)
        require(
            owner == place.name,
            "only the owner stores a position",
            member=place.name,
            owner=owner,
            partition=move.partition,
        )
        move.answered_at = self.tick()

    def refused(self, move: Move) -> None:
        """It was refused: nobody finds it."""
        self._moves = [other for other in self._moves if other is not move]

    def furthest(self, partition: int) -> int:
        """The furthest position that may be stored."""
        asked = [move.offset for move in self._moves if move.partition == partition]
        return max([self._begun[partition] or 0, *asked])

    def finds(self, partition: int, found: int | None, asked_at: int) -> None:
        """A position was told to whoever asked for it at that moment."""
        allowed = self._allowed(partition, asked_at)
        require(found in allowed, "a group's position is one that was stored", partition=partition, found=found)

    def _allowed(self, partition: int, asked_at: int) -> list[int | None]:
        """What it may be: whatever nothing else has followed that was done before that moment."""
        moves = [move for move in self._moves if move.partition == partition]
        last = max((move.asked_at for move in moves if (move.answered_at or asked_at) < asked_at), default=0)
        found: list[int | None] = [move.offset for move in moves if move.answered_at is None or move.answered_at > last]
        return found if last else [self._begun[partition], *found]

    def stopped(self) -> None:
        """A process has stopped as asked to: whatever was answered is synced."""
        self._is_synced = True

    def settle(self, partition: int, found: int | None, *, powerless: bool) -> None:
        """A start has found this position."""
        if powerless and not self._is_synced:
            asked = [move.offset for move in self._moves if move.partition == partition]
            allowed = found in (self._begun[partition], *asked)
            require(allowed, "a group's position is one that was stored", partition=partition, found=found)
        else:
            self.finds(partition, found, self.tick())
        self._moves = [move for move in self._moves if move.partition != partition]
        self._begun[partition] = found

    def started(self, *, powerless: bool) -> None:
        """Another process goes on: with a power loss generations may be given again."""
        if powerless and not self._is_synced:
            self._was_lost = True
            self._owners.clear()
            self._told.clear()
        self._is_synced = self._durability is Level.SYNCED
