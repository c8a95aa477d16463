"""The members' view of groups: their assignments, and when they last sent a heartbeat.

No two members get the same partition in one generation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from polywire.broker.groups.group import Membership
from tests.sim.broker.history import State
from tests.sim.promises import require

_CONNECTED: Final = ("m3", "m4")
NO_GENERATION: Final = -1


def is_connected(id_: str) -> bool:
    """Return whether this member lives as long as its connection, never beyond a restart."""
    return id_ in _CONNECTED


@dataclass(slots=True)
class Member:
    """One member with its last assignment, at a moment of the history. seen_at: time of its last certain heartbeat.
    maybe_seen_at: time of the last request refused for lack of space, which may count as a heartbeat or not.
    """

    group: str
    topic: str
    id: str
    seen_at: float
    maybe_seen_at: float = -math.inf
    generation: int = NO_GENERATION
    partitions: tuple[int, ...] = ()
    moment: int = 0


class Members:
    """Guards: members are those of the state; assignments are of recovered moments."""

    def __init__(self) -> None:
        self._members: Final[dict[tuple[str, str, str], Member]] = {}
        self._claims: Final[dict[tuple[str, str, int], dict[int, tuple[str, int]]]] = {}

    def all(self) -> list[Member]:
        """All members."""
        return list(self._members.values())

    def find(self, group: str, topic: str, id_: str) -> Member | None:
        """Return a member, None if there is none."""
        return self._members.get((group, topic, id_))

    def seat(self, group: str, topic: str, id_: str, found: Membership, *, now: float, moment: int) -> None:
        """Note an assignment. Raises Violation."""
        claims = self._claims.setdefault((group, topic, found.generation), {})
        for number in found.partitions:
            other, _ = claims.setdefault(number, (id_, moment))
            require(other == id_, "a partition has one owner in a generation", partition=number, owner=other, other=id_)
        member = self._members.setdefault((group, topic, id_), Member(group, topic, id_, now))
        member.seen_at = max(member.seen_at, math.inf if is_connected(id_) else now)
        member.generation, member.partitions, member.moment = found.generation, found.partitions, moment

    def lose(self, member: Member) -> None:
        """Remove a member."""
        del self._members[member.group, member.topic, member.id]

    @staticmethod
    def lose_generation(member: Member) -> None:
        """Note that a member's generation is over."""
        member.generation, member.partitions = NO_GENERATION, ()

    def end(self, group: str, topic: str) -> None:
        """Remove a group."""
        for key in [key for key in self._members if key[:2] == (group, topic)]:
            del self._members[key]
        for claim in [claim for claim in self._claims if claim[:2] == (group, topic)]:
            del self._claims[claim]

    def settle(self, state: State, moment: int, now: float) -> None:
        """Account for a start with the state of a moment: members have a full timeout, except connected ones."""
        shown = {(key[2], key[1]): value for key, value in state.items() if key[0] == "group"}
        for claim, claims in list(self._claims.items()):
            kept = {number: (id_, 0) for number, (id_, at) in claims.items() if at <= moment}
            if claim[:2] in shown and kept:
                self._claims[claim] = kept
            else:
                del self._claims[claim]
        was = dict(self._members)
        self._members.clear()
        for (group, topic), value in shown.items():
            assert isinstance(value, tuple), "generation and members"
            for id_ in value[1]:
                at = (str(group), str(topic), id_)
                member = was.get(at) or Member(*at, now)
                if member.moment > moment:
                    self.lose_generation(member)
                member.moment, member.seen_at = 0, -math.inf if is_connected(id_) else now
                self._members[at] = member
