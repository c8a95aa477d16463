"""Topics of other shards that groups coordinated by this shard read (decision 0128)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from polywire.broker.settings import AccessList
from polywire.types import TopicName


@dataclass(frozen=True, slots=True)
class TopicElsewhere:
    """A topic of another shard, as last reported. access: its access list, None if unrestricted."""

    name: TopicName
    id: bytes
    partition_count: int
    access: AccessList | None = None


class Elsewhere(Protocol):
    """Known topics of other shards."""

    @property
    def version(self) -> int:
        """Increases, with some delay, when topics are created or deleted in other shards; reading it keeps the polling
        active.
        """

    def find(self, full_name: str) -> TopicElsewhere | None:
        """Return the known topic with this full name."""

    def find_id(self, topic_id: bytes) -> TopicElsewhere | None:
        """Return the known topic with this id."""

    def want(self, full_name: str) -> TopicElsewhere | None:
        """Return the topic as ``find`` does, for a reader: it is requested, and refreshed as long as it is read."""

    def has(self, full_name: str) -> bool:
        """Return whether another shard has a topic of this name, known or not."""


class Nowhere:
    """Other shards' topics for a single broker: none."""

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
