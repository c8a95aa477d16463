"""One consumer group as a value, and its transitions (concepts: groups#what-a-group-is).

Every change of members, assignor or partition count increments the generation by one and assigns partitions again.
Adding or removing a member takes the same time for groups of any size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, replace

from polywire.broker.changes import GroupChanged, GroupStored, MemberStored
from polywire.broker.groups.assignment import index_of, ordered, ordered_by, share
from polywire.broker.owners import UNOWNED
from polywire.types import Assignor


@dataclass(frozen=True, slots=True)
class Member:
    """A member, and the protocol over which it joined.

    connected: the membership ends with its connection, at the latest when the broker stops.
    """

    id: str
    wire: str
    connected: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """A group of one topic, with its members in the order in which they joined.

    kept: the group was created explicitly, and is not deleted when unused. at_us: time of the last change, on the
    elapsed clock. has_consumers: the last member to join was a consumer of Kafka's newer protocol. An empty group
    retains this, so that tools find the group with the API of its protocol.

    Invariant: ``order`` has the sorted member ids; the transitions maintain it.
    """

    topic: str
    name: str
    generation: int
    assignor: Assignor
    partition_count: int
    members: tuple[Member, ...] = ()
    owner: int = UNOWNED
    kept: bool = False
    at_us: int = 0
    has_consumers: bool = False
    order: tuple[bytes, ...] = ()

    def _index(self, member: str) -> int:
        key = ordered_by(member)
        at = bisect_left(self.order, key)
        return at if at < len(self.order) and self.order[at] == key else -1

    def has(self, member: str) -> bool:
        """Return whether this id is a member."""
        return self._index(member) >= 0

    def share(self, member: str) -> range:
        """Return the partitions assigned to a member, ascending."""
        index = self._index(member)
        assert index >= 0, "only members have partitions"
        return share(index, len(self.order), self.partition_count, self.assignor)

    def owner_of(self, partition: int) -> str:
        """Return the member whose share contains a partition; the group must have members."""
        return self.order[index_of(partition, len(self.order), self.partition_count, self.assignor)].decode()

    def renewed(self) -> Group:
        """Return the same group in the next generation."""
        return replace(self, generation=self.generation + 1)

    def with_assignor(self, assignor: Assignor) -> Group:
        """Return the group with this assignor; the same object if nothing changes."""
        return self if assignor is self.assignor else replace(self, assignor=assignor, generation=self.generation + 1)

    def with_owner(self, owner: int) -> Group:
        """Return the group with this owner; the same object if nothing changes."""
        return self if owner == self.owner else replace(self, owner=owner)

    def with_member(self, member: Member, *, is_consumer: bool = False) -> Group:
        """Return the group with one more member, at the end of the order."""
        return replace(self._joined((member,), self.generation + 1), has_consumers=is_consumer)

    def _joined(self, members: tuple[Member, ...], generation: int) -> Group:
        order = self.order
        for member in members:
            key = ordered_by(member.id)
            at = bisect_left(order, key)
            order = (*order[:at], key, *order[at:])
        return replace(self, members=self.members + members, order=order, generation=generation)

    def changed(self, *, gone: Collection[str], partition_count: int) -> Group:
        """Return the group without the members in ``gone`` and with this partition count, one generation later.

        Returns the same object if nothing changes.
        """
        if not gone and partition_count == self.partition_count:
            return self
        return replace(self._without(gone), partition_count=partition_count, generation=self.generation + 1)

    def _without(self, gone: Collection[str]) -> Group:
        if not gone:
            return self
        ids = frozenset(gone)
        members = tuple([member for member in self.members if member.id not in ids])
        return replace(self, members=members, order=tuple(ordered(member.id for member in members)))

    def succeeding(self, old: Group) -> Group:
        """Return this group as the successor of ``old``: its generation is above both. Without members, it gets the
        assignor of ``old``.
        """
        assignor = self.assignor if self.members else old.assignor
        return replace(self, assignor=assignor, generation=max(self.generation, old.generation) + 1)

    def applied(self, change: GroupChanged) -> Group:
        """Return the group after a change."""
        kept = replace(
            self._without(change.gone),
            assignor=change.assignor,
            partition_count=change.partition_count,
            owner=change.owner,
            at_us=change.at_us,
            has_consumers=change.has_consumers,
        )
        return kept._joined(_members(change.joined), change.generation)


def stored(group: Group, at_us: int) -> GroupStored:
    """Return the group as a change."""
    return GroupStored(
        topic=group.topic,
        name=group.name,
        generation=group.generation,
        assignor=group.assignor,
        partition_count=group.partition_count,
        members=_stored_members(group.members),
        owner=group.owner,
        kept=group.kept,
        at_us=at_us,
        has_consumers=group.has_consumers,
    )


def difference(
    now: Group, was: Group, *, gone: Collection[str] = (), joined: Collection[Member] = (), at_us: int
) -> GroupChanged:
    """Return the change from ``was`` to ``now``. Its size does not depend on the number of unchanged members."""
    assert len(now.members) == len(was.members) - len(gone) + len(joined), "no other member joined or left"
    return GroupChanged(
        topic=now.topic,
        name=now.name,
        generation=now.generation,
        assignor=now.assignor,
        partition_count=now.partition_count,
        gone=tuple(gone),
        joined=_stored_members(joined),
        owner=now.owner,
        at_us=at_us,
        has_consumers=now.has_consumers,
    )


def restored(change: GroupStored) -> Group:
    """Return the stored group."""
    members = _members(change.members)
    return Group(
        topic=change.topic,
        name=change.name,
        generation=change.generation,
        assignor=change.assignor,
        partition_count=change.partition_count,
        members=members,
        owner=change.owner,
        kept=change.kept,
        at_us=change.at_us,
        has_consumers=change.has_consumers,
        order=tuple(ordered(member.id for member in members)),
    )


def _members(stored_members: Collection[MemberStored]) -> tuple[Member, ...]:
    return tuple(Member(member.id, member.wire, member.connected) for member in stored_members)


def _stored_members(members: Collection[Member]) -> tuple[MemberStored, ...]:
    return tuple(MemberStored(member.id, member.wire, member.connected) for member in members)
