"""The log on files: write batches become groups, groups become segments, and all of it comes back after a stop of any kind.

Promises: what ``log.base.Log`` says. Everything but syncs, sealing and cold reads happens on the loop, in the call
or in ``commit``. Must not know: topics, groups, wires.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from polywire.clock import Clock, ElapsedClock
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid, Missing, Unavailable
from polywire.log.base import Completion, Encoding, Handle, Loop, Need, PartitionLog, Ranges, Replay
from polywire.log.callbacks import Call, FailStop, FailStopLoop, Notifications
from polywire.log.disk import Disk
from polywire.log.journal.group import ENTRY_BYTES, GROUP_HEADER_BYTES, EntryKind
from polywire.log.journal.publishing import FilePublication, Publishable, prepared
from polywire.log.journal.slots import FileJournal, Slot
from polywire.log.journal.staging import StagedBatch
from polywire.log.journal.syncer import MakeSyncer, Syncer
from polywire.log.journal.write_batch import (
    Abandon,
    Appends,
    Draft,
    Drop,
    Entered,
    Open,
    Publish,
    Stage,
    Step,
    Trim,
    WriteBatch,
    sealed_content,
)
from polywire.log.partition.partition import FilePartition
from polywire.log.segments.sealer import Sealer
from polywire.log.settings import MERGE_SLACK_BYTES, PAGE_BYTES, LogSettings
from polywire.log.state import Contents, Image, LogState
from polywire.log.waits import Waits
from polywire.log.worker import Worker, storage_failed
from polywire.records.columns import HEADER_BYTES
from polywire.types import Buffer, Level

BUSY_RETRY_MS: Final = 50  # a slot is sealed in about that time
NAMING_BYTES: Final = 2 * PAGE_BYTES  # what naming segments may take: a page to begin on, and one to write
EXPIRY_SECONDS: Final = 5.0
TOKENS_EXPIRED_MAX: Final = 1000  # in one write batch


class FileLog:
    """Implements ``Log``. Made by ``opening.open_log``.

    Guards: ``_scheduled`` is true while a commit is scheduled, or the log is ``_held``: then one follows. ``_sequence`` is
    that of the last group written; ``_capacities`` is what one more write batch may take, by ``Need``, so that a
    commit always fits (``_capacity`` for data).
    """

    _writing: WriteBatch | None
    """The write batch that is being written: its owners are notified if that fails half-way."""
    _failure: BrokerError | None
    _capacities: tuple[int, ...]
    congested: bool  # kept, since every request asks twice

    def __init__(
        self,
        *,
        settings: LogSettings,
        loop: Loop,
        clock: Clock,
        replay: Replay,
        journal: FileJournal,
        state: LogState,
        reader_worker: Worker,
        disk: Disk,
        make_syncer: MakeSyncer,
        epoch: int,
        sequence: int,
        checksum: int,
        snapshot_name: str,
        unlock: Callable[[], None],
    ) -> None:
        self.settings: Final = settings
        self.epoch: Final = epoch
        self._loop, self._clock = loop, clock
        self._replay, self._journal, self._state = replay, journal, state
        self._reader_worker, self._disk, self._unlock = reader_worker, disk, unlock
        self._sequence, self._checksum = sequence, checksum
        self._draft = Draft(state, epoch=epoch, floor=settings.durability, seed=journal.seed)
        self._hides_unsynced = settings.durability >= Level.SYNCED
        self._write_batch, self._writing = WriteBatch(), None
        self._scheduled = self._held = False
        self._notifications: Final = Notifications(loop)
        self._fail_stop: Final = FailStop(self._broken)
        self._own_loop: Final = (own := FailStopLoop(loop, self._run_own))
        self._waits: Final = Waits(own, self._notifications)
        self._failure, self._closed = None, False
        self._on_failure: list[Callable[[BrokerError], None]] = []
        self._on_relief: list[Callable[[], None]] = []
        self._broker_state: Encoding | None = None
        self._rests_on = self._removed_at = self._marked_synced = sequence
        """The last group that did more than append: a snapshot taken now holds what it did."""
        self._flusher: Syncer = make_syncer(own, self._relieve, self._fail, lambda: self._sealer.sealing)
        self._flusher.synced = self._flusher.written = sequence
        self._sealer = Sealer(self, disk, journal, state, own, start=epoch, snapshot_name=snapshot_name)
        self._sealer.sealed = self._sealer.named = sequence - 1
        state.reader.unpinned = self._unpinned
        self._plenty: Final = (settings.group_limit - GROUP_HEADER_BYTES,) * 3
        self._capacity, self._capacities = 0, ()
        self._refresh()
        self._expire_timer()

    # What others may ask

    def _is_congested(self) -> bool:
        if self._flusher.unsynced_bytes > self.settings.unsynced_bytes_max:
            return True
        return not self._disk.full and not self._journal.free and self._journal.capacity < self.settings.slot_bytes // 2

    @property
    def sealing(self) -> int:
        """Full slots that are not free yet."""
        return self._sealer.waiting

    @property
    def synced_sequence(self) -> int:
        """Everything up to this group survives a power loss."""
        return self._flusher.synced

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when the log is not congested (any more)."""
        self._on_relief.append(callback)
        self._relieve()

    def on_failure(self, callback: Callable[[BrokerError], None]) -> None:
        """Call back when a write or sync has failed: nothing is acknowledged any more, the broker must stop."""
        self._on_failure.append(callback)

    # Partitions

    def partition(self, incarnation: int) -> FilePartition:
        return self._state.find(incarnation)

    def incarnations(self) -> Sequence[int]:
        return [partition.incarnation for partition in self._state.partitions.values() if not partition.ended]

    def open_partition(self, incarnation: int) -> FilePartition:
        self._admit(ENTRY_BYTES, Need.CHANGE)
        opened = self._state.make(incarnation)
        self._add(Open(opened), ENTRY_BYTES)
        return opened

    def drop_partition(self, incarnation: int) -> None:
        dropped = self._state.find(incarnation)
        self._admit(ENTRY_BYTES, Need.REMOVAL)
        dropped.ended = True
        self._add(Drop(dropped), ENTRY_BYTES, closing=True)
        self._waits.wake_due_soon(dropped)

    def trim(self, incarnation: int, first_offset: int) -> None:
        trimmed = self._state.find(incarnation)
        self._admit(ENTRY_BYTES, Need.REMOVAL)
        self._add(Trim(trimmed, first_offset), ENTRY_BYTES, closing=True)

    def compact(self, incarnation: int, *, null_age_us: int) -> None:
        self._sealer.compact(self._state.find(incarnation), self._clock.now_us() - null_age_us)

    # Additions

    def reserve(self, size: int, *, need: Need = Need.DATA) -> None:
        self._admit(size, need)
        self._write_batch.granted = max(self._write_batch.granted, self._write_batch.size + size)

    def append(self, partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None) -> None:
        write_batch = self._write_batch
        size = len(batch) + ENTRY_BYTES
        assert isinstance(partition, FilePartition), "a partition of this log"
        pending = partition.pending
        if pending is not None and len(pending) == 1:
            size += MERGE_SLACK_BYTES
        if write_batch.size + size > self._capacity or partition.ended:
            self._allocate(size, Need.DATA)
            if partition.ended:
                raise Missing(ErrorCode.PARTITION_MISSING, f"partition has ended incarnation={partition.incarnation}")
            write_batch, pending = self._write_batch, partition.pending
        write_batch.size += size
        if pending is None:
            step = Appends(partition)
            partition.pending = pending = step.items
            write_batch.steps.append(step)
            write_batch.open.append(partition)
        pending.append((batch, level, done))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._commit_scheduled)

    def change(self, change: bytes, *, level: Level, done: Completion[int] | None) -> None:
        size = ENTRY_BYTES + (len(change) + 7 & ~7)
        self._admit(size, Need.CHANGE)
        self._add(Entered(EntryKind.CHANGE, change, 0, level, done), size)

    def barrier(self, level: Level, done: Completion[int]) -> None:
        self._check_open()
        self._add(Entered(None, b"", 0, level, done), 0)

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
        assert any(token), "a token of zeros would be taken for none"
        staging = self._state.staging
        size = ENTRY_BYTES + len(token) + len(batch)
        self._admit(size, Need.DATA)
        staged = staging.get(token)
        if staged is not None and staged.claimed:
            raise Missing(ErrorCode.STAGE_MISSING, f"token is being published or abandoned token={token.hex()}")
        staging.admit(len(batch))
        made = StagedBatch(token, partition.incarnation, bytes(batch[:HEADER_BYTES]), len(batch))
        staging.add(made, expires_at_us)
        self._add(Stage(token, batch, made, expires_at_us, level, done), size)

    def expire_by(self, clock: ElapsedClock, *, age_us_max: int) -> None:
        self._state.staging.expire_by(clock, age_us_max=age_us_max)

    def staged_partitions(self, tokens: Sequence[bytes]) -> Collection[int]:
        found = self._state.staging.find(tokens)
        return {batch.incarnation for staged in found for batch in staged.batches}

    def prepare(self) -> FilePublication:
        return FilePublication(self._state)

    def publish(self, tokens: Publishable, change: bytes, *, level: Level, done: Completion[Ranges]) -> None:
        with prepared(self._state, tokens) as made:
            size = ENTRY_BYTES + (len(change) + 7 & ~7) + made.size
            self._admit(size, Need.CHANGE)
        self._add(Publish(made, change, level, done), size, closing=True)

    def abandon(self, tokens: Sequence[bytes]) -> None:
        found = [self._state.staging.get(token) for token in dict.fromkeys(tokens)]
        known = [staged for staged in found if staged is not None and not staged.claimed]
        if known:
            size = ENTRY_BYTES + sum(len(staged.token) for staged in known)
            self._admit(size, Need.REMOVAL)
            for staged in known:
                staged.claimed = True
            self._add(Abandon([staged.token for staged in known]), size, closing=True)

    def _add(self, step: Step, size: int, *, closing: bool = False) -> None:
        """Add a step that was admitted; with ``closing``, batches of later calls come after it."""
        if closing:
            self._write_batch.close()
        self._write_batch.steps.append(step)
        self._write_batch.size += size
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._commit_scheduled)

    # Capacity

    def _admit(self, size: int, need: Need) -> None:
        """See to it that the write batch takes so much more. Raises as ``_allocate``."""
        if self._write_batch.size + size > self._capacities[need]:
            self._allocate(size, need)

    def _fits(self, size: int, need: Need) -> bool:
        return self._write_batch.size + size <= max(self._capacities[need], self._write_batch.granted)

    def _allocate(self, size: int, need: Need) -> None:
        """Allocate space for one more addition, writing the write batch if need be; nobody is notified yet. Raises Invalid, Busy."""
        self._check_open()
        if size > self.settings.group_limit - GROUP_HEADER_BYTES:
            reason = f"group is too large bytes={size} limit={self.settings.group_limit}"
            raise Invalid(ErrorCode.RECORD_TOO_LARGE, reason)
        if self._fits(size, need):
            return
        if need is Need.DATA and self._disk.full:
            raise Busy(ErrorCode.DISK_FULL, "disk is full", retry_after_ms=1000)
        self.write()
        self._check_open()
        if not self._fits(size, need):
            reason = f"too much waits to be sealed slots={self._sealer.waiting}"
            raise Busy(ErrorCode.BUSY, reason, retry_after_ms=BUSY_RETRY_MS)

    def _refresh(self) -> None:
        """Work out what one more write batch may take."""
        if self._failure is not None or self._closed:
            self._capacities = (-1, -1, -1)
        elif self._journal.free:
            self._capacities = self._plenty
        else:
            left = self._journal.capacity - PAGE_BYTES - GROUP_HEADER_BYTES
            self._capacities = tuple(min(self._plenty[0], left - kept) for kept in self.settings.kept_bytes)
        if self._disk.full:
            self._capacities = (-1, *self._capacities[1:])
        self._capacity = self._capacities[0]
        self.congested = self._is_congested()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Unavailable(ErrorCode.STOPPING, "log is closed")

    def _relieve(self) -> None:
        self.congested = self._is_congested()
        if self._on_relief and not self.congested:
            callbacks, self._on_relief = self._on_relief, []
            for callback in callbacks:
                self._loop.call_soon(callback)

    # The write batch

    def _commit_scheduled(self) -> None:
        self._scheduled = False
        self.commit()

    @property
    def uncommitted(self) -> bool:
        return bool(self._write_batch.steps)

    def hold(self) -> None:
        self._held = not self._scheduled
        self._scheduled = True

    def commit(self) -> None:
        if self._held:
            self._held = self._scheduled = False
        if self._write_batch.steps and self._failure is None:
            self._write()
        if self._notifications.waiting:
            self._notifications.notify()

    def write(self) -> None:
        if self._write_batch.steps and self._failure is None:
            self._write()

    def _write(self) -> None:
        """Write it as one group; callbacks are queued, not called. As vital as the log's own callbacks, and run more often."""
        self._writing, self._write_batch = (write_batch := self._write_batch), WriteBatch()
        done = False
        try:
            write_batch.close()
            for step in write_batch.steps:
                step.prepare()
            if write_batch.size and self._journal.capacity < write_batch.size + GROUP_HEADER_BYTES:
                self._roll()
            (draft := self._draft).begin(self._clock.now_us())
            for step in write_batch.steps:
                step.enter(draft)
            if not draft.head.count or self._write_group(draft):
                self._writing = None
                self._queue_notifications(draft)
            done = True
        finally:
            if not done:
                self._broken(sys.exc_info()[1])

    def _write_group(self, draft: Draft) -> bool:
        """Write what was entered and make it true; False when the disk has failed."""
        head, journal, sequence = draft.head, self._journal, self._sequence + 1
        first = head.finish(self.epoch, sequence, self._flusher.synced, self._checksum, draft.now_us)
        draft.parts.insert(0, first)
        try:
            position = journal.write(draft.parts, head.size, sequence)
        except OSError as error:
            draft.take_back()
            self._fail(storage_failed(error))
            return False
        self._sequence, self._checksum = sequence, head.checksum
        slot = journal.current
        assert slot is not None, "it was just written"
        draft.settle(self._state.contents[slot.serial], slot.serial, position + len(first))
        self._flusher.wrote(sequence, position, head.size)
        if not draft.only_appends or head.producers:
            self._rests_on = sequence
            self._removed_at = sequence if draft.removes else self._removed_at
            if draft.state_changed or head.producers:
                self._broker_state = None
        if self._waits.count and not self._hides_unsynced:
            for entry in draft.indexed:
                self._waits.wake_due(entry[0])
        self._refresh()
        return True

    def _queue_notifications(self, draft: Draft) -> None:
        self._notifications.waiting.extend(draft.written)
        if self._hides_unsynced and draft.indexed:
            ends = {entry[0]: entry[0].next_offset for entry in draft.indexed if entry[0] is not None}
            self._flusher.wait(self._sequence, partial(self._show, ends, draft.synced))
        elif draft.synced:
            self._flusher.wait(self._sequence, partial(self._queue_synced, draft.synced))

    def _show(self, ends: dict[FilePartition, int], notifications: list[Call], synced: BrokerError | None) -> None:
        """Under ``durability=synced`` readers see records once they are on the disk."""
        for partition, next_offset in ends.items() if synced is None else ():
            partition.synced_offset = max(partition.synced_offset, next_offset)
            self._waits.wake_due(partition)
        self._queue_synced(notifications, synced)

    def _queue_synced(self, notifications: list[Call], synced: BrokerError | None) -> None:
        if synced is None:
            self._notifications.waiting.extend(notifications)
            return
        for done, _ in notifications:
            self._notifications.add(done, synced)

    def _run_own(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        """One of the log's own callbacks: nothing of peers runs in it; none once the log has failed."""
        if self._failure is None:
            with self._fail_stop:
                callback(*args)
        if self._notifications.waiting:
            self._notifications.notify()

    def _roll(self) -> None:
        """Go on in the next slot; the full one is to be sealed, with the state as it is now."""
        full = self._journal.roll()
        current = self._journal.current
        assert current is not None, "there is one now"
        self._state.contents[current.serial] = Contents()
        assert full is not None, "the log opens with a current slot"
        image = self._state.image(self._sequence, self._state.contents[full.serial].partitions)
        self._sealer.add(full, image)
        self._disk.measure()
        self._own_loop.call_soon(self._sealer.advance)
        self._grow()

    def _grow(self) -> None:
        """Make one more slot when none is free and there may be more."""
        if not self._journal.free and self._journal.may_grow() and not self._disk.full:
            self._reader_worker.run(self._journal.plan_slot(), lambda made: self._run_own(self._grown, (made,)))

    def _grown(self, made: Slot | BrokerError) -> None:
        if self._closed:
            return
        self._journal.add(None if isinstance(made, BrokerError) else made)
        self._disk.measure()
        self._refresh()
        self._relieve()

    # Syncs and sealing

    def broker_state(self) -> tuple[Encoding, int]:
        self.write()  # what the broker has applied is in the journal now; callbacks follow in their order
        if self._broker_state is None:
            self._broker_state = self._replay.encoding()
        return self._broker_state, self._rests_on

    def name_slot(self, slot: Slot, new: Sequence[int], snapshot: tuple[str, int], done: Callable[[], None]) -> None:
        # Recovery begins behind the slot. It needs this group, and what snapshot and segments rest on: what was removed is not in them.
        if not self._write_apart():
            return
        alone = (rests_on := max(snapshot[1], self._removed_at)) <= slot.last and self._flusher.is_local

        def counts() -> None:
            self._flusher.sealed(slot.last, naming)
            done()

        naming = self._sequence + 1
        if not alone:
            self._flusher.spare(slot)
        self._name(sealed_content(new, ()), slot.last, None if alone else counts, (snapshot[0], rests_on))
        if alone and self._failure is None:
            self._flusher.sync_last(slot, done)

    def name_sealed(self, sequence: int, new: Sequence[int], removed: Sequence[int], done: Callable[[], None]) -> None:
        if self._write_apart():
            self._name(sealed_content(new, removed), sequence, done)

    def _write_apart(self) -> bool:
        """Write the write batch, which may be as large as a group: the last slot's reserve is for groups of their own. False: no more."""
        if self._write_batch.steps and not self._closed:
            self._write()
        return self._failure is None and not self._closed

    def _name(
        self, content: bytes, sequence: int, done: Callable[[], None] | None, snapshot: tuple[str, int] | None = None
    ) -> None:
        """One group; ``done`` once it and all before it is synced."""
        self._add(Entered(EntryKind.SEALED, content, sequence, Level.MEMORY, None), ENTRY_BYTES + len(content))
        if snapshot is not None:
            name = snapshot[0].encode("ascii")
            size = ENTRY_BYTES + (len(name) + 7 & ~7)
            self._add(Entered(EntryKind.SNAPSHOT, name, snapshot[1], Level.MEMORY, None), size)
        self._write()
        if done is not None and self._failure is None:
            self._flusher.wait(self._sequence, lambda synced: done() if synced is None else None)

    def take_over(self, full: Sequence[tuple[Slot, Image]], sealed: int) -> None:
        """Have the slots of earlier starts sealed, for which there was no space; ``sealed`` is the last group in segments."""
        self._sealer.sealed = self._sealer.named = sealed
        for slot, image in full:
            self._sealer.add(slot, image)
        self._own_loop.call_soon(self._sealer.advance)

    def seal_failed(self, error: BrokerError) -> None:
        if isinstance(error, Busy):
            self._disk.refused(error)
            self._refresh()
            self._relieve()  # whoever waits gets the answer that the disk is full
        else:
            self._fail(error)

    def has_capacity(self, groups: int) -> bool:
        return bool(self._journal.free) or self._journal.capacity > groups * NAMING_BYTES

    def slot_freed(self) -> None:
        self._disk.accepted()
        self._refresh()
        self._relieve()

    def _unpinned(self) -> None:
        if self._sealer.parked:
            with self._fail_stop:
                self._sealer.free_parked()

    # Waiting

    def wait(self, partition: PartitionLog, offset: int, wake: Callable[[], None]) -> Handle:
        assert isinstance(partition, FilePartition), "a partition of this log"
        return self._waits.add(partition, offset, wake)

    # Staged batches that nobody published

    def _expire_timer(self) -> None:
        if not self._closed and self._failure is None:
            self._own_loop.call_later(EXPIRY_SECONDS, self._expire_timer)
            self._expire()

    def _expire(self) -> None:
        with suppress(Busy):  # next time
            self.abandon(self._state.staging.expired()[:TOKENS_EXPIRED_MAX])
        self._sealer.note_dead()
        if self._flusher.is_long and self._journal.free:
            self.write()
            self._roll()
        self._disk.measure()
        self._sealer.tidy(self._clock.now_us(), merging=not self._disk.full)
        self._mark_synced()
        self._refresh()
        self._relieve()

    def _mark_synced(self) -> None:
        """When nothing follows what was synced last, a group that names nothing does: damage is not taken for a torn tail then."""
        fits = self._flusher.is_local and self._capacities[Need.CHANGE] > NAMING_BYTES  # what the sealer needs stays
        if self._marked_synced < self._flusher.synced == self._sequence and fits and not self.uncommitted:
            self.name_sealed(self._sealer.named, (), (), lambda: None)
            self._marked_synced = self._sequence

    # Ends

    def _broken(self, error: BaseException | None) -> None:
        """The log's own code has failed where state changes."""
        self._fail(Unavailable(ErrorCode.STORAGE_FAILED, f"internal error of the log: {error!r}"))

    def _fail(self, error: BrokerError) -> None:
        """Nothing is acknowledged any more; a failed write or sync is never tried again."""
        if self._failure is not None:
            return
        self._failure = error
        self._refresh()
        for waiting in self._flusher.abandon():
            waiting(error)
        unwritten = [self._write_batch] if self._writing is None else [self._writing, self._write_batch]
        self._writing, self._write_batch = None, WriteBatch()
        for done in [owner for write_batch in unwritten for owner in write_batch.owners()]:
            self._notifications.add(done, error)
        for callback in self._on_failure:
            self._notifications.add(callback, error)
        self._notifications.notify_soon()

    def close(self) -> None:
        if self._closed:
            return
        self.commit()
        self._closed = True  # who is notified from here on can add nothing more
        self._refresh()
        self.commit()
        self._sealer.stop()
        if self._failure is None:
            try:
                self._flusher.finish()
                last = (self.epoch, self._sequence, self._checksum)
                self._journal.close_with(self._draft.head, *last, self._clock.now_us())
            except (OSError, BrokerError) as error:
                self._fail(error if isinstance(error, BrokerError) else storage_failed(error))
        self._flusher.stop()
        self._notifications.notify()
        self._reader_worker.stop()
        self._journal.close()
        self._unlock()
