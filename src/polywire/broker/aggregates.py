"""Aggregates of event sourcing: their versions, the offsets of their events, and their snapshots (decision 0110).

* Recovery computes this state from the changes in the journal.
* A version is never reused, even if retention removed its event or the whole history.
* An aggregate counts towards the quota of the user who created it. An event's offset and a snapshot count towards the
  quota of the user who wrote them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

import msgspec

from polywire.broker.changes import AggregateState, EventAppended, SnapshotSaved
from polywire.broker.quotas import AGGREGATE_BYTES, EVENT_BYTES, Kind, Usage
from polywire.broker.view import Views, encoded, one_by_one


class Aggregate(msgspec.Struct, eq=False):
    """The stored state of one event-sourced key: its version and the offsets of its events.

    Attributes:
        version: version of the latest event.
        offsets: offsets of the newest events, ascending. The last one belongs to ``version``.
        owner: the user or address that appended the first event.
        owners: author of each event in ``offsets``, None if all have the same author.
    """

    version: int
    offsets: array[int]
    owner: int
    owners: array[int] | None = None

    @property
    def first_version(self) -> int:
        """Oldest version with a known offset."""
        return self.version - len(self.offsets) + 1

    def add(self, version: int, offset: int, owner: int) -> None:
        if self.owners is None and owner != self.owner:
            self.owners = array("q", [self.owner]) * len(self.offsets)
        if self.owners is not None:
            self.owners.append(owner)
        self.offsets.append(offset)
        self.version = version

    def whose(self, count: int) -> Mapping[int, int]:
        """Return, for each user, how many of the ``count`` oldest offsets are charged to the user's quota."""
        return {self.owner: count} if self.owners is None else Counter(self.owners[:count])

    def forget(self, count: int) -> None:
        del self.offsets[:count]
        if self.owners is not None:
            del self.owners[:count]


class Aggregates:
    """All aggregates, by partition and key."""

    __slots__ = ("_by_partition", "_keys", "_snapshots", "_usage", "_views")

    def __init__(self, usage: Usage) -> None:
        self._by_partition: dict[int, dict[bytes, Aggregate]] = {}
        self._snapshots: dict[tuple[int, bytes], SnapshotSaved] = {}
        self._usage = usage
        self._keys: Final = Views(self._keys_of)
        self._views: Final = Views(self._stored)

    def find(self, incarnation: int, key: bytes) -> Aggregate | None:
        """Return an aggregate, or None if it never had an event."""
        keys = self._by_partition.get(incarnation)
        return None if keys is None else keys.get(key)

    def find_snapshot(self, incarnation: int, key: bytes) -> SnapshotSaved | None:
        return self._snapshots.get((incarnation, key))

    def append(self, change: EventAppended) -> None:
        self._views.changing((change.incarnation, change.key))
        keys = self._by_partition.setdefault(change.incarnation, {})
        found = keys.get(change.key)
        if found is None:
            found = keys[change.key] = Aggregate(0, array("q"), change.owner)
            self._usage.charge(Kind.AGGREGATES, change.owner, 1, aggregate_size(change.key))
        found.add(change.version, change.offset, change.owner)
        self._usage.charge(Kind.EVENTS, change.owner, 1, EVENT_BYTES)

    def save(self, change: SnapshotSaved) -> None:
        key = (change.incarnation, change.key)
        self._charge_snapshot(self._snapshots.get(key), -1)
        self._snapshots[key] = change
        self._charge_snapshot(change, 1)

    def forget(self, first_offset_of: Callable[[int], int]) -> None:
        """Drop the offsets of events that retention has deleted. Versions are never reused.

        Args:
            first_offset_of: returns the first offset of a partition, given its incarnation.
        """
        for incarnation, keys in self._by_partition.items():
            first = first_offset_of(incarnation)
            for key, aggregate in keys.items():
                gone = bisect_left(aggregate.offsets, first)
                if gone:
                    self._views.changing((incarnation, key))
                    self._charge_events(aggregate, gone, -1)
                    aggregate.forget(gone)

    def drop_partitions(self, incarnations: Collection[int]) -> None:
        for incarnation in incarnations:
            self._keys.changing(incarnation)
            for identity in self._keys_of(incarnation):
                self._views.changing(identity)
            for key, aggregate in self._by_partition.pop(incarnation, {}).items():
                self._charge_aggregate(key, aggregate, -1)
        for identity in [identity for identity in self._snapshots if identity[0] in incarnations]:
            self._charge_snapshot(self._snapshots.pop(identity), -1)

    def _charge_aggregate(self, key: bytes, aggregate: Aggregate, sign: int) -> None:
        self._usage.charge(Kind.AGGREGATES, aggregate.owner, sign, sign * aggregate_size(key))
        self._charge_events(aggregate, len(aggregate.offsets), sign)

    def _charge_events(self, aggregate: Aggregate, count: int, sign: int) -> None:
        for owner, events in aggregate.whose(count).items():
            self._usage.charge(Kind.EVENTS, owner, sign * events, sign * events * EVENT_BYTES)

    def _charge_snapshot(self, snapshot: SnapshotSaved | None, sign: int) -> None:
        if snapshot is not None:
            size = sign * snapshot_size(snapshot)
            self._usage.charge(Kind.SNAPSHOT_BYTES, snapshot.owner, size, size)

    def encoded(self) -> Iterator[bytes]:
        """Yield all aggregates as they are at the time of the call, encoded in pieces."""
        count = sum(map(len, self._by_partition.values()))
        keys = self._keys.open(list(self._by_partition))
        found = self._views.open(chain.from_iterable(keys))
        return encoded(count, found, lambda state: (len(state.offsets) + len(state.owners)) // 8192)

    def _keys_of(self, incarnation: int) -> Sequence[tuple[int, bytes]]:
        return [(incarnation, key) for key in self._by_partition.get(incarnation, ())]

    def _stored(self, identity: tuple[int, bytes]) -> Sequence[AggregateState]:
        incarnation, key = identity
        found = self.find(incarnation, key)
        if found is None:
            return ()
        owners = b"" if found.owners is None else found.owners.tobytes()
        return (AggregateState(incarnation, key, found.version, found.offsets.tobytes(), found.owner, owners),)

    def encoded_snapshots(self) -> Iterator[bytes]:
        """Yield all snapshots as they are at the time of the call, encoded in pieces."""
        return one_by_one(list(self._snapshots.values()), lambda saved: len(saved.payload) // 1024)

    def restore(self, states: Collection[AggregateState]) -> None:
        for state in states:
            aggregate = Aggregate(state.version, _numbers(state.offsets), state.owner)
            aggregate.owners = _numbers(state.owners) if state.owners else None
            self._by_partition.setdefault(state.incarnation, {})[state.key] = aggregate
            self._charge_aggregate(state.key, aggregate, 1)


def aggregate_size(key: bytes) -> int:
    """Return the bytes that an aggregate counts against its owner's quota, without its events."""
    return AGGREGATE_BYTES + len(key)


def snapshot_size(snapshot: SnapshotSaved) -> int:
    """Return the bytes that a snapshot counts against its owner's quota."""
    return len(snapshot.key) + len(snapshot.payload)


def _numbers(data: bytes) -> array[int]:
    numbers = array("q")
    numbers.frombytes(data)
    return numbers
