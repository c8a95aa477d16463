"""Topics of other shards that are read by groups of this shard (decision 0128)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from polywire.broker.settings import AccessList
from polywire.types import TopicName


@dataclass(frozen=True, slots=True)
class TopicElsewhere:
    """A topic of another shard, as that shard last reported it.

    Attributes:
        access: its access list, None if it has none.
    """

    name: TopicName
    id: bytes
    partition_count: int
    access: AccessList | None = None


class Elsewhere(Protocol):
    """The topics of other shards, as far as they were requested."""

    @property
    def version(self) -> int:
        """A number that increases, with some delay, when topics are created or deleted in other shards.

        Other shards are polled only while this is read.
        """

    def find(self, full_name: str) -> TopicElsewhere | None:
        """Return the topic with this full name, None if no shard has reported one."""

    def find_id(self, topic_id: bytes) -> TopicElsewhere | None:
        """Return the topic with this id, None if no shard has reported one."""

    def want(self, full_name: str) -> TopicElsewhere | None:
        """Return the topic as ``find`` does, and request it from its shard.

        From then on its state is refreshed, as long as callers read it.
        """

    def has(self, full_name: str) -> bool:
        """Return whether another shard has a topic of this name, requested or not."""


class Nowhere:
    """Implements ``Elsewhere`` for a single broker, which has no other shards."""

    version: Final = 0

    def find(self, full_name: str) -> TopicElsewhere | None:
        pass

    def find_id(self, topic_id: bytes) -> TopicElsewhere | None:
        pass

    def want(self, full_name: str) -> TopicElsewhere | None:
        pass

    def has(self, full_name: str) -> bool:
        del full_name
        return False


NOWHERE: Final[Elsewhere] = Nowhere()
