"""What the sessions of one Kafka listener share: settings, what is served, and what a lone broker says of itself.

Promises: the cluster's id is made once and kept with the data. Must not know: bytes, sockets.
"""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from polywire.broker.branches import Branches
from polywire.broker.group_topics import GroupTopics
from polywire.broker.groups.classic_groups import ClassicGroups
from polywire.broker.groups.consumer_groups import ConsumerGroups
from polywire.broker.groups.positions import PositionVerbs
from polywire.broker.producer_verbs import ProducerVerbs
from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.removal_verbs import RemovalVerbs
from polywire.broker.topic_verbs import TopicVerbs
from polywire.broker.topics import Partition
from polywire.broker.transactions import Transactions
from polywire.broker.wire_state import WireStateVerbs
from polywire.errors import BrokerError
from polywire.protocols.kafka.fences import Fences, Turns
from polywire.protocols.kafka.fetch_sessions import FetchSessions
from polywire.protocols.kafka.messages import WIRE, Api, Served
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.protocols.runtime.shards import ReachedShards
from polywire.types import Level

NODE_ID: Final = 1  # of the broker, or of the first shard
_CLUSTER_ID: Final = "cluster_id"  # of the wire's kept state


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
    """What this wire calls of the broker."""

    @property
    def epoch(self) -> int:
        """Number of its start."""

    @property
    def branches(self) -> Branches:
        """Transactions that other shards have parts of, too."""

    @property
    def classic(self) -> ClassicGroups:
        """Groups whose members assign partitions themselves."""

    @property
    def consumers(self) -> ConsumerGroups:
        """Groups whose members are told their partitions by heartbeats."""

    @property
    def transactions(self) -> Transactions:
        """Records and positions that become true at once."""


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Settings of the Kafka wire.

    host, port: by which clients reach this broker; empty and 0: by what each has connected to. acks_all: what acks=all means.
    answer_bytes_max: bytes of records in one answer, unless a single batch has more. replication_factor_max: how many copies topics may ask
    for, of which one is kept. data_dir: where the broker's files are, for what tools ask about disks.
    """

    host: str = ""
    port: int = 0
    acks_all: Level = Level.SYNCED
    answer_bytes_max: int = 8 * 1024 * 1024
    replication_factor_max: int = 1
    data_dir: Path | None = None


class Shared:
    """Invariant: ``served`` has only what there is a handler for. ``places``: where brokers of shards were last said to be, by the listener
    and host that the client has come to, and the shard."""

    __slots__ = (
        "_cluster_id",
        "broker",
        "fences",
        "fetch_sessions",
        "node_id",
        "off_loop",
        "places",
        "served",
        "settings",
        "shards",
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
        """shards: those that several processes have between them, of which one is ours."""
        self.broker: Final = broker
        self.shards: Final = shards
        self.node_id: Final = NODE_ID if shards is None else node_of(shards.own)
        self.fences: Final = Fences()
        self.turns: Final = Turns()
        self.places: Final[dict[tuple[str, str, int], Any]] = {}
        self.settings: Final = settings
        self.served: Final = served
        self.off_loop: Final = off_loop
        self.fetch_sessions: Final = FetchSessions(broker)
        self._cluster_id = ""

    @property
    def cluster_id(self) -> str:
        """22 characters that stay the same as long as the data directory is there (spec: kafka#metadata)."""
        if not self._cluster_id:
            kept = self.broker.wire_state(WIRE).get(_CLUSTER_ID)
            if kept is None:
                kept = urlsafe_b64encode(secrets.token_bytes(16)).rstrip(b"=")
                self._keep(kept)
            self._cluster_id = kept.decode()
        return self._cluster_id

    def _keep(self, cluster_id: bytes) -> None:
        with suppress(BrokerError):  # the disk is full: it is as good for as long as the broker runs
            self.broker.set_wire_state(WIRE, _CLUSTER_ID, cluster_id)

    def is_home(self, name: str) -> bool:
        """Whether a group or transactional id of this name is at home in our shard; all are where there is one."""
        return self.shards is None or self.shards.home(name) == self.shards.own

    def learn_cluster_id(self, cluster_id: str) -> None:
        """All shards go by the id of the first."""
        if cluster_id and cluster_id != self._cluster_id:
            self._keep(cluster_id.encode())
            self._cluster_id = cluster_id

    def address(self, local: tuple[str, int]) -> tuple[str, int]:
        """Host and port by which a client that has connected to ``local`` reaches this broker."""
        if self.shards is not None:
            return self.own_address(local[0], self.shards.listener_of(local[1]))
        return self.settings.host or local[0], self.settings.port or local[1]

    def own_address(self, host: str, listener: str) -> tuple[str, int]:
        """Host and port by which a client that has connected to a listener of this host reaches this one of several processes."""
        assert self.shards is not None, "it is one of several"
        return self.settings.host or host, self.shards.port_of(listener)


def node_of(shard: int) -> int:
    """What the broker of a shard is called: a shard keeps its number, whoever leads it."""
    return NODE_ID + shard


def epoch_of(partition: Partition) -> int:
    """The leader epoch that clients are told: the number of the broker's start (spec: kafka#words-and-ours)."""
    return partition.log.epoch_at(partition.log.next_offset)
