"""Classic groups whose members share topics with members of other wires: the broker assigns, and the members think that one of them did
(concepts: groups#one-group-for-all).

Promises: what a member still reads is nobody else's. Must not know: wires, how assignments are written, when a generation begins.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from polywire.broker.groups.classic import ClassicGroup
from polywire.broker.groups.classic_members import Member
from polywire.broker.groups.seats import Seat, Seats
from polywire.broker.owners import Caller


class Sharing:
    """The seats of one group's members.

    Invariant: ``_taken`` has one for each that was a member when this last looked. ``_dealt``: what the shares of this generation follow
    from. ``_lacks``: what others had to let go of when somebody got less than its share, and how often they had by then.
    """

    __slots__ = ("_dealt", "_lacks", "_name", "_seats", "_taken", "by")

    def __init__(self, name: str, seats: Seats, by: Caller) -> None:
        """by: whose the seats are."""
        self._name: Final = name
        self._seats: Final = seats
        self._taken: dict[str, Seat] = {}
        self._dealt: object = None
        self._lacks: dict[bytes, int] = {}
        self.by = by

    def __contains__(self, seat: object) -> bool:
        return seat in self._taken

    def begin(self, group: ClassicGroup) -> None:
        """Others have come to a group whose members shared the work out themselves: what these read is theirs until they join again."""
        self.follow(group)
        for member in group.everybody:
            seat = self._taken[member.seat]
            for topic, partitions in member.reading.items():
                if topic in seat.topics:
                    self._seats.held(self._name, seat.topics[topic]).take(seat.id, partitions)

    def end(self) -> None:
        """Nobody has a seat any more. Raises Busy(DISK_FULL)."""
        for id_ in list(self._taken):
            self._seats.end(self._name, self._taken[id_], ())
            del self._taken[id_]

    def follow(self, group: ClassicGroup, *, is_new: bool = False) -> None:
        """Members have seats, and nobody else. is_new: a generation has begun, for which they may have said something else.

        Raises as ``Coordinator.join``.
        """
        members = {member.seat: member for member in group.everybody}
        for id_ in self._taken.keys() - members.keys():
            self._seats.end(self._name, self._taken[id_], ())
            del self._taken[id_]
        for id_ in members if is_new else members.keys() - self._taken.keys():
            join = members[id_].join
            seat = self._taken.setdefault(id_, Seat(id_, join.wire))
            self._seats.take(self._name, seat, join.topics, assignor=None, by=self.by)
        if is_new:
            self._dealt, self._lacks = self._deal(group), {}

    def joined(self, member: Member) -> None:
        """A member joins (again): it reads no more than it says."""
        seat = self._taken.get(member.seat)
        if seat is None:
            return
        for topic, id_ in seat.topics.items():
            held = self._seats.held(self._name, id_)
            held.release(seat.id, held.of(seat.id) - frozenset(member.join.kept.get(topic, ())))
        self._seats.hand_over(self._name, seat.topics.values())

    def share(self, member: Member) -> dict[str, Collection[int]]:
        """What a member reads in this generation: of its share what nobody else has to let go of."""
        seat, found = self._taken.get(member.seat), dict[str, Collection[int]]()
        if seat is None:
            return found
        shares = self._seats.shares(self._name, seat)
        for topic, id_ in seat.topics.items():
            if id_ not in shares:
                continue
            partitions, _, held = shares[id_]
            held.take(seat.id, partitions)
            found[topic] = sorted(held.of(seat.id) & set(partitions))
            if len(found[topic]) < len(partitions):
                self._lacks[id_] = held.releases
        return found

    def is_due(self, group: ClassicGroup) -> bool:
        """Whether members should have something else than they were dealt, or can have what others held."""
        if any(self._seats.held(self._name, id_).releases != releases for id_, releases in self._lacks.items()):
            return True
        return self._deal(group) != self._dealt

    def has_others(self, topics: Collection[str]) -> bool:
        """Whether there are members that are none of this group."""
        found = (self._seats.group_in(self._name, topic) for topic in topics)
        return any(member.id not in self._taken for there in found if there is not None for member in there.members)

    def _deal(self, group: ClassicGroup) -> object:
        found = {topic: self._seats.group_in(self._name, topic) for topic in group.topics}
        return {
            topic: (self._seats.topic_id(topic), there and (there.order, there.partition_count, there.assignor))
            for topic, there in found.items()
        }
