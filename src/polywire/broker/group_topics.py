"""Look up the topics that groups read, in any shard (decision 0130)."""

from __future__ import annotations

from typing import Protocol

from polywire.broker.remote_topics import RemoteTopicLookup
from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Catalog, Topic
from polywire.types import TopicName


class GroupTopics(Protocol):
    """The methods of ``Broker`` that look up topics of groups. They use its catalogue."""

    __slots__ = ()

    settings: BrokerSettings
    remote_topics: RemoteTopicLookup
    _catalog: Catalog

    def group_topic(self, full_name: str) -> Topic | None:
        """Return the topic with this full name, of this shard or another."""
        return self._catalog.find(full_name) or self.remote_topics.find(full_name)

    def group_topic_of_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id, of this shard or another."""
        return self._catalog.find_id(topic_id) or self.remote_topics.find_id(topic_id)

    def group_resource(self, full_name: str) -> Topic | TopicName:
        """Return what permissions on a full name are checked against: the topic, or its name if it does not exist."""
        return self.group_topic(full_name) or TopicName.parse(full_name)

    def group_partition_count(self, full_name: str, last: int | None = None) -> int:
        """Return a topic's number of partitions (concepts: groups#positions).

        If the topic does not exist, return the default number.

        Args:
            last: how many partitions the group's last assignment had. It is returned until the topic's shard has
                reported the current number.
        """
        topic = self.group_topic(full_name)
        if topic is not None:
            return len(topic.partitions)
        return self.settings.partition_count if last is None or not self.remote_topics.has(full_name) else last

    @property
    def group_topics_version(self) -> int:
        """A number that increases when topics are created or deleted."""
        return self._catalog.version + self.remote_topics.version
