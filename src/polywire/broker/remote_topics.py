"""Find topics of other shards, which groups of this shard may read (decision 0130)."""

from __future__ import annotations

from typing import Final, Protocol

from polywire.broker.topics import Topic


class RemoteTopicLookup(Protocol):
    """Topics of other shards, as last reported by those shards."""

    @property
    def version(self) -> int:
        """A number that increases when topics are created or deleted in other shards."""

    def find(self, full_name: str) -> Topic | None:
        """Return the topic with this full name, or None if no shard has reported one."""

    def find_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id, or None if no shard has reported one."""

    def has(self, full_name: str) -> bool:
        """Return whether another shard has a topic of this name, even if its state was not reported yet."""


class NoRemoteTopics:
    """Implements ``RemoteTopicLookup`` for a single broker, which has no other shards."""

    version: Final = 0

    def find(self, full_name: str) -> Topic | None:
        pass

    def find_id(self, topic_id: bytes) -> Topic | None:
        pass

    def has(self, full_name: str) -> bool:
        del full_name
        return False


NO_REMOTE_TOPICS: Final[RemoteTopicLookup] = NoRemoteTopics()
