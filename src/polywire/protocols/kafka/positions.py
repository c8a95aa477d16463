"""OffsetCommit, OffsetFetch, OffsetDelete (spec: kafka#offsetcommit, kafka#offsetfetch, kafka#deleting-groups).

An error in one partition does not affect others. If the client may not commit for the group, all partitions get an
error. Requests for thousands of partitions are processed in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from polywire.broker.groups.commits import Commit
from polywire.broker.groups.offsets import Position
from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.groups import authorize_group, authorize_known, group_error
from polywire.protocols.kafka.lookup import led_topic
from polywire.protocols.kafka.messages import METADATA_BYTES_MAX, NO_ID, NO_OFFSET, WIRE, Api, WireError
from polywire.protocols.kafka.peer import Peer, Reply
from polywire.protocols.kafka.replies import HasError, PendingResponse, answer_in_slices
from polywire.types import PositionKind

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        OffsetCommitRequest,
        OffsetCommitResponse,
        OffsetDeleteRequest,
        OffsetDeleteResponse,
        OffsetFetchRequest,
        OffsetFetchResponse,
        TxnOffsetCommitRequest,
    )

    _Topic = TypeVar("_Topic", OffsetFetchResponse.Topics, OffsetFetchResponse.Groups.Topics)
    _Partition = TypeVar(
        "_Partition", OffsetFetchResponse.Topics.Partitions, OffsetFetchResponse.Groups.Topics.Partitions
    )

POSITIONS_AT_ONCE_MAX: Final = 500  # offsets of a commit that are stored in one step, about 1 ms
PARTITIONS_PER_STEP: Final = 64  # committed offsets of one topic that are returned in one step
TOPICS_AT_ONCE_MAX: Final = 16  # topics, or steps of one topic, without a pause
MANY_GROUPS_SINCE: Final = 8  # first version of OffsetFetch for several groups
BY_ID_SINCE: Final = 10  # first version of OffsetCommit and OffsetFetch that names topics by id
# fields that name a topic; the second exists only in versions for several groups
_NAMES: Final = ("name", "topic_id")


def _topic_error(error: BrokerError, version: int) -> WireError:
    """Return the Kafka error for a topic that cannot be used. It depends on whether the version names topics by id."""
    if version >= BY_ID_SINCE and error.code is ErrorCode.TOPIC_MISSING:
        return WireError.UNKNOWN_TOPIC_ID
    return wire_error(error)


def epoch_error(error: BrokerError) -> WireError:
    """Return the Kafka error for a member of a consumer group. Its generations are called member epochs."""
    return WireError.STALE_MEMBER_EPOCH if error.code is ErrorCode.GENERATION_STALE else group_error(error)


def member_error(peer: Peer, request: OffsetCommitRequest, error: BrokerError) -> WireError:
    """Return the Kafka error for a member that may not commit. It depends on the type of the group."""
    is_consumer = peer.broker.consumers.has_member(request.group_id, request.member_id)
    return epoch_error(error) if is_consumer else group_error(error)


# OffsetCommit


class _TopicCommit(NamedTuple):
    """Offsets to commit for one topic.

    Attributes:
        topic: the request's entry of the topic.
        partitions: the request's entries of some of its partitions.
        entries: the response's entries of the same partitions.
    """

    topic: OffsetCommitRequest.Topics
    partitions: Sequence[OffsetCommitRequest.Topics.Partitions]
    entries: Sequence[OffsetCommitResponse.Topics.Partitions]


def offset_commit(peer: Peer, reply: Reply, request: OffsetCommitRequest, /) -> None:
    """OffsetCommit. A large commit is split into parts. Each part is stored completely or not at all."""
    store(peer, reply, request, partial(check_member, peer, request))


def store(peer: Peer, reply: Reply, request: OffsetCommitRequest, check: Callable[[], None]) -> None:
    """Commit the offsets of a request. ``check`` is called before each part, and raises BrokerError to reject it."""
    body = schema.response(Api.OFFSET_COMMIT)(topics=[])
    pending_response = PendingResponse(reply, body)
    parts = _parts(request.topics, body.topics)
    commit = partial(_commit, peer, reply.request.version, request, check, pending_response)
    pending_response.run(peer.broker, map(commit, parts), at_once=1)


def check_member(peer: Peer, request: OffsetCommitRequest) -> None:
    """Raise BrokerError if the member may not commit offsets of the group now."""
    classic, consumers = peer.broker.classic, peer.broker.consumers
    member = request.group_id, request.member_id, request.generation
    authorize_group(peer, Action.OFFSET_COMMIT, ())
    check = consumers.check_epoch if consumers.has_member(*member[:2]) else classic.check_commit
    check(*member, instance_id=request.instance_id, by=peer.caller)


def check_read(peer: Peer, request: OffsetCommitRequest, topic: str, partitions: Sequence[int]) -> None:
    """Raise BrokerError if partitions are assigned to another member. ``check_member`` must have been called."""
    classic, consumers = peer.broker.classic, peer.broker.consumers
    group, member_id, by = request.group_id, request.member_id, peer.caller
    if consumers.has_member(group, member_id):
        consumers.check_partitions(group, topic, member_id, partitions, wire=WIRE, by=by)
    else:
        classic.check_partitions(group, topic, member_id, partitions, by=by)


def _parts(
    topics: Iterable[OffsetCommitRequest.Topics], topic_entries: list[OffsetCommitResponse.Topics]
) -> Iterator[list[_TopicCommit]]:
    """Split a commit into parts of at most ``POSITIONS_AT_ONCE_MAX`` partitions.

    Response entries are added to ``topic_entries``.
    """
    made = schema.response(Api.OFFSET_COMMIT).Topics
    part: list[_TopicCommit] = []
    room = POSITIONS_AT_ONCE_MAX
    for topic in topics:
        at = 0
        topic_entries.append(made(name=topic.name, topic_id=topic.topic_id, partitions=[]))
        while at == 0 or at < len(topic.partitions):
            some = topic.partitions[at : at + room]
            entries = [made.Partitions(index=one.index) for one in some]
            topic_entries[-1].partitions += entries
            part.append(_TopicCommit(topic, some, entries))
            at += max(len(some), 1)
            room -= max(len(some), 1)
            if room == 0:
                yield part
                part, room = [], POSITIONS_AT_ONCE_MAX
    if part:
        yield part


def _commit(
    peer: Peer,
    version: int,
    request: OffsetCommitRequest,
    check: Callable[[], None],
    pending_response: PendingResponse,
    part: Sequence[_TopicCommit],
) -> None:
    """Check permissions and store one part."""
    classic, consumers = peer.broker.classic, peer.broker.consumers
    member = request.group_id, request.member_id, request.generation
    is_consumer = consumers.has_member(*member[:2])
    all_entries = [entry for topic in part for entry in topic.entries]
    try:
        check()
    except BrokerError as error:
        _refuse(all_entries, member_error(peer, request, error))
        return
    commits = _commits(peer, version, part)

    def done(outcome: int | BrokerError) -> None:
        if isinstance(outcome, BrokerError):
            _refuse(all_entries, wire_error(outcome))
        pending_response.count_result()

    made = {name: stored for name, (stored, _) in commits.items()}
    by, generation = peer.caller, max(request.generation, -1)
    pending_response.expect()
    try:
        if is_consumer:
            refused = consumers.commit(*member[:2], made, epoch=generation, wire=WIRE, by=by, done=done)
        else:
            refused = classic.commit(member[0], made, generation=generation, member_id=member[1], by=by, done=done)
    except BrokerError as error:
        _refuse(all_entries, group_error(error))
        pending_response.count_result()
        return
    for name, why in refused.items():
        for entry in commits[name][1]:
            entry.error = entry.error or group_error(why)


def _refuse(entries: Iterable[HasError], code: WireError) -> None:
    for entry in entries:
        entry.error = code


def _commits(
    peer: Peer, version: int, topics: Iterable[_TopicCommit]
) -> dict[str, tuple[dict[int, Commit], list[OffsetCommitResponse.Topics.Partitions]]]:
    """Return the offsets to store and their response entries, by full topic name.

    Offsets that cannot be stored are skipped, and their entries get an error.
    """
    found: dict[str, tuple[dict[int, Commit], list[OffsetCommitResponse.Topics.Partitions]]] = {}
    for topic_commit in topics:
        try:
            topic = led_topic(peer, Action.OFFSET_COMMIT, topic_commit.topic.name, topic_commit.topic.topic_id)
        except BrokerError as error:
            _refuse(topic_commit.entries, _topic_error(error, version))
            continue
        stored, entries = found.setdefault(topic.name.full, ({}, []))
        stored.update(read_commits(topic, topic_commit.partitions, topic_commit.entries))
        entries += [entry for entry in topic_commit.entries if not entry.error]
    return found


def read_commits(
    topic: Topic,
    partition_requests: Iterable[OffsetCommitRequest.Topics.Partitions | TxnOffsetCommitRequest.Topics.Partitions],
    entries: Iterable[HasError],
) -> dict[int, Commit]:
    """Return the offsets to store, by partition.

    Entries of missing partitions, or with metadata that is too long, get an error.
    """
    found: dict[int, Commit] = {}
    for partition_request, entry in zip(partition_requests, entries, strict=True):
        if not 0 <= partition_request.index < len(topic.partitions):
            entry.error = WireError.UNKNOWN_TOPIC_OR_PARTITION
        elif len((partition_request.metadata or "").encode("utf-8", "replace")) > METADATA_BYTES_MAX:
            entry.error = WireError.OFFSET_METADATA_TOO_LARGE
        else:
            found[partition_request.index] = Commit(
                partition_request.offset, max(partition_request.leader_epoch, -1), partition_request.metadata or ""
            )
    return found


# OffsetFetch


def offset_fetch(peer: Peer, reply: Reply, request: OffsetFetchRequest, /) -> OffsetFetchResponse | None:
    version = reply.request.version
    response = schema.response(Api.OFFSET_FETCH)
    if version >= MANY_GROUPS_SINCE:
        group, stable = response.Groups, request.require_stable
        groups = (_fetched(peer, version, group, group_request, stable=stable) for group_request in request.groups)
        made = partial(_groups_response, response)
        return answer_in_slices(peer.broker, reply, chain.from_iterable(groups), made, at_once=TOPICS_AT_ONCE_MAX)
    try:
        authorize_group(peer, Action.OFFSET_FETCH, ())
    except BrokerError as error:
        return response(error=group_error(error), topics=[])
    entries = _positions(
        peer, version, response.Topics, request.group_id, request.topics, stable=request.require_stable
    )
    return answer_in_slices(
        peer.broker, reply, entries, partial(_topics_response, response), at_once=TOPICS_AT_ONCE_MAX
    )


def check_reader(peer: Peer, group_request: OffsetFetchRequest.Groups) -> None:
    """Raise BrokerError if the client may not read the group's committed offsets, or sends an old member epoch."""
    group, member, consumers = group_request.group_id, group_request.member_id, peer.broker.consumers
    authorize_group(peer, Action.OFFSET_FETCH, ())
    if member and group_request.member_epoch >= 0 and consumers.has_member(group, member):
        consumers.check_epoch(group, member, group_request.member_epoch, by=peer.caller)


def _groups_response(
    response: type[OffsetFetchResponse], groups: list[OffsetFetchResponse.Groups]
) -> OffsetFetchResponse:
    return response(groups=groups)


def _topics_response(
    response: type[OffsetFetchResponse], topics: list[OffsetFetchResponse.Topics]
) -> OffsetFetchResponse:
    return response(topics=topics)


def _fetched(
    peer: Peer,
    version: int,
    made: type[OffsetFetchResponse.Groups],
    group_request: OffsetFetchRequest.Groups,
    *,
    stable: bool,
) -> Iterator[OffsetFetchResponse.Groups | None]:
    group = group_request.group_id
    topics: list[OffsetFetchResponse.Groups.Topics] = []
    try:
        check_reader(peer, group_request)
        for topic in _positions(peer, version, made.Topics, group, group_request.topics, stable=stable):
            if topic is None:
                yield None
            else:
                topics.append(topic)
    except BrokerError as error:
        yield made(group_id=group, topics=[], error=epoch_error(error))
    else:
        yield made(group_id=group, topics=topics)


def _positions(
    peer: Peer,
    version: int,
    made: type[_Topic],
    group: str,
    topic_requests: Iterable[OffsetFetchRequest.Topics | OffsetFetchRequest.Groups.Topics] | None,
    *,
    stable: bool,
) -> Iterator[_Topic | None]:
    """Yield an entry for each named topic, or for each topic that has committed offsets.

    After each None, other requests may run.

    ``stable``: return an error instead of offsets that an open transaction may change (spec: kafka#stable-offsets).
    """
    if topic_requests is None:
        yield from _all_positions(peer, version, made, group, stable=stable)
        return
    for topic_request in topic_requests:
        names = {field: getattr(topic_request, field) for field in _NAMES if hasattr(topic_request, field)}
        held: Mapping[int, Position] = {}
        undecided: Set[int] = frozenset()
        code = WireError.NONE
        try:
            topic = led_topic(peer, Action.OFFSET_FETCH, topic_request.name, names.get("topic_id", NO_ID))
            held = peer.broker.classic.positions(group, topic.name.full)
            undecided = _undecided(peer, group, topic, stable=stable)
        except BrokerError as error:
            code = _topic_error(error, version)
            if code is WireError.UNKNOWN_TOPIC_OR_PARTITION:
                code = WireError.NONE  # the group has no committed offsets for this topic
        yield from _topic_entry(made, names, topic_request.indexes, held, undecided, code)


def _topic_entry(
    made: type[_Topic],
    names: Mapping[str, Any],
    numbers: Iterable[int],
    held: Mapping[int, Position],
    undecided: Set[int],
    code: WireError = WireError.NONE,
) -> Iterator[_Topic | None]:
    """Yield None several times, then the entry of the topic. Other requests may run after each None."""
    partitions = []
    for number in numbers:
        partitions.append(_entry(made.Partitions, number, held.get(number), undecided, code))
        if len(partitions) % PARTITIONS_PER_STEP == 0:
            yield None
    yield made(**names, partitions=partitions)


def _undecided(peer: Peer, group: str, topic: Topic, *, stable: bool) -> Set[int]:
    """Return the partitions whose offsets an open transaction may change, or none if ``stable`` is false."""
    return peer.broker.transactions.undecided(group, topic.name.full) if stable else frozenset()


def _all_positions(
    peer: Peer, version: int, made: type[_Topic], group: str, *, stable: bool
) -> Iterator[_Topic | None]:
    for name in peer.broker.classic.topics(group):
        topic = peer.broker.find_topic(name)
        if topic is None or not peer.permits(Action.OFFSET_FETCH, topic):
            continue
        held = peer.broker.classic.positions(group, name)
        undecided = _undecided(peer, group, topic, stable=stable)
        if held:
            names = {"name": name, "topic_id": topic.id} if version >= MANY_GROUPS_SINCE else {"name": name}
            yield from _topic_entry(made, names, sorted(held), held, undecided)


def _entry(
    made: type[_Partition],
    index: int,
    position: Position | None,
    undecided: Set[int],
    code: WireError = WireError.NONE,
) -> _Partition:
    if index in undecided:
        return made(index=index, offset=NO_OFFSET, metadata="", error=WireError.UNSTABLE_OFFSET_COMMIT)
    if position is None:
        return made(index=index, offset=NO_OFFSET, metadata="", error=code)
    return made(
        index=index, offset=position.offset, leader_epoch=position.epoch, metadata=position.metadata, error=code
    )


# OffsetDelete


def offset_delete(peer: Peer, reply: Reply, request: OffsetDeleteRequest, /) -> OffsetDeleteResponse | None:
    """OffsetDelete: delete committed offsets of topics that no member of the group reads."""
    del reply
    response = schema.response(Api.OFFSET_DELETE)
    classic = peer.broker.classic
    try:
        authorize_known(peer, Action.GROUP_DELETE, request.group_id)
        if classic.view(request.group_id) is None:
            raise Missing(ErrorCode.GROUP_MISSING, f"no such group group={request.group_id!r}")
    except BrokerError as error:
        return response(error=group_error(error), topics=[])
    topics = []
    for topic_request in request.topics:
        entries = [response.Topics.Partitions(index=one.index) for one in topic_request.partitions]
        topics.append(response.Topics(name=topic_request.name, partitions=entries))
        try:
            peer.authorize(Action.GROUP_DELETE, peer.broker.resource(topic_request.name))
            peer.broker.topic(topic_request.name)
        except BrokerError as error:
            _refuse(entries, wire_error(error))
            continue
        if classic.has_readers(request.group_id, topic_request.name):
            _refuse(entries, WireError.GROUP_SUBSCRIBED_TO_TOPIC)
            continue
        for entry in entries:
            _delete(peer, request.group_id, topic_request.name, entry)
    return response(topics=topics)


def _delete(peer: Peer, group: str, topic: str, entry: OffsetDeleteResponse.Topics.Partitions) -> None:
    held = peer.broker.classic.positions(group, topic)
    if entry.index not in held:
        return
    try:
        peer.broker.delete_positions(
            PositionKind.GROUP, group, full_name=topic, partition_number=entry.index, by=peer.caller
        )
    except BrokerError as error:
        entry.error = group_error(error)
