"""The broker's operations that store and read records, and that assign producer ids.

* A batch without a producer epoch whose body is smaller than the record limit goes to the log after one check of its
  header. ``Admission`` checks all other batches before the log assigns offsets.
* The first and next offset of a partition are returned only when all records between them are synced, so a crash cannot
  lose these records (concepts: durability#what-a-crash-may-take).
* Producer ids are never reused.

This module is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

import cython
import msgspec

from polywire.broker.changes import ProducerState
from polywire.broker.owners import LINKS_CALLER, NO_CALLER, Caller, Owners, next_owner
from polywire.broker.producers import SEQUENCE_MAX, RecentBatch, finish_append
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SlicedWork
from polywire.broker.state import State, is_tracked
from polywire.broker.topics import Partition, linked
from polywire.clock import Clock, ElapsedClock
from polywire.errors import BrokerError, ErrorCode, Invalid, Missing
from polywire.log.base import Completion, Handle, Located, Log, PartitionLog, Read, WriteBatch
from polywire.records import batch as batches
from polywire.records.columns import HEADER_BYTES, BatchFlags, Column
from polywire.records.fields import header_fields
from polywire.types import Buffer, Level

admission_fields: Final = header_fields("length", "flags", "columns", "producer_epoch", "body_bytes_raw")
PRODUCER_BIT: Final = 1 << Column.PRODUCER_ID
_producer_fields: Final = header_fields("flags", "columns", "record_count", "producer_epoch", "base_sequence")
_COMPRESSED: Final = BatchFlags.LZ4 | BatchFlags.ZSTD
_PRODUCER_COUNT_BITS: Final = 32  # the lower bits of a producer id, which count within one start of the broker
_SHARD_BIT: Final = 57  # bits from this one on hold the shard; the 25 bits below hold the number of the start


def producer_identity(batch: Buffer) -> tuple[bytes, int, int, int] | None:
    """Return (producer id, epoch, first sequence number, last sequence number) of an idempotent producer's batch, else
    None.

    Raises Invalid(INVALID_BATCH) for a compressed body, which hides the producer id, and for a sequence number above
    ``SEQUENCE_MAX``.
    """
    flags, columns, record_count, epoch, base = _producer_fields(batch)
    if not is_tracked(columns, epoch):
        return None
    if flags & _COMPRESSED:
        raise Invalid(ErrorCode.INVALID_BATCH, "a compressed batch must not have a producer epoch")
    last = base + record_count - 1
    if base < 0 or last > SEQUENCE_MAX:  # the field is read as signed, so a larger number is negative
        raise Invalid(ErrorCode.INVALID_BATCH, f"producer sequence is too large limit={SEQUENCE_MAX}")
    places = batches.layout(batch)
    at, size = places[2 * Column.PRODUCER_ID], places[2 * Column.PRODUCER_ID + 1]
    return bytes(memoryview(batch)[at : at + size]), epoch, base, last


class Admission:
    """Checks batches from idempotent producers, large batches and batches for deleted partitions, and appends them."""

    __slots__ = ("_clock", "_log", "_owners", "_settings", "_state")

    def __init__(
        self, log: WriteBatch, state: State, settings: BrokerSettings, clock: ElapsedClock, owners: Owners
    ) -> None:
        self._log = log
        self._state = state
        self._settings = settings
        self._clock = clock
        self._owners = owners

    def check(self, partition: Partition, batch: Buffer, *, by: Caller = NO_CALLER) -> None:
        """Check that a batch may be stored.

        Raises Missing(PARTITION_MISSING), Invalid(RECORD_TOO_LARGE), Conflict(TOPIC_LINKED) for the topic of a link,
        and Invalid(INVALID_BATCH) unless the bytes are exactly one batch.
        """
        if partition.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, f"partition was deleted partition={partition!r}")
        if partition.link and by.owner != LINKS_CALLER.owner:
            raise linked(partition.topic)
        size = len(batch)
        if size < HEADER_BYTES:
            raise Invalid(ErrorCode.INVALID_BATCH, f"batch is shorter than its header bytes={size}")
        length, flags, _, _, body_bytes = admission_fields(batch)
        if length != size:
            raise Invalid(
                ErrorCode.INVALID_BATCH, f"length in the header of the batch is wrong bytes={size} length={length}"
            )
        if size > self._settings.batch_bytes_max:
            raise Invalid(
                ErrorCode.RECORD_TOO_LARGE, f"batch is too large bytes={size} limit={self._settings.batch_bytes_max}"
            )
        if body_bytes > self._settings.batch_bytes_max:
            raise Invalid(
                ErrorCode.RECORD_TOO_LARGE,
                f"decompressed batch is too large bytes={body_bytes} limit={self._settings.batch_bytes_max}",
            )
        if body_bytes > self._settings.record_bytes_max and not flags & _COMPRESSED:
            self._check_records(batch)

    def _check_records(self, batch: Buffer) -> None:
        """Raise Invalid(RECORD_TOO_LARGE) if a key or value exceeds the limit of one record."""
        longest, limit = batches.longest_payload(batch), self._settings.record_bytes_max
        if longest > limit:
            raise Invalid(ErrorCode.RECORD_TOO_LARGE, f"record is too large bytes={longest} limit={limit}")

    def produce(
        self, partition: Partition, batch: Buffer, *, by: Caller, level: Level, done: Completion[int] | None
    ) -> None:
        """Check and append a batch. For a duplicate, ``done`` is called with the offset of the original."""
        self.check(partition, batch, by=by)
        identity = producer_identity(batch)
        if identity is None:
            self._log.append(partition.log, batch, level=level, done=done)
            return
        producer, epoch, base, last = identity
        now_us = self._clock.now_us()
        producers = self._state.producers
        owner = producers.owner(partition.incarnation, producer)
        self._owners.check(by, owner, "producer", producer.decode("utf-8", "backslashreplace"))
        repeated = producers.find(partition.incarnation, producer, epoch=epoch, base=base, last=last, now_us=now_us)
        if repeated is not None:
            self._complete_repeat(repeated, base, level, done)
            return
        batch_of_producer = RecentBatch(base, last)
        self._log.append(partition.log, batch, level=level, done=partial(self._stored, batch_of_producer, done))
        producers.remember(
            partition.incarnation,
            producer,
            epoch=epoch,
            batch=batch_of_producer,
            now_us=now_us,
            owner=next_owner(owner, by),
        )

    def _complete_repeat(self, repeated: RecentBatch, base: int, level: Level, done: Completion[int] | None) -> None:
        """Complete a duplicate batch with the offset of the original, once the original has reached ``level``."""
        if repeated.waiting is not None:
            repeated.waiting.append((base, level, done))
        elif done is not None:
            self._log.barrier(level, partial(_complete, done, repeated.offset_of(base)))

    def _stored(self, batch: RecentBatch, done: Completion[int] | None, offset: int | BrokerError) -> None:
        waiting = finish_append(batch, offset)
        if done is not None:
            done(offset)
        for base, level, repeat in waiting:
            if repeat is None:
                continue
            if isinstance(offset, BrokerError):
                repeat(offset)
            else:
                self._log.barrier(level, partial(_complete, repeat, batch.offset_of(base)))


def _complete(done: Completion[int], offset: int, reached: int | BrokerError) -> None:
    """Call ``done`` with the offset, or with the error if the durability level was not reached."""
    done(reached if isinstance(reached, BrokerError) else offset)


class Bounds(msgspec.Struct, frozen=True):
    """First and end offset of a partition.

    Attributes:
        next_offset: offset after the last readable record.
        epoch: current leader epoch.
        next_address: byte position after the last readable record, which Kafka 0.7 uses as the offset.
    """

    first_offset: int
    next_offset: int
    epoch: int
    next_address: int


def check_alive(partition: Partition) -> None:
    """Raise Missing(PARTITION_MISSING) if the partition was deleted."""
    if partition.ended:
        raise _missing(partition)


def ask_bounds(log: WriteBatch, partition: Partition, then: Completion[Bounds]) -> None:
    """Call ``then`` with the first and end offset of a partition, once all records between them are synced."""
    check_alive(partition)
    next_offset, next_address = partition.log.next_offset, partition.log.next_address
    log.barrier(Level.SYNCED, partial(_notify, log.epoch, partition, next_offset, next_address, then))


def _notify(
    epoch: int,
    partition: Partition,
    next_offset: int,
    next_address: int,
    then: Completion[Bounds],
    synced: int | BrokerError,
) -> None:
    if isinstance(synced, BrokerError):
        then(synced)
    elif partition.ended:
        then(_missing(partition))
    else:
        then(Bounds(partition.log.first_offset, next_offset, epoch, next_address))


class ManyBounds:
    """Computes the first and end offsets of many partitions, in several passes of the loop and with one sync for all.

    Args:
        then: called once, in a later pass of the loop.
    """

    __slots__ = ("_clock", "_ends", "_found", "_log", "_partitions", "_sliced", "_then")

    def __init__(
        self,
        log: WriteBatch,
        sliced: SlicedWork,
        clock: Clock,
        partitions: Sequence[Partition],
        then: Completion[list[Bounds]],
    ) -> None:
        self._log: Final = log
        self._sliced: Final = sliced
        self._clock: Final = clock
        self._partitions: Final = partitions
        self._then: Final = then
        self._ends: Final[list[tuple[int, int]]] = []
        self._found: Final[list[Bounds]] = []
        sliced.put(self._take_ends)

    def _take_ends(self, end: float) -> bool:
        """Read the end offset of one partition after another until the time ``end``.

        Return whether partitions are left. When all are read, request a sync.
        """
        ends, partitions, now = self._ends, self._partitions, self._clock.monotonic
        while len(ends) < len(partitions):
            partition = partitions[len(ends)]
            if partition.ended:
                self._then(_missing(partition))
                return False
            ends.append((partition.log.next_offset, partition.log.next_address))
            if now() >= end:
                return True
        self._log.barrier(Level.SYNCED, self._synced)
        return False

    def _synced(self, synced: int | BrokerError) -> None:
        if isinstance(synced, BrokerError):
            self._then(synced)
        else:
            self._sliced.put(self._make)

    def _make(self, end: float) -> bool:
        found, partitions, now = self._found, self._partitions, self._clock.monotonic
        while len(found) < len(partitions):
            partition = partitions[len(found)]
            if partition.ended:
                self._then(_missing(partition))
                return False
            next_offset, next_address = self._ends[len(found)]
            found.append(Bounds(partition.log.first_offset, next_offset, self._log.epoch, next_address))
            if now() >= end:
                return True
        self._then(found)
        return False


def _missing(partition: Partition) -> Missing:
    return Missing(ErrorCode.PARTITION_MISSING, f"partition was deleted partition={partition!r}")


class Append(Protocol):
    """Type of ``WriteBatch.append``."""

    def __call__(
        self, partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None
    ) -> None: ...


class RecordVerbs(Protocol):
    """The methods of ``Broker`` that store and read records.

    Attributes:
        appended: number of batches stored so far. A connection compares it before and after it handles data, to detect
            that its client produces.
    """

    __slots__ = ("appended",)

    appended: int
    clock: Clock
    elapsed: ElapsedClock
    sliced: SlicedWork
    _admission: Admission
    _append: Append
    _log: Log
    _plain_bytes_max: int
    _state: State

    def produce(
        self, partition: Partition, batch: Buffer, *, by: Caller = NO_CALLER, level: Level, done: Completion[int] | None
    ) -> None:
        """Append one validated batch.

        ``done`` is called with the offset of its first record once ``level`` is reached. A batch with a producer epoch
        and consecutive sequence numbers is appended only once. For a duplicate, ``done`` is called with the offset of
        the original, or -1 if that is no longer known. If the buffer is writable, the offset is written into it.

        Raises Missing(PARTITION_MISSING), Invalid(INVALID_BATCH, RECORD_TOO_LARGE, SEQUENCE_GAP),
        Conflict(PRODUCER_FENCED), Conflict(TOPIC_LINKED) for the topic of a link, Denied(DENIED) for another user's
        producer, Busy(BUSY, DISK_FULL).
        """
        self.appended += 1
        length: cython.longlong
        columns: cython.longlong
        producer_epoch: cython.longlong
        body_bytes: cython.longlong
        length, _, columns, producer_epoch, body_bytes = admission_fields(batch)
        if (
            (producer_epoch >= 0 and columns & PRODUCER_BIT)
            or body_bytes > self._plain_bytes_max
            or length != len(batch)
            or partition.ended
            or partition.link
        ):
            self._admission.produce(partition, batch, by=by, level=level, done=done)
        else:
            self._append(partition.log, batch, level=level, done=done)

    def fetch(
        self,
        partition: Partition,
        offset: int,
        *,
        bytes_max: int,
        then: Completion[Read],
        offset_end: int | None = None,
    ) -> Read | Handle:
        """Read stored batches, beginning with the one that contains ``offset``.

        Return them if they are in memory. Otherwise return a handle that cancels the read, and call ``then`` later.
        Raises Missing(PARTITION_MISSING, OFFSET_OUT_OF_RANGE).
        """
        if partition.ended:
            check_alive(partition)
        return partition.log.read(offset, bytes_max=bytes_max, then=then, offset_end=offset_end)

    def epoch_end(self, partition: Partition, epoch: int, then: Completion[int]) -> int | Handle:
        """Return the end offset of a leader epoch, or a handle if the offset is passed to ``then`` later.

        For an unknown epoch Missing(OFFSET_OUT_OF_RANGE) is raised or passed to ``then``.
        """
        del then
        return partition.log.epoch_end(epoch)

    def owns(self, partition: Partition) -> bool:
        """Return True, because this process stores all partitions."""
        del partition
        return True

    def when_current(self, partition: Partition, then: Completion[None]) -> Handle | None:
        """Return None, because the offsets of all partitions are always current in a single process."""

    def require_current(self, partitions: Iterable[Partition]) -> None:
        """Do nothing, because the offsets of all partitions are always current in a single process."""

    def locate(
        self,
        partition: Partition,
        offset: int,
        *,
        then: Completion[Located],
        offset_end: int | None = None,
    ) -> Located | Handle:
        """Return the segment files and byte ranges of records, for clients that read the files themselves.

        Records that are still in the journal are not included. If the answer is not in memory, return a handle and call
        ``then`` later. Raises Missing(PARTITION_MISSING, OFFSET_OUT_OF_RANGE).
        """
        check_alive(partition)
        return partition.log.locate(offset, then, offset_end=offset_end)

    def wait(self, partition: Partition, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once, when the record at ``offset`` can be read or the partition was deleted.

        Raises Missing(PARTITION_MISSING).
        """
        check_alive(partition)
        return self._log.wait(partition.log, offset, wake)

    def many_bounds(self, partitions: Sequence[Partition], *, then: Completion[list[Bounds]]) -> None:
        """Call ``then`` with the first and end offsets of many partitions, in their order.

        If a partition was deleted, ``then`` is called with Missing(PARTITION_MISSING).
        """
        ManyBounds(self._log, self.sliced, self.clock, partitions, then)

    def bounds(self, partition: Partition, *, then: Completion[Bounds]) -> None:
        """Call ``then`` with the first and end offset of a partition, once all records between them are synced.

        Raises Missing(PARTITION_MISSING).
        """
        ask_bounds(self._log, partition, then)


class ProducerVerbs(Protocol):
    """The methods of ``Broker`` for idempotent producers."""

    __slots__ = ()

    elapsed: ElapsedClock
    producer_shard: int
    """Number of this shard, which is part of producer ids, so that no two shards assign the same id."""
    _log: Log
    _producer_ids: Iterator[int]
    _state: State

    def new_producer_id(self) -> int:
        """Return a unique producer id of 63 bits, made of the shard number, the number of this start, and a counter."""
        return self.producer_shard << _SHARD_BIT | self._log.epoch << _PRODUCER_COUNT_BITS | next(self._producer_ids)

    def producer_last(self, partition: Partition, producer: bytes) -> tuple[int, int] | None:
        """Return (epoch, last sequence number) of a producer in a partition, or None."""
        return self._state.producers.last(partition.incarnation, producer, now_us=self.elapsed.now_us())

    def producers_of(self, incarnations: Container[int]) -> Iterator[ProducerState | None]:
        """Yield the known producers of some partitions. Also yields None now and then, so that the caller can pause."""
        return self._state.producers.of_partitions(incarnations, now_us=self.elapsed.now_us())

    def producer_sequence(self, partition: Partition, producer: bytes, *, epoch: int, sequence: int) -> int:
        """Convert a sequence number that wraps after 2^31 - 1 to one that does not wrap.

        Of all possible numbers, return the one nearest to the expected number. Raises Invalid(SEQUENCE_GAP) for a new
        epoch that does not start at 0.
        """
        now_us = self.elapsed.now_us()
        return self._state.producers.unwrapped(
            partition.incarnation, producer, epoch=epoch, sequence=sequence, now_us=now_us
        )

    def producer_offset(self, partition: Partition, producer: bytes, *, epoch: int, sequence: int) -> int:
        """Return the offset of a producer's record with this sequence number, -1 if it is no longer known."""
        return self._state.producers.offset_of(partition.incarnation, producer, epoch=epoch, sequence=sequence)
