"""Requests about the broker as a whole: ApiVersions, FindCoordinator, DescribeCluster, DescribeLogDirs and others.

Each process of the broker is a node. A broker with one process leads all partitions, and coordinates all groups and
transactions (spec: kafka#apiversions, kafka#findcoordinator, kafka#describelogdirs, kafka#other-calls).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.errors import BrokerError
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.configs import GROUP
from polywire.protocols.kafka.messages import NO_OPERATIONS, Api, WireError
from polywire.protocols.kafka.replies import PARTITIONS_PER_STEP, answer_in_slices
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        ApiVersionsRequest,
        ApiVersionsResponse,
        DescribeClusterRequest,
        DescribeClusterResponse,
        DescribeLogDirsRequest,
        DescribeLogDirsResponse,
        ElectLeadersRequest,
        ElectLeadersResponse,
        FindCoordinatorRequest,
        FindCoordinatorResponse,
        ListConfigResourcesRequest,
        ListConfigResourcesResponse,
        ListPartitionReassignmentsRequest,
        ListPartitionReassignmentsResponse,
    )

SOFTWARE_CHARS_MAX: Final = 100  # characters of the client software's name that are stored
NAMED_SINCE: Final = 3  # first version of ApiVersions with the client software's name
KEYS_SINCE: Final = 4  # first version of FindCoordinator with several keys
COORDINATED: Final = frozenset({0, 1})  # key types: groups and transactions
BROKERS: Final = 1  # endpoint type of brokers
FEATURES: Final = {"transaction.version": 2}  # the transaction protocol (spec: kafka#transaction-dialects)
FEATURES_EPOCH: Final = 0  # features never change
LOG_DIR: Final = "polywire-data"  # used if no data directory is configured
_EDGES: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_WORDS: Final = _EDGES | {"-", "."}
CLUSTER_OPERATIONS: Final = (
    (5, Action.TOPIC_CREATE),
    (7, Action.CLUSTER_ALTER),
    (8, Action.CLUSTER_DESCRIBE),
    (9, Action.CLUSTER_ALTER),
    (10, Action.CLUSTER_DESCRIBE),
    (11, Action.CLUSTER_ALTER),
    (12, Action.CLUSTER_DESCRIBE),
)
TOPIC_OPERATIONS: Final = (
    (3, Action.FETCH),
    (4, Action.PRODUCE),
    (5, Action.TOPIC_CREATE),
    (6, Action.TOPIC_DELETE),
    (7, Action.TOPIC_ALTER),
    (8, Action.TOPIC_DESCRIBE),
    (10, Action.TOPIC_DESCRIBE),
    (11, Action.TOPIC_ALTER),
)
"""Kafka's operations on a topic, and the actions that Polywire requires for them."""


def api_versions(session: KafkaSession, answer: Answer, request: ApiVersionsRequest, /) -> ApiVersionsResponse:
    """ApiVersions: list the requests that have a handler."""
    response = schema.response(Api.API_VERSIONS)
    names = (request.client_software_name, request.client_software_version)
    if answer.request.version >= NAMED_SINCE and not all(map(_is_software, names)):
        return response(error=WireError.INVALID_REQUEST)
    if answer.request.version >= NAMED_SINCE:
        session.software = " ".join(names)[:SOFTWARE_CHARS_MAX]
    return response(
        api_keys=[
            response.ApiKeys(api_key=api, min_version=served.first, max_version=served.last)
            for api, served in session.shared.served.items()
        ],
        supported_features=[
            response.SupportedFeatures(name=name, min_version=0, max_version=level) for name, level in FEATURES.items()
        ],
        finalized_features_epoch=FEATURES_EPOCH,
        finalized_features=[
            response.FinalizedFeatures(name=name, min_version_level=level, max_version_level=level)
            for name, level in FEATURES.items()
        ],
    )


def _is_software(word: str) -> bool:
    return bool(word) and _WORDS.issuperset(word) and word[0] in _EDGES and word[-1] in _EDGES


def find_coordinator(
    session: KafkaSession, answer: Answer, request: FindCoordinatorRequest, /
) -> FindCoordinatorResponse | None:
    """FindCoordinator: return the node that coordinates each key."""
    response = schema.response(Api.FIND_COORDINATOR)
    nodes, nowhere = session.nodes(), {"node_id": -1, "host": "", "port": -1}
    refused: dict[str, Any] | None = None
    if request.key_type not in COORDINATED:
        refused = {"error": WireError.INVALID_REQUEST, "message": "unknown key type", **nowhere}
    elif not _may_know(session):
        refused = {"error": WireError.GROUP_AUTHORIZATION_FAILED, "message": "log in first", **nowhere}

    def coordinator(key: str) -> dict[str, Any]:
        node = session.coordinator(key)
        if node not in nodes:
            return {"error": WireError.COORDINATOR_NOT_AVAILABLE, **nowhere}
        host, port = nodes[node]
        return {"error": WireError.NONE, "node_id": node, "host": host, "port": port}

    if answer.request.version < KEYS_SINCE:
        return response(**(refused or coordinator(request.key)))
    entries = (response.Coordinators(key=key, **(refused or coordinator(key))) for key in request.coordinator_keys)
    return answer_in_slices(session.broker, answer, entries, lambda found: response(coordinators=found))


def _may_know(session: KafkaSession) -> bool:
    try:
        session.authorize(Action.CLUSTER_DESCRIBE)
    except BrokerError:
        return False
    return True


def describe_cluster(
    session: KafkaSession, answer: Answer, request: DescribeClusterRequest, /
) -> DescribeClusterResponse:
    del answer
    response = schema.response(Api.DESCRIBE_CLUSTER)
    try:
        session.authorize(Action.CLUSTER_DESCRIBE)
    except BrokerError as denied:
        error = WireError.CLUSTER_AUTHORIZATION_FAILED
        return response(error=error, message=denied.message)
    if request.endpoint_type not in (0, BROKERS):
        return response(error=WireError.INVALID_REQUEST, message=f"unknown endpoint type (use {BROKERS} for brokers)")
    operations = NO_OPERATIONS
    if request.want_cluster_operations:
        operations = sum({1 << bit for bit, action in CLUSTER_OPERATIONS if session.permits(action)})
    return response(
        endpoint_type=BROKERS,
        cluster_id=session.shared.cluster_id,
        controller_id=session.shared.node_id,
        brokers=[
            response.Brokers(broker_id=node, host=host, port=port) for node, (host, port) in session.nodes().items()
        ],
        cluster_operations=operations,
    )


def topic_operations(session: KafkaSession, topic: Topic) -> int:
    """Return the operations that the client may perform on a topic, as Kafka's bit set."""
    return sum({1 << bit for bit, action in TOPIC_OPERATIONS if session.permits(action, topic)})


def describe_log_dirs(
    session: KafkaSession, answer: Answer, request: DescribeLogDirsRequest, /
) -> DescribeLogDirsResponse | None:
    """DescribeLogDirs: return one directory with the size of every partition."""
    response = schema.response(Api.DESCRIBE_LOG_DIRS)
    try:
        session.authorize(Action.SERVER_DESCRIBE)
    except BrokerError:
        return response(error=WireError.CLUSTER_AUTHORIZATION_FAILED)
    total, usable = -1, -1
    directory = session.shared.settings.data_dir
    if directory is not None:
        usage = shutil.disk_usage(directory)
        total, usable = usage.total, usage.free
    name = LOG_DIR if directory is None else str(directory.absolute())

    def made(topics: list[DescribeLogDirsResponse.Results.Topics]) -> DescribeLogDirsResponse:
        directory = response.Results(log_dir=name, topics=topics, total_bytes=total, usable_bytes=usable)
        return response(results=[directory])

    entries = _sizes(session, request, response.Results.Topics)
    return answer_in_slices(session.broker, answer, entries, made)


def _sizes(
    session: KafkaSession, request: DescribeLogDirsRequest, made: type[DescribeLogDirsResponse.Results.Topics]
) -> Iterator[DescribeLogDirsResponse.Results.Topics | None]:
    """Yield the sizes of the requested partitions, or of all partitions. After each None, other requests may run."""
    requested: dict[Topic, Iterable[int]]
    if request.topics is None:
        topics = [topic for topic in session.broker.topics() if session.leads(topic)]
        requested = {topic: range(len(topic.partitions)) for topic in topics}
    else:
        named = ((session.broker.find_topic(entry.topic), entry.partitions) for entry in request.topics)
        requested = {topic: numbers for topic, numbers in named if topic is not None and session.leads(topic)}
    for topic, numbers in requested.items():
        partitions = []
        for step, number in enumerate(numbers):
            if 0 <= number < len(topic.partitions):
                partitions.append(
                    made.Partitions(index=number, partition_size=topic.partitions[number].log.stored_bytes)
                )
            if not step % PARTITIONS_PER_STEP:
                yield None
        yield made(name=topic.name.full, partitions=partitions)


# Requests that only matter in a cluster of Kafka brokers


def elect_leaders(
    session: KafkaSession, answer: Answer, request: ElectLeadersRequest, /
) -> ElectLeadersResponse | None:
    """ElectLeaders: report that no election is needed, because every partition already has its only leader."""
    response = schema.response(Api.ELECT_LEADERS)
    try:
        session.authorize(Action.CLUSTER_ALTER)
    except BrokerError:
        return response(error=WireError.CLUSTER_AUTHORIZATION_FAILED)
    made = response.ReplicaElectionResults

    def entries() -> Iterator[ElectLeadersResponse.ReplicaElectionResults | None]:
        # a request without partitions is about those that need an election; there are none
        for topic_request in request.topic_partitions or ():
            topic = session.broker.find_topic(topic_request.topic)
            count = 0 if topic is None else len(topic.partitions)
            partitions: list[ElectLeadersResponse.ReplicaElectionResults.PartitionResult] = []
            for number in topic_request.partitions:
                there = 0 <= number < count
                error = WireError.ELECTION_NOT_NEEDED if there else WireError.UNKNOWN_TOPIC_OR_PARTITION
                partitions.append(made.PartitionResult(partition_id=number, error=error))
                if len(partitions) % PARTITIONS_PER_STEP == 0:
                    yield None
            yield made(topic=topic_request.topic, partition_result=partitions)

    return answer_in_slices(
        session.broker, answer, entries(), lambda results: response(replica_election_results=results)
    )


def list_partition_reassignments(
    session: KafkaSession, answer: Answer, request: ListPartitionReassignmentsRequest, /
) -> ListPartitionReassignmentsResponse:
    """ListPartitionReassignments: return an empty list, because partitions are never reassigned."""
    del answer, request
    return schema.response(Api.LIST_PARTITION_REASSIGNMENTS)(error=_login_error(session))


def list_config_resources(
    session: KafkaSession, answer: Answer, request: ListConfigResourcesRequest, /
) -> ListConfigResourcesResponse:
    """ListConfigResources: list the groups with settings. Other requests list the topics and the broker."""
    response = schema.response(Api.LIST_CONFIG_RESOURCES)
    error = _login_error(session)
    if (
        error is not WireError.NONE
        or answer.request.version == 0
        or (request.resource_types and GROUP not in request.resource_types)
    ):
        return response(error=error)
    may_see = session.broker.access.permits_somewhere(session.principal, Action.GROUP_DESCRIBE)
    names = session.broker.shares.directory.configured(by=session.caller) if may_see else []
    return response(
        config_resources=[response.ConfigResources(resource_name=name, resource_type=GROUP) for name in names]
    )


def _login_error(session: KafkaSession) -> WireError:
    """Return the error for a client that has not logged in, otherwise NONE."""
    return WireError.NONE if session.permits(Action.CLUSTER_DESCRIBE) else WireError.CLUSTER_AUTHORIZATION_FAILED
