"""Assign partitions in a classic group that shares topics with members of other protocols.

The broker assigns in place of the group's leader (concepts: groups#one-group-for-all). A partition that a member still
reads is assigned to no other member. Memberships are added and removed in short steps, however large the group is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final

from polywire.broker.groups.classic import ClassicGroup, Phase
from polywire.broker.groups.classic_members import Member
from polywire.broker.groups.group import Group
from polywire.broker.groups.seats import Seat, Seats
from polywire.broker.owners import Caller
from polywire.errors import BrokerError, Conflict, ErrorCode

SEATS_AT_ONCE_MAX: Final = 25  # memberships joined in one step; each takes some 60 us
LOOKS_AT_ONCE_MAX: Final = (
    250  # topics that a heartbeat checks, some 5 us each; the next heartbeat continues after them
)


class Sharing:
    """The memberships of one group's members in the coordinator's groups, one per topic.

    ``generation``: the generation at the last call of ``follow``; ``_known``: the group's change count then.
    ``has_failed``: a change could not be stored, so members retain their assignments until a retry. ``_taken``: the
    memberships of all members at the last check; ``_leaving``: the memberships of former members that still exist.
    ``_untaken``: topics of members that may lack a membership there. ``_freed``: topics with released partitions.
    ``_dealing``: the remaining steps of the current assignment. ``_dealt``: the inputs from which this generation was
    assigned. ``_lacks``: topics in which a member got less than its share, with the number of releases then.
    ``_looked``: the topic to check next. ``_alone``: how many topics in a row had no members of other protocols.
    """

    __slots__ = (
        "_alone",
        "_dealing",
        "_dealt",
        "_freed",
        "_known",
        "_lacks",
        "_leaving",
        "_looked",
        "_name",
        "_seats",
        "_taken",
        "_untaken",
        "by",
        "generation",
        "has_failed",
    )

    def __init__(self, name: str, seats: Seats, by: Caller) -> None:
        """by: the user who owns the memberships."""
        self._name: Final = name
        self._seats: Final = seats
        self.generation = -1
        self._taken: dict[str, Seat] = {}
        self._leaving: dict[str, Seat] = {}
        self._untaken: dict[str, Collection[str]] = {}
        self._freed: dict[bytes, None] = {}
        self._dealing: Iterator[None] | None = None
        self._dealt: dict[str, object] = {}
        self._lacks: dict[bytes, int] = {}
        self._looked = 0
        self._alone = 0
        self._known = -1
        self.by = by
        self.has_failed = False

    def __contains__(self, seat: object) -> bool:
        return seat in self._taken or seat in self._leaving

    @property
    def is_over(self) -> bool:
        """Whether no memberships are left."""
        return not self._taken and not self._leaving

    # Changes of the group

    def begin(self, group: ClassicGroup) -> None:
        """Start to assign in a group whose members assigned themselves. They keep the partitions that they read until
        they rejoin.
        """
        self.generation = group.generation
        self.follow(group)
        for member in group.everybody:
            for topic, partitions in member.reading.items():
                if topic in member.join.topics:
                    self._seats.hold(self._name, self._taken[member.seat], topic, partitions)

    def end(self) -> None:
        """Start to remove all memberships."""
        self._leaving |= self._taken
        self._taken.clear()
        self._untaken.clear()
        self._dealing, self.has_failed = None, False

    def follow(self, group: ClassicGroup) -> None:
        """Update the memberships after members joined or left and, in a new generation, after subscriptions changed."""
        is_new, self.generation = group.generation != self.generation, group.generation
        if not is_new and self._known == group.changes:
            return
        self._known = group.changes
        members = {member.seat: member for member in group.everybody}
        for id_ in self._taken.keys() - members.keys():
            self._leaving[id_] = self._taken.pop(id_)
            self._untaken.pop(id_, None)
        for id_ in members if is_new else members.keys() - self._taken.keys():
            join = members[id_].join
            if id_ not in self._taken:
                self._taken[id_] = self._leaving.pop(id_, Seat(id_, join.wire))
            self._untaken[id_] = join.topics
        if is_new:
            self._dealing, self.has_failed = self._deal_out(group), False

    def joined(self, member: Member) -> None:
        """Release the partitions that a rejoining member no longer names as its own."""
        seat = self._taken.get(member.seat) or self._leaving.get(member.seat)
        for topic, id_ in () if seat is None else seat.topics.items():
            held = self._seats.held(self._name, id_)
            held.release(member.seat, held.of(member.seat) - frozenset(member.join.kept.get(topic, ())))
            self._freed[id_] = None

    # Work in steps

    def step(self, group: ClassicGroup | None) -> bool:
        """Do one step of work; return whether there was any. group: None once the group is no longer shared."""
        if group is None or group.phase is not Phase.COMPLETING:
            self._dealing = None
        todo = self._todo()
        if todo is None:
            return False
        try:
            todo()
        except BrokerError:  # too many members, or the disk is full
            self._dealing = None if todo == self._deal_on else self._dealing
            self.has_failed = True
        return True

    def _todo(self) -> Callable[[], None] | None:
        for left, todo in ((self._leaving, self._leave), (self._untaken, self._take), (self._freed, self._hand_over)):
            if left and not self.has_failed:
                return todo
        return None if self._dealing is None else self._deal_on

    def _leave(self) -> None:
        id_, seat = next(iter(self._leaving.items()))
        if seat.topics:
            self._seats.end_in(self._name, seat, next(iter(seat.topics)))
        if not seat.topics:
            del self._leaving[id_]

    def _take(self) -> None:
        id_, topics = next(iter(self._untaken.items()))
        seat = self._taken[id_]
        unread = next((topic for topic in seat.topics if topic not in topics), None)
        if unread is not None:
            self._seats.end_in(self._name, seat, unread)
        elif self._seats.take(self._name, seat, topics, assignor=None, by=self.by, at_most=SEATS_AT_ONCE_MAX):
            del self._untaken[id_]

    def _hand_over(self) -> None:
        id_ = next(iter(self._freed))
        self._seats.hand_over(self._name, (id_,))
        del self._freed[id_]

    def _deal_on(self) -> None:
        assert self._dealing is not None, "there is assignment work"
        if next(self._dealing, self) is self:
            self._dealing = None

    def _deal_out(self, group: ClassicGroup) -> Iterator[None]:
        """Assign partitions to all members, whose memberships exist by now. ``is_due`` detects later changes."""
        dealt: dict[str, object] = {}
        for topic in group.topics:
            dealt[topic] = self._deal(topic, self._seats.group_in(self._name, topic))
            yield
        self._dealt, self._lacks, self._looked, self._alone = dealt, {}, 0, 0
        for id_ in [member.id for member in group.everybody]:
            found: dict[str, Collection[int]] = {}
            for topic in list(self._seat(group, id_).topics):
                self._share(self._seat(group, id_), topic, found)
                yield
            member = group.member(id_)
            if member is not None and member.join.writing is not None:
                group.assign(id_, member.join.writing.encode(found))

    def _seat(self, group: ClassicGroup, id_: str) -> Seat:
        member = group.member(id_)
        assert member is not None, "a leaving member ends the generation"
        return self._taken[member.seat]

    def _share(self, seat: Seat, topic: str, found: dict[str, Collection[int]]) -> None:
        """Add the partitions of a topic that the member may read in this generation: its share, without partitions that
        other members must still release.
        """
        share = self._seats.share(self._name, seat, topic)
        if share is None:
            return
        share.holdings.take(seat.id, share.partitions)
        found[topic] = sorted(share.holdings.of(seat.id) & set(share.partitions))
        if len(found[topic]) < len(share.partitions):
            self._lacks[seat.topics[topic]] = share.holdings.releases

    # Checks

    def is_due(self, group: ClassicGroup) -> bool:
        """Return whether members must rejoin, because shares have changed or missing partitions are free now.

        Each call checks only some of the topics.
        """
        is_other = [self._look_at(topic) for topic in self._next_topics()]
        if any(is_other) or self.has_failed or group.topics != self._dealt.keys():
            return True
        return any(self._seats.held(self._name, id_).releases != releases for id_, releases in self._lacks.items())

    def _next_topics(self) -> Collection[str]:
        topics, first = list(self._dealt), self._looked
        count = min(len(topics), LOOKS_AT_ONCE_MAX)
        self._looked = (first + count) % max(len(topics), 1)
        return [topics[(first + at) % len(topics)] for at in range(count)]

    def _look_at(self, topic: str) -> bool:
        """Return whether the shares in a topic differ from the assignments of this generation."""
        there = self._seats.group_in(self._name, topic)
        has_others = there is not None and any(member.id not in self for member in there.members)
        self._alone = 0 if has_others else self._alone + 1
        return self._deal(topic, there) != self._dealt[topic]

    def met(self) -> None:
        """Start to check all topics again, because a member of another protocol is about to join."""
        self._alone = 0

    @property
    def is_alone(self) -> bool:
        """Return whether the group has no members of other protocols, as far as the topics have been checked."""
        return self._alone >= len(self._dealt) > 0

    def check(self, member: Member, topic: str, partitions: Collection[int]) -> bool:
        """Refuse partitions that a member does not read; return whether the member has a membership in the topic.

        Raises Conflict(PARTITION_NOT_ASSIGNED).
        """
        id_ = self._taken[member.seat].topics.get(topic) if member.seat in self._taken else None
        held = None if id_ is None else self._seats.held(self._name, id_)
        if held is None or member.seat not in held:
            return False
        for partition in partitions:
            if partition not in held.of(member.seat):
                raise Conflict(
                    ErrorCode.PARTITION_NOT_ASSIGNED,
                    f"partition is not assigned to this member member={member.id!r} partition={partition}",
                )
        return True

    def _deal(self, topic: str, there: Group | None) -> object:
        return self._seats.topic_id(topic), there and (there.order, there.partition_count, there.assignor)
