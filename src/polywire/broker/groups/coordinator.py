"""The coordinator of consumer groups of all protocols (concepts: groups#what-a-group-is).

* Every change of a group is written to the journal, so groups survive restarts with their generation, assignor and
  members.
* Heartbeats are not written to the journal. After a restart every member has one full timeout. Members whose membership
  ends with their connection are removed.
* Expired members are removed when another member of the group sends a request. Until then, lists of members omit them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from polywire.broker import changes
from polywire.broker.groups.group import (
    AllHoldings,
    Group,
    GroupView,
    Member,
    Membership,
    MemberView,
    difference,
    stored,
)
from polywire.broker.owners import NO_CALLER, UNOWNED, Caller, next_owner
from polywire.broker.quotas import MEMBER_BYTES, Kind
from polywire.broker.settings import SECOND_US, BrokerSettings, check_name
from polywire.broker.state import Binding, State, binding_size, group_size
from polywire.broker.topics import Topic
from polywire.clock import Clock, ElapsedClock
from polywire.errors import Busy, Conflict, ErrorCode, Missing
from polywire.log.base import Completion
from polywire.types import Assignor, Level, PositionKind


class GroupBroker(Protocol):
    """The methods of the broker that groups call."""

    def group_partition_count(self, full_name: str, last: int | None = None) -> int:
        """Return the number of partitions to assign.

        Args:
            last: how many partitions the group's last assignment had.
        """

    def group_topic(self, full_name: str) -> Topic | None:
        """Return the topic with this full name, in any shard."""

    def group_topic_of_id(self, topic_id: bytes) -> Topic | None: ...

    def topic_name(self, key: changes.TopicKey) -> str:
        """Return the full name of the topic with this key."""

    def reported(self, done: Completion[int] | None) -> Completion[int] | None:
        """Return a completion that calls ``done`` once other processes know the bindings of this one."""

    def change_all(self, made: Sequence[changes.Change], *, level: Level, done: Completion[int] | None) -> None:
        """Journal changes in one atomic write and apply them.

        Without changes, ``done`` is called after earlier changes.
        """

    def commit_positions(
        self,
        full_name: str,
        offsets: Mapping[int, int],
        kind: PositionKind,
        name: str,
        *,
        generation: int,
        by: Caller,
        level: Level,
        done: Completion[int] | None,
    ) -> None:
        """Store next offsets by partition number, all or none."""

    def check_owner(self, by: Caller, owner: int, what: str, name: str) -> None:
        """Raise Denied(DENIED) if the caller may not use state of this owner.

        Args:
            what, name: kind and name of the state, for the error.
        """


class Coordinator:
    """All groups of one broker, each with one topic.

    Attributes:
        holdings: partitions that members must release before other members get them. All other partitions belong to
            their owner as soon as they are assigned.
        remote_bindings: bindings of other processes, by protocol and group name.
    """

    __slots__ = (
        "_broker",
        "_changed",
        "_clock",
        "_elapsed",
        "_meet",
        "_seen",
        "_settings",
        "_started_at",
        "_state",
        "holdings",
        "remote_bindings",
    )

    def __init__(
        self,
        broker: GroupBroker,
        state: State,
        settings: BrokerSettings,
        clock: Clock,
        elapsed: ElapsedClock,
    ) -> None:
        self._broker = broker
        self._state = state
        self._settings = settings
        self._clock = clock
        self._elapsed = elapsed
        self._started_at = clock.monotonic()
        self._meet: Callable[[str, str], None] = lambda group, topic: None
        self.holdings: Final = AllHoldings()
        self.remote_bindings: Final[dict[tuple[str, str], Binding]] = {}
        # time of each member's last heartbeat; a member without a time joined before a restart and counts as seen at
        # the broker's start
        self._seen: dict[tuple[str, str], dict[str, float]] = {}
        # time of each group's last change since the start
        self._changed: dict[tuple[str, str], int] = {}

    def on_meeting(self, callback: Callable[[str, str], None]) -> None:
        """Register a callback, called with a group's name and topic before a member joins the group.

        It may raise Conflict(GROUP_PROTOCOL_MISMATCH) if a classic group of this name reads the topic.
        """
        self._meet = callback

    def join(
        self,
        group: str,
        topic: str,
        member: str,
        *,
        wire: str,
        assignor: Assignor | None = None,
        first_generation: int = 1,
        named_alone: bool = False,
        connected: bool = False,
        watched: bool = False,
        is_consumer: bool = False,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> Membership:
        """Join a group. Joining again under the same id changes nothing.

        Raises Invalid(INVALID_NAME), Denied(DENIED) for another user's group, Busy(BUSY) above a limit, and
        Conflict(GROUP_PROTOCOL_MISMATCH) if a classic group of this name reads the topic and the broker cannot assign
        to its members.

        Args:
            assignor: new assignor of the group. With None it stays the same. A new group uses round robin.
            first_generation: generation of a group that this call creates, before the member is counted.
            named_alone: group names of this protocol are bound to one topic at a time. If a member joins with another
                topic, the protocol's members leave the old topic, and the generation continues in the new one.
            connected: the member sends no heartbeats. The caller removes it when its connection ends.
            watched: like ``connected``, but after a restart the member can return within the session timeout.
        """
        check_name(group, self._settings.name_bytes_max)
        check_name(member, self._settings.name_bytes_max)
        owner = self._enter(group, topic, by)
        made: list[changes.Change] = []
        left = self._switch(group, topic, wire, made, by) if named_alone else None
        current = self._state.groups.get((topic, group))
        now = self._clock.monotonic()
        if current is not None:
            wanted = current if left is None else current.succeeding(left)
        else:
            begin = (first_generation, assignor or Assignor.ROUND_ROBIN)
            begin = begin if left is None else (left.generation + 1, left.assignor)
            wanted = self._begin(topic, group, *begin, next_owner(owner, by))
        wanted = wanted.with_assignor(assignor or wanted.assignor)
        gone = self._expired(wanted, now)
        wanted = wanted.changed(gone=gone, partition_count=self._count(wanted)).with_owner(next_owner(owner, by))
        if joined := [] if wanted.has(member) else [Member(member, wire, connected)]:
            if len(wanted.members) >= self._settings.members_max:
                raise Busy(ErrorCode.BUSY, f"too many members group={group!r} limit={self._settings.members_max}")
            self._state.quotas.admit(Kind.MEMBERS, by, MEMBER_BYTES + len(member), owner=owner)
            wanted = wanted.with_member(joined[0], is_consumer=is_consumer)
        if wanted is not current:
            made.append(self._stored(wanted) if current is None else self._difference(wanted, current, gone, joined))
        self._broker.change_all(made, level=level, done=self._broker.reported(done))
        if wanted is not current:
            self._forget(wanted)
        self._mark(wanted, member, math.inf if connected or watched else now)
        return Membership(wanted.generation, tuple(self._owned(wanted, member)))

    def _enter(self, group: str, topic: str, by: Caller) -> int:
        """Check that a member may join a group over this API, and that the caller may use the group.

        Return the group's owner. Raises Denied(DENIED), Conflict(GROUP_PROTOCOL_MISMATCH).
        """
        self._state.shares.check_no_members(group)
        self._meet(group, topic)
        return self._check_owner(by, topic, group)

    def create(
        self,
        group: str,
        topic: str,
        *,
        assignor: Assignor = Assignor.ROUND_ROBIN,
        generation: int = 0,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Create a group without members.

        Raises Conflict(GROUP_EXISTS), Invalid(INVALID_NAME), Denied(DENIED) if another user has committed offsets under
        this name, Busy(BUSY) for too many groups.
        """
        check_name(group, self._settings.name_bytes_max)
        owner = self._check_owner(by, topic, group)
        if (topic, group) in self._state.groups:
            raise Conflict(ErrorCode.GROUP_EXISTS, f"group exists group={group!r} topic={topic!r}")
        begun = self._begin(topic, group, generation, assignor, next_owner(owner, by))
        self._broker.change_all([self._stored(replace(begun, kept=True))], level=level, done=done)

    def sync(
        self, group: str, topic: str, member: str, generation: int, *, wire: str, by: Caller = NO_CALLER
    ) -> Membership:
        """Return the member's assignment. This counts as a heartbeat. Raises the same errors as ``heartbeat``."""
        return self.heartbeat(group, topic, member, generation, wire=wire, by=by)

    def heartbeat(
        self, group: str, topic: str, member: str, generation: int | None, *, wire: str, by: Caller = NO_CALLER
    ) -> Membership:
        """Record a heartbeat and return the assignment. A generation of None is not compared.

        Raises, checked in this order, Missing(GROUP_MISSING), Denied(DENIED) for another user's group,
        Conflict(GENERATION_STALE), Missing(MEMBER_MISSING). An expired member gets GENERATION_STALE, because the call
        first removes it, which begins a generation.
        """
        now = self._clock.monotonic()
        found = self._check(group, topic, member, generation, wire=wire, by=by, now=now)
        self._mark(found, member, now)
        return Membership(found.generation, tuple(self._owned(found, member)))

    def leave(
        self,
        group: str,
        topic: str,
        member: str,
        generation: int | None,
        *,
        wire: str,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Leave a group.

        A group without members remains, and its generations continue. A generation of None is not compared. Raises the
        same errors as ``heartbeat``.
        """
        found = self._check(group, topic, member, generation, wire=wire, by=by, now=self._clock.monotonic())
        without = found.changed(gone=(member,), partition_count=found.partition_count)
        self._broker.change_all([self._difference(without, found, [member])], level=level, done=done)
        self._forget(without)

    def commit(
        self,
        group: str,
        topic: str,
        member: str,
        generation: int,
        partition: int,
        offset: int,
        *,
        wire: str,
        refresh: bool = False,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Store the group's next offset of a partition that this member owns.

        Raises the same errors as ``heartbeat``, then Conflict(PARTITION_NOT_ASSIGNED).

        Args:
            refresh: whether the commit counts as a heartbeat.
        """
        offsets = {partition: offset}
        self.commit_all(
            group, topic, member, generation, offsets, wire=wire, refresh=refresh, by=by, level=level, done=done
        )

    def commit_all(
        self,
        group: str,
        topic: str,
        member: str,
        generation: int,
        offsets: Mapping[int, int],
        *,
        wire: str,
        refresh: bool = False,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Store the group's next offsets by partition number, all or none. Raises the same errors as ``commit``."""
        self.check_member(group, topic, member, generation, offsets, wire=wire, refresh=refresh, by=by)
        self._broker.commit_positions(
            topic, offsets, PositionKind.GROUP, group, generation=generation, by=by, level=level, done=done
        )

    def check_member(
        self,
        group: str,
        topic: str,
        member: str,
        generation: int | None,
        partitions: Iterable[int],
        *,
        wire: str,
        refresh: bool = False,
        by: Caller = NO_CALLER,
    ) -> None:
        """Raise unless a member owns these partitions in this generation. None stands for the current generation.

        Raises the same errors as ``commit``.
        """
        now = self._clock.monotonic()
        found = self._check(group, topic, member, generation, wire=wire, by=by, now=now)
        shared = self._owned(found, member)
        owned = shared if isinstance(shared, range) else frozenset(shared)
        for partition in partitions:
            if partition not in owned:
                raise _not_assigned(member, partition)
        if refresh:
            self._mark(found, member, now)

    def check_reader(
        self, group: str, topic: str, member: str, partitions: Iterable[int], *, wire: str, by: Caller = NO_CALLER
    ) -> None:
        """Raise unless a member may commit offsets of these partitions.

        If the member reads the topic, it must own the partitions. Otherwise no other member may read them. Raises the
        same errors as ``check_member``.
        """
        if self.has_member(group, topic, member):
            self.check_member(group, topic, member, None, partitions, wire=wire, by=by)
            return
        self._check_owner(by, topic, group)
        found, there = self.view(group, topic), self._broker.group_topic(topic)
        others = () if found is None else found.members
        owners = {partition: other.id for other in others for partition in other.partitions}
        held = None if there is None else self.holdings.find(group, there.id)
        for partition in partitions:
            owner = (None if held is None else held.holder(partition)) or owners.get(partition, member)
            if owner != member:
                raise _not_assigned(member, partition)

    def refreshed(self, group: str, topic: str) -> Group | None:
        """Remove the expired members of a group and return it, or None if it does not exist."""
        found = self._state.groups.get((topic, group))
        return None if found is None else self._refreshed(found, self._clock.monotonic())

    def renew(self, group: str, topic: str) -> None:
        """Begin a generation, so that members learn which partitions other members have released."""
        found = self._state.groups.get((topic, group))
        if found is not None:
            self._change(found.renewed(), found)

    def delete(
        self,
        group: str,
        topic: str,
        *,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Delete a group, its offsets, and the bindings of its name. Any of these may be missing.

        Raises Denied(DENIED) for another user's group, Missing(GROUP_MISSING) if all are missing.
        """
        key = self._state.topic_key(topic)
        made: list[changes.Change] = []
        if (topic, group) in self._state.groups:
            made.append(changes.GroupDeleted(topic, group))
        if self._state.positions.held(key, PositionKind.GROUP, group) is not None:
            made.append(changes.PositionsDeleted(PositionKind.GROUP, group, *changes.split_key(key), None))
        for wire in self._state.binding_wires:
            bound = self._state.bindings.get((wire, group))
            if bound is not None and bound.topic == topic:
                made.append(changes.GroupUnbound(wire, group))
        if not made:
            raise _group_missing(group, topic)
        self._check_owner(by, topic, group)
        self._broker.change_all(made, level=level, done=done)
        self._seen.pop((topic, group), None)
        self._changed.pop((topic, group), None)

    def sweep(self, group: str, topic: str) -> None:
        """Remove all members of a group if none of them has sent a request for ``group_expiry_us``.

        Raises Busy(DISK_FULL). Usually, expired members are removed when another member sends a request.
        """
        found = self._state.groups.get((topic, group))
        if found is None or not found.members:
            return
        seen = self._seen.get((topic, group), {})
        latest = max(seen.get(member.id, self._started_at) for member in found.members)
        if latest < self._clock.monotonic() - self._settings.group_expiry_us / SECOND_US:
            gone = [member.id for member in found.members]
            self._change(found.changed(gone=gone, partition_count=found.partition_count), found, gone)

    def bind(
        self,
        wire: str,
        group: str,
        topic: str,
        *,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Bind a group name to a topic, for a protocol whose group names do not include a topic.

        The group is created when the first member joins. Raises Invalid(INVALID_NAME), Denied(DENIED) if the name or
        the group belongs to another user, Busy(BUSY) for too many names.
        """
        check_name(group, self._settings.name_bytes_max)
        self._check_owner(by, topic, group)
        self._broker.change_all([self._bind(by, wire, group, topic)], level=level, done=self._broker.reported(done))

    def binding(self, wire: str, group: str) -> Binding | None:
        """Return the binding of a group name in this process."""
        return self._state.bindings.get((wire, group))

    def bindings(self) -> list[tuple[str, str]]:
        """Return the protocol and name of each group name that is bound in this process."""
        return list(self._state.bindings)

    def release(self, wire: str, group: str) -> None:
        """Remove a binding and the protocol's members, because another process has bound the name to another topic."""
        bound = self._state.bindings[wire, group]
        made: list[changes.Change] = [changes.GroupUnbound(wire, group)]
        self._leave(bound.topic, group, wire, made)
        self._broker.change_all(made, level=Level.WRITTEN, done=None)

    def bound(self, wire: str) -> dict[str, str]:
        """Return the topic of each group name that a protocol has bound."""
        return {name: bound.topic for (of, name), bound in self._state.bindings.items() if of == wire}

    def owner(self, topic: str, group: str) -> int:
        """Return the owner of a group."""
        return self._state.group_owner(topic, group)

    def topic_of(self, wire: str, group: str) -> str | None:
        """Return the topic to which a protocol has bound a group name in this process, or None."""
        bound = self._state.bindings.get((wire, group))
        return None if bound is None else bound.topic

    def bound_to(self, wire: str, group: str) -> str | None:
        """Return the topic to which a protocol has bound a group name in any process, or None."""
        bound = self._bound(wire, group)
        return None if bound is None else bound.topic

    def views(self, topic: str | None = None) -> list[GroupView]:
        """Return all groups, or the groups of one topic, sorted by topic and name. See ``view``."""
        now = self._clock.monotonic()
        topics = sorted(self._state.group_names) if topic is None else [topic]
        return [self._view(self._state.groups[name, group], now) for name in topics for group in self.names(name)]

    def pairs(self) -> list[tuple[str, str]]:
        """Return (topic, name) of all groups, in no particular order."""
        return list(self._state.groups)

    def names(self, topic: str) -> list[str]:
        """Return the names of a topic's groups, sorted."""
        return sorted(self._state.group_names.get(topic, ()))

    def view(self, group: str, topic: str) -> GroupView | None:
        """Return a group with the topic's current partitions and without expired members.

        The stored group is not changed.
        """
        found = self._state.groups.get((topic, group))
        return None if found is None else self._view(found, self._clock.monotonic())

    def kept(self, group: str, topic: str) -> GroupView | None:
        """Return a group as it is stored, with the partitions of the last assignment.

        Expired members that were not removed yet are included.
        """
        found = self._state.groups.get((topic, group))
        return None if found is None else self._shown(found, self._clock.monotonic())

    def watch(self) -> None:
        """Start to record the names of groups that change or get heartbeats, for ``take_touched``."""
        self._state.touched = set()

    def take_touched(self) -> set[str]:
        """Return the names of groups of every protocol that changed or got heartbeats since the last call.

        Groups that have only committed offsets are included.
        """
        touched, self._state.touched = self._state.touched, set()
        return touched or set()

    def has_member(self, group: str, topic: str, member: str) -> bool:
        """Return whether the group exists and has this member, expired or not."""
        found = self._state.groups.get((topic, group))
        return found is not None and found.has(member)

    def has_changed(self, group: str, topic: str) -> bool:
        """Return whether a group has changed since the broker's start, so that a partition may have another owner."""
        return (topic, group) in self._changed

    def _view(self, group: Group, now: float) -> GroupView:
        gone = self._expired(group, now)
        return self._shown(group.changed(gone=gone, partition_count=self._count(group)), now)

    def _shown(self, group: Group, now: float) -> GroupView:
        seen = self._seen.get((group.topic, group.name), {})
        members = tuple(
            MemberView(
                id=member.id,
                wire=member.wire,
                idle_s=max(now - seen.get(member.id, self._started_at), 0.0),
                partitions=tuple(self._owned(group, member.id)),
            )
            for member in group.members
        )
        return GroupView(
            topic=group.topic,
            name=group.name,
            generation=group.generation,
            assignor=group.assignor,
            members=members,
            partition_count=group.partition_count,
            changed_at_us=self._changed.get((group.topic, group.name)),
        )

    def _begin(self, topic: str, group: str, generation: int, assignor: Assignor, owner: int) -> Group:
        self._state.quotas.admit(Kind.GROUPS, NO_CALLER, group_size(group, topic), owner=owner)
        return Group(topic, group, generation, assignor, self._broker.group_partition_count(topic), owner=owner)

    def _count(self, group: Group) -> int:
        return self._broker.group_partition_count(group.topic, group.partition_count)

    def _bind(self, by: Caller, wire: str, group: str, topic: str) -> changes.GroupBound:
        """Return the change that binds a group name. Raises Busy(BUSY) if there are too many, and Denied(DENIED)."""
        owner, bound = self._check_binding(by, wire, group), self._bound(wire, group)
        if (wire, group) not in self._state.bindings:
            self._state.quotas.admit(Kind.BINDINGS, by, binding_size(group, topic))
        version = 0 if bound is None else bound.version + 1
        return changes.GroupBound(wire, group, topic, next_owner(owner, by), self._elapsed.now_us(), version)

    def _bound(self, wire: str, group: str) -> Binding | None:
        """Return the newest binding of a group name in any process."""
        own, other = self._state.bindings.get((wire, group)), self.remote_bindings.get((wire, group))
        return own if other is None or (own is not None and own.version >= other.version) else other

    def _check_owner(self, by: Caller, topic: str, group: str) -> int:
        """Raise Denied(DENIED) for another user's group. Return the group's owner."""
        owner = self._state.group_owner(topic, group)
        self._broker.check_owner(by, owner, "group", group)
        return owner

    def _check_binding(self, by: Caller, wire: str, group: str) -> int:
        """Raise Denied(DENIED) for a group name, or group, of another user. Return the owner."""
        bound = self._bound(wire, group)
        if bound is None:
            return UNOWNED
        self._broker.check_owner(by, bound.owner, "group", group)
        self._check_owner(by, bound.topic, group)
        return bound.owner

    def _switch(self, group: str, topic: str, wire: str, made: list[changes.Change], by: Caller) -> Group | None:
        """Bind the protocol's group name to this topic.

        Returns the group of the previous topic, or None. The generations of the new group must be above those of the
        old one.
        """
        self._check_binding(by, wire, group)
        bound = self._bound(wire, group)
        if bound is not None and bound.topic == topic:
            return None
        made.append(self._bind(by, wire, group, topic))
        return None if bound is None else self._leave(bound.topic, group, wire, made)

    def _leave(self, topic: str, group: str, wire: str, made: list[changes.Change]) -> Group | None:
        """Let all members of a protocol leave a group. Return the group before that; None if there is none."""
        old = self._state.groups.get((topic, group))
        if old is None:
            return None
        gone = [member.id for member in old.members if member.wire == wire]
        remaining = old.changed(gone=gone, partition_count=old.partition_count)
        if remaining is not old:
            made.append(self._difference(remaining, old, gone))
        return old

    def _stored(self, group: Group) -> changes.GroupStored:
        return stored(group, self._elapsed.now_us())

    def _difference(
        self, now: Group, was: Group, gone: Sequence[str], joined: Sequence[Member] = ()
    ) -> changes.GroupChanged:
        return difference(now, was, gone=gone, joined=joined, at_us=self._elapsed.now_us())

    def _expired(self, group: Group, now: float) -> list[str]:
        """Return the members that exceeded the timeout, or whose connection was closed by a restart."""
        seen = self._seen.get((group.topic, group.name), {})
        oldest = now - self._settings.member_timeout_s
        return [
            member.id
            for member in group.members
            if seen.get(member.id, -math.inf if member.connected else self._started_at) < oldest
        ]

    def _check(
        self, group: str, topic: str, member: str, generation: int | None, *, wire: str, by: Caller, now: float
    ) -> Group:
        """Return the member's group after all checks, in the order that ``heartbeat`` documents."""
        found = self._state.groups.get((topic, group))
        bound = self._bound(wire, group)
        moved = bound is not None and bound.topic != topic
        if found is None or (moved and not any(one.id == member and one.wire == wire for one in found.members)):
            raise _group_missing(group, topic)
        self._check_owner(by, topic, group)
        refreshed = self._refreshed(found, now)
        if generation is not None and generation != refreshed.generation:
            raise Conflict(
                ErrorCode.GENERATION_STALE,
                f"generation is stale group={group!r} current={refreshed.generation} got={generation}",
            )
        if not refreshed.has(member):
            raise Missing(ErrorCode.MEMBER_MISSING, f"no such member group={group!r} member={member!r}")
        return refreshed

    def _refreshed(self, found: Group, now: float) -> Group:
        gone = self._expired(found, now)
        refreshed = found.changed(gone=gone, partition_count=self._count(found))
        if refreshed is not found:
            self._change(refreshed, found, gone)
        return refreshed

    def _change(self, group: Group, was: Group, gone: Sequence[str] = ()) -> None:
        self._broker.change_all([self._difference(group, was, gone)], level=Level.WRITTEN, done=None)
        self._forget(group)

    def _owned(self, group: Group, member: str) -> Sequence[int]:
        """Return the partitions that a member may read now.

        These are its share, except partitions that other members must still release.
        """
        share = group.share(member)
        if not self.holdings:
            return share
        topic = self._broker.group_topic(group.topic)
        held = None if topic is None else self.holdings.find(group.name, topic.id)
        return share if held is None else held.owned(member, share)

    def _mark(self, group: Group, member: str, now: float) -> None:
        seen = self._seen.setdefault((group.topic, group.name), {})
        seen[member] = max(seen.get(member, now), now)  # keep infinity, which marks a connected member
        self._state.touch(group.name)

    def _forget(self, group: Group) -> None:
        """Record that a group has changed, and drop the heartbeat times of its former members."""
        self.holdings.turned(group.name)
        self._changed[group.topic, group.name] = self._clock.now_us()
        # groups that expire or end with their topic are removed from the state only
        groups = self._state.groups
        if len(self._changed) > 2 * len(groups) + 16:
            self._changed = {key: at for key, at in self._changed.items() if key in groups}
        if len(self._seen) > 2 * len(groups) + 16:
            self._seen = {key: seen for key, seen in self._seen.items() if key in groups}
        seen = self._seen.get((group.topic, group.name), {})
        for member in [member for member in seen if not group.has(member)]:
            del seen[member]


def _not_assigned(member: str, partition: int) -> Conflict:
    return Conflict(
        ErrorCode.PARTITION_NOT_ASSIGNED,
        f"partition is not assigned to this member member={member!r} partition={partition}",
    )


def _group_missing(group: str, topic: str) -> Missing:
    return Missing(ErrorCode.GROUP_MISSING, f"no such group group={group!r} topic={topic!r}")
