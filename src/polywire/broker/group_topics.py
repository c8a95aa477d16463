"""Look up the topics that groups read, in any shard (decision 0130)."""

from __future__ import annotations

from typing import Protocol

from polywire.broker.remote_topics import RemoteTopicLookup
from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Catalog, Topic
from polywire.types import TopicName


class GroupTopics(Protocol):
    """The methods of ``Broker`` that look up topics of groups, including topics that another shard stores."""

    __slots__ = ()

    settings: BrokerSettings
    remote_topics: RemoteTopicLookup
    _catalog: Catalog

    def group_topic(self, full_name: str) -> Topic | None:
        """Return the topic with this full name, whichever shard stores it, or None."""
        return self._catalog.find(full_name) or self.remote_topics.find(full_name)

    def group_topic_of_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id, whichever shard stores it, or None."""
        return self._catalog.find_id(topic_id) or self.remote_topics.find_id(topic_id)

    def group_resource(self, full_name: str) -> Topic | TopicName:
        """Return the resource for permission checks on a full name: the topic, or its name if it does not exist."""
        return self.group_topic(full_name) or TopicName.parse(full_name)

    def group_partition_count(self, full_name: str, last: int | None = None) -> int:
        """Return a topic's number of partitions, or the default number if it does not exist.

        Args:
            last: number of partitions in the group's last assignment. It is returned until the shard that stores the
                topic has reported the current number.
        """
        topic = self.group_topic(full_name)
        if topic is not None:
            return len(topic.partitions)
        return self.settings.partition_count if last is None or not self.remote_topics.has(full_name) else last

    @property
    def group_topics_version(self) -> int:
        """A number that increases when a topic is created or deleted."""
        return self._catalog.version + self.remote_topics.version
