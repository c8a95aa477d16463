"""The broker's verbs that find topics and their partitions.

Promises: nothing is changed. Must not know: wires, records.
"""

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
        """The topic of this full name."""
        return self._catalog.find(full_name)

    def topic(self, full_name: str) -> Topic:
        """The topic of this full name. Raises Missing(TOPIC_MISSING)."""
        topic = self._catalog.find(full_name)
        if topic is None:
            raise Missing(ErrorCode.TOPIC_MISSING, f"no such topic name={full_name!r}")
        return topic

    def topic_of_id(self, topic_id: bytes) -> Topic | None:
        """The topic of this id."""
        return self._catalog.find_id(topic_id)

    def resource(self, full_name: str) -> Topic | TopicName:
        """What a full name names, for whoever asks whether somebody may: the topic, or where it would be."""
        return self._catalog.find(full_name) or TopicName.parse(full_name)

    @property
    def topics_version(self) -> int:
        """Goes up by one with every topic that begins or ends: whoever keeps a list knows when to ask again."""
        return self._catalog.version

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """All topics by full name; the broker's own, which begin with ``__``, only when asked for."""
        return self._catalog.topics(internal=internal)

    def partition_count(self, full_name: str) -> int:
        """Partitions of a topic; the default while it does not exist."""
        topic = self._catalog.find(full_name)
        return self.settings.partition_count if topic is None else len(topic.partitions)

    def partition_of_key(self, topic: Topic, key: Buffer, wire_hash: KeyHash) -> Partition:
        """Where a key belongs: by the topic's own function if it has one, else by the wire's.

        Raises Missing(PARTITION_MISSING) when the topic has none.
        """
        partitions = topic.partitions or topic.written_to()  # which raises: one call less for every request
        count = len(partitions)
        return partitions[partition_of(key, count, topic.settings.key_hash or wire_hash) if count > 1 else 0]
