"""A log in memory, for tests and ``memory://``.

* It implements all of ``log.base.Log``: write batches, durability levels, staging and recovery.
* A sync happens one pass of the loop after its commit, so that ``written`` and ``synced`` differ.
* ``reopen`` returns the log that a restarted broker would have.
* It does not merge small batches, and never frees the memory of deleted records.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final, assert_never

from polywire.clock import Clock, ElapsedClock
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid, Missing, Unavailable
from polywire.log.base import (
    NO_OFFSET,
    Completion,
    Handle,
    Located,
    Loop,
    Need,
    PartitionLog,
    Pressure,
    Publication,
    Ranges,
    Read,
    Replay,
)
from polywire.records import batch as batches
from polywire.records.columns import BatchHeader, Column
from polywire.records.compression import Compression, expand_body
from polywire.types import Buffer, Level

GROUP_BYTES_MAX: Final = 16 * 1024 * 1024  # decision 0102


class NoPin:
    """Implements ``Pin`` for batches in memory, which are never overwritten."""

    __slots__ = ()

    def release(self) -> None:
        pass


@dataclass(eq=False, slots=True)
class Wait:
    """A caller that waits for the record at ``offset``. Implements ``Handle``."""

    partition: MemoryPartition
    offset: int
    wake: Callable[[], None]

    def cancel(self) -> None:
        self.partition.wakes.pop(self, None)


class MemoryPartition:
    """A partition in memory. Implements ``PartitionLog``.

    ``headers`` and ``bodies`` have the same batches, in ascending order and without gaps. The first one contains
    ``first_offset``.
    """

    __slots__ = (
        "_current_epoch",
        "_hides_unsynced",
        "bodies",
        "compression",
        "ended",
        "first_offset",
        "headers",
        "incarnation",
        "last_append_time_us",
        "next_address",
        "next_offset",
        "synced_offset",
        "wakes",
    )

    def __init__(self, incarnation: int, *, epoch: int, hides_unsynced: bool) -> None:
        self.incarnation = incarnation
        self.first_offset = 0
        self.next_offset = 0
        self.synced_offset = 0
        self.compression: Compression | None = None
        self.next_address = 0
        self.last_append_time_us = 0
        self.headers: list[BatchHeader] = []
        self.bodies: list[bytes] = []
        self.wakes: dict[Wait, None] = {}
        self.ended = False
        self._current_epoch = epoch
        self._hides_unsynced = hides_unsynced

    @property
    def readable_offset(self) -> int:
        """Offset after the last record that consumers may read."""
        return self.synced_offset if self._hides_unsynced else self.next_offset

    @property
    def stored_bytes(self) -> int:
        return sum(header.length for header in self.headers)

    def add(self, batch: bytes) -> None:
        """Append a batch that has its offsets."""
        header = batches.read_header(batch)
        assert header.base_offset == self.next_offset, "batches follow each other without gaps"
        self.headers.append(header)
        self.bodies.append(batch)
        self.next_offset = header.next_offset
        self.next_address = header.base_address + header.address_span
        self.last_append_time_us = header.append_time_us

    def begin(self, offset: int) -> None:
        self.next_offset = max(self.next_offset, offset)
        self.trim(self.next_offset)

    def trim(self, first_offset: int) -> None:
        """Drop the batches whose records are all below ``first_offset``."""
        self.first_offset = max(self.first_offset, min(first_offset, self.next_offset))
        count = bisect_right(self.headers, self.first_offset, key=lambda header: header.next_offset)
        del self.headers[:count]
        del self.bodies[:count]

    def read(
        self,
        offset: int,
        *,
        bytes_max: int,
        then: Completion[Read],
        offset_end: int | None = None,
    ) -> Read:
        """Return the batches from the one that contains ``offset`` on. ``then`` is never called."""
        self._check_range(offset)
        chunks: list[memoryview] = []
        size = 0
        next_offset = offset
        readable = self.readable_offset
        for index in range(self._index(offset), len(self.headers)):
            header = self.headers[index]
            past_end = offset_end is not None and header.base_offset >= offset_end
            if past_end or header.next_offset > readable or (chunks and size + header.length > bytes_max):
                break
            chunks.append(memoryview(self.bodies[index]))
            size += header.length
            next_offset = header.next_offset
        return Read(chunks, next_offset, readable, NoPin())

    def _check_range(self, offset: int) -> None:
        if not self.first_offset <= offset <= self.next_offset:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset is out of range offset={offset} first={self.first_offset} next={self.next_offset}",
            )

    def _index(self, offset: int) -> int:
        return bisect_right(self.headers, offset, key=lambda header: header.next_offset)

    def locate(self, offset: int, then: Completion[Located], *, offset_end: int | None = None) -> Located:
        """Return no location, because a log in memory has no files."""
        self._check_range(offset)
        return Located(None, (), more=False)

    def offset_at(self, time_us: int, then: Completion[int]) -> int:
        """Return the first offset appended at or after ``time_us``."""
        index = bisect_left(self.headers, time_us, key=lambda header: header.append_time_us)
        return (
            max(self.first_offset, self.headers[index].base_offset) if index < len(self.headers) else self.next_offset
        )

    def offset_of_address(self, address: int, then: Completion[int], *, covering: bool = False) -> int:
        """Return the offset of the record at a byte position, its offset in Kafka 0.7. ``then`` is never called."""
        if address == self.next_address:
            return self.next_offset
        index = bisect_right(self.headers, address, key=lambda header: header.base_address) - 1
        if index < 0 or address > self.next_address:
            return NO_OFFSET
        body = expand_body(self.bodies[index])
        record = batches.record_at_address(body, address, covering=covering)
        return NO_OFFSET if record < 0 else batches.offset_of(body, record)

    def address_of_offset(self, offset: int, then: Completion[int]) -> int:
        """Return the byte position of a record, its offset in Kafka 0.7.

        For the end offset, return ``next_address``.
        """
        if offset == self.next_offset:
            return self.next_address
        if not self.first_offset <= offset < self.next_offset:
            raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset is out of range offset={offset}")
        body = expand_body(self.bodies[self._index(offset)])
        return batches.address_of(body, batches.record_at_offset(body, offset))

    def epoch_end(self, epoch: int) -> int:
        """Return the end offset of a leader epoch."""
        if not 1 <= epoch <= self._current_epoch:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"the partition has no such epoch epoch={epoch} current={self._current_epoch}",
            )
        if epoch == self._current_epoch:
            return self.readable_offset
        index = bisect_right(self.headers, epoch, key=lambda header: header.epoch)
        return self.headers[index].base_offset if index < len(self.headers) else self.next_offset

    def epoch_at(self, offset: int) -> int:
        """Return the leader epoch of the record at this offset. For ``next_offset``, return the current epoch."""
        self._check_range(offset)
        return self._current_epoch if offset == self.next_offset else self.headers[self._index(offset)].epoch

    def retention_offset(self, *, age_us_max: int | None, bytes_max: int | None, now_us: int) -> int:
        """Return the first offset that these limits retain."""
        index = 0
        if age_us_max is not None:
            index = bisect_left(self.headers, now_us - age_us_max, key=lambda header: header.append_time_us)
        if bytes_max is not None:
            size = sum(header.length for header in self.headers[index:])
            while index < len(self.headers) and size > bytes_max:
                size -= self.headers[index].length
                index += 1
        retained_from = self.headers[index].base_offset if index < len(self.headers) else self.next_offset
        return max(self.first_offset, retained_from)


class _Kind(Enum):
    BATCH = auto()
    PUBLISH = auto()
    CHANGE = auto()
    OPEN = auto()
    DROP = auto()
    TRIM = auto()
    BEGIN = auto()
    BARRIER = auto()


@dataclass(slots=True)
class _Entry:
    """An append, change or other addition that ``commit`` writes.

    Attributes:
        parts: pairs of incarnation and batch, whose offsets the commit assigns.
        staged: a token, its unpublished batch and the batch's expiry time.
        taken: tokens that were published or dropped.
    """

    kind: _Kind
    incarnation: int = 0
    argument: int = 0
    change: bytes = b""
    parts: list[tuple[int, bytes]] = field(default_factory=list)
    level: Level = Level.MEMORY
    done: Completion[None] | None = None
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    staged: tuple[bytes, tuple[int, bytes], int] | None = None
    taken: Sequence[bytes] = ()

    @property
    def size(self) -> int:
        return len(self.change) + sum(len(batch) for _, batch in self.parts)


@dataclass(slots=True)
class _Staged:
    parts: list[tuple[int, bytes]]
    expires_at_us: int
    claimed: bool = False


class MemoryPublication:
    """A publish that is being prepared. Implements ``Publication``."""

    def __init__(self, find: Callable[[bytes], _Staged]) -> None:
        self._find = find
        self.tokens: Final[list[bytes]] = []
        self.staged: Final[list[_Staged]] = []

    @property
    def incarnations(self) -> Collection[int]:
        return {incarnation for staged in self.staged for incarnation, _ in staged.parts}

    def add(self, tokens: Sequence[bytes]) -> Iterator[None]:
        for token in tokens:
            staged = self._find(token)
            staged.claimed = True
            self.tokens.append(token)
            self.staged.append(staged)
            yield

    def cancel(self) -> None:
        for staged in self.staged:
            staged.claimed = False


class MemoryLog:
    """A log in memory. Implements ``Log``."""

    def __init__(
        self, loop: Loop, clock: Clock, replay: Replay, *, floor: Level = Level.WRITTEN, epoch: int = 1
    ) -> None:
        """``floor`` is the lowest durability level at which appends and changes are acknowledged."""
        self.epoch: Final = epoch
        self.disk_full = False
        """If a test sets this, appends and changes raise Busy(DISK_FULL)."""
        self.crowded = False
        """If a test sets this, the log is congested."""
        self.appended = 0
        """Number of requests to append records so far."""
        self._on_relief: list[Callable[[], None]] = []
        self._loop = loop
        self._clock = clock
        self._replay = replay
        self._floor = floor
        self._partitions: dict[int, MemoryPartition] = {}
        self._staged: dict[bytes, _Staged] = {}
        self._elapsed: ElapsedClock | None = None
        self._write_batch: list[_Entry] = []
        self._scheduled = False
        self._groups: list[list[_Entry]] = []  # all committed groups, in order
        self._synced = 0  # number of groups that survive a power loss
        self._written: list[Completion[None]] = []
        self._waiting_sync: list[Completion[None]] = []
        self._sync_scheduled = False
        self._snapshot: tuple[bytes, int] | None = None
        self._failure: BrokerError | None = None
        self._closed = False
        self._killed = False

    @property
    def group_count(self) -> int:
        return len(self._groups)

    @property
    def congested(self) -> bool:
        """Whether producers must wait; False unless a test sets ``crowded``."""
        return self.crowded

    @property
    def pressure(self) -> Pressure:
        return self

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Register a callback for the end of the congestion.

        After a test resets ``crowded``, it must call ``relieve``.
        """
        self._on_relief.append(callback)
        if not self.crowded:
            self.relieve()

    def relieve(self) -> None:
        """Call the registered callbacks, because the log is no longer congested."""
        self.crowded = False
        callbacks, self._on_relief = self._on_relief, []
        for callback in callbacks:
            self._loop.call_soon(callback)

    # Partitions

    def partition(self, incarnation: int) -> MemoryPartition:
        found = self._partitions.get(incarnation)
        if found is None or found.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition incarnation={incarnation}")
        return found

    def incarnations(self) -> Sequence[int]:
        return [incarnation for incarnation, partition in self._partitions.items() if not partition.ended]

    def open_partition(self, incarnation: int) -> MemoryPartition:
        opened = self._open(incarnation)
        self._add(_Entry(_Kind.OPEN, incarnation))
        return opened

    def _open(self, incarnation: int) -> MemoryPartition:
        assert incarnation not in self._partitions, "incarnations are never used again"
        opened = MemoryPartition(incarnation, epoch=self.epoch, hides_unsynced=self._floor >= Level.SYNCED)
        self._partitions[incarnation] = opened
        return opened

    def drop_partition(self, incarnation: int) -> None:
        self.partition(incarnation)
        self._add(_Entry(_Kind.DROP, incarnation))

    def trim(self, incarnation: int, first_offset: int) -> None:
        self.partition(incarnation)
        self._add(_Entry(_Kind.TRIM, incarnation, first_offset))

    def begin(self, incarnation: int, offset: int) -> None:
        self.partition(incarnation)
        self._add(_Entry(_Kind.BEGIN, incarnation, offset))

    def compact(self, incarnation: int, *, null_age_us: int) -> None:
        """Do nothing, because a log in memory has no segments."""
        self.partition(incarnation)

    # Additions

    def reserve(self, size: int, *, need: Need = Need.DATA) -> None:
        self._check_open()
        if size > GROUP_BYTES_MAX:
            raise Invalid(
                ErrorCode.RECORD_TOO_LARGE, f"journal group is too large bytes={size} limit={GROUP_BYTES_MAX}"
            )
        if size + sum(entry.size for entry in self._write_batch) > GROUP_BYTES_MAX:
            self.write()

    def append(self, partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None) -> None:
        entry = _Entry(_Kind.BATCH, parts=[(partition.incarnation, bytes(batch))], level=level)
        if done is not None:
            entry.done = partial(_complete_append, entry, done)
        self._add(entry)

    def change(self, change: bytes, *, level: Level, done: Completion[int] | None) -> None:
        self._add(_Entry(_Kind.CHANGE, change=change, level=level, done=_without_offset(done)))

    def barrier(self, level: Level, done: Completion[int]) -> None:
        self._add(_Entry(_Kind.BARRIER, level=level, done=_without_offset(done)))

    def stage(
        self,
        token: bytes,
        partition: PartitionLog,
        batch: Buffer,
        *,
        expires_at_us: int,
        level: Level,
        done: Completion[int] | None,
    ) -> None:
        if token in self._staged and self._staged[token].claimed:
            raise Missing(
                ErrorCode.STAGE_MISSING, f"the token is being published, nothing more can be staged token={token.hex()}"
            )
        entry = _Entry(_Kind.BARRIER, level=level, done=_without_offset(done))
        entry.staged = token, (partition.incarnation, bytes(batch)), expires_at_us
        self._add(entry)
        self._hold(*entry.staged)

    def _hold(self, token: bytes, part: tuple[int, bytes], expires_at_us: int) -> None:
        staged = self._staged.setdefault(token, _Staged([], expires_at_us))
        staged.expires_at_us = max(staged.expires_at_us, expires_at_us)
        staged.parts.append(part)

    def expire_by(self, clock: ElapsedClock, *, age_us_max: int) -> None:
        """Do nothing, because there are no unpublished batches from an earlier start."""
        self._elapsed = clock

    def staged_partitions(self, tokens: Sequence[bytes]) -> Collection[int]:
        return {incarnation for token in tokens for incarnation, _ in self._find_staged(token).parts}

    def prepare(self) -> MemoryPublication:
        return MemoryPublication(self._find_staged)

    def publish(
        self, tokens: Sequence[bytes] | Publication, change: bytes, *, level: Level, done: Completion[Ranges]
    ) -> None:
        publication = None if isinstance(tokens, Sequence) else tokens
        if isinstance(publication, MemoryPublication):
            tokens = publication.tokens
            parts = [part for staged in publication.staged for part in staged.parts]
        else:
            assert isinstance(tokens, Sequence), "a publication of this log"
            parts = [part for token in tokens for part in self._find_staged(token).parts]
        entry = _Entry(_Kind.PUBLISH, change=change, parts=parts, level=level, taken=tuple(tokens))
        entry.done = lambda error: done(error or entry.ranges)
        try:
            self._add(entry)
        except BrokerError:
            if publication is not None:
                publication.cancel()
            raise
        for token in tokens:
            self._staged.pop(token, None)

    def abandon(self, tokens: Sequence[bytes]) -> None:
        taken = [token for token in tokens if token in self._staged and not self._staged[token].claimed]
        for token in taken:
            del self._staged[token]
        if taken and not self._killed:
            self._put(_Entry(_Kind.BARRIER, taken=taken))

    def _find_staged(self, token: bytes) -> _Staged:
        staged = self._staged.get(token)
        if (
            staged is None
            or staged.claimed
            or (self._elapsed is not None and staged.expires_at_us <= self._elapsed.now_us())
        ):
            raise Missing(ErrorCode.STAGE_MISSING, f"no such staged batches token={token.hex()}")
        return staged

    def _add(self, entry: _Entry) -> None:
        if self._killed:
            return
        self._check_open()
        if self.disk_full:
            raise Busy(ErrorCode.DISK_FULL, "disk is full", retry_after_ms=1000)
        self._put(entry)

    def _put(self, entry: _Entry) -> None:
        self._write_batch.append(entry)
        self.appended += bool(entry.parts)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._commit_scheduled)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Unavailable(ErrorCode.STOPPING, "log is closed")

    # The write batch

    def _commit_scheduled(self) -> None:
        self._scheduled = False
        self.commit()

    @property
    def uncommitted(self) -> bool:
        return bool(self._write_batch)

    def hold(self, holding: bool, /) -> None:
        """Do nothing, because scheduled commits can stay."""

    def write(self) -> None:
        """Append all pending batches and apply all pending changes. Their completions are called later."""
        write_batch, self._write_batch = self._write_batch, []
        if not write_batch or self._failure is not None:
            return
        for entry in write_batch:
            self._number(entry)
            self._make_true(entry)
        self._groups.append(write_batch)
        for entry in write_batch:
            if entry.done is not None and max(entry.level, self._floor) >= Level.SYNCED:
                self._waiting_sync.append(entry.done)
                self._schedule_sync()
            elif entry.done is not None:
                self._written.append(entry.done)
        if self._floor >= Level.SYNCED:
            self._schedule_sync()
        self._wake()

    def commit(self) -> None:
        """Append all pending batches, apply all pending changes, and call their completions."""
        self.write()
        written, self._written = self._written, []
        for done in written:
            done(None)

    def _schedule_sync(self) -> None:
        if not self._sync_scheduled:
            self._sync_scheduled = True
            self._loop.call_soon(self._sync)

    def _sync(self) -> None:
        self._sync_scheduled = False
        if self._failure is not None:
            return
        self._synced = len(self._groups)
        for partition in self._partitions.values():
            partition.synced_offset = partition.next_offset
        waiting, self._waiting_sync = self._waiting_sync, []
        for done in waiting:
            done(None)
        self._wake()

    def _number(self, entry: _Entry) -> None:
        """Assign offsets to the batches of an entry. They begin at the end of each partition."""
        after: dict[int, tuple[int, int]] = {}
        first: dict[int, int] = {}
        numbered = []
        for incarnation, batch in entry.parts:
            partition = self._partitions[incarnation]
            if partition.ended:
                continue
            offset, address = after.get(incarnation, (partition.next_offset, partition.next_address))
            first.setdefault(incarnation, offset)
            copy = bytearray(batch)
            time_us = max(self._clock.now_us(), partition.last_append_time_us)
            batches.stamp(copy, 0, incarnation, self.epoch, offset, address, time_us)
            header = batches.read_header(copy)
            after[incarnation] = (header.next_offset, address + header.address_span)
            numbered.append((incarnation, bytes(copy)))
        entry.parts = numbered
        entry.ranges = [(incarnation, first[incarnation], after[incarnation][0]) for incarnation in first]

    def _make_true(self, entry: _Entry) -> None:
        match entry.kind:
            case _Kind.BATCH | _Kind.PUBLISH:
                for incarnation, batch in entry.parts:
                    self._partitions[incarnation].add(batch)
            case _Kind.DROP:
                self._partitions[entry.incarnation].ended = True
            case _Kind.TRIM:
                self._partitions[entry.incarnation].trim(entry.argument)
            case _Kind.BEGIN:
                self._partitions[entry.incarnation].begin(entry.argument)
            case _Kind.CHANGE | _Kind.OPEN | _Kind.BARRIER:
                pass
            case _:
                assert_never(entry.kind)

    # Waiting

    def wait(self, partition: PartitionLog, offset: int, wake: Callable[[], None]) -> Handle:
        waited = self.partition(partition.incarnation)
        wait = Wait(waited, offset, wake)
        waited.wakes[wait] = None
        self._loop.call_soon(self._wake_partition, waited)
        return wait

    def _wake(self) -> None:
        for partition in self._partitions.values():
            if partition.wakes:
                self._loop.call_soon(self._wake_partition, partition)

    def _wake_partition(self, partition: MemoryPartition) -> None:
        for wait in list(partition.wakes):
            if (partition.ended or partition.readable_offset > wait.offset) and wait in partition.wakes:
                del partition.wakes[wait]
                wait.wake()

    # Closing and recovery

    def close(self) -> None:
        """Commit, and call all remaining completions."""
        if not self._closed:
            self.commit()
            self._sync()
            self._closed = True

    def fail(self, error: BrokerError | None = None) -> None:
        """Simulate a disk failure, or another error after which the log acknowledges nothing."""
        self._failure = error or Unavailable(ErrorCode.STORAGE_FAILED, "storage failed")
        waiting = [*self._waiting_sync, *(entry.done for entry in self._write_batch if entry.done is not None)]
        self._waiting_sync, self._write_batch = [], []
        for done in waiting:
            done(self._failure)

    def take_snapshot(self) -> None:
        """Take a snapshot of the current state, from which a recovery will begin."""
        self.commit()
        self._snapshot = (self._replay.snapshot(), len(self._groups))

    def state(self) -> bytes:
        """Return the broker's state after all pending changes, encoded as in a snapshot."""
        self.commit()
        return self._replay.snapshot()

    def reopen(self, replay: Replay, *, synced_only: bool = False) -> MemoryLog:
        """Return the log of a broker that restarts after a crash, or with ``synced_only`` after a power loss.

        This log must not be used any more. It calls no callbacks, and what the old broker still appends is lost.
        """
        self._killed = True
        self._write_batch, self._waiting_sync, self._written = [], [], []
        again = MemoryLog(self._loop, self._clock, replay, floor=self._floor, epoch=self.epoch + 1)
        groups = self._groups[: self._synced] if synced_only else list(self._groups)
        skipped = 0
        if self._snapshot is not None and self._snapshot[1] <= len(groups):
            replay.restore(self._snapshot[0])
            skipped = self._snapshot[1]
            again._snapshot = self._snapshot
        for number, group in enumerate(groups):
            for entry in group:
                again._recover(entry, in_snapshot=number < skipped)
        again._groups = groups
        again._synced = len(groups)
        return again

    def _recover(self, entry: _Entry, *, in_snapshot: bool) -> None:
        if entry.kind is _Kind.OPEN:
            self._open(entry.incarnation)
        self._make_true(entry)
        if entry.staged is not None:
            self._hold(*entry.staged)
        for token in entry.taken:
            self._staged.pop(token, None)
        for incarnation, batch in entry.parts:
            self._partitions[incarnation].synced_offset = self._partitions[incarnation].next_offset
            header = batches.read_header(batch)
            if not in_snapshot and header.columns >> Column.PRODUCER_ID & 1:
                self._replay.replayed(header, _producer_of(batch, header))
        if entry.change and not in_snapshot:
            self._replay.apply(entry.change)


def _producer_of(batch: bytes, header: BatchHeader) -> bytes:
    positions = batches.layout(batch)
    at, size = positions[2 * Column.PRODUCER_ID], positions[2 * Column.PRODUCER_ID + 1]
    assert header.columns >> Column.PRODUCER_ID & 1
    return batch[at : at + size]


def _complete_append(entry: _Entry, done: Completion[int], failed: BrokerError | None) -> None:
    done(failed or (entry.ranges[0][1] if entry.ranges else NO_OFFSET))


def _without_offset(done: Completion[int] | None) -> Completion[None] | None:
    return None if done is None else lambda failed: done(failed or NO_OFFSET)
