"""What members of groups know: what they were told they may read, when they were last heard of, and who else was told the same.

Promises: no two members are told in one generation that they own a partition. Must not know: how partitions are dealt out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from polywire.broker.groups.views import Membership
from polywire.testing.sim.broker.history import State
from polywire.testing.sim.promises import require

_CONNECTED: Final = ("m3", "m4")
NO_GENERATION: Final = -1


def is_connected(id_: str) -> bool:
    """Whether this member lives as long as its connection, so never beyond a start."""
    return id_ in _CONNECTED


@dataclass(slots=True)
class Member:
    """One member, and what it was told last: at a moment of the history. seen_at: when it was heard of for certain; maybe_seen_at: when it
    asked last for what was refused because nothing could be stored, before that was looked at or after."""

    group: str
    topic: str
    id: str
    seen_at: float
    maybe_seen_at: float = -math.inf
    generation: int = NO_GENERATION
    partitions: tuple[int, ...] = ()
    moment: int = 0


class Members:
    """Guards: members are those that the state shows; claims are of moments that a start has found."""

    def __init__(self) -> None:
        self._members: Final[dict[tuple[str, str, str], Member]] = {}
        self._claims: Final[dict[tuple[str, str, int], dict[int, tuple[str, int]]]] = {}

    def all(self) -> list[Member]:
        """Everybody."""
        return list(self._members.values())

    def find(self, group: str, topic: str, id_: str) -> Member | None:
        """One of them."""
        return self._members.get((group, topic, id_))

    def seat(self, group: str, topic: str, id_: str, found: Membership, *, now: float, moment: int) -> None:
        """Somebody was told what it owns. Raises Violation."""
        claims = self._claims.setdefault((group, topic, found.generation), {})
        for number in found.partitions:
            other, _ = claims.setdefault(number, (id_, moment))
            require(other == id_, "a partition has one owner in a generation", partition=number, owner=other, other=id_)
        member = self._members.setdefault((group, topic, id_), Member(group, topic, id_, now))
        member.seen_at = max(member.seen_at, math.inf if is_connected(id_) else now)
        member.generation, member.partitions, member.moment = found.generation, found.partitions, moment

    def lose(self, member: Member) -> None:
        """Somebody is no member any more."""
        del self._members[member.group, member.topic, member.id]

    @staticmethod
    def lose_generation(member: Member) -> None:
        """Somebody was told that its generation is over."""
        member.generation, member.partitions = NO_GENERATION, ()

    def end(self, group: str, topic: str) -> None:
        """A group is there no more."""
        for key in [key for key in self._members if key[:2] == (group, topic)]:
            del self._members[key]
        for claim in [claim for claim in self._claims if claim[:2] == (group, topic)]:
            del self._claims[claim]

    def settle(self, state: State, moment: int, now: float) -> None:
        """A start has found the state of a moment: everybody has its whole time, but who was connected."""
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
