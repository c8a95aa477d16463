"""The broker's verbs that find the topics of groups, whatever shard has them (decision 0080).

Promises: nothing is changed; what is here is found as fast as by any other verb. Must not know: wires, other brokers.
"""

from __future__ import annotations

from typing import Protocol

from polywire.broker.catalog import Catalog
from polywire.broker.elsewhere import Elsewhere, TopicElsewhere
from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Topic
from polywire.types import TopicName


class GroupTopics(Protocol):
    """A base of ``Broker``, whose catalogue these verbs use."""

    __slots__ = ()

    settings: BrokerSettings
    elsewhere: Elsewhere
    _catalog: Catalog

    def group_topic(self, full_name: str) -> Topic | TopicElsewhere | None:
        """The topic of this full name, which a group reads."""
        return self._catalog.find(full_name) or self.elsewhere.want(full_name)

    def group_topic_of_id(self, topic_id: bytes) -> Topic | TopicElsewhere | None:
        """The topic of this id, which a group reads."""
        return self._catalog.find_id(topic_id) or self.elsewhere.find_id(topic_id)

    def group_resource(self, full_name: str) -> Topic | TopicElsewhere | TopicName:
        """What a full name names, for whoever asks whether somebody may read it as a group: the topic, or where it would be."""
        return self._catalog.find(full_name) or self.elsewhere.find(full_name) or TopicName.parse(full_name)

    def group_partition_count(self, full_name: str, last: int | None = None) -> int:
        """Partitions of a topic; the default while it does not exist (concepts: groups#positions). last: how many there were when a group was
        last dealt them, which is what counts while another shard that has the topic has not told of it."""
        topic = self._catalog.find(full_name)
        if topic is not None:
            return len(topic.partitions)
        there = self.elsewhere.find(full_name)
        if there is not None:
            return there.partition_count
        return self.settings.partition_count if last is None or not self.elsewhere.has(full_name) else last

    @property
    def group_topics_version(self) -> int:
        """Goes up with every topic that begins or ends, in other shards sooner or later."""
        return self._catalog.version + self.elsewhere.version
