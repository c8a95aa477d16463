"""The broker's whole state, changed in one place: by live requests and by recovery alike.

Promises: implements ``log.base.Replay``; applying the same changes and batches in the same order gives the same
state, and so does a snapshot plus what came after it. Applying a change never fails: checks come before a change is
made. Must not know: when and why changes are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import assert_never

from polywire.broker import changes
from polywire.broker.aggregates import Aggregates
from polywire.broker.catalog import Catalog
from polywire.broker.groups.group import Group, restored, stored
from polywire.broker.groups.offsets import Positions
from polywire.broker.producers import Producers, settled
from polywire.broker.settings import BrokerSettings
from polywire.broker.transactors import Transactors
from polywire.broker.writers import Writers
from polywire.records.columns import BatchHeader, Column

_TRACKED_MASK = 1 << Column.PRODUCER_ID | 1 << Column.SEQUENCES
_TRACKED = 1 << Column.PRODUCER_ID


def is_tracked(columns: int, producer_epoch: int) -> bool:
    """Whether a batch with these columns and this epoch takes part in idempotence (see ``producers``)."""
    return columns & _TRACKED_MASK == _TRACKED and producer_epoch >= 0


class State:
    """Catalogue, positions, groups, producers, writers, aggregates, transactors and the wires' own state.

    Invariant: groups are keyed by (topic's full name, group's name); ``bindings`` say which topic a wire means by a group's bare name;
    ``member_count`` is the number of members of all groups.
    """

    __slots__ = (
        "_wire_state",
        "aggregates",
        "bindings",
        "catalog",
        "groups",
        "member_count",
        "positions",
        "producers",
        "transactors",
        "writers",
    )

    def __init__(self, settings: BrokerSettings) -> None:
        self.catalog = Catalog(settings)
        self.positions = Positions()
        self.groups: dict[tuple[str, str], Group] = {}
        self.member_count = 0
        self.bindings: dict[tuple[str, str], str] = {}
        self.producers = Producers(settings)
        self.writers = Writers(settings)
        self.aggregates = Aggregates()
        self.transactors = Transactors(settings)
        self._wire_state: dict[str, dict[str, bytes]] = {}

    def wire_state(self, wire: str) -> Mapping[str, bytes]:
        """A view of one wire's own state."""
        return MappingProxyType(self._wire_state.get(wire, {}))

    def topic_key(self, full_name: str) -> changes.TopicKey:
        """How positions of this topic are keyed: by its id, or by its name while it does not exist."""
        topic = self.catalog.find(full_name)
        return full_name if topic is None else topic.id

    def apply(self, change: bytes) -> None:
        """A change came back in recovery. Raises Corrupt."""
        self.apply_change(changes.decode_change(change))

    def apply_change(self, change: changes.Change) -> None:
        """Make a change true."""
        match change:
            case changes.PositionStored():
                self.positions.store(change)
            case changes.TopicCreated():
                self.positions.bind(self.catalog.apply_created(change).name.full, change.id)
            case changes.PartitionsAdded():
                self.catalog.apply_added(change)
            case changes.PartitionsRemoved():
                removed = set(self.catalog.apply_removed(change))
                self.producers.drop_partitions(removed)
                self.aggregates.drop_partitions(removed)
                self.positions.drop_partitions(change.id, change.partition_count)
            case changes.TopicDeleted():
                self._delete_topic(change)
            case changes.TopicConfigured():
                self.catalog.apply_configured(change)
            case changes.TopicPurged():
                pass  # the log's own entries trim; the change tells when, and gives the caller an answer
            case changes.PositionsDeleted():
                self.positions.delete(change)
            case changes.GroupStored():
                self._drop_group((change.topic, change.name))
                self.groups[change.topic, change.name] = restored(change)
                self.member_count += len(change.members)
            case changes.GroupDeleted():
                self._drop_group((change.topic, change.name))
            case changes.GroupBound():
                self.bindings[change.wire, change.name] = change.topic
            case changes.Published():
                self.writers.apply(change)
                self._store_positions(change.positions)
            case changes.WireStateSet():
                self._set_wire_state(change)
            case changes.EventAppended():
                self.aggregates.append(change)
            case changes.SnapshotSaved():
                self.aggregates.save(change)
            case changes.TransactorStored():
                self.transactors.apply_stored(change)
            case changes.TransactionStaged():
                self.transactors.apply_staged(change)
            case changes.TransactionOffsets():
                self.transactors.apply_offsets(change)
            case changes.TransactionCommitted():
                self.transactors.apply_committed(change)
                self._store_positions(change.positions)
            case _:
                assert_never(change)

    def _store_positions(self, positions: Iterable[changes.PositionStored]) -> None:
        for position in positions:
            self.positions.store(position)

    def replayed(self, header: BatchHeader, producer_id: bytes) -> None:
        """A batch of a producer came back in recovery; one that the state already knows of changes nothing."""
        alive = self.catalog.find_partition(header.partition) is not None
        if alive and is_tracked(header.columns, header.producer_epoch):
            last = header.base_sequence + header.record_count - 1
            self.producers.replayed(
                header.partition,
                producer_id,
                epoch=header.producer_epoch,
                batch=settled(header.base_sequence, last, header.base_offset),
                now_us=header.append_time_us,
            )

    def _delete_topic(self, change: changes.TopicDeleted) -> None:
        topic = self.catalog.apply_deleted(change)
        self.positions.drop_topic(topic.id)
        incarnations = {partition.incarnation for partition in topic.partitions}
        self.producers.drop_partitions(incarnations)
        self.aggregates.drop_partitions(incarnations)
        full_name = topic.name.full
        for key in [key for key in self.groups if key[0] == full_name]:
            self._drop_group(key)
        for binding in [binding for binding, bound in self.bindings.items() if bound == full_name]:
            del self.bindings[binding]

    def _drop_group(self, key: tuple[str, str]) -> None:
        group = self.groups.pop(key, None)
        if group is not None:
            self.member_count -= len(group.members)

    def _set_wire_state(self, change: changes.WireStateSet) -> None:
        values = self._wire_state.setdefault(change.wire, {})
        if change.value is None:
            values.pop(change.key, None)
        else:
            values[change.key] = change.value

    def snapshot(self) -> bytes:
        """The whole state. Everything that was applied is in it, so the log asks only when no turn is open."""
        return changes.encode(
            changes.Snapshot(
                version=changes.SNAPSHOT_VERSION,
                next_incarnation=self.catalog.next_incarnation,
                topics=self.catalog.snapshot_topics(),
                positions=self.positions.snapshot(),
                groups=tuple(stored(group) for group in self.groups.values()),
                bindings=tuple(changes.GroupBound(wire, name, topic) for (wire, name), topic in self.bindings.items()),
                writers=self.writers.snapshot(),
                wire_state=tuple(
                    changes.WireStateSet(wire, key, value)
                    for wire, values in self._wire_state.items()
                    for key, value in values.items()
                ),
                producers=self.producers.snapshot(),
                aggregates=self.aggregates.snapshot(),
                aggregate_snapshots=self.aggregates.snapshots(),
                transactors=self.transactors.snapshot(),
            )
        )

    def restore(self, snapshot: bytes) -> None:
        """Take over the state as it was; called on an empty state only. Raises Corrupt."""
        was = changes.decode_snapshot(snapshot)
        for topic in was.topics:
            self.catalog.restore_topic(topic)
        self.catalog.next_incarnation = max(self.catalog.next_incarnation, was.next_incarnation)
        parts: tuple[tuple[changes.Change, ...], ...]
        parts = (was.positions, was.groups, was.bindings, was.writers, was.wire_state, was.aggregate_snapshots)
        for change in (change for part in parts for change in part):
            self.apply_change(change)
        self.producers.restore(was.producers)
        self.aggregates.restore(was.aggregates)
        self.transactors.restore(was.transactors)
