"""Detect duplicates by the sequence numbers of idempotent producers, and of writers that publish staged data.

These rules apply to a batch with a producer id, a producer epoch of 0 or more and consecutive sequences. ``known`` is
the producer's epoch in the partition, and ``first`` to ``last`` are its sequences that were stored there:

    epoch < known          Conflict(PRODUCER_FENCED)
    another user's id      Denied(DENIED)
    epoch > known          accepted if it starts at 0 or 1 (protocols differ), else Invalid(SEQUENCE_GAP)
    unknown producer       accepted with any sequence, because earlier batches may have been forgotten
    starts at last + 1     accepted
    in [first, last]       a duplicate: answered with the original offset, or -1 if that is no longer known
    anything else          Invalid(SEQUENCE_GAP); nothing is known about sequences before ``first``

Kafka's sequences wrap after 2^31 - 1. The Kafka protocol converts them with ``unwrapped``, so that stored sequences
only increase within an epoch. A new epoch starts at 0 again.

* The sequences of producers are computed from batches alone: recovery restores them from a snapshot and replayed batch
  headers.
* Recovery computes the last published numbers of writers from the changes in the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterator, Sequence
from typing import Final

import msgspec

from polywire.broker import changes
from polywire.broker.changes import ProducerState, RememberedState
from polywire.broker.owners import LINKS_CALLER, UNOWNED
from polywire.broker.quotas import WRITER_BYTES, Kind, Usage
from polywire.broker.settings import BrokerSettings
from polywire.broker.view import Views, encoded, one_by_one
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid
from polywire.log.base import Completion
from polywire.types import Level

OFFSET_UNKNOWN = -1
JUST_NOW_US = -1  # the last use of a producer during recovery, until the current time is known
SEQUENCE_MAX: Final = 2**63 - 1  # snapshots store sequences in 64 bits
WRAP: Final = 1 << 31  # sequences of protocols that wrap are below this
LOOKED_AT_ONCE: Final = 500  # number of producers to check before the caller may pause: some 50 µs
FIRST_SEQUENCE_MAX = 1  # the first sequence of a new epoch: 0 in the `polywire` and Kafka protocols, 1 in Cursus


class RecentBatch:
    """A recent batch of an idempotent producer.

    Attributes:
        base: sequence number of its first record.
        last: sequence number of its last record.
        offset: offset of its first record, OFFSET_UNKNOWN until the log has assigned it.
        waiting: duplicates of the batch whose completions wait for its offset. None once the append has completed.
    """

    __slots__ = ("base", "last", "offset", "waiting")

    def __init__(self, base: int, last: int) -> None:
        self.base = base
        self.last = last
        self.offset = OFFSET_UNKNOWN
        self.waiting: list[tuple[int, Level, Completion[int] | None]] | None = []

    def offset_of(self, sequence: int) -> int:
        """Return the offset of the record with this sequence number, or OFFSET_UNKNOWN."""
        return OFFSET_UNKNOWN if self.offset == OFFSET_UNKNOWN else self.offset + sequence - self.base


class _Producer:
    """One idempotent producer in one partition.

    Attributes:
        first: first sequence number that was accepted in this epoch, as far as known.
        last: last sequence number that was accepted.
        window: its latest batches.
    """

    __slots__ = ("epoch", "first", "last", "owner", "seen_at_us", "window")

    def __init__(self, epoch: int, first: int, seen_at_us: int, window: int, owner: int) -> None:
        self.epoch = epoch
        self.owner = owner
        self.first = first
        self.last = first - 1
        self.seen_at_us = seen_at_us
        self.window: deque[RecentBatch] = deque(maxlen=window)

    def assign_offset(self, batch: RecentBatch, epoch: int) -> None:
        """Record the offset of a batch, if the batch is still in ``window``."""
        for remembered in self.window:
            if remembered.base == batch.base and epoch == self.epoch:
                remembered.offset = batch.offset


class Producers:
    """All known idempotent producers, at most ``producers_max``, least recently used first.

    A user with more producers than its quota evicts its own producers, never those of others.
    """

    __slots__ = ("_by_key", "_owned", "_settings", "_share", "_views")

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._by_key: dict[tuple[int, bytes], _Producer] = {}
        self._views: Final = Views(self._stored)
        # producers of each owner, in the same order
        self._owned: dict[int, dict[tuple[int, bytes], None]] = {}
        self._share = max(int(settings.producers_max * settings.owner_share), 1)

    def __len__(self) -> int:
        return len(self._by_key)

    def find(
        self, incarnation: int, producer: bytes, *, epoch: int, base: int, last: int, now_us: int
    ) -> RecentBatch | None:
        """Return the batch of which this one is a duplicate, or None if it is new.

        Raises Conflict(PRODUCER_FENCED), Invalid(SEQUENCE_GAP).
        """
        known = self._living((incarnation, producer), now_us)
        if known is None:
            return None
        if epoch > known.epoch:
            if base > FIRST_SEQUENCE_MAX:
                raise Invalid(
                    ErrorCode.SEQUENCE_GAP,
                    f"the first sequence of a new producer epoch must be 0 producer={producer!r} epoch={epoch} got={base}",
                )
            return None
        if epoch < known.epoch:
            raise Conflict(
                ErrorCode.PRODUCER_FENCED,
                f"producer epoch is old producer={producer!r} current={known.epoch} got={epoch}",
            )
        if base == known.last + 1:
            return None
        if base < known.first or last > known.last:
            raise Invalid(
                ErrorCode.SEQUENCE_GAP,
                f"producer sequence is out of order producer={producer!r} expected={known.last + 1} got={base}",
            )
        for remembered in reversed(known.window):
            if remembered.base <= base and last <= remembered.last:
                return remembered
        return batch_with_offset(base, last, OFFSET_UNKNOWN)

    def unwrapped(self, incarnation: int, producer: bytes, *, epoch: int, sequence: int, now_us: int) -> int:
        """Return the full sequence number for one that wraps at WRAP: the candidate nearest to the expected number.

        Raises Invalid(SEQUENCE_GAP) for a new epoch that does not start at 0.
        """
        known = self._living((incarnation, producer), now_us)
        if known is None or epoch < known.epoch:
            return sequence
        if epoch > known.epoch:
            if sequence:
                raise Invalid(
                    ErrorCode.SEQUENCE_GAP,
                    f"the first sequence of a new producer epoch must be 0 producer={producer!r} epoch={epoch} got={sequence}",
                )
            return 0
        laps = (known.last + 1 - sequence + WRAP // 2) // WRAP
        return sequence + max(laps, 0) * WRAP

    def of_partitions(self, incarnations: Container[int], *, now_us: int) -> Iterator[ProducerState | None]:
        """Yield the known producers of some partitions. Also yields None now and then, so that the caller can pause."""
        for number, key in enumerate(list(self._by_key)):
            if not number % LOOKED_AT_ONCE:
                yield None
            if key[0] in incarnations and self._living(key, now_us) is not None:
                yield from self._stored(key)

    def owner(self, incarnation: int, producer: bytes) -> int:
        """Return the owner against whose quota a producer counts.

        It is UNOWNED for unknown producers, and for producers that recovery has restored from batches.
        """
        known = self._by_key.get((incarnation, producer))
        return UNOWNED if known is None else known.owner

    def last(self, incarnation: int, producer: bytes, *, now_us: int) -> tuple[int, int] | None:
        """Return (epoch, last sequence number) of a producer in a partition, or None."""
        known = self._living((incarnation, producer), now_us)
        return None if known is None else (known.epoch, known.last)

    def offset_of(self, incarnation: int, producer: bytes, *, epoch: int, sequence: int) -> int:
        """Return the offset of one of a producer's latest records, or OFFSET_UNKNOWN."""
        known = self._by_key.get((incarnation, producer))
        if known is None or known.epoch != epoch:
            return OFFSET_UNKNOWN
        found = (batch for batch in reversed(known.window) if batch.base <= sequence <= batch.last)
        return next((batch.offset_of(sequence) for batch in found), OFFSET_UNKNOWN)

    def _living(self, key: tuple[int, bytes], now_us: int) -> _Producer | None:
        known = self._by_key.get(key)
        return known if known is not None and now_us - known.seen_at_us <= self._settings.producer_expiry_us else None

    def remember(
        self, incarnation: int, producer: bytes, *, epoch: int, batch: RecentBatch, now_us: int, owner: int = UNOWNED
    ) -> None:
        """Add a new batch of a producer."""
        key = (incarnation, producer)
        known = self._remove(key)
        if known is None or epoch != known.epoch or batch.base != known.last + 1:
            owner = owner or (UNOWNED if known is None else known.owner)
            known = _Producer(epoch, batch.base, now_us, self._settings.producer_window, owner)
        known.owner = owner or known.owner
        known.last = batch.last
        known.seen_at_us = now_us
        known.window.append(batch)
        self._insert(key, known)

    def replayed(self, incarnation: int, producer: bytes, *, epoch: int, batch: RecentBatch) -> None:
        """Apply a batch during recovery. If the snapshot contains the batch, only its offset is recorded.

        Gaps in the sequence numbers are accepted: the batch was replayed before, or the producer had been evicted and
        this is its first batch since.
        """
        known = self._by_key.get((incarnation, producer))
        if known is not None and (epoch, batch.last) <= (known.epoch, known.last):
            newest = known.window[-1].offset if known.window else OFFSET_UNKNOWN
            if newest == OFFSET_UNKNOWN or batch.offset <= newest:
                known.assign_offset(batch, epoch)
                return
        self.remember(incarnation, producer, epoch=epoch, batch=batch, now_us=JUST_NOW_US)

    @property
    def latest_us(self) -> int:
        """Time of the last use of any producer, 0 if there is none."""
        return max((known.seen_at_us for known in self._by_key.values()), default=0)

    def begin(self, now_us: int) -> None:
        """End the recovery. For expiry, restored producers count as used now."""
        for known in self._by_key.values():
            if known.seen_at_us == JUST_NOW_US:
                known.seen_at_us = now_us

    def drop_partitions(self, incarnations: Collection[int]) -> None:
        if incarnations:
            gone = [key for key in self._by_key if key[0] in incarnations]
            for key in gone:
                self._remove(key)

    def _insert(self, key: tuple[int, bytes], producer: _Producer) -> None:
        self._by_key[key] = producer
        own = self._owned.setdefault(producer.owner, {})
        own[key] = None
        if producer.owner != UNOWNED and len(own) > self._share:
            self._remove(next(iter(own)))
        elif len(self._by_key) > self._settings.producers_max:
            self._remove(next(iter(self._by_key)))

    def _remove(self, key: tuple[int, bytes]) -> _Producer | None:
        self._views.changing(key)
        producer = self._by_key.pop(key, None)
        if producer is not None:
            own = self._owned[producer.owner]
            del own[key]
            if not own:
                del self._owned[producer.owner]
        return producer

    def encoded(self) -> Iterator[bytes]:
        """Yield all producers as they are at the time of the call, least recently used first, encoded in pieces.

        Offsets that are assigned during the iteration may be included.
        """
        found = self._views.open(list(self._by_key))
        return encoded(len(self._by_key), found, lambda producer: len(producer.window))

    def _stored(self, key: tuple[int, bytes]) -> Sequence[ProducerState]:
        known = self._by_key.get(key)
        if known is None:
            return ()
        return (
            ProducerState(
                incarnation=key[0],
                id=key[1],
                epoch=known.epoch,
                first=known.first,
                last=known.last,
                seen_at_us=known.seen_at_us,
                window=tuple([RememberedState(batch.base, batch.last, batch.offset) for batch in known.window]),
                owner=known.owner,
            ),
        )

    def restore(self, states: Collection[ProducerState]) -> None:
        for state in states:
            known = _Producer(state.epoch, state.first, state.seen_at_us, self._settings.producer_window, state.owner)
            known.last = state.last
            known.window.extend(batch_with_offset(item.base, item.last, item.offset) for item in state.window)
            self._insert((state.incarnation, state.id), known)


def batch_with_offset(base: int, last: int, offset: int) -> RecentBatch:
    """Return a batch whose offset is known, for recovery."""
    batch = RecentBatch(base, last)
    batch.offset = offset
    batch.waiting = None
    return batch


def finish_append(batch: RecentBatch, offset: int | BrokerError) -> list[tuple[int, Level, Completion[int] | None]]:
    """Set the offset of a batch after its append, or record that the append failed.

    Return the duplicates that waited for the append, as (first sequence number, level, done).
    """
    if not isinstance(offset, BrokerError):
        batch.offset = offset
    waiting = batch.waiting or []
    batch.waiting = None
    return waiting


class PublishDedup:
    """The last published sequence number of each writer, least recently used first.

    A writer is dropped only after it was unused for ``writer_expiry_us``, counting only time in which the broker runs.
    Writers of links are never dropped.
    """

    __slots__ = ("_by_name", "_settings", "_usage")

    def __init__(self, settings: BrokerSettings, usage: Usage) -> None:
        self._settings = settings
        self._usage = usage
        self._by_name: dict[str, changes.Published] = {}

    def last(self, writer: str) -> int | None:
        known = self._by_name.get(writer)
        return None if known is None else known.number

    def owner(self, writer: str) -> int:
        known = self._by_name.get(writer)
        return UNOWNED if known is None else known.owner

    def __iter__(self) -> Iterator[changes.Published]:
        return iter(self._by_name.values())

    def find(self, writer: str) -> changes.Published | None:
        return self._by_name.get(writer)

    def apply(self, change: changes.Published) -> None:
        """Record a publish, and drop writers that were unused for too long."""
        self.forget(change.writer)
        self._by_name[change.writer] = msgspec.structs.replace(change, positions=())
        self._charge(change, 1)
        self.forget_idle(change.at_us)

    def forget_idle(self, now_us: int) -> None:
        while self._by_name:
            oldest = next(iter(self._by_name.values()))
            if now_us - oldest.at_us <= self._settings.writer_expiry_us:
                return
            self.forget(oldest.writer)
            if oldest.owner == LINKS_CALLER.owner:  # holds the position of a link; never dropped
                self._by_name[oldest.writer] = msgspec.structs.replace(oldest, at_us=now_us)
                self._charge(oldest, 1)

    def forget(self, writer: str) -> None:
        """Drop a writer. Its next publish may have any sequence number."""
        known = self._by_name.pop(writer, None)
        if known is not None:
            self._charge(known, -1)

    def _charge(self, known: changes.Published, count: int) -> None:
        self._usage.charge(Kind.WRITERS, known.owner, count, count * size_of(known.writer))

    @property
    def latest_us(self) -> int:
        """Time of the last publish, 0 if there was none."""
        return max((known.at_us for known in self._by_name.values()), default=0)

    def encoded(self) -> Iterator[bytes]:
        """Yield all writers as they are at the time of the call, least recently used first, encoded in pieces."""
        return one_by_one(list(self._by_name.values()))


def size_of(writer: str) -> int:
    """Return the bytes that a writer counts against its owner's quota."""
    return WRITER_BYTES + len(writer)
