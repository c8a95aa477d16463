"""The one coordinator of consumer groups, whatever wires their members speak (design §7, FLUX dossier §10).

Promises: every change of a group is journalled with the turn that made it, so groups survive restarts with their
generation, assignor and members. When members were last seen is not journalled: after a restart each has one full
timeout. Expiry is lazy: looked at when a verb touches the group. Must not know: sockets, wire words, the journal
beyond its ``Host``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from polywire.broker import changes
from polywire.broker.groups.group import Group, Member, stored
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.state import State
from polywire.clock import Clock
from polywire.errors import Busy, Conflict, ErrorCode, Missing
from polywire.log.base import Done
from polywire.types import Assignor, Level, PositionKind


class Host(Protocol):
    """What the coordinator asks of the broker."""

    def partition_count(self, full_name: str) -> int:
        """Partitions of the topic, the default count while it does not exist (FLUX dossier Q4)."""

    def change_all(self, made: Sequence[changes.Change], *, level: Level, done: Done | None) -> None:
        """Journal changes as one group and make them true; with none, ``done`` follows what was journalled before."""

    def commit_positions(
        self,
        full_name: str,
        offsets: Mapping[int, int],
        kind: PositionKind,
        name: str,
        *,
        generation: int,
        level: Level,
        done: Done | None,
    ) -> None:
        """Store next offsets by partition number, all or none."""


@dataclass(frozen=True, slots=True)
class Membership:
    """A member's place: the group's generation and the member's partitions, ascending."""

    generation: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as lists show it; ``idle_s`` is the time since it was last seen, or since the broker started."""

    id: str
    wire: str
    idle_s: float
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group as lists show it; ``changed_at_us`` is when it last changed since the broker started, None when it did not."""

    topic: str
    name: str
    generation: int
    assignor: Assignor
    members: tuple[MemberView, ...]
    partition_count: int = 0
    changed_at_us: int | None = None


class Coordinator:
    """All groups of one broker.

    Invariant: ``_seen`` holds times of members only; a member without one counts as seen when the broker started.
    ``_changed`` holds when groups that still exist last changed, since the broker started.
    """

    __slots__ = ("_changed", "_clock", "_host", "_seen", "_settings", "_started_at", "_state")

    def __init__(self, host: Host, state: State, settings: BrokerSettings, clock: Clock) -> None:
        self._host = host
        self._state = state
        self._settings = settings
        self._clock = clock
        self._started_at = clock.monotonic()
        self._seen: dict[tuple[str, str], dict[str, float]] = {}
        self._changed: dict[tuple[str, str], int] = {}

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
        level: Level = Level.WRITTEN,
        done: Done | None = None,
    ) -> Membership:
        """Become a member, or stay one; joining again under the same id is free.

        assignor: sets the group's when given; a new group without one deals round robin.
        first_generation: of a group this call creates, before the member is counted.
        named_alone: the wire names groups without their topic, so a name has one topic at a time: joining with another topic takes
            this wire's members out of the old one, and the generation goes on counting in the new one.
        connected: the member lives as long as its connection and needs no sign of life; whoever joins it sees to it that it leaves.
        done: called once the group is journalled at ``level``.
        Raises Invalid(INVALID_NAME), Busy(BUSY) when there are too many groups or members.
        """
        check_name(group, self._settings.name_bytes_max)
        check_name(member, self._settings.name_bytes_max)
        made: list[changes.Change] = []
        left = self._switch(group, topic, wire, made) if named_alone else None
        current = self._state.groups.get((topic, group))
        now = self._clock.monotonic()
        if current is not None:
            wanted = current if left is None else current.succeeding(left)
        elif left is not None:
            wanted = self._begin(topic, group, left.generation + 1, left.assignor)
        else:
            wanted = self._begin(topic, group, first_generation, assignor or Assignor.ROUND_ROBIN)
        if assignor is not None and assignor is not wanted.assignor:
            wanted = wanted.with_assignor(assignor)
        wanted = self._refreshed(wanted, now)
        if not wanted.has(member):
            if len(wanted.members) >= self._settings.members_max:
                raise Busy(ErrorCode.BUSY, f"too many members group={group!r} limit={self._settings.members_max}")
            if self._state.member_count >= self._settings.members_total_max:
                raise Busy(ErrorCode.BUSY, f"too many members in all groups limit={self._settings.members_total_max}")
            wanted = wanted.with_member(Member(member, wire))
        if wanted is not current:
            made.append(stored(wanted))
        self._host.change_all(made, level=level, done=done)
        if wanted is not current:
            self._forget(wanted)
        self._mark(wanted, member, math.inf if connected else now)
        return Membership(wanted.generation, tuple(wanted.assignments[member]))

    def create(
        self,
        group: str,
        topic: str,
        *,
        assignor: Assignor = Assignor.ROUND_ROBIN,
        generation: int = 0,
        level: Level = Level.WRITTEN,
        done: Done | None = None,
    ) -> None:
        """Make a group without members. Raises Conflict(GROUP_EXISTS), Invalid(INVALID_NAME), Busy(BUSY) when there are too many."""
        check_name(group, self._settings.name_bytes_max)
        if (topic, group) in self._state.groups:
            raise Conflict(ErrorCode.GROUP_EXISTS, f"group exists group={group!r} topic={topic!r}")
        begun = self._begin(topic, group, generation, assignor)
        self._host.change_all([stored(begun)], level=level, done=done)

    def sync(self, group: str, topic: str, member: str, generation: int, *, wire: str) -> Membership:
        """The member's place again; counts as a sign of life. Raises as ``heartbeat``."""
        return self.heartbeat(group, topic, member, generation, wire=wire)

    def heartbeat(self, group: str, topic: str, member: str, generation: int | None, *, wire: str) -> Membership:
        """A sign of life. Without a generation it is not compared.

        Raises, in this order, Missing(GROUP_MISSING), Conflict(GENERATION_STALE), Missing(MEMBER_MISSING). An expired member gets
        GENERATION_STALE, because its own call removes it first.
        """
        now = self._clock.monotonic()
        found = self._check(group, topic, member, generation, wire=wire, now=now)
        self._mark(found, member, now)
        return Membership(found.generation, tuple(found.assignments[member]))

    def leave(
        self,
        group: str,
        topic: str,
        member: str,
        generation: int | None,
        *,
        wire: str,
        level: Level = Level.WRITTEN,
        done: Done | None = None,
    ) -> None:
        """Stop being a member; the empty group stays and keeps counting. Without a generation it is not compared.

        Raises as ``heartbeat``.
        """
        found = self._check(group, topic, member, generation, wire=wire, now=self._clock.monotonic())
        without = found.changed(gone=(member,), partition_count=found.partition_count)
        self._host.change_all([stored(without)], level=level, done=done)
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
        level: Level = Level.WRITTEN,
        done: Done | None = None,
    ) -> None:
        """Store the group's next offset of a partition this member owns; a sign of life only with ``refresh``.

        Raises as ``heartbeat``, then Conflict(PARTITION_NOT_ASSIGNED).
        """
        self.commit_all(
            group, topic, member, generation, {partition: offset}, wire=wire, refresh=refresh, level=level, done=done
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
        level: Level = Level.WRITTEN,
        done: Done | None = None,
    ) -> None:
        """Store the group's next offsets by partition, all or none. Raises as ``commit``."""
        self.check_owner(group, topic, member, generation, offsets, wire=wire, refresh=refresh)
        self._host.commit_positions(
            topic, offsets, PositionKind.GROUP, group, generation=generation, level=level, done=done
        )

    def check_owner(
        self,
        group: str,
        topic: str,
        member: str,
        generation: int,
        partitions: Iterable[int],
        *,
        wire: str,
        refresh: bool = False,
    ) -> None:
        """Refuse a member that does not own these partitions in this generation. Raises as ``commit``."""
        now = self._clock.monotonic()
        found = self._check(group, topic, member, generation, wire=wire, now=now)
        owned = found.assignments[member]
        for partition in partitions:
            if partition not in owned:
                raise Conflict(
                    ErrorCode.PARTITION_NOT_ASSIGNED,
                    f"partition is not assigned to member={member!r} partition={partition}",
                )
        if refresh:
            self._mark(found, member, now)

    def delete(self, group: str, topic: str, *, level: Level = Level.WRITTEN, done: Done | None = None) -> None:
        """End a group; its positions go with it. Raises Missing(GROUP_MISSING)."""
        if (topic, group) not in self._state.groups:
            raise _group_missing(group, topic)
        key = changes.split_key(self._state.topic_key(topic))
        positions = changes.PositionsDeleted(PositionKind.GROUP, group, *key, None)
        self._host.change_all([changes.GroupDeleted(topic, group), positions], level=level, done=done)
        self._seen.pop((topic, group), None)
        self._changed.pop((topic, group), None)

    def bind(
        self, wire: str, group: str, topic: str, *, level: Level = Level.WRITTEN, done: Done | None = None
    ) -> None:
        """Have a wire that names groups alone mean this topic by this name; the group itself begins with its first member.

        Raises Invalid(INVALID_NAME), Busy(BUSY) when there are too many names.
        """
        check_name(group, self._settings.name_bytes_max)
        bindings = self._state.bindings
        if (wire, group) not in bindings and len(bindings) >= self._settings.groups_max:
            raise Busy(ErrorCode.BUSY, f"too many names of groups limit={self._settings.groups_max}")
        self._host.change_all([changes.GroupBound(wire, group, topic)], level=level, done=done)

    def bound(self, wire: str) -> dict[str, str]:
        """The topics a wire means by the names of groups, by name."""
        return {name: topic for (of, name), topic in self._state.bindings.items() if of == wire}

    def find(self, group: str, topic: str) -> GroupView | None:
        """A group as it is."""
        found = self._state.groups.get((topic, group))
        return None if found is None else self._view(found, self._clock.monotonic())

    def topic_of(self, wire: str, group: str) -> str | None:
        """The topic a wire that names groups alone means by this name."""
        return self._state.bindings.get((wire, group))

    def views(self, topic: str | None = None) -> list[GroupView]:
        """All groups, or those of a topic, by topic and name, as they are: nobody expires by being looked at."""
        now = self._clock.monotonic()
        keys = sorted(key for key in self._state.groups if topic is None or key[0] == topic)
        return [self._view(self._state.groups[key], now) for key in keys]

    def view(self, group: str, topic: str) -> GroupView | None:
        """One group as it is."""
        found = self._state.groups.get((topic, group))
        return None if found is None else self._view(found, self._clock.monotonic())

    def has_member(self, group: str, topic: str, member: str) -> bool:
        """Whether the group exists and counts this member."""
        found = self._state.groups.get((topic, group))
        return found is not None and found.has(member)

    def _view(self, group: Group, now: float) -> GroupView:
        seen = self._seen.get((group.topic, group.name), {})
        members = tuple(
            MemberView(
                id=member.id,
                wire=member.wire,
                idle_s=max(now - seen.get(member.id, self._started_at), 0.0),
                partitions=tuple(group.assignments[member.id]),
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

    def _begin(self, topic: str, group: str, generation: int, assignor: Assignor) -> Group:
        if len(self._state.groups) >= self._settings.groups_max:
            raise Busy(ErrorCode.BUSY, f"too many groups limit={self._settings.groups_max}")
        return Group(topic, group, generation, assignor, self._host.partition_count(topic))

    def _switch(self, group: str, topic: str, wire: str, made: list[changes.Change]) -> Group | None:
        """Point the wire's name at this topic; returns the group it pointed at before, which the new one goes on from."""
        bound = self._state.bindings.get((wire, group))
        if bound == topic:
            return None
        made.append(changes.GroupBound(wire, group, topic))
        old = None if bound is None else self._state.groups.get((bound, group))
        if old is None:
            return None
        gone = {member.id for member in old.members if member.wire == wire}
        remaining = old.changed(gone=gone, partition_count=old.partition_count)
        if remaining is not old:
            made.append(stored(remaining))
        return old

    def _refreshed(self, group: Group, now: float) -> Group:
        """Without members not seen for longer than the timeout, over the partitions the topic has now."""
        seen = self._seen.get((group.topic, group.name), {})
        oldest = now - self._settings.member_timeout_s
        gone = {member.id for member in group.members if seen.get(member.id, self._started_at) < oldest}
        return group.changed(gone=gone, partition_count=self._host.partition_count(group.topic))

    def _check(self, group: str, topic: str, member: str, generation: int | None, *, wire: str, now: float) -> Group:
        """The group check of FLUX dossier §10; the order of its steps is part of the promise."""
        found = self._state.groups.get((topic, group))
        if found is None or self._state.bindings.get((wire, group), topic) != topic:
            raise _group_missing(group, topic)
        refreshed = self._refreshed(found, now)
        if refreshed is not found:
            self._host.change_all([stored(refreshed)], level=Level.WRITTEN, done=None)
            self._forget(refreshed)
        if generation is not None and generation != refreshed.generation:
            raise Conflict(
                ErrorCode.GENERATION_STALE,
                f"generation is stale group={group!r} current={refreshed.generation} got={generation}",
            )
        if not refreshed.has(member):
            raise Missing(ErrorCode.MEMBER_MISSING, f"no such member group={group!r} member={member!r}")
        return refreshed

    def _mark(self, group: Group, member: str, now: float) -> None:
        seen = self._seen.setdefault((group.topic, group.name), {})
        seen[member] = max(seen.get(member, now), now)  # a connected member stays one

    def _forget(self, group: Group) -> None:
        """The group changed. Times are kept of members only; otherwise the table would grow with every consumer that ever was."""
        self._changed[group.topic, group.name] = self._clock.now_us()
        if len(self._changed) > 2 * len(self._state.groups) + 16:
            self._changed = {key: at for key, at in self._changed.items() if key in self._state.groups}
        seen = self._seen.get((group.topic, group.name), {})
        for member in [member for member in seen if not group.has(member)]:
            del seen[member]


def _group_missing(group: str, topic: str) -> Missing:
    return Missing(ErrorCode.GROUP_MISSING, f"no such group group={group!r} topic={topic!r}")
