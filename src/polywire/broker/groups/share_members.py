"""Members of share groups, which send heartbeats (KIP-932).

Members are not stored: after a restart they get an error that makes them join again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from polywire.broker.groups.coordinator import GroupBroker
from polywire.broker.groups.share_directory import ShareDirectory
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.quotas import MEMBER_BYTES, Kind
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.state import State
from polywire.clock import Clock
from polywire.errors import Busy, Conflict, ErrorCode, Invalid, Missing
from polywire.log.base import Handle, Loop

JOINING: Final = 0  # epoch of a member that joins
LEAVING: Final = -1  # epoch of a member that leaves
TOPICS_MAX: Final = 1_000  # topics of one member
# Partitions of a topic that one member reads. Up to this number, all members read all partitions, so a slow member
# does not delay the others.
READ_MAX: Final = 32
SWEEP_S: Final = 5.0  # longest interval between checks for members without heartbeats


class ShareBeat(NamedTuple):
    """A ShareGroupHeartbeat request.

    Attributes:
        epoch: epoch that the member received last, or JOINING or LEAVING.
        topics: full names of its topics, None if unchanged.
    """

    member_id: str
    epoch: int
    topics: frozenset[str] | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""

    @property
    def size(self) -> int:
        """Bytes that the member counts against quotas, without the objects."""
        return len(self.member_id) + len(self.client_id) + len(self.client_host) + sum(map(len, self.topics or ()))


class ShareBeatResponse(NamedTuple):
    """The response to a heartbeat. The assignment has partitions by topic id, None if unchanged."""

    epoch: int
    assignment: Mapping[bytes, Sequence[int]] | None
    heartbeat_interval_ms: int


class ShareMember(msgspec.Struct):
    """A member of a share group.

    Attributes:
        epoch: epoch of the group when the member last received its assignment.
        previous_epoch: the epoch before it. A member sends it again if the response to its heartbeat was lost.
        assigned: partitions by topic id that the member received last.
    """

    id: str
    topics: frozenset[str]
    heard_at: float
    rack_id: str | None
    client_id: str
    client_host: str
    size: int
    epoch: int = 0
    previous_epoch: int = 0
    assigned: dict[bytes, Sequence[int]] = {}


class ShareGroupView(NamedTuple):
    """A share group with its members."""

    name: str
    epoch: int
    members: Sequence[ShareMember]


class _Group:
    """The members of one share group."""

    __slots__ = ("_numbers", "bytes", "epoch", "members", "name", "timer")

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.epoch = 0
        self.bytes = 0
        self.members: dict[str, ShareMember] = {}
        self.timer: Handle | None = None
        # number of each member among those of a topic, by topic, as of an epoch
        self._numbers: tuple[int, dict[str, dict[str, int]]] = -1, {}

    def numbers(self, topic: str) -> dict[str, int]:
        """Return the members of a topic, numbered in the order of their ids."""
        epoch, by_topic = self._numbers
        if epoch != self.epoch:
            by_topic = {}
            self._numbers = self.epoch, by_topic
        found = by_topic.get(topic)
        if found is None:
            ids = sorted(member.id for member in self.members.values() if topic in member.topics)
            found = by_topic[topic] = {id_: number for number, id_ in enumerate(ids)}
        return found


def assigned(number: int, members: int, partition_count: int) -> list[int]:
    """Return the partitions of one member of a topic. Every partition has a member, and every member has partitions.

    Args:
        number: number of the member, below ``members``.
    """
    size = min(max(READ_MAX, math.ceil(partition_count / members)), partition_count)
    first = number * partition_count // members
    return sorted((first + step) % partition_count for step in range(size))


class ShareMembers:
    """The members of all share groups.

    Args:
        gone: called with a group and a member that has left or was silent for too long.
    """

    __slots__ = ("_broker", "_clock", "_directory", "_gone", "_groups", "_loop", "_settings", "_state")

    def __init__(
        self,
        broker: GroupBroker,
        state: State,
        directory: ShareDirectory,
        *,
        settings: BrokerSettings,
        loop: Loop,
        clock: Clock,
        gone: Callable[[str, str], None],
    ) -> None:
        self._broker = broker
        self._state = state
        self._directory = directory
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._gone = gone
        self._groups: dict[str, _Group] = {}

    def has_any(self, name: str) -> bool:
        """Return whether a group has members."""
        return name in self._groups

    def topics(self, name: str) -> set[str]:
        """Return the full names of the topics that a group's members subscribe to."""
        group = self._groups.get(name)
        return set() if group is None else {topic for member in group.members.values() for topic in member.topics}

    def view(self, name: str) -> ShareGroupView | None:
        """Return a share group with its members, or None."""
        if not self._directory.exists(name):
            return None
        group = self._groups.get(name)
        return (
            ShareGroupView(name, 0, ())
            if group is None
            else ShareGroupView(name, group.epoch, list(group.members.values()))
        )

    def beat(self, name: str, beat: ShareBeat, *, by: Caller = NO_CALLER) -> ShareBeatResponse:
        """Handle a ShareGroupHeartbeat request, with which a member joins, stays or leaves.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED) for another user's group, Missing(MEMBER_MISSING),
        Conflict(GENERATION_STALE), Busy(BUSY, DISK_FULL), and Conflict(GROUP_PROTOCOL_MISMATCH) if a group of another
        kind has this name.
        """
        check_name(name, self._settings.name_bytes_max)
        check_name(beat.member_id, self._settings.name_bytes_max)
        self._directory.check_owner(name, by)
        if beat.epoch == JOINING:
            member = self._join(name, beat, by)
        else:
            member = self._member(name, beat)
        group = self._groups[name]
        settings = self._directory.settings(name)
        if beat.epoch == LEAVING:
            self._remove(group, member)
            return ShareBeatResponse(LEAVING, None, settings.heartbeat_interval_ms)
        member.heard_at = self._clock.monotonic()
        if beat.topics is not None and beat.topics != member.topics:
            self._subscribe(group, member, beat)
        partitions = self._assigned(group, member)
        is_new = partitions != member.assigned or beat.epoch != member.epoch
        if partitions != member.assigned or member.epoch == JOINING:
            member.previous_epoch, member.epoch = member.epoch, group.epoch
            member.assigned = partitions
        return ShareBeatResponse(member.epoch, partitions if is_new else None, settings.heartbeat_interval_ms)

    def _member(self, name: str, beat: ShareBeat) -> ShareMember:
        group = self._groups.get(name)
        member = None if group is None else group.members.get(beat.member_id)
        if member is None:
            raise Missing(ErrorCode.MEMBER_MISSING, f"no such member group={name!r} member={beat.member_id!r}")
        if beat.epoch not in (LEAVING, member.epoch, member.previous_epoch):
            raise Conflict(
                ErrorCode.GENERATION_STALE,
                f"member epoch is stale group={name!r} member={member.id!r} current={member.epoch} got={beat.epoch}",
            )
        return member

    def _join(self, name: str, beat: ShareBeat, by: Caller) -> ShareMember:
        if beat.topics is None:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"topics are required to join group={name!r}")
        self._check_topics(name, beat)
        self._directory.create(name, by)
        group = self._groups.get(name) or _Group(name)
        member = group.members.get(beat.member_id)
        if member is None:
            if len(group.members) >= self._settings.members_max:
                raise Busy(ErrorCode.BUSY, f"too many members group={name!r} limit={self._settings.members_max}")
            owner = self._directory.owner(name)
            self._state.quotas.admit(Kind.MEMBERS, by, MEMBER_BYTES + beat.size, owner=owner)
            member = ShareMember(beat.member_id, frozenset(), 0.0, beat.rack_id, beat.client_id, beat.client_host, 0)
            group.members[member.id] = member
            self._charge(group, member, 1)
        member.epoch = JOINING
        self._groups[name] = group
        self._subscribe(group, member, beat)
        if group.timer is None:
            self._watch(group)
        return member

    def _check_topics(self, name: str, beat: ShareBeat) -> None:
        if len(beat.topics or ()) > TOPICS_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"too many topics group={name!r} limit={TOPICS_MAX}")

    def _subscribe(self, group: _Group, member: ShareMember, beat: ShareBeat) -> None:
        self._check_topics(group.name, beat)
        self._charge(group, member, -1)
        member.topics = beat.topics or frozenset()
        member.size = beat.size
        self._charge(group, member, 1)
        group.epoch += 1

    def _charge(self, group: _Group, member: ShareMember, sign: int) -> None:
        size = sign * (MEMBER_BYTES + member.size)
        group.bytes += size
        self._state.usage.charge(Kind.MEMBERS, self._directory.owner(group.name), sign, size)

    def _assigned(self, group: _Group, member: ShareMember) -> dict[bytes, Sequence[int]]:
        found: dict[bytes, Sequence[int]] = {}
        for name in sorted(member.topics):
            topic = self._broker.group_topic(name)
            count = 0 if topic is None else self._broker.group_partition_count(name)
            if topic is not None and count:
                numbers = group.numbers(name)
                found[topic.id] = assigned(numbers[member.id], len(numbers), count)
        return found

    def _remove(self, group: _Group, member: ShareMember) -> None:
        del group.members[member.id]
        self._charge(group, member, -1)
        group.epoch += 1
        self._gone(group.name, member.id)
        if not group.members:
            del self._groups[group.name]
            if group.timer is not None:
                group.timer.cancel()

    def _watch(self, group: _Group) -> None:
        delay = min(self._directory.settings(group.name).session_timeout_s / 4, SWEEP_S)
        group.timer = self._loop.call_later(delay, self._sweep, group)

    def _sweep(self, group: _Group) -> None:
        """Remove members whose session timeout has passed."""
        if self._groups.get(group.name) is not group:
            return
        latest = self._clock.monotonic() - self._directory.settings(group.name).session_timeout_s
        for member in [member for member in group.members.values() if member.heard_at < latest]:
            self._remove(group, member)
        if group.members:
            self._watch(group)
