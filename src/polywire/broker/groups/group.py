"""One consumer group as a value, and its transitions (FLUX dossier §10, without the wire's words).

Promises: pure; every transition that changes members, assignor or partition count adds exactly one to the generation
and assigns anew. Must not know: clocks, the journal, other groups, wires beyond the name a member joined over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from polywire.broker.changes import GroupStored, MemberStored
from polywire.broker.groups.assignment import assign
from polywire.types import Assignor


@dataclass(frozen=True, slots=True)
class Member:
    """A member and the wire it joined over."""

    id: str
    wire: str


@dataclass(frozen=True, slots=True)
class Group:
    """A group of one topic. ``members`` are in the order in which they joined; ``assignments`` follow from the other fields."""

    topic: str
    name: str
    generation: int
    assignor: Assignor
    partition_count: int
    members: tuple[Member, ...] = ()
    assignments: Mapping[str, range] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        owned = assign((member.id for member in self.members), self.partition_count, self.assignor)
        object.__setattr__(self, "assignments", owned)

    def has(self, member: str) -> bool:
        """Whether this id is a member."""
        return member in self.assignments

    def with_assignor(self, assignor: Assignor) -> Group:
        """Partitions are dealt out another way."""
        return replace(self, assignor=assignor, generation=self.generation + 1)

    def with_member(self, member: Member) -> Group:
        """One more member, last in order."""
        return replace(self, members=(*self.members, member), generation=self.generation + 1)

    def changed(self, *, gone: Collection[str], partition_count: int) -> Group:
        """Without some members and over so many partitions: one generation for all of it, the same group when nothing differs."""
        if not gone and partition_count == self.partition_count:
            return self
        members = tuple(member for member in self.members if member.id not in gone)
        return replace(self, members=members, partition_count=partition_count, generation=self.generation + 1)

    def succeeding(self, old: Group) -> Group:
        """This group going on where ``old`` was: above both generations, and without members of its own dealing as ``old`` did."""
        assignor = self.assignor if self.members else old.assignor
        return replace(self, assignor=assignor, generation=max(self.generation, old.generation) + 1)


def stored(group: Group) -> GroupStored:
    """The group as a change."""
    return GroupStored(
        topic=group.topic,
        name=group.name,
        generation=group.generation,
        assignor=group.assignor,
        partition_count=group.partition_count,
        members=tuple(MemberStored(member.id, member.wire) for member in group.members),
    )


def restored(change: GroupStored) -> Group:
    """The group a change tells of."""
    return Group(
        topic=change.topic,
        name=change.name,
        generation=change.generation,
        assignor=change.assignor,
        partition_count=change.partition_count,
        members=tuple(Member(member.id, member.wire) for member in change.members),
    )
