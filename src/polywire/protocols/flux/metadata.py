"""State that only FLUX has: registered brokers, roles and leaders, in-sync replicas and the high watermark (hw).

* Registered brokers, roles and leaders survive restarts. With several processes, the first one stores the registered
  brokers.
* Reports of followers do not survive: a follower is in sync only after it has reported again.
* The reported high watermark of a partition never decreases while this broker leads the partition (spec:
  flux#our-choices).
* The high watermark limits FLUX readers only.

(spec: flux#topics, flux#replication, flux#metadata-index)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec
import structlog

from polywire.broker.owners import ITSELF, Caller
from polywire.broker.topics import Partition, Topic
from polywire.log.base import Completion, Handle
from polywire.protocols.flux.context import WIRE, FluxBroker, FluxRouter, FluxSettings
from polywire.protocols.flux.messages import Role, bad
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.types import Level

TERM: Final = 1  # never changes, because there is no consensus (spec: flux#metadata-index)
BROKERS_MAX: Final = 1_000  # registered brokers; there is one, and clients' tests register a few more
SWEEP_MIN: Final = 64  # entries of deleted partitions and topics that remain before a cleanup
_INDEX_KEY: Final = "index"
BROKER_KEY: Final = "broker/"
REGISTRY_SHARD: Final = 0
_PARTITION_KEY: Final = "partition/"
_TOPIC_KEY: Final = "topic/"

log = structlog.get_logger("polywire.flux")


class _BrokerStored(msgspec.Struct, frozen=True):
    host: str
    port: int
    epoch: int
    heartbeat_at_us: int
    fenced: bool


class _PartitionStored(msgspec.Struct, frozen=True):
    leader: int
    isr: list[int]
    follower: bool


class _Waiter:
    """A callback for the replication of a record. Implements ``Handle``."""

    __slots__ = ("_waiters", "offset", "wake")

    def __init__(self, waiters: list[_Waiter], offset: int, wake: Callable[[], None]) -> None:
        self._waiters = waiters
        self.offset = offset
        self.wake = wake

    def cancel(self) -> None:
        if self in self._waiters:
            self._waiters.remove(self)


class PartitionView(msgspec.Struct):
    """Leader, followers and high watermark (hw) of a partition that has followers or another leader.

    Attributes:
        followers: acknowledged offset and time of the last report, by replica id.
        floor: the highest hw that was reported while this broker led the partition.
    """

    leader: int
    isr: Sequence[int]
    role: Role = Role.LEADER
    followers: dict[int, tuple[int, float]] = msgspec.field(default_factory=dict)
    floor: int = -1
    under_replicated: bool = True
    waiters: list[_Waiter] = msgspec.field(default_factory=list)


class Replication(msgspec.Struct, frozen=True):
    """The in-sync replicas and the high watermark of a partition (spec: flux#replication)."""

    hw: int
    isr: list[int]
    under_replicated: bool


class FluxState:
    """Registered brokers, partition leaders and replication, as FLUX clients set them.

    A partition without a ``PartitionView`` is led by this broker and has no followers. Its high watermark is its last
    readable offset.

    Attributes:
        views: the ``PartitionView`` of each incarnation of a partition that has one.
    """

    __slots__ = (
        "_broker",
        "_brokers",
        "_factors",
        "_index",
        "_sweep_above",
        "reply_buffers",
        "settings",
        "views",
    )

    def __init__(self, broker: FluxBroker, settings: FluxSettings, router: FluxRouter | None = None) -> None:
        """``router`` is the broker of all processes, if there are several."""
        self._broker = broker
        self.settings = settings
        self.reply_buffers: Final = ReplyBuffers(broker.loop)
        self._brokers: dict[int, _BrokerStored] = {}
        self.views: dict[int, PartitionView] = {}
        self._factors: dict[bytes, int] = {}
        self._index = 0
        self._sweep_above = SWEEP_MIN
        self._load()
        if router is not None and router.shards.own != REGISTRY_SHARD:
            self._copy_registry(router)
            return
        known = self._brokers.get(settings.broker_id)
        if known is None or (known.host, known.port, known.fenced) != (settings.host, settings.port, False):
            self.register(settings.broker_id, settings.host, settings.port, 0, done=None)

    def _load(self) -> None:
        """Load the stored state. Entries of deleted partitions and topics are skipped."""
        topics = self._broker.topics(internal=True)
        alive = {partition.incarnation for topic in topics for partition in topic.partitions}
        names = {topic.id for topic in topics}
        for key, value in list(self._broker.wire_state(WIRE).items()):
            if key == _INDEX_KEY:
                self._index = msgspec.msgpack.decode(value, type=int)
            elif key.startswith(BROKER_KEY):
                self._brokers[int(key.removeprefix(BROKER_KEY))] = msgspec.msgpack.decode(value, type=_BrokerStored)
            elif key.startswith(_PARTITION_KEY) and int(key.removeprefix(_PARTITION_KEY)) in alive:
                stored = msgspec.msgpack.decode(value, type=_PartitionStored)
                role = Role.FOLLOWER if stored.follower else Role.LEADER
                self.views[int(key.removeprefix(_PARTITION_KEY))] = PartitionView(
                    stored.leader, array("q", stored.isr), role
                )
            elif key.startswith(_TOPIC_KEY) and bytes.fromhex(key.removeprefix(_TOPIC_KEY)) in names:
                self._factors[bytes.fromhex(key.removeprefix(_TOPIC_KEY))] = msgspec.msgpack.decode(value, type=int)
            else:
                self._broker.set_wire_state(WIRE, key, None, level=Level.WRITTEN, done=None)

    def _copy_registry(self, router: FluxRouter) -> None:
        """Use the registry of another process. Until that process has reported it, the registry has only this broker."""
        own = self.settings
        self._brokers = {own.broker_id: _BrokerStored(own.host, own.port, 0, self._broker.clock.now_us(), False)}

        def apply(key: str, value: bytes | None) -> None:
            number = int(key.removeprefix(BROKER_KEY))
            self._brokers.pop(number, None)
            if value is not None:
                self._brokers[number] = msgspec.msgpack.decode(value, type=_BrokerStored)

        for key, value in router.wire_state(WIRE).items():
            apply(key, value)
        router.watch_values(lambda change: apply(change.key, change.value) if change.wire == WIRE else None)

    @property
    def index(self) -> int:
        return self._index

    def brokers(self) -> list[int]:
        return sorted(self._brokers)

    def fenced(self) -> list[int]:
        return sorted(number for number, entry in self._brokers.items() if entry.fenced)

    def term_and_index(self) -> str:
        """The text at the end of responses to ADMIN commands."""
        return f"term={TERM} index={self._index}"

    def register(
        self, number: int, host: str, port: int, epoch: int, *, by: Caller = ITSELF, done: Completion[int] | None
    ) -> None:
        """Register or replace a broker, and clear its fencing.

        If ``epoch`` is 0 or less, the time in nanoseconds replaces it.

        Raises Busy, and Refused if there are too many brokers.
        """
        if number not in self._brokers and by is not ITSELF:
            self._admit_broker(by)
        now_us = self._broker.clock.now_us()
        entry = _BrokerStored(host, port, epoch if epoch > 0 else now_us * 1000, now_us, False)
        self._store_broker(number, entry, done, by)

    def _admit_broker(self, by: Caller) -> None:
        """Raise Refused if the maximum number of brokers is registered, or one client has registered half of them."""
        owners = [self._broker.wire_owner(WIRE, f"{BROKER_KEY}{number}") for number in self._brokers]
        if len(owners) >= BROKERS_MAX or owners.count(by.owner) >= BROKERS_MAX // 2:
            raise bad(f"too many brokers are registered limit={BROKERS_MAX}")

    def heartbeat(self, number: int, *, done: Completion[int] | None) -> None:
        """Record a broker's heartbeat and clear its fencing. Raises Refused ``broker not found``."""
        now_us = self._broker.clock.now_us()
        entry = msgspec.structs.replace(self._registered(number), heartbeat_at_us=now_us, fenced=False)
        self._store_broker(number, entry, done)

    def fence(self, number: int, fenced: bool, *, done: Completion[int] | None) -> None:
        """Set or clear a broker's fencing. Raises Refused ``broker not found``."""
        self._store_broker(number, msgspec.structs.replace(self._registered(number), fenced=fenced), done)

    def reconcile(self, timeout_ms: int, *, done: Completion[int]) -> int:
        """Fence brokers without a recent heartbeat, and clear the fencing of all others. Return how many have changed.

        This broker counts as alive. ``done`` is called when all changes are stored.
        """
        oldest = self._broker.clock.now_us() - timeout_ms * 1000
        changed = 0
        for number, entry in sorted(self._brokers.items()):
            fenced = entry.heartbeat_at_us < oldest and number != self.settings.broker_id
            if fenced != entry.fenced:
                self._store_broker(number, msgspec.structs.replace(entry, fenced=fenced), None)
                changed += 1
        self._store_index(0, done)
        return changed

    def _registered(self, number: int) -> _BrokerStored:
        entry = self._brokers.get(number)
        if entry is None:
            raise bad(f"broker not found: {number}")
        return entry

    def _store_broker(
        self, number: int, entry: _BrokerStored, done: Completion[int] | None, by: Caller = ITSELF
    ) -> None:
        value = msgspec.msgpack.encode(entry)
        self._broker.set_wire_state(WIRE, f"{BROKER_KEY}{number}", value, by=by, level=Level.SYNCED, done=None)
        self._brokers[number] = entry
        self._store_index(1, done)

    def _store_index(self, steps: int, done: Completion[int] | None, level: Level = Level.SYNCED) -> None:
        self._index += steps
        value = msgspec.msgpack.encode(self._index)
        self._broker.set_wire_state(WIRE, _INDEX_KEY, value, level=level, done=done)

    def _sweep(self) -> None:
        """Drop the entries of deleted partitions and topics."""
        topics = self._broker.topics(internal=True)
        partitions = {partition.incarnation for topic in topics for partition in topic.partitions}
        ids = {topic.id for topic in topics}
        ended = [incarnation for incarnation in self.views if incarnation not in partitions]
        for incarnation in ended:
            del self.views[incarnation]
            self._broker.set_wire_state(WIRE, f"{_PARTITION_KEY}{incarnation}", None)
        for topic_id in [topic_id for topic_id in self._factors if topic_id not in ids]:
            del self._factors[topic_id]
            self._broker.set_wire_state(WIRE, f"{_TOPIC_KEY}{topic_id.hex()}", None)
        self._sweep_above = 2 * (len(self.views) + len(self._factors)) + SWEEP_MIN

    def _sweep_if_needed(self) -> None:
        """Drop the entries of deleted partitions and topics when the number of entries has more than doubled."""
        if len(self.views) + len(self._factors) > self._sweep_above:
            self._sweep()

    def factor_of(self, topic: Topic | None) -> int:
        """Return a topic's number of replicas, including the leader.

        Return the default if the topic has no own number, or is None.
        """
        own = None if topic is None else self._factors.get(topic.id)
        return self.settings.replication_factor if own is None else own

    def _set_factor(self, topic: Topic, factor: int, by: Caller) -> None:
        key, value = f"{_TOPIC_KEY}{topic.id.hex()}", msgspec.msgpack.encode(factor)
        self._broker.set_wire_state(WIRE, key, value, by=by, level=Level.SYNCED, done=None)
        self._factors[topic.id] = factor

    def created(
        self,
        topic: Topic,
        *,
        automatic: bool,
        factor: int | None = None,
        by: Caller = ITSELF,
        done: Completion[int] | None = None,
    ) -> None:
        """Assign leaders to the partitions of a topic that was created over FLUX (spec: flux#topics, flux#our-choices)."""
        self._sweep_if_needed()
        if factor is not None:
            self._set_factor(topic, factor, by)
        live = [number for number in self.brokers() if not self._brokers[number].fenced]
        for partition in topic.partitions:
            leader = live[partition.number % len(live)] if live else self.settings.broker_id
            if self.settings.strict_leaders and not automatic:
                self._set_leader(partition, -1, self._replicas(topic), by)
            elif leader != self.settings.broker_id:
                self._set_leader(partition, leader, [leader], by)
        steps = 1 + len(topic.partitions) if automatic else 1
        self._store_index(steps, done, Level.WRITTEN if automatic else Level.SYNCED)

    def recreated(self, topic: Topic, factor: int, *, by: Caller = ITSELF) -> None:
        """Set the number of replicas of a topic that a client creates again.

        Reports of followers are dropped unless their ids are below this number. Raises Busy if the limit of stored
        metadata is reached.
        """
        if factor != self._factors.get(topic.id):
            self._sweep_if_needed()
            settings = replace(topic.settings, replication_factor=factor)
            if settings != topic.settings:
                self._broker.configure_topic(topic, settings)
            self._set_factor(topic, factor, by)
            for partition in topic.partitions:
                view = self.views.get(partition.incarnation)
                if view is not None:
                    view.followers = {number: held for number, held in view.followers.items() if number < factor}
        self._store_index(1, None)

    def set_leader(
        self, partition: Partition, leader: int, isr: Sequence[int], *, by: Caller = ITSELF, done: Completion[int]
    ) -> None:
        """Set the leader and the in-sync set. If ``isr`` is empty, the stored in-sync set is unchanged.

        Raises Busy if the limit of stored metadata is reached.
        """
        self._sweep_if_needed()
        view = self.views.get(partition.incarnation)
        current = view.isr if view is not None else [self.settings.broker_id]
        self._set_leader(partition, leader, isr or current, by)
        self._store_index(1, done)

    def set_role(self, partition: Partition, role: Role, *, by: Caller = ITSELF, done: Completion[int]) -> None:
        """Set this broker's role for a partition (spec: flux#set_partition_role).

        Whatever the role, metadata then names this broker as the partition's leader.
        """
        view = self._view(partition)
        if view.role is not role:
            view.floor = -1
        view.role = role
        self._set_leader(partition, self.settings.broker_id, [self.settings.broker_id], by)
        self._store_index(1, done)

    def elect(self, topic: Topic, *, done: Completion[int]) -> int:
        """Replace leaders that are unknown or fenced. Return the number of changed partitions."""
        eligible = [number for number in self._replicas(topic) if self._is_live(number)]
        changed = 0
        for partition in topic.partitions:
            view = self.views.get(partition.incarnation)
            leader = view.leader if view is not None else self.settings.broker_id
            wanted = leader if self._is_live(leader) else next(iter(eligible), -1)
            if wanted != leader:
                self._set_leader(partition, wanted, eligible)
                changed += 1
        self._store_index(changed, done)
        return changed

    def _is_live(self, number: int) -> bool:
        entry = self._brokers.get(number)
        return entry is not None and not entry.fenced

    def _replicas(self, topic: Topic) -> list[int]:
        return list(range(self.factor_of(topic)))

    def _set_leader(self, partition: Partition, leader: int, isr: Sequence[int], by: Caller = ITSELF) -> None:
        view = self._view(partition)
        value = msgspec.msgpack.encode(_PartitionStored(leader, list(isr), view.role is Role.FOLLOWER))
        key = f"{_PARTITION_KEY}{partition.incarnation}"
        self._broker.set_wire_state(WIRE, key, value, by=by, level=Level.SYNCED, done=None)
        view.leader = leader
        view.isr = array("q", isr)

    def _view(self, partition: Partition) -> PartitionView:
        view = self.views.get(partition.incarnation)
        if view is None:
            view = PartitionView(self.settings.broker_id, [self.settings.broker_id])
            view.floor = partition.log.readable_offset - 1
            self.views[partition.incarnation] = view
        return view

    def is_plain(self, partition: Partition) -> bool:
        """Return whether this broker leads the partition and it has no followers.

        Then the high watermark after a record is the record's offset.
        """
        return partition.incarnation not in self.views

    def is_writable(self, partition: Partition) -> bool:
        view = self.views.get(partition.incarnation)
        return view is None or (view.leader == self.settings.broker_id and view.role is Role.LEADER)

    def is_leader(self, partition: Partition) -> bool:
        """Return whether this broker's role is leader, even if metadata names another leader."""
        view = self.views.get(partition.incarnation)
        return view is None or view.role is Role.LEADER

    def hw(self, partition: Partition) -> int:
        """Return the high watermark: the offset of the last record that FLUX clients may read; -1 for none."""
        if partition.incarnation not in self.views:
            return partition.log.readable_offset - 1
        return self.recompute(partition).hw

    def hw_after(self, partition: Partition, offset: int) -> int:
        """Return the high watermark immediately after the record at ``offset`` was appended."""
        if partition.incarnation not in self.views:
            return offset
        return self.recompute(partition, leo=offset).hw

    def recompute(self, partition: Partition, *, leo: int | None = None) -> Replication:
        """Compute the in-sync replicas and the high watermark (spec: flux#replication).

        ``leo`` is the last offset of the log to assume; None for the current one.
        """
        end = partition.log.readable_offset - 1 if leo is None else leo
        view = self.views.get(partition.incarnation)
        if view is None:
            return Replication(end, [0], self.settings.min_isr > 1)
        oldest = self._broker.clock.monotonic() - self.settings.lag_timeout_ms / 1000
        in_sync = {
            number: acked
            for number, (acked, seen) in view.followers.items()
            if seen >= oldest and end - acked <= self.settings.lag_max
        }
        hw = max(min([end, *in_sync.values()]), -1)
        if view.role is Role.LEADER:
            view.floor = hw = max(hw, view.floor)
        isr = [0, *sorted(in_sync)]
        under_replicated = len(isr) < self.settings.min_isr
        if leo is None and under_replicated != view.under_replicated:
            view.under_replicated = under_replicated
            self._log_change(partition, isr, under_replicated)
        return Replication(hw, isr, under_replicated)

    def _log_change(self, partition: Partition, isr: list[int], under_replicated: bool) -> None:
        topic = partition.topic.name.full
        if under_replicated:
            log.warning("partition is under-replicated", topic=topic, partition=partition.number, isr=isr)
        else:
            log.info("partition has enough in-sync replicas", topic=topic, partition=partition.number, isr=isr)

    def acknowledge(self, partition: Partition, follower: int, offset: int) -> Replication:
        """Record that a follower has all records up to ``offset``, and call the callbacks that waited for it."""
        view = self._view(partition)
        acked, _ = view.followers.get(follower, (-1, 0.0))
        leo = partition.log.readable_offset - 1
        view.followers[follower] = (max(acked, min(offset, leo)), self._broker.clock.monotonic())
        now = self.recompute(partition)
        for waiter in list(view.waiters):
            if waiter in view.waiters and self.is_replicated(partition, waiter.offset):
                view.waiters.remove(waiter)
                waiter.wake()
        return now

    def is_replicated(self, partition: Partition, offset: int) -> bool:
        """Return whether enough replicas have this record for ``acks=all``."""
        now = self.recompute(partition)
        return now.hw >= offset and not now.under_replicated

    def wait_replicated(self, partition: Partition, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` when enough followers have the record, unless the returned handle is cancelled."""
        waiters = self._view(partition).waiters
        waiter = _Waiter(waiters, offset, wake)
        waiters.append(waiter)
        return waiter
