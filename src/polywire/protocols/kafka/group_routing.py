"""Route requests about Kafka groups between the processes of a broker (decision 0128).

The hash of a group's name selects its coordinator shard, which stores members and generations. Committed offsets are
stored by the shards of the topics, because other protocols look for them there. The coordinator checks the member that
commits, and forwards the commit.

* Requests to another shard than the coordinator get the error after which clients look up the coordinator.
* A late commit never overwrites a newer commit of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from polywire.errors import BrokerError
from polywire.protocols.kafka import group_lists, groups, positions, schema
from polywire.protocols.kafka.consumer_groups import consumer_group_heartbeat
from polywire.protocols.kafka.groups import NULL_PROTOCOL_SINCE, group_error
from polywire.protocols.kafka.messages import NO_ID, SERVED, Api, Request, WireError
from polywire.protocols.kafka.positions import MANY_GROUPS_SINCE
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.routed import Bodies, RoutedKafkaSession, ask_shards, routed
from polywire.protocols.kafka.session import Handler, KafkaSession
from polywire.protocols.kafka.structures import Record, changed

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        ConsumerGroupDescribeRequest,
        ConsumerGroupDescribeResponse,
        DeleteGroupsRequest,
        DeleteGroupsResponse,
        DescribeGroupsRequest,
        DescribeGroupsResponse,
        JoinGroupRequest,
        JoinGroupResponse,
        ListGroupsRequest,
        ListGroupsResponse,
        OffsetCommitRequest,
        OffsetCommitResponse,
        OffsetDeleteRequest,
        OffsetDeleteResponse,
        OffsetFetchRequest,
        OffsetFetchResponse,
    )

    _FailedTopic = TypeVar("_FailedTopic", OffsetCommitResponse.Topics, OffsetDeleteResponse.Topics)
    _Fetch = TypeVar("_Fetch", OffsetFetchRequest, OffsetFetchRequest.Groups)
    _Fetched = TypeVar("_Fetched", OffsetFetchResponse, OffsetFetchResponse.Groups)
    _Topic = TypeVar("_Topic", bound=Record)

DEAD: Final = "Dead"
EMPTY: Final = "Empty"
_NO_GROUP: Final = frozenset({WireError.NONE, WireError.GROUP_ID_NOT_FOUND})


def coordinates(session: RoutedKafkaSession, group: str) -> bool:
    return session.shared.coordinates(group)


def at_coordinator(handler: Handler, refused: Callable[[Any, Request], Record]) -> Handler:
    """Return a handler that rejects requests for groups of other coordinators. ``refused`` builds the response."""

    def handle(session: KafkaSession, answer: Answer, request: Any, /) -> Record | None:
        if coordinates(routed(session), request.group_id):
            return handler(session, answer, request)
        return refused(request, answer.request)

    return handle


def _refused(request: Record, head: Request) -> Record:
    refused: Record = schema.response(head.api)(error=WireError.NOT_COORDINATOR)
    return refused


def _join_refused(request: JoinGroupRequest, head: Request) -> JoinGroupResponse:
    name = "" if head.version < NULL_PROTOCOL_SINCE else None
    made = schema.response(Api.JOIN_GROUP)
    return made(error=WireError.NOT_COORDINATOR, protocol_name=name, member_id=request.member_id)


# Committed offsets


class LocalPart:
    """The part of a request that this shard executes itself.

    Implements ``Reply``: the response is passed to ``then``.
    """

    def __init__(self, request: Request, then: Callable[[Any], None]) -> None:
        self.request = request
        self.cancel: Callable[[], None] | None = None
        self._then: Final = then

    def ok(self, body: Any) -> None:
        self._then(body)


def _commit_refused(
    request: OffsetCommitRequest, head: Request, error: WireError = WireError.NOT_COORDINATOR
) -> OffsetCommitResponse:
    response = schema.response(Api.OFFSET_COMMIT)
    return response(topics=[_failed(response.Topics, topic, error) for topic in request.topics])


def _failed(
    made: type[_FailedTopic], topic: OffsetCommitRequest.Topics | OffsetDeleteRequest.Topics, error: WireError
) -> _FailedTopic:
    names = {field: getattr(topic, field) for field in ("name", "topic_id") if hasattr(topic, field)}
    return made(**names, partitions=[made.Partitions(index=one.index, error=error) for one in topic.partitions])


def divided(session: RoutedKafkaSession, topics: Iterable[_Topic]) -> dict[int, list[_Topic]]:
    """Group a request's entries for topics by the shards of the topics.

    Entries of unknown topics are assigned to this shard, which reports that the topic does not exist.
    """
    by_shard: dict[int, list[_Topic]] = {}
    for topic in topics:
        by_shard.setdefault(_shard_of(session, topic), []).append(topic)
    return by_shard


def _shard_of(session: RoutedKafkaSession, topic: Any) -> int:
    topic_id = getattr(topic, "topic_id", NO_ID)
    if topic_id != NO_ID:
        found = session.router.topic_of_id(topic_id)
        return session.shards.own if found is None else session.router.shard_of_topic(found)
    shard = session.shards.shard_of(topic.name)
    return session.shards.own if shard is None else shard


def offset_commit(
    session: KafkaSession, answer: Answer, request: OffsetCommitRequest, /
) -> OffsetCommitResponse | None:
    """OffsetCommit: check the member here, then store the offsets in the shards of the topics."""
    session = routed(session)
    by_shard = divided(session, request.topics)
    own = session.shards.own
    if by_shard.keys() <= {own}:
        positions.offset_commit(session, answer, request)
        return None
    try:
        positions.check_member(session, request)
    except BrokerError as error:
        return _commit_refused(request, answer.request, positions.member_error(session, request, error))
    here = by_shard.pop(own, None)
    entries: list[OffsetCommitResponse.Topics] = []
    by_shard = {shard: _may_commit(session, request, topics, entries) for shard, topics in by_shard.items()}
    number = turn_of(session, request.group_id)
    bodies = {shard: changed(request, topics=topics, generation=number) for shard, topics in by_shard.items() if topics}

    def join(found: Bodies) -> OffsetCommitResponse:
        response = schema.response(Api.OFFSET_COMMIT)
        for shard, body in found.items():
            if body is None:
                error = WireError.COORDINATOR_LOAD_IN_PROGRESS
                entries.extend(_failed(response.Topics, topic, error) for topic in by_shard[shard])
            else:
                entries.extend(_retriable(session, request, body.topics))
        return response(topics=entries)

    if here is None:
        ask_shards(session, answer, bodies, join)
        return None

    def stored(body: OffsetCommitResponse) -> None:
        entries.extend(body.topics)
        ask_shards(session, answer, bodies, join)

    part = LocalPart(answer.request, stored)
    positions.offset_commit(session, part, changed(request, topics=here))
    if part.cancel is not None:
        answer.cancel = part.cancel
    return None


def turn_of(session: RoutedKafkaSession, group: str) -> int:
    """Return the number of the group's current generation, which shards compare to reject late commits.

    It increases when partitions change owners.
    """
    broker = session.broker
    return session.shared.turns.number(group, (broker.classic.generation(group), broker.consumers.turn(group)))


def _may_commit(
    session: RoutedKafkaSession,
    request: OffsetCommitRequest,
    topics: Iterable[OffsetCommitRequest.Topics],
    failed: list[OffsetCommitResponse.Topics],
) -> list[OffsetCommitRequest.Topics]:
    """Return the topics whose offsets the member may commit. For each other topic, add an error to ``failed``.

    Used for topics of other shards, which do not know the member.
    """
    response, free = schema.response(Api.OFFSET_COMMIT), []
    for topic in topics:
        try:
            positions.check_read(session, request, _name_of(session, topic), [one.index for one in topic.partitions])
        except BrokerError as error:
            failed.append(_failed(response.Topics, topic, group_error(error)))
        else:
            free.append(topic)
    return free


def _name_of(session: RoutedKafkaSession, topic: OffsetCommitRequest.Topics) -> str:
    known = session.router.topic_of_id(topic.topic_id)
    return topic.name if known is None else known.name.full


def _retriable(
    session: RoutedKafkaSession, request: OffsetCommitRequest, topics: Iterable[OffsetCommitResponse.Topics]
) -> Iterator[OffsetCommitResponse.Topics]:
    """Yield the response entries of another shard. If that shard has rejected a commit as late, let the client retry.

    That can happen to a current member if the group's generation has changed while the commit was forwarded.
    """
    broker, group = session.broker, request.group_id
    may = (
        broker.consumers.has_member(group, request.member_id) or broker.classic.generation(group) == request.generation
    )
    for topic in topics:
        for entry in topic.partitions if may else ():
            if entry.error == WireError.ILLEGAL_GENERATION:
                entry.error = WireError.COORDINATOR_LOAD_IN_PROGRESS
        yield topic


def offset_fetch(session: KafkaSession, answer: Answer, request: OffsetFetchRequest, /) -> OffsetFetchResponse | None:
    """OffsetFetch: return offsets of one or several groups from the topics of all shards."""
    session = routed(session)
    if answer.request.version < MANY_GROUPS_SINCE:
        if not coordinates(session, request.group_id):
            return _fetch_refused(request, answer.request)
        bodies = _fetches(session, request)
        ask_shards(session, answer, bodies, partial(_joined_fetch, schema.response(Api.OFFSET_FETCH), request))
        return None
    response = schema.response(Api.OFFSET_FETCH)
    errors = {group.group_id: _fetch_error(session, group) for group in request.groups}
    by_shard: dict[int, list[OffsetFetchRequest.Groups]] = {}
    for group in request.groups:
        for shard, part in () if errors[group.group_id] else _fetches(session, group).items():
            by_shard.setdefault(shard, []).append(part)

    def join(found: Bodies) -> OffsetFetchResponse:
        entries = []
        for group in request.groups:
            shards = [shard for shard, some in by_shard.items() if any(one.group_id == group.group_id for one in some)]
            if not shards:
                entries.append(response.Groups(group_id=group.group_id, topics=[], error=errors[group.group_id]))
            else:
                parts = {shard: _group_of(found[shard], group.group_id) for shard in shards}
                entries.append(_joined_fetch(response.Groups, group, parts))
        return response(groups=entries)

    ask_shards(session, answer, {shard: changed(request, groups=some) for shard, some in by_shard.items()}, join)
    return None


def _fetch_error(session: RoutedKafkaSession, group_request: OffsetFetchRequest.Groups) -> WireError:
    if not coordinates(session, group_request.group_id):
        return WireError.NOT_COORDINATOR
    try:
        positions.check_reader(session, group_request)
    except BrokerError as error:
        return positions.epoch_error(error)
    return WireError.NONE


def _group_of(body: OffsetFetchResponse | None, group: str) -> OffsetFetchResponse.Groups | None:
    return None if body is None else next((one for one in body.groups if one.group_id == group), None)


def _fetches(session: RoutedKafkaSession, group_request: _Fetch) -> dict[int, _Fetch]:
    if group_request.topics is None:
        return dict.fromkeys(range(session.shards.count), group_request)
    by_shard = divided(session, group_request.topics) or {session.shards.own: []}
    return {shard: changed(group_request, topics=topics) for shard, topics in by_shard.items()}


def _joined_fetch(
    made: type[_Fetched], group_request: OffsetFetchRequest | OffsetFetchRequest.Groups, parts: Bodies
) -> _Fetched:
    """Join the offsets of one group from several shards. If a shard has failed, return its error instead."""
    errors = [WireError.COORDINATOR_LOAD_IN_PROGRESS if part is None else part.error for part in parts.values()]
    error = next((one for one in errors if one), WireError.NONE)
    topics = [] if error else [topic for part in parts.values() for topic in part.topics]
    named: dict[str, Any] = {"group_id": group_request.group_id} if "group_id" in made.DEFAULTS else {}
    return made(error=error, topics=topics, **named)


def _fetch_refused(request: OffsetFetchRequest, head: Request) -> OffsetFetchResponse:
    response = schema.response(Api.OFFSET_FETCH)
    error = WireError.NOT_COORDINATOR
    made = response.Topics
    topics = [
        made(name=one.name, partitions=[made.Partitions(index=index, offset=-1, error=error) for index in one.indexes])
        for one in request.topics or ()
    ]
    return response(error=error, topics=topics)


def offset_delete(session: KafkaSession, answer: Answer, request: OffsetDeleteRequest, /) -> None:
    """OffsetDelete: delete offsets in the shards of the topics, except for topics that members of the group read."""
    session = routed(session)
    response = schema.response(Api.OFFSET_DELETE)
    group, classic = request.group_id, session.broker.classic
    read = {topic.name for topic in request.topics if classic.has_readers(group, topic.name)}
    free = [topic for topic in request.topics if topic.name not in read]
    error = WireError.GROUP_SUBSCRIBED_TO_TOPIC
    entries = [_failed(response.Topics, topic, error) for topic in request.topics if topic.name in read]
    by_shard = divided(session, free)

    def join(found: Mapping[int, OffsetDeleteResponse | None]) -> OffsetDeleteResponse:
        missing = [body for body in found.values() if body is not None and body.error]
        if len(missing) == len(found) and not entries and missing:
            return missing[0]
        for shard, body in found.items():
            if body is None:
                failed = WireError.COORDINATOR_NOT_AVAILABLE
                entries.extend(_failed(response.Topics, topic, failed) for topic in by_shard[shard])
            elif body.error:  # the group has no offsets in that shard
                entries.extend(_failed(response.Topics, topic, WireError.NONE) for topic in by_shard[shard])
            else:
                entries.extend(body.topics)
        return response(topics=entries)

    bodies = {shard: changed(request, topics=topics) for shard, topics in by_shard.items()}
    ask_shards(session, answer, bodies, join)


# Lists for tools


def list_groups(session: KafkaSession, answer: Answer, request: ListGroupsRequest, /) -> None:
    """ListGroups: list the groups that this shard coordinates. Clients send the request to every broker."""
    session = routed(session)
    own = session.shards.own
    states = {state.casefold() for state in request.states_filter or ()}
    types = {type_.casefold() for type_ in request.types_filter or ()}

    def join(found: Bodies) -> ListGroupsResponse:
        response = schema.response(Api.LIST_GROUPS)
        if any(body is None for body in found.values()):
            return response(error=WireError.COORDINATOR_NOT_AVAILABLE, groups=[])
        of_own: ListGroupsResponse = found[own]
        if of_own.error:
            return of_own
        by_id: dict[str, ListGroupsResponse.Groups] = {}
        for shard in sorted(found, key=lambda shard: shard != own):
            for group in found[shard].groups:
                known = by_id.get(group.group_id)
                has_more = known is None or (known.group_state == EMPTY and group.group_state != EMPTY)
                if has_more and coordinates(session, group.group_id):
                    by_id[group.group_id] = group
        entries = [
            group
            for _, group in sorted(by_id.items())
            if (not states or group.group_state.casefold() in states)
            and (not types or group.group_type.casefold() in types)
        ]
        return response(groups=entries)

    everyone = dict.fromkeys(range(session.shards.count), changed(request, states_filter=[], types_filter=[]))
    ask_shards(session, answer, everyone, join, version=SERVED[Api.LIST_GROUPS].last)


def describe_groups(session: KafkaSession, answer: Answer, request: DescribeGroupsRequest, /) -> None:
    """DescribeGroups: return the coordinator's view of each group.

    If the group has no members there, but has some in another shard (those of other protocols), return that shard's
    view.
    """
    session = routed(session)
    response = schema.response(Api.DESCRIBE_GROUPS)

    def failed(group: str, error: WireError) -> DescribeGroupsResponse.Groups:
        return response.Groups(error=error, group_id=group, group_state="", members=[])

    def join(found: Bodies) -> DescribeGroupsResponse:
        known: dict[str, DescribeGroupsResponse.Groups] = {}
        for shard in sorted(found, key=lambda shard: shard != session.shards.own):
            for one in found[shard].groups if found[shard] is not None else ():
                was = known.get(one.group_id)
                if was is not None and group_lists.consumer_view(session, one.group_id) is not None:
                    continue  # other shards have only its offsets, so they report it as a classic group
                if was is None or was.error or was.group_state == DEAD or (was.group_state == EMPTY and one.members):
                    known[one.group_id] = one if was is None or not one.error else was
        lost = WireError.COORDINATOR_NOT_AVAILABLE
        return response(
            groups=[
                known.get(group, failed(group, lost))
                if coordinates(session, group)
                else failed(group, WireError.NOT_COORDINATOR)
                for group in request.groups
            ]
        )

    names = [group for group in request.groups if coordinates(session, group)]
    bodies = dict.fromkeys(range(session.shards.count), changed(request, groups=names)) if names else {}
    ask_shards(session, answer, bodies, join)


def consumer_group_describe(session: KafkaSession, answer: Answer, request: ConsumerGroupDescribeRequest, /) -> None:
    """ConsumerGroupDescribe: describe the groups that this shard coordinates."""
    session = routed(session)
    response = schema.response(Api.CONSUMER_GROUP_DESCRIBE)
    of_others = [group for group in request.group_ids if not coordinates(session, group)]
    made = response.Groups
    entries = [made(error=WireError.NOT_COORDINATOR, group_id=group, members=[]) for group in of_others]

    def join(body: ConsumerGroupDescribeResponse) -> None:
        answer.ok(response(groups=[*body.groups, *entries]))

    here = [group for group in request.group_ids if coordinates(session, group)]
    part = LocalPart(answer.request, join)
    group_lists.consumer_group_describe(session, part, changed(request, group_ids=here))
    answer.cancel = part.cancel


def delete_groups(session: KafkaSession, answer: Answer, request: DeleteGroupsRequest, /) -> None:
    """DeleteGroups: delete the offsets of a group in all shards, unless the group has members."""
    session = routed(session)
    response, own = schema.response(Api.DELETE_GROUPS), session.shards.own
    errors: dict[str, int] = dict.fromkeys(request.groups_names, WireError.NOT_COORDINATOR)
    names = [group for group in errors if coordinates(session, group)]

    def made() -> DeleteGroupsResponse:
        return response(results=[response.Results(group_id=group, error=error) for group, error in errors.items()])

    def coordinator_answered(found: Bodies) -> DeleteGroupsResponse | None:
        _collect_errors(found, names, errors)
        free = [group for group in names if errors[group] in _NO_GROUP]
        if not free:
            return made()
        others = {shard for shard in range(session.shards.count) if shard != own}

        def all_answered(bodies: Bodies) -> DeleteGroupsResponse:
            known = {group: errors[group] for group in free}
            for shard, body in bodies.items():
                of_shard: dict[str, int] = {}
                _collect_errors({shard: body}, free, of_shard)
                for group, error in of_shard.items():
                    known[group] = _joined_error(known[group], error)
            errors.update(known)
            return made()

        bodies = dict.fromkeys(others, changed(request, groups_names=free))
        ask_shards(session, answer, bodies, all_answered, again=False)
        return None

    own_body = {own: changed(request, groups_names=names)} if names else {}
    ask_shards(session, answer, own_body, coordinator_answered, again=False)


def _collect_errors(found: Bodies, names: Iterable[str], errors: dict[str, int]) -> None:
    for body in found.values():
        if body is None:
            errors.update(dict.fromkeys(names, WireError.COORDINATOR_NOT_AVAILABLE))
        else:
            errors.update({one.group_id: one.error for one in body.results})


def _joined_error(error: int, other_error: int) -> int:
    """Combine the results of two shards for deleting a group.

    The result is an error if one shard has failed. Otherwise it is success if at least one shard has deleted something.
    """
    for result in (error, other_error):
        if result not in _NO_GROUP:
            return result
    return min(error, other_error)


GROUP_HANDLERS: Final[Mapping[Api, Handler]] = {
    Api.JOIN_GROUP: at_coordinator(groups.join_group, _join_refused),
    Api.SYNC_GROUP: at_coordinator(groups.sync_group, _refused),
    Api.HEARTBEAT: at_coordinator(groups.heartbeat, _refused),
    Api.LEAVE_GROUP: at_coordinator(groups.leave_group, _refused),
    Api.CONSUMER_GROUP_HEARTBEAT: at_coordinator(consumer_group_heartbeat, _refused),
    Api.CONSUMER_GROUP_DESCRIBE: consumer_group_describe,
    Api.OFFSET_COMMIT: at_coordinator(offset_commit, _commit_refused),
    Api.OFFSET_FETCH: offset_fetch,
    Api.OFFSET_DELETE: at_coordinator(offset_delete, _refused),
    Api.LIST_GROUPS: list_groups,
    Api.DESCRIBE_GROUPS: describe_groups,
    Api.DELETE_GROUPS: delete_groups,
}
