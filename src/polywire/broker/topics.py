"""Topics and partitions.

A topic's partitions are numbered from 0. Each has an incarnation number that is never reused.
"""

from __future__ import annotations

from polywire.broker.owners import UNOWNED
from polywire.broker.settings import TopicSettings
from polywire.errors import ErrorCode, Missing
from polywire.log.base import PartitionLog
from polywire.types import TopicName


class Partition:
    """One partition of a topic. ``ended`` becomes true when the topic or the partition is deleted.

    Invariant: ``log`` is set before any caller except recovery gets the partition.
    """

    __slots__ = ("ended", "incarnation", "log", "number", "topic")

    log: PartitionLog

    def __init__(self, topic: Topic, number: int, incarnation: int) -> None:
        self.topic = topic
        self.number = number
        self.incarnation = incarnation
        self.ended = False

    def attach(self, log: PartitionLog) -> None:
        """Use this log, configured with the topic's settings."""
        self.log = log
        self.configure()

    def configure(self) -> None:
        """Apply the topic's new settings to the log."""
        self.log.compression = self.topic.settings.stored_compression

    def __repr__(self) -> str:
        return f"Partition({self.topic.name.full!r}, {self.number}, incarnation={self.incarnation})"


class Topic:
    """One topic. ``id`` are 16 random bytes, which differ from those of a deleted topic of the same name.

    owner: the user who created it and is charged for it. Ownership does not limit who may use the topic.
    """

    __slots__ = ("created_at_us", "id", "name", "owner", "partitions", "settings")

    def __init__(
        self,
        name: TopicName,
        topic_id: bytes,
        settings: TopicSettings,
        created_at_us: int,
        owner: int = UNOWNED,
    ) -> None:
        self.owner = owner
        self.name = name
        self.id = topic_id
        self.partitions: list[Partition] = []
        self.settings = settings
        self.created_at_us = created_at_us

    def written_to(self) -> list[Partition]:
        """Return the partitions that can be written; raise Missing(PARTITION_MISSING) if there are none."""
        if not self.partitions:
            raise Missing(ErrorCode.PARTITION_MISSING, f"topic has no partitions name={self.name.full!r}")
        return self.partitions

    def __repr__(self) -> str:
        return f"Topic({self.name.full!r}, partitions={len(self.partitions)})"
