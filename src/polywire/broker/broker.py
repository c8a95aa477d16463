"""The broker: every verb that a wire may use, on one facade (decision 0003).

Promises: nothing here waits. Verbs return what is known, raise what is refused, and call back on the loop, never from
inside the call, what must reach the log first. State is changed by building a change, adding it to the turn and
applying it with the function recovery uses. Must not know: wires, sockets, files.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from polywire.broker import changes
from polywire.broker.access import Access
from polywire.broker.catalog import Catalog
from polywire.broker.events import Events
from polywire.broker.fetch import BoundsThen, ask_bounds, check_alive
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.produce import ADMISSION, PRODUCER_BIT, Admission
from polywire.broker.retention import Retention
from polywire.broker.settings import BrokerSettings, TopicSettings, check_name
from polywire.broker.state import State
from polywire.broker.topics import Partition, Topic
from polywire.broker.transacting import Transacting
from polywire.broker.transactions import PublishDone, Transactions
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid, Missing
from polywire.log.base import Done, Located, Log, Loop, Read, Replay
from polywire.records.columns import HEADER_BYTES
from polywire.records.partitioner import partitions_of
from polywire.types import DEFAULT_STREAM, Buffer, KeyHash, Level, PositionKind, TopicName

if TYPE_CHECKING:
    from polywire.log.settings import LogSettings

_ENTRY_BYTES: Final = 40  # a directory entry of a journal group (decision 0002), and its padding
_OFFSET_MIN: Final = -(2**63)
_OFFSET_MAX: Final = 2**63 - 1


class Broker:
    """One broker over one log.

    Invariant: ``_state`` is what the journal's changes up to the end of this turn make it.
    """

    __slots__ = (
        "_admission",
        "_append",
        "_catalog",
        "_log",
        "_plain_bytes_max",
        "_retention",
        "_state",
        "_transactions",
        "access",
        "appended",
        "clock",
        "events",
        "groups",
        "loop",
        "settings",
        "transacting",
    )

    def __init__(self, log: Log, state: State, settings: BrokerSettings, loop: Loop, clock: Clock) -> None:
        """Use ``open`` or ``over``: the state must be what ``log`` recovered."""
        self.settings: Final = settings
        self.loop: Final = loop
        self.clock: Final = clock
        self._log = log
        self._append = log.append
        self._state = state
        self._catalog: Catalog = state.catalog
        self._admission = Admission(log, state, settings, clock)
        self.appended = 0
        """Batches taken so far, stored or staged: how a connection knows that its peer produces."""
        self._plain_bytes_max = min(settings.record_bytes_max, settings.batch_bytes_max - HEADER_BYTES - 8)
        self._transactions = Transactions(log, state, settings, clock)
        self.events: Final = Events(log, state, self._admission, settings, clock)
        self.transacting: Final = Transacting(
            log, state, admission=self._admission, staging=self._transactions, settings=settings, clock=clock
        )
        self.groups: Final = Coordinator(self, state, settings, clock)
        self.access: Final = Access(self, settings, loop, clock)
        self._retention = Retention(log, state.catalog, settings, loop, clock)
        for partition in state.catalog.partitions():
            partition.attach(log.partition(partition.incarnation))
        self._retention.start()

    @classmethod
    def open(
        cls,
        data_dir: Path,
        settings: BrokerSettings,
        loop: Loop,
        clock: Clock,
        *,
        log_settings: LogSettings | None = None,
        on_failure: Callable[[BrokerError], None] | None = None,
    ) -> Broker:
        """A broker over a data directory, recovered and with its new epoch synced; the directory is made when missing.

        log_settings: sizes of the journal; durability and the limit of staged bytes are always the broker's own. Where they are small,
        limits of batches and records are lowered to what a group of the journal can hold.
        on_failure: called on the loop when storage fails; nothing is acknowledged after it.
        Raises Unavailable(STORAGE_FAILED) when the directory cannot be used or another broker owns it, Corrupt when synced data is
        damaged, Busy(DISK_FULL).
        """
        from polywire.log.opening import open_log  # here, so that a broker in memory needs no files and no lock
        from polywire.log.settings import LogSettings

        sizes = log_settings or LogSettings()
        own = replace(sizes, durability=settings.durability, staged_bytes_max=settings.staged_bytes_max)
        settings = settings.within(own.batch_bytes_max)

        def recover(state: Replay) -> Log:
            log = open_log(data_dir, settings=own, loop=loop, clock=clock, replay=state)
            if on_failure is not None:
                log.on_failure(on_failure)
            return log

        return cls.over(recover, settings=settings, loop=loop, clock=clock)

    @classmethod
    def over(cls, open_log: Callable[[Replay], Log], *, settings: BrokerSettings, loop: Loop, clock: Clock) -> Broker:
        """A broker over the log that ``open_log`` recovers; its changes are replayed into the state given to it."""
        state = State(settings)
        return cls(open_log(state), state, settings, loop, clock)

    def close(self) -> None:
        """Commit, sync and stop; every pending callback is called first."""
        self._retention.stop()
        self.access.close()
        self._log.close()

    # Topics

    def find_topic(self, full_name: str) -> Topic | None:
        """The topic of this full name."""
        return self._catalog.find(full_name)

    def topic(self, full_name: str) -> Topic:
        """The topic of this full name. Raises Missing(TOPIC_MISSING)."""
        topic = self._catalog.find(full_name)
        if topic is None:
            raise Missing(ErrorCode.TOPIC_MISSING, f"no such topic name={full_name!r}")
        return topic

    @property
    def topics_version(self) -> int:
        """Goes up by one with every topic that begins or ends: whoever keeps a list knows when to look again."""
        return self._catalog.version

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """All topics by full name; the broker's own, which begin with ``__``, only when asked for."""
        return self._catalog.topics(internal=internal)

    def create_topic(
        self,
        name: TopicName,
        partition_count: int | None = None,
        settings: TopicSettings | None = None,
        *,
        internal: bool = False,
        partition_count_min: int = 1,
        level: Level = Level.SYNCED,
        done: Done | None = None,
    ) -> Topic:
        """Make a topic; it can be used at once, in this same turn. Whoever allows none has topics that nobody can write to.

        Raises Invalid(INVALID_TOPIC, INVALID_PARTITION_COUNT, INVALID_REQUEST), Conflict(TOPIC_EXISTS), Busy(BUSY, DISK_FULL).
        """
        count = self.settings.partition_count if partition_count is None else partition_count
        given = settings or TopicSettings()
        given.check()
        self._catalog.check_new(name, count, internal=internal, count_min=partition_count_min)
        change = changes.TopicCreated(
            id=secrets.token_bytes(16),
            stream=name.stream,
            topic=name.topic,
            created_at_us=self.clock.now_us(),
            first_incarnation=self._catalog.next_incarnation,
            partition_count=count,
            settings=given,
        )
        self._open_partitions(change, change.first_incarnation, count, level, done)
        return self.topic(name.full)

    def ensure_topic(self, full_name: str) -> Topic:
        """The topic of this name, made in this turn with the default settings when it is missing.

        Raises Missing(TOPIC_MISSING) when topics are not made automatically, else as ``create_topic``.
        """
        topic = self._catalog.find(full_name)
        if topic is not None:
            return topic
        if not self.settings.auto_create:
            raise Missing(ErrorCode.TOPIC_MISSING, f"no such topic name={full_name!r}")
        return self.create_topic(TopicName(DEFAULT_STREAM, full_name), level=Level.WRITTEN)

    def grow_topic(
        self, topic: Topic, partition_count: int, *, level: Level = Level.SYNCED, done: Done | None = None
    ) -> None:
        """Add partitions up to this count.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_PARTITION_COUNT), Busy(BUSY, DISK_FULL).
        """
        added = self._catalog.check_growth(topic, partition_count)
        if added == 0:
            self.change_all((), level=level, done=done)
            return
        first = self._catalog.next_incarnation
        self._open_partitions(changes.PartitionsAdded(topic.id, first, added), first, added, level, done)

    def shrink_topic(
        self, topic: Topic, partition_count: int, *, level: Level = Level.SYNCED, done: Done | None = None
    ) -> None:
        """End the last partitions, with their records and positions, until so many are left; none may be.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_PARTITION_COUNT), Busy(DISK_FULL).
        """
        ended = self._catalog.check_shrinking(topic, partition_count)
        self._log.reserve(_ENTRY_BYTES * (len(ended) + 3), data=False)
        for partition in ended:
            self._log.drop_partition(partition.incarnation)
        made = [changes.PartitionsRemoved(topic.id, partition_count)] if ended else []
        self.change_all(made, level=level, done=done)

    def _open_partitions(self, change: changes.Change, first: int, count: int, level: Level, done: Done | None) -> None:
        data = changes.encode(change)
        self._log.reserve(len(data) + _ENTRY_BYTES * (count + 1))
        opened = [self._log.open_partition(incarnation) for incarnation in range(first, first + count)]
        self._log.change(data, level=level, done=done)
        self._state.apply_change(change)
        for log in opened:
            partition = self._catalog.find_partition(log.incarnation)
            assert partition is not None
            partition.attach(log)

    def delete_topic(self, topic: Topic, *, level: Level = Level.SYNCED, done: Done | None = None) -> None:
        """End a topic with its records, positions and groups. Raises Missing(TOPIC_MISSING)."""
        self._catalog.check_alive(topic)
        self._log.reserve(_ENTRY_BYTES * (len(topic.partitions) + 3), data=False)
        for partition in topic.partitions:
            self._log.drop_partition(partition.incarnation)
        self.change_all([changes.TopicDeleted(topic.id)], level=level, done=done)

    def purge_topic(self, topic: Topic, *, level: Level = Level.SYNCED, done: Done | None = None) -> None:
        """Remove all records written before this turn; offsets go on. Raises Missing(TOPIC_MISSING)."""
        self._catalog.check_alive(topic)
        self._log.reserve(_ENTRY_BYTES * (len(topic.partitions) + 3), data=False)
        for partition in topic.partitions:
            self._log.trim(partition.incarnation, partition.log.next_offset)
        self.change_all([changes.TopicPurged(topic.id, self.clock.now_us())], level=level, done=done)

    def configure_topic(
        self, topic: Topic, settings: TopicSettings, *, level: Level = Level.SYNCED, done: Done | None = None
    ) -> None:
        """Give a topic other settings. Raises Missing(TOPIC_MISSING), Invalid(INVALID_REQUEST)."""
        settings.check()
        self._catalog.check_alive(topic)
        self.change_all([changes.TopicConfigured(topic.id, settings)], level=level, done=done)
        for partition in topic.partitions:
            partition.configure()

    def partition_count(self, full_name: str) -> int:
        """Partitions of a topic; the default while it does not exist."""
        topic = self._catalog.find(full_name)
        return self.settings.partition_count if topic is None else len(topic.partitions)

    def partition_of_key(self, topic: Topic, key: Buffer, wire_hash: KeyHash) -> Partition:
        """Where a key belongs: by the topic's own function if it has one, else by the wire's.

        Raises Missing(PARTITION_MISSING) when the topic has none.
        """
        partitions = topic.written_to()
        spans = memoryview(array("q", (0, len(key), 0, 0)))
        return partitions[partitions_of(key, spans, len(partitions), topic.settings.key_hash or wire_hash)[0]]

    # Records

    def produce(self, partition: Partition, batch: Buffer, *, level: Level, done: Done | None) -> None:
        """Append one validated batch; ``done`` gets the offset of its first record once ``level`` is reached.

        A batch that names a producer with an epoch and consecutive sequences is appended once only; a repeat is answered with the
        original's offset (-1 when that is no longer remembered) at its level. A writable batch is numbered in place.
        Raises Missing(PARTITION_MISSING), Invalid(INVALID_BATCH, RECORD_TOO_LARGE, SEQUENCE_GAP), Conflict(PRODUCER_FENCED),
        Busy(BUSY, DISK_FULL).
        """
        self.appended += 1
        length, _, columns, body_bytes = ADMISSION.unpack_from(batch)
        if columns & PRODUCER_BIT or body_bytes > self._plain_bytes_max or length != len(batch) or partition.ended:
            self._admission.produce(partition, batch, level=level, done=done)
        else:
            self._append(partition.log, batch, level=level, done=done)

    def producer_last(self, partition: Partition, producer: bytes) -> tuple[int, int] | None:
        """Epoch and last sequence of a producer in a partition, None when nothing of it is remembered."""
        return self._state.producers.last(partition.incarnation, producer, now_us=self.clock.now_us())

    def settle(self, level: Level, done: Done) -> None:
        """Call ``done`` once everything taken so far has reached ``level``: the answer to what turned out to be done already."""
        self._log.barrier(level, done)

    def fetch(
        self,
        partition: Partition,
        offset: int,
        *,
        bytes_max: int,
        then: Callable[[Read | BrokerError], None],
        offset_end: int | None = None,
    ) -> Read | None:
        """Stored batches from the one holding ``offset`` on, as ``PartitionLog.read`` says.

        Raises Missing(PARTITION_MISSING, OFFSET_OUT_OF_RANGE).
        """
        if partition.ended:
            check_alive(partition)
        return partition.log.read(offset, bytes_max=bytes_max, then=then, offset_end=offset_end)

    def locate(
        self,
        partition: Partition,
        offset: int,
        *,
        then: Callable[[Located | BrokerError], None],
        offset_end: int | None = None,
    ) -> Located | None:
        """Where sealed records lie as files, as ``PartitionLog.locate`` says; only for who may fetch them.

        Raises Missing(PARTITION_MISSING, OFFSET_OUT_OF_RANGE).
        """
        check_alive(partition)
        return partition.log.locate(offset, then, offset_end=offset_end)

    def wait(self, partition: Partition, offset: int, wake: Callable[[], None]) -> Callable[[], None]:
        """Call ``wake`` once when records from ``offset`` on can be read or the partition ended; returns what cancels.

        Raises Missing(PARTITION_MISSING).
        """
        check_alive(partition)
        return self._log.wait(partition.log, offset, wake)

    def bounds(self, partition: Partition, *, then: BoundsThen) -> None:
        """Tell first offset, next offset, epoch and next address as of this call, once they are synced.

        Raises Missing(PARTITION_MISSING).
        """
        ask_bounds(self._log, partition, then)

    # Staged batches

    def stage(
        self,
        token: bytes,
        partition: Partition,
        batch: Buffer,
        *,
        write: tuple[str, int] | None = None,
        level: Level,
        done: Done | None,
    ) -> None:
        """Store a validated batch under a 16-byte token, invisible until published; it expires after ``stage_expiry_us``.

        write: the writer and number it is meant for. When that or a later number is published, tokens meant for it that were not among
        those published are dropped.

        Raises Missing(PARTITION_MISSING), Invalid(INVALID_REQUEST, INVALID_BATCH, RECORD_TOO_LARGE), Busy(STAGE_FULL, DISK_FULL).
        """
        self.appended += 1
        self._admission.check(partition, batch)
        self._transactions.stage(token, partition, batch, write=write, level=level, done=done)

    def publish(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        positions: Sequence[changes.PositionStored] = (),
        done: PublishDone | None,
    ) -> None:
        """Make all batches under these tokens readable, as one atomic and synced group, unless this writer has published this number,
        or a later one, before: then the tokens are dropped and the answer, a duplicate, waits for the original's sync.

        positions: stored with it, all or nothing; made by ``positions_stored``.
        Raises Missing(STAGE_MISSING) for an unknown or expired token, Missing(PARTITION_MISSING) when a partition was deleted since,
        Invalid(INVALID_NAME, INVALID_REQUEST), Busy(BUSY, DISK_FULL); then nothing is published.
        """
        self._transactions.publish(writer, number, tokens, positions=positions, done=done)

    def abandon(self, tokens: Sequence[bytes]) -> None:
        """Drop staged batches; unknown tokens are ignored. Raises Invalid(INVALID_REQUEST)."""
        self._transactions.abandon(tokens)

    # Positions

    def position(self, full_name: str, partition_number: int, kind: PositionKind, name: str) -> int | None:
        """The next offset a consumer or group will read, None when it never committed."""
        found = self._state.positions.find(self._state.topic_key(full_name), partition_number, kind, name)
        return None if found is None else found.offset

    def positions(self, kind: PositionKind, name: str) -> Mapping[tuple[str, int], int]:
        """All positions of one consumer or group, by (topic's full name, partition number)."""
        found: dict[tuple[str, int], int] = {}
        for key, partition, position in self._state.positions.of(kind, name):
            found[self._topic_name(key), partition] = position.offset
        return found

    def position_owners(self, kind: PositionKind) -> Mapping[tuple[str, str], Mapping[int, int]]:
        """Positions by partition number of all consumers or groups, by (topic's full name, consumer or group)."""
        return {
            (self._topic_name(key), name): {partition: position.offset for partition, position in positions.items()}
            for key, name, positions in self._state.positions.owners(kind)
        }

    def _topic_name(self, key: changes.TopicKey) -> str:
        return key if isinstance(key, str) else _full_name(self._catalog.find_id(key))

    def commit_position(
        self,
        full_name: str,
        partition_number: int,
        kind: PositionKind,
        name: str,
        offset: int,
        *,
        generation: int = -1,
        level: Level = Level.WRITTEN,
        done: Done | None = None,
    ) -> None:
        """Store a next offset as given; for a topic that does not exist yet it waits under its name.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Busy(BUSY) when there are too many positions.
        """
        self.commit_positions(
            full_name, {partition_number: offset}, kind, name, generation=generation, level=level, done=done
        )

    def commit_positions(
        self,
        full_name: str,
        offsets: Mapping[int, int],
        kind: PositionKind,
        name: str,
        *,
        generation: int = -1,
        level: Level = Level.WRITTEN,
        done: Done | None = None,
    ) -> None:
        """Store next offsets by partition number, all or none. Raises as ``commit_position``."""
        made = self.positions_stored(full_name, offsets, kind, name, generation=generation)
        self.change_all(made, level=level, done=done)

    def positions_stored(
        self, full_name: str, offsets: Mapping[int, int], kind: PositionKind, name: str, *, generation: int = -1
    ) -> list[changes.PositionStored]:
        """The changes that store these next offsets, checked but not made. Raises as ``commit_position``."""
        check_name(name, self.settings.name_bytes_max)
        for number, offset in offsets.items():
            if not _OFFSET_MIN <= offset <= _OFFSET_MAX or not 0 <= number < self.settings.partition_count_max:
                raise Invalid(ErrorCode.INVALID_REQUEST, f"position is out of range partition={number} offset={offset}")
        key = self._state.topic_key(full_name)
        positions = self._state.positions
        added = sum(positions.find(key, number, kind, name) is None for number in offsets)
        if added and positions.count + added > self.settings.positions_max:
            raise Busy(ErrorCode.BUSY, f"too many positions limit={self.settings.positions_max}")
        if positions.owner_count >= self.settings.position_owners_max and not positions.has_owner(key, kind, name):
            raise Busy(ErrorCode.BUSY, f"too many owners of positions limit={self.settings.position_owners_max}")
        identity = changes.split_key(key)
        return [
            changes.PositionStored(*identity, number, kind, name, offset, generation)
            for number, offset in offsets.items()
        ]

    def delete_positions(
        self,
        kind: PositionKind,
        name: str,
        *,
        full_name: str | None = None,
        partition_number: int | None = None,
        level: Level = Level.WRITTEN,
        done: Done | None = None,
    ) -> None:
        """Forget positions of a consumer or group: in one topic or all, in one partition or all."""
        key = changes.split_key(None if full_name is None else self._state.topic_key(full_name))
        self.change_all([changes.PositionsDeleted(kind, name, *key, partition_number)], level=level, done=done)

    # What belongs to one wire

    def wire_state(self, wire: str) -> Mapping[str, bytes]:
        """A live view of what a wire keeps here."""
        return self._state.wire_state(wire)

    def set_wire_state(
        self, wire: str, key: str, value: bytes | None, *, level: Level = Level.WRITTEN, done: Done | None = None
    ) -> None:
        """Keep a value for a wire, None removes it. Raises Invalid(INVALID_REQUEST), Busy(BUSY) when there are too many keys."""
        kept = self._state.wire_state(wire)
        if value is not None and len(value) > self.settings.wire_state_bytes_max:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"value is too large bytes={len(value)} limit={self.settings.wire_state_bytes_max}",
            )
        if value is not None and key not in kept and len(kept) >= self.settings.wire_state_keys_max:
            raise Busy(ErrorCode.BUSY, f"too many keys wire={wire} limit={self.settings.wire_state_keys_max}")
        self.change_all([changes.WireStateSet(wire, key, value)], level=level, done=done)

    # The turn

    @property
    def congested(self) -> bool:
        """Whether peers that produce should be read no further for now."""
        return self._log.congested

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when the log is not congested (any more)."""
        self._log.on_relief(callback)

    def commit(self) -> None:
        """Write this turn now; what asked for ``written`` or less is answered before this returns."""
        self._log.commit()

    def change_all(self, made: Sequence[changes.Change], *, level: Level, done: Done | None) -> None:
        """Journal changes as one group, in order, and make them true. With none, ``done`` follows what was added before.

        Raises Busy(DISK_FULL); then nothing has changed.
        """
        if not made:
            if done is not None:
                self._log.barrier(level, done)
            return
        encoded = [changes.encode(change) for change in made]
        if len(encoded) > 1:
            self._log.reserve(sum(map(len, encoded)) + _ENTRY_BYTES * len(encoded), data=False)
        for index, change in enumerate(made):
            last = index == len(made) - 1
            self._log.change(encoded[index], level=level, done=done if last else None)
            self._state.apply_change(change)


def _full_name(topic: Topic | None) -> str:
    assert topic is not None, "a position belongs to a living topic"
    return topic.name.full
