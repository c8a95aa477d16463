"""Metadata, DescribeTopicPartitions, CreateTopics, DeleteTopics, CreatePartitions.

* If a Metadata request creates a topic, the topic is in its response.
* A client without permission gets the same error whether or not the topic exists.

Spec: kafka#metadata, kafka#other-calls, kafka#createtopics, kafka#deletetopics, kafka#createpartitions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Missing
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.cluster import topic_operations
from polywire.protocols.kafka.configs import entries_of, given_values, settings_of
from polywire.protocols.kafka.context import Shared, epoch_of
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.lookup import missing_error, topic_of
from polywire.protocols.kafka.messages import NO_ID, NO_OPERATIONS, Api, WireError
from polywire.protocols.kafka.replies import PARTITIONS_PER_STEP, PendingResponse, answer_in_slices, refuse
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.types import TopicName

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        CreatePartitionsRequest,
        CreatePartitionsResponse,
        CreateTopicsRequest,
        CreateTopicsResponse,
        DeleteTopicsRequest,
        DescribeTopicPartitionsRequest,
        DescribeTopicPartitionsResponse,
        MetadataRequest,
        MetadataResponse,
    )

    _Partition = TypeVar(
        "_Partition", MetadataResponse.Topics.Partitions, DescribeTopicPartitionsResponse.Topics.Partitions
    )

NAME_BYTES_MAX: Final = 249
# first version of Metadata that names topics by id; two earlier versions have the field, but do not use it
BY_ID_SINCE: Final = 12
REPLICATION_FACTOR: Final = 1
PAGE_PARTITIONS_MAX: Final = 2_000  # partitions in a response to DescribeTopicPartitions, as in Kafka
DEFAULT: Final = -1  # stands for the broker's default in CreateTopics
_NAME_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def is_topic_name(name: str) -> bool:
    """Return whether a Kafka client may create a topic with this name (spec: kafka#topic-names).

    Other protocols allow other names.
    """
    return 0 < len(name) <= NAME_BYTES_MAX and name not in (".", "..") and _NAME_CHARACTERS.issuperset(name)


# Metadata


def names_all(api: Api, version: int, topic_requests: Sequence[object] | None) -> bool:
    """Return whether a Metadata or DescribeTopicPartitions request is for all topics."""
    if api is Api.METADATA and version > 0:
        return topic_requests is None  # an empty list is for no topic
    return not topic_requests


def metadata(session: KafkaSession, answer: Answer, request: MetadataRequest, /) -> MetadataResponse | None:
    version = answer.request.version
    if names_all(Api.METADATA, version, request.topics):
        entries = _all_entries(session, session.broker.topics(), request)
    else:
        entries = _named_entries(session, request.topics or [], request, version)
    return answer_in_slices(session.broker, answer, entries, partial(_metadata, session))


def _metadata(session: KafkaSession, topics: list[MetadataResponse.Topics]) -> MetadataResponse:
    response = schema.response(Api.METADATA)
    shared = session.shared
    return response(
        brokers=[
            response.Brokers(node_id=node, host=host, port=port) for node, (host, port) in session.nodes().items()
        ],
        cluster_id=shared.cluster_id,
        controller_id=shared.node_id,
        topics=topics,
    )


def _all_entries(
    session: KafkaSession, topics: list[Topic], request: MetadataRequest
) -> Iterator[MetadataResponse.Topics | None]:
    for topic in topics:
        if session.permits(Action.TOPIC_DESCRIBE, topic):
            yield from _entry(session, topic, request)
        else:
            yield None


def _named_entries(
    session: KafkaSession, topic_requests: list[MetadataRequest.Topics], request: MetadataRequest, version: int
) -> Iterator[MetadataResponse.Topics | None]:
    made = schema.response(Api.METADATA).Topics
    for topic_request in topic_requests:
        if topic_request.topic_id != NO_ID and version < BY_ID_SINCE:
            yield made(error=WireError.INVALID_REQUEST, name=topic_request.name, topic_id=topic_request.topic_id)
            continue
        try:
            topic = _find(session, topic_request.name, topic_request.topic_id, may_create=request.may_create)
        except BrokerError as error:
            named = topic_request.name if topic_request.topic_id == NO_ID else None
            yield made(error=missing_error(error, topic_request.topic_id), name=named, topic_id=topic_request.topic_id)
        else:
            yield from _entry(session, topic, request)


def _find(session: KafkaSession, name: str | None, topic_id: bytes, *, may_create: bool) -> Topic:
    """Return a requested topic. If it is missing and ``may_create``, create it.

    Raises BrokerError if it is missing or may not be created.
    """
    broker = session.broker
    try:
        return topic_of(session, Action.TOPIC_DESCRIBE, name or "", topic_id)
    except Missing:
        if topic_id != NO_ID:
            raise
        if name is None or not is_topic_name(name):
            raise Invalid(ErrorCode.INVALID_TOPIC, f"topic name is invalid name={name!r}") from None
        if not may_create or not broker.settings.auto_create:
            raise
    session.authorize(Action.TOPIC_CREATE, broker.resource(name))
    return broker.ensure_topic(name, by=session.caller)


def _entry(session: KafkaSession, topic: Topic, request: MetadataRequest) -> Iterator[MetadataResponse.Topics | None]:
    """Yield None several times, then the metadata of the topic. Other requests may run after each None."""
    made = schema.response(Api.METADATA).Topics
    partitions: list[MetadataResponse.Topics.Partitions] = []
    node = session.node_of(topic)
    for partition in topic.partitions[:]:
        partitions.append(led(made.Partitions, partition, node))
        if not len(partitions) % PARTITIONS_PER_STEP:
            yield None
    yield made(
        name=topic.name.full,
        topic_id=topic.id,
        partitions=partitions,
        operations=topic_operations(session, topic) if request.want_topic_operations else NO_OPERATIONS,
    )


def led(made: type[_Partition], partition: Partition, node_id: int) -> _Partition:
    """Return a partition as a record of the type ``made``. The node is its leader and its only replica."""
    nodes = [node_id]
    return made(
        index=partition.number,
        leader_id=node_id,
        leader_epoch=epoch_of(partition),
        replica_nodes=nodes,
        isr_nodes=nodes,
    )


def describe_topic_partitions(
    session: KafkaSession, answer: Answer, request: DescribeTopicPartitionsRequest, /
) -> DescribeTopicPartitionsResponse | None:
    """DescribeTopicPartitions: return one page of the topics, sorted by name."""
    response = schema.response(Api.DESCRIBE_TOPIC_PARTITIONS)
    following: list[DescribeTopicPartitionsResponse.NextCursor] = []

    def made(topics: list[DescribeTopicPartitionsResponse.Topics]) -> DescribeTopicPartitionsResponse:
        return response(topics=topics, next_cursor=following[0] if following else None)

    return answer_in_slices(session.broker, answer, _paged(session, request, following), made)


def _paged(
    session: KafkaSession,
    request: DescribeTopicPartitionsRequest,
    following: list[DescribeTopicPartitionsResponse.NextCursor],
) -> Iterator[DescribeTopicPartitionsResponse.Topics | None]:
    """Yield the topics of a page. If there is another page, add its cursor to ``following``."""
    response = schema.response(Api.DESCRIBE_TOPIC_PARTITIONS)
    names = sorted({one.name for one in request.topics} or {topic.name.full for topic in session.broker.topics()})
    begin = ("", 0) if request.cursor is None else (request.cursor.topic_name, max(request.cursor.index, 0))
    left = min(max(request.response_partition_limit, 1), PAGE_PARTITIONS_MAX)
    for name in names[bisect_left(names, begin[0]) :]:
        start = begin[1] if name == begin[0] else 0
        if not left:
            following.append(response.NextCursor(topic_name=name, index=start))
            return
        try:
            topic = topic_of(session, Action.TOPIC_DESCRIBE, name)
        except BrokerError as error:
            yield response.Topics(error=wire_error(error), name=name, partitions=[]) if request.topics else None
            continue
        shown = topic.partitions[start : start + left]
        left -= len(shown)
        yield _described(session, topic, shown)
        if start + len(shown) < len(topic.partitions):
            following.append(response.NextCursor(topic_name=name, index=start + len(shown)))
            return


def _described(
    session: KafkaSession, topic: Topic, shown: Sequence[Partition]
) -> DescribeTopicPartitionsResponse.Topics:
    made = schema.response(Api.DESCRIBE_TOPIC_PARTITIONS).Topics
    node = session.node_of(topic)
    partitions = [led(made.Partitions, partition, node) for partition in shown]
    for one in partitions:
        one.eligible_leader_replicas = one.last_known_elr = []
    operations = topic_operations(session, topic)
    return made(name=topic.name.full, topic_id=topic.id, partitions=partitions, operations=operations)


# Creation, growth, deletion


def create_topics(session: KafkaSession, answer: Answer, request: CreateTopicsRequest, /) -> None:
    response = schema.response(Api.CREATE_TOPICS)
    body = response(topics=[])
    pending_response = PendingResponse(answer, body)
    copies = Counter(topic_request.name for topic_request in request.topics)
    named = {topic_request.name: topic_request for topic_request in request.topics}

    def entries() -> Iterator[None]:
        for name, topic_request in named.items():
            entry = response.Topics(name=name, num_partitions=-1, replication_factor=-1)
            body.topics.append(entry)
            try:
                session.authorize(Action.TOPIC_CREATE, session.broker.resource(name))
                if not is_topic_name(name):
                    raise Invalid(ErrorCode.INVALID_TOPIC, f"topic name is invalid name={name!r}")
                if copies[name] > 1:
                    raise Invalid(ErrorCode.INVALID_REQUEST, "the request names the topic more than once")
                _create(session, pending_response, topic_request, entry, validate_only=request.validate_only)
            except BrokerError as error:
                refuse(entry, error)
            yield None

    pending_response.run(session.broker, entries())


def _create(
    session: KafkaSession,
    pending_response: PendingResponse,
    topic_request: CreateTopicsRequest.Topics,
    entry: CreateTopicsResponse.Topics,
    *,
    validate_only: bool,
) -> None:
    """Create one topic, or only validate the request. Raises BrokerError if it cannot be created."""
    broker = session.broker
    name = TopicName.parse(topic_request.name)
    if broker.find_topic(topic_request.name) is not None:
        raise Conflict(ErrorCode.TOPIC_EXISTS, f"topic exists name={topic_request.name!r}")
    wrong = _check_numbers(topic_request, session)
    if wrong is not None:
        refuse(entry, Invalid(ErrorCode.INVALID_REQUEST, _explained(wrong, topic_request, session.shared)), wrong)
        return
    count = len(topic_request.assignments) or (
        broker.settings.partition_count if topic_request.num_partitions < 0 else topic_request.num_partitions
    )
    try:
        settings = settings_of(given_values(topic_request.configs))
    except Invalid as bad:
        refuse(entry, bad, WireError.INVALID_CONFIG)
        return
    entry.num_partitions, entry.replication_factor = count, REPLICATION_FACTOR
    entry.configs = entries_of(broker.settings, settings)
    if validate_only:
        broker.check_new_topic(name, count, settings, by=session.caller)
        return
    pending_response.expect()
    try:
        broker.make_topic(
            name,
            count,
            settings,
            by=session.caller,
            then=partial(_made, entry),
            done=partial(pending_response.set_result, entry),
        )
    except BrokerError as error:
        pending_response.set_result(entry, error)


def _made(entry: CreateTopicsResponse.Topics, topic: Topic) -> None:
    entry.topic_id = topic.id


def _check_numbers(topic_request: CreateTopicsRequest.Topics, session: KafkaSession) -> WireError | None:
    """Return the error for the requested numbers of partitions and replicas; None if they are valid.

    Up to ``replication_factor_max`` replicas can be requested, but only one is stored.
    """
    if topic_request.assignments:
        numbers = [one.index for one in topic_request.assignments]
        if (topic_request.num_partitions, topic_request.replication_factor) != (DEFAULT, DEFAULT):
            return WireError.INVALID_REQUEST
        if sorted(numbers) != list(range(len(numbers))):
            return WireError.INVALID_REPLICA_ASSIGNMENT
        alone = all(_is_one_node(session, one.broker_ids) for one in topic_request.assignments)
        return None if alone else WireError.INVALID_REPLICA_ASSIGNMENT
    if topic_request.num_partitions == 0 or topic_request.num_partitions < DEFAULT:
        return WireError.INVALID_PARTITIONS
    is_right = (
        topic_request.replication_factor == DEFAULT
        or REPLICATION_FACTOR <= topic_request.replication_factor <= session.shared.settings.replication_factor_max
    )
    return None if is_right else WireError.INVALID_REPLICATION_FACTOR


def _is_one_node(session: KafkaSession, ids: Sequence[int]) -> bool:
    """Return whether an assignment names exactly one node of this broker, which may be any node."""
    return len(ids) == 1 and ids[0] in session.nodes()


def _explained(wrong: WireError, topic_request: CreateTopicsRequest.Topics, shared: Shared) -> str:
    match wrong:
        case WireError.INVALID_PARTITIONS:
            return f"the number of partitions must be above 0 got={topic_request.num_partitions}"
        case WireError.INVALID_REPLICATION_FACTOR:
            most = shared.settings.replication_factor_max
            return (
                f"the replication factor must be {'1' if most == 1 else f'1 to {most}'}: each partition has one replica"
                " (to accept a higher number, start the broker with --kafka-replication-factor-max)"
                f" got={topic_request.replication_factor}"
            )
        case WireError.INVALID_REPLICA_ASSIGNMENT:
            return f"assignments must number all partitions from 0 and name only this broker node_id={shared.node_id}"
        case _:
            return "a topic has either assignments or numbers of partitions and replicas"


def create_partitions(session: KafkaSession, answer: Answer, request: CreatePartitionsRequest, /) -> None:
    """CreatePartitions: add partitions until each topic has the requested number."""
    response = schema.response(Api.CREATE_PARTITIONS)
    body = response(results=[])
    pending_response = PendingResponse(answer, body)

    def entries() -> Iterator[None]:
        for topic_request in request.topics:
            entry = response.Results(name=topic_request.name)
            body.results.append(entry)
            try:
                topic = topic_of(session, Action.TOPIC_ALTER, topic_request.name)
                _grow(session, pending_response, topic, topic_request, entry, validate_only=request.validate_only)
            except BrokerError as error:
                refuse(entry, error)
            yield None

    pending_response.run(session.broker, entries())


def _grow(
    session: KafkaSession,
    pending_response: PendingResponse,
    topic: Topic,
    topic_request: CreatePartitionsRequest.Topics,
    entry: CreatePartitionsResponse.Results,
    *,
    validate_only: bool,
) -> None:
    """Add partitions to one topic, or only validate the request. Raises BrokerError if they cannot be added."""
    added = topic_request.count - len(topic.partitions)
    if added <= 0:
        raise Invalid(
            ErrorCode.INVALID_PARTITION_COUNT,
            f"partition count is not above the current one current={len(topic.partitions)}",
        )
    given = topic_request.assignments
    if given is not None and (len(given) != added or not all(_is_one_node(session, one.broker_ids) for one in given)):
        refuse(
            entry,
            Invalid(ErrorCode.INVALID_REQUEST, "new partitions must be assigned to this broker"),
            WireError.INVALID_REPLICA_ASSIGNMENT,
        )
    elif not validate_only:
        pending_response.expect()
        try:
            session.broker.grow_topic(topic, topic_request.count, done=partial(pending_response.set_result, entry))
        except BrokerError as error:
            pending_response.set_result(entry, error)


def delete_topics(session: KafkaSession, answer: Answer, request: DeleteTopicsRequest, /) -> None:
    """DeleteTopics: delete topics that the request names by name or by id."""
    response = schema.response(Api.DELETE_TOPICS)
    body = response(responses=[])
    pending_response = PendingResponse(answer, body)
    named: list[tuple[str | None, bytes]] = [(name, NO_ID) for name in request.topic_names]
    named += [(one.name, one.topic_id) for one in request.topics]

    def entries() -> Iterator[None]:
        for name, topic_id in named:
            entry = response.Responses(name=name, topic_id=topic_id)
            body.responses.append(entry)
            pending_response.expect()
            try:
                topic = topic_of(session, Action.TOPIC_DELETE, name or "", topic_id)
                entry.name, entry.topic_id = topic.name.full, topic.id
                session.broker.delete_topic(topic, done=partial(pending_response.set_result, entry))
            except BrokerError as error:
                refuse(entry, error, missing_error(error, topic_id))
                pending_response.count_result()
            yield None

    pending_response.run(session.broker, entries())
