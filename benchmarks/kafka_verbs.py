"""Every API of Kafka with its worst legal request.

Every served API is included; one without a worst case has a plain request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from polywire.broker.groups.consumer import TOPICS_MAX
from polywire.broker.groups.share_members import TOPICS_MAX as SHARED_TOPICS_MAX
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.client_codec import encode_request
from polywire.protocols.kafka.factory import COMMANDS
from polywire.protocols.kafka.messages import SERVED, Api
from polywire.records.columns import Record

NAMES: Final = 10_000  # of one request; more than there are topics
ELEMENTS: Final = 99_000  # of one request: nearly the maximum
WIDE_ENTRIES: Final = 48_000  # of a Produce, which has two elements for each
TOPIC: Final = 2  # a resource with settings
VERSIONS: Final = {  # if the last one requests less, or names topics by their ids
    Api.API_VERSIONS: 0,
    Api.PRODUCE: 9,
    Api.FETCH: 11,
    Api.OFFSET_COMMIT: 8,
    Api.OFFSET_FETCH: 7,
    Api.FIND_COORDINATOR: 4,
    Api.JOIN_GROUP: 3,
    Api.LEAVE_GROUP: 5,
}
Fields = Callable[[], Mapping[str, Any]]


def kafka_requests(
    wide: str, partitions: int, full: str, topics: int, topic_name: Callable[[int], str]
) -> Iterator[tuple[Api, Callable[[], bytes]]]:
    """Yield every API and a function that returns its request.

    wide: a topic of that many partitions; full: one with many records in its only partition; topics: the number of
    others.
    """
    names = [topic_name(number) for number in range(min(topics, NAMES))]
    worst = {**_listed(names), **_share_groups(names), **_worst(wide, partitions, full, names)}
    for api in COMMANDS:
        yield api, partial(_request, api, worst.get(api, dict))


def _request(api: Api, fields: Fields) -> bytes:
    body = schema.request(api)(**fields())
    return encode_request(api, VERSIONS.get(api, SERVED[api].last), 1, body, client_id="worst")


def _worst(wide: str, partitions: int, full: str, names: list[str]) -> Mapping[Api, Fields]:
    numbers = range(partitions)

    def each(api: Api, *, topic: str = "name", number: str = "index", **fields: Any) -> Fields:
        """Return all partitions of the wide topic."""

        def made() -> Mapping[str, Any]:
            topics = schema.request(api).Topics
            every = [topics.Partitions(**{number: one}, **fields) for one in numbers]
            return {"topics": [topics(**{topic: wide}, partitions=every)]}

        return made

    def resources(api: Api, **fields: Any) -> Fields:
        """Return all topics' settings."""

        def made() -> Mapping[str, Any]:
            resource = schema.request(api).Resources
            given = {} if not fields else {"configs": [resource.Configs(**fields)]}
            return {"resources": [resource(resource_type=TOPIC, resource_name=name, **given) for name in names]}

        return made

    fetched = {"fetch_offset": 0, "partition_max_bytes": 1 << 20, "current_leader_epoch": -1}
    retention = {"name": "retention.ms", "value": "1000"}
    return {
        Api.PRODUCE: lambda: _produced(full),
        Api.FETCH: lambda: {
            "max_bytes": 1 << 26,
            "session_epoch": -1,
            **each(Api.FETCH, topic="topic", number="partition", **fetched)(),
        },
        Api.LIST_OFFSETS: each(Api.LIST_OFFSETS, timestamp=0, current_leader_epoch=-1),
        Api.METADATA: lambda: {"topics": None, "want_topic_operations": True},
        Api.OFFSET_COMMIT: lambda: {"group_id": "alone", "generation": -1, **each(Api.OFFSET_COMMIT, offset=1)()},
        Api.OFFSET_FETCH: lambda: {
            "group_id": "crowd",
            "topics": [schema.request(Api.OFFSET_FETCH).Topics(name=wide, indexes=list(numbers))],
        },
        Api.DELETE_RECORDS: each(Api.DELETE_RECORDS, offset=0),
        Api.OFFSET_FOR_LEADER_EPOCH: each(
            Api.OFFSET_FOR_LEADER_EPOCH, topic="topic", number="partition", leader_epoch=1, current_leader_epoch=-1
        ),
        Api.DESCRIBE_CONFIGS: resources(Api.DESCRIBE_CONFIGS),
        Api.ALTER_CONFIGS: lambda: {"validate_only": True, **resources(Api.ALTER_CONFIGS, **retention)()},
        Api.INCREMENTAL_ALTER_CONFIGS: lambda: {
            "validate_only": True,
            **resources(Api.INCREMENTAL_ALTER_CONFIGS, **retention)(),
        },
        Api.DESCRIBE_LOG_DIRS: lambda: {"topics": None},
        Api.OFFSET_DELETE: lambda: {"group_id": "none", **each(Api.OFFSET_DELETE)()},
        Api.ELECT_LEADERS: lambda: {
            "topic_partitions": [
                schema.request(Api.ELECT_LEADERS).TopicPartitions(
                    topic=wide, partitions=[number % partitions for number in range(ELEMENTS)]
                )
            ]
        },
        Api.DESCRIBE_TOPIC_PARTITIONS: lambda: {"topics": [], "response_partition_limit": 1 << 30},
    }


def _listed(names: list[str]) -> Mapping[Api, Fields]:
    """Return requests that name many things, or request all."""
    group = {"group_id": "crowd", "member_id": "m", "generation_id": 1}
    every = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}
    return {
        Api.FIND_COORDINATOR: lambda: {"coordinator_keys": names},
        Api.SYNC_GROUP: lambda: group,
        Api.HEARTBEAT: lambda: group,
        Api.DESCRIBE_GROUPS: lambda: {"groups": names, "want_operations": True},
        Api.SASL_HANDSHAKE: lambda: {"mechanism": "PLAIN"},
        Api.CREATE_TOPICS: lambda: {
            "validate_only": True,
            "topics": [
                schema.request(Api.CREATE_TOPICS).Topics(name=f"new{number}", num_partitions=1, replication_factor=1)
                for number in range(1_000)
            ],
        },
        Api.DELETE_TOPICS: lambda: {
            "topics": [schema.request(Api.DELETE_TOPICS).Topics(name=f"none{number}") for number in range(NAMES)]
        },
        Api.DESCRIBE_ACLS: lambda: every,
        Api.CREATE_PARTITIONS: lambda: {
            "validate_only": True,
            "topics": [schema.request(Api.CREATE_PARTITIONS).Topics(name=name, count=2) for name in names],
        },
        Api.ALTER_CLIENT_QUOTAS: lambda: {
            "entries": [
                schema.request(Api.ALTER_CLIENT_QUOTAS).Entries(
                    entity=[
                        schema.request(Api.ALTER_CLIENT_QUOTAS).Entries.Entity(
                            entity_type="user", entity_name=f"unknown{number}"
                        )
                    ],
                    ops=[schema.request(Api.ALTER_CLIENT_QUOTAS).Entries.Ops(key="producer_byte_rate", value=1.0)],
                )
                for number in range(NAMES)
            ]
        },
        Api.ALTER_USER_SCRAM_CREDENTIALS: lambda: {
            "upsertions": [
                schema.request(Api.ALTER_USER_SCRAM_CREDENTIALS).Upsertions(
                    name=f"unknown{number}", mechanism=1, iterations=4096, salt=b"s" * 16, salted_password=b"p" * 32
                )
                for number in range(NAMES)
            ]
        },
        Api.DELETE_GROUPS: lambda: {"groups_names": [f"none{number}" for number in range(NAMES)]},
    }


def _share_groups(names: list[str]) -> Mapping[Api, Fields]:
    """Return requests of share groups that name many things."""
    return {
        Api.SHARE_GROUP_HEARTBEAT: lambda: {
            "group_id": "shared",
            "member_id": "m",
            "subscribed_topic_names": names[:SHARED_TOPICS_MAX],
        },
        Api.SHARE_GROUP_DESCRIBE: lambda: {"group_ids": names, "want_operations": True},
        Api.SHARE_FETCH: lambda: {"group_id": "shared", "member_id": "m", "topics": _shared(Api.SHARE_FETCH)},
        Api.SHARE_ACKNOWLEDGE: lambda: {
            "group_id": "shared",
            "member_id": "m",
            "session_epoch": 1,
            "topics": _shared(Api.SHARE_ACKNOWLEDGE),
        },
        Api.DESCRIBE_SHARE_GROUP_OFFSETS: lambda: {
            "groups": [schema.request(Api.DESCRIBE_SHARE_GROUP_OFFSETS).Groups(group_id=name) for name in names]
        },
        Api.ALTER_SHARE_GROUP_OFFSETS: lambda: {
            "group_id": "altered",
            "topics": [
                schema.request(Api.ALTER_SHARE_GROUP_OFFSETS).Topics(topic_name=name, partitions=[]) for name in names
            ],
        },
        Api.DELETE_SHARE_GROUP_OFFSETS: lambda: {
            "group_id": "altered",
            "topics": [schema.request(Api.DELETE_SHARE_GROUP_OFFSETS).Topics(topic_name=name) for name in names],
        },
    }


def _shared(api: Api) -> list[Any]:
    """Return many partitions of unknown topics."""
    topics = schema.request(api).Topics
    return [
        topics(topic_id=number.to_bytes(16, "big"), partitions=[topics.Partitions(index=0, batches=[])])
        for number in range(NAMES)
    ]


def wide_produce(topic: str, partitions: int) -> bytes:
    """Return a Produce of one record to every partition of a topic, as often as one request may name them."""
    topics, records = schema.request(Api.PRODUCE).Topics, encode_batch([Record(b"")])
    entries = [topics.Partitions(index=number % partitions, records=records) for number in range(WIDE_ENTRIES)]
    return _request(Api.PRODUCE, lambda: {"acks": 1, "topics": [topics(name=topic, partitions=entries)]})


def wide_join(topics: list[str]) -> bytes:
    """Return the join of a consumer in as many topics as permitted."""
    fields = {"group_id": "wide", "member_id": "m", "member_epoch": 0, "rebalance_timeout_ms": 60_000}
    return _request(
        Api.CONSUMER_GROUP_HEARTBEAT,
        lambda: {**fields, "subscribed_topic_names": topics[:TOPICS_MAX], "topic_partitions": []},
    )


def wide_leave() -> bytes:
    """Return the departure of the same consumer from all of them."""
    fields = {"group_id": "wide", "member_id": "m", "member_epoch": -1, "rebalance_timeout_ms": -1}
    return _request(Api.CONSUMER_GROUP_HEARTBEAT, lambda: fields)


def classic_join(group: str, topics: Sequence[str]) -> bytes:
    """Return the join of a classic group's member that reads all these topics."""
    names = [topic.encode() for topic in topics]
    texts = b"".join(len(name).to_bytes(2, "big") + name for name in names)
    metadata = bytes(2) + len(names).to_bytes(4, "big") + texts + bytes(4)
    protocol = schema.request(Api.JOIN_GROUP).Protocols(name="range", metadata=metadata)
    fields = {"session_timeout_ms": 30_000, "rebalance_timeout_ms": 60_000, "protocol_type": "consumer"}
    return _request(Api.JOIN_GROUP, lambda: {"group_id": group, "member_id": "", "protocols": [protocol], **fields})


def _produced(topic: str) -> Mapping[str, Any]:
    topics = schema.request(Api.PRODUCE).Topics
    records = encode_batch([Record(b"")] * 100_000)
    return {"acks": 1, "topics": [topics(name=topic, partitions=[topics.Partitions(records=records)])]}
