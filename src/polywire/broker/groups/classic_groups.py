"""The broker's verbs about classic groups: all of them, their timers, owners and limits (concepts: groups#classic-groups).

Promises: who waits is answered once, on the loop and never from inside a call; where members of other wires are in a group of the same name,
the broker assigns to all of them, or refuses whom it cannot assign to. Generations that members have settled on outlive the broker; positions
are in the table that all wires share.
Must not know: wires, sockets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from polywire.broker import changes
from polywire.broker.groups.classic import ClassicGroup, Phase
from polywire.broker.groups.classic_members import Asked, IdGiven, Join, Joined, Limits, MemberView, Synced, Writing
from polywire.broker.groups.classic_sharings import Sharings
from polywire.broker.groups.classic_stored import restored, stored
from polywire.broker.groups.commits import Commit, Commits
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.offsets import Position
from polywire.broker.groups.seats import Seats
from polywire.broker.owners import NO_CALLER, UNOWNED, Caller, heir
from polywire.broker.quotas import MEMBER_BYTES, Kind
from polywire.broker.settings import SECOND_US, BrokerSettings, check_name
from polywire.broker.sliced import SlicedWork
from polywire.broker.state import State, group_size
from polywire.clock import Clock
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Missing
from polywire.log.base import Completion, Loop
from polywire.types import Level, PositionKind

KEEP_AGAIN_S: Final = 1.0  # until a group is kept that could not be: when peers that were refused come back, too


class Host(Protocol):
    """What classic groups ask of the broker."""

    def change_all(self, made: Sequence[changes.Change], *, level: Level, done: Completion[int] | None) -> None:
        """Journal changes as one group and make them true."""

    def check_owner(self, by: Caller, owner: int, what: str, name: str) -> None:
        """Refuse what belongs to another user. Raises Denied(DENIED)."""

    def topic_name(self, key: changes.TopicKey) -> str:
        """Full name of a topic that positions are keyed by."""


@dataclass(frozen=True, slots=True)
class ClassicView:
    """A group as lists show it, whatever wires its members speak."""

    name: str
    phase: Phase
    protocol_type: str = ""
    protocol: str = ""
    members: tuple[MemberView, ...] = ()


@dataclass(slots=True)
class _Entry:
    """A group and what belongs to it here; ``has_begun``: it had a member; ``kept``: the revision that is in the journal.

    Invariant: ``owner`` is charged for ``members`` and ``bytes``.
    """

    group: ClassicGroup
    owner: int
    members: int = 0
    bytes: int = 0
    by: Caller = NO_CALLER
    empty_at: float = 0.0
    has_begun: bool = False
    kept: int = 0
    waiting: dict[tuple[str, Asked], Completion[Any]] = field(default_factory=dict)
    timer: Any = None
    timer_at: float = math.inf


class ClassicGroups:
    """All classic groups of one broker.

    Invariant: ``_table`` has the group of every entry, for those who must know whether a name has members.
    """

    __slots__ = (
        "_clock",
        "_commits",
        "_coordinator",
        "_entries",
        "_host",
        "_limits",
        "_loop",
        "_settings",
        "_sharings",
        "_state",
        "_table",
    )

    def __init__(
        self,
        host: Host,
        state: State,
        *,
        settings: BrokerSettings,
        loop: Loop,
        clock: Clock,
        commits: Commits,
        coordinator: Coordinator,
        seats: Seats,
        table: dict[str, ClassicGroup],
        sliced: SlicedWork,
    ) -> None:
        self._host = host
        self._state = state
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._commits = commits
        self._coordinator = coordinator
        self._table = table
        self._sharings = Sharings(
            seats=seats,
            coordinator=coordinator,
            table=table,
            sliced=sliced,
            loop=loop,
            clock=clock,
            on_seated=self._on_seated,
        )
        self._entries: dict[str, _Entry] = {}
        self._limits = Limits(settings.members_max, settings.group_bytes_max)
        coordinator.on_meeting(self._meet)

    # Members

    def join(
        self, group: str, join: Join, *, new_id: str, by: Caller = NO_CALLER, done: Completion[IdGiven | Joined]
    ) -> None:
        """Become a member, or stay one, in topics that ``check_topics`` has let pass; ``done`` is told of the generation once all others have
        joined.

        new_id: for who has none; nobody has had it before. by: who asks; the group becomes theirs if it is nobody's.
        Raises Invalid(INVALID_NAME, INVALID_SESSION_TIMEOUT), Denied(DENIED) for another user's group, Conflict(MEMBER_FENCED),
        Missing(MEMBER_MISSING), Busy(BUSY), Conflict(GROUP_PROTOCOL_MISMATCH), also where the name has members of other wires in a topic.
        """
        check_name(group, self._settings.name_bytes_max)
        self._check_session(join.session_timeout_s)
        found = self._entries.get(group)
        has_others = self._check_others(group, found, join, by)
        entry = found or self._begin(group, by)
        self._host.check_owner(by, entry.owner, "group", group)
        if not join.member_id:
            self._state.quotas.admit(Kind.MEMBERS, by, MEMBER_BYTES + join.size, owner=entry.owner)
        try:
            if has_others and not entry.group.is_shared:
                self._sharings.share(entry.group, by)
            member = entry.group.join(join, new_id=new_id, now=self._clock.monotonic())
            entry.by = by
            self._sharings.joined(entry.group, member, by)
            entry.owner = self._inherit(entry, heir(entry.owner, by))
            self._wait(entry, member, Asked.JOIN, done)
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
        """Refuse who may not use a group in one of these topics, one after the other: to be gone through before ``join``, in slices where
        there are many. Raises Denied(DENIED)."""
        for topic in topics:
            self._host.check_owner(by, self._state.group_owner(topic, group), "group", group)
            yield

    def _check_others(self, group: str, entry: _Entry | None, join: Join, by: Caller) -> bool:
        """Refuse who cannot be assigned to where others are; returns whether they are."""
        there = join.topics & self._state.group_topics.get(group, frozenset())
        for _ in self.check_topics(group, there, by=by):
            pass  # others may have come since
        is_shared = entry is not None and entry.group.is_shared
        has_others = is_shared or any(self._sharings.has_others(group, topic) for topic in there)
        known = ClassicGroup(group, self._limits) if entry is None else entry.group
        if has_others and not known.can_be_shared(join):
            raise Conflict(
                ErrorCode.GROUP_PROTOCOL_MISMATCH,
                f"the group has members of other protocols, and this member's assignor is not supported group={group!r}",
            )
        return has_others

    # Sharing with members of other wires

    def _meet(self, group: str, topic: str) -> None:
        """Somebody on another wire is about to join: a group that has shared the work out itself does so no more.

        Raises Conflict(GROUP_PROTOCOL_MISMATCH) where the broker cannot assign to its members.
        """
        entry = self._entries.get(group)
        self._sharings.met(group)
        if entry is None or entry.group.is_shared or not entry.group.reads(topic):
            return
        if not entry.group.can_be_shared():
            raise Conflict(
                ErrorCode.GROUP_PROTOCOL_MISMATCH,
                f"the group's Kafka members assign the partitions of the topic themselves group={group!r} topic={topic!r}",
            )
        self._sharings.share(entry.group, entry.by)
        entry.group.rebalance(self._clock.monotonic())
        self._settle(entry)

    def _on_seated(self, group: str) -> None:
        """The members of a group that is shared have their assignments."""
        entry = self._entries[group]
        entry.group.settle(self._clock.monotonic())
        self._settle(entry)

    def _begin(self, group: str, by: Caller) -> _Entry:
        owner = heir(UNOWNED, by)
        size = group_size(group, "")
        self._state.quotas.admit(Kind.GROUPS, by, size, owner=owner)
        self._state.usage.charge(Kind.GROUPS, owner, 1, size)
        return self._add(_Entry(ClassicGroup(group, self._limits, max(self._last_generation(group), 0)), owner))

    def _add(self, entry: _Entry) -> _Entry:
        self._entries[entry.group.name] = entry
        self._table[entry.group.name] = entry.group
        return entry

    def restore(self, wire: str, writing: Writing) -> None:
        """Go on with a wire's groups as the broker before this one left them: members have their generation, and a whole session from now.

        writing: how its members write what is assigned. A group that has had later generations, or is shared, begins anew.
        """
        ended: list[changes.Change] = []
        for found in self._state.classic_groups.values():
            if found.name in self._entries or any(member.wire != wire for member in found.members):
                continue
            topics = {topic for member in found.members for topic in member.topics}
            there = topics & self._state.group_topics.get(found.name, frozenset())
            is_late = self._last_generation(found.name) > found.generation
            if is_late or any(self._sharings.has_others(found.name, topic) for topic in there):
                ended.append(changes.ClassicGroupDeleted(found.name))
                continue
            group = restored(found, self._limits, writing, self._clock.monotonic())
            entry = _Entry(group, found.owner, by=Caller(None, found.owner))
            entry.kept = group.revision
            self._state.usage.charge(Kind.GROUPS, entry.owner, 1, group_size(found.name, ""))
            self._settle(self._add(entry))
        with suppress(BrokerError):  # the disk is full: the next start finds the same
            self._host.change_all(ended, level=Level.WRITTEN, done=None)

    def _keep(self, entry: _Entry) -> None:
        """Have what members have settled on outlive the broker; while they have not, nothing does."""
        group = entry.group
        if entry.kept == group.revision:
            return
        made = stored(group, entry.owner, bytes_max=self._settings.batch_bytes_max // 2)
        change = made or changes.ClassicGroupDeleted(group.name)
        try:
            if made is not None or group.name in self._state.classic_groups:
                self._host.change_all((change,), level=Level.WRITTEN, done=None)
        except (
            BrokerError
        ):  # no space, or the log is behind: what is kept has another generation, and is not taken for this one
            return
        entry.kept = group.revision

    def _last_generation(self, group: str) -> int:
        """The latest that positions were stored in, which is what a restart leaves of a group's generations; -1 for none."""
        found = self._state.positions.of(PositionKind.GROUP, group)
        return max((position.generation for _, _, position in found), default=-1)

    def _inherit(self, entry: _Entry, owner: int) -> int:
        """What a group takes is its owner's."""
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

    def _wait(self, entry: _Entry, member: str, asked: Asked, done: Completion[Any]) -> None:
        """Who asks again takes the place of its earlier question, which nobody reads any more."""
        earlier = entry.waiting.get((member, asked))
        if earlier is not None:
            again = Conflict(
                ErrorCode.GROUP_REBALANCING, f"a newer request of the member replaced this one member={member!r}"
            )
            self._loop.call_soon(earlier, again)
        entry.waiting[member, asked] = done

    def _settle(self, entry: _Entry) -> None:
        """Something happened to a group: answer who waited, count what it takes now, and look again when something is due."""
        group = entry.group
        for member_id, asked, answer in group.take_answers():
            done = entry.waiting.pop((member_id, asked), None)
            assert done is not None, "only who asked is answered"
            self._loop.call_soon(done, answer)
        entry.has_begun |= group.phase is not Phase.EMPTY
        self._sharings.follow(group)
        self._keep(entry)
        count, size = group.member_count, group.bytes
        more = (count - entry.members) * MEMBER_BYTES + size - entry.bytes
        self._state.usage.charge(Kind.MEMBERS, entry.owner, count - entry.members, more)
        entry.members, entry.bytes = count, size
        if group.phase is Phase.EMPTY and not count:
            entry.empty_at = self._clock.monotonic()
        if group.phase is Phase.EMPTY and not count and not entry.has_begun:
            self._forget(entry)  # nobody has come who was let in
        else:
            self._schedule(entry)

    def _schedule(self, entry: _Entry) -> None:
        """Look at a group when its next deadline has come, or soon where it could not be kept; one nobody uses is forgotten after a while."""
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
        entry.timer = self._loop.call_later(max(due - self._clock.monotonic(), 0.0), self._look_at, entry)

    def _look_at(self, entry: _Entry) -> None:
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
            self._keep(entry)  # in case it could not be
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
        """Ask for what was assigned, once the leader has brought it. Raises as ``ClassicGroup.sync``, Denied(DENIED)."""
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
            self._wait(entry, member_id, Asked.SYNC, done)
        finally:
            self._settle(entry)

    def heartbeat(
        self, group: str, member_id: str, generation: int, *, instance_id: str | None = None, by: Caller = NO_CALLER
    ) -> None:
        """A sign of life. Raises as ``ClassicGroup.heartbeat``, Denied(DENIED)."""
        entry, now = self._find(group, member_id, by), self._clock.monotonic()
        if self._sharings.is_due(entry.group):
            entry.group.rebalance(now)
            self._settle(entry)
        entry.group.heartbeat(member_id, generation, instance_id=instance_id, now=now)

    def leave(self, group: str, member_id: str, *, instance_id: str | None = None, by: Caller = NO_CALLER) -> None:
        """Stop being a member. Raises as ``ClassicGroup.leave``, Denied(DENIED)."""
        entry = self._find(group, member_id, by)
        try:
            entry.group.leave(member_id, instance_id=instance_id, now=self._clock.monotonic())
        finally:
            self._settle(entry)

    def _find(self, group: str, member_id: str, by: Caller) -> _Entry:
        entry = self._entries.get(group)
        if entry is None:
            raise Missing(ErrorCode.MEMBER_MISSING, f"no such member group={group!r} member={member_id!r}")
        self._host.check_owner(by, entry.owner, "group", group)
        return entry

    # Positions

    def check_commit(
        self, group: str, member_id: str, generation: int, *, instance_id: str | None = None, by: Caller = NO_CALLER
    ) -> None:
        """Refuse who may not store positions of a group now: while it has members, only they may.

        After a restart nobody is known until somebody joins. Until then what was read before may be stored, but not by a generation older
        than the last that stored anything.

        Raises as ``ClassicGroup.check_commit``, Denied(DENIED), Conflict(GENERATION_STALE) for a generation that nobody here knows of.
        """
        entry = self._entries.get(group)
        if entry is not None:
            self._host.check_owner(by, entry.owner, "group", group)
            entry.group.check_commit(member_id, generation, instance_id=instance_id, now=self._clock.monotonic())
        elif generation >= 0 and not 0 <= self._last_generation(group) <= generation:
            raise Conflict(ErrorCode.GENERATION_STALE, f"the group has no generation group={group!r} got={generation}")

    def check_partitions(
        self, group: str, topic: str, member_id: str, partitions: Collection[int], *, by: Caller = NO_CALLER
    ) -> None:
        """Refuse what others read, of who passed ``check_commit``. Raises Missing(MEMBER_MISSING) where the name has members of other wires
        in the topic, Conflict(PARTITION_NOT_ASSIGNED) for what they read, Denied(DENIED)."""
        self._sharings.check(group, topic, member_id, partitions, by)

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
        """Store next offsets by topic's full name and partition number, all of a topic or none, for who passed ``check_commit``.

        Returns why which topics were refused: Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED), Busy(BUSY), Missing(MEMBER_MISSING)
        where the name has members of other wires, Conflict(PARTITION_NOT_ASSIGNED) of what they read. Raises Busy(DISK_FULL).
        """
        made: list[changes.Change] = []
        refused: dict[str, BrokerError] = {}
        for topic, commits in positions.items():
            try:
                self.check_partitions(group, topic, member_id, commits, by=by)
                made.append(self._commits.stored_of_members(topic, commits, group, generation=generation, by=by))
            except BrokerError as error:
                refused[topic] = error
        self._host.change_all(made, level=level, done=done)
        return refused

    def positions(self, group: str, topic: str) -> Mapping[int, Position]:
        """All positions of a group in a topic, by partition number."""
        return self._commits.held(topic, group)

    def subscribed_topics(self, group: str) -> Set[str]:
        """Full names of the topics that members say they read, none of a group that is not there."""
        entry = self._entries.get(group)
        return frozenset() if entry is None else entry.group.topics

    def topics(self, group: str) -> list[str]:
        """Full names of the topics that a group has positions in, is coordinated in, or whose members say that they read them."""
        entry = self._entries.get(group)
        found = set() if entry is None else set(entry.group.topics)
        found |= {self._host.topic_name(key) for key, _, _ in self._state.positions.of(PositionKind.GROUP, group)}
        found.update(self._state.group_topics.get(group, ()))
        return sorted(found)

    # Administration

    def names(self) -> list[str]:
        """All groups there are: with members or positions, of any wire."""
        found = {name for _, name, _ in self._state.positions.owners(PositionKind.GROUP)}
        found.update(self._state.group_topics)
        return sorted(found.union(self._entries))

    def view(self, group: str) -> ClassicView | None:
        """One group, None when there is none. One that the broker assigns shows the members it has in all topics."""
        entry = self._entries.get(group)
        if entry is not None and entry.members:
            known = entry.group
            members = (*known.members, *self._others(group))
            return ClassicView(group, known.phase, known.protocol_type, known.protocol, members)
        topics = self.topics(group)
        members = self._others(group)
        if entry is None and not topics:
            return None
        return ClassicView(group, Phase.STABLE if members else Phase.EMPTY, members=members)

    def _others(self, group: str) -> tuple[MemberView, ...]:
        """Members that the coordinator knows beside those of a classic group."""
        ours = self._sharings.seats(group)
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
        """Whether a group has members of the classic protocol."""
        entry = self._entries.get(group)
        return entry is not None and bool(entry.members)

    def generation(self, group: str) -> int:
        """The generation that a group has, or comes from; -1 for one that is not there."""
        entry = self._entries.get(group)
        return -1 if entry is None else entry.group.generation

    def owner(self, group: str) -> int:
        """Whose group it is, UNOWNED where nobody is a member."""
        entry = self._entries.get(group)
        return UNOWNED if entry is None else entry.owner

    def has_readers(self, group: str, topic: str) -> bool:
        """Whether members of a group read a topic, as far as they say."""
        entry = self._entries.get(group)
        return self._sharings.has_others(group, topic) or (entry is not None and entry.group.reads(topic))

    def delete(
        self, group: str, *, by: Caller = NO_CALLER, level: Level = Level.WRITTEN, done: Completion[int] | None = None
    ) -> None:
        """End a group and its positions in all topics.

        Raises Missing(GROUP_MISSING), Denied(DENIED) for another user's, Conflict(GROUP_NOT_EMPTY), Busy(DISK_FULL).
        """
        entry, topics = self._entries.get(group), self.topics(group)
        if entry is None and not topics:
            raise Missing(ErrorCode.GROUP_MISSING, f"no such group group={group!r}")
        self._host.check_owner(by, self.owner(group), "group", group)
        for topic in topics:
            self._host.check_owner(by, self._state.group_owner(topic, group), "group", group)
            if self._sharings.has_others(group, topic):
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
        self._host.change_all((), level=level, done=done)
