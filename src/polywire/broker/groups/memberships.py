"""Map a Kafka member, which may read several topics, to the coordinator's groups, which have one topic each.

* A Kafka member has one membership for each of its topics (concepts: groups#handing-over). Each membership gets
  partitions like a member of any other protocol, and the coordinator knows which partitions it still reads. When it
  releases them, the group's generation rises, and they are assigned to the members that wait for them.
* In a classic group that shares topics with members of other protocols, the broker assigns in place of the group's
  leader (concepts: groups#one-group-for-all). A partition that a member still reads is assigned to no other member.
* Memberships are added and removed in short steps, so large groups do not delay others. A group assigns partitions only
  when all of its members have memberships. A group that no longer shares a topic with other protocols removes its
  memberships.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from polywire.broker.groups.classic import ClassicGroup, Phase
from polywire.broker.groups.classic_members import Member
from polywire.broker.groups.coordinator import Coordinator, GroupBroker
from polywire.broker.groups.group import Group, Holdings
from polywire.broker.owners import ITSELF, Caller
from polywire.broker.sliced import SlicedWork
from polywire.clock import Clock
from polywire.errors import BrokerError, Conflict, ErrorCode, Missing
from polywire.log.base import Loop
from polywire.types import Assignor

JOINS_AT_ONCE_MAX: Final = 25  # memberships joined in one step; each takes some 60 us
CHECKS_AT_ONCE_MAX: Final = (
    250  # topics that a heartbeat checks, some 5 us each; the next heartbeat continues after them
)
RETRY_S: Final = 1.0  # seconds until a failed write is retried; usually the disk was full


class Share(NamedTuple):
    """The partitions of one topic that are assigned to a member.

    Attributes:
        holdings: current owners of the topic's partitions.
    """

    partitions: range
    generation: int
    holdings: Holdings


class Memberships(msgspec.Struct):
    """The topics that one Kafka member has joined, under one member id.

    Attributes:
        topics: topic ids by full name.
        is_consumer: whether the member uses Kafka's consumer group protocol (KIP-848).
    """

    id: str
    wire: str
    topics: dict[str, bytes] = msgspec.field(default_factory=dict)
    is_consumer: bool = False


class TopicGroups:
    """Joins and removes Kafka members in each of their topics.

    ``Coordinator`` has one group for each topic, so a Kafka member with several topics is a member of several groups
    there.
    """

    __slots__ = ("_broker", "_coordinator")

    def __init__(self, broker: GroupBroker, coordinator: Coordinator) -> None:
        self._broker = broker
        self._coordinator = coordinator

    def join(
        self,
        group: str,
        memberships: Memberships,
        topics: Collection[str],
        *,
        assignor: Assignor | None,
        by: Caller,
        at_most: int | None = None,
    ) -> bool:
        """Join those of the given topics that exist, and leave all others.

        Return False if ``at_most`` joins were not enough. Raises the same errors as ``Coordinator.join``.

        Args:
            at_most: maximum number of joins in this call.
        """
        found = {topic: self._broker.group_topic(topic) for topic in topics}
        ids = {topic: topic_found.id for topic, topic_found in found.items() if topic_found is not None}
        for topic in [topic for topic, id_ in memberships.topics.items() if ids.get(topic) != id_]:
            self.leave(group, memberships, topic)
        coordinator, left = self._coordinator, at_most
        for topic, id_ in ids.items():
            if topic not in memberships.topics or not coordinator.has_member(group, topic, memberships.id):
                if left == 0:
                    return False
                coordinator.join(
                    group,
                    topic,
                    memberships.id,
                    wire=memberships.wire,
                    assignor=assignor,
                    watched=True,
                    is_consumer=memberships.is_consumer,
                    by=by,
                )
                memberships.topics[topic] = id_
                left = None if left is None else left - 1
            coordinator.holdings.held(group, id_).enter(memberships.id)
        return True

    def leave(self, group: str, memberships: Memberships, topic: str) -> None:
        """Leave a topic. The member owns its partitions there until it revokes them. Raises Busy(DISK_FULL)."""
        with suppress(Missing):  # the topic or the group was deleted
            self._coordinator.leave(group, topic, memberships.id, None, wire=memberships.wire, by=ITSELF)
        del memberships.topics[topic]

    def leave_some(self, group: str, memberships: Memberships, at_most: int) -> bool:
        for topic in list(islice(memberships.topics, at_most)):
            self.leave(group, memberships, topic)
        return not memberships.topics

    def end(self, group: str, memberships: Memberships, topic_ids: Collection[bytes]) -> None:
        """Remove a member: leave all its topics and free its partitions.

        If this raises Busy(DISK_FULL), the member remains.

        Args:
            topic_ids: further topics in which it owns partitions.
        """
        ids = {*topic_ids, *memberships.topics.values()}
        for topic in list(memberships.topics):
            self.leave(group, memberships, topic)
        for id_ in ids:
            self._coordinator.holdings.held(group, id_).leave(memberships.id)
        self.hand_over(group, ids)
        for id_ in ids:
            self._coordinator.holdings.forget(group, id_)

    def end_in(self, group: str, memberships: Memberships, topic: str) -> None:
        """Remove a member from one topic and free its partitions there.

        If this raises Busy(DISK_FULL), the member remains.
        """
        id_ = memberships.topics[topic]
        self.leave(group, memberships, topic)
        self._coordinator.holdings.held(group, id_).leave(memberships.id)
        self.hand_over(group, (id_,))
        self._coordinator.holdings.forget(group, id_)

    def hold(self, group: str, memberships: Memberships, topic: str, partitions: Collection[int]) -> None:
        """Record partitions that a member owns before it joins the topic. Does nothing if the topic does not exist."""
        id_ = self.topic_id(topic)
        if id_ is not None:
            memberships.topics[topic] = id_
            self._coordinator.holdings.held(group, id_).take(memberships.id, partitions)

    def share(self, group: str, memberships: Memberships, topic: str) -> Share | None:
        topic_group, id_ = self._coordinator.refreshed(group, topic), memberships.topics[topic]
        if topic_group is None or not topic_group.has(memberships.id):
            return None
        return Share(
            topic_group.share(memberships.id), topic_group.generation, self._coordinator.holdings.held(group, id_)
        )

    def shares(self, group: str, memberships: Memberships) -> dict[bytes, Share]:
        found = {id_: self.share(group, memberships, topic) for topic, id_ in memberships.topics.items()}
        return {id_: share for id_, share in found.items() if share is not None}

    def topic_id(self, topic: str) -> bytes | None:
        """Return the id of a topic, or None if it does not exist."""
        found = self._broker.group_topic(topic)
        return None if found is None else found.id

    def is_unclaimed(self, group: str, topic: str, membership_id: str) -> bool:
        """Return whether a member from before a restart still exists and has sent no request since."""
        if not self._coordinator.has_member(group, topic, membership_id) or self._coordinator.has_changed(group, topic):
            return False
        topic_id = self.topic_id(topic)
        if topic_id is None:
            return True
        is_taken = membership_id in self._coordinator.holdings.held(group, topic_id)
        self._coordinator.holdings.forget(group, topic_id)
        return not is_taken

    def held(self, group: str, topic_id: bytes) -> Holdings:
        return self._coordinator.holdings.held(group, topic_id)

    def clear(self, group: str, memberships: Memberships, topic_id: bytes) -> None:
        """Forget a topic that the member has left, once it owns no partitions there."""
        held = self._coordinator.holdings.held(group, topic_id)
        if not held.of(memberships.id):
            held.leave(memberships.id)
            self._coordinator.holdings.forget(group, topic_id)

    def hand_over(self, group: str, topic_ids: Collection[bytes]) -> Mapping[bytes, int]:
        """Begin a new generation in topics with free partitions that classic members can get only by rejoining.

        Returns the new generations by topic id.
        """
        renewed: dict[bytes, int] = {}
        for id_ in topic_ids:
            held = self._coordinator.holdings.held(group, id_)
            released = held.take_released()
            topic = self._broker.group_topic_of_id(id_) if released else None
            topic_group = None if topic is None else self._coordinator.refreshed(group, topic.name.full)
            if (
                topic_group is not None
                and topic_group.members
                and any(topic_group.owner_of(partition) not in held for partition in released)
            ):
                self._coordinator.renew(group, topic_group.topic)
                renewed[id_] = topic_group.generation + 1
        return renewed

    def group_in(self, group: str, topic: str) -> Group | None:
        return self._coordinator.refreshed(group, topic)


class SharedGroup:
    """A classic group whose partitions the broker assigns, because the group has members of other protocols, too.

    Attributes:
        generation: generation at the last call of ``follow``.
        by: user who owns the members.
        has_failed: whether a change could not be stored. Members then keep their assignments until a retry.
    """

    __slots__ = (
        "_assigning",
        "_current",
        "_freed",
        "_inputs",
        "_known",
        "_leaving",
        "_missing_partitions",
        "_name",
        "_next_check",
        "_topic_groups",
        "_topics_alone",
        "_unjoined",
        "by",
        "generation",
        "has_failed",
    )

    def __init__(self, name: str, topic_groups: TopicGroups, by: Caller) -> None:
        self._name: Final = name
        self._topic_groups: Final = topic_groups
        self.generation = -1
        # memberships of all members at the last check
        self._current: dict[str, Memberships] = {}
        # memberships of former members that still exist
        self._leaving: dict[str, Memberships] = {}
        # by membership id, topics that the member may not have joined yet
        self._unjoined: dict[str, Collection[str]] = {}
        # topics with released partitions
        self._freed: dict[bytes, None] = {}
        # remaining steps of the current assignment
        self._assigning: Iterator[None] | None = None
        # by topic, the inputs from which the assignments of this generation were computed
        self._inputs: dict[str, object] = {}
        # topics in which a member got less than its share, with the number of releases at that time
        self._missing_partitions: dict[bytes, int] = {}
        # index of the topic to check next
        self._next_check = 0
        # number of topics in a row that had no members of other protocols
        self._topics_alone = 0
        # change count of the group at the last call of ``follow``
        self._known = -1
        self.by = by
        self.has_failed = False

    def __contains__(self, member_id: object) -> bool:
        return member_id in self._current or member_id in self._leaving

    @property
    def is_over(self) -> bool:
        """Whether all members have been removed."""
        return not self._current and not self._leaving

    # Changes of the group

    def begin(self, group: ClassicGroup) -> None:
        """Begin to assign a group's partitions in place of its leader.

        Members keep the partitions that they read until they rejoin.
        """
        self.generation = group.generation
        self.follow(group)
        for member in group.joined_members:
            for topic, partitions in member.reading.items():
                if topic in member.join.topics:
                    self._topic_groups.hold(self._name, self._current[member.membership_id], topic, partitions)

    def end(self) -> None:
        """Remove all members from their topics. ``step`` does this in small steps."""
        self._leaving |= self._current
        self._current.clear()
        self._unjoined.clear()
        self._assigning, self.has_failed = None, False

    def follow(self, group: ClassicGroup) -> None:
        """Update the topics' members after members of the classic group have joined or left.

        In a new generation, changed subscriptions are applied as well.
        """
        is_new, self.generation = group.generation != self.generation, group.generation
        if not is_new and self._known == group.changes:
            return
        self._known = group.changes
        members = {member.membership_id: member for member in group.joined_members}
        for id_ in self._current.keys() - members.keys():
            self._leaving[id_] = self._current.pop(id_)
            self._unjoined.pop(id_, None)
        for id_ in members if is_new else members.keys() - self._current.keys():
            join = members[id_].join
            if id_ not in self._current:
                self._current[id_] = self._leaving.pop(id_, Memberships(id_, join.wire))
            self._unjoined[id_] = join.topics
        if is_new:
            self._assigning, self.has_failed = self._assign_all(group), False

    def joined(self, member: Member) -> None:
        """Free the partitions that a rejoining member no longer claims to own."""
        memberships = self._current.get(member.membership_id) or self._leaving.get(member.membership_id)
        for topic, id_ in () if memberships is None else memberships.topics.items():
            held = self._topic_groups.held(self._name, id_)
            held.release(
                member.membership_id, held.of(member.membership_id) - frozenset(member.join.kept.get(topic, ()))
            )
            self._freed[id_] = None

    # Work in steps

    def step(self, group: ClassicGroup | None) -> bool:
        """Do one step of work. Return False if there was none.

        Args:
            group: None once the group is no longer shared.
        """
        if group is None or group.phase is not Phase.COMPLETING:
            self._assigning = None
        todo = self._todo()
        if todo is None:
            return False
        try:
            todo()
        except BrokerError:  # too many members, or the disk is full
            self._assigning = None if todo == self._continue_assigning else self._assigning
            self.has_failed = True
        return True

    def _todo(self) -> Callable[[], None] | None:
        for left, todo in (
            (self._leaving, self._leave),
            (self._unjoined, self._join_some),
            (self._freed, self._hand_over),
        ):
            if left and not self.has_failed:
                return todo
        return None if self._assigning is None else self._continue_assigning

    def _leave(self) -> None:
        id_, memberships = next(iter(self._leaving.items()))
        if memberships.topics:
            self._topic_groups.end_in(self._name, memberships, next(iter(memberships.topics)))
        if not memberships.topics:
            del self._leaving[id_]

    def _join_some(self) -> None:
        id_, topics = next(iter(self._unjoined.items()))
        memberships = self._current[id_]
        unread = next((topic for topic in memberships.topics if topic not in topics), None)
        if unread is not None:
            self._topic_groups.end_in(self._name, memberships, unread)
        elif self._topic_groups.join(
            self._name, memberships, topics, assignor=None, by=self.by, at_most=JOINS_AT_ONCE_MAX
        ):
            del self._unjoined[id_]

    def _hand_over(self) -> None:
        id_ = next(iter(self._freed))
        self._topic_groups.hand_over(self._name, (id_,))
        del self._freed[id_]

    def _continue_assigning(self) -> None:
        assert self._assigning is not None, "there is assignment work"
        if next(self._assigning, self) is self:
            self._assigning = None

    def _assign_all(self, group: ClassicGroup) -> Iterator[None]:
        """Assign partitions to all members. They have joined their topics before."""
        inputs: dict[str, object] = {}
        for topic in group.topics:
            inputs[topic] = self._inputs_of(topic, self._topic_groups.group_in(self._name, topic))
            yield
        self._inputs, self._missing_partitions, self._next_check, self._topics_alone = inputs, {}, 0, 0
        for id_ in [member.id for member in group.joined_members]:
            found: dict[str, Collection[int]] = {}
            for topic in list(self._memberships(group, id_).topics):
                self._share(self._memberships(group, id_), topic, found)
                yield
            member = group.member(id_)
            if member is not None and member.join.writing is not None:
                group.assign(id_, member.join.writing.encode(found))

    def _memberships(self, group: ClassicGroup, id_: str) -> Memberships:
        member = group.member(id_)
        assert member is not None, "a leaving member ends the generation"
        return self._current[member.membership_id]

    def _share(self, memberships: Memberships, topic: str, found: dict[str, Collection[int]]) -> None:
        """Add to ``found`` the assigned partitions of a member in a topic, without those that other members must still
        revoke.
        """
        share = self._topic_groups.share(self._name, memberships, topic)
        if share is None:
            return
        share.holdings.take(memberships.id, share.partitions)
        found[topic] = sorted(share.holdings.of(memberships.id) & set(share.partitions))
        if len(found[topic]) < len(share.partitions):
            self._missing_partitions[memberships.topics[topic]] = share.holdings.releases

    # Checks

    def is_due(self, group: ClassicGroup) -> bool:
        """Return whether members must rejoin, because assignments have changed or awaited partitions have been revoked.

        Each call checks only some of the topics.
        """
        is_other = [self._has_changed(topic) for topic in self._next_topics()]
        if any(is_other) or self.has_failed or group.topics != self._inputs.keys():
            return True
        return any(
            self._topic_groups.held(self._name, id_).releases != releases
            for id_, releases in self._missing_partitions.items()
        )

    def _next_topics(self) -> Collection[str]:
        topics, first = list(self._inputs), self._next_check
        count = min(len(topics), CHECKS_AT_ONCE_MAX)
        self._next_check = (first + count) % max(len(topics), 1)
        return [topics[(first + at) % len(topics)] for at in range(count)]

    def _has_changed(self, topic: str) -> bool:
        """Return whether a topic's members, partitions or assignor have changed since this generation was assigned."""
        topic_group = self._topic_groups.group_in(self._name, topic)
        has_other_protocols = topic_group is not None and any(member.id not in self for member in topic_group.members)
        self._topics_alone = 0 if has_other_protocols else self._topics_alone + 1
        return self._inputs_of(topic, topic_group) != self._inputs[topic]

    def recheck(self) -> None:
        """Check all topics again, because a member of another protocol is about to join."""
        self._topics_alone = 0

    @property
    def is_alone(self) -> bool:
        """Whether the group had no members of other protocols in any topic when the topics were last checked."""
        return self._topics_alone >= len(self._inputs) > 0

    def check(self, member: Member, topic: str, partitions: Collection[int]) -> bool:
        """Raise Conflict(PARTITION_NOT_ASSIGNED) for partitions that a member does not own.

        Returns False if the member has not joined the topic.
        """
        id_ = self._current[member.membership_id].topics.get(topic) if member.membership_id in self._current else None
        held = None if id_ is None else self._topic_groups.held(self._name, id_)
        if held is None or member.membership_id not in held:
            return False
        for partition in partitions:
            if partition not in held.of(member.membership_id):
                raise Conflict(
                    ErrorCode.PARTITION_NOT_ASSIGNED,
                    f"partition is not assigned to this member member={member.id!r} partition={partition}",
                )
        return True

    def _inputs_of(self, topic: str, topic_group: Group | None) -> object:
        return self._topic_groups.topic_id(topic), topic_group and (
            topic_group.order,
            topic_group.partition_count,
            topic_group.assignor,
        )


class SharedGroups:
    """The classic groups whose partitions the broker assigns, because members of other protocols are in the group, too.

    Args:
        table: all classic groups by name.
        on_assigned: called with the name of a group once all of its members have their assignments.
    """

    __slots__ = (
        "_clock",
        "_coordinator",
        "_loop",
        "_on_assigned",
        "_shared",
        "_sliced",
        "_table",
        "_topic_groups",
        "_working",
    )

    def __init__(
        self,
        *,
        topic_groups: TopicGroups,
        coordinator: Coordinator,
        table: dict[str, ClassicGroup],
        sliced: SlicedWork,
        loop: Loop,
        clock: Clock,
        on_assigned: Callable[[str], None],
    ) -> None:
        self._topic_groups: Final = topic_groups
        self._coordinator: Final = coordinator
        self._table: Final = table
        self._sliced: Final = sliced
        self._loop: Final = loop
        self._clock: Final = clock
        self._on_assigned: Final = on_assigned
        # groups that are shared or still have memberships
        self._shared: dict[str, SharedGroup] = {}
        # groups whose work is queued in ``_sliced``
        self._working: set[str] = set()

    def member_ids(self, group: str) -> Container[str]:
        """Return the member ids that a classic group uses in its topics, including those of members that have just
        left.
        """
        return self._shared.get(group, ())

    def has_other_protocols(self, group: str, topic: str) -> bool:
        """Return whether a group has members of other protocols in a topic."""
        found, ours = self._coordinator.view(group, topic), self.member_ids(group)
        return found is not None and any(member.id not in ours for member in found.members)

    def share(self, group: ClassicGroup, by: Caller) -> None:
        """Let the broker assign a group's partitions in place of its leader, from the next generation on.

        Args:
            by: user who owns the members.
        """
        shared = self._shared.setdefault(group.name, SharedGroup(group.name, self._topic_groups, by))
        shared.by = by
        shared.begin(group)
        group.is_shared = True
        self._work(group.name)

    def _unshare(self, group: ClassicGroup) -> None:
        self._shared[group.name].end()
        group.is_shared = False
        self._work(group.name)

    def joined(self, group: ClassicGroup, member_id: str, by: Caller) -> None:
        """Update the members of the group's topics after a JoinGroup request."""
        if not group.is_shared:
            return
        shared, member = self._shared[group.name], group.member(member_id)
        shared.by = by
        is_current = group.phase is not Phase.PREPARING and group.generation == shared.generation
        # a member that stays in its generation continues to read its assignment
        if member is not None and not is_current:
            shared.joined(member)

    def follow(self, group: ClassicGroup) -> None:
        """Update the members of the group's topics.

        If the last classic member has left, stop assigning the group's partitions.
        """
        if not group.is_shared:
            return
        if not group.has_members:
            self._unshare(group)
            return
        self._shared[group.name].follow(group)
        self._work(group.name)

    def is_due(self, group: ClassicGroup) -> bool:
        """Return whether members must rejoin: assignments have changed, or all members of other protocols have left."""
        if not group.is_shared or group.phase is not Phase.STABLE:
            return False
        shared = self._shared[group.name]
        is_due = shared.is_due(group)
        if shared.is_alone:
            self._unshare(group)
        return is_due or not group.is_shared

    def recheck(self, group: str) -> None:
        shared = self._shared.get(group)
        if shared is not None:
            shared.recheck()

    def check(self, group: str, topic: str, member_id: str, partitions: Collection[int], by: Caller) -> None:
        """Raise Conflict(PARTITION_NOT_ASSIGNED) if a member commits offsets of partitions that it does not own.

        Does nothing if the group has no members of other protocols. Also raises Missing(MEMBER_MISSING),
        Denied(DENIED).
        """
        found = self._table.get(group)
        member = None if found is None or not found.is_shared else found.member(member_id)
        if member is None and self.has_other_protocols(group, topic):
            raise Missing(
                ErrorCode.MEMBER_MISSING, f"the group has members of other protocols group={group!r} topic={topic!r}"
            )
        if member is None or self._shared[group].check(member, topic, partitions):
            return
        topic_group = self._coordinator.view(group, topic)
        if topic_group is not None and topic_group.members:
            self._coordinator.check_reader(group, topic, member.membership_id, partitions, wire=member.join.wire, by=by)

    def _work(self, name: str) -> None:
        if name in self._shared and name not in self._working:
            self._working.add(name)
            self._sliced.put(partial(self._work_on, name))

    def _work_on(self, name: str, end: float) -> bool:
        """Do steps of a group's pending work until the time ``end``. Return whether work is left."""
        shared, found = self._shared[name], self._table.get(name)
        group = found if found is not None and found.is_shared else None
        while shared.step(group):
            if self._clock.monotonic() >= end:
                return True
        self._working.discard(name)
        if group is not None and group.phase is Phase.COMPLETING:
            self._on_assigned(name)
        elif group is None and shared.is_over:
            del self._shared[name]
        elif group is None:
            self._loop.call_later(RETRY_S, self._retry, name)
        return False

    def _retry(self, name: str) -> None:
        shared, found = self._shared.get(name), self._table.get(name)
        if shared is not None and (found is None or not found.is_shared):
            shared.end()
            self._work(name)
