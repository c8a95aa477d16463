"""State machine of a classic consumer group, whose leader assigns the partitions (concepts: groups#classic-groups).

The broker elects a leader among the members, sends it the metadata of all members, and distributes the assignments that
it returns. The broker does not decode metadata or assignments.

* ``TRANSITIONS`` lists every permitted change of state.
* Every waiting member gets a response, at the latest when the caller calls ``expire`` at ``deadline``.
* An assignment is valid only in its generation.
* A stable group is stored in the journal. After a restart its members get the same responses as before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Final

from polywire.broker.changes import ClassicGroupStored, ClassicMemberStored
from polywire.broker.groups.classic_members import (
    Answer,
    IdGiven,
    Join,
    Joined,
    Limits,
    Member,
    MemberView,
    Synced,
    WaitingCall,
    Writing,
)
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Missing

BROKER: Final = "broker"  # the leader of a group that is shared with other protocols; no member has this id
# pairs of member and topic in a shared group; each takes some 60 us, twice per generation
SEATS_MAX: Final = 2_000
TOPICS_MAX: Final = 100_000  # topics of all members, counted per member; merging this many takes some 5 ms
PATIENCE_MIN_S: Final = 1.0  # shortest time to wait for missing members in a phase, even if all members requested less
# size of one group, which is written with every generation; Apache Kafka has the same limit
KEPT_BYTES_MAX: Final = 1024 * 1024
_MEMBER_BYTES: Final = 64  # lengths and numbers stored for one member
_WEIGHT_BYTES: Final = 256  # this many bytes take as long to encode as a small record


class Phase(Enum):
    """State of a classic group's current generation."""

    EMPTY = "empty"
    PREPARING = "preparing_rebalance"
    COMPLETING = "completing_rebalance"
    STABLE = "stable"
    DEAD = "dead"


TRANSITIONS: Final[Mapping[Phase, frozenset[Phase]]] = {
    # EMPTY to STABLE: a group restored after a restart
    Phase.EMPTY: frozenset({Phase.PREPARING, Phase.STABLE, Phase.DEAD}),
    Phase.PREPARING: frozenset({Phase.COMPLETING, Phase.EMPTY}),
    Phase.COMPLETING: frozenset({Phase.STABLE, Phase.PREPARING}),
    Phase.STABLE: frozenset({Phase.PREPARING}),
    Phase.DEAD: frozenset(),
}


def check_no_classic(groups: Mapping[str, ClassicGroup], name: str, topic: str) -> None:
    """Raise Conflict(GROUP_PROTOCOL_MISMATCH) if the leader of a classic group of this name assigns the topic's
    partitions.
    """
    group = groups.get(name)
    if group is not None and not group.is_shared and group.reads(topic):
        raise Conflict(
            ErrorCode.GROUP_PROTOCOL_MISMATCH,
            f"other protocols cannot join: Kafka members assign the topic's partitions themselves group={name!r} topic={topic!r}",
        )


class ClassicGroup:
    """One group of Kafka's classic protocol.

    Attributes:
        bytes: total size of the members.
        is_shared: whether members of other protocols are in the group, so that the broker assigns the partitions. Set
            it before a call that may begin a generation.
        revision: increases with every change that must survive a restart.

    Args:
        generation: last generation of an earlier group of this name, whose members may still send requests.
    """

    __slots__ = (
        "_answers",
        "_ends_at",
        "_given",
        "_limits",
        "_members",
        "_static",
        "_supported",
        "_topics",
        "bytes",
        "changes",
        "generation",
        "is_shared",
        "leader",
        "name",
        "phase",
        "protocol",
        "protocol_type",
        "revision",
    )

    def __init__(self, name: str, limits: Limits, generation: int = 0) -> None:
        self.name: Final = name
        self.phase = Phase.EMPTY
        self.generation = generation
        self.protocol_type = ""
        self.protocol = ""
        self.leader = ""
        self.bytes = 0
        self.is_shared = False
        self.revision = 0
        self.changes = 0
        self._limits = limits
        self._members: dict[str, Member] = {}
        # ids that clients have received but have not joined with yet, and the times at which these ids expire
        self._given: dict[str, float] = {}
        # member by instance id
        self._static: dict[str, str] = {}
        # number of members that support each assignment protocol
        self._supported: Counter[str] = Counter()
        # topics of all members, None until they are needed
        self._topics: frozenset[str] | None = frozenset()
        # time limit of the phase; in STABLE, the time at which members that have not synced are removed
        self._ends_at = math.inf
        self._answers: list[Answer] = []

    # Queries

    @property
    def member_count(self) -> int:
        """Number of members, including clients that have received an id but have not joined with it yet."""
        return len(self._members) + len(self._given)

    @property
    def has_members(self) -> bool:
        return bool(self._members)

    @property
    def joined_members(self) -> Collection[Member]:
        return self._members.values()

    def member(self, member_id: str) -> Member | None:
        return self._members.get(member_id)

    def can_be_shared(self, join: Join | None = None) -> bool:
        """Return whether the broker can assign partitions to all members, and to the sender of ``join``.

        This requires that the broker knows the assignment format of all of them, and that they subscribe to at most
        ``SEATS_MAX`` topics in total.
        """
        joins = [member.join for member in self._members.values() if join is None or member.id != join.member_id]
        joins += [] if join is None else [join]
        return all(one.writing is not None for one in joins) and sum(len(one.topics) for one in joins) <= SEATS_MAX

    @property
    def members(self) -> tuple[MemberView, ...]:
        """All members as shown to clients."""
        return tuple(
            MemberView(
                id=member.id,
                instance_id=member.join.instance_id,
                client_id=member.join.client_id,
                client_host=member.join.client_host,
                metadata=member.metadata.get(self.protocol, b""),
                assignment=member.assignment,
            )
            for member in self._members.values()
        )

    def reads(self, topic: str) -> bool:
        return any(topic in member.join.topics for member in self._members.values())

    @property
    def topics(self) -> frozenset[str]:
        """All topics that members subscribe to."""
        if self._topics is None:
            self._topics = frozenset().union(*(member.join.topics for member in self._members.values()))
        return self._topics

    @property
    def deadline(self) -> float:
        """Time at which ``expire`` must be called next, or infinity if nothing can expire."""
        members = min((member.gone_at for member in self._members.values()), default=math.inf)
        return min(members, min(self._given.values(), default=math.inf), self._ends_at)

    def take_answers(self) -> list[Answer]:
        """Return the responses to waiting JoinGroup and SyncGroup requests that were added since the last call, in
        order.
        """
        answers, self._answers = self._answers, []
        return answers

    # Joining

    def join(self, join: Join, *, new_id: str, now: float) -> str:
        """Handle a JoinGroup request.

        Return the id of the member to which ``take_answers`` will address the response. Raises
        Conflict(GROUP_PROTOCOL_MISMATCH, MEMBER_FENCED), Missing(MEMBER_MISSING), Busy(BUSY).

        Args:
            new_id: id for a member that has none.
        """
        assert self.phase is not Phase.DEAD, "a deleted group is not used again"
        self._check_protocols(join)
        known_id = join.member_id or self._static.get(join.instance_id or "", "")
        member = self._members.get(known_id)
        if not join.member_id and member is not None:
            self._admit(join, instead=member)
            return self._replace(member, join, new_id, now)
        if not join.member_id:
            self._admit(join)
            if join.id_first and join.instance_id is None:
                self._given[new_id] = now + join.session_timeout_s
                self._answers.append(Answer(new_id, WaitingCall.JOIN, IdGiven(new_id)))
                return new_id
            return self._enter(new_id, join, now)
        if join.member_id in self._given:
            if join.instance_id in self._static:
                raise self._fenced(join.member_id)
            self._admit(join, given=True)
            del self._given[join.member_id]
            return self._enter(join.member_id, join, now)
        member = self._find(join.member_id, join.instance_id)
        self._admit(join, instead=member)
        return self._join_again(member, join, now)

    def _check_protocols(self, join: Join) -> None:
        """Raise Conflict for another protocol type, or if the members have no common assignment protocol."""
        names = {name for name, _ in join.protocols}
        if not self._members:
            fits = bool(join.protocol_type and names)
        else:
            count = len(self._members)
            fits = join.protocol_type == self.protocol_type and any(self._supported[name] == count for name in names)
        if not fits:
            raise Conflict(
                ErrorCode.GROUP_PROTOCOL_MISMATCH,
                f"the members have no protocol in common group={self.name!r}",
            )

    def _admit(self, join: Join, *, given: bool = False, instead: Member | None = None) -> None:
        """Raise Busy(BUSY) if the group would exceed its limits of members, topics or metadata bytes.

        Args:
            given: the member joins with an id that the group has assigned and already counts.
            instead: member that this one replaces.
        """
        limits = self._limits
        if not given and instead is None and self.member_count >= limits.members_max:
            raise Busy(ErrorCode.BUSY, f"too many members group={self.name!r} limit={limits.members_max}")
        others = [member.join.topics for member in self._members.values() if member is not instead]
        if len(join.topics) + sum(map(len, others)) > TOPICS_MAX:
            raise Busy(
                ErrorCode.BUSY,
                f"members of the group subscribe to too many topics group={self.name!r} limit={TOPICS_MAX}",
            )
        freed = 0 if instead is None else instead.join.size
        if self.bytes - freed + join.size > limits.bytes_max:
            raise Busy(
                ErrorCode.BUSY,
                f"metadata of the group's members is too large group={self.name!r} limit={limits.bytes_max}",
            )

    def _enter(self, id_: str, join: Join, now: float) -> str:
        if not self._members:
            self.protocol_type = join.protocol_type
        self._put(Member(id_, join, now, is_joining=True))
        self._rebalance(now)
        return id_

    def _put(self, member: Member) -> None:
        self._members[member.id] = member
        self.changes += 1
        self._topics = None
        self._supported.update(list(member.metadata))
        if member.join.instance_id is not None:
            self._static[member.join.instance_id] = member.id
        self.bytes += member.size

    def _take(self, member: Member) -> None:
        del self._members[member.id]
        self.changes += 1
        self._topics = None
        self._supported.subtract(list(member.metadata))
        self._supported = +self._supported
        if member.join.instance_id is not None:
            del self._static[member.join.instance_id]
        self.bytes -= member.size

    def _rejoin(self, member: Member, join: Join, now: float, *, id_: str | None = None) -> Member:
        """Replace a member's metadata and timeouts, and its id if ``id_`` is given.

        The member retains its position in the join order.
        """
        order = [id_ if one == member.id and id_ is not None else one for one in self._members]
        self._take(member)
        renewed = Member(
            id_ or member.id,
            join,
            now,
            assignment=member.assignment,
            is_new=member.is_new,
            is_joining=member.is_joining,
            is_syncing=member.is_syncing,
            has_synced=member.has_synced,
        )
        self._put(renewed)
        self._members = {one: self._members[one] for one in order}
        self.revision += 1
        return renewed

    def _join_again(self, member: Member, join: Join, now: float) -> str:
        """Handle a JoinGroup request of a current member.

        In a stable generation this begins a rebalance only if the member is the leader or its metadata has changed.
        """
        changed = member.join.protocols != join.protocols
        if changed or member.join != join:
            member = self._rejoin(member, join, now)
        member.heard_at = now
        leads_stable = self.phase is Phase.STABLE and member.id == self.leader
        if self.phase is not Phase.PREPARING and not changed and not leads_stable:
            self._answer_joined(member)
            return member.id
        member.is_joining = True
        self._rebalance(now)
        return member.id

    def _replace(self, old: Member, join: Join, new_id: str, now: float) -> str:
        """Give a returning static member a new id, and fence its old id."""
        self._refuse(old, self._fenced(old.id))
        led = old.id == self.leader
        member = self._rejoin(old, join, now, id_=new_id)
        if led:
            self.leader = new_id
        if self.phase is Phase.STABLE and self._choose() == self.protocol:
            leader = old.id if led and not join.may_skip else self.leader
            self._answer_joined(member, leader=leader, skip=led and join.may_skip)
            return new_id
        member.is_joining = True
        self._rebalance(now)
        return new_id

    def _answer_joined(self, member: Member, *, leader: str | None = None, skip: bool = False) -> None:
        leader = self.leader if leader is None else leader
        self._answers.append(
            Answer(
                member.id,
                WaitingCall.JOIN,
                Joined(
                    member_id=member.id,
                    generation=self.generation,
                    protocol_type=self.protocol_type,
                    protocol=self.protocol,
                    leader=leader,
                    members=self.members if member.id == leader else (),
                    skip_assignment=skip,
                ),
            )
        )

    # Rebalancing

    def _go(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"no such transition {self.phase} {phase}"
        self.phase = phase
        self.revision += 1

    def resume(self, members: Collection[Member], *, protocol_type: str, protocol: str, leader: str) -> None:
        """Restore a stored generation after a restart. The group must be empty."""
        for member in members:
            self._put(member)
        self.protocol_type, self.protocol, self.leader = protocol_type, protocol, leader
        self._go(Phase.STABLE)

    def rebalance(self, now: float) -> None:
        """Begin a rebalance: all members have to rejoin."""
        if self._members:
            self._rebalance(now)

    def _rebalance(self, now: float) -> None:
        if self.phase is not Phase.PREPARING:
            rebalancing = Conflict(
                ErrorCode.GROUP_REBALANCING, f"the group is rebalancing (join again) group={self.name!r}"
            )
            for member in self._members.values():
                if member.is_syncing:
                    member.is_syncing = False
                    member.heard_at = now
                    self._answers.append(Answer(member.id, WaitingCall.SYNC, rebalancing))
            self._go(Phase.PREPARING)
            self._ends_at = now + self._patience()
        self._complete_if_all_joined(now)

    def _patience(self) -> float:
        """Return the longest rebalance timeout of all members, but at least ``PATIENCE_MIN_S``."""
        return max([PATIENCE_MIN_S, *[member.join.rebalance_timeout_s for member in self._members.values()]])

    def _complete_if_all_joined(self, now: float) -> None:
        if not self._members or (not self._given and all(member.is_joining for member in self._members.values())):
            self._complete(now)

    def _complete(self, now: float) -> None:
        """Begin a new generation after all members have joined or the rebalance timeout has passed.

        Static members that did not join remain members until their session ends.
        """
        for member in [one for one in self._members.values() if not one.is_joining and not one.is_static]:
            self._take(member)
        joined = [member for member in self._members.values() if member.is_joining]
        if self._members and not joined:
            self._ends_at = now + self._patience()
            return
        self.generation += 1
        if not joined:
            self.protocol = self.protocol_type = self.leader = ""
            self._ends_at = math.inf
            self._go(Phase.EMPTY)
            return
        self.protocol = self._choose()
        if self.leader not in self._members or not self._members[self.leader].is_joining:
            self.leader = joined[0].id
        self._go(Phase.COMPLETING)
        self._ends_at = now + self._patience()
        for member in self._members.values():
            member.has_synced = False
            self._assign(member, b"")
        if self.is_shared:
            self.leader = BROKER
        for member in joined:
            member.is_joining = member.is_new = False
            member.heard_at = now
            self._answer_joined(member)

    def _choose(self) -> str:
        """Return the assignment protocol with most votes among those that all members support.

        If several have equally many votes, return the current one, or else the one that was named first.
        """
        count = len(self._members)
        votes: Counter[str] = Counter()
        for member in self._members.values():
            votes[next(name for name in member.metadata if self._supported[name] == count)] += 1
        return max(votes, key=lambda name: (votes[name], name == self.protocol))

    def _assign(self, member: Member, assignment: bytes) -> None:
        self.bytes += len(assignment) - len(member.assignment)
        member.assignment = assignment

    def sync(
        self,
        member_id: str,
        generation: int,
        assignments: Mapping[str, bytes],
        *,
        instance_id: str | None = None,
        protocol_type: str | None = None,
        protocol: str | None = None,
        now: float,
    ) -> None:
        """Handle a SyncGroup request.

        ``take_answers`` returns the response once the leader has sent the assignments. The leader's request contains
        the assignments of all members. A protocol type or protocol of None is not compared. Raises the same errors as
        ``heartbeat``, Conflict(GROUP_PROTOCOL_MISMATCH) for another type or protocol, Busy(BUSY) if the assignments are
        too large.
        """
        member = self._find(member_id, instance_id)
        self._check_generation(generation)
        if protocol_type not in (None, self.protocol_type) or protocol not in (None, self.protocol):
            raise Conflict(
                ErrorCode.GROUP_PROTOCOL_MISMATCH,
                f"the group has another protocol got={protocol!r} group={self.name!r}",
            )
        self._check_settled()
        member.heard_at = now
        if self.phase is Phase.COMPLETING and member_id == self.leader:
            self._put_assignments(assignments, self._members.values())
            self._go(Phase.STABLE)
        member.is_syncing = True
        if self.phase is Phase.STABLE:
            self._answer_synced(now)

    def settle(self, now: float) -> None:
        """Complete the rebalance of a group whose partitions the broker assigns.

        ``assign`` must have been called for every member before.
        """
        assert self.leader == BROKER, "otherwise the leader settles the group"
        self._go(Phase.STABLE)
        self._answer_synced(now)

    def assign(self, member_id: str, assignment: bytes) -> None:
        """Set a member's assignment, in a group whose partitions the broker assigns.

        Raises Missing(MEMBER_MISSING), Busy(BUSY).
        """
        self._put_assignments({member_id: assignment}, [self._find(member_id, None)])

    def _put_assignments(self, assignments: Mapping[str, bytes], members: Collection[Member]) -> None:
        """Set the assignments of ``members``.

        A member that is not in ``assignments`` gets an empty one. Raises Busy(BUSY).
        """
        known = {id_: data for id_, data in assignments.items() if id_ in self._members}
        size, limit = sum(map(len, known.values())), self._limits.bytes_max
        if self.bytes + size > limit:
            raise Busy(ErrorCode.BUSY, f"assignments are too large group={self.name!r} bytes={size} limit={limit}")
        for member in members:
            self._assign(member, known.get(member.id, b""))

    def _answer_synced(self, now: float) -> None:
        for member in self._members.values():
            if member.is_syncing:
                member.is_syncing = False
                member.has_synced = True
                member.heard_at = now
                synced = Synced(self.protocol_type, self.protocol, member.assignment)
                self._answers.append(Answer(member.id, WaitingCall.SYNC, synced))
        if all(member.has_synced for member in self._members.values()):
            self._ends_at = math.inf

    # Members

    def _find(self, member_id: str, instance_id: str | None) -> Member:
        """Return a member.

        Raises Missing(MEMBER_MISSING), or Conflict(MEMBER_FENCED) if another member uses its instance id.
        """
        holder = None if instance_id is None else self._static.get(instance_id)
        if holder is not None and holder != member_id:
            raise self._fenced(member_id)
        member = self._members.get(member_id)
        if member is None or (instance_id is not None and holder is None):
            raise Missing(ErrorCode.MEMBER_MISSING, f"no such member group={self.name!r} member={member_id!r}")
        return member

    def _fenced(self, member_id: str) -> Conflict:
        return Conflict(
            ErrorCode.MEMBER_FENCED, f"another member has this instance id group={self.name!r} member={member_id!r}"
        )

    def _check_generation(self, generation: int) -> None:
        if generation != self.generation:
            raise Conflict(
                ErrorCode.GENERATION_STALE,
                f"generation is stale group={self.name!r} current={self.generation} got={generation}",
            )

    def _check_settled(self) -> None:
        if self.phase is Phase.PREPARING:
            raise Conflict(ErrorCode.GROUP_REBALANCING, f"the group is rebalancing (join again) group={self.name!r}")

    def heartbeat(self, member_id: str, generation: int, *, instance_id: str | None = None, now: float) -> None:
        """Record a heartbeat.

        Raises, checked in this order, Conflict(MEMBER_FENCED), Missing(MEMBER_MISSING), Conflict(GENERATION_STALE), and
        Conflict(GROUP_REBALANCING) if the member must rejoin. In the last case, the heartbeat is recorded nevertheless.
        """
        member = self._find(member_id, instance_id)
        self._check_generation(generation)
        member.heard_at = max(member.heard_at, now)
        self._check_settled()

    def check_commit(self, member_id: str, generation: int, *, instance_id: str | None = None, now: float) -> None:
        """Check that a member may commit offsets: it must be in the current generation.

        If the group has no members, any caller may commit with a negative generation. Raises the same errors as
        ``heartbeat``. GROUP_REBALANCING is raised only while members wait for assignments: while they rejoin, they may
        still commit for their old assignments.
        """
        if not self._members and generation < 0:
            return
        member = self._find(member_id, instance_id)
        self._check_generation(generation)
        if self.phase is Phase.COMPLETING:
            raise Conflict(ErrorCode.GROUP_REBALANCING, f"the assignment is not ready (retry) group={self.name!r}")
        member.heard_at = max(member.heard_at, now)

    def leave(self, member_id: str, *, instance_id: str | None = None, now: float) -> None:
        """Remove a member. A member without an id is found by its instance id.

        Raises Missing(MEMBER_MISSING), Conflict(MEMBER_FENCED).
        """
        if member_id in self._given and instance_id is None:
            del self._given[member_id]
            if self.phase is Phase.PREPARING:
                self._complete_if_all_joined(now)
            return
        found = member_id or self._static.get(instance_id or "", "")
        self._remove([self._find(found, instance_id)], now)

    def _remove(self, members: Sequence[Member], now: float) -> None:
        for member in members:
            self._take(member)
            self._refuse(
                member,
                Missing(
                    ErrorCode.MEMBER_MISSING, f"the member left the group group={self.name!r} member={member.id!r}"
                ),
            )
            if member.id == self.leader:
                self.leader = ""
        if members:
            self._rebalance(now)

    def _refuse(self, member: Member, error: BrokerError) -> None:
        if member.is_joining:
            self._answers.append(Answer(member.id, WaitingCall.JOIN, error))
        if member.is_syncing:
            self._answers.append(Answer(member.id, WaitingCall.SYNC, error))
        member.is_joining = member.is_syncing = False

    def expire(self, now: float) -> None:
        """Remove members whose session has timed out, and complete a rebalance whose timeout has passed."""
        due, was = self._ends_at <= now, (self.phase, self.generation)
        for id_ in [id_ for id_, until in self._given.items() if until <= now]:
            del self._given[id_]
        self._remove([member for member in self._members.values() if member.gone_at <= now], now)
        due = due and was == (self.phase, self.generation)  # a phase that has just begun has its own time limit
        if self.phase is Phase.PREPARING and due:
            self._complete(now)
        elif self.phase is Phase.PREPARING:
            self._complete_if_all_joined(now)
        elif due:
            self._ends_at = math.inf
            late = [member for member in self._members.values() if not (member.has_synced or member.is_syncing)]
            self._remove(late, now)

    def end(self) -> None:
        """Delete the group. Raises Conflict(GROUP_NOT_EMPTY)."""
        if self._members:
            raise Conflict(ErrorCode.GROUP_NOT_EMPTY, f"the group has members group={self.name!r}")
        self._given.clear()
        self._go(Phase.DEAD)


def stored(group: ClassicGroup, owner: int, *, bytes_max: int = KEPT_BYTES_MAX) -> ClassicGroupStored | None:
    """Return the change that stores a group.

    Return None if the group is not stable, is too large, or the broker assigns its partitions.
    """
    size = group.bytes + _MEMBER_BYTES * group.member_count
    if group.phase is not Phase.STABLE or group.is_shared or size > min(bytes_max, KEPT_BYTES_MAX):
        return None
    return ClassicGroupStored(
        name=group.name,
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        leader=group.leader,
        members=tuple(_stored_member(member) for member in group.joined_members),
        owner=owner,
    )


def _stored_member(member: Member) -> ClassicMemberStored:
    join = member.join
    return ClassicMemberStored(
        id=member.id,
        instance_id=join.instance_id,
        client_id=join.client_id,
        client_host=join.client_host,
        session_timeout_s=join.session_timeout_s,
        rebalance_timeout_s=join.rebalance_timeout_s,
        protocols=join.protocols,
        topics=tuple(join.topics),
        wire=join.wire,
        is_known=join.writing is not None,
        assignment=member.assignment,
    )


def restored(group: ClassicGroupStored, limits: Limits, writing: Writing, now: float) -> ClassicGroup:
    """Return the group from a stored change. Each member counts as having sent a heartbeat at ``now``.

    Args:
        writing: encodes the members' assignments.
    """
    found = ClassicGroup(group.name, limits, group.generation)
    members = [_restored_member(member, group.protocol_type, writing, now) for member in group.members]
    found.resume(members, protocol_type=group.protocol_type, protocol=group.protocol, leader=group.leader)
    return found


def _restored_member(member: ClassicMemberStored, protocol_type: str, writing: Writing, now: float) -> Member:
    join = Join(
        member_id=member.id,
        session_timeout_s=member.session_timeout_s,
        rebalance_timeout_s=member.rebalance_timeout_s,
        protocol_type=protocol_type,
        protocols=member.protocols,
        instance_id=member.instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        topics=frozenset(member.topics),
        wire=member.wire,
        writing=writing if member.is_known else None,
    )
    return Member(member.id, join, now, assignment=member.assignment, is_new=False, has_synced=True)


def weight(group: ClassicGroupStored) -> int:
    """Return the cost of encoding the group, in units of a small record."""
    return sum(
        1 + len(one.topics) + (len(one.assignment) + sum(len(said) for _, said in one.protocols)) // _WEIGHT_BYTES
        for one in group.members
    )
