"""Operations that look up topics and partitions."""

from __future__ import annotations

from typing import Protocol

from polywire.broker.catalog import Catalog
from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Partition, Topic
from polywire.errors import ErrorCode, Missing
from polywire.records.partitioner import partition_of
from polywire.types import Buffer, KeyHash, TopicName


class TopicLookup(Protocol):
    """A base of ``Broker``, whose catalogue these verbs use."""

    __slots__ = ()

    settings: BrokerSettings
    _catalog: Catalog

    def find_topic(self, full_name: str) -> Topic | None:
        """Return the topic with this full name, or None."""
        return self._catalog.find(full_name)

    def topic(self, full_name: str) -> Topic:
        """Return the topic with this full name; raise Missing(TOPIC_MISSING)."""
        topic = self._catalog.find(full_name)
        if topic is None:
            raise Missing(ErrorCode.TOPIC_MISSING, f"no such topic name={full_name!r}")
        return topic

    def topic_of_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id, or None."""
        return self._catalog.find_id(topic_id)

    def resource(self, full_name: str) -> Topic | TopicName:
        """Return the resource for permission checks on a full name: the topic, or its name if it does not exist."""
        return self._catalog.find(full_name) or TopicName.parse(full_name)

    @property
    def topics_version(self) -> int:
        """Increases by one with every topic that is created or deleted, so that callers know when a list is stale."""
        return self._catalog.version

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """Return all topics by full name; the broker's own, which begin with ``__``, only on request."""
        return self._catalog.topics(internal=internal)

    def partition_count(self, full_name: str) -> int:
        """Return the partitions of a topic; the default while it does not exist."""
        topic = self._catalog.find(full_name)
        return self.settings.partition_count if topic is None else len(topic.partitions)

    def partition_of_key(self, topic: Topic, key: Buffer, wire_hash: KeyHash) -> Partition:
        """Return the partition of a key, by the topic's hash function if it has one, else by the protocol's.

        Raises Missing(PARTITION_MISSING) if the topic has none.
        """
        partitions = topic.partitions or topic.written_to()  # raises; this saves every request a call
        count = len(partitions)
        return partitions[partition_of(key, count, topic.settings.key_hash or wire_hash) if count > 1 else 0]
