"""Kafka requests of classic group members: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

Every request gets a response. A member needs permission to read all topics of its group (spec: kafka#joingroup,
kafka#syncgroup, kafka#heartbeat, kafka#leavegroup).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final
from uuid import UUID

from polywire.broker.groups.classic_members import IdGiven, Join, Joined, Synced
from polywire.broker.permissions import Action
from polywire.errors import BrokerError, Denied, ErrorCode, Missing
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.messages import WIRE, Api, WireError
from polywire.protocols.kafka.peer import Peer, Reply
from polywire.protocols.kafka.subscription import CONSUMER, NO_SUBSCRIPTION, WRITING, read_subscriptions
from polywire.protocols.runtime.slices import Slices
from polywire.types import host_of

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        HeartbeatRequest,
        JoinGroupRequest,
        JoinGroupResponse,
        LeaveGroupRequest,
        LeaveGroupResponse,
        SyncGroupRequest,
    )

ID_FIRST_SINCE: Final = 4  # first version of JoinGroup in which a new member gets an id before it joins
NULL_PROTOCOL_SINCE: Final = 7  # first version of JoinGroup with a null protocol if no protocol was chosen
SKIPPING_SINCE: Final = 9  # first version of JoinGroup in which the leader can skip the assignment
MANY_LEAVE_SINCE: Final = 3  # first version of LeaveGroup for several members
CLIENT_ID_LENGTH_MAX: Final = 100  # characters of the client id at the beginning of a member id
MS: Final = 1000
AT_ONCE_MAX: Final = 256  # topics of a member that are checked in one step, about 4 µs each
_END: Final = object()  # marks the end of the steps


GROUP_OPERATIONS: Final = ((3, Action.GROUP_JOIN), (6, Action.GROUP_DELETE), (8, Action.GROUP_DESCRIBE))
"""Kafka's operations on a group, and the actions that Polywire requires for them."""
ELSEWHERE: Final = frozenset({ErrorCode.STOPPING, ErrorCode.UNREACHABLE, ErrorCode.NOT_OWNER})
"""Errors that mean that another process coordinates the group, or soon will."""


def group_error(error: BrokerError) -> WireError:
    """Return the Kafka error for a group request.

    If another process is responsible, the error is about the coordinator, not the leader: clients treat a leader error
    from a coordinator as fatal.
    """
    if error.code is ErrorCode.BUSY and not is_full(error):
        return WireError.COORDINATOR_LOAD_IN_PROGRESS
    if error.code in ELSEWHERE:
        return WireError.NOT_COORDINATOR
    return wire_error(error, denied=WireError.GROUP_AUTHORIZATION_FAILED)


def is_full(error: BrokerError) -> bool:
    """Return whether the error is a limit on groups or members.

    Such an error lasts until clients leave, unlike the error of a full log.
    """
    return error.code is ErrorCode.BUSY and error.retry_after_ms is None


def authorize_group(peer: Peer, action: Action, topics: Iterable[str]) -> None:
    """Require permission for all of ``topics``, or for at least one topic of the broker if ``topics`` is empty.

    Raises Denied.
    """
    for _ in authorizing_group(peer, action, topics):
        pass


def authorizing_group(peer: Peer, action: Action, topics: Iterable[str]) -> Iterator[None]:
    """Do the same as ``authorize_group``. Yields after each topic."""
    named = False
    for topic in topics:
        named = True
        peer.authorize(action, peer.broker.group_resource(topic))
        yield
    if not named:
        peer.broker.access.authorize_somewhere(peer.principal, action)


def authorizing_known(peer: Peer, action: Action, topics: Iterable[str], missing: ErrorCode) -> Iterator[None]:
    """Require permission for all topics of an existing group. Yields after each topic.

    Raises Missing(``missing``), as for a group that does not exist, or Denied if the client has no permission for any
    topic.
    """
    peer.broker.access.authorize_somewhere(peer.principal, action)
    for topic in topics:
        try:
            peer.authorize(action, peer.broker.group_resource(topic))
        except Denied:
            raise Missing(missing, "no such group") from None
        yield


def authorize_known(peer: Peer, action: Action, group: str) -> None:
    """Require permission for all topics that a group reads or has committed offsets for.

    Raises Missing(GROUP_MISSING), as for a group that does not exist, or Denied if the client has no permission for any
    topic.
    """
    for _ in authorizing_known(peer, action, peer.broker.classic.topics(group), ErrorCode.GROUP_MISSING):
        pass


def _run_steps(
    peer: Peer, reply: Reply, steps: Iterator[None], then: Callable[[], None], refuse: Callable[[BrokerError], None]
) -> None:
    """Run the steps, then call ``then``. Many steps run in slices, which end if the connection closes.

    Errors of the steps and of ``then`` are passed to ``refuse``.
    """

    def done(outcome: list[None] | BrokerError) -> None:
        try:
            if isinstance(outcome, BrokerError):
                raise outcome
            then()
        except BrokerError as error:
            refuse(error)

    try:
        for _ in zip(range(AT_ONCE_MAX), steps, strict=False):
            pass
        if next(steps, _END) is not _END:
            reply.cancel = Slices(peer.broker, steps, done).cancel
            return
    except BrokerError as error:
        refuse(error)
        return
    done([])


def random_id() -> UUID:
    return UUID(bytes=secrets.token_bytes(16), version=4)


def client_host(peer: Peer) -> str:
    """Return a member's address as Apache Kafka formats it: ``/127.0.0.1``."""
    return "/" + (host_of(peer.peer_address) or peer.peer_address)


def join_group(peer: Peer, reply: Reply, request: JoinGroupRequest, /) -> None:
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

    joins: list[Join] = []

    def steps() -> Iterator[None]:
        join = yield from _reading_join(peer, reply, request)
        joins.append(join)
        yield from authorizing_group(peer, Action.GROUP_JOIN, join.topics)
        yield from peer.broker.classic.check_topics(request.group_id, join.topics, by=peer.caller)

    def then() -> None:
        (join,) = joins
        new_id = f"{join.client_id[:CLIENT_ID_LENGTH_MAX]}-{random_id()}"
        peer.broker.classic.join(request.group_id, join, new_id=new_id, by=peer.caller, done=done)

    def refused(error: BrokerError) -> None:
        refuse(WireError.GROUP_MAX_SIZE_REACHED if is_full(error) else group_error(error))

    _run_steps(peer, reply, steps(), then, refused)


def _reading_join(peer: Peer, reply: Reply, request: JoinGroupRequest) -> Generator[None, None, Join]:
    version = reply.request.version
    protocols = tuple((one.name, bytes(one.metadata)) for one in request.protocols)
    read = NO_SUBSCRIPTION
    if request.protocol_type == CONSUMER:
        read = yield from read_subscriptions(protocols)
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
        kept=read.owned,
    )


def _joined(response: type[JoinGroupResponse], joined: Joined) -> JoinGroupResponse:
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


def sync_group(peer: Peer, reply: Reply, request: SyncGroupRequest, /) -> None:
    response = schema.response(Api.SYNC_GROUP)

    def done(outcome: Synced | BrokerError) -> None:
        if isinstance(outcome, Synced):
            body = response(
                protocol_type=outcome.protocol_type, protocol_name=outcome.protocol, assignment=outcome.assignment
            )
        else:
            body = response(error=group_error(outcome))
        reply.ok(body)

    assignments = {one.member_id: bytes(one.assignment) for one in request.assignments}

    def then() -> None:
        peer.broker.classic.sync(
            request.group_id,
            request.member_id,
            request.generation_id,
            assignments,
            instance_id=request.instance_id,
            protocol_type=request.protocol_type,
            protocol=request.protocol_name,
            by=peer.caller,
            done=done,
        )

    _as_member(peer, reply, request, then, done)


def _as_member(
    peer: Peer,
    reply: Reply,
    request: SyncGroupRequest | HeartbeatRequest | LeaveGroupRequest,
    then: Callable[[], None],
    refuse: Callable[[BrokerError], None],
) -> None:
    """Call ``then`` if the client may use the group. Otherwise, pass the error to ``refuse``."""
    topics = peer.broker.classic.subscribed_topics(request.group_id)
    steps = authorizing_known(peer, Action.GROUP_JOIN, topics, ErrorCode.MEMBER_MISSING)
    _run_steps(peer, reply, steps, then, refuse)


def heartbeat(peer: Peer, reply: Reply, request: HeartbeatRequest, /) -> None:
    response = schema.response(Api.HEARTBEAT)

    def then() -> None:
        peer.broker.classic.heartbeat(
            request.group_id,
            request.member_id,
            request.generation_id,
            instance_id=request.instance_id,
            by=peer.caller,
        )
        reply.ok(response())

    _as_member(peer, reply, request, then, lambda error: reply.ok(response(error=group_error(error))))


def leave_group(peer: Peer, reply: Reply, request: LeaveGroupRequest, /) -> None:
    response = schema.response(Api.LEAVE_GROUP)

    def then() -> None:
        left = _left(peer, reply, request, partial(_leave, peer, request.group_id))
        peer.broker.commit()  # once a member has got its response, it has left, even if the process is killed
        reply.ok(left)

    def refuse(error: BrokerError) -> None:
        if error.code is ErrorCode.MEMBER_MISSING:
            reply.ok(_left(peer, reply, request, lambda *_: group_error(error)))
        else:
            reply.ok(response(error=group_error(error)))

    _as_member(peer, reply, request, then, refuse)


def _left(
    peer: Peer, reply: Reply, request: LeaveGroupRequest, leave: Callable[[str, str | None], WireError]
) -> LeaveGroupResponse:
    """Process LeaveGroup. ``leave`` is called with the member id and the instance id of each member."""
    response = schema.response(Api.LEAVE_GROUP)
    if reply.request.version < MANY_LEAVE_SINCE:
        return response(error=leave(request.member_id, None))
    if len(request.members) > peer.broker.settings.members_max:
        return response(error=WireError.INVALID_REQUEST)
    return response(
        members=[
            response.Members(
                member_id=member.member_id,
                instance_id=member.instance_id,
                error=leave(member.member_id, member.instance_id),
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
