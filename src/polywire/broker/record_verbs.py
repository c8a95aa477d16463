"""Operations that store and read records. An ordinary batch goes to the log after one check of its header."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from polywire.broker.fetch import Bounds, ManyBounds, ask_bounds, check_alive
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.produce import PRODUCER_BIT, Admission, admission_fields
from polywire.broker.sliced import SlicedWork
from polywire.broker.state import State
from polywire.broker.topics import Partition
from polywire.clock import Clock, ElapsedClock
from polywire.log.base import Completion, Handle, Located, Log, PartitionLog, Read
from polywire.types import Buffer, Level


class Append(Protocol):
    """``WriteBatch.append`` as an attribute, because looking it up for every batch takes time."""

    def __call__(
        self, partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None
    ) -> None: ...


class RecordVerbs(Protocol):
    """A base of ``Broker``: the verbs use its log and state.

    ``appended``: number of stored and staged batches. A connection compares it to detect that its client produces.
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
        """Append one validated batch; ``done`` gets the offset of its first record once the batch has reached
        ``level``.

        A batch with a producer epoch and consecutive sequences is appended only once. A repeat is answered with the
        offset of the original (-1 if no longer known), once the original has reached ``level``. The offset is written
        into the batch if its buffer is writable. Raises Missing(PARTITION_MISSING), Invalid(INVALID_BATCH,
        RECORD_TOO_LARGE, SEQUENCE_GAP), Conflict(PRODUCER_FENCED), Denied(DENIED) for another user's producer,
        Busy(BUSY, DISK_FULL).
        """
        self.appended += 1
        length, _, columns, body_bytes = admission_fields(batch)
        if columns & PRODUCER_BIT or body_bytes > self._plain_bytes_max or length != len(batch) or partition.ended:
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
        """Read stored batches, beginning with the one that contains ``offset``; see ``PartitionLog.read``.

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
        """Return where sealed records are in files, for callers that may read the files; see ``PartitionLog.locate``.

        Raises Missing(PARTITION_MISSING, OFFSET_OUT_OF_RANGE).
        """
        check_alive(partition)
        return partition.log.locate(offset, then, offset_end=offset_end)

    def wait(self, partition: Partition, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once, when the record at ``offset`` can be read or the partition was deleted.

        Cancelling the returned handle prevents the call. Raises Missing(PARTITION_MISSING).
        """
        check_alive(partition)
        return self._log.wait(partition.log, offset, wake)

    def many_bounds(self, partitions: Sequence[Partition], *, then: Completion[list[Bounds]]) -> None:
        """Call ``then`` with the bounds of many partitions, in order; with Missing(PARTITION_MISSING) if one is
        deleted.
        """
        ManyBounds(self._log, self.sliced, self.clock, partitions, then)

    def bounds(self, partition: Partition, *, then: Completion[Bounds]) -> None:
        """Call ``then`` with the present first and next offset, epoch and next address, once these are synced.

        Raises Missing(PARTITION_MISSING).
        """
        ask_bounds(self._log, partition, then)
