"""Operations on consumer groups of Kafka's newer protocol (KIP-848), whose heartbeats assign partitions.

The coordinator has one group per group name and topic, which members of all protocols share (concepts:
groups#handing-over). A KIP-848 member joins the group of each of its topics. The coordinator computes target
assignments, and the responses to heartbeats say which partitions to release or read.

* A member gets a partition only when no other member of any protocol holds it.
* Memberships and generations are written to the journal. The partitions that a member still reads are not.
* After a restart members must rejoin. Their memberships remain until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from polywire.broker import changes
from polywire.broker.groups.classic_members import Limits
from polywire.broker.groups.commits import Commit, Commits
from polywire.broker.groups.consumer import (
    AWAY,
    JOINING,
    LEAVING,
    Beat,
    ConsumerGroup,
    Member,
    MemberPhase,
    Subscription,
)
from polywire.broker.groups.coordinator import Coordinator, GroupBroker
from polywire.broker.groups.group import ConsumerGroupView, ConsumerView, GroupView
from polywire.broker.groups.memberships import Share, TopicGroups
from polywire.broker.owners import ITSELF, NO_CALLER, UNOWNED, Caller, next_owner
from polywire.broker.quotas import MEMBER_BYTES, Kind
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.sliced import SlicedWork
from polywire.broker.state import State, group_size
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, Denied, ErrorCode, Missing, NotOwner, Unavailable
from polywire.log.base import Completion, Loop
from polywire.types import Assignor, Level, PositionKind

RETRY_S: Final = 1.0  # seconds until a failed write is retried; usually the disk was full
JOINS_AT_ONCE_MAX: Final = 50  # topics to join in one slice: some 2 ms


class BeatResponse(msgspec.Struct, frozen=True):
    """The response to a heartbeat.

    Attributes:
        assignment: partitions by topic id, None if unchanged.
        is_settled: whether this is the member's whole target assignment.
    """

    epoch: int
    assignment: Mapping[bytes, Set[int]] | None
    is_settled: bool


class _Entry(msgspec.Struct):
    """A consumer group with its timer and owner.

    Attributes:
        owner: user or address against whose quota the group counts.
        bytes: size of the members that count against the quota.
    """

    group: ConsumerGroup
    owner: int
    bytes: int = 0
    timer: Any = None
    timer_at: float = math.inf


class ConsumerGroups:
    """All groups of Kafka's consumer group protocol (KIP-848). Every group has a member."""

    __slots__ = (
        "_broker",
        "_clock",
        "_commits",
        "_coordinator",
        "_entries",
        "_limits",
        "_loop",
        "_settings",
        "_sliced",
        "_state",
        "_topic_groups",
    )

    def __init__(
        self,
        broker: GroupBroker,
        state: State,
        *,
        settings: BrokerSettings,
        loop: Loop,
        clock: Clock,
        commits: Commits,
        coordinator: Coordinator,
        topic_groups: TopicGroups,
        sliced: SlicedWork,
    ) -> None:
        self._broker = broker
        self._state = state
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._commits = commits
        self._coordinator = coordinator
        self._topic_groups = topic_groups
        self._sliced = sliced
        self._entries: dict[str, _Entry] = {}
        self._limits = Limits(settings.members_max, settings.group_bytes_max)

    # Members

    def beat(self, group: str, beat: Beat, *, by: Caller = NO_CALLER) -> BeatResponse:
        """Handle a ConsumerGroupHeartbeat request, with which a member joins, stays or leaves.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED) for another user's group, Missing(MEMBER_MISSING),
        Conflict(MEMBER_FENCED), Conflict(GENERATION_STALE) and Busy(BUSY, DISK_FULL). Raises
        Conflict(GROUP_PROTOCOL_MISMATCH) if a classic group with this name reads one of the topics and its leader
        assigns the partitions.

        Args:
            by: the caller, who becomes the owner of a group without an owner.
        """
        check_name(group, self._settings.name_bytes_max)
        check_name(beat.member_id, self._settings.name_bytes_max)
        if beat.instance_id is not None:
            check_name(beat.instance_id, self._settings.name_bytes_max)
        entry, joins = self._entries.get(group), beat.epoch == JOINING
        if entry is None and not joins:
            raise _missing(group, beat.member_id)
        entry = entry or self._begin(group, by)
        try:
            self._broker.check_owner(by, entry.owner, "group", group)
        except Denied:
            if joins or beat.member_id in entry.group.members:
                raise
            raise _missing(group, beat.member_id) from None  # do not reveal whether another user's group exists
        try:
            return self._beat(entry, beat, by)
        finally:
            self._settle(entry)

    def _begin(self, group: str, by: Caller) -> _Entry:
        owner, size = next_owner(UNOWNED, by), group_size(group, "")
        self._state.quotas.admit(Kind.GROUPS, by, size, owner=owner)
        self._state.usage.charge(Kind.GROUPS, owner, 1, size)
        epoch = self._last_epoch(group) + 1
        entry = _Entry(ConsumerGroup(group, self._limits, self._settings.consumer_session_timeout_s, epoch), owner)
        self._entries[group] = entry
        return entry

    def _last_epoch(self, group: str) -> int:
        """Return the latest epoch in which an offset was committed, or 0."""
        return max(
            (at.generation for _, _, at in self._state.positions.of(PositionKind.GROUP, group) if at.generation > 0),
            default=0,
        )

    def _beat(self, entry: _Entry, beat: Beat, by: Caller) -> BeatResponse:
        group, now = entry.group, self._clock.monotonic()
        if beat.epoch in (LEAVING, AWAY):
            return self._leave(entry, beat)
        if beat.epoch == JOINING and beat.member_id not in group.members:
            self._state.quotas.admit(Kind.MEMBERS, by, MEMBER_BYTES + beat.size, owner=entry.owner)
        member = group.beat(beat, now)
        self._watch(entry, group.gone_at(member))
        try:
            has_all = self._join_topics(entry, member, beat.assignor, by)
        except BrokerError:
            if beat.epoch == JOINING:
                self._remove(entry, member)
            raise
        entry.owner = self._inherit(entry, next_owner(entry.owner, by))
        shares = self._shares(entry, member)
        joined_ids = set(member.memberships.topics.values())
        group.note_generations({id_: share for id_, share in shares.items() if id_ in joined_ids})
        if beat.epoch == JOINING:
            group.reset(member, shares)
        changed = group.reconcile(member, shares, beat.owned, now)
        for id_, generation in self._topic_groups.hand_over(group.name, shares).items():
            group.note_generation(id_, generation)
        for id_ in shares.keys() - joined_ids:
            self._topic_groups.clear(group.name, member.memberships, id_)
        self._watch(entry, group.gone_at(member))
        assigned = member.assigned if changed or beat.is_full or beat.epoch == JOINING else None
        return BeatResponse(member.epoch, assigned, has_all and member.phase is MemberPhase.STABLE)

    def _join_topics(self, entry: _Entry, member: Member, assignor: Assignor | None, by: Caller) -> bool:
        """Join the topics to which a member subscribes, in several passes if there are many.

        Return whether all are joined. Raises the same errors as ``Coordinator.join``.
        """
        name = entry.group.name
        take = partial(
            self._topic_groups.join, name, member.memberships, assignor=assignor, by=by, at_most=JOINS_AT_ONCE_MAX
        )
        if take(member.topics):
            return True
        now = self._clock.monotonic

        def take_more(end: float) -> bool:
            if self._entries.get(name) is not entry or entry.group.members.get(member.id) is not member:
                return False
            with suppress(BrokerError):  # the next heartbeat reports the error
                while not take(member.topics):
                    if now() >= end:
                        return True
            return False

        self._sliced.put(take_more)
        return False

    def _leave(self, entry: _Entry, beat: Beat) -> BeatResponse:
        group = entry.group
        member = group.find(beat.member_id, beat.instance_id)
        if beat.epoch == AWAY and member.last_full_beat.instance_id is not None:
            member.epoch = AWAY
        elif len(member.memberships.topics) <= JOINS_AT_ONCE_MAX:
            self._remove(entry, member)
        else:  # the member must leave many topics: end its session, so that it leaves them in slices
            group.depart(member)
            self._watch(entry, self._clock.monotonic())
        return BeatResponse(beat.epoch, None, is_settled=True)

    def _remove(self, entry: _Entry, member: Member) -> None:
        """Remove a member and free its partitions. If this raises Busy(DISK_FULL), the member remains."""
        self._topic_groups.end(entry.group.name, member.memberships, {*member.assigned, *member.revoking})
        entry.group.take(member)

    def _shares(self, entry: _Entry, member: Member) -> dict[bytes, Share]:
        """Return a member's target assignment by topic.

        In a topic where the member only has to revoke partitions, its target is empty.
        """
        name = entry.group.name
        shares = self._topic_groups.shares(name, member.memberships)
        for id_ in {*member.assigned, *member.revoking} - shares.keys():
            shares[id_] = Share(range(0), 0, self._topic_groups.held(name, id_))
        return shares

    # Accounts and timers

    def _inherit(self, entry: _Entry, owner: int) -> int:
        if owner != entry.owner:
            self._charge(entry, -1)
            entry.owner = owner
            self._charge(entry, 1)
        return owner

    def _charge(self, entry: _Entry, sign: int) -> None:
        usage, size = self._state.usage, group_size(entry.group.name, "")
        usage.charge(Kind.GROUPS, entry.owner, sign, sign * size)
        usage.charge(Kind.MEMBERS, entry.owner, 0, sign * entry.bytes)

    def _settle(self, entry: _Entry) -> None:
        """Update quotas after a change of a group, and drop the group when its last member has left."""
        size = entry.group.bytes + MEMBER_BYTES * len(entry.group.members)
        self._state.usage.charge(Kind.MEMBERS, entry.owner, 0, size - entry.bytes)
        entry.bytes = size
        if not entry.group.members:
            self._charge(entry, -1)
            del self._entries[entry.group.name]
            if entry.timer is not None:
                entry.timer.cancel()

    def _watch(self, entry: _Entry, due: float) -> None:
        if due >= entry.timer_at:
            return
        if entry.timer is not None:
            entry.timer.cancel()
        entry.timer_at = due
        entry.timer = self._loop.call_later(max(due - self._clock.monotonic(), 0.0), self._on_timer, entry)

    def _on_timer(self, entry: _Entry) -> None:
        entry.timer, entry.timer_at = None, math.inf
        if self._entries.get(entry.group.name) is not entry:
            return
        try:
            # one member per pass, because each may be in many topics
            for member in entry.group.expired(self._clock.monotonic())[:1]:
                if self._topic_groups.leave_some(entry.group.name, member.memberships, JOINS_AT_ONCE_MAX):
                    self._remove(entry, member)
        except Busy:  # the disk is full; the next pass retries
            self._watch(entry, self._clock.monotonic() + RETRY_S)
        except (NotOwner, Unavailable):  # another broker leads, or storage has failed: this one is about to stop
            return
        else:
            self._watch(entry, entry.group.deadline)
        self._settle(entry)

    def end_memberships(self, wire: str, is_ours: Callable[[str], bool]) -> None:
        """Remove the members of groups that another shard coordinates now.

        The members have joined the groups in that shard.

        Args:
            wire: protocol of the members.
            is_ours: returns whether this shard coordinates a group.
        """
        coordinator = self._coordinator
        others = [(topic, group) for topic, group in coordinator.pairs() if not is_ours(group)]
        left = [
            (view, member)
            for topic, group in others
            if (view := coordinator.kept(group, topic))
            for member in view.members
        ]
        for view, member in left:
            if member.wire == wire:
                with suppress(BrokerError):  # the disk is full; the session timeout will remove the member
                    coordinator.leave(view.name, view.topic, member.id, None, wire=wire, by=ITSELF)

    # Positions

    def has_member(self, group: str, member_id: str) -> bool:
        """Return whether a member exists, or existed before a restart and still owns its partitions."""
        entry = self._entries.get(group)
        if entry is not None and member_id in entry.group.members:
            return True
        topics = self._state.group_topics.get(group, ())
        return any(self._topic_groups.is_unclaimed(group, topic, member_id) for topic in topics)

    def check_epoch(
        self, group: str, member_id: str, epoch: int, *, instance_id: str | None = None, by: Caller = NO_CALLER
    ) -> None:
        """Raise unless a member has this epoch.

        A member that has not rejoined since a restart of the broker passes with any epoch: no other member can have got
        its partitions meanwhile.

        Raises Denied(DENIED), Missing(MEMBER_MISSING), Conflict(MEMBER_FENCED), Conflict(GENERATION_STALE).
        """
        entry = self._entries.get(group)
        if entry is not None:
            self._broker.check_owner(by, entry.owner, "group", group)
        if entry is not None and member_id in entry.group.members:
            entry.group.check_epoch(member_id, epoch, instance_id)
        elif not self.has_member(group, member_id):
            raise _missing(group, member_id)

    def check_partitions(
        self, group: str, topic: str, member_id: str, partitions: Iterable[int], *, wire: str, by: Caller = NO_CALLER
    ) -> None:
        """Raise Conflict(PARTITION_NOT_ASSIGNED) unless a member may commit offsets of these partitions.

        It must own them or, in a topic to which it does not subscribe, no other member may own them. Call
        ``check_epoch`` first. Also raises Denied(DENIED).
        """
        entry = self._entries.get(group)
        member = None if entry is None else entry.group.members.get(member_id)
        membership_id = member_id if member is None else member.memberships.id
        self._coordinator.check_reader(group, topic, membership_id, partitions, wire=wire, by=by)

    def commit(
        self,
        group: str,
        member_id: str,
        positions: Mapping[str, Mapping[int, Commit]],
        *,
        epoch: int,
        wire: str,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None,
    ) -> dict[str, BrokerError]:
        """Commit offsets, by full name of the topic and partition number. Call it after ``check_epoch``.

        For each topic all offsets are stored, or none. Returns the refused topics with their errors:
        Conflict(PARTITION_NOT_ASSIGNED), Invalid(INVALID_REQUEST), Denied(DENIED), Busy(BUSY). Raises Busy(DISK_FULL).
        """
        made: list[changes.Change] = []
        refused: dict[str, BrokerError] = {}
        for topic, commits in positions.items():
            try:
                self.check_partitions(group, topic, member_id, commits, wire=wire, by=by)
                made.append(self._commits.stored_of_members(topic, commits, group, generation=epoch, by=by))
            except BrokerError as error:
                refused[topic] = error
        self._broker.change_all(made, level=level, done=done)
        return refused

    def turn(self, group: str) -> int:
        """Return a number that changes whenever a partition of the group gets another owner."""
        return self._coordinator.holdings.turn(group)

    # Administration

    def names(self) -> list[str]:
        """Return the names of the groups that have members of this protocol."""
        return sorted(self._entries)

    def view(self, group: str) -> ConsumerGroupView | None:
        """Return a group with its members of all protocols.

        Returns None for a group without members of this protocol, unless its last member used the protocol.
        """
        entry = self._entries.get(group)
        topics = sorted(self._state.group_topics.get(group, ()))
        if entry is None and not any(self._state.groups[topic, group].has_consumers for topic in topics):
            return None
        found = [self._coordinator.view(group, topic) for topic in topics]
        there = [view for view in found if view is not None]
        if entry is None:
            return self._view_without_consumers(group, there)
        known = entry.group
        ours = {member.memberships.id for member in known.members.values()}
        return ConsumerGroupView(
            name=group,
            epoch=known.epoch,
            assignor=_assignor(there),
            is_settled=all(
                member.phase is MemberPhase.STABLE and member.epoch in (known.epoch, AWAY)
                for member in known.members.values()
            ),
            members=(
                *(self._member_view(group, member) for member in known.members.values()),
                *_members_of_other_protocols(there, ours),
            ),
        )

    def _view_without_consumers(self, group: str, there: Sequence[GroupView]) -> ConsumerGroupView:
        members = tuple(_members_of_other_protocols(there, frozenset()))
        return ConsumerGroupView(
            group, self._last_epoch(group), _assignor(there), is_settled=True, members=members, has_consumers=False
        )

    def _member_view(self, group: str, member: Member) -> ConsumerView:
        shares = self._topic_groups.shares(group, member.memberships)
        names = {
            id_: topic.name.full
            for id_ in member.assigned
            if (topic := self._broker.group_topic_of_id(id_)) is not None
        }
        return ConsumerView(
            id=member.id,
            client_id=member.last_full_beat.client_id,
            client_host=member.last_full_beat.client_host,
            reading={names[id_]: sorted(held) for id_, held in member.assigned.items() if id_ in names},
            target={topic: shares[id_].partitions for topic, id_ in member.memberships.topics.items() if id_ in shares},
            instance_id=member.last_full_beat.instance_id,
            rack_id=member.last_full_beat.rack_id,
            epoch=max(member.epoch, 0),
            topics=sorted(member.subscription.names),
            pattern=member.subscription.pattern,
        )

    def topics(self, group: str) -> Set[str]:
        """Return the full names of the topics that members read, empty for an unknown group."""
        entry = self._entries.get(group)
        members = () if entry is None else entry.group.members.values()
        return frozenset().union(*(member.topics for member in members))

    def subscription_of(self, group: str, member_id: str) -> Subscription:
        """Return the subscription of a member."""
        entry = self._entries.get(group)
        member = None if entry is None else entry.group.members.get(member_id)
        return Subscription() if member is None else member.subscription

    def topics_of(self, group: str, member_id: str) -> Set[str]:
        """Return the full names of the topics that a member reads."""
        entry = self._entries.get(group)
        member = None if entry is None else entry.group.members.get(member_id)
        return frozenset() if member is None else member.topics


def _missing(group: str, member_id: str) -> Missing:
    return Missing(ErrorCode.MEMBER_MISSING, f"no such member group={group!r} member={member_id!r}")


def _assignor(views: Iterable[GroupView]) -> Assignor:
    return next((view.assignor for view in views), Assignor.ROUND_ROBIN)


def _members_of_other_protocols(views: Iterable[GroupView], ours: Set[str]) -> list[ConsumerView]:
    """Return the members of other protocols, with their partitions in all topics.

    Args:
        ours: ids of the members of this protocol.
    """
    reading: dict[tuple[str, str], dict[str, Sequence[int]]] = {}
    for view in views:
        for member in view.members:
            if member.id not in ours:
                reading.setdefault((member.id, member.wire), {})[view.topic] = member.partitions
    return [
        ConsumerView(id_, wire, "", held, held, topics=sorted(held), is_consumer=False)
        for (id_, wire), held in reading.items()
    ]
