"""The broker's whole state, and the operations that write changes of it to the journal.

* The state implements ``log.base.Replay``. Requests and recovery change it with the same functions: a request builds a
  change, adds it to the next journal write and applies it.
* The same changes and batches in the same order give the same state, even if a snapshot replaces the first of them.
* Applying a change never fails, because the change was checked before it was made.
* The broker stores values for single protocols without interpreting them. A value that a client stores is charged to
  the client's quota. A value that the protocol itself stores is not charged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from polywire.broker import changes
from polywire.broker.aggregates import Aggregates
from polywire.broker.changes import WireStateSet
from polywire.broker.groups.classic import weight
from polywire.broker.groups.group import Group, restored, stored
from polywire.broker.groups.offsets import Positions
from polywire.broker.groups.share_table import ShareTable
from polywire.broker.owners import ITSELF, UNOWNED, Caller, next_owner
from polywire.broker.producers import SEQUENCE_MAX, Producers, PublishDedup, batch_with_offset
from polywire.broker.quotas import BINDING_BYTES, GROUP_BYTES, KEY_BYTES, MEMBER_BYTES, Kind, Quotas, Usage
from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Catalog
from polywire.broker.transaction_state import TransactionTable
from polywire.broker.view import encoded
from polywire.clock import Clock, ElapsedClock
from polywire.errors import Busy, ErrorCode, Invalid
from polywire.log.base import Completion, Encoding, Log, Need, Pressure
from polywire.records.columns import BatchHeader, Column
from polywire.types import Level, PositionKind

_TRACKED_MASK = 1 << Column.PRODUCER_ID | 1 << Column.SEQUENCES
_TRACKED = 1 << Column.PRODUCER_ID
PROBE_BYTES = 4096  # size of a typical record with its metadata
ENTRY_BYTES = 40  # bytes of a directory entry in a journal write, with padding (decision 0102)


def group_size(name: str, topic: str) -> int:
    """Return the bytes that a group counts against its owner's quota, without its members."""
    return GROUP_BYTES + len(name) + len(topic)


def binding_size(name: str, topic: str) -> int:
    """Return the bytes that a group binding counts against its owner's quota."""
    return BINDING_BYTES + len(name) + len(topic)


def key_size(key: str, value: bytes) -> int:
    """Return the bytes that a protocol's stored value counts against its owner's quota."""
    return KEY_BYTES + len(key) + len(value)


def is_tracked(columns: int, producer_epoch: int) -> bool:
    """Return whether a batch has the epoch and sequence numbers by which duplicates are detected."""
    return columns & _TRACKED_MASK == _TRACKED and producer_epoch >= 0


def _discard(table: dict[str, set[str]], key: str, one: str) -> None:
    table[key].discard(one)
    if not table[key]:
        del table[key]


class Binding(NamedTuple):
    """The topic to which a group name is bound, and the owner of the name.

    Used by protocols in which the name of a group does not include a topic.
    """

    topic: str
    owner: int
    at_us: int
    version: int = 0


class State:
    """The broker's whole state.

    Attributes:
        usage: items and bytes of each owner, except classic groups, which ``ClassicGroups`` counts.
        groups: groups by (full name of the topic, name of the group).
        classic_groups: stored generations of classic groups.
        bindings: topics of group names by (protocol, group name), for protocols whose group names do not include a
            topic.
        touched: names of groups that changed or committed offsets since ``Coordinator.take_touched`` was last called,
            None before ``Coordinator.watch``.
    """

    __slots__ = (
        "_wire_owners",
        "_wire_state",
        "aggregates",
        "binding_watchers",
        "binding_wires",
        "bindings",
        "catalog",
        "classic_groups",
        "group_names",
        "group_topics",
        "groups",
        "positions",
        "producers",
        "quotas",
        "shares",
        "touched",
        "transactions",
        "usage",
        "wire_watchers",
        "writers",
    )

    def __init__(self, settings: BrokerSettings) -> None:
        self.usage = Usage()
        self.quotas = Quotas(self.usage, settings)
        self.catalog = Catalog(settings, self.usage)
        self.positions = Positions(self.usage)
        self.groups: dict[tuple[str, str], Group] = {}
        self.group_names: dict[str, set[str]] = {}  # group names by topic: an index of ``groups``
        self.group_topics: dict[str, set[str]] = {}  # topics by group name: an index of ``groups``
        self.classic_groups: dict[str, changes.ClassicGroupStored] = {}
        self.bindings: dict[tuple[str, str], Binding] = {}
        self.binding_wires: set[str] = set()  # protocols that have ever bound a group name
        self.producers = Producers(settings)
        self.writers = PublishDedup(settings, self.usage)
        self.aggregates = Aggregates(self.usage)
        self.transactions = TransactionTable(settings, self.usage)
        self.shares = ShareTable(self.usage)
        self._wire_state: dict[str, dict[str, bytes]] = {}
        self._wire_owners: dict[tuple[str, str], int] = {}
        self.wire_watchers: Final[list[Callable[[WireStateSet], None]]] = []
        self.binding_watchers: Final[list[Callable[[str, str], None]]] = []
        self.touched: set[str] | None = None

    def touch(self, group: str) -> None:
        if self.touched is not None:
            self.touched.add(group)

    def wire_state(self, wire: str) -> Mapping[str, bytes]:
        """Return the stored values of a protocol, by key. The mapping cannot be changed."""
        return MappingProxyType(self._wire_state.get(wire, {}))

    def topic_key(self, full_name: str) -> changes.TopicKey:
        """Return the key of a topic's committed offsets: its id, or its name if it does not exist."""
        topic = self.catalog.find(full_name)
        return full_name if topic is None else topic.id

    def group_owner(self, topic: str, name: str) -> int:
        """Return the owner of a group, or the owner of its committed offsets if the group itself does not exist."""
        group = self.groups.get((topic, name))
        if group is not None and group.owner > UNOWNED:
            return group.owner
        held = self.positions.held(self.topic_key(topic), PositionKind.GROUP, name)
        if held is not None and (held.owner > UNOWNED or group is None):
            return held.owner
        return UNOWNED if group is None else group.owner

    def apply(self, change: bytes) -> None:
        """Apply an encoded change from the journal. Raises Corrupt."""
        self.apply_change(changes.decode_change(change))

    def apply_change(self, change: changes.Change) -> None:
        if isinstance(change, changes.SHARE_CHANGES):
            self.shares.apply(change)
            return
        match change:
            case changes.PositionStored() | changes.PositionsStored():
                self._store_position(change)
            case changes.TopicCreated():
                self.positions.bind(self.catalog.apply_created(change).name.full, change.id)
            case changes.PartitionsAdded():
                self.catalog.apply_added(change)
            case changes.PartitionsRemoved():
                removed = set(self.catalog.apply_removed(change))
                self.producers.drop_partitions(removed)
                self.aggregates.drop_partitions(removed)
                self.shares.drop_partitions(removed)
                self.positions.drop_partitions(change.id, change.partition_count)
                self._touch_topic(change.id)
            case changes.TopicDeleted():
                self._delete_topic(change)
            case changes.TopicConfigured():
                self.catalog.apply_configured(change)
            case changes.TopicPurged():
                # entries of the log trim the partitions; this change only records the purge and completes the request
                pass
            case changes.PositionsDeleted():
                self.positions.delete(change)
                self.touch(change.name)
            case changes.GroupStored():
                self._drop_group((change.topic, change.name))
                self._put_group(restored(change))
            case changes.GroupChanged():
                self._change_group(change)
            case changes.GroupDeleted():
                self._drop_group((change.topic, change.name))
            case changes.ClassicGroupStored():
                self.classic_groups[change.name] = change
            case changes.ClassicGroupDeleted():
                self.classic_groups.pop(change.name, None)
            case changes.GroupBound():
                self._bind(change)
            case changes.GroupUnbound():
                self._unbind((change.wire, change.name))
            case changes.WriterDeleted():
                self.writers.forget(change.writer)
            case changes.Published():
                self.writers.apply(change)
                self._store_positions(change.positions)
            case changes.WireStateSet():
                self._set_wire_state(change)
            case changes.EventAppended():
                self.aggregates.append(change)
            case changes.SnapshotSaved():
                self.aggregates.save(change)
            case changes.TransactionCommitted():
                self.transactions.apply(change)
                stored = () if change.stored is None else (change.stored,)
                self._store_positions((*change.positions, *stored, *change.others))
            case _:
                self.transactions.apply(change)

    def _store_positions(self, positions: Iterable[changes.PositionStored | changes.PositionsStored]) -> None:
        for position in positions:
            self._store_position(position)

    def _store_position(self, change: changes.PositionStored | changes.PositionsStored) -> None:
        self.positions.store(change)
        if self.touched is not None and change.kind is PositionKind.GROUP:
            self.touched.add(change.name)

    def _touch_topic(self, topic_id: bytes) -> None:
        topic = self.catalog.find_id(topic_id)
        for name in () if topic is None or self.touched is None else self.group_names.get(topic.name.full, ()):
            self.touch(name)

    def replayed(self, header: BatchHeader, producer_id: bytes) -> None:
        """Record the sequence numbers of an idempotent producer's batch during recovery.

        A repeated call changes nothing. Sequence numbers above ``SEQUENCE_MAX``, which earlier versions stored, are
        ignored.
        """
        alive = self.catalog.find_partition(header.partition) is not None
        last = header.base_sequence + header.record_count - 1
        if alive and is_tracked(header.columns, header.producer_epoch) and last <= SEQUENCE_MAX:
            self.producers.replayed(
                header.partition,
                producer_id,
                epoch=header.producer_epoch,
                batch=batch_with_offset(header.base_sequence, last, header.base_offset),
            )

    def begin(self, clock: Clock) -> ElapsedClock:
        """End the recovery. Return a clock that continues from the latest time in the restored state."""
        latest = max(self.producers.latest_us, self.writers.latest_us, self.transactions.latest_us)
        used = [group.at_us for group in self.groups.values()] + [bound.at_us for bound in self.bindings.values()]
        elapsed = ElapsedClock(clock, max([latest, self.positions.latest_us, *used]))
        self.producers.begin(elapsed.now_us())
        self.positions.begin(elapsed.now_us())
        return elapsed

    def show_durable_only(self, log: Log, durability: Level) -> None:
        """If the log hides records until they have this durability, hide committed offsets as well."""
        if durability >= Level.SYNCED:
            self.positions.show_durable_only(partial(log.barrier, durability))

    def _delete_topic(self, change: changes.TopicDeleted) -> None:
        topic = self.catalog.apply_deleted(change)
        self.positions.drop_topic(topic.id)
        incarnations = {partition.incarnation for partition in topic.partitions}
        self.producers.drop_partitions(incarnations)
        self.aggregates.drop_partitions(incarnations)
        self.shares.drop_partitions(incarnations)
        full_name = topic.name.full
        for name in list(self.group_names.get(full_name, ())):
            self._drop_group((full_name, name))
        for binding in [binding for binding, bound in self.bindings.items() if bound.topic == full_name]:
            self._unbind(binding)
        # partitions refer to their topic; without this, both would stay in memory until a garbage collection
        topic.partitions = []

    def _bind(self, change: changes.GroupBound) -> None:
        self._unbind((change.wire, change.name))
        self.bindings[change.wire, change.name] = Binding(change.topic, change.owner, change.at_us, change.version)
        self.binding_wires.add(change.wire)
        self.touch(change.name)
        self.usage.charge(Kind.BINDINGS, change.owner, 1, binding_size(change.name, change.topic))
        self._report_binding(change.wire, change.name)

    def _unbind(self, binding: tuple[str, str]) -> None:
        bound = self.bindings.pop(binding, None)
        if bound is not None:
            self.touch(binding[1])
            self.usage.charge(Kind.BINDINGS, bound.owner, -1, -binding_size(binding[1], bound.topic))
            self._report_binding(*binding)

    def _report_binding(self, wire: str, name: str) -> None:
        for watcher in self.binding_watchers:
            watcher(wire, name)

    def _put_group(self, group: Group) -> None:
        self.groups[group.topic, group.name] = group
        self.touch(group.name)
        self.group_names.setdefault(group.topic, set()).add(group.name)
        self.group_topics.setdefault(group.name, set()).add(group.topic)
        self._charge_group(group, 1)

    def _drop_group(self, key: tuple[str, str]) -> None:
        group = self.groups.pop(key, None)
        if group is not None:
            self.touch(group.name)
            self._charge_group(group, -1)
            _discard(self.group_names, *key)
            _discard(self.group_topics, group.name, group.topic)

    def _charge_group(self, group: Group, sign: int) -> None:
        self.usage.charge(Kind.GROUPS, group.owner, sign, sign * group_size(group.name, group.topic))
        self._charge_members(group.owner, [member.id for member in group.members], sign)

    def _charge_members(self, owner: int, ids: Collection[str], sign: int) -> None:
        size = sum([MEMBER_BYTES + len(member) for member in ids])
        self.usage.charge(Kind.MEMBERS, owner, sign * len(ids), sign * size)

    def _change_group(self, change: changes.GroupChanged) -> None:
        was = self.groups[change.topic, change.name]
        if was.owner != change.owner:
            self._drop_group((change.topic, change.name))
            self._put_group(was.applied(change))
            return
        self.groups[change.topic, change.name] = was.applied(change)
        self.touch(change.name)
        self._charge_members(was.owner, change.gone, -1)
        self._charge_members(was.owner, [member.id for member in change.joined], 1)

    def wire_owner(self, wire: str, key: str) -> int:
        return self._wire_owners.get((wire, key), UNOWNED)

    def _set_wire_state(self, change: changes.WireStateSet) -> None:
        values = self._wire_state.setdefault(change.wire, {})
        was = values.pop(change.key, None)
        owner = self._wire_owners.pop((change.wire, change.key), UNOWNED)
        if was is not None:
            self.usage.charge(Kind.KEYS, owner, -1, -key_size(change.key, was))
        if change.value is not None:
            values[change.key] = change.value
            self.usage.charge(Kind.KEYS, change.owner, 1, key_size(change.key, change.value))
            if change.owner != UNOWNED:
                self._wire_owners[change.wire, change.key] = change.owner
        for watcher in self.wire_watchers:
            watcher(change)

    def snapshot(self) -> bytes:
        """Return the encoded state. The log calls this only when no write is pending."""
        return b"".join(self._pieces())

    def encoding(self) -> Encoding:
        """Return an encoder of the current state, which works in pieces."""
        return Encoding(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        """Yield an encoded ``changes.Snapshot`` of the current state. Each piece is encoded when it is requested."""
        groups = list(self.groups.values())
        bindings = dict(self.bindings)
        values = {wire: dict(held) for wire, held in self._wire_state.items()}
        owners = dict(self._wire_owners)
        classic = list(self.classic_groups.values())
        version = changes.DECIDED_VERSION if self.transactions.decisions else changes.SNAPSHOT_VERSION
        if self.shares.groups:
            version = changes.DELAYED_VERSION if self.shares.has_waiting else changes.SHARED_VERSION
        return chain(
            changes.encoded_head(self.catalog.next_incarnation, version),
            self.catalog.encoded_topics(),
            self.positions.encoded(),
            encoded(len(groups), ((stored(group, group.at_us),) for group in groups), lambda group: len(group.members)),
            encoded(
                len(bindings),
                (
                    (changes.GroupBound(*key, was.topic, was.owner, was.at_us, was.version),)
                    for key, was in bindings.items()
                ),
            ),
            self.writers.encoded(),
            encoded(
                sum(map(len, values.values())),
                (
                    (changes.WireStateSet(wire, key, value, owners.get((wire, key), UNOWNED)),)
                    for wire, held in values.items()
                    for key, value in held.items()
                ),
                lambda set_: len(set_.value) // 1024,
            ),
            self.producers.encoded(),
            self.aggregates.encoded(),
            self.aggregates.encoded_snapshots(),
            self.transactions.encoded(),
            encoded(len(classic), ((group,) for group in classic), weight),
            self.transactions.encoded_decisions(),
            self.shares.encoded_groups(),
            self.shares.encoded(),
        )

    def restore(self, snapshot: bytes) -> None:
        """Load a snapshot into an empty state. Raises Corrupt."""
        was = changes.decode_snapshot(snapshot)
        for topic in was.topics:
            self.catalog.restore_topic(topic)
        self.catalog.next_incarnation = max(self.catalog.next_incarnation, was.next_incarnation)
        parts: tuple[tuple[changes.Change, ...], ...]
        parts = (
            was.positions,
            was.groups,
            was.bindings,
            was.writers,
            was.wire_state,
            was.aggregate_snapshots,
            was.classic_groups,
            was.share_groups,
            was.shares,
        )
        for change in (change for part in parts for change in part):
            self.apply_change(change)
        self.producers.restore(was.producers)
        self.aggregates.restore(was.aggregates)
        self.transactions.restore(was.transactions, was.decisions)


class WriteBatchVerbs(Protocol):
    """The methods of ``Broker`` that add state changes to the next journal write.

    Attributes:
        pressure: has the current value of ``congested``.
        hold: with True, stop the log from writing automatically after further appends. The caller must call it with
            False, and then ``commit``, soon.
        commit: write the pending appends and changes to the journal now, and call the callbacks that need no sync.
    """

    __slots__ = ()

    _log: Log
    _state: State
    pressure: Pressure
    hold: Callable[[bool], None]  # attributes instead of methods, because every request calls them
    commit: Callable[[], None]

    def settle(self, level: Level, done: Completion[int]) -> None:
        """Call ``done`` once all earlier appends and changes have reached the durability ``level``.

        Used for requests that change nothing themselves.
        """
        self._log.barrier(level, done)

    def probe(self, done: Completion[int]) -> None:
        """Check whether the log would accept a record, without storing one. Raises Busy(DISK_FULL).

        ``done`` is called once all earlier appends and changes are synced.
        """
        self._log.reserve(PROBE_BYTES)
        self._log.barrier(Level.SYNCED, done)

    @property
    def congested(self) -> bool:
        """Whether to pause reading from producers."""
        return self.pressure.congested

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, on the loop, when the log's queue of pending writes is no longer full."""
        self._log.on_relief(callback)

    @property
    def uncommitted(self) -> bool:
        """Return whether the log still uses buffers of the caller, because some appends were not written yet."""
        return self._log.uncommitted

    def reserve(self, size: int) -> None:
        """Ensure that the next ``size`` bytes of appends and changes get into one atomic journal write.

        Raises Invalid(RECORD_TOO_LARGE), Busy(BUSY, DISK_FULL).
        """
        self._log.reserve(size)

    def change_all(self, made: Sequence[changes.Change], *, level: Level, done: Completion[int] | None) -> None:
        """Apply state changes in order, and journal them in one atomic write.

        After Busy(DISK_FULL), nothing has changed. Without changes, ``done`` is called once earlier appends and changes
        have reached ``level``.
        """
        if not made:
            if done is not None:
                self._log.barrier(level, done)
            return
        encoded = [changes.encode(change) for change in made]
        if len(encoded) > 1:
            self._log.reserve(sum(map(len, encoded)) + ENTRY_BYTES * len(encoded), need=Need.CHANGE)
        last = len(made) - 1
        for index, change in enumerate(made):
            self._log.change(encoded[index], level=level, done=done if index == last else None)
            self._state.apply_change(change)


def wire_change(
    state: State, settings: BrokerSettings, by: Caller, *, wire: str, key: str, value: bytes | None
) -> WireStateSet:
    """Return the change that stores a protocol's value, or removes it if None.

    Raises Invalid(INVALID_REQUEST), and Busy(BUSY) if there are too many keys, or one owner has too many bytes.
    """
    kept, owner = state.wire_state(wire), state.wire_owner(wire, key)
    if value is None:
        return WireStateSet(wire, key, None)
    if len(value) > settings.wire_state_bytes_max:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"value is too large bytes={len(value)} limit={settings.wire_state_bytes_max}",
        )
    new = key not in kept
    if new and by is ITSELF and len(kept) >= settings.wire_state_keys_max:
        raise Busy(ErrorCode.BUSY, f"too many keys wire={wire} limit={settings.wire_state_keys_max}")
    size = key_size(key, value) if new else len(value) - len(kept[key])
    state.quotas.admit(Kind.KEYS, by, size, count=int(new), owner=owner)
    return WireStateSet(wire, key, value, next_owner(owner, by))


class WireStateVerbs(WriteBatchVerbs, Protocol):
    """The methods of ``Broker`` that store values for protocols."""

    __slots__ = ()

    settings: BrokerSettings
    when_applied: Callable[[Callable[[], None]], None] | None
    """Calls a function once the other processes of this broker have applied all values; None in a single process."""

    def reported(self, done: Completion[int] | None) -> Completion[int] | None:
        """Return a completion that calls ``done`` once other processes have applied all values."""
        if done is None or self.when_applied is None:
            return done
        applied, stored = self.when_applied, done
        return lambda result: applied(partial(stored, result))

    def wire_state(self, wire: str) -> Mapping[str, bytes]:
        """Return the stored values of a protocol, by key. The mapping shows later changes, too."""
        return self._state.wire_state(wire)

    def set_wire_state(
        self,
        wire: str,
        key: str,
        value: bytes | None,
        *,
        by: Caller = ITSELF,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Store a protocol's value under a key. None removes the key.

        Raises Invalid(INVALID_REQUEST), and Busy(BUSY) if there are too many keys, or one owner has too many bytes.

        Args:
            by: owner of the value, by default the protocol itself.
        """
        change = wire_change(self._state, self.settings, by, wire=wire, key=key, value=value)
        self.change_all([change], level=level, done=self.reported(done))

    def watch_wire_state(self, changed: Callable[[WireStateSet], None]) -> Callable[[], None]:
        """Call ``changed`` for each value that a protocol stores or removes.

        Returns a function that stops the calls.
        """
        self._state.wire_watchers.append(changed)
        return partial(self._state.wire_watchers.remove, changed)

    def watch_bindings(self, changed: Callable[[str, str], None]) -> Callable[[], None]:
        """Call ``changed`` with the protocol and name of each binding that changes.

        Returns a function that stops the calls.
        """
        self._state.binding_watchers.append(changed)
        return partial(self._state.binding_watchers.remove, changed)

    def wire_owner(self, wire: str, key: str) -> int:
        """Return the owner of a protocol's value."""
        return self._state.wire_owner(wire, key)
