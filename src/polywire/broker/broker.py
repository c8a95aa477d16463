"""The broker: every verb that a wire may use, on one facade (decision 0003).

Promises: nothing here waits. Verbs return what is known, raise what is refused, and call back on the loop, never from
inside the call, what must reach the log first. State is changed by building a change, adding it to the write batch and
applying it with the function recovery uses. Must not know: wires, sockets, how the log keeps its files.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from polywire.broker import changes
from polywire.broker.access import Access
from polywire.broker.catalog import Catalog
from polywire.broker.events import Events
from polywire.broker.expiry import Expiry
from polywire.broker.fetch import Bounds, ManyBounds, ask_bounds, check_alive
from polywire.broker.groups.classic import ClassicGroup
from polywire.broker.groups.classic_groups import ClassicGroups
from polywire.broker.groups.commits import Commits
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.positions import PositionVerbs
from polywire.broker.owners import ITSELF, NOBODY, Caller, Owners
from polywire.broker.produce import PRODUCER_BIT, Admission, admission_fields
from polywire.broker.retention import Retention
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import OrderedWork, SlicedWork
from polywire.broker.staged_publish import NO_WRITE, PublishAnswer, StagedPublish
from polywire.broker.state import State
from polywire.broker.topic_verbs import ENTRY_BYTES, TopicVerbs
from polywire.broker.topics import Partition, Topic
from polywire.broker.transactions import Transactions
from polywire.broker.wire_state import wire_change
from polywire.clock import Clock
from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.log.base import Completion, Handle, Located, Log, Loop, Need, Read, Replay
from polywire.records.columns import HEADER_BYTES
from polywire.records.partitioner import partitions_of
from polywire.types import Buffer, KeyHash, Level, TopicName

if TYPE_CHECKING:
    from polywire.log.settings import LogSettings

_PRODUCER_COUNT_BITS: Final = 32  # of a producer's id: how many one start gives out


class Broker(TopicVerbs, PositionVerbs):
    """One broker over one log.

    Invariant: ``_state`` is what the journal's changes up to the end of this write batch make it.
    """

    __slots__ = (
        "_admission",
        "_append",
        "_catalog",
        "_commits",
        "_expiry",
        "_log",
        "_plain_bytes_max",
        "_producer_ids",
        "_retention",
        "_state",
        "_topic_work",
        "access",
        "appended",
        "classic",
        "clock",
        "elapsed",
        "events",
        "groups",
        "loop",
        "owners",
        "publish_work",
        "settings",
        "sliced",
        "staging",
        "streams",
        "transactions",
    )

    def __init__(self, log: Log, state: State, settings: BrokerSettings, loop: Loop, clock: Clock) -> None:
        """Use ``open`` or ``over``: the state must be what ``log`` recovered."""
        self.settings = settings
        self.loop: Final = loop
        self.clock = clock
        self.sliced: Final = SlicedWork(loop, clock)
        self._topic_work = OrderedWork(self.sliced, loop, clock)
        self.publish_work: Final = OrderedWork(self.sliced, loop, clock)
        self._log = log
        self._append = log.append
        self._state = state
        self._catalog: Catalog = state.catalog
        self.streams: Final = state.catalog.streams
        elapsed = state.begin(clock)
        self.elapsed: Final = elapsed
        log.expire_by(elapsed, age_us_max=settings.stage_expiry_us)
        self.access: Final = Access(self, settings, loop, clock)
        self.owners = Owners(self.access)
        self._admission = Admission(log, state, settings, elapsed, self.owners)
        self.appended = 0
        """Batches taken so far, stored or staged: how a connection knows that its peer produces."""
        self._producer_ids = 0
        self._plain_bytes_max = min(settings.record_bytes_max, settings.batch_bytes_max - HEADER_BYTES - 8)
        self.staging: Final = StagedPublish(log, state, settings, elapsed, owners=self.owners)
        self.events: Final = Events(log, state, self._admission, settings, clock)
        self.transactions: Final = Transactions(
            log,
            state,
            admission=self._admission,
            staging=self.staging,
            settings=settings,
            clock=elapsed,
            owners=self.owners,
        )
        classic: dict[str, ClassicGroup] = {}
        self._commits = Commits(state, settings, elapsed, self.owners, classic)
        self.groups: Final = Coordinator(self, state, settings, clock, elapsed, classic)
        self.classic: Final = ClassicGroups(
            self,
            state,
            settings=settings,
            loop=loop,
            clock=clock,
            commits=self._commits,
            coordinator=self.groups,
            table=classic,
        )
        self._expiry = Expiry(self, state, self.groups, settings, loop, elapsed, classic)
        self._retention = Retention(log, state.catalog, settings, loop, clock)
        for partition in state.catalog.partitions():
            partition.attach(log.partition(partition.incarnation))
        self._drop_what_a_stop_left()
        self._retention.start()
        self._expiry.start()

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
        self._expiry.stop()
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

    def topic_of_id(self, topic_id: bytes) -> Topic | None:
        """The topic of this id."""
        return self._catalog.find_id(topic_id)

    def resource(self, full_name: str) -> Topic | TopicName:
        """What a full name names, for whoever asks whether somebody may: the topic, or where it would be."""
        return self._catalog.find(full_name) or TopicName.parse(full_name)

    @property
    def topics_version(self) -> int:
        """Goes up by one with every topic that begins or ends: whoever keeps a list knows when to ask again."""
        return self._catalog.version

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """All topics by full name; the broker's own, which begin with ``__``, only when asked for."""
        return self._catalog.topics(internal=internal)

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

    def produce(
        self, partition: Partition, batch: Buffer, *, by: Caller = NOBODY, level: Level, done: Completion[int] | None
    ) -> None:
        """Append one validated batch; ``done`` gets the offset of its first record once ``level`` is reached.

        A batch that names a producer with an epoch and consecutive sequences is appended once only; a repeat is answered with the
        original's offset (-1 when that is no longer remembered) at its level. A writable batch is numbered in place.
        Raises Missing(PARTITION_MISSING), Invalid(INVALID_BATCH, RECORD_TOO_LARGE, SEQUENCE_GAP), Conflict(PRODUCER_FENCED),
        Denied(DENIED) for another user's producer, Busy(BUSY, DISK_FULL).
        """
        self.appended += 1
        length, _, columns, body_bytes = admission_fields(batch)
        if columns & PRODUCER_BIT or body_bytes > self._plain_bytes_max or length != len(batch) or partition.ended:
            self._admission.produce(partition, batch, by=by, level=level, done=done)
        else:
            self._append(partition.log, batch, level=level, done=done)

    def producer_last(self, partition: Partition, producer: bytes) -> tuple[int, int] | None:
        """Epoch and last sequence of a producer in a partition, None when nothing of it is remembered."""
        return self._state.producers.last(partition.incarnation, producer, now_us=self.elapsed.now_us())

    def new_producer_id(self) -> int:
        """A number of 63 bits that no producer has had here, and none will have: the number of this start, and a count."""
        self._producer_ids += 1
        return self._log.epoch << _PRODUCER_COUNT_BITS | self._producer_ids

    def producer_sequence(self, partition: Partition, producer: bytes, *, epoch: int, sequence: int) -> int:
        """What a sequence stands for that wraps around behind 2^31 - 1, as ``Producers.unwrapped`` says; to be stored as it is.

        Raises Invalid(SEQUENCE_GAP) for a new epoch that does not begin at 0.
        """
        now_us = self.elapsed.now_us()
        return self._state.producers.unwrapped(
            partition.incarnation, producer, epoch=epoch, sequence=sequence, now_us=now_us
        )

    def producer_offset(self, partition: Partition, producer: bytes, *, epoch: int, sequence: int) -> int:
        """Where a producer's record with this sequence was stored, -1 when that is not remembered any more."""
        return self._state.producers.offset_of(partition.incarnation, producer, epoch=epoch, sequence=sequence)

    def settle(self, level: Level, done: Completion[int]) -> None:
        """Call ``done`` once everything taken so far has reached ``level``: the answer to what turned out to be done already."""
        self._log.barrier(level, done)

    def fetch(
        self,
        partition: Partition,
        offset: int,
        *,
        bytes_max: int,
        then: Completion[Read],
        offset_end: int | None = None,
    ) -> Read | Handle:
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
        then: Completion[Located],
        offset_end: int | None = None,
    ) -> Located | Handle:
        """Where sealed records lie as files, as ``PartitionLog.locate`` says; only for who may fetch them.

        Raises Missing(PARTITION_MISSING, OFFSET_OUT_OF_RANGE).
        """
        check_alive(partition)
        return partition.log.locate(offset, then, offset_end=offset_end)

    def wait(self, partition: Partition, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once when records from ``offset`` on can be read or the partition ended, unless the handle is cancelled.

        Raises Missing(PARTITION_MISSING).
        """
        check_alive(partition)
        return self._log.wait(partition.log, offset, wake)

    def many_bounds(self, partitions: Sequence[Partition], *, then: Completion[list[Bounds]]) -> None:
        """As ``bounds``, of many partitions at once, in their order; Missing(PARTITION_MISSING) when one of them has ended."""
        ManyBounds(self._log, self.sliced, self.clock, partitions, then)

    def bounds(self, partition: Partition, *, then: Completion[Bounds]) -> None:
        """Call ``then`` with first and next offset, epoch and next address as of now, once synced. Raises Missing(PARTITION_MISSING)."""
        ask_bounds(self._log, partition, then)

    # Staged batches

    def stage(
        self,
        token: bytes,
        partition: Partition,
        batch: Buffer,
        *,
        write: tuple[str, int] = NO_WRITE,
        by: Caller = NOBODY,
        level: Level,
        done: Completion[int] | None,
    ) -> None:
        """Store a validated batch under a 16-byte token, invisible until published; it expires after ``stage_expiry_us``.

        write: the writer and number it is meant for. When that or a later number is published, tokens meant for it that were not among
        those published are dropped.

        Raises Missing(PARTITION_MISSING), Invalid(INVALID_REQUEST, INVALID_BATCH, RECORD_TOO_LARGE), Denied(DENIED) for another user's token
        or writer, Busy(STAGE_FULL, DISK_FULL).
        """
        self.appended += 1
        self._admission.check(partition, batch)
        self.staging.stage(token, partition, batch, write=write, by=by, level=level, done=done)

    def publish(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        by: Caller = NOBODY,
        done: Completion[PublishAnswer] | None,
    ) -> None:
        """Make all batches under these tokens readable, as one atomic and synced group, unless this writer has published this number,
        or a later one, before: then the tokens are dropped and the answer, a duplicate, waits for the original's sync.

        Raises Missing(STAGE_MISSING) for an unknown or expired token, Missing(PARTITION_MISSING) when a partition was deleted since,
        Invalid(INVALID_NAME, INVALID_REQUEST), Invalid(SEQUENCE_GAP) for a number too far ahead, Denied(DENIED) for another user's writer or
        token, Busy(BUSY, DISK_FULL); then nothing is published.
        """
        self.staging.publish(writer, number, tokens, by=by, done=done)

    def publishing(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        by: Caller = NOBODY,
        done: Completion[PublishAnswer] | None,
    ) -> Iterator[None]:
        """The same a little at a time, for thousands of batches; to be put into ``publish_work``. Raises as ``publish``."""
        return self.staging.publishing(writer, number, tokens, by=by, done=done)

    def abandon(self, tokens: Sequence[bytes], *, by: Caller = NOBODY) -> None:
        """Drop staged batches; unknown tokens are ignored. Raises Invalid(INVALID_REQUEST), Denied(DENIED) for another user's."""
        self.staging.abandon(tokens, by=by)

    # What belongs to one wire

    def wire_state(self, wire: str) -> Mapping[str, bytes]:
        """A live view of what a wire keeps here."""
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
        """Keep a value for a wire, None removes it. ``by``: for whom, where that is not the wire itself.

        Raises Invalid(INVALID_REQUEST), Busy(BUSY) when there are too many keys, or too many bytes of one owner.
        """
        change = wire_change(self._state, self.settings, by, wire=wire, key=key, value=value)
        self.change_all([change], level=level, done=done)

    def wire_owner(self, wire: str, key: str) -> int:
        """Whose value it is."""
        return self._state.wire_owner(wire, key)

    # The write batch

    @property
    def congested(self) -> bool:
        """Whether peers that produce should be read no further for now."""
        return self._log.congested

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when the log is not congested (any more)."""
        self._log.on_relief(callback)

    @property
    def uncommitted(self) -> bool:
        """Whether something was asked for that is not written yet, and may still view what was handed over."""
        return self._log.uncommitted

    def commit(self) -> None:
        """Write the write batch now; what asked for ``written`` or less is answered before this returns."""
        self._log.commit()

    def change_all(self, made: Sequence[changes.Change], *, level: Level, done: Completion[int] | None) -> None:
        """Journal changes as one group, in order, and make them true. With none, ``done`` follows what was added before.

        Raises Busy(DISK_FULL); then nothing has changed.
        """
        if not made:
            if done is not None:
                self._log.barrier(level, done)
            return
        encoded = [changes.encode(change) for change in made]
        if len(encoded) > 1:
            self._log.reserve(sum(map(len, encoded)) + ENTRY_BYTES * len(encoded), need=Need.CHANGE)
        for index, change in enumerate(made):
            last = index == len(made) - 1
            self._log.change(encoded[index], level=level, done=done if last else None)
            self._state.apply_change(change)
