"""Aggregates: how many events each has, where they lie, and its snapshot (decision 0011).

Promises: follows from the changes alone; a version is never given twice, also when its event or the whole aggregate's history was removed by
retention. Must not know: the log, wires, when a change may be made.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection

from polywire.broker.changes import AggregateState, EventAppended, SnapshotSaved


class Aggregate:
    """One key's events.

    Invariant: ``offsets``, ascending, are those of the newest versions, the last of them ``version``; older ones were forgotten.
    """

    __slots__ = ("offsets", "version")

    def __init__(self, version: int, offsets: array[int]) -> None:
        self.version = version
        self.offsets = offsets

    @property
    def first_version(self) -> int:
        """Oldest version whose place is known."""
        return self.version - len(self.offsets) + 1


class Aggregates:
    """All aggregates by partition and key.

    Invariant: ``count`` is the number of aggregates, ``event_count`` that of known places, ``snapshot_bytes`` the size of all snapshots'
    keys and payloads.
    """

    __slots__ = ("_by_partition", "_snapshots", "count", "event_count", "snapshot_bytes")

    def __init__(self) -> None:
        self._by_partition: dict[int, dict[bytes, Aggregate]] = {}
        self._snapshots: dict[tuple[int, bytes], SnapshotSaved] = {}
        self.count = 0
        self.event_count = 0
        self.snapshot_bytes = 0

    def find(self, incarnation: int, key: bytes) -> Aggregate | None:
        """One aggregate; None when it never had an event."""
        keys = self._by_partition.get(incarnation)
        return None if keys is None else keys.get(key)

    def find_snapshot(self, incarnation: int, key: bytes) -> SnapshotSaved | None:
        """The latest snapshot that was saved."""
        return self._snapshots.get((incarnation, key))

    def append(self, change: EventAppended) -> None:
        """An aggregate has one more event."""
        keys = self._by_partition.setdefault(change.incarnation, {})
        found = keys.get(change.key)
        if found is None:
            found = keys[change.key] = Aggregate(0, array("q"))
            self.count += 1
        found.offsets.append(change.offset)
        found.version = change.version
        self.event_count += 1

    def save(self, change: SnapshotSaved) -> None:
        """An aggregate has another snapshot."""
        key = (change.incarnation, change.key)
        self.snapshot_bytes -= snapshot_size(self._snapshots.get(key))
        self._snapshots[key] = change
        self.snapshot_bytes += snapshot_size(change)

    def forget(self, first_offset_of: Callable[[int], int]) -> None:
        """Forget the places of events below each partition's first offset; their versions stay taken."""
        for incarnation, keys in self._by_partition.items():
            first = first_offset_of(incarnation)
            for aggregate in keys.values():
                gone = bisect_left(aggregate.offsets, first)
                if gone:
                    del aggregate.offsets[:gone]
                    self.event_count -= gone

    def drop_partitions(self, incarnations: Collection[int]) -> None:
        """Partitions ended."""
        for incarnation in incarnations:
            keys = self._by_partition.pop(incarnation, {})
            self.count -= len(keys)
            self.event_count -= sum(len(aggregate.offsets) for aggregate in keys.values())
        for key in [key for key in self._snapshots if key[0] in incarnations]:
            self.snapshot_bytes -= snapshot_size(self._snapshots.pop(key))

    def snapshot(self) -> tuple[AggregateState, ...]:
        """All aggregates as they are."""
        return tuple(
            AggregateState(incarnation, key, aggregate.version, aggregate.offsets.tobytes())
            for incarnation, keys in self._by_partition.items()
            for key, aggregate in keys.items()
        )

    def snapshots(self) -> tuple[SnapshotSaved, ...]:
        """All snapshots as they are."""
        return tuple(self._snapshots.values())

    def restore(self, states: Collection[AggregateState]) -> None:
        """Take over aggregates as they were."""
        for state in states:
            offsets = array("q")
            offsets.frombytes(state.offsets)
            self._by_partition.setdefault(state.incarnation, {})[state.key] = Aggregate(state.version, offsets)
            self.event_count += len(offsets)
        self.count += len(states)


def snapshot_size(snapshot: SnapshotSaved | None) -> int:
    """Bytes a snapshot counts for."""
    return 0 if snapshot is None else len(snapshot.key) + len(snapshot.payload)
