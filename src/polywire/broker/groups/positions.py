"""Operations on committed offsets, for consumers, groups and administrators.

Offsets of a topic that does not exist yet are stored under its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from polywire.broker import changes
from polywire.broker.groups.commits import Commits
from polywire.broker.owners import NO_CALLER, Caller, Owners
from polywire.broker.state import WriteBatchVerbs
from polywire.broker.topics import Topic
from polywire.log.base import Completion
from polywire.types import Level, PositionKind


class PositionVerbs(WriteBatchVerbs, Protocol):
    """A base of ``Broker``: the verbs use its state."""

    __slots__ = ()

    owners: Owners
    _commits: Commits

    def position(self, full_name: str, partition_number: int, kind: PositionKind, name: str) -> int | None:
        """Return the next offset of a consumer or group, None if it never committed."""
        found = self._commits.find(full_name, partition_number, kind, name)
        return None if found is None else found.offset

    def positions(self, kind: PositionKind, name: str) -> Mapping[tuple[str, int], int]:
        """Return all offsets of one consumer or group by (topic's full name, partition number)."""
        found: dict[tuple[str, int], int] = {}
        for key, partition, position in self._state.positions.of(kind, name):
            found[self.topic_name(key), partition] = position.offset
        return found

    def position_owners(self, kind: PositionKind) -> Iterator[tuple[str, str]]:
        """Yield (topic's full name, name) of all consumers or groups with offsets. Offsets may change during the
        iteration.
        """
        return ((self.topic_name(key), name) for key, name, _ in self._state.positions.owners(kind))

    def positions_in(
        self, full_name: str, kind: PositionKind, name: str, among: Collection[int] | None = None
    ) -> dict[int, int]:
        """Return the next offsets of a consumer or group in a topic, by partition number.

        among: if given, only the offsets of these partitions.
        """
        return self._state.positions.offsets(self._state.topic_key(full_name), kind, name, among)

    def topic_name(self, key: changes.TopicKey) -> str:
        """Return the full name of the topic with this key."""
        return key if isinstance(key, str) else _full_name(self._state.catalog.find_id(key))

    def commit_position(
        self,
        full_name: str,
        partition_number: int,
        kind: PositionKind,
        name: str,
        offset: int,
        *,
        generation: int = -1,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Store a next offset, without checking whether the partition has such an offset.

        The topic does not need to exist. Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED) for another
        user's group, Busy(BUSY) for too many offsets.
        """
        offsets = {partition_number: offset}
        self.commit_positions(full_name, offsets, kind, name, generation=generation, by=by, level=level, done=done)

    def commit_positions(
        self,
        full_name: str,
        offsets: Mapping[int, int],
        kind: PositionKind,
        name: str,
        *,
        generation: int = -1,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Store next offsets by partition number, all or none. Raises as ``commit_position``."""
        made = self.positions_stored(full_name, offsets, kind, name, generation=generation, by=by)
        self.change_all([made], level=level, done=done)

    def check_owner(self, by: Caller, owner: int, what: str, name: str) -> None:
        """See ``groups.coordinator.Host``."""
        self.owners.check(by, owner, what, name)

    def positions_stored(
        self,
        full_name: str,
        offsets: Mapping[int, int],
        kind: PositionKind,
        name: str,
        *,
        generation: int = -1,
        by: Caller = NO_CALLER,
    ) -> changes.PositionsStored:
        """Return the change that stores these next offsets, checked but not applied. Raises as ``commit_position``."""
        return self._commits.stored(full_name, offsets, kind, name, generation=generation, by=by)

    def delete_positions(
        self,
        kind: PositionKind,
        name: str,
        *,
        full_name: str | None = None,
        partition_number: int | None = None,
        by: Caller = NO_CALLER,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Delete offsets of a consumer or group, in one topic or all, in one partition or all.

        Raises Denied(DENIED) for another user's group.
        """
        for topic in {topic for topic, _ in self.positions(kind, name)} if full_name is None else (full_name,):
            self._commits.check_owner(by, topic, kind, name)
        key = changes.split_key(None if full_name is None else self._state.topic_key(full_name))
        self.change_all([changes.PositionsDeleted(kind, name, *key, partition_number)], level=level, done=done)


def _full_name(topic: Topic | None) -> str:
    assert topic is not None, "the offsets of a deleted topic are deleted with it"
    return topic.name.full
