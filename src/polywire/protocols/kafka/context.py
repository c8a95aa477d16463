"""State that the sessions of one Kafka listener share: settings, supported versions, the cluster id and node addresses.

The cluster id is generated once and stored with the data.
"""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from polywire.broker.group_topics import GroupTopics
from polywire.broker.groups.classic_groups import ClassicGroups
from polywire.broker.groups.commits import PositionVerbs
from polywire.broker.groups.consumer_groups import ConsumerGroups
from polywire.broker.groups.share_groups import ShareGroups
from polywire.broker.owners import Caller
from polywire.broker.participants import Participants
from polywire.broker.record_verbs import ProducerVerbs, RecordVerbs
from polywire.broker.state import WireStateVerbs
from polywire.broker.topic_verbs import RemovalVerbs, TopicVerbs
from polywire.broker.topics import Partition, Topic
from polywire.broker.transactions import Transactions
from polywire.errors import BrokerError
from polywire.protocols.kafka.fences import Fences, Turns
from polywire.protocols.kafka.fetch_sessions import FetchSessions
from polywire.protocols.kafka.messages import WIRE, Api, Served
from polywire.protocols.kafka.share_sessions import ShareSessions
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.forwarded import Forwarding
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.protocols.runtime.shards import ReachedShards
from polywire.types import Level

NODE_ID: Final = 1  # node id of a single broker, or of the first shard
_CLUSTER_ID: Final = "cluster_id"  # key of the cluster id in the protocol's stored state


class KafkaBroker(
    TopicVerbs,
    GroupTopics,
    RemovalVerbs,
    RecordVerbs,
    ProducerVerbs,
    PositionVerbs,
    WireStateVerbs,
    WireBroker,
    Protocol,
):
    """The methods of the broker that the Kafka protocol uses."""

    @property
    def participants(self) -> Participants: ...

    @property
    def classic(self) -> ClassicGroups:
        """Classic groups, whose members compute the assignment themselves."""

    @property
    def consumers(self) -> ConsumerGroups:
        """Consumer groups, whose members get their assignment in heartbeat responses."""

    @property
    def shares(self) -> ShareGroups:
        """Share groups, whose members acknowledge records one by one."""

    @property
    def transactions(self) -> Transactions:
        """Transactions of records and committed offsets."""


class KafkaRouter(KafkaBroker, Forwarding, Protocol):
    """The methods of a broker with several processes that the Kafka protocol uses."""

    local: KafkaBroker
    """The broker of this process."""

    @property
    def epoch(self) -> int:
        """Number of starts of the broker."""

    @property
    def shards(self) -> ReachedShards: ...

    @property
    def processes(self) -> Mapping[int, Any]:
        """The other processes that have reported their addresses, by shard (``routing.messages.Process``)."""

    def shard_of_topic(self, topic: Topic) -> int:
        """Return the shard of a topic."""

    def call_part(self, shard: int, part: str, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Call a function with an object of another process. See ``shards.Parts``."""

    def know_processes(self, shards: Iterable[int]) -> None:
        """Raise Pending until the processes of these shards have reported their addresses."""

    def require_latest(self) -> None:
        """Raise Pending until the topics of all processes are known. See ``shards.Parts``."""

    def resolve(self, names: Iterable[str], ids: Iterable[bytes], *, creates: Callable[[str], Caller | None]) -> None:
        """Raise Pending until other processes have reported these topics, or created them.

        See ``routing.broker.ResolvedBroker``.
        """


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Settings of the Kafka protocol.

    Attributes:
        host, port: the advertised address. By default (empty and 0), it is the one that each client connected to.
        acks_all: the durability level for acks=all.
        answer_bytes_max: limit for the records in a response; a single batch may exceed it.
        replication_factor_max: the highest replication factor that clients can request. Only one copy is stored.
        data_dir: the data directory that DescribeLogDirs reports.
    """

    host: str = ""
    port: int = 0
    acks_all: Level = Level.SYNCED
    answer_bytes_max: int = 8 * 1024 * 1024
    replication_factor_max: int = 1
    data_dir: Path | None = None


class Shared:
    """State shared by the sessions of a listener."""

    __slots__ = (
        "_cluster_id",
        "broker",
        "fences",
        "fetch_sessions",
        "node_id",
        "off_loop",
        "served",
        "settings",
        "shards",
        "share_sessions",
        "turns",
    )

    def __init__(
        self,
        broker: KafkaBroker,
        settings: KafkaSettings,
        served: Mapping[Api, Served],
        off_loop: OffLoopQueue,
        shards: ReachedShards | None = None,
    ) -> None:
        """Create the state.

        Args:
            served: the supported versions of the requests that have a handler.
            off_loop: the queue for decompressing large batches in a thread.
            shards: the shards of the broker, if it has several processes.
        """
        self.broker: Final = broker
        self.shards: Final = shards
        self.node_id: Final = NODE_ID if shards is None else node_of(shards.own)
        self.fences: Final = Fences()
        self.turns: Final = Turns()
        self.settings: Final = settings
        self.served: Final = served
        self.off_loop: Final = off_loop
        self.fetch_sessions: Final = FetchSessions(broker)
        self.share_sessions: Final = ShareSessions(broker.shares.release_member)
        self._cluster_id = ""

    @property
    def cluster_id(self) -> str:
        """The cluster id: 22 characters that never change for a data directory (spec: kafka#metadata)."""
        if not self._cluster_id:
            stored = self.broker.wire_state(WIRE).get(_CLUSTER_ID)
            if stored is None:
                stored = urlsafe_b64encode(secrets.token_bytes(16)).rstrip(b"=")
                self._store_cluster_id(stored)
            self._cluster_id = stored.decode()
        return self._cluster_id

    def _store_cluster_id(self, cluster_id: bytes) -> None:
        with suppress(BrokerError):  # the disk is full; the id stays in memory until the next start
            self.broker.set_wire_state(WIRE, _CLUSTER_ID, cluster_id)

    def coordinates(self, name: str) -> bool:
        """Return whether this shard coordinates the group or transactional id."""
        return self.shards is None or self.shards.shard_by_hash(name) == self.shards.own

    def learn_cluster_id(self, cluster_id: str) -> None:
        if cluster_id and cluster_id != self._cluster_id:
            self._store_cluster_id(cluster_id.encode())
            self._cluster_id = cluster_id

    def address(self, local: tuple[str, int]) -> tuple[str, int]:
        """Return the host and port at which a client that connected to ``local`` reaches this broker."""
        if self.shards is not None:
            return self.own_address(local[0], self.shards.listener_of(local[1]))
        return self.settings.host or local[0], self.settings.port or local[1]

    def own_address(self, host: str, listener: str) -> tuple[str, int]:
        """Return the host and port at which a client reaches this process.

        ``host`` and ``listener`` are the address and the listener that the client connected to.
        """
        assert self.shards is not None, "called only with several shards"
        return self.settings.host or host, self.shards.port_of(listener)


def node_of(shard: int) -> int:
    """Return the node id of a shard. It stays the same if another process takes over the shard."""
    return NODE_ID + shard


def epoch_of(partition: Partition) -> int:
    """Return the leader epoch that clients see: the number of the broker's starts (spec: kafka#words-and-ours)."""
    return partition.log.epoch_at(partition.log.next_offset)
