"""Check a batch before the log assigns its offsets, including the sequences of idempotent producers.

A batch without a producer id costs one field read and a few comparisons. The package ``records`` has already validated
the bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from polywire.broker.owners import Caller, Owners, heir
from polywire.broker.producers import SEQUENCE_MAX, Remembered, settle
from polywire.broker.settings import BrokerSettings
from polywire.broker.state import State, is_tracked
from polywire.broker.topics import Partition
from polywire.clock import ElapsedClock
from polywire.errors import BrokerError, ErrorCode, Invalid, Missing
from polywire.log.base import Completion, WriteBatch
from polywire.records import batch as batches
from polywire.records.columns import HEADER_BYTES, BatchFlags, Column
from polywire.records.fields import header_fields
from polywire.types import Buffer, Level

admission_fields: Final = header_fields("length", "flags", "columns", "body_bytes_raw")
PRODUCER_BIT: Final = 1 << Column.PRODUCER_ID
_producer_fields: Final = header_fields("flags", "columns", "record_count", "producer_epoch", "base_sequence")
_COMPRESSED: Final = BatchFlags.LZ4 | BatchFlags.ZSTD


def producer_identity(batch: Buffer) -> tuple[bytes, int, int, int] | None:
    """Return (producer id, epoch, first sequence, last sequence) of a batch from an idempotent producer, else None.

    Raises Invalid(INVALID_BATCH) if the body is compressed, so that the producer id cannot be read, or if a sequence is
    above ``SEQUENCE_MAX``.
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
    """Checks of batches that ``Broker.produce`` does not append directly."""

    __slots__ = ("_clock", "_log", "_owners", "_settings", "_state")

    def __init__(
        self, log: WriteBatch, state: State, settings: BrokerSettings, clock: ElapsedClock, owners: Owners
    ) -> None:
        self._log = log
        self._state = state
        self._settings = settings
        self._clock = clock
        self._owners = owners

    def check(self, partition: Partition, batch: Buffer) -> None:
        """Refuse a batch that must not be stored.

        Raises Missing(PARTITION_MISSING), Invalid(RECORD_TOO_LARGE), and Invalid(INVALID_BATCH) unless the bytes are
        exactly one batch.
        """
        if partition.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, f"partition was deleted partition={partition!r}")
        size = len(batch)
        if size < HEADER_BYTES:
            raise Invalid(ErrorCode.INVALID_BATCH, f"batch is shorter than its header bytes={size}")
        length, flags, _, body_bytes = admission_fields(batch)
        if length != size:
            raise Invalid(
                ErrorCode.INVALID_BATCH, f"batch does not have the length in its header bytes={size} length={length}"
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
        """Check the sizes of records. Only a body above the record limit can hold a record above it, so few batches are
        scanned.
        """
        longest, limit = batches.longest_payload(batch), self._settings.record_bytes_max
        if longest > limit:
            raise Invalid(ErrorCode.RECORD_TOO_LARGE, f"record is too large bytes={longest} limit={limit}")

    def produce(
        self, partition: Partition, batch: Buffer, *, by: Caller, level: Level, done: Completion[int] | None
    ) -> None:
        """Append a batch that needs more checks than ``RecordVerbs.produce`` makes itself."""
        self.check(partition, batch)
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
            self._answer_again(repeated, base, level, done)
            return
        batch_of_producer = Remembered(base, last)
        self._log.append(partition.log, batch, level=level, done=partial(self._stored, batch_of_producer, done))
        producers.remember(
            partition.incarnation,
            producer,
            epoch=epoch,
            batch=batch_of_producer,
            now_us=now_us,
            owner=heir(owner, by),
        )

    def _answer_again(self, repeated: Remembered, base: int, level: Level, done: Completion[int] | None) -> None:
        """Answer a repeated batch with the offset of the original, once the original has reached ``level``."""
        if repeated.waiting is not None:
            repeated.waiting.append((base, level, done))
        elif done is not None:
            self._log.barrier(level, partial(_complete, done, repeated.offset_of(base)))

    def _stored(self, batch: Remembered, done: Completion[int] | None, offset: int | BrokerError) -> None:
        waiting = settle(batch, offset)
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
    """Call ``done`` when the level is reached, or could not be reached."""
    done(reached if isinstance(reached, BrokerError) else offset)
