"""Stable classic groups as stored in the journal (concepts: groups#classic-groups).

After a restart, a restored group sends its members the same responses as before.
"""

from __future__ import annotations

from typing import Final

from polywire.broker.changes import ClassicGroupStored, ClassicMemberStored
from polywire.broker.groups.classic import ClassicGroup, Phase
from polywire.broker.groups.classic_members import Join, Limits, Member, Writing

# size of one group, which is written with every generation; Apache Kafka has the same limit
KEPT_BYTES_MAX: Final = 1024 * 1024
_MEMBER_BYTES: Final = 64  # lengths and numbers stored for one member
_WEIGHT_BYTES: Final = 256  # this many bytes take as long to encode as a small record


def stored(group: ClassicGroup, owner: int, *, bytes_max: int = KEPT_BYTES_MAX) -> ClassicGroupStored | None:
    """Return a group as a change, None if it is not settled, is shared, or exceeds ``bytes_max``."""
    size = group.bytes + _MEMBER_BYTES * group.member_count
    if group.phase is not Phase.STABLE or group.is_shared or size > min(bytes_max, KEPT_BYTES_MAX):
        return None
    return ClassicGroupStored(
        name=group.name,
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        leader=group.leader,
        members=tuple(_stored_member(member) for member in group.everybody),
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
    """Return the stored group, as if every member had sent a heartbeat at ``now``.

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
    """Return how long encoding the group takes, in units of a small record."""
    return sum(
        1 + len(one.topics) + (len(one.assignment) + sum(len(said) for _, said in one.protocols)) // _WEIGHT_BYTES
        for one in group.members
    )
