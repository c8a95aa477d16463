"""Members of classic groups: JoinGroup, SyncGroup, Heartbeat, LeaveGroup (spec: kafka#joingroup, kafka#syncgroup, kafka#heartbeat,
kafka#leavegroup).

Promises: every request is answered in the end; who may not use a group's topics may not be a member. Must not know: frames, assignment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from uuid import uuid4

from polywire.broker.actions import Action
from polywire.broker.groups.classic_members import IdGiven, Join, Joined, Synced
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.messages import WIRE, Api, WireError
from polywire.protocols.kafka.peer import Peer, Reply
from polywire.protocols.kafka.subscription import CONSUMER, NO_SUBSCRIPTION, WRITING, read_subscriptions

ID_FIRST_SINCE: Final = 4  # version of JoinGroup in which a new member is given its id before it joins
NULL_PROTOCOL_SINCE: Final = 7  # version of JoinGroup that has no protocol where none was chosen
SKIPPING_SINCE: Final = 9  # version of JoinGroup in which a leader can be told to leave all as it was
MANY_LEAVE_SINCE: Final = 3  # version of LeaveGroup that names members one by one
CLIENT_ID_LENGTH_MAX: Final = 100  # of what a member's id begins with
MS: Final = 1000


def group_error(error: BrokerError) -> WireError:
    """The wire's error for what concerns a group."""
    return wire_error(error, denied=WireError.GROUP_AUTHORIZATION_FAILED)


def authorize_group(peer: Peer, action: Action, topics: Iterable[str]) -> None:
    """Refuse who may not do it with all these topics, or with any where none are known. Raises Denied."""
    named = False
    for topic in topics:
        named = True
        peer.authorize(action, peer.broker.resource(topic))
    if not named:
        peer.broker.access.authorize_somewhere(peer.principal, action)


def client_host(peer: Peer) -> str:
    """Where a member is, as tools show it."""
    host = peer.output.peer.rpartition(":")[0] or peer.output.peer
    return "/" + host.strip("[]")


def join_group(peer: Peer, reply: Reply, request: Any, /) -> None:
    """JoinGroup."""
    version = reply.request.version
    response = schema.response(Api.JOIN_GROUP)

    def refuse(code: WireError, member_id: str = request.member_id) -> None:
        name = "" if version < NULL_PROTOCOL_SINCE else None
        reply.ok(response(error=code, protocol_name=name, member_id=member_id))

    def done(outcome: IdGiven | Joined | BrokerError) -> None:
        if isinstance(outcome, Joined):
            reply.ok(_joined(response, outcome))
        elif isinstance(outcome, IdGiven):
            refuse(WireError.MEMBER_ID_REQUIRED, outcome.member_id)
        else:
            refuse(group_error(outcome))

    try:
        join = _join_of(peer, reply, request)
        authorize_group(peer, Action.GROUP_JOIN, join.topics)
        new_id = f"{join.client_id[:CLIENT_ID_LENGTH_MAX]}-{uuid4()}"
        peer.broker.classic.join(request.group_id, join, new_id=new_id, by=peer.caller, done=done)
    except Busy as busy:
        full = busy.code is ErrorCode.BUSY
        refuse(WireError.GROUP_MAX_SIZE_REACHED if full else group_error(busy))
    except BrokerError as error:
        refuse(group_error(error))


def _join_of(peer: Peer, reply: Reply, request: Any) -> Join:
    """What a JoinGroup says, in the broker's words."""
    version = reply.request.version
    protocols = tuple((one.name, bytes(one.metadata)) for one in request.protocols)
    read = read_subscriptions(protocols) if request.protocol_type == CONSUMER else NO_SUBSCRIPTION
    return Join(
        member_id=request.member_id,
        session_timeout_s=request.session_timeout_ms / MS,
        rebalance_timeout_s=(request.rebalance_timeout_ms if version else request.session_timeout_ms) / MS,
        protocol_type=request.protocol_type,
        protocols=protocols,
        instance_id=request.instance_id,
        client_id=reply.request.client_id or "",
        client_host=client_host(peer),
        topics=read.topics,
        id_first=version >= ID_FIRST_SINCE,
        may_skip=version >= SKIPPING_SINCE,
        wire=WIRE,
        writing=WRITING if read.is_known else None,
        kept=read.kept,
    )


def _joined(response: Any, joined: Joined) -> Any:
    members = [
        response.Members(member_id=member.id, instance_id=member.instance_id, metadata=member.metadata)
        for member in joined.members
    ]
    return response(
        generation_id=joined.generation,
        protocol_type=joined.protocol_type,
        protocol_name=joined.protocol,
        leader=joined.leader,
        skip_assignment=joined.skip_assignment,
        member_id=joined.member_id,
        members=members,
    )


def sync_group(peer: Peer, reply: Reply, request: Any, /) -> None:
    """SyncGroup."""
    response = schema.response(Api.SYNC_GROUP)

    def done(outcome: Synced | BrokerError) -> None:
        if isinstance(outcome, Synced):
            body = response(
                protocol_type=outcome.protocol_type, protocol_name=outcome.protocol, assignment=outcome.assignment
            )
        else:
            body = response(error=group_error(outcome))
        reply.ok(body)

    try:
        authorize_group(peer, Action.GROUP_JOIN, peer.broker.classic.subscribed_topics(request.group_id))
        peer.broker.classic.sync(
            request.group_id,
            request.member_id,
            request.generation_id,
            {one.member_id: bytes(one.assignment) for one in request.assignments},
            instance_id=request.instance_id,
            protocol_type=request.protocol_type,
            protocol=request.protocol_name,
            by=peer.caller,
            done=done,
        )
    except BrokerError as error:
        reply.ok(response(error=group_error(error)))


def heartbeat(peer: Peer, reply: Reply, request: Any, /) -> Any:
    """Heartbeat."""
    del reply
    response = schema.response(Api.HEARTBEAT)
    try:
        authorize_group(peer, Action.GROUP_JOIN, peer.broker.classic.subscribed_topics(request.group_id))
        peer.broker.classic.heartbeat(
            request.group_id,
            request.member_id,
            request.generation_id,
            instance_id=request.instance_id,
            by=peer.caller,
        )
    except BrokerError as error:
        return response(error=group_error(error))
    return response()


def leave_group(peer: Peer, reply: Reply, request: Any, /) -> Any:
    """LeaveGroup: one member, or several, each with an error of its own."""
    response = schema.response(Api.LEAVE_GROUP)
    try:
        authorize_group(peer, Action.GROUP_JOIN, peer.broker.classic.subscribed_topics(request.group_id))
    except BrokerError as error:
        return response(error=group_error(error))
    if reply.request.version < MANY_LEAVE_SINCE:
        return response(error=_leave(peer, request.group_id, request.member_id, None))
    if len(request.members) > peer.broker.settings.members_max:
        return response(error=WireError.INVALID_REQUEST)
    return response(
        members=[
            response.Members(
                member_id=member.member_id,
                instance_id=member.instance_id,
                error=_leave(peer, request.group_id, member.member_id, member.instance_id),
            )
            for member in request.members
        ]
    )


def _leave(peer: Peer, group: str, member_id: str, instance_id: str | None) -> WireError:
    try:
        peer.broker.classic.leave(group, member_id, instance_id=instance_id, by=peer.caller)
    except BrokerError as error:
        return group_error(error)
    return WireError.NONE
