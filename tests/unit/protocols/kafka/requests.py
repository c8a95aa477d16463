"""Valid requests of every API with the permissions they need, for tests of permissions and of damaged requests."""

from __future__ import annotations

from collections.abc import Iterator
from struct import pack
from typing import Any, NamedTuple

from polywire.broker.permissions import Action
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.client_codec import encode_request
from polywire.protocols.kafka.messages import SERVED, Api, Codec
from polywire.records.columns import Header, Record

TOPIC, BROKER = 2, 4  # resources
GROUP = "kafka.g"
NEWER_GROUP = "next"
SHARE_GROUP = "shared"
TOPIC_ID = b"id of the topic!"  # stands for the id that the broker assigns


class Asked(NamedTuple):
    """A request of an API, and the permissions it needs."""

    api: Api
    action: Action
    frame: bytes


def frame_of(api: Api, version: int | None = None, /, **fields: Any) -> bytes:
    """Return a request, by default in its highest version."""
    return encode_request(api, SERVED[api].last if version is None else version, 1, schema.request(api)(**fields))


def partition_frame(api: Api, topic: str, version: int | None = None, *, word: str = "name", **fields: Any) -> bytes:
    """Return a request for the first partition of a topic."""
    topics = schema.request(api).Topics
    one = topics(**{word: topic}, partitions=[topics.Partitions(**fields)])
    return frame_of(api, version, topics=[one])


def authenticate_frame(name: str, secret: str) -> bytes:
    """Return a login with PLAIN, to send after the handshake."""
    return frame_of(Api.SASL_AUTHENTICATE, auth_bytes=f"\0{name}\0{secret}".encode())


def produce_frame(topic: str, *, codec: Codec = Codec.NONE, acks: int = 1, version: int = 9, count: int = 2) -> bytes:
    """Return records of all kinds for the first partition of a topic."""
    records = [
        Record(b"v" * number or None, key=b"k", headers=(Header(b"h", b"1"), Header(b"h", None)), origin_time_us=1_000)
        for number in range(count)
    ]
    topics = schema.request(Api.PRODUCE).Topics
    one = topics(name=topic, partitions=[topics.Partitions(records=encode_batch(records, codec=codec))])
    return frame_of(Api.PRODUCE, version, acks=acks, topics=[one])


def requests(topic: str, missing: str) -> Iterator[Asked]:
    """Return all requests. topic: exists; missing: is created if the user may."""
    a = Action
    metadata = schema.request(Api.METADATA).Topics
    yield Asked(Api.API_VERSIONS, a.CONNECT, frame_of(Api.API_VERSIONS, 0))
    yield Asked(Api.SASL_HANDSHAKE, a.CONNECT, frame_of(Api.SASL_HANDSHAKE, mechanism="PLAIN"))
    yield Asked(Api.SASL_AUTHENTICATE, a.CONNECT, authenticate_frame("admin", "admin-token"))
    yield Asked(Api.PRODUCE, a.PRODUCE, produce_frame(topic))
    fetched = {"fetch_offset": 0, "partition_max_bytes": 1 << 20}
    yield Asked(Api.FETCH, a.FETCH, partition_frame(Api.FETCH, topic, 12, word="topic", **fetched))
    yield Asked(Api.LIST_OFFSETS, a.TOPIC_DESCRIBE, partition_frame(Api.LIST_OFFSETS, topic, timestamp=-1))
    yield Asked(Api.METADATA, a.TOPIC_DESCRIBE, frame_of(Api.METADATA, topics=[metadata(name=topic)]))
    yield Asked(Api.METADATA, a.TOPIC_CREATE, frame_of(Api.METADATA, topics=[metadata(name=missing)]))
    yield Asked(Api.FIND_COORDINATOR, a.CLUSTER_DESCRIBE, frame_of(Api.FIND_COORDINATOR, 0, key="g"))
    created = schema.request(Api.CREATE_TOPICS).Topics(name=missing, num_partitions=1, replication_factor=1)
    yield Asked(Api.CREATE_TOPICS, a.TOPIC_CREATE, frame_of(Api.CREATE_TOPICS, topics=[created]))
    deleted = schema.request(Api.DELETE_TOPICS).Topics(name=topic)
    yield Asked(Api.DELETE_TOPICS, a.TOPIC_DELETE, frame_of(Api.DELETE_TOPICS, topics=[deleted]))
    yield Asked(Api.DELETE_RECORDS, a.TOPIC_PURGE, partition_frame(Api.DELETE_RECORDS, topic, offset=-1))
    yield Asked(Api.INIT_PRODUCER_ID, a.STAGED_PUBLISH, frame_of(Api.INIT_PRODUCER_ID))
    ends = partition_frame(Api.OFFSET_FOR_LEADER_EPOCH, topic, word="topic", leader_epoch=1)
    yield Asked(Api.OFFSET_FOR_LEADER_EPOCH, a.TOPIC_DESCRIBE, ends)
    grown = schema.request(Api.CREATE_PARTITIONS).Topics(name=topic, count=9)
    yield Asked(Api.CREATE_PARTITIONS, a.TOPIC_ALTER, frame_of(Api.CREATE_PARTITIONS, topics=[grown]))
    sizes = schema.request(Api.DESCRIBE_LOG_DIRS).Topics(topic=topic, partitions=[0])
    yield Asked(Api.DESCRIBE_LOG_DIRS, a.SERVER_DESCRIBE, frame_of(Api.DESCRIBE_LOG_DIRS, topics=[sizes]))
    yield Asked(Api.DESCRIBE_CLUSTER, a.CLUSTER_DESCRIBE, frame_of(Api.DESCRIBE_CLUSTER))
    yield from _tools(topic)
    yield from _configs(topic)
    yield from _groups(topic)
    yield from _share_groups(topic)
    yield from _transactions(topic)


def _tools(topic: str) -> Iterator[Asked]:
    """Return requests of consoles and tools."""
    a = Action
    every = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}
    yield Asked(Api.DESCRIBE_ACLS, a.USER_DESCRIBE, frame_of(Api.DESCRIBE_ACLS, **every))
    yield Asked(Api.DESCRIBE_USER_SCRAM_CREDENTIALS, a.USER_DESCRIBE, frame_of(Api.DESCRIBE_USER_SCRAM_CREDENTIALS))
    salted = schema.request(Api.ALTER_USER_SCRAM_CREDENTIALS).Upsertions(
        name="made", mechanism=1, iterations=4096, salt=b"salt", salted_password=bytes(32)
    )
    frame = frame_of(Api.ALTER_USER_SCRAM_CREDENTIALS, upsertions=[salted])
    yield Asked(Api.ALTER_USER_SCRAM_CREDENTIALS, a.USER_ALTER, frame)
    yield Asked(Api.DESCRIBE_CLIENT_QUOTAS, a.USER_DESCRIBE, frame_of(Api.DESCRIBE_CLIENT_QUOTAS))
    altered = schema.request(Api.ALTER_CLIENT_QUOTAS).Entries
    limited = altered(
        entity=[altered.Entity(entity_type="client-id", entity_name="made")],
        ops=[altered.Ops(key="producer_byte_rate", value=1e9)],
    )
    yield Asked(Api.ALTER_CLIENT_QUOTAS, a.USER_ALTER, frame_of(Api.ALTER_CLIENT_QUOTAS, entries=[limited]))
    elected = schema.request(Api.ELECT_LEADERS).TopicPartitions(topic=topic, partitions=[0])
    yield Asked(Api.ELECT_LEADERS, a.CLUSTER_ALTER, frame_of(Api.ELECT_LEADERS, topic_partitions=[elected]))
    for api in (Api.LIST_PARTITION_REASSIGNMENTS, Api.LIST_CONFIG_RESOURCES):
        yield Asked(api, a.CLUSTER_DESCRIBE, frame_of(api))
    named = schema.request(Api.DESCRIBE_TOPIC_PARTITIONS).Topics(name=topic)
    yield Asked(
        Api.DESCRIBE_TOPIC_PARTITIONS, a.TOPIC_DESCRIBE, frame_of(Api.DESCRIBE_TOPIC_PARTITIONS, topics=[named])
    )


def _configs(topic: str) -> Iterator[Asked]:
    for api, of_topic, of_broker in (
        (Api.DESCRIBE_CONFIGS, Action.TOPIC_DESCRIBE, Action.CLUSTER_DESCRIBE),
        (Api.ALTER_CONFIGS, Action.TOPIC_ALTER, Action.CLUSTER_ALTER),
        (Api.INCREMENTAL_ALTER_CONFIGS, Action.TOPIC_ALTER, Action.CLUSTER_ALTER),
    ):
        resources = schema.request(api).Resources
        given = (
            {} if api is Api.DESCRIBE_CONFIGS else {"configs": [resources.Configs(name="retention.ms", value="1000")]}
        )
        for action, kind, name in ((of_topic, TOPIC, topic), (of_broker, BROKER, "1")):
            resource = resources(resource_type=kind, resource_name=name, **given)
            yield Asked(api, action, frame_of(api, resources=[resource]))


def subscription(topic: str) -> bytes:
    """Return the subscription of a member that reads one topic (spec: kafka#subscription-bytes)."""
    name = topic.encode()
    return pack(">hih", 0, 1, len(name)) + name + pack(">i", -1)


def join_frame(topic: str) -> bytes:
    """Return the join of a new member that reads a topic, in a version that needs no second request."""
    protocol = schema.request(Api.JOIN_GROUP).Protocols(name="range", metadata=subscription(topic))
    timeouts = {"session_timeout_ms": 10_000, "rebalance_timeout_ms": 10_000}
    return frame_of(Api.JOIN_GROUP, 3, group_id=GROUP, protocol_type="consumer", protocols=[protocol], **timeouts)


def beat_frame(topic: str) -> bytes:
    """Return the heartbeat of a new member of a newer-protocol group that reads a topic."""
    word = {"rebalance_timeout_ms": 10_000, "subscribed_topic_names": [topic], "topic_partitions": []}
    return frame_of(Api.CONSUMER_GROUP_HEARTBEAT, group_id=NEWER_GROUP, member_id="m", **word)


def _groups(topic: str) -> Iterator[Asked]:
    a = Action
    member = {"group_id": GROUP, "generation_id": 1, "member_id": "m"}
    yield Asked(Api.JOIN_GROUP, a.GROUP_JOIN, join_frame(topic))
    yield Asked(Api.SYNC_GROUP, a.GROUP_JOIN, frame_of(Api.SYNC_GROUP, **member))
    yield Asked(Api.HEARTBEAT, a.GROUP_JOIN, frame_of(Api.HEARTBEAT, **member))
    yield Asked(Api.LEAVE_GROUP, a.GROUP_JOIN, frame_of(Api.LEAVE_GROUP, 2, group_id=GROUP, member_id="m"))
    topics = schema.request(Api.OFFSET_COMMIT).Topics
    one = topics(name=topic, partitions=[topics.Partitions(offset=1)])
    yield Asked(Api.OFFSET_COMMIT, a.OFFSET_COMMIT, frame_of(Api.OFFSET_COMMIT, 8, group_id="alone", topics=[one]))
    asked = schema.request(Api.OFFSET_FETCH).Topics(name=topic, indexes=[0])
    yield Asked(Api.OFFSET_FETCH, a.OFFSET_FETCH, frame_of(Api.OFFSET_FETCH, 7, group_id=GROUP, topics=[asked]))
    yield Asked(Api.DESCRIBE_GROUPS, a.GROUP_DESCRIBE, frame_of(Api.DESCRIBE_GROUPS, groups=[GROUP]))
    yield Asked(Api.LIST_GROUPS, a.GROUP_LIST, frame_of(Api.LIST_GROUPS))
    yield Asked(Api.DELETE_GROUPS, a.GROUP_DELETE, frame_of(Api.DELETE_GROUPS, groups_names=[GROUP]))
    yield Asked(Api.CONSUMER_GROUP_HEARTBEAT, a.GROUP_JOIN, beat_frame(topic))
    described = frame_of(Api.CONSUMER_GROUP_DESCRIBE, group_ids=[NEWER_GROUP])
    yield Asked(Api.CONSUMER_GROUP_DESCRIBE, a.GROUP_DESCRIBE, described)
    deleted = schema.request(Api.OFFSET_DELETE).Topics
    deletion = deleted(name=topic, partitions=[deleted.Partitions()])
    yield Asked(Api.OFFSET_DELETE, a.GROUP_DELETE, frame_of(Api.OFFSET_DELETE, group_id=GROUP, topics=[deletion]))


def share_frames(topic: str) -> Iterator[bytes]:
    """Yield the heartbeats with which a member joins and leaves a share group that reads a topic."""
    for epoch in (0, -1):
        beat = {"group_id": SHARE_GROUP, "member_id": "m", "member_epoch": epoch, "subscribed_topic_names": [topic]}
        yield frame_of(Api.SHARE_GROUP_HEARTBEAT, **beat)
    altered = schema.request(Api.ALTER_SHARE_GROUP_OFFSETS).Topics
    one = altered(topic_name=topic, partitions=[altered.Partitions(index=0, start_offset=0)])
    yield frame_of(Api.ALTER_SHARE_GROUP_OFFSETS, group_id=SHARE_GROUP, topics=[one])


def open_frame(topic_id: bytes) -> bytes:
    """Return a ShareFetch that opens a session without waiting for records."""
    topics = schema.request(Api.SHARE_FETCH).Topics
    one = topics(topic_id=topic_id, partitions=[topics.Partitions(index=0, batches=[])])
    return frame_of(Api.SHARE_FETCH, group_id=SHARE_GROUP, member_id="m", topics=[one])


def _share_groups(topic: str, topic_id: bytes = TOPIC_ID) -> Iterator[Asked]:
    a = Action
    beat = {"group_id": SHARE_GROUP, "member_id": "m", "subscribed_topic_names": [topic]}
    yield Asked(Api.SHARE_GROUP_HEARTBEAT, a.GROUP_JOIN, frame_of(Api.SHARE_GROUP_HEARTBEAT, **beat))
    yield Asked(Api.SHARE_GROUP_DESCRIBE, a.GROUP_DESCRIBE, frame_of(Api.SHARE_GROUP_DESCRIBE, group_ids=[SHARE_GROUP]))
    topics = schema.request(Api.SHARE_FETCH).Topics
    fetched = topics(topic_id=topic_id, partitions=[topics.Partitions(index=0, batches=[])])
    member = {"group_id": SHARE_GROUP, "member_id": "m", "topics": [fetched]}
    for action in (a.FETCH, a.GROUP_JOIN):
        yield Asked(Api.SHARE_FETCH, action, frame_of(Api.SHARE_FETCH, **member))
        yield Asked(Api.SHARE_ACKNOWLEDGE, action, frame_of(Api.SHARE_ACKNOWLEDGE, **member, session_epoch=1))
    described = schema.request(Api.DESCRIBE_SHARE_GROUP_OFFSETS).Groups(group_id=SHARE_GROUP, topics=None)
    frame = frame_of(Api.DESCRIBE_SHARE_GROUP_OFFSETS, groups=[described])
    yield Asked(Api.DESCRIBE_SHARE_GROUP_OFFSETS, a.OFFSET_FETCH, frame)
    altered = schema.request(Api.ALTER_SHARE_GROUP_OFFSETS).Topics
    one = altered(topic_name=topic, partitions=[altered.Partitions(index=0, start_offset=0)])
    frame = frame_of(Api.ALTER_SHARE_GROUP_OFFSETS, group_id=SHARE_GROUP, topics=[one])
    yield Asked(Api.ALTER_SHARE_GROUP_OFFSETS, a.OFFSET_COMMIT, frame)
    gone = schema.request(Api.DELETE_SHARE_GROUP_OFFSETS).Topics(topic_name=topic)
    frame = frame_of(Api.DELETE_SHARE_GROUP_OFFSETS, group_id=SHARE_GROUP, topics=[gone])
    yield Asked(Api.DELETE_SHARE_GROUP_OFFSETS, a.GROUP_DELETE, frame)


def _transactions(topic: str) -> Iterator[Asked]:
    """Return requests for an unused transactional id: a denial must not depend on whether it is used."""
    a = Action
    added = schema.request(Api.ADD_PARTITIONS_TO_TXN).Topics(name=topic, partitions=[0])
    frame = frame_of(Api.ADD_PARTITIONS_TO_TXN, transactional_id="T", topics=[added])
    yield Asked(Api.ADD_PARTITIONS_TO_TXN, a.PRODUCE, frame)
    frame = frame_of(Api.ADD_OFFSETS_TO_TXN, transactional_id="T", group_id=GROUP)
    yield Asked(Api.ADD_OFFSETS_TO_TXN, a.TRANSACTION, frame)
    yield Asked(Api.END_TXN, a.TRANSACTION, frame_of(Api.END_TXN, transactional_id="T"))
    topics = schema.request(Api.TXN_OFFSET_COMMIT).Topics
    one = topics(name=topic, partitions=[topics.Partitions(offset=1)])
    frame = frame_of(Api.TXN_OFFSET_COMMIT, transactional_id="T", group_id="alone", topics=[one])
    yield Asked(Api.TXN_OFFSET_COMMIT, a.OFFSET_COMMIT, frame)
    held = frame_of(Api.INIT_PRODUCER_ID, transactional_id="T", transaction_timeout_ms=1_000)
    yield Asked(Api.INIT_PRODUCER_ID, a.TRANSACTION, held)
    written = schema.request(Api.DESCRIBE_PRODUCERS).Topics(name=topic, indexes=[0])
    yield Asked(Api.DESCRIBE_PRODUCERS, a.FETCH, frame_of(Api.DESCRIBE_PRODUCERS, topics=[written]))
    yield Asked(Api.LIST_TRANSACTIONS, a.TRANSACTION, frame_of(Api.LIST_TRANSACTIONS))
    asked = frame_of(Api.DESCRIBE_TRANSACTIONS, transactional_ids=["T"])
    yield Asked(Api.DESCRIBE_TRANSACTIONS, a.TRANSACTION, asked)
