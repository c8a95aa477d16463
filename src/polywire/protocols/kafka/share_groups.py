"""Members, descriptions and offsets of share groups (spec: kafka#share-groups).

A member needs permission to read all topics of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from polywire.broker.groups.share_members import JOINING, LEAVING, ShareBeat, ShareGroupView
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.context import epoch_of
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.groups import (
    GROUP_OPERATIONS,
    authorize_group,
    authorizing_known,
    client_host,
    group_error,
    is_full,
)
from polywire.protocols.kafka.messages import NO_ID, NO_OFFSET, NO_OPERATIONS, Api, WireError
from polywire.protocols.kafka.peer import Peer, Reply
from polywire.protocols.kafka.replies import PendingResponse, answer_in_slices, refuse

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        AlterShareGroupOffsetsRequest,
        DeleteShareGroupOffsetsRequest,
        DescribeShareGroupOffsetsRequest,
        DescribeShareGroupOffsetsResponse,
        ShareGroupDescribeRequest,
        ShareGroupDescribeResponse,
        ShareGroupHeartbeatRequest,
        ShareGroupHeartbeatResponse,
    )

ASSIGNOR: Final = "simple"
NO_GROUP: Final = "no such group"  # the same for a group that the client may not see
_ERRORS: Final = {
    ErrorCode.GENERATION_STALE: WireError.FENCED_MEMBER_EPOCH,
    ErrorCode.GROUP_PROTOCOL_MISMATCH: WireError.GROUP_ID_NOT_FOUND,
}


def share_group_heartbeat(
    peer: Peer, reply: Reply, request: ShareGroupHeartbeatRequest, /
) -> ShareGroupHeartbeatResponse:
    response = schema.response(Api.SHARE_GROUP_HEARTBEAT)
    if not request.group_id or not request.member_id or request.member_epoch < LEAVING or request.rack_id == "":
        return response(error=WireError.INVALID_REQUEST, message="group id and member id must not be empty")
    names = request.subscribed_topic_names
    beat = ShareBeat(
        request.member_id,
        request.member_epoch,
        None if names is None or request.member_epoch == LEAVING else frozenset(names),
        request.rack_id,
        reply.request.client_id or "",
        client_host(peer),
    )
    try:
        shares = peer.broker.shares
        topics = shares.topics(request.group_id) if beat.topics is None else beat.topics
        authorize_group(peer, Action.GROUP_JOIN, topics)
        beaten = shares.members.beat(request.group_id, beat, by=peer.caller)
    except BrokerError as error:
        code = WireError.GROUP_MAX_SIZE_REACHED if is_full(error) else _ERRORS.get(error.code) or group_error(error)
        return response(error=code, message=error.message)
    made = response.Assignment
    assignment = None
    if beaten.assignment is not None and request.member_epoch >= JOINING:
        assignment = made(
            topic_partitions=[
                made.TopicPartitions(topic_id=topic_id, partitions=list(partitions))
                for topic_id, partitions in beaten.assignment.items()
            ]
        )
    return response(
        member_id=request.member_id,
        member_epoch=beaten.epoch,
        heartbeat_interval_ms=beaten.heartbeat_interval_ms,
        assignment=assignment,
    )


def state_of(view: ShareGroupView) -> str:
    return "Stable" if view.members else "Empty"


def may(peer: Peer, action: Action, group: str) -> None:
    """Require permission for all topics of a share group. Raises Missing(GROUP_MISSING), Denied."""
    for _ in authorizing_known(peer, action, peer.broker.shares.topics(group), ErrorCode.GROUP_MISSING):
        pass


def permits(peer: Peer, action: Action, group: str) -> bool:
    try:
        may(peer, action, group)
    except BrokerError:
        return False
    return True


def share_group_describe(
    peer: Peer, reply: Reply, request: ShareGroupDescribeRequest, /
) -> ShareGroupDescribeResponse | None:
    response = schema.response(Api.SHARE_GROUP_DESCRIBE)
    entries = (
        _described(peer, response.Groups, name, want_operations=request.want_operations) for name in request.group_ids
    )
    return answer_in_slices(peer.broker, reply, entries, lambda groups: response(groups=groups))


def _described(
    peer: Peer, made: type[ShareGroupDescribeResponse.Groups], name: str, *, want_operations: bool
) -> ShareGroupDescribeResponse.Groups:
    try:
        may(peer, Action.GROUP_DESCRIBE, name)
        view = (
            peer.broker.shares.members.view(name) if peer.broker.shares.directory.exists(name, by=peer.caller) else None
        )
    except BrokerError as error:
        return made(error=group_error(error), message=error.message, group_id=name, members=[])
    if view is None:
        return made(error=WireError.GROUP_ID_NOT_FOUND, message=NO_GROUP, group_id=name, members=[])
    members = made.Members
    return made(
        group_id=name,
        group_state=state_of(view),
        group_epoch=view.epoch,
        assignment_epoch=view.epoch,
        assignor_name=ASSIGNOR,
        members=[
            members(
                member_id=member.id,
                rack_id=member.rack_id,
                member_epoch=member.epoch,
                client_id=member.client_id,
                client_host=member.client_host,
                subscribed_topic_names=sorted(member.topics),
                assignment=members.Assignment(
                    topic_partitions=[
                        members.Assignment.TopicPartitions(
                            topic_id=topic.id, topic_name=topic.name.full, partitions=list(partitions)
                        )
                        for topic_id, partitions in member.assigned.items()
                        if (topic := peer.broker.group_topic_of_id(topic_id)) is not None
                    ]
                ),
            )
            for member in view.members
        ],
        operations=sum(1 << bit for bit, action in GROUP_OPERATIONS if permits(peer, action, name))
        if want_operations
        else NO_OPERATIONS,
    )


# Offsets


def describe_share_group_offsets(
    peer: Peer, reply: Reply, request: DescribeShareGroupOffsetsRequest, /
) -> DescribeShareGroupOffsetsResponse | None:
    response = schema.response(Api.DESCRIBE_SHARE_GROUP_OFFSETS)
    entries = (_offsets(peer, response.Groups, group) for group in request.groups)
    return answer_in_slices(peer.broker, reply, entries, lambda groups: response(groups=groups))


def _offsets(
    peer: Peer,
    made: type[DescribeShareGroupOffsetsResponse.Groups],
    group: DescribeShareGroupOffsetsRequest.Groups,
) -> DescribeShareGroupOffsetsResponse.Groups:
    name, shares = group.group_id, peer.broker.shares
    entry = made(group_id=name, topics=[])
    try:
        may(peer, Action.OFFSET_FETCH, name)
        if not shares.directory.exists(name, by=peer.caller):
            entry.error, entry.message = WireError.GROUP_ID_NOT_FOUND, NO_GROUP
            return entry
    except BrokerError as error:
        refuse(entry, error, group_error(error))
        return entry
    wanted: dict[str, list[int]] = {}
    if group.topics is None:
        for partition in shares.partitions(name):
            wanted.setdefault(partition.topic.name.full, []).append(partition.number)
    else:
        wanted = {topic.topic_name: list(topic.partitions) for topic in group.topics}
    for topic_name, numbers in sorted(wanted.items()):
        topic = peer.broker.find_topic(topic_name)
        topic_entry = made.Topics(topic_name=topic_name, topic_id=NO_ID if topic is None else topic.id, partitions=[])
        entry.topics.append(topic_entry)
        allowed = peer.permits(Action.OFFSET_FETCH, peer.broker.resource(topic_name))
        for number in sorted(numbers):
            topic_entry.partitions.append(
                _partition_offsets(peer, made.Topics.Partitions, name, topic, number, allowed=allowed)
            )
    return entry


def _partition_offsets(
    peer: Peer,
    made: type[DescribeShareGroupOffsetsResponse.Groups.Topics.Partitions],
    group: str,
    topic: Topic | None,
    number: int,
    *,
    allowed: bool,
) -> DescribeShareGroupOffsetsResponse.Groups.Topics.Partitions:
    if not allowed:
        return made(index=number, start_offset=NO_OFFSET, error=WireError.TOPIC_AUTHORIZATION_FAILED)
    if topic is None or not 0 <= number < len(topic.partitions):
        return made(index=number, start_offset=NO_OFFSET, error=WireError.UNKNOWN_TOPIC_OR_PARTITION)
    partition = topic.partitions[number]
    offsets = peer.broker.shares.offsets(group, partition)
    if offsets is None:
        return made(index=number, start_offset=NO_OFFSET)
    lag = offsets.unfinished + max(partition.log.next_offset - max(offsets.end, partition.log.first_offset), 0)
    return made(index=number, start_offset=offsets.start, leader_epoch=epoch_of(partition), lag=lag)


def alter_share_group_offsets(peer: Peer, reply: Reply, request: AlterShareGroupOffsetsRequest, /) -> None:
    """AlterShareGroupOffsets: all given partitions, or none if one of them cannot be changed."""
    response = schema.response(Api.ALTER_SHARE_GROUP_OFFSETS)
    body = response(responses=[])
    offsets: dict[Partition, int] = {}
    pending = PendingResponse(reply, body)

    def entries() -> Iterator[None]:
        for topic_request in request.topics:
            topic, error = _topic(peer, Action.OFFSET_COMMIT, topic_request.topic_name)
            made = response.Responses(
                topic_name=topic_request.topic_name, topic_id=NO_ID if topic is None else topic.id, partitions=[]
            )
            body.responses.append(made)
            for one in topic_request.partitions:
                code = error
                if topic is not None and not 0 <= one.index < len(topic.partitions):
                    code = WireError.UNKNOWN_TOPIC_OR_PARTITION
                elif topic is not None:
                    offsets[topic.partitions[one.index]] = one.start_offset
                made.partitions.append(made.Partitions(index=one.index, error=code))
            yield None
        _change(
            peer,
            pending,
            body,
            offsets,
            Action.OFFSET_COMMIT,
            request.group_id,
            partial(peer.broker.shares.alter_offsets, request.group_id, offsets),
        )

    pending.run(peer.broker, entries())


def delete_share_group_offsets(peer: Peer, reply: Reply, request: DeleteShareGroupOffsetsRequest, /) -> None:
    """DeleteShareGroupOffsets: forget the progress in whole topics."""
    response = schema.response(Api.DELETE_SHARE_GROUP_OFFSETS)
    body = response(responses=[])
    partitions: list[Partition] = []
    pending = PendingResponse(reply, body)

    def entries() -> Iterator[None]:
        for topic_request in request.topics:
            topic, error = _topic(peer, Action.GROUP_DELETE, topic_request.topic_name)
            if topic is not None:
                partitions.extend(topic.partitions)
            body.responses.append(
                response.Responses(
                    topic_name=topic_request.topic_name, topic_id=NO_ID if topic is None else topic.id, error=error
                )
            )
            yield None
        _change(
            peer,
            pending,
            body,
            partitions,
            Action.GROUP_DELETE,
            request.group_id,
            partial(peer.broker.shares.delete_offsets, request.group_id, partitions),
        )

    pending.run(peer.broker, entries())


def _topic(peer: Peer, action: Action, name: str) -> tuple[Topic | None, WireError]:
    try:
        peer.authorize(action, peer.broker.resource(name))
        return peer.broker.topic(name), WireError.NONE
    except BrokerError as error:
        return None, wire_error(error)


def _change(
    peer: Peer,
    pending: PendingResponse,
    body: Any,
    changed: Collection[Partition],
    action: Action,
    group: str,
    change: Callable[..., None],
) -> None:
    """Change a group's offsets in these partitions. An error applies to the whole response."""
    pending.expect()
    try:
        if not group:
            body.error, body.message = WireError.INVALID_GROUP_ID, "group id must not be empty"
            pending.count_result()
            return
        may(peer, action, group)
        if not changed and not peer.broker.shares.directory.exists(group, by=peer.caller):
            raise Missing(ErrorCode.GROUP_MISSING, NO_GROUP)
        change(by=peer.caller, done=partial(pending.set_result, body))
    except BrokerError as error:
        refuse(body, error, group_error(error))
        pending.count_result()
