"""Positions: what consumers and groups will read next, one table for all wires.

Promises: a position belongs to one life of a topic: it goes away with it, and one stored before the topic exists
waits under its name and is bound when the topic is made. An offset is kept as given, also a negative one or one past
the end (FLUX dossier §5). Must not know: who may commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from polywire.broker.changes import PositionsDeleted, PositionStored, TopicKey, split_key
from polywire.types import PositionKind


class Position(NamedTuple):
    """Next offset to read, and the generation of the group that stored it (-1: none)."""

    offset: int
    generation: int


Owner = tuple[PositionKind, str]


class Positions:
    """All positions by topic (id, or full name while it does not exist), owner and partition.

    Invariant: ``count`` is the number of positions in the table, ``owner_count`` that of (topic, owner) pairs that have any.
    """

    __slots__ = ("_by_topic", "count", "owner_count")

    def __init__(self) -> None:
        self._by_topic: dict[TopicKey, dict[Owner, dict[int, Position]]] = {}
        self.count = 0
        self.owner_count = 0

    def find(self, topic: TopicKey, partition: int, kind: PositionKind, name: str) -> Position | None:
        """One position."""
        owners = self._by_topic.get(topic)
        if owners is None:
            return None
        partitions = owners.get((kind, name))
        return None if partitions is None else partitions.get(partition)

    def has_owner(self, topic: TopicKey, kind: PositionKind, name: str) -> bool:
        """Whether somebody has any position in a topic."""
        return (kind, name) in self._by_topic.get(topic, {})

    def of(self, kind: PositionKind, name: str) -> Iterator[tuple[TopicKey, int, Position]]:
        """All positions of one consumer or group: topic, partition, position."""
        for topic, owners in self._by_topic.items():
            for partition, position in owners.get((kind, name), {}).items():
                yield topic, partition, position

    def owners(self, kind: PositionKind) -> Iterator[tuple[TopicKey, str, dict[int, Position]]]:
        """Everybody of this kind who has positions in a topic: topic, name, position by partition."""
        for topic, owners in self._by_topic.items():
            for (owner_kind, name), partitions in owners.items():
                if owner_kind is kind:
                    yield topic, name, partitions

    def store(self, change: PositionStored) -> None:
        """Somebody's next offset is another one."""
        owners = self._by_topic.setdefault(change.topic, {})
        partitions = owners.get((change.kind, change.name))
        if partitions is None:
            partitions = owners[change.kind, change.name] = {}
            self.owner_count += 1
        if change.partition not in partitions:
            self.count += 1
        partitions[change.partition] = Position(change.offset, change.generation)

    def bind(self, full_name: str, topic_id: bytes) -> None:
        """A topic of this name exists now: positions that waited for it are its own."""
        waiting = self._by_topic.pop(full_name, None)
        if waiting is not None:
            self._by_topic[topic_id] = waiting

    def drop_topic(self, topic_id: bytes) -> None:
        """A topic ended."""
        owners = self._by_topic.pop(topic_id, {})
        self.owner_count -= len(owners)
        for partitions in owners.values():
            self.count -= len(partitions)

    def drop_partitions(self, topic_id: bytes, partition_count: int) -> None:
        """Partitions from this number on ended."""
        owners = self._by_topic.get(topic_id, {})
        for owner, partitions in list(owners.items()):
            for number in [number for number in partitions if number >= partition_count]:
                del partitions[number]
                self.count -= 1
            if not partitions:
                del owners[owner]
                self.owner_count -= 1
        if not owners:
            self._by_topic.pop(topic_id, None)

    def delete(self, change: PositionsDeleted) -> None:
        """Forget positions of one consumer or group."""
        owner = (change.kind, change.name)
        for topic in [change.topic] if change.topic is not None else list(self._by_topic):
            owners = self._by_topic.get(topic, {})
            partitions = owners.get(owner, {})
            before = len(partitions)
            if change.partition is None:
                partitions.clear()
            else:
                partitions.pop(change.partition, None)
            self.count -= before - len(partitions)
            if not partitions and owners.pop(owner, None) is not None:
                self.owner_count -= 1
            if not owners:
                self._by_topic.pop(topic, None)

    def snapshot(self) -> tuple[PositionStored, ...]:
        """All positions as they are."""
        return tuple(
            PositionStored(*split_key(topic), partition, kind, name, position.offset, position.generation)
            for topic, owners in self._by_topic.items()
            for (kind, name), partitions in owners.items()
            for partition, position in partitions.items()
        )
