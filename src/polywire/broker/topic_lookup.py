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
    """A base of ``Broker``: the verbs use its catalogue."""

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
        """Return what permissions on a full name are checked against: the topic, or its name if it does not exist."""
        return self._catalog.find(full_name) or TopicName.parse(full_name)

    @property
    def topics_version(self) -> int:
        """A number that increases by one whenever a topic is created or deleted, so that callers can detect a stale
        list.
        """
        return self._catalog.version

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """Return all topics, sorted by full name. internal: include the broker's own topics, whose names begin with
        ``__``.
        """
        return self._catalog.topics(internal=internal)

    def partition_count(self, full_name: str) -> int:
        """Return a topic's number of partitions, or the default number if it does not exist."""
        topic = self._catalog.find(full_name)
        return self.settings.partition_count if topic is None else len(topic.partitions)

    def partition_of_key(self, topic: Topic, key: Buffer, wire_hash: KeyHash) -> Partition:
        """Return the partition for a key, by the topic's hash function if it has one, else by the protocol's.

        Raises Missing(PARTITION_MISSING) if the topic has no partitions.
        """
        # ``written_to`` raises if there are none; calling it only then makes each request faster
        partitions = topic.partitions or topic.written_to()
        count = len(partitions)
        return partitions[partition_of(key, count, topic.settings.key_hash or wire_hash) if count > 1 else 0]
