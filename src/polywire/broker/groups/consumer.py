"""State machine of a consumer group of Kafka's newer protocol (KIP-848), whose heartbeats assign partitions.

The coordinator decides which partitions each member should have. This module moves partitions between members
(concepts: groups#handing-over). A member first releases partitions and confirms the release. Only then may other
members get them. A member gets the group's current epoch when it has released all partitions that other members should
have.

* A member never gets a partition that another member holds.
* A member that does not release its partitions in time is removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from polywire.broker.groups.classic_members import Limits
from polywire.broker.groups.memberships import Memberships, Share
from polywire.errors import Busy, Conflict, ErrorCode, Invalid, Missing
from polywire.types import Assignor

JOINING: Final = 0  # epoch of a heartbeat with which a member joins without partitions
LEAVING: Final = -1
AWAY: Final = -2  # epoch of a heartbeat with which a static member leaves and announces its return
TOPICS_MAX: Final = 500  # topics of one member: it joins all of them at once, and every heartbeat checks each of them
FORGET_MIN: Final = 64  # number of topics without readers that are remembered before they are forgotten

Partitions = Mapping[bytes, Set[int]]
"""Partition numbers by topic id."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A member's subscription to topics.

    Attributes:
        names: full names of topics.
        pattern: pattern of topic names, in the syntax of the member's protocol, in addition to ``names``.
        version: version of the broker's list of topics when the pattern was last matched.
    """

    names: frozenset[str] = frozenset()
    pattern: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """A ConsumerGroupHeartbeat request. A field of None is unchanged since the last request.

    Attributes:
        epoch: last member epoch that the member received, or JOINING, LEAVING, AWAY.
        instance_id: id of a static member, which remains a member while it is disconnected.
        topics: full names (``stream.topic``) of the topics that match its subscription.
        owned: partitions that it reads now.
    """

    member_id: str
    epoch: int
    wire: str
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_s: float | None = None
    topics: frozenset[str] | None = None
    subscription: Subscription | None = None
    assignor: Assignor | None = None
    owned: Partitions | None = None
    client_id: str = ""
    client_host: str = ""

    @property
    def is_full(self) -> bool:
        """Whether the heartbeat has all fields. A member sends all of them after a response was lost."""
        return None not in (self.rebalance_timeout_s, self.topics, self.owned)

    @property
    def size(self) -> int:
        """Number of bytes that a group stores for the member."""
        pattern = "" if self.subscription is None else self.subscription.pattern
        texts = (self.member_id, self.instance_id, self.rack_id, self.client_id, self.client_host, pattern)
        return sum(len(text or "") for text in texts) + sum(map(len, self.topics or ()))


class MemberPhase(Enum):
    """Progress of a member towards its target assignment."""

    STABLE = "stable"
    REVOKING = "revoking"  # the member must confirm that it released partitions
    WAITING = "waiting"  # other members must confirm that they released partitions


class Member(msgspec.Struct):
    """A member of a consumer group.

    It owns the partitions in ``assigned`` and ``revoking``, even in topics to which it no longer subscribes.

    Attributes:
        last_full_beat: its last heartbeat with all fields, or the one with which it joined.
        assigned: partitions that it may read.
        revoking: partitions that it must revoke.
        revoke_by: time by which it must have revoked them.
        seen: inputs of the last check of its target assignment. The check is skipped while the inputs are the same.
    """

    id: str
    memberships: Memberships
    heard_at: float
    epoch: int = JOINING
    previous_epoch: int = JOINING
    last_full_beat: Beat = msgspec.field(default_factory=lambda: Beat("", JOINING, ""))
    topics: frozenset[str] = frozenset()
    subscription: Subscription = Subscription()
    rebalance_timeout_s: float = 0.0
    size: int = 0
    assigned: dict[bytes, frozenset[int]] = msgspec.field(default_factory=dict)
    revoking: dict[bytes, frozenset[int]] = msgspec.field(default_factory=dict)
    revoke_by: float = math.inf
    seen: object = None
    phase: MemberPhase = MemberPhase.WAITING


class ConsumerGroup:
    """One group of Kafka's consumer group protocol (KIP-848).

    Attributes:
        bytes: total size of the members.

    Args:
        session_s: a member without a heartbeat for this long is removed.
        epoch: last epoch of an earlier group of this name, whose members may still send requests.
    """

    __slots__ = (
        "_forget_above",
        "_generations",
        "_instances",
        "_limits",
        "_members",
        "_session_s",
        "bytes",
        "epoch",
        "name",
    )

    def __init__(self, name: str, limits: Limits, session_s: float, epoch: int = 0) -> None:
        self.name: Final = name
        self.epoch = epoch
        self.bytes = 0
        self._limits = limits
        self._session_s = session_s
        self._members: dict[str, Member] = {}
        # member by instance id
        self._instances: dict[str, str] = {}
        # Latest generation of the coordinator's group in each topic. Above ``_forget_above`` topics, those that no
        # member reads are forgotten. Otherwise topics that are created and deleted for years would fill the memory.
        self._generations: dict[bytes, int] = {}
        self._forget_above = FORGET_MIN

    @property
    def members(self) -> Mapping[str, Member]:
        return self._members

    def find(self, member_id: str, instance_id: str | None = None) -> Member:
        """Return a member.

        Raises Missing(MEMBER_MISSING), or Conflict(MEMBER_FENCED) if another member uses its instance id.
        """
        if instance_id is not None and self._instances.get(instance_id, member_id) != member_id:
            raise self._fenced(instance_id)
        member = self._members.get(member_id)
        if member is None or (instance_id is not None and instance_id not in self._instances):
            raise Missing(ErrorCode.MEMBER_MISSING, f"no such member group={self.name!r} member={member_id!r}")
        return member

    def _fenced(self, instance_id: str) -> Conflict:
        return Conflict(
            ErrorCode.MEMBER_FENCED, f"another member has this instance id group={self.name!r} instance={instance_id!r}"
        )

    # Joining and leaving

    def beat(self, beat: Beat, now: float) -> Member:
        """Record a heartbeat and return the member.

        Raises Missing(MEMBER_MISSING), Conflict(MEMBER_FENCED) if another member uses its instance id,
        Invalid(INVALID_REQUEST), Busy(BUSY), and Conflict(GENERATION_STALE) unless the epoch is the member's current or
        previous one.
        """
        if len(beat.topics or ()) > TOPICS_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"too many topics group={self.name!r} limit={TOPICS_MAX}")
        if beat.epoch == JOINING:
            member = self._enter(beat, now)
        else:
            member = self.find(beat.member_id, beat.instance_id)
            self._check_epoch(member, beat)
            self._admit(member.size, beat, is_new=False)
        self._record_beat(member, beat)
        member.heard_at = now
        return member

    def _enter(self, beat: Beat, now: float) -> Member:
        if not beat.is_full or any(beat.owned.values() if beat.owned else ()):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"subscription is required to join group={self.name!r}")
        membership_id = beat.instance_id or beat.member_id
        was = self._members.get(self._instances.get(beat.instance_id or "", beat.member_id))
        if was is not None and was.id != beat.member_id and was.epoch != AWAY:
            raise self._fenced(membership_id)
        other = self._members.get(beat.member_id)
        if (other is not None and other is not was) or (was is not None and was.memberships.id != membership_id):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"the instance id of a member cannot change group={self.name!r}")
        self._admit(0 if was is None else was.size, beat, is_new=was is None)
        member = Member(
            beat.member_id,
            Memberships(membership_id, beat.wire, is_consumer=True) if was is None else was.memberships,
            now,
        )
        if was is not None:
            self.take(was)
            member.assigned, member.revoking = was.assigned, was.revoking
        self._members[member.id] = member
        if beat.instance_id is not None:
            self._instances[beat.instance_id] = member.id
        return member

    def _admit(self, freed: int, beat: Beat, *, is_new: bool) -> None:
        limits = self._limits
        if is_new and len(self._members) >= limits.members_max:
            raise Busy(ErrorCode.BUSY, f"too many members group={self.name!r} limit={limits.members_max}")
        if self.bytes - freed + beat.size > limits.bytes_max:
            raise Busy(
                ErrorCode.BUSY,
                f"metadata of the group's members is too large group={self.name!r} limit={limits.bytes_max}",
            )

    def _check_epoch(self, member: Member, beat: Beat) -> None:
        """Raise Conflict(GENERATION_STALE) unless the epoch of a heartbeat is the member's current or previous one.

        The previous epoch is accepted only together with partitions that the member owns, because a member sends both
        after it lost a response.
        """
        if beat.epoch == member.epoch:
            return
        owned = beat.owned
        if (
            beat.epoch != member.previous_epoch
            or owned is None
            or not all(of <= member.assigned.get(id_, frozenset()) for id_, of in owned.items())
        ):
            raise self._stale(member, beat.epoch)

    def _stale(self, member: Member, epoch: int) -> Conflict:
        return Conflict(
            ErrorCode.GENERATION_STALE,
            f"member epoch is stale group={self.name!r} member={member.id!r} current={member.epoch} got={epoch}",
        )

    def check_epoch(self, member_id: str, epoch: int, instance_id: str | None = None) -> Member:
        """Return a member.

        Raises Missing(MEMBER_MISSING), Conflict(MEMBER_FENCED) if another member uses its instance id, and
        Conflict(GENERATION_STALE) if its epoch differs.
        """
        member = self.find(member_id, instance_id)
        if epoch != member.epoch:
            raise self._stale(member, epoch)
        return member

    def _record_beat(self, member: Member, beat: Beat) -> None:
        if beat.topics is not None:
            member.topics = beat.topics
            member.subscription = beat.subscription or Subscription(beat.topics)
        if beat.rebalance_timeout_s is not None:
            member.rebalance_timeout_s = beat.rebalance_timeout_s
        if beat.is_full or beat.epoch == JOINING:
            member.last_full_beat = beat
        size = max(beat.size, member.size)
        self.bytes += size - member.size
        member.size = size

    def take(self, member: Member) -> None:
        """Remove a member. The caller must free its partitions and end its subscriptions."""
        del self._members[member.id]
        self.bytes -= member.size
        if member.last_full_beat.instance_id is not None:
            self._instances.pop(member.last_full_beat.instance_id, None)

    def depart(self, member: Member) -> None:
        """Mark a member as leaving, before the caller removes it. To return, it must join again."""
        member.epoch = member.previous_epoch = AWAY
        member.heard_at = -math.inf

    # Time

    def gone_at(self, member: Member) -> float:
        """Return the time at which a member must be removed.

        This is the end of its session or, if that is earlier, the time by which it must have revoked partitions.
        """
        return min(member.heard_at + self._session_s, member.revoke_by)

    @property
    def deadline(self) -> float:
        """Earliest time at which a member must be removed."""
        return min(map(self.gone_at, self._members.values()), default=math.inf)

    def expired(self, now: float) -> list[Member]:
        """Return the members whose session timeout or rebalance timeout has passed."""
        return [member for member in self._members.values() if self.gone_at(member) <= now]

    # Assignment

    def note_generations(self, shares: Mapping[bytes, Share]) -> None:
        """Begin a new group epoch if one of these topics has a new generation of its assignment."""
        generations = {id_: share.generation for id_, share in shares.items()}
        if any(self._generations.get(id_) != generation for id_, generation in generations.items()):
            self._generations.update(generations)
            self.epoch = max(self.epoch + 1, *generations.values())
            if len(self._generations) > self._forget_above:
                self._forget_topics()

    def _forget_topics(self) -> None:
        read = {id_ for member in self._members.values() for id_ in member.memberships.topics.values()}
        self._generations = {id_: generation for id_, generation in self._generations.items() if id_ in read}
        self._forget_above = 2 * len(self._generations) + FORGET_MIN

    def note_generation(self, topic_id: bytes, generation: int) -> None:
        """Record a new generation of a topic that does not change the assignments of this group's members."""
        self._generations[topic_id] = generation

    def reset(self, member: Member, shares: Mapping[bytes, Share]) -> None:
        for share in shares.values():
            share.holdings.release(member.memberships.id, list(share.holdings.of(member.memberships.id)))
        member.assigned, member.revoking, member.revoke_by = {}, {}, math.inf

    def reconcile(self, member: Member, shares: Mapping[bytes, Share], owned: Partitions | None, now: float) -> bool:
        """Move a member closer to its target assignment. Return whether the response must contain its assignment.

        Args:
            shares: the member's target assignment by topic.
            owned: partitions that the member reports as owned, None if it reported none.
        """
        seen = (self.epoch, [(id_, share.generation, share.holdings.releases) for id_, share in shares.items()])
        if seen == member.seen and owned is None and not member.revoking:
            return False
        if owned is not None and not any(owned.get(id_, frozenset()) & gone for id_, gone in member.revoking.items()):
            for id_, gone in member.revoking.items():
                if id_ in shares:
                    shares[id_].holdings.release(member.memberships.id, gone)
            member.revoking, member.revoke_by = {}, math.inf
        if not member.revoking:
            self._reach(member, shares, now)
        assigned = {
            id_: frozenset(share.holdings.of(member.memberships.id) - member.revoking.get(id_, frozenset()))
            for id_, share in shares.items()
        }
        assigned = {id_: partitions for id_, partitions in assigned.items() if partitions}
        is_new, member.assigned, member.seen = assigned != member.assigned, assigned, seen
        return is_new

    def _reach(self, member: Member, shares: Mapping[bytes, Share], now: float) -> None:
        """Make a member revoke the partitions that are not in its target assignment.

        If there are none, assign it those partitions of its target that no other member owns.
        """
        revoking = {
            id_: share.holdings.of(member.memberships.id) - set(share.partitions) for id_, share in shares.items()
        }
        member.revoking = {id_: frozenset(gone) for id_, gone in revoking.items() if gone}
        if member.revoking:
            member.phase, member.revoke_by = MemberPhase.REVOKING, now + member.rebalance_timeout_s
            return
        for share in shares.values():
            share.holdings.take(member.memberships.id, share.partitions)
        has_all = all(
            len(share.holdings.of(member.memberships.id)) == len(share.partitions) for share in shares.values()
        )
        member.phase = MemberPhase.STABLE if has_all else MemberPhase.WAITING
        if member.epoch != self.epoch:
            member.previous_epoch, member.epoch = member.epoch, self.epoch
