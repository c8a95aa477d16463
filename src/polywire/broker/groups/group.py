"""One consumer group of one topic: members, generation and assigned partitions (concepts: groups#what-a-group-is).

* Every change of members, assignor or partition count increments the generation by one and assigns partitions again.
  Adding or removing a member takes the same time for groups of any size.
* The assignment depends only on the members' ids and the number of partitions. If the group has members, every
  partition has exactly one owner, and the numbers of partitions of any two members differ by at most one.
* A member that learns of its assignment only with its next heartbeat holds its old partitions until then. No other
  member gets them before the member confirms the release or leaves. A partition has at most one holder.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final, assert_never

import msgspec

from polywire.broker.changes import GroupChanged, GroupStored, MemberStored
from polywire.broker.owners import UNOWNED
from polywire.types import Assignor

_NOTHING: Final[frozenset[int]] = frozenset()
TURNS_MAX: Final = 100_000  # groups for which the last change of a holder is remembered; the oldest are forgotten first


def assign(members: Iterable[str], partition_count: int, assignor: Assignor) -> dict[str, range]:
    """Return the partitions of each member."""
    ids = ordered(members)
    return {key.decode(): share(at, len(ids), partition_count, assignor) for at, key in enumerate(ids)}


def share(index: int, member_count: int, partition_count: int, assignor: Assignor) -> range:
    """Return the partitions of one member, ascending, from its index in the order of member ids.

    ROUND_ROBIN gives partition p to member p mod n. RANGE gives contiguous blocks, and the first P mod n blocks have
    one more partition. The result is a range, because lists for all members would take gigabytes at the broker's
    limits.
    """
    match assignor:
        case Assignor.ROUND_ROBIN:
            return range(index, partition_count, member_count)
        case Assignor.RANGE:
            each, extra = divmod(partition_count, member_count)
            start = index * each + min(index, extra)
            return range(start, start + each + (index < extra))
        case _:
            assert_never(assignor)


def index_of(partition: int, member_count: int, partition_count: int, assignor: Assignor) -> int:
    """Return the index, in the order of member ids, of the member to which a partition is assigned."""
    match assignor:
        case Assignor.ROUND_ROBIN:
            return partition % member_count
        case Assignor.RANGE:
            each, extra = divmod(partition_count, member_count)
            longer = extra * (each + 1)
            return partition // (each + 1) if partition < longer else extra + (partition - longer) // each
        case _:
            assert_never(assignor)


def ordered(members: Iterable[str]) -> Sequence[bytes]:
    """Return the member ids as bytes, sorted."""
    return sorted({ordered_by(member) for member in members})


def ordered_by(member: str) -> bytes:
    """Return the sort key of a member id, even if it is invalid text."""
    return member.encode("utf-8", "surrogatepass")


class Membership(msgspec.Struct, frozen=True):
    """A member's assignment.

    Attributes:
        generation: generation of the group.
        partitions: partitions of the member, ascending.
    """

    generation: int
    partitions: tuple[int, ...]


class MemberView(msgspec.Struct, frozen=True):
    """A member as shown in lists.

    Attributes:
        idle_s: time since its last heartbeat or, if later, the broker's start.
    """

    id: str
    wire: str
    idle_s: float
    partitions: tuple[int, ...]


class GroupView(msgspec.Struct, frozen=True):
    """A group as shown in lists.

    Attributes:
        changed_at_us: time of its last change, None if it has not changed since the broker's start.
    """

    topic: str
    name: str
    generation: int
    assignor: Assignor
    members: tuple[MemberView, ...]
    partition_count: int = 0
    changed_at_us: int | None = None


class ConsumerView(msgspec.Struct, frozen=True):
    """A member of a consumer group (KIP-848), as shown in lists.

    Attributes:
        reading: partitions that it reads now, by full name of the topic.
        target: partitions of its target assignment, by full name of the topic.
        topics, pattern: its subscription.
        is_consumer: whether it uses Kafka's consumer group protocol, not another one.
    """

    id: str
    client_id: str
    client_host: str
    reading: Mapping[str, Collection[int]]
    target: Mapping[str, Collection[int]]
    instance_id: str | None = None
    rack_id: str | None = None
    epoch: int = 0
    topics: Collection[str] = ()
    pattern: str = ""
    is_consumer: bool = True


class ConsumerGroupView(msgspec.Struct, frozen=True):
    """A consumer group (KIP-848) with its members of all protocols.

    Attributes:
        has_consumers: whether a member uses Kafka's consumer group protocol.
    """

    name: str
    epoch: int
    assignor: Assignor
    is_settled: bool
    members: tuple[ConsumerView, ...]
    has_consumers: bool = True


class Holdings:
    """The current owners of one group's partitions in one topic.

    A member owns a partition from its assignment until it confirms the revocation.

    Attributes:
        releases: number of confirmed revocations so far.

    Args:
        on_release: called after each confirmed revocation.
    """

    __slots__ = ("_held", "_holder", "_on_release", "_released", "releases")

    def __init__(self, on_release: Callable[[], None]) -> None:
        self._on_release: Final = on_release
        self._held: dict[str, set[int]] = {}
        self._holder: dict[int, str] = {}
        self._released: set[int] = set()
        self.releases = 0

    def __contains__(self, member: str) -> bool:
        return member in self._held

    @property
    def members(self) -> Collection[str]:
        """Members that must revoke partitions before other members get them."""
        return self._held.keys()

    def enter(self, member: str) -> None:
        """Track the partitions that a member owns. From now on it must revoke them before other members get them."""
        self._held.setdefault(member, set())

    def of(self, member: str) -> Set[int]:
        return self._held.get(member, _NOTHING)

    def holder(self, partition: int) -> str | None:
        return self._holder.get(partition)

    def take(self, member: str, partitions: Iterable[int]) -> None:
        """Let a member own those of these partitions that no other member owns."""
        held = self._held.setdefault(member, set())
        for partition in partitions:
            if self._holder.setdefault(partition, member) == member:
                held.add(partition)

    def release(self, member: str, partitions: Iterable[int]) -> None:
        """Free those of these partitions that the member owns, after it has revoked them."""
        held = self._held.get(member, set())
        for partition in [partition for partition in partitions if partition in held]:
            held.discard(partition)
            del self._holder[partition]
            self._released.add(partition)
            self.releases += 1
            self._on_release()

    def take_released(self) -> set[int]:
        """Return the partitions that were freed since the last call and have no new owner."""
        released, self._released = self._released - self._holder.keys(), set()
        return released

    def leave(self, member: str) -> None:
        """Free all partitions of a member and stop tracking it."""
        self.release(member, list(self.of(member)))
        self._held.pop(member, None)

    def owned(self, member: str, share: range) -> Sequence[int]:
        """Return those partitions of a member's assignment that it may read now, ascending."""
        if member in self._held:
            return tuple(sorted(self._held[member]))
        return tuple([partition for partition in share if partition not in self._holder]) if self._holder else share


class AllHoldings:
    """The current owners of the partitions of all groups and topics."""

    __slots__ = ("_by_topic", "_numbers", "_turns")

    def __init__(self) -> None:
        self._by_topic: dict[tuple[bytes, str], Holdings] = {}
        # number of each group's last handover of a partition; numbers are never used again
        self._turns: dict[str, int] = {}
        self._numbers = count(1)

    def __bool__(self) -> bool:
        return bool(self._by_topic)

    def find(self, group: str, topic_id: bytes) -> Holdings | None:
        return self._by_topic.get((topic_id, group))

    def held(self, group: str, topic_id: bytes) -> Holdings:
        """Return the owners of a group's partitions in a topic. Creates an empty table if there is none."""
        found = self._by_topic.get((topic_id, group))
        if found is None:
            found = self._by_topic[topic_id, group] = Holdings(partial(self.turned, group))
        return found

    def forget(self, group: str, topic_id: bytes) -> None:
        """Drop the owners of a group's partitions in a topic if no member is tracked there."""
        held = self._by_topic.get((topic_id, group))
        if held is not None and not held.members:
            del self._by_topic[topic_id, group]

    def turned(self, group: str) -> None:
        """Record that a partition of a group has a new owner."""
        self._turns.pop(group, None)
        self._turns[group] = next(self._numbers)
        if len(self._turns) > TURNS_MAX:
            del self._turns[next(iter(self._turns))]

    def turn(self, group: str) -> int:
        """Return a number that changes whenever a partition of the group gets another owner, 0 if that is not known."""
        return self._turns.get(group, 0)


class Member(msgspec.Struct, frozen=True):
    """A member, and the protocol over which it joined.

    Attributes:
        connected: the membership ends with the member's connection, at the latest when the broker stops.
    """

    id: str
    wire: str
    connected: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """The members of a group that read one topic, in the order in which they joined.

    Attributes:
        kept: whether the group was created explicitly, so that it is not deleted when unused.
        at_us: time of the last change, in microseconds that count only while the broker runs.
        has_consumers: whether the last member to join used Kafka's consumer group protocol. An empty group keeps this,
            so that tools find the group with the API of its protocol.
        order: sorted member ids.
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
        return self._index(member) >= 0

    def share(self, member: str) -> range:
        """Return the partitions assigned to a member, ascending."""
        index = self._index(member)
        assert index >= 0, "only members have partitions"
        return share(index, len(self.order), self.partition_count, self.assignor)

    def owner_of(self, partition: int) -> str:
        """Return the member to which a partition is assigned. The group must have members."""
        return self.order[index_of(partition, len(self.order), self.partition_count, self.assignor)].decode()

    def renewed(self) -> Group:
        """Return the same group with the next generation number."""
        return replace(self, generation=self.generation + 1)

    def with_assignor(self, assignor: Assignor) -> Group:
        """Return the group with this assignor, or the same object if nothing changes."""
        return self if assignor is self.assignor else replace(self, assignor=assignor, generation=self.generation + 1)

    def with_owner(self, owner: int) -> Group:
        return self if owner == self.owner else replace(self, owner=owner)

    def with_member(self, member: Member, *, is_consumer: bool = False) -> Group:
        """Return the group with one more member."""
        return replace(self._joined((member,), self.generation + 1), has_consumers=is_consumer)

    def _joined(self, members: tuple[Member, ...], generation: int) -> Group:
        order = self.order
        for member in members:
            key = ordered_by(member.id)
            at = bisect_left(order, key)
            order = (*order[:at], key, *order[at:])
        return replace(self, members=self.members + members, order=order, generation=generation)

    def changed(self, *, gone: Collection[str], partition_count: int) -> Group:
        """Return the group in the next generation, without the members ``gone`` and with this partition count.

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
        """Return this group with a generation above its own and that of ``old``, whose members move to it.

        If it has no members, it gets the assignor of ``old``.
        """
        assignor = self.assignor if self.members else old.assignor
        return replace(self, assignor=assignor, generation=max(self.generation, old.generation) + 1)

    def applied(self, change: GroupChanged) -> Group:
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
    """Return the group as a change for the journal."""
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
    """Return the change from ``was`` to ``now`` for the journal, without the unchanged members."""
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
