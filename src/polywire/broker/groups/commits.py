"""Store, check and limit commits of offsets, for consumers, groups and administrators.

* A commit stores all of its offsets or none. Only the owner of a group may change its offsets.
* Offsets of a topic that does not exist yet are stored under its name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from polywire.broker import changes
from polywire.broker.groups.classic import ClassicGroup, check_no_classic
from polywire.broker.groups.offsets import NO_EPOCH, Position
from polywire.broker.owners import NO_CALLER, UNOWNED, Caller, Owners, next_owner
from polywire.broker.quotas import POSITION_BYTES, READER_BYTES, Kind
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.state import State, WriteBatchVerbs
from polywire.broker.topics import Topic
from polywire.clock import ElapsedClock
from polywire.errors import ErrorCode, Invalid
from polywire.log.base import Completion
from polywire.types import Level, PositionKind

NO_NOTES: Final[Mapping[int, tuple[int, str]]] = MappingProxyType({})
_OFFSET_MIN: Final = -(2**63)
_OFFSET_MAX: Final = 2**63 - 1


class Commit(NamedTuple):
    """One offset to commit: the next offset to read.

    Attributes:
        epoch: leader epoch of the last record read.
        metadata: text that the client stores with the offset.
    """

    offset: int
    epoch: int = NO_EPOCH
    metadata: str = ""

    @property
    def is_noted(self) -> bool:
        """Whether the commit has a leader epoch or metadata."""
        return self.epoch != NO_EPOCH or bool(self.metadata)


class Commits:
    """Reads and checks the committed offsets of all topics.

    Args:
        classic: all classic groups by name. They check commits of their members.
    """

    __slots__ = ("_classic", "_clock", "_owners", "_settings", "_state")

    def __init__(
        self,
        state: State,
        settings: BrokerSettings,
        clock: ElapsedClock,
        owners: Owners,
        classic: Mapping[str, ClassicGroup],
    ) -> None:
        self._state = state
        self._classic = classic
        self._settings = settings
        self._clock = clock
        self._owners = owners

    def committed(
        self, full_name: str, kind: PositionKind, name: str, *, latest: bool = False
    ) -> Mapping[int, Position]:
        """Return the committed offsets of a consumer or group in a topic, by partition number.

        This counts as a use, so they do not expire.

        Args:
            latest: as for ``Positions.committed``.
        """
        key, positions = self._state.topic_key(full_name), self._state.positions
        held = positions.held(key, kind, name)
        if held is not None:
            held.asked_at_us = self._clock.now_us()
        return MappingProxyType(positions.committed(key, kind, name, latest=latest))

    def check_owner(self, by: Caller, full_name: str, kind: PositionKind, name: str) -> int:
        """Raise Denied(DENIED) for another user's group. Return the owner of the committed offsets.

        Any caller may use the offsets of a consumer without a group.
        """
        if kind is PositionKind.GROUP:
            owner = self._state.group_owner(full_name, name)
            self._owners.check(by, owner, "group", name)
            return owner
        held = self._state.positions.held(self._state.topic_key(full_name), kind, name)
        return UNOWNED if held is None else held.owner

    def stored_of_members(
        self, full_name: str, commits: Mapping[int, Commit], group: str, *, generation: int, by: Caller
    ) -> changes.PositionsStored:
        """Return the change that stores offsets of Kafka members. The caller has checked that they may commit."""
        return self.stored(
            full_name,
            {number: commit.offset for number, commit in commits.items()},
            PositionKind.GROUP,
            group,
            notes={number: (commit.epoch, commit.metadata) for number, commit in commits.items() if commit.is_noted},
            generation=generation,
            by=by,
            of_classic=True,
        )

    def stored(
        self,
        full_name: str,
        offsets: Mapping[int, int],
        kind: PositionKind,
        name: str,
        *,
        notes: Mapping[int, tuple[int, str]] = NO_NOTES,
        generation: int,
        by: Caller,
        of_classic: bool = False,
    ) -> changes.PositionsStored:
        """Return the change that stores committed offsets.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED) for another user's group, Busy(BUSY) for too many
        offsets.

        Args:
            notes: leader epoch and metadata by partition number.
            of_classic: whether a classic group has already checked the caller.
        """
        if kind is PositionKind.GROUP and not of_classic:
            check_no_classic(self._classic, name, full_name)
        positions, count_max = self._state.positions, self._settings.partition_count_max
        metadata_bytes = self._check_notes(offsets, notes)
        check_name(name, self._settings.name_bytes_max)
        was = self.check_owner(by, full_name, kind, name)
        for number, offset in offsets.items():
            if not _OFFSET_MIN <= offset <= _OFFSET_MAX or not 0 <= number < count_max:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST, f"committed offset is out of range partition={number} offset={offset}"
                )
        key = self._state.topic_key(full_name)
        held = positions.held(key, kind, name)
        added = len(offsets) if held is None else len(offsets.keys() - held.partitions.keys())
        quotas = self._state.quotas
        quotas.admit(Kind.POSITIONS, by, added * POSITION_BYTES + metadata_bytes, count=added, owner=was)
        if held is None:
            quotas.admit(Kind.READERS, by, READER_BYTES + len(name), owner=was)
        identity, now_us = changes.split_key(key), self._clock.now_us()
        new_owner = next_owner(was, by)
        return changes.PositionsStored(*identity, kind, name, dict(offsets), generation, new_owner, now_us, dict(notes))

    def _check_notes(self, offsets: Mapping[int, int], notes: Mapping[int, tuple[int, str]]) -> int:
        """Return the total size of the metadata.

        Raises Invalid(INVALID_REQUEST) for metadata without an offset, metadata above the limit, or a leader epoch out
        of range.
        """
        limit = self._settings.position_metadata_bytes_max
        for number, (epoch, metadata) in notes.items():
            if number not in offsets or not NO_EPOCH <= epoch < 2**31 or _utf8_bytes(metadata) > limit:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    f"epoch or metadata of a committed offset is out of range partition={number} epoch={epoch} limit={limit}",
                )
        return sum([len(metadata) for _, metadata in notes.values()])


def _utf8_bytes(text: str) -> float:
    """Return the length of a text in UTF-8, infinite for invalid text, so that it exceeds every limit."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return math.inf


class PositionVerbs(WriteBatchVerbs, Protocol):
    """The methods of ``Broker`` that store and read committed offsets."""

    __slots__ = ()

    owners: Owners
    _commits: Commits

    def position(
        self, full_name: str, partition_number: int, kind: PositionKind, name: str, *, latest: bool = False
    ) -> int | None:
        """Return the committed offset of a consumer or group in one partition, None if it never committed.

        With the durability ``synced``, and in a bucket, offsets whose commit is not durable yet are not returned.

        Args:
            latest: whether to return them. Reading may begin there, but clients must not see them.
        """
        found = self._commits.committed(full_name, kind, name, latest=latest).get(partition_number)
        return None if found is None else found.offset

    def positions(self, kind: PositionKind, name: str) -> Mapping[tuple[str, int], int]:
        """Return all committed offsets of one consumer or group, by (topic's full name, partition number)."""
        found: dict[tuple[str, int], int] = {}
        for key, partition, position in self._state.positions.of(kind, name):
            found[self.topic_name(key), partition] = position.offset
        return found

    def position_owners(self, kind: PositionKind) -> Iterator[tuple[str, str]]:
        """Yield (full name of the topic, name) of all consumers or groups with committed offsets.

        Offsets may change during the iteration.
        """
        return ((self.topic_name(key), name) for key, name, _ in self._state.positions.owners(kind))

    def positions_in(
        self,
        full_name: str,
        kind: PositionKind,
        name: str,
        among: Collection[int] | None = None,
        *,
        latest: bool = False,
    ) -> dict[int, int]:
        """Return the committed offsets of a consumer or group in a topic, by partition number.

        Args:
            among: if given, only the offsets of these partitions.
            latest: as for ``position``.
        """
        return self._state.positions.offsets(self._state.topic_key(full_name), kind, name, among, latest=latest)

    def topic_name(self, key: changes.TopicKey) -> str:
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
        """Commit an offset. The topic need not exist, and the partition need not have a record at this offset.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED) for another user's group, Busy(BUSY) for too many
        offsets.
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
        """Commit offsets by partition number, all or none.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED) for another user's group, Busy(BUSY) for too many
        offsets.
        """
        made = self.positions_stored(full_name, offsets, kind, name, generation=generation, by=by)
        self.change_all([made], level=level, done=done)

    def check_owner(self, by: Caller, owner: int, what: str, name: str) -> None:
        """Raise Denied(DENIED) if the caller may not use a group, or other state, that belongs to ``owner``.

        Args:
            what, name: kind and name of the state, for the error.
        """
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
        """Return the change that stores committed offsets, after all checks.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED) for another user's group, Busy(BUSY) for too many
        offsets.
        """
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
        """Delete committed offsets of a consumer or group, in one topic or all, in one partition or all.

        Raises Denied(DENIED) for another user's group.
        """
        for topic in {topic for topic, _ in self.positions(kind, name)} if full_name is None else (full_name,):
            self._commits.check_owner(by, topic, kind, name)
        key = changes.split_key(None if full_name is None else self._state.topic_key(full_name))
        self.change_all([changes.PositionsDeleted(kind, name, *key, partition_number)], level=level, done=done)


def _full_name(topic: Topic | None) -> str:
    assert topic is not None, "the offsets of a deleted topic are deleted with it"
    return topic.name.full
