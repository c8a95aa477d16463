"""A consumer group whose members ask by heartbeats what they may read (concepts: groups#handing-over): one pure state machine.

Who gets which partitions is decided elsewhere; here a member comes from what it holds to what it should have, in two steps where others are
concerned: it lets go, says so, and only then the next one begins. Its epoch becomes the group's when it has let go of all that it should.

Promises: nobody is told of a partition that another holds; a member that has time to let go and does not is gone. Must not know: loops,
clocks, the journal, wires.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from polywire.broker.groups.classic_members import Limits
from polywire.broker.groups.seats import Seat, Share
from polywire.errors import Busy, Conflict, ErrorCode, Invalid, Missing
from polywire.types import Assignor

JOINING: Final = 0  # epoch of who comes with nothing
LEAVING: Final = -1
AWAY: Final = -2  # of a static member that will be back
TOPICS_MAX: Final = 500  # of one member: it gets a seat in each at once, and each is looked at with every heartbeat

Partitions = Mapping[bytes, Set[int]]
"""Partitions by topic's id."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member reads, as it says so: by full names, and by a pattern that its wire knows how to read. version: of the list of topics in
    which those that match were looked for."""

    names: frozenset[str] = frozenset()
    pattern: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """What a member says. None is what it has said before.

    epoch: the one it was told last, or JOINING, LEAVING, AWAY. instance_id: of a static member, which keeps its place while it is away.
    topics: full names of what it will read, as its subscription says. owned: what it reads at the moment.
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
        """Whether it says everything, as who has not heard the last answer does."""
        return None not in (self.rebalance_timeout_s, self.topics, self.owned)

    @property
    def size(self) -> int:
        """Bytes that a group keeps of it."""
        pattern = "" if self.subscription is None else self.subscription.pattern
        texts = (self.member_id, self.instance_id, self.rack_id, self.client_id, self.client_host, pattern)
        return sum(len(text or "") for text in texts) + sum(map(len, self.topics or ()))


class MemberPhase(Enum):
    """How far a member is with what it should have."""

    STABLE = "stable"
    REVOKING = "revoking"  # it has yet to say that it let go
    WAITING = "waiting"  # others have


@dataclass(slots=True)
class Member:
    """A member. ``told``: what it was told that it may read. ``revoking``: what it holds beside that. ``seen``: what the last look at its
    shares has found.

    Invariant: what it holds is ``told`` and ``revoking``; also in topics that it has no seat in any more.
    """

    id: str
    seat: Seat
    heard_at: float
    epoch: int = JOINING
    previous_epoch: int = JOINING
    said: Beat = field(default_factory=lambda: Beat("", JOINING, ""))
    topics: frozenset[str] = frozenset()
    subscription: Subscription = Subscription()
    rebalance_timeout_s: float = 0.0
    size: int = 0
    told: dict[bytes, frozenset[int]] = field(default_factory=dict)
    revoking: dict[bytes, frozenset[int]] = field(default_factory=dict)
    revoke_by: float = math.inf
    seen: object = None
    phase: MemberPhase = MemberPhase.WAITING


class ConsumerGroup:
    """One group.

    Invariant: ``_instances`` names a member for each instance; ``bytes`` is the sum of what members have said.
    """

    __slots__ = ("_generations", "_instances", "_limits", "_members", "_session_s", "bytes", "epoch", "name")

    def __init__(self, name: str, limits: Limits, session_s: float, epoch: int = 0) -> None:
        """session_s: how long a member may be silent. epoch: of those before it, whose members may still be there."""
        self.name: Final = name
        self.epoch = epoch
        self.bytes = 0
        self._limits = limits
        self._session_s = session_s
        self._members: dict[str, Member] = {}
        self._instances: dict[str, str] = {}
        self._generations: dict[bytes, int] = {}

    @property
    def members(self) -> Mapping[str, Member]:
        """All members, by id."""
        return self._members

    def find(self, member_id: str, instance_id: str | None = None) -> Member:
        """A member. Raises Missing(MEMBER_MISSING), Conflict(MEMBER_FENCED) where another has its instance."""
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

    # Coming and going

    def beat(self, beat: Beat, now: float) -> Member:
        """A sign of life; returns who gave it.

        Raises Missing(MEMBER_MISSING), Conflict(MEMBER_FENCED) where another has its instance, Conflict(GENERATION_STALE) for an epoch that
        it cannot have been told last, Invalid(INVALID_REQUEST), Busy(BUSY).
        """
        if len(beat.topics or ()) > TOPICS_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"too many topics group={self.name!r} limit={TOPICS_MAX}")
        if beat.epoch == JOINING:
            member = self._enter(beat, now)
        else:
            member = self.find(beat.member_id, beat.instance_id)
            self._check_epoch(member, beat)
            self._admit(member.size, beat, is_new=False)
        self._say(member, beat)
        member.heard_at = now
        return member

    def _enter(self, beat: Beat, now: float) -> Member:
        if not beat.is_full or any(beat.owned.values() if beat.owned else ()):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"subscription is required to join group={self.name!r}")
        seat = beat.instance_id or beat.member_id
        was = self._members.get(self._instances.get(beat.instance_id or "", beat.member_id))
        if was is not None and was.id != beat.member_id and was.epoch != AWAY:
            raise self._fenced(seat)
        other = self._members.get(beat.member_id)
        if (other is not None and other is not was) or (was is not None and was.seat.id != seat):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"the instance id of a member cannot change group={self.name!r}")
        self._admit(0 if was is None else was.size, beat, is_new=was is None)
        member = Member(beat.member_id, Seat(seat, beat.wire, is_consumer=True) if was is None else was.seat, now)
        if was is not None:
            self.take(was)
            member.told, member.revoking = was.told, was.revoking
        self._members[member.id] = member
        if beat.instance_id is not None:
            self._instances[beat.instance_id] = member.id
        return member

    def _admit(self, freed: int, beat: Beat, *, is_new: bool) -> None:
        """Refuse a member, or a word, too many. Raises Busy(BUSY)."""
        limits = self._limits
        if is_new and len(self._members) >= limits.members_max:
            raise Busy(ErrorCode.BUSY, f"too many members group={self.name!r} limit={limits.members_max}")
        if self.bytes - freed + beat.size > limits.bytes_max:
            raise Busy(
                ErrorCode.BUSY,
                f"metadata of the group's members is too large group={self.name!r} limit={limits.bytes_max}",
            )

    def _check_epoch(self, member: Member, beat: Beat) -> None:
        """Who has not heard the last answer says the epoch before, and what it reads."""
        if beat.epoch == member.epoch:
            return
        owned = beat.owned
        if (
            beat.epoch != member.previous_epoch
            or owned is None
            or not all(of <= member.told.get(id_, frozenset()) for id_, of in owned.items())
        ):
            raise self._stale(member, beat.epoch)

    def _stale(self, member: Member, epoch: int) -> Conflict:
        return Conflict(
            ErrorCode.GENERATION_STALE,
            f"member epoch is stale group={self.name!r} member={member.id!r} current={member.epoch} got={epoch}",
        )

    def check_epoch(self, member_id: str, epoch: int, instance_id: str | None = None) -> Member:
        """The member of this epoch. Raises as ``find``, Conflict(GENERATION_STALE)."""
        member = self.find(member_id, instance_id)
        if epoch != member.epoch:
            raise self._stale(member, epoch)
        return member

    def _say(self, member: Member, beat: Beat) -> None:
        if beat.topics is not None:
            member.topics = beat.topics
            member.subscription = beat.subscription or Subscription(beat.topics)
        if beat.rebalance_timeout_s is not None:
            member.rebalance_timeout_s = beat.rebalance_timeout_s
        if beat.is_full or beat.epoch == JOINING:
            member.said = beat
        size = max(beat.size, member.size)
        self.bytes += size - member.size
        member.size = size

    def take(self, member: Member) -> None:
        """It is no member any more; whoever takes it out has it let go and leave its seats."""
        del self._members[member.id]
        self.bytes -= member.size
        if member.said.instance_id is not None:
            self._instances.pop(member.said.instance_id, None)

    def depart(self, member: Member) -> None:
        """It has left, and is no member any more as soon as somebody takes it out; only by joining is it one again."""
        member.epoch = member.previous_epoch = AWAY
        member.heard_at = -math.inf

    # Time

    def gone_at(self, member: Member) -> float:
        """When it is no member any more unless it is heard of, or lets go."""
        return min(member.heard_at + self._session_s, member.revoke_by)

    @property
    def deadline(self) -> float:
        """When the first may be gone."""
        return min(map(self.gone_at, self._members.values()), default=math.inf)

    def expired(self, now: float) -> list[Member]:
        """Those whose time is over."""
        return [member for member in self._members.values() if self.gone_at(member) <= now]

    # What they read

    def noticed(self, shares: Mapping[bytes, Share]) -> None:
        """The coordinator's groups are in these generations: what members should have may be something else."""
        generations = {id_: share.generation for id_, share in shares.items()}
        if any(self._generations.get(id_) != generation for id_, generation in generations.items()):
            self._generations.update(generations)
            self.epoch = max(self.epoch + 1, *generations.values())

    def forgotten(self, topic_id: bytes) -> None:
        """Nobody reads a topic any more."""
        self._generations.pop(topic_id, None)

    def renewed(self, topic_id: bytes, generation: int) -> None:
        """A generation has begun that changes nothing for members of this group."""
        self._generations[topic_id] = generation

    def begin_anew(self, member: Member, shares: Mapping[bytes, Share]) -> None:
        """It comes with nothing: what it held is free, and what it may read is told to it again."""
        for share in shares.values():
            share.holdings.release(member.seat.id, list(share.holdings.of(member.seat.id)))
        member.told, member.revoking, member.revoke_by = {}, {}, math.inf

    def reconcile(self, member: Member, shares: Mapping[bytes, Share], owned: Partitions | None, now: float) -> bool:
        """Bring a member nearer to its shares; returns whether it has to be told what it may read.

        owned: what it says that it reads.
        """
        seen = (self.epoch, [(id_, share.generation, share.holdings.releases) for id_, share in shares.items()])
        if seen == member.seen and owned is None and not member.revoking:
            return False
        if owned is not None and not any(owned.get(id_, frozenset()) & gone for id_, gone in member.revoking.items()):
            for id_, gone in member.revoking.items():
                if id_ in shares:
                    shares[id_].holdings.release(member.seat.id, gone)
            member.revoking, member.revoke_by = {}, math.inf
        if not member.revoking:
            self._reach(member, shares, now)
        told = {
            id_: frozenset(share.holdings.of(member.seat.id) - member.revoking.get(id_, frozenset()))
            for id_, share in shares.items()
        }
        told = {id_: partitions for id_, partitions in told.items() if partitions}
        is_new, member.told, member.seen = told != member.told, told, seen
        return is_new

    def _reach(self, member: Member, shares: Mapping[bytes, Share], now: float) -> None:
        """Have it let go of what it should not have, or else take what it should as far as nobody holds it."""
        revoking = {id_: share.holdings.of(member.seat.id) - set(share.partitions) for id_, share in shares.items()}
        member.revoking = {id_: frozenset(gone) for id_, gone in revoking.items() if gone}
        if member.revoking:
            member.phase, member.revoke_by = MemberPhase.REVOKING, now + member.rebalance_timeout_s
            return
        for share in shares.values():
            share.holdings.take(member.seat.id, share.partitions)
        has_all = all(len(share.holdings.of(member.seat.id)) == len(share.partitions) for share in shares.values())
        member.phase = MemberPhase.STABLE if has_all else MemberPhase.WAITING
        if member.epoch != self.epoch:
            member.previous_epoch, member.epoch = member.epoch, self.epoch
