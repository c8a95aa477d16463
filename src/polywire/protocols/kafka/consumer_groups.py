"""ConsumerGroupHeartbeat: members of consumer groups (spec: kafka#consumer-groups).

A member needs permission to read all topics of its group. A pattern selects only topics that the member's user may
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from polywire.broker.groups.consumer import AWAY, JOINING, Beat, Subscription
from polywire.broker.groups.consumer_groups import BeatResponse
from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.groups import MS, authorize_group, client_host, group_error, is_full, random_id
from polywire.protocols.kafka.messages import WIRE, Api, WireError
from polywire.protocols.kafka.patterns import Pattern, PatternError
from polywire.protocols.kafka.peer import Peer, Reply
from polywire.protocols.runtime.slices import Slices
from polywire.types import Assignor

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

HEARTBEAT_MS: Final = 3_000  # heartbeat interval of a member whose assignment is complete
UNSEEN: Final = -1  # stands for the version of a topic list that was not searched completely
# heartbeat interval of a member that must revoke partitions, or waits for others to do so
UNSETTLED_HEARTBEAT_MS: Final = 500
ASSIGNORS: Final = {None: None, "uniform": Assignor.ROUND_ROBIN, "range": Assignor.RANGE}
_ERRORS: Final = {
    ErrorCode.GENERATION_STALE: WireError.FENCED_MEMBER_EPOCH,
    ErrorCode.GROUP_PROTOCOL_MISMATCH: WireError.GROUP_ID_NOT_FOUND,
}


Found = Callable[[PatternError | None, bool], None]
"""Called when the search for topics that match a pattern has ended.

The arguments are the error of the pattern (or None), and whether all topics were searched.
"""
Looking = Callable[[Pattern, set[str], Found], None]
"""Starts a search for the topics that match a pattern. Their names are added to the set."""


def consumer_group_heartbeat(
    peer: Peer, reply: Reply, request: ConsumerGroupHeartbeatRequest, /
) -> ConsumerGroupHeartbeatResponse | None:
    """ConsumerGroupHeartbeat: process the heartbeat of a member.

    The topics that match a pattern are searched when the pattern is new, and when topics were created or deleted.
    """
    return heartbeat(peer, reply, request, partial(look_here, peer, reply))


def heartbeat(
    peer: Peer, reply: Reply, request: ConsumerGroupHeartbeatRequest, look: Looking
) -> ConsumerGroupHeartbeatResponse | None:
    """Process a ConsumerGroupHeartbeat. ``look`` searches the topics that match a pattern."""
    response = schema.response(Api.CONSUMER_GROUP_HEARTBEAT)
    wrong = _wrong(request)
    if wrong:
        return response(error=WireError.INVALID_REQUEST, message=wrong)
    if request.server_assignor not in ASSIGNORS:
        names = ", ".join(name for name in ASSIGNORS if name is not None)
        return response(error=WireError.UNSUPPORTED_ASSIGNOR, message=f"unknown assignor (use {names})")
    beat = _beat_of(peer, reply, request)
    said = beat.subscription
    if said is None or not said.pattern:
        return _beat(peer, request, beat)
    try:
        pattern = Pattern(said.pattern)
    except PatternError as error:
        return response(error=WireError.INVALID_REGULAR_EXPRESSION, message=str(error))
    found = set(said.names)

    def done(refused: PatternError | None, saw_all: bool) -> None:
        if refused is not None:
            reply.ok(response(error=WireError.INVALID_REGULAR_EXPRESSION, message=str(refused)))
        else:  # an incomplete search is repeated at the next heartbeat
            known = said if saw_all else replace(said, version=UNSEEN)
            reply.ok(_beat(peer, request, replace(beat, topics=frozenset(found), subscription=known)))

    look(pattern, found, done)
    return None


def _wrong(request: ConsumerGroupHeartbeatRequest) -> str:
    """Return why this heartbeat is invalid, or an empty string if it is valid."""
    epoch = request.member_epoch
    if not request.group_id or not (request.member_id or epoch == JOINING):
        return "group id and member id must not be empty"
    if request.instance_id == "" or request.rack_id == "":
        return "instance id and rack id must be null or not empty"
    if epoch < AWAY:
        return f"member epoch is below {AWAY} got={epoch}"
    return f"member epoch {AWAY} requires an instance id" if epoch == AWAY and not request.instance_id else ""


def look_here(peer: Peer, reply: Reply, pattern: Pattern, found: set[str], then: Found) -> None:
    def done(looked: list[Topic | PatternError] | BrokerError) -> None:
        assert not isinstance(looked, BrokerError), "the search yields its errors"
        found.update(topic.name.full for topic in looked if isinstance(topic, Topic))
        then(next((error for error in looked if isinstance(error, PatternError)), None), True)

    reply.cancel = Slices[Topic | PatternError](peer.broker, matching(peer, pattern), done).cancel


def matching(peer: Peer, pattern: Pattern) -> Iterator[Topic | PatternError | None]:
    """Yield the topics that match a pattern and that the client may read.

    Other requests may run after each yield, also of None. A PatternError is yielded last.
    """
    for topic in peer.broker.topics():
        try:
            matches = pattern.matches(topic.name.full)
        except PatternError as error:
            yield error.with_traceback(None)
            return
        yield topic if matches and peer.permits(Action.GROUP_JOIN, topic) else None


def _beat(peer: Peer, request: ConsumerGroupHeartbeatRequest, beat: Beat) -> ConsumerGroupHeartbeatResponse:
    response = schema.response(Api.CONSUMER_GROUP_HEARTBEAT)
    try:
        consumers = peer.broker.consumers
        topics = consumers.topics_of(request.group_id, beat.member_id) if beat.topics is None else beat.topics
        authorize_group(peer, Action.GROUP_JOIN, topics)
        beaten = consumers.beat(request.group_id, beat, by=peer.caller)
    except BrokerError as error:
        code = WireError.GROUP_MAX_SIZE_REACHED if is_full(error) else _ERRORS.get(error.code) or group_error(error)
        if code is WireError.FENCED_INSTANCE_ID and beat.epoch == JOINING:
            code = WireError.UNRELEASED_INSTANCE_ID
        return response(error=code, message=error.message)
    return response(
        member_id=beat.member_id,
        member_epoch=beaten.epoch,
        heartbeat_interval_ms=HEARTBEAT_MS if beaten.is_settled else UNSETTLED_HEARTBEAT_MS,
        assignment=_assignment(response.Assignment, beaten),
    )


def _beat_of(peer: Peer, reply: Reply, request: ConsumerGroupHeartbeatRequest) -> Beat:
    owned, timeout_ms = request.topic_partitions, request.rebalance_timeout_ms
    subscription = _subscription(peer, request)
    return Beat(
        member_id=request.member_id or str(random_id()),
        epoch=request.member_epoch,
        wire=WIRE,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        rebalance_timeout_s=None if timeout_ms < 0 else timeout_ms / MS,
        topics=None if subscription is None else subscription.names,
        subscription=subscription,
        assignor=ASSIGNORS[request.server_assignor],
        owned=None if owned is None else {one.topic_id: frozenset(one.partitions) for one in owned},
        client_id=reply.request.client_id or "",
        client_host=client_host(peer),
    )


def _subscription(peer: Peer, request: ConsumerGroupHeartbeatRequest) -> Subscription | None:
    names, pattern = request.subscribed_topic_names, request.subscribed_topic_regex
    if request.member_epoch < JOINING or (request.member_epoch == JOINING and names is None and not pattern):
        return None  # the member leaves, or names no topics
    known = Subscription()
    if request.member_epoch != JOINING:
        known = peer.broker.consumers.subscription_of(request.group_id, request.member_id)
    says_nothing = names is None and pattern is None
    pattern = known.pattern if pattern is None else pattern
    version = peer.broker.group_topics_version if pattern else 0
    if says_nothing and (not pattern or known.version == version):
        return None
    return Subscription(names=known.names if names is None else frozenset(names), pattern=pattern, version=version)


def _assignment(
    made: type[ConsumerGroupHeartbeatResponse.Assignment], beaten: BeatResponse
) -> ConsumerGroupHeartbeatResponse.Assignment | None:
    if beaten.assignment is None:
        return None
    return made(
        topic_partitions=[
            made.TopicPartitions(topic_id=topic_id, partitions=sorted(partitions))
            for topic_id, partitions in beaten.assignment.items()
        ]
    )
