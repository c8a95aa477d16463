"""Operations on classic groups, with timers, owners and limits (concepts: groups#classic-groups).

* Every waiting request completes once, on the event loop and never from inside another call.
* If a group of the same name has members of other protocols, the broker assigns partitions to all members. It rejects
  classic members to which it cannot assign partitions.
* A group that is not rebalancing survives a restart of the broker. Committed offsets are in the table that all
  protocols share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any, Final

import msgspec

from polywire.broker import changes
from polywire.broker.groups.classic import ClassicGroup, Phase, restored, stored
from polywire.broker.groups.classic_members import (
    IdGiven,
    Join,
    Joined,
    Limits,
    MemberView,
    Synced,
    WaitingCall,
    Writing,
)
from polywire.broker.groups.commits import Commit, Commits
from polywire.broker.groups.coordinator import Coordinator, GroupBroker
from polywire.broker.groups.memberships import SharedGroups, TopicGroups
from polywire.broker.groups.offsets import Position
from polywire.broker.owners import NO_CALLER, UNOWNED, Caller, next_owner
from polywire.broker.quotas import MEMBER_BYTES, Kind
from polywire.broker.settings import SECOND_US, BrokerSettings, check_name
from polywire.broker.sliced import SlicedWork
from polywire.broker.state import State, group_size
from polywire.clock import Clock
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Missing
from polywire.log.base import Completion, Loop
from polywire.types import Level, PositionKind

KEEP_AGAIN_S: Final = 1.0  # seconds until a failed write of a group is retried; refused clients retry at this rate, too


class ClassicView(msgspec.Struct, frozen=True):
    """A group as shown to clients. Its members may use any protocol."""

    name: str
    phase: Phase
    protocol_type: str = ""
    protocol: str = ""
    members: tuple[MemberView, ...] = ()


class _Entry(msgspec.Struct):
    """A classic group with its timer, its owner and its waiting requests.

    Attributes:
        members, bytes: number and size of the members, as charged to the owner's quota.
        has_begun: the group has had a member.
        kept: the revision that is in the journal.
        waiting: callbacks of waiting requests, by member and kind of request.
    """

    group: ClassicGroup
    owner: int
    members: int = 0
    bytes: int = 0
    by: Caller = NO_CALLER
    empty_at: float = 0.0
    has_begun: bool = False
    kept: int = 0
    waiting: dict[tuple[str, WaitingCall], Completion[Any]] = msgspec.field(default_factory=dict)
    timer: Any = None
    timer_at: float = math.inf


class ClassicGroups:
    """All groups of Kafka's classic protocol.

    Args:
        table: groups by name, for other parts of the broker. This class updates it.
    """

    __slots__ = (
        "_broker",
        "_clock",
        "_commits",
        "_coordinator",
        "_entries",
        "_limits",
        "_loop",
        "_settings",
        "_shared_groups",
        "_state",
        "_table",
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
        table: dict[str, ClassicGroup],
        sliced: SlicedWork,
    ) -> None:
        self._broker = broker
        self._state = state
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._commits = commits
        self._coordinator = coordinator
        self._table = table
        self._shared_groups = SharedGroups(
            topic_groups=topic_groups,
            coordinator=coordinator,
            table=table,
            sliced=sliced,
            loop=loop,
            clock=clock,
            on_assigned=self._on_assigned,
        )
        self._entries: dict[str, _Entry] = {}
        self._limits = Limits(settings.members_max, settings.group_bytes_max)
        coordinator.on_meeting(self._share_partitions)

    # Members

    def join(
        self, group: str, join: Join, *, new_id: str, by: Caller = NO_CALLER, done: Completion[IdGiven | Joined]
    ) -> None:
        """Handle a JoinGroup request. ``done`` is called with the new generation once all members have joined.

        Call ``check_topics`` first. Raises Invalid(INVALID_NAME, INVALID_SESSION_TIMEOUT), Denied(DENIED) for another
        user's group, Conflict(MEMBER_FENCED), Missing(MEMBER_MISSING), Busy(BUSY), and
        Conflict(GROUP_PROTOCOL_MISMATCH). The last one is also raised if the group has members of other protocols and
        the broker cannot assign to this member.

        Args:
            new_id: unique id, for a member that has none.
            by: the caller, who becomes the owner of a group without an owner.
        """
        check_name(group, self._settings.name_bytes_max)
        self._check_session(join.session_timeout_s)
        self._state.shares.check_no_members(group)
        found = self._entries.get(group)
        has_other_protocols = self._check_other_protocols(group, found, join, by)
        entry = found or self._begin(group, by)
        self._broker.check_owner(by, entry.owner, "group", group)
        if not join.member_id:
            self._state.quotas.admit(Kind.MEMBERS, by, MEMBER_BYTES + join.size, owner=entry.owner)
        try:
            if has_other_protocols and not entry.group.is_shared:
                self._shared_groups.share(entry.group, by)
            member = entry.group.join(join, new_id=new_id, now=self._clock.monotonic())
            entry.by = by
            self._shared_groups.joined(entry.group, member, by)
            entry.owner = self._inherit(entry, next_owner(entry.owner, by))
            self._wait(entry, member, WaitingCall.JOIN, done)
        finally:
            self._settle(entry)

    def _check_session(self, timeout_s: float) -> None:
        least, most = self._settings.session_timeout_min_s, self._settings.session_timeout_max_s
        if not least <= timeout_s <= most:
            raise Invalid(
                ErrorCode.INVALID_SESSION_TIMEOUT,
                f"session timeout is out of range got_s={timeout_s} min_s={least} max_s={most}",
            )

    def check_topics(self, group: str, topics: Iterable[str], *, by: Caller) -> Iterator[None]:
        """Raise Denied(DENIED) unless the caller may use the group in each of these topics. Yields after each topic.

        With many topics, run it in several passes of the loop. Call it before ``join``.
        """
        for topic in topics:
            self._broker.check_owner(by, self._state.group_owner(topic, group), "group", group)
            yield

    def _check_other_protocols(self, group: str, entry: _Entry | None, join: Join, by: Caller) -> bool:
        """Return whether members of other protocols are in the group, so that the broker must assign its partitions.

        Raises Conflict(GROUP_PROTOCOL_MISMATCH) if the broker then cannot assign partitions to the joining member.
        """
        there = join.topics & self._state.group_topics.get(group, frozenset())
        for _ in self.check_topics(group, there, by=by):
            pass  # check again: other members may have joined in the meantime
        is_shared = entry is not None and entry.group.is_shared
        has_other_protocols = is_shared or any(self._shared_groups.has_other_protocols(group, topic) for topic in there)
        known = ClassicGroup(group, self._limits) if entry is None else entry.group
        if has_other_protocols and not known.can_be_shared(join):
            raise Conflict(
                ErrorCode.GROUP_PROTOCOL_MISMATCH,
                "the group has members of other protocols, and the broker cannot assign partitions to this member "
                f"(unknown assignor, or too many topics) group={group!r}",
            )
        return has_other_protocols

    # Sharing with members of other protocols

    def _share_partitions(self, group: str, topic: str) -> None:
        """Let the broker assign a classic group's partitions, because a member of another protocol is about to join.

        Raises Conflict(GROUP_PROTOCOL_MISMATCH) if the broker cannot assign to the group's members.
        """
        entry = self._entries.get(group)
        self._shared_groups.recheck(group)
        if entry is None or entry.group.is_shared or not entry.group.reads(topic):
            return
        if not entry.group.can_be_shared():
            raise Conflict(
                ErrorCode.GROUP_PROTOCOL_MISMATCH,
                f"other protocols cannot join: Kafka members assign the topic's partitions themselves group={group!r} topic={topic!r}",
            )
        self._shared_groups.share(entry.group, entry.by)
        entry.group.rebalance(self._clock.monotonic())
        self._settle(entry)

    def _on_assigned(self, group: str) -> None:
        entry = self._entries[group]
        entry.group.settle(self._clock.monotonic())
        self._settle(entry)

    def _begin(self, group: str, by: Caller) -> _Entry:
        owner = next_owner(UNOWNED, by)
        size = group_size(group, "")
        self._state.quotas.admit(Kind.GROUPS, by, size, owner=owner)
        self._state.usage.charge(Kind.GROUPS, owner, 1, size)
        return self._add(_Entry(ClassicGroup(group, self._limits, max(self._last_generation(group), 0)), owner))

    def _add(self, entry: _Entry) -> _Entry:
        self._entries[entry.group.name] = entry
        self._table[entry.group.name] = entry.group
        return entry

    def restore(self, wire: str, writing: Writing) -> None:
        """Restore the classic groups of a protocol after a restart.

        Members keep their generation and get a full session timeout. A group is restored without members if a later
        generation has committed offsets, or if the group has members of other protocols.

        Args:
            writing: encodes the assignments of the protocol's members.
        """
        ended: list[changes.Change] = []
        for found in self._state.classic_groups.values():
            if found.name in self._entries or any(member.wire != wire for member in found.members):
                continue
            topics = {topic for member in found.members for topic in member.topics}
            there = topics & self._state.group_topics.get(found.name, frozenset())
            is_late = self._last_generation(found.name) > found.generation
            if is_late or any(self._shared_groups.has_other_protocols(found.name, topic) for topic in there):
                ended.append(changes.ClassicGroupDeleted(found.name))
                continue
            group = restored(found, self._limits, writing, self._clock.monotonic())
            entry = _Entry(group, found.owner, by=Caller(None, found.owner))
            entry.kept = group.revision
            self._state.usage.charge(Kind.GROUPS, entry.owner, 1, group_size(found.name, ""))
            self._settle(self._add(entry))
        with suppress(BrokerError):  # the disk is full; the next start retries
            self._broker.change_all(ended, level=Level.WRITTEN, done=None)

    def _store_generation(self, entry: _Entry) -> None:
        """Journal the group's generation if it is stable. Otherwise delete the stored one."""
        group = entry.group
        if entry.kept == group.revision:
            return
        made = stored(group, entry.owner, bytes_max=self._settings.batch_bytes_max // 2)
        change = made or changes.ClassicGroupDeleted(group.name)
        try:
            if made is not None or group.name in self._state.classic_groups:
                self._broker.change_all((change,), level=Level.WRITTEN, done=None)
        # The disk is full or the log is busy. The older stored generation does no harm, because a restart ignores it.
        except BrokerError:
            return
        entry.kept = group.revision

    def _last_generation(self, group: str) -> int:
        """Return the latest generation in which an offset was committed, or -1.

        Earlier generations are not restored.
        """
        found = self._state.positions.of(PositionKind.GROUP, group)
        return max((position.generation for _, _, position in found), default=-1)

    def _inherit(self, entry: _Entry, owner: int) -> int:
        if owner != entry.owner:
            self._charge(entry, -1)
            entry.owner = owner
            self._charge(entry, 1)
        return owner

    def _charge(self, entry: _Entry, sign: int) -> None:
        usage = self._state.usage
        usage.charge(Kind.GROUPS, entry.owner, sign, sign * group_size(entry.group.name, ""))
        size = entry.members * MEMBER_BYTES + entry.bytes
        usage.charge(Kind.MEMBERS, entry.owner, sign * entry.members, sign * size)

    def _wait(self, entry: _Entry, member: str, call: WaitingCall, done: Completion[Any]) -> None:
        """Register the callback of a waiting request.

        It replaces the callback of the member's earlier request of the same kind, which fails.
        """
        earlier = entry.waiting.get((member, call))
        if earlier is not None:
            again = Conflict(
                ErrorCode.GROUP_REBALANCING, f"a newer request of the member replaced this one member={member!r}"
            )
            self._loop.call_soon(earlier, again)
        entry.waiting[member, call] = done

    def _settle(self, entry: _Entry) -> None:
        """Respond to waiting members, update quotas and set the timer, after a change of the group."""
        group = entry.group
        for member_id, call, answer in group.take_answers():
            done = entry.waiting.pop((member_id, call), None)
            assert done is not None, "an answer without a waiting call"
            self._loop.call_soon(done, answer)
        entry.has_begun |= group.phase is not Phase.EMPTY
        self._shared_groups.follow(group)
        self._store_generation(entry)
        count, size = group.member_count, group.bytes
        more = (count - entry.members) * MEMBER_BYTES + size - entry.bytes
        self._state.usage.charge(Kind.MEMBERS, entry.owner, count - entry.members, more)
        entry.members, entry.bytes = count, size
        if group.phase is Phase.EMPTY and not count:
            entry.empty_at = self._clock.monotonic()
        if group.phase is Phase.EMPTY and not count and not entry.has_begun:
            self._forget(entry)  # the group has only ids assigned to new members, none of which has joined
        else:
            self._schedule(entry)

    def _schedule(self, entry: _Entry) -> None:
        """Set the timer for the group's next timeout, the retry of a failed write, or the removal of an unused group."""
        due = entry.group.deadline
        if due == math.inf and not entry.members:
            due = entry.empty_at + self._settings.group_expiry_us / SECOND_US
        if entry.kept != entry.group.revision:
            due = min(due, self._clock.monotonic() + KEEP_AGAIN_S)
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
        now = self._clock.monotonic()
        if entry.group.deadline <= now:
            entry.group.expire(now)
            self._settle(entry)
        elif not entry.members and now >= entry.empty_at + self._settings.group_expiry_us / SECOND_US:
            self._forget(entry)
        else:
            self._store_generation(entry)  # retries a write that failed
            self._schedule(entry)

    def _forget(self, entry: _Entry) -> None:
        entry.group.end()
        self._charge(entry, -1)
        del self._entries[entry.group.name]
        del self._table[entry.group.name]
        if entry.timer is not None:
            entry.timer.cancel()

    def sync(
        self,
        group: str,
        member_id: str,
        generation: int,
        assignments: Mapping[str, bytes],
        *,
        instance_id: str | None = None,
        protocol_type: str | None = None,
        protocol: str | None = None,
        by: Caller = NO_CALLER,
        done: Completion[Synced],
    ) -> None:
        """Call ``done`` with the member's assignment once the leader has sent the assignments.

        Raises the same errors as ``ClassicGroup.sync``, and Denied(DENIED).
        """
        entry = self._find(group, member_id, by)
        try:
            entry.group.sync(
                member_id,
                generation,
                assignments,
                instance_id=instance_id,
                protocol_type=protocol_type,
                protocol=protocol,
                now=self._clock.monotonic(),
            )
            self._wait(entry, member_id, WaitingCall.SYNC, done)
        finally:
            self._settle(entry)

    def heartbeat(
        self, group: str, member_id: str, generation: int, *, instance_id: str | None = None, by: Caller = NO_CALLER
    ) -> None:
        """Record a heartbeat. Raises the same errors as ``ClassicGroup.heartbeat``, Denied(DENIED)."""
        entry, now = self._find(group, member_id, by), self._clock.monotonic()
        if self._shared_groups.is_due(entry.group):
            entry.group.rebalance(now)
            self._settle(entry)
        entry.group.heartbeat(member_id, generation, instance_id=instance_id, now=now)

    def leave(self, group: str, member_id: str, *, instance_id: str | None = None, by: Caller = NO_CALLER) -> None:
        """Remove a member. Raises the same errors as ``ClassicGroup.leave``, Denied(DENIED)."""
        entry = self._find(group, member_id, by)
        try:
            entry.group.leave(member_id, instance_id=instance_id, now=self._clock.monotonic())
        finally:
            self._settle(entry)

    def _find(self, group: str, member_id: str, by: Caller) -> _Entry:
        entry = self._entries.get(group)
        if entry is None:
            raise Missing(ErrorCode.MEMBER_MISSING, f"no such member group={group!r} member={member_id!r}")
        self._broker.check_owner(by, entry.owner, "group", group)
        return entry

    # Positions

    def check_commit(
        self, group: str, member_id: str, generation: int, *, instance_id: str | None = None, by: Caller = NO_CALLER
    ) -> None:
        """Check that the caller may commit. While a group has members, only they may.

        A group that could not be restored after a restart has no members until one joins. Until then, offsets may be
        committed in any generation that is not older than the last one with a commit. Raises the same errors as
        ``ClassicGroup.check_commit``, Denied(DENIED), Conflict(GENERATION_STALE) for an older generation.
        """
        entry = self._entries.get(group)
        if entry is not None:
            self._broker.check_owner(by, entry.owner, "group", group)
            entry.group.check_commit(member_id, generation, instance_id=instance_id, now=self._clock.monotonic())
        elif generation >= 0 and not 0 <= self._last_generation(group) <= generation:
            raise Conflict(
                ErrorCode.GENERATION_STALE, f"the group has no such generation group={group!r} got={generation}"
            )

    def check_partitions(
        self, group: str, topic: str, member_id: str, partitions: Collection[int], *, by: Caller = NO_CALLER
    ) -> None:
        """Raise Conflict(PARTITION_NOT_ASSIGNED) for partitions that other members own.

        Call it after ``check_commit``. Also raises Denied(DENIED), and Missing(MEMBER_MISSING) if the group has members
        of other protocols in this topic and the caller is not a member.
        """
        self._shared_groups.check(group, topic, member_id, partitions, by)

    def commit(
        self,
        group: str,
        positions: Mapping[str, Mapping[int, Commit]],
        *,
        generation: int,
        member_id: str = "",
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None,
    ) -> dict[str, BrokerError]:
        """Commit offsets, by full name of the topic and partition number. Call it after ``check_commit``.

        For each topic all offsets are stored, or none. Returns the refused topics with their errors:
        Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED), Busy(BUSY), and those of ``check_partitions``. Raises
        Busy(DISK_FULL).
        """
        made: list[changes.Change] = []
        refused: dict[str, BrokerError] = {}
        for topic, commits in positions.items():
            try:
                self.check_partitions(group, topic, member_id, commits, by=by)
                made.append(self._commits.stored_of_members(topic, commits, group, generation=generation, by=by))
            except BrokerError as error:
                refused[topic] = error
        self._broker.change_all(made, level=level, done=done)
        return refused

    def positions(self, group: str, topic: str) -> Mapping[int, Position]:
        """Return all committed offsets of a group in a topic that clients may see, by partition number."""
        return self._commits.committed(topic, PositionKind.GROUP, group)

    def subscribed_topics(self, group: str) -> Set[str]:
        """Return the full names of the topics that members subscribe to, empty for an unknown group."""
        entry = self._entries.get(group)
        return frozenset() if entry is None else entry.group.topics

    def topics(self, group: str) -> list[str]:
        """Return the full names of the topics in which a group has offsets, members or subscriptions."""
        entry = self._entries.get(group)
        found = set() if entry is None else set(entry.group.topics)
        found |= {self._broker.topic_name(key) for key, _, _ in self._state.positions.of(PositionKind.GROUP, group)}
        found.update(self._state.group_topics.get(group, ()))
        return sorted(found)

    # Administration

    def names(self) -> list[str]:
        """Return the names of all groups with members or offsets, of any protocol."""
        found = {name for _, name, _ in self._state.positions.owners(PositionKind.GROUP)}
        found.update(self._state.group_topics)
        return sorted(found.union(self._entries))

    def view(self, group: str) -> ClassicView | None:
        """Return one group of any protocol, or None if it does not exist.

        If the broker assigns the partitions, the result has the members of all protocols and topics.
        """
        entry = self._entries.get(group)
        if entry is not None and entry.members:
            known = entry.group
            members = (*known.members, *self._members_of_other_protocols(group))
            return ClassicView(group, known.phase, known.protocol_type, known.protocol, members)
        topics = self.topics(group)
        members = self._members_of_other_protocols(group)
        if entry is None and not topics:
            return None
        return ClassicView(group, Phase.STABLE if members else Phase.EMPTY, members=members)

    def _members_of_other_protocols(self, group: str) -> tuple[MemberView, ...]:
        """Return the members of groups with this name that use other protocols."""
        ours = self._shared_groups.member_ids(group)
        views = [self._coordinator.view(group, topic) for topic in sorted(self._state.group_topics.get(group, ()))]
        found = {
            member.id: MemberView(member.id, None, member.wire, "", b"", b"")
            for view in views
            if view is not None
            for member in view.members
            if member.id not in ours
        }
        return tuple(found.values())

    def has_members(self, group: str) -> bool:
        """Return whether a group has members of the classic protocol."""
        entry = self._entries.get(group)
        return entry is not None and bool(entry.members)

    def generation(self, group: str) -> int:
        """Return the current or last generation of a group, or -1 if the group is unknown."""
        entry = self._entries.get(group)
        return -1 if entry is None else entry.group.generation

    def owner(self, group: str) -> int:
        """Return the owner of a group, or UNOWNED if it has no members."""
        entry = self._entries.get(group)
        return UNOWNED if entry is None else entry.owner

    def has_readers(self, group: str, topic: str) -> bool:
        """Return whether members of a group subscribe to a topic."""
        entry = self._entries.get(group)
        return self._shared_groups.has_other_protocols(group, topic) or (entry is not None and entry.group.reads(topic))

    def delete(
        self, group: str, *, by: Caller = NO_CALLER, level: Level = Level.WRITTEN, done: Completion[int] | None = None
    ) -> None:
        """Delete a group and its offsets in all topics.

        Raises Missing(GROUP_MISSING), Denied(DENIED) for another user's group, Conflict(GROUP_NOT_EMPTY),
        Busy(DISK_FULL).
        """
        entry, topics = self._entries.get(group), self.topics(group)
        if entry is None and not topics:
            raise Missing(ErrorCode.GROUP_MISSING, f"no such group group={group!r}")
        self._broker.check_owner(by, self.owner(group), "group", group)
        for topic in topics:
            self._broker.check_owner(by, self._state.group_owner(topic, group), "group", group)
            if self._shared_groups.has_other_protocols(group, topic):
                raise Conflict(
                    ErrorCode.GROUP_NOT_EMPTY,
                    f"the group has members of other protocols group={group!r} topic={topic!r}",
                )
        if entry is not None:
            if entry.group.has_members:
                raise Conflict(ErrorCode.GROUP_NOT_EMPTY, f"the group has members group={group!r}")
            self._forget(entry)
        for topic in topics:
            self._coordinator.delete(group, topic, by=by, level=level)
        self._broker.change_all((), level=level, done=done)
