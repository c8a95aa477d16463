"""Kafka requests that list, describe and delete groups.

A user sees a group only with permission for all topics of the group, whichever protocol its members use. Long lists are
built in slices of time (spec: kafka#describing-groups, kafka#consumer-groups, kafka#deleting-groups).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from polywire.broker.groups.classic import Phase
from polywire.broker.groups.classic_groups import ClassicView
from polywire.broker.groups.group import ConsumerGroupView
from polywire.broker.permissions import Action
from polywire.errors import BrokerError, Denied, Missing
from polywire.protocols.kafka import schema, share_groups
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.groups import GROUP_OPERATIONS, authorize_known, group_error
from polywire.protocols.kafka.messages import NO_OPERATIONS, Api, WireError
from polywire.protocols.kafka.peer import Peer, Reply
from polywire.protocols.kafka.structures import Record
from polywire.protocols.kafka.subscription import CONSUMER
from polywire.protocols.runtime.slices import Slices
from polywire.types import Assignor, Level

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        ConsumerGroupDescribeRequest,
        ConsumerGroupDescribeResponse,
        DeleteGroupsRequest,
        DeleteGroupsResponse,
        DescribeGroupsRequest,
        DescribeGroupsResponse,
        ListGroupsRequest,
        ListGroupsResponse,
    )

    _Members = ConsumerGroupDescribeResponse.Groups.Members
    _Assignment = TypeVar("_Assignment", _Members.Assignment, _Members.TargetAssignment)

_Entry = TypeVar("_Entry", bound=Record)

STATES: Final = {
    Phase.EMPTY: "Empty",
    Phase.PREPARING: "PreparingRebalance",
    Phase.COMPLETING: "CompletingRebalance",
    Phase.STABLE: "Stable",
    Phase.DEAD: "Dead",
}
CLASSIC: Final = "classic"
SHARE: Final = "share"
ASSIGNORS: Final = {Assignor.ROUND_ROBIN: "uniform", Assignor.RANGE: "range"}
MISSING_SINCE: Final = 6  # first version of DescribeGroups with an error for missing groups


def _may(peer: Peer, action: Action, group: str) -> bool:
    """Return whether the client may perform an action on all topics of a group."""
    try:
        authorize_known(peer, action, group)
    except BrokerError:
        return False
    return True


def _find(peer: Peer, name: str) -> tuple[ConsumerGroupView | None, ClassicView | None]:
    """Return a group, as a consumer group or as a classic group; the other value is None.

    Both are None if the group does not exist or the client may not see it. Raises Denied if the client may not see any
    group.
    """
    try:
        authorize_known(peer, Action.GROUP_DESCRIBE, name)
    except Missing:
        return None, None
    consumers = consumer_view(peer, name)
    return consumers, None if consumers else peer.broker.classic.view(name)


def _sliced(peer: Peer, reply: Reply, entries: Iterator[_Entry | None], made: Callable[[list[_Entry]], Record]) -> None:
    def done(found: list[_Entry] | BrokerError) -> None:
        assert not isinstance(found, BrokerError), "errors are set in the entries"
        reply.ok(made(found))

    reply.cancel = Slices(peer.broker, entries, done).cancel


def list_groups(peer: Peer, reply: Reply, request: ListGroupsRequest, /) -> ListGroupsResponse | None:
    response = schema.response(Api.LIST_GROUPS)
    try:
        peer.broker.access.authorize_somewhere(peer.principal, Action.GROUP_LIST)
    except BrokerError as error:
        return response(error=group_error(error), groups=[])
    states = {state.casefold() for state in request.states_filter or ()}
    types = {type_.casefold() for type_ in request.types_filter or ()}
    entries = _listed(peer, response.Groups, states, types)
    _sliced(peer, reply, entries, lambda groups: response(groups=groups))
    return None


def _listed(
    peer: Peer, made: type[ListGroupsResponse.Groups], states: set[str], types: set[str]
) -> Iterator[ListGroupsResponse.Groups | None]:
    for name in peer.broker.shares.directory.names(by=peer.caller):
        view = peer.broker.shares.members.view(name)
        if view is None or not share_groups.permits(peer, Action.GROUP_DESCRIBE, name):
            yield None
        elif (not states or share_groups.state_of(view).casefold() in states) and (not types or SHARE in types):
            yield made(group_id=name, protocol_type=SHARE, group_state=share_groups.state_of(view), group_type=SHARE)
    for name in peer.broker.classic.names():
        entry = _entry(peer, made, name)
        if (
            entry is None
            or (states and entry.group_state.casefold() not in states)
            or (types and entry.group_type not in types)
            or not _may(peer, Action.GROUP_DESCRIBE, name)
        ):
            yield None
        else:
            yield entry


def _entry(peer: Peer, made: type[ListGroupsResponse.Groups], name: str) -> ListGroupsResponse.Groups | None:
    consumers = consumer_view(peer, name)
    if consumers is not None:
        return made(group_id=name, protocol_type=CONSUMER, group_state=_state(consumers), group_type=CONSUMER)
    view = peer.broker.classic.view(name)
    if view is None:
        return None
    return made(group_id=name, protocol_type=view.protocol_type, group_state=STATES[view.phase], group_type=CLASSIC)


def consumer_view(peer: Peer, name: str) -> ConsumerGroupView | None:
    """Return a consumer group; None for a classic group.

    A group is classic if it has classic members, or never had consumers.
    """
    view = peer.broker.consumers.view(name)
    return None if view is not None and not view.has_consumers and peer.broker.classic.has_members(name) else view


def _state(view: ConsumerGroupView) -> str:
    if not view.members:
        return STATES[Phase.EMPTY]
    return "Stable" if view.is_settled else "Reconciling"


def consumer_group_describe(peer: Peer, reply: Reply, request: ConsumerGroupDescribeRequest, /) -> None:
    """ConsumerGroupDescribe: describe consumer groups with their members, whichever protocol the members use."""
    response = schema.response(Api.CONSUMER_GROUP_DESCRIBE)
    entries = (
        _consumer_group(peer, response.Groups, name, want_operations=request.want_operations)
        for name in request.group_ids
    )
    _sliced(peer, reply, entries, lambda groups: response(groups=groups))


def _consumer_group(
    peer: Peer, made: type[ConsumerGroupDescribeResponse.Groups], name: str, *, want_operations: bool
) -> ConsumerGroupDescribeResponse.Groups:
    try:
        view, _ = _find(peer, name)
    except Denied as error:
        return made(error=group_error(error), group_id=name, members=[])
    if view is None:
        return made(error=WireError.GROUP_ID_NOT_FOUND, message="no such group", group_id=name, members=[])
    members = made.Members
    return made(
        group_id=name,
        group_state=_state(view),
        group_epoch=view.epoch,
        assignment_epoch=view.epoch,
        assignor_name=ASSIGNORS[view.assignor],
        members=[
            members(
                member_id=member.id,
                instance_id=member.instance_id,
                rack_id=member.rack_id,
                member_epoch=member.epoch,
                client_id=member.client_id,
                client_host=member.client_host,
                subscribed_topic_names=list(member.topics),
                subscribed_topic_regex=member.pattern or None,
                assignment=_partitions(peer, members.Assignment, member.reading),
                target_assignment=_partitions(peer, members.TargetAssignment, member.target),
                member_type=int(member.is_consumer),
            )
            for member in view.members
        ],
        operations=_operations(peer, name) if want_operations else NO_OPERATIONS,
    )


def _partitions(peer: Peer, made: type[_Assignment], partitions: Mapping[str, Collection[int]]) -> _Assignment:
    found = [(peer.broker.group_topic(name), numbers) for name, numbers in partitions.items() if numbers]
    return made(
        topic_partitions=[
            made.TopicPartitions(topic_id=topic.id, topic_name=topic.name.full, partitions=list(numbers))
            for topic, numbers in found
            if topic is not None
        ]
    )


def _operations(peer: Peer, name: str) -> int:
    """Return the operations that the client may perform on a group, as Kafka's bit set.

    An empty ``name`` stands for a missing group.
    """
    return sum(1 << bit for bit, action in GROUP_OPERATIONS if _may(peer, action, name))


def describe_groups(peer: Peer, reply: Reply, request: DescribeGroupsRequest, /) -> None:
    response = schema.response(Api.DESCRIBE_GROUPS)
    version = reply.request.version
    entries = (
        _described(peer, response.Groups, version, name, want_operations=request.want_operations)
        for name in request.groups
    )
    _sliced(peer, reply, entries, lambda groups: response(groups=groups))


def _described(
    peer: Peer, made: type[DescribeGroupsResponse.Groups], version: int, name: str, *, want_operations: bool
) -> DescribeGroupsResponse.Groups:
    try:
        consumers, view = _find(peer, name)
    except Denied as error:
        return made(error=group_error(error), group_id=name, members=[])
    if view is not None:
        return _described_view(made, view, _operations(peer, name) if want_operations else NO_OPERATIONS)
    operations = _operations(peer, name if consumers else "") if want_operations else NO_OPERATIONS
    missing = version >= MISSING_SINCE
    why = "group uses the newer protocol: describe it with ConsumerGroupDescribe" if consumers else "no such group"
    return made(
        error=WireError.GROUP_ID_NOT_FOUND if missing else WireError.NONE,
        message=why if missing else None,
        group_id=name,
        group_state=STATES[Phase.DEAD],
        members=[],
        operations=operations,
    )


def _described_view(
    made: type[DescribeGroupsResponse.Groups], view: ClassicView, operations: int
) -> DescribeGroupsResponse.Groups:
    is_stable = view.phase is Phase.STABLE
    return made(
        group_id=view.name,
        group_state=STATES[view.phase],
        protocol_type=view.protocol_type,
        protocol_data=view.protocol if is_stable else "",
        members=[
            made.Members(
                member_id=member.id,
                instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata if is_stable else b"",
                member_assignment=member.assignment,
            )
            for member in view.members
        ],
        operations=operations,
    )


def delete_groups(peer: Peer, reply: Reply, request: DeleteGroupsRequest, /) -> None:
    """Delete groups that have no members, with their committed offsets."""
    response = schema.response(Api.DELETE_GROUPS)
    entries = (_deleted(peer, response.Results, name) for name in request.groups_names)

    def made(results: list[DeleteGroupsResponse.Results], outcome: int | BrokerError) -> None:
        if isinstance(outcome, BrokerError):
            results = [response.Results(group_id=result.group_id, error=wire_error(outcome)) for result in results]
        reply.ok(response(results=results))

    def done(results: list[DeleteGroupsResponse.Results] | BrokerError) -> None:
        assert not isinstance(results, BrokerError), "errors are set in the entries"
        peer.broker.settle(Level.WRITTEN, partial(made, results))

    reply.cancel = Slices(peer.broker, entries, done).cancel


def _deleted(peer: Peer, made: type[DeleteGroupsResponse.Results], name: str) -> DeleteGroupsResponse.Results:
    try:
        if peer.broker.shares.directory.exists(name, by=peer.caller):
            share_groups.may(peer, Action.GROUP_DELETE, name)
            peer.broker.shares.delete(name, by=peer.caller)
            return made(group_id=name)
        authorize_known(peer, Action.GROUP_DELETE, name)
        peer.broker.classic.delete(name, by=peer.caller)
    except BrokerError as error:
        return made(group_id=name, error=group_error(error))
    return made(group_id=name)
