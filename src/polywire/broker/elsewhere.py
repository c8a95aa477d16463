"""Topics that other shards have, as far as groups that are at home here have to know of them (decision 0080).

Promises: a broker that is alone knows of none, and asks nobody. Must not know: other brokers, how they are asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from polywire.broker.settings import AccessList
from polywire.types import TopicName


@dataclass(frozen=True, slots=True)
class TopicElsewhere:
    """A topic of another shard as that one has last told of it. access: who alone may use it; None restricts nobody."""

    name: TopicName
    id: bytes
    partition_count: int
    access: AccessList | None = None


class Elsewhere(Protocol):
    """What is known of the topics of other shards."""

    @property
    def version(self) -> int:
        """Goes up when topics have begun or ended in other shards, sooner or later; they are looked at for it as long as this is asked."""

    def find(self, full_name: str) -> TopicElsewhere | None:
        """The topic of this full name, as far as it is known."""

    def find_id(self, topic_id: bytes) -> TopicElsewhere | None:
        """The topic of this id, as far as it is known."""

    def want(self, full_name: str) -> TopicElsewhere | None:
        """The same as ``find`` for who reads it: it is asked for, and looked at now and then for as long as somebody wants it."""

    def has(self, full_name: str) -> bool:
        """Whether a topic of this name is another shard's, known or not."""


class Nowhere:
    """What a broker knows that is the only one."""

    version: Final = 0

    def find(self, full_name: str) -> TopicElsewhere | None:
        """There is none."""

    def find_id(self, topic_id: bytes) -> TopicElsewhere | None:
        """There is none."""

    def want(self, full_name: str) -> TopicElsewhere | None:
        """There is none."""

    def has(self, full_name: str) -> bool:
        """Nobody else could have it."""
        del full_name
        return False


NOWHERE: Final[Elsewhere] = Nowhere()
