"""Append and read the events of aggregates (event sourcing), and their snapshots (decision 0110).

The events of an aggregate have the versions 1, 2, 3 without gaps (concepts: records#event-fields). The broker checks
the expected version, assigns the version and stores the event's offset in one atomic journal write. Reads find events
by these offsets, without scanning the partition.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

from polywire.broker import changes
from polywire.broker.aggregates import aggregate_size, snapshot_size
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.quotas import EVENT_BYTES, Kind
from polywire.broker.record_verbs import Admission
from polywire.broker.settings import BrokerSettings
from polywire.broker.state import State
from polywire.broker.topics import Partition
from polywire.clock import Clock
from polywire.errors import Busy, Conflict, ErrorCode, Invalid, Missing
from polywire.log.base import Completion, WriteBatch
from polywire.types import Buffer, Level

ENTRY_BYTES: Final = 40  # bytes of a directory entry in a journal write, with padding (decision 0102)
CHANGE_BYTES: Final = 64  # bytes of a journalled change, without key and payload
FORGET_INTERVAL_S: Final = 10.0  # seconds between two searches for events that retention has removed


class Events:
    """Appends and reads the events of aggregates, in all event-sourced topics."""

    __slots__ = ("_admission", "_clock", "_forgot_at", "_log", "_settings", "_state")

    def __init__(
        self, log: WriteBatch, state: State, admission: Admission, settings: BrokerSettings, clock: Clock
    ) -> None:
        self._log = log
        self._state = state
        self._admission = admission
        self._settings = settings
        self._clock = clock
        self._forgot_at = clock.monotonic() - FORGET_INTERVAL_S

    def version(self, partition: Partition, key: bytes) -> int:
        """Return the version of an aggregate's latest event, 0 if the aggregate does not exist."""
        found = self._state.aggregates.find(partition.incarnation, key)
        return 0 if found is None else found.version

    def append(
        self,
        partition: Partition,
        key: bytes,
        version: int,
        batch: Buffer,
        *,
        by: Caller = NO_CALLER,
        level: Level,
        done: Completion[int] | None,
    ) -> int:
        """Append one event as this version of an aggregate. Return the event's offset.

        Raises Conflict(VERSION_CONFLICT) unless the version is the latest plus one. Raises Missing(PARTITION_MISSING),
        Invalid(INVALID_REQUEST) for a topic without event sourcing or a key that is empty or too long,
        Invalid(INVALID_BATCH, RECORD_TOO_LARGE), Busy(DISK_FULL), and Busy(BUSY) if the owner or the broker has too
        many aggregates or events.

        Args:
            batch: has the event as its only record.
        """
        self._check_key(partition, key)
        self._check_version(partition, key, version)
        self._admission.check(partition, batch)
        self._admit_event(partition, key, by)
        self._log.write()  # assigns offsets to earlier batches, so that the offset of this event is known
        self._log.reserve(len(batch) + len(key) + CHANGE_BYTES + 2 * ENTRY_BYTES)
        offset = partition.log.next_offset
        change = changes.EventAppended(partition.incarnation, key, version, offset, by.owner)
        self._log.append(partition.log, batch, level=level, done=done)
        self._log.change(changes.encode(change), level=level, done=None)
        self._state.apply_change(change)
        return offset

    def offsets(self, partition: Partition, key: bytes, first_version: int) -> tuple[int, array[int]]:
        """Return (version, offsets) of the retained events, beginning with version ``first_version`` or a later one.

        ``version`` is the version of the first of these events, and ``offsets`` has the offsets of all of them.
        """
        found = self._state.aggregates.find(partition.incarnation, key)
        if found is None:
            return max(first_version, 1), array("q")
        start = max(first_version - found.first_version, 0)
        offsets = found.offsets[start:]
        gone = bisect_left(offsets, partition.log.first_offset)
        return found.first_version + start + gone, offsets[gone:]

    def snapshot(self, partition: Partition, key: bytes) -> changes.SnapshotSaved | None:
        return self._state.aggregates.find_snapshot(partition.incarnation, key)

    def save_snapshot(
        self,
        partition: Partition,
        key: bytes,
        version: int,
        payload: bytes,
        *,
        by: Caller = NO_CALLER,
        level: Level,
        done: Completion[int] | None,
    ) -> None:
        """Replace the snapshot of an aggregate, which includes the effects of all events up to ``version``.

        Raises Conflict(VERSION_CONFLICT) for a version that does not exist yet, Missing(PARTITION_MISSING),
        Invalid(INVALID_REQUEST), Invalid(RECORD_TOO_LARGE) for a payload above the limit, Busy(DISK_FULL), and
        Busy(BUSY) if snapshots take too much memory.
        """
        self._check_key(partition, key)
        current = self.version(partition, key)
        if not 1 <= version <= current:
            raise Conflict(
                ErrorCode.VERSION_CONFLICT,
                f"the aggregate does not have this version yet current={current} got={version} key={key!r}",
            )
        limit = self._settings.aggregate_snapshot_bytes_max
        if len(payload) > limit:
            raise Invalid(ErrorCode.RECORD_TOO_LARGE, f"snapshot is too large bytes={len(payload)} limit={limit}")
        change = changes.SnapshotSaved(partition.incarnation, key, version, payload, by.owner)
        self._admit_snapshot(change, by)
        self._log.reserve(len(payload) + len(key) + CHANGE_BYTES + ENTRY_BYTES)
        self._log.change(changes.encode(change), level=level, done=done)
        self._state.apply_change(change)

    def _check_key(self, partition: Partition, key: bytes) -> None:
        if partition.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, f"partition was deleted partition={partition!r}")
        if not partition.topic.settings.event_sourcing:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"topic is not event-sourced name={partition.topic.name.full!r}")
        limit = self._settings.aggregate_key_bytes_max
        if not 1 <= len(key) <= limit:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"key must have 1 to {limit} bytes got={len(key)}")

    def _check_version(self, partition: Partition, key: bytes, version: int) -> None:
        current = self.version(partition, key)
        if version != current + 1:
            raise Conflict(
                ErrorCode.VERSION_CONFLICT,
                f"version is not the aggregate's next one current={current} got={version} key={key!r}",
            )

    def _admit_event(self, partition: Partition, key: bytes, by: Caller) -> None:
        quotas = self._state.quotas
        try:
            quotas.admit(Kind.EVENTS, by, EVENT_BYTES)
        except Busy:
            self._forget()
            quotas.admit(Kind.EVENTS, by, EVENT_BYTES)
        if self._state.aggregates.find(partition.incarnation, key) is None:
            quotas.admit(Kind.AGGREGATES, by, aggregate_size(key) + EVENT_BYTES)

    def _admit_snapshot(self, change: changes.SnapshotSaved, by: Caller) -> None:
        was = self._state.aggregates.find_snapshot(change.incarnation, change.key)
        replaced = snapshot_size(was) if was is not None and was.owner == change.owner else 0
        added = snapshot_size(change) - replaced
        self._state.quotas.admit(Kind.SNAPSHOT_BYTES, by, added, count=added)

    def _forget(self) -> None:
        """Drop the offsets of events that retention has deleted.

        This visits all aggregates, so it runs at most every ``FORGET_INTERVAL_S``.
        """
        now = self._clock.monotonic()
        if now - self._forgot_at < FORGET_INTERVAL_S:
            return
        self._forgot_at = now

        def first_offset_of(incarnation: int) -> int:
            partition = self._state.catalog.find_partition(incarnation)
            return 0 if partition is None else partition.log.first_offset

        self._state.aggregates.forget(first_offset_of)
