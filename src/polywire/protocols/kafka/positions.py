"""OffsetCommit, OffsetFetch, OffsetDelete (spec: kafka#offsetcommit, kafka#offsetfetch, kafka#deleting-groups).

An error in one partition does not affect others. If the member may not send the request, the whole request fails.
Requests for thousands of partitions are processed in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

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
from polywire.protocols.kafka.replies import Gathering, answer_in_slices
from polywire.types import PositionKind

POSITIONS_AT_ONCE_MAX: Final = 500  # offsets of a commit that are stored in one step, about 1 ms
PARTITIONS_PER_STEP: Final = 64  # committed offsets of one topic that are returned in one step
TOPICS_AT_ONCE_MAX: Final = 16  # topics, or steps of one topic, without a pause
MANY_GROUPS_SINCE: Final = 8  # first version of OffsetFetch for several groups
BY_ID_SINCE: Final = 10  # first version of OffsetCommit and OffsetFetch that names topics by id
# fields that name a topic; the second exists only in versions for several groups
_NAMES: Final = ("name", "topic_id")


def _topic_error(error: BrokerError, version: int) -> WireError:
    """Return the Kafka error for a topic that cannot be used.

    For a missing topic, the error depends on whether the request named the topic by id or by name.
    """
    if version >= BY_ID_SINCE and error.code is ErrorCode.TOPIC_MISSING:
        return WireError.UNKNOWN_TOPIC_ID
    return wire_error(error)


def epoch_error(error: BrokerError) -> WireError:
    """Return the Kafka error for a member of a consumer group, whose generations are called member epochs."""
    return WireError.STALE_MEMBER_EPOCH if error.code is ErrorCode.GENERATION_STALE else group_error(error)


def member_error(peer: Peer, request: Any, error: BrokerError) -> WireError:
    """Return the Kafka error for a member that may not commit. It depends on the type of the group."""
    is_consumer = peer.broker.consumers.has_member(request.group_id, request.member_id)
    return epoch_error(error) if is_consumer else group_error(error)


# OffsetCommit


class _Asked(NamedTuple):
    """The partitions of one topic in a commit, and the response entry of each."""

    topic: Any
    partitions: Sequence[Any]
    entries: Sequence[Any]


def offset_commit(peer: Peer, reply: Reply, request: Any, /) -> None:
    """OffsetCommit.

    A large commit is split into parts. Each part is stored completely or not at all.
    """
    store(peer, reply, request, partial(check_member, peer, request))


def store(peer: Peer, reply: Reply, request: Any, check: Callable[[], None]) -> None:
    """Process a commit.

    ``check`` is called before each part. It raises BrokerError if the group may not commit now.
    """
    body = schema.response(Api.OFFSET_COMMIT)(topics=[])
    gathering = Gathering(reply, body)
    parts = _parts(request.topics, body.topics)
    commit = partial(_commit, peer, reply.request.version, request, check, gathering)
    gathering.ask(peer.broker, map(commit, parts), at_once=1)


def check_member(peer: Peer, request: Any) -> None:
    """Raise BrokerError if the member may not commit offsets of the group now."""
    classic, consumers = peer.broker.classic, peer.broker.consumers
    member = request.group_id, request.member_id, request.generation
    authorize_group(peer, Action.OFFSET_COMMIT, ())
    check = consumers.check_epoch if consumers.has_member(*member[:2]) else classic.check_commit
    check(*member, instance_id=request.instance_id, by=peer.caller)


def check_read(peer: Peer, request: Any, topic: str, partitions: Sequence[int]) -> None:
    """Raise BrokerError if partitions are assigned to another member. ``check_member`` was called before."""
    classic, consumers = peer.broker.classic, peer.broker.consumers
    group, member_id, by = request.group_id, request.member_id, peer.caller
    if consumers.has_member(group, member_id):
        consumers.check_partitions(group, topic, member_id, partitions, wire=WIRE, by=by)
    else:
        classic.check_partitions(group, topic, member_id, partitions, by=by)


def _parts(topics: Iterable[Any], topic_entries: list[Any]) -> Iterator[list[_Asked]]:
    """Yield parts of at most ``POSITIONS_AT_ONCE_MAX`` partitions, and add their entries to ``topic_entries``."""
    made = schema.response(Api.OFFSET_COMMIT).Topics
    part: list[_Asked] = []
    room = POSITIONS_AT_ONCE_MAX
    for topic in topics:
        at = 0
        topic_entries.append(made(name=topic.name, topic_id=topic.topic_id, partitions=[]))
        while at == 0 or at < len(topic.partitions):
            some = topic.partitions[at : at + room]
            entries = [made.Partitions(index=one.index) for one in some]
            topic_entries[-1].partitions += entries
            part.append(_Asked(topic, some, entries))
            at += max(len(some), 1)
            room -= max(len(some), 1)
            if room == 0:
                yield part
                part, room = [], POSITIONS_AT_ONCE_MAX
    if part:
        yield part


def _commit(
    peer: Peer, version: int, request: Any, check: Callable[[], None], gathering: Gathering, part: Sequence[_Asked]
) -> None:
    """Store one part. Permissions are checked for each part."""
    classic, consumers = peer.broker.classic, peer.broker.consumers
    member = request.group_id, request.member_id, request.generation
    is_consumer = consumers.has_member(*member[:2])
    whole = [entry for asked in part for entry in asked.entries]
    try:
        check()
    except BrokerError as error:
        _refuse(whole, member_error(peer, request, error))
        return
    commits = _commits(peer, version, part)

    def done(outcome: int | BrokerError) -> None:
        if isinstance(outcome, BrokerError):
            _refuse(whole, wire_error(outcome))
        gathering.settled()

    made = {name: stored for name, (stored, _) in commits.items()}
    by, generation = peer.caller, max(request.generation, -1)
    gathering.expect()
    try:
        if is_consumer:
            refused = consumers.commit(*member[:2], made, epoch=generation, wire=WIRE, by=by, done=done)
        else:
            refused = classic.commit(member[0], made, generation=generation, member_id=member[1], by=by, done=done)
    except BrokerError as error:
        _refuse(whole, group_error(error))
        gathering.settled()
        return
    for name, why in refused.items():
        for entry in commits[name][1]:
            entry.error = entry.error or group_error(why)


def _refuse(entries: Iterable[Any], code: WireError) -> None:
    for entry in entries:
        entry.error = code


def _commits(peer: Peer, version: int, part: Iterable[_Asked]) -> dict[str, tuple[dict[int, Commit], list[Any]]]:
    """Return the offsets to store and their entries, by full topic name.

    Entries of offsets that cannot be stored get an error.
    """
    found: dict[str, tuple[dict[int, Commit], list[Any]]] = {}
    for asked in part:
        try:
            topic = led_topic(peer, Action.OFFSET_COMMIT, asked.topic.name, asked.topic.topic_id)
        except BrokerError as error:
            _refuse(asked.entries, _topic_error(error, version))
            continue
        stored, entries = found.setdefault(topic.name.full, ({}, []))
        stored.update(read_commits(topic, asked.partitions, asked.entries))
        entries += [answered for answered in asked.entries if not answered.error]
    return found


def read_commits(topic: Topic, asked: Iterable[Any], entries: Iterable[Any]) -> dict[int, Commit]:
    """Return the offsets to store for a topic. Entries of partitions that do not exist get an error."""
    found: dict[int, Commit] = {}
    for one, answered in zip(asked, entries, strict=True):
        if not 0 <= one.index < len(topic.partitions):
            answered.error = WireError.UNKNOWN_TOPIC_OR_PARTITION
        elif len((one.metadata or "").encode("utf-8", "replace")) > METADATA_BYTES_MAX:
            answered.error = WireError.OFFSET_METADATA_TOO_LARGE
        else:
            found[one.index] = Commit(one.offset, max(one.leader_epoch, -1), one.metadata or "")
    return found


# OffsetFetch


def offset_fetch(peer: Peer, reply: Reply, request: Any, /) -> Any:
    version = reply.request.version
    response = schema.response(Api.OFFSET_FETCH)
    entries: Iterator[Any]
    made: Callable[[list[Any]], Any]
    if version >= MANY_GROUPS_SINCE:
        group, stable = response.Groups, request.require_stable
        groups = (_fetched(peer, version, group, asked, stable=stable) for asked in request.groups)
        entries, made = chain.from_iterable(groups), partial(_groups_response, response)
    else:
        try:
            authorize_group(peer, Action.OFFSET_FETCH, ())
        except BrokerError as error:
            return response(error=group_error(error), topics=[])
        entries = _positions(peer, version, response, request.group_id, request.topics, stable=request.require_stable)
        made = partial(_topics_response, response)
    return answer_in_slices(peer.broker, reply, entries, made, at_once=TOPICS_AT_ONCE_MAX)


def check_reader(peer: Peer, asked: Any) -> None:
    """Raise BrokerError if the client may not see a group's committed offsets, or has an old member epoch."""
    group, member, consumers = asked.group_id, asked.member_id, peer.broker.consumers
    authorize_group(peer, Action.OFFSET_FETCH, ())
    if member and asked.member_epoch >= 0 and consumers.has_member(group, member):
        consumers.check_epoch(group, member, asked.member_epoch, by=peer.caller)


def _groups_response(response: Any, groups: list[Any]) -> Any:
    return response(groups=groups)


def _topics_response(response: Any, topics: list[Any]) -> Any:
    return response(topics=topics)


def _fetched(peer: Peer, version: int, made: Any, asked: Any, *, stable: bool) -> Iterator[Any]:
    group = asked.group_id
    topics: list[Any] = []
    try:
        check_reader(peer, asked)
        for topic in _positions(peer, version, made, group, asked.topics, stable=stable):
            if topic is None:
                yield None
            else:
                topics.append(topic)
    except BrokerError as error:
        yield made(group_id=group, topics=[], error=epoch_error(error))
    else:
        yield made(group_id=group, topics=topics)


def _positions(
    peer: Peer, version: int, made: Any, group: str, asked: list[Any] | None, *, stable: bool
) -> Iterator[Any]:
    """Yield an entry for each named topic, or for each topic that has committed offsets.

    None is a pause for other requests. If ``stable``, offsets that an open transaction may change are not returned
    (spec: kafka#stable-offsets).
    """
    if asked is None:
        yield from _all_positions(peer, version, made, group, stable=stable)
        return
    for one in asked:
        names = {field: getattr(one, field) for field in _NAMES if hasattr(one, field)}
        held: Mapping[int, Position] = {}
        undecided: Set[int] = frozenset()
        code = WireError.NONE
        try:
            topic = led_topic(peer, Action.OFFSET_FETCH, one.name, names.get("topic_id", NO_ID))
            held = peer.broker.classic.positions(group, topic.name.full)
            undecided = _undecided(peer, group, topic, stable=stable)
        except BrokerError as error:
            code = _topic_error(error, version)
            if code is WireError.UNKNOWN_TOPIC_OR_PARTITION:
                code = WireError.NONE  # the group has no committed offsets for this topic
        yield from _topic_entry(made.Topics, names, one.indexes, held, undecided, code)


def _topic_entry(
    made: Any,
    names: Mapping[str, Any],
    numbers: Iterable[int],
    held: Mapping[int, Position],
    undecided: Set[int],
    code: WireError = WireError.NONE,
) -> Iterator[Any]:
    """Yield the entry of one topic, after a None for each pause."""
    partitions = []
    for number in numbers:
        partitions.append(_entry(made.Partitions, number, held.get(number), undecided, code))
        if len(partitions) % PARTITIONS_PER_STEP == 0:
            yield None
    yield made(**names, partitions=partitions)


def _undecided(peer: Peer, group: str, topic: Topic, *, stable: bool) -> Set[int]:
    """Return the partitions whose offsets an open transaction may change; none unless ``stable``."""
    return peer.broker.transactions.undecided(group, topic.name.full) if stable else frozenset()


def _all_positions(peer: Peer, version: int, made: Any, group: str, *, stable: bool) -> Iterator[Any]:
    for name in peer.broker.classic.topics(group):
        topic = peer.broker.find_topic(name)
        if topic is None or not peer.permits(Action.OFFSET_FETCH, topic):
            continue
        held = peer.broker.classic.positions(group, name)
        undecided = _undecided(peer, group, topic, stable=stable)
        if held:
            names = {"name": name, "topic_id": topic.id} if version >= MANY_GROUPS_SINCE else {"name": name}
            yield from _topic_entry(made.Topics, names, sorted(held), held, undecided)


def _entry(
    made: Any, index: int, position: Position | None, undecided: Set[int], code: WireError = WireError.NONE
) -> Any:
    if index in undecided:
        return made(index=index, offset=NO_OFFSET, metadata="", error=WireError.UNSTABLE_OFFSET_COMMIT)
    if position is None:
        return made(index=index, offset=NO_OFFSET, metadata="", error=code)
    return made(
        index=index, offset=position.offset, leader_epoch=position.epoch, metadata=position.metadata, error=code
    )


# OffsetDelete


def offset_delete(peer: Peer, reply: Reply, request: Any, /) -> Any:
    """Delete committed offsets of topics that no member of the group reads."""
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
    for asked in request.topics:
        entries = [response.Topics.Partitions(index=one.index) for one in asked.partitions]
        topics.append(response.Topics(name=asked.name, partitions=entries))
        try:
            peer.authorize(Action.GROUP_DELETE, peer.broker.resource(asked.name))
            peer.broker.topic(asked.name)
        except BrokerError as error:
            _refuse(entries, wire_error(error))
            continue
        if classic.has_readers(request.group_id, asked.name):
            _refuse(entries, WireError.GROUP_SUBSCRIBED_TO_TOPIC)
            continue
        for entry in entries:
            _delete(peer, request.group_id, asked.name, entry)
    return response(topics=topics)


def _delete(peer: Peer, group: str, topic: str, entry: Any) -> None:
    held = peer.broker.classic.positions(group, topic)
    if entry.index not in held:
        return
    try:
        peer.broker.delete_positions(
            PositionKind.GROUP, group, full_name=topic, partition_number=entry.index, by=peer.caller
        )
    except BrokerError as error:
        entry.error = group_error(error)
