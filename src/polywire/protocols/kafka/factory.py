"""The entry point of the Kafka protocol: detect Kafka connections and create their sessions.

ApiVersions lists only requests that have a handler. A connection of another protocol is never mistaken for a Kafka
connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from polywire.broker.permissions import Action
from polywire.protocols.kafka import (
    auth,
    cluster,
    configs,
    consumer_groups,
    fetch,
    forwarded,
    group_lists,
    groups,
    offsets,
    positions,
    produce,
    producers,
    quotas,
    repeated,
    share_fetch,
    share_groups,
    topics,
    transaction_lists,
    transactions,
    users,
)
from polywire.protocols.kafka.context import KafkaBroker, KafkaRouter, KafkaSettings, Shared
from polywire.protocols.kafka.group_routing import GROUP_HANDLERS
from polywire.protocols.kafka.messages import SERVED, WIRE, Api, Served
from polywire.protocols.kafka.participants import PART, enter, permit
from polywire.protocols.kafka.routed import RoutedKafkaSession
from polywire.protocols.kafka.session import REQUEST_BYTES_MAX, Command, KafkaSession
from polywire.protocols.kafka.subscription import WRITING
from polywire.protocols.kafka.transaction_routing import TRANSACTION_HANDLERS
from polywire.protocols.runtime.commands import table
from polywire.protocols.runtime.forwarded import Executor
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Called

API_MAX: Final = 92  # highest api key in a client's first request (spec: kafka#recognition)
VERSION_MAX: Final = 20
HEAD_BYTES: Final = 14  # size of length, api key, version, correlation id, and length of the client id
KAFKA07_TYPE_MAX: Final = 4  # highest request type of Kafka 0.7, which uses the same numbers as Kafka

COMMANDS: Final[Mapping[Api, Command]] = table(
    Command(Api.PRODUCE, produce.produce, (Action.PRODUCE,), pipelined=True, learn=repeated.learn),
    Command(Api.FETCH, fetch.fetch, (Action.FETCH,), learn=repeated.learn_fetch),
    Command(Api.LIST_OFFSETS, offsets.list_offsets, (Action.TOPIC_DESCRIBE,)),
    Command(Api.METADATA, topics.metadata, (Action.TOPIC_DESCRIBE, Action.TOPIC_CREATE)),
    Command(Api.OFFSET_COMMIT, positions.offset_commit, (Action.OFFSET_COMMIT,)),
    Command(Api.OFFSET_FETCH, positions.offset_fetch, (Action.OFFSET_FETCH,)),
    Command(Api.FIND_COORDINATOR, cluster.find_coordinator, (Action.CLUSTER_DESCRIBE,)),
    Command(Api.JOIN_GROUP, groups.join_group, (Action.GROUP_JOIN,)),
    Command(Api.HEARTBEAT, groups.heartbeat, (Action.GROUP_JOIN,)),
    Command(Api.LEAVE_GROUP, groups.leave_group, (Action.GROUP_JOIN,)),
    Command(Api.SYNC_GROUP, groups.sync_group, (Action.GROUP_JOIN,)),
    Command(Api.DESCRIBE_GROUPS, group_lists.describe_groups, (Action.GROUP_DESCRIBE,)),
    Command(Api.LIST_GROUPS, group_lists.list_groups, (Action.GROUP_LIST,)),
    Command(Api.SASL_HANDSHAKE, auth.sasl_handshake, (Action.CONNECT,)),
    Command(Api.API_VERSIONS, cluster.api_versions, (Action.CONNECT,)),
    Command(Api.CREATE_TOPICS, topics.create_topics, (Action.TOPIC_CREATE,)),
    Command(Api.DELETE_TOPICS, topics.delete_topics, (Action.TOPIC_DELETE,)),
    Command(Api.DELETE_RECORDS, offsets.delete_records, (Action.TOPIC_PURGE,)),
    # allowed for users who may write to any topic
    Command(Api.INIT_PRODUCER_ID, producers.init_producer_id, (Action.STAGED_PUBLISH,)),
    Command(Api.OFFSET_FOR_LEADER_EPOCH, offsets.offset_for_leader_epoch, (Action.TOPIC_DESCRIBE,)),
    Command(Api.ADD_PARTITIONS_TO_TXN, transactions.add_partitions, (Action.TRANSACTION, Action.PRODUCE)),
    Command(Api.ADD_OFFSETS_TO_TXN, transactions.add_offsets, (Action.TRANSACTION, Action.OFFSET_COMMIT)),
    Command(Api.END_TXN, transactions.end, (Action.TRANSACTION,)),
    Command(Api.TXN_OFFSET_COMMIT, transactions.txn_offset_commit, (Action.TRANSACTION, Action.OFFSET_COMMIT)),
    Command(Api.DESCRIBE_ACLS, users.describe_acls, (Action.USER_DESCRIBE,)),
    Command(Api.DESCRIBE_PRODUCERS, producers.describe_producers, (Action.FETCH,)),
    Command(Api.DESCRIBE_TRANSACTIONS, transaction_lists.describe_transactions, (Action.TRANSACTION,)),
    Command(Api.LIST_TRANSACTIONS, transaction_lists.list_transactions, (Action.TRANSACTION,)),
    Command(Api.DESCRIBE_CONFIGS, configs.describe_configs, (Action.TOPIC_DESCRIBE, Action.CLUSTER_DESCRIBE)),
    Command(Api.ALTER_CONFIGS, configs.alter_configs, (Action.TOPIC_ALTER, Action.CLUSTER_ALTER)),
    Command(Api.DESCRIBE_LOG_DIRS, cluster.describe_log_dirs, (Action.SERVER_DESCRIBE,)),
    Command(Api.SASL_AUTHENTICATE, auth.sasl_authenticate, (Action.CONNECT,)),
    Command(Api.CREATE_PARTITIONS, topics.create_partitions, (Action.TOPIC_ALTER,)),
    Command(
        Api.INCREMENTAL_ALTER_CONFIGS,
        configs.incremental_alter_configs,
        (Action.TOPIC_ALTER, Action.CLUSTER_ALTER),
    ),
    Command(Api.DELETE_GROUPS, group_lists.delete_groups, (Action.GROUP_DELETE,)),
    Command(Api.OFFSET_DELETE, positions.offset_delete, (Action.GROUP_DELETE,)),
    Command(Api.DESCRIBE_CLUSTER, cluster.describe_cluster, (Action.CLUSTER_DESCRIBE,)),
    Command(Api.ELECT_LEADERS, cluster.elect_leaders, (Action.CLUSTER_ALTER,)),
    Command(Api.LIST_PARTITION_REASSIGNMENTS, cluster.list_partition_reassignments, (Action.CLUSTER_DESCRIBE,)),
    Command(Api.DESCRIBE_CLIENT_QUOTAS, quotas.describe_client_quotas, (Action.USER_DESCRIBE,)),
    Command(Api.ALTER_CLIENT_QUOTAS, quotas.alter_client_quotas, (Action.USER_ALTER,)),
    Command(Api.DESCRIBE_USER_SCRAM_CREDENTIALS, users.describe_user_scram_credentials, (Action.USER_DESCRIBE,)),
    Command(Api.ALTER_USER_SCRAM_CREDENTIALS, users.alter_user_scram_credentials, (Action.USER_ALTER,)),
    Command(Api.LIST_CONFIG_RESOURCES, cluster.list_config_resources, (Action.CLUSTER_DESCRIBE,)),
    Command(Api.DESCRIBE_TOPIC_PARTITIONS, topics.describe_topic_partitions, (Action.TOPIC_DESCRIBE,)),
    Command(Api.CONSUMER_GROUP_HEARTBEAT, consumer_groups.consumer_group_heartbeat, (Action.GROUP_JOIN,)),
    Command(Api.CONSUMER_GROUP_DESCRIBE, group_lists.consumer_group_describe, (Action.GROUP_DESCRIBE,)),
    Command(Api.SHARE_GROUP_HEARTBEAT, share_groups.share_group_heartbeat, (Action.GROUP_JOIN,)),
    Command(Api.SHARE_GROUP_DESCRIBE, share_groups.share_group_describe, (Action.GROUP_DESCRIBE,)),
    Command(Api.SHARE_FETCH, share_fetch.share_fetch, (Action.FETCH, Action.GROUP_JOIN)),
    Command(Api.SHARE_ACKNOWLEDGE, share_fetch.share_acknowledge, (Action.FETCH, Action.GROUP_JOIN)),
    Command(Api.DESCRIBE_SHARE_GROUP_OFFSETS, share_groups.describe_share_group_offsets, (Action.OFFSET_FETCH,)),
    Command(Api.ALTER_SHARE_GROUP_OFFSETS, share_groups.alter_share_group_offsets, (Action.OFFSET_COMMIT,)),
    Command(Api.DELETE_SHARE_GROUP_OFFSETS, share_groups.delete_share_group_offsets, (Action.GROUP_DELETE,)),
)


ROUTED_COMMANDS: Final[Mapping[Api, Command]] = table(
    *(
        Command(
            api,
            {**GROUP_HANDLERS, **TRANSACTION_HANDLERS}.get(api, command.handler),
            command.actions,
            pipelined=command.pipelined,
        )
        for api, command in COMMANDS.items()
    )
)
"""Handlers for clients of a broker with several processes."""

FORWARDED_COMMANDS: Final[Mapping[Api, Command]] = {
    **COMMANDS,
    Api.OFFSET_COMMIT: Command(Api.OFFSET_COMMIT, forwarded.offset_commit, (Action.OFFSET_COMMIT,)),
    Api.TXN_OFFSET_COMMIT: Command(
        Api.TXN_OFFSET_COMMIT, forwarded.txn_offset_commit, (Action.TRANSACTION, Action.OFFSET_COMMIT)
    ),
}
"""Handlers for the other processes of the broker."""


class KafkaFactory:
    """Opens sessions for Kafka clients. Implements ``protocols.runtime.session.SessionFactory``."""

    __slots__ = ("_router", "own", "shared")

    def __init__(
        self,
        broker: KafkaBroker,
        settings: KafkaSettings | None = None,
        *,
        off_loop: OffLoopQueue | None = None,
        router: KafkaRouter | None = None,
    ) -> None:
        """Create the factory.

        Args:
            off_loop: the process's queue for work in threads, if it has one.
            router: the broker of all processes, if there are several.
        """
        commands = COMMANDS if router is None else ROUTED_COMMANDS
        served: dict[Api, Served] = {api: SERVED[api] for api in sorted(commands)}
        make = partial(
            Shared,
            settings=settings or KafkaSettings(),
            served=served,
            off_loop=off_loop or OffLoopQueue(broker.loop),
            shards=None if router is None else router.shards,
        )
        self.own: Final = make(broker)
        """State for sessions that other processes open. These use only the topics of this process."""
        self.shared: Final = self.own if router is None else make(router)
        self._router: Final = router
        broker.classic.restore(WIRE, WRITING)
        if router is not None:
            broker.producer_shard = router.shards.own
            broker.remote_topics = router.remote_topics
            broker.consumers.end_memberships(WIRE, self.shared.coordinates)

    @property
    def wire(self) -> str:
        return WIRE

    @property
    def executor(self) -> Executor:
        """Executes requests that other processes of the broker forward."""
        return partial(forwarded.execute, self.own, FORWARDED_COMMANDS)

    @property
    def called(self) -> Called:
        """Objects of this process that other processes call."""
        return ((PART, self.own, (permit, enter)),)

    def recognise(self, prefix: bytes) -> bool | None:
        """Return whether the bytes begin a Kafka request and not a Kafka 0.7 request (spec: kafka#recognition).

        Returns None if more bytes are needed.
        """
        length = int.from_bytes(prefix[:4].ljust(4, b"\0"), "big")
        if length > REQUEST_BYTES_MAX or (len(prefix) >= 4 and length < HEAD_BYTES - 4):
            return False
        api = int.from_bytes(prefix[4:6].ljust(2, b"\0"), "big")
        version = int.from_bytes(prefix[6:8].ljust(2, b"\0"), "big")
        if api > API_MAX or version > VERSION_MAX:
            return False
        if len(prefix) < HEAD_BYTES:
            return None
        client_id = int.from_bytes(prefix[12:14], "big", signed=True)
        if not -1 <= client_id <= length - (HEAD_BYTES - 4):
            return False
        return api > KAFKA07_TYPE_MAX or not _names_a_topic(prefix, api)

    def open(self, output: Output, resume: Callable[[], None]) -> KafkaSession:
        if self._router is not None:
            return RoutedKafkaSession(self.shared, self._router, ROUTED_COMMANDS, output, resume)
        return KafkaSession(self.shared, COMMANDS, output, resume)


def _names_a_topic(prefix: bytes, api: int) -> bool:
    """Return whether these bytes may be a request of Kafka 0.7.

    Kafka 0.7 has a topic name at the position of Kafka's correlation id, which begins with zero bytes in a client's
    first request.
    """
    if api in (2, 3):
        return prefix[8:10] != b"\0\0" and prefix[10] >= 0x20
    return prefix[8] >= 0x20
