"""Collect appends and changes, write them to the journal as one atomic group, and call their completions.

* If an append or change does not fit into the group, the earlier ones are written first. Their completions are called
  at the commit.
* An append or change takes effect only after its group was written. If the write fails, the ends of partitions do not
  change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Final

import cython

from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid, Missing, Unavailable
from polywire.log.base import Completion, Loop, Need, PartitionLog
from polywire.log.callbacks import Call
from polywire.log.disk import Disk
from polywire.log.journal.group import ENTRY_BYTES, GROUP_HEADER_BYTES
from polywire.log.journal.slots import FileJournal
from polywire.log.journal.syncer import Syncer
from polywire.log.journal.write_batch import Step
from polywire.log.settings import MERGE_SLACK_BYTES, PAGE_BYTES, LogSettings
from polywire.log.worker import storage_failed
from polywire.types import Buffer, Level

if cython.compiled:
    from cython.cimports.polywire.log.callbacks import Notifications
    from cython.cimports.polywire.log.journal.bare_journal import BareJournal
    from cython.cimports.polywire.log.journal.group import GroupHead
    from cython.cimports.polywire.log.journal.write_batch import Appends, Draft, WriteBatch
    from cython.cimports.polywire.log.partition.partition import FilePartition
    from cython.cimports.polywire.log.waits import Waits
else:
    from polywire.log.callbacks import Notifications
    from polywire.log.journal.bare_journal import BareJournal
    from polywire.log.journal.group import GroupHead
    from polywire.log.journal.write_batch import Appends, Draft, WriteBatch
    from polywire.log.partition.partition import FilePartition
    from polywire.log.waits import Waits

BUSY_RETRY_MS: Final = 50  # sealing a journal file takes about this long

_ENTRY_BYTES = cython.declare(cython.Py_ssize_t, ENTRY_BYTES)
_GROUP_HEADER_BYTES = cython.declare(cython.Py_ssize_t, GROUP_HEADER_BYTES)
_MERGE_SLACK_BYTES = cython.declare(cython.Py_ssize_t, MERGE_SLACK_BYTES)


@cython.cclass
class GroupWriter:
    """Collects appends and changes. Each write puts all of them into the journal with one atomic disk write.

    Attributes:
        write_batch: accepts appends and changes.
        writing: write batch that is being written, None between writes.
        sequence: sequence number of the last journal write.
        checksum: checksum of the last journal write.
        capacities: for each ``Need``, the maximum size of the write batch.
        congested: whether to pause reading from producers.
        failure: error of a failed write. After it, appends and changes are refused.
        closed: whether appends and changes are refused because the log is closed.

    Args:
        roll: called to continue the journal in the next file.
        changed: called after a write that contained more than appends.
        failed: called when a write failed.
        broken: called after an exception in the log's own code.
    """

    write_batch = cython.declare(WriteBatch, visibility="public")
    writing = cython.declare(WriteBatch, visibility="public")
    sequence = cython.declare(cython.ulonglong, visibility="public")
    checksum = cython.declare(cython.ulonglong, visibility="public")
    capacities = cython.declare(tuple, visibility="public")
    congested = cython.declare(cython.bint, visibility="public")
    failure = cython.declare(object, visibility="public")
    closed = cython.declare(cython.bint, visibility="public")
    _journal: FileJournal
    _syncer: Syncer
    _disk: Disk
    _loop: Loop
    _clock: Clock
    _notifications: Notifications
    _waits: Waits
    _roll: Callable[[], None]
    _changed: Callable[[Draft], None]
    _failed: Callable[[BrokerError], None]
    _broken: Callable[[BaseException | None], None]
    _draft: Draft
    _capacity: cython.longlong
    _group_bytes_max: cython.Py_ssize_t
    _unsynced_bytes_max: cython.Py_ssize_t
    _spare_bytes: cython.Py_ssize_t
    _kept_bytes: tuple[int, ...]
    _plenty: tuple[int, ...]
    _hides_unsynced: cython.bint
    _scheduled: cython.bint
    _held: cython.bint

    def __init__(
        self,
        *,
        settings: LogSettings,
        draft: Draft,
        sequence: int,
        checksum: int,
        journal: FileJournal,
        syncer: Syncer,
        disk: Disk,
        loop: Loop,
        clock: Clock,
        notifications: Notifications,
        waits: Waits,
        roll: Callable[[], None],
        changed: Callable[[Draft], None],
        failed: Callable[[BrokerError], None],
        broken: Callable[[BaseException | None], None],
    ) -> None:
        self._draft = draft
        self._journal, self._syncer, self._disk = journal, syncer, disk
        self._loop, self._clock = loop, clock
        self._notifications, self._waits = notifications, waits
        self._roll, self._changed, self._failed, self._broken = roll, changed, failed, broken
        self._hides_unsynced = settings.durability >= Level.SYNCED
        self._group_bytes_max = settings.group_limit
        self._unsynced_bytes_max = settings.unsynced_bytes_max
        self._spare_bytes = settings.slot_bytes // 2
        self._kept_bytes = settings.kept_bytes
        # capacities while another journal file is free
        self._plenty = (settings.group_limit - GROUP_HEADER_BYTES,) * 3
        # ``_scheduled``: a commit is scheduled, or the caller of ``hold`` will make one (``_held``)
        self._scheduled = self._held = False
        self.sequence, self.checksum = sequence, checksum
        self.write_batch, self.writing = WriteBatch(), None
        self.failure, self.closed = None, False
        self.refresh()

    # Additions

    def append(self, partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None) -> None:
        write_batch: WriteBatch = self.write_batch
        size: cython.Py_ssize_t = len(batch) + _ENTRY_BYTES
        assert isinstance(partition, FilePartition), "a partition of this log"
        target: FilePartition = partition
        pending = target.pending
        if pending is not None and len(pending) == 1:
            size += _MERGE_SLACK_BYTES
        if write_batch.size + size > self._capacity or target.ended:
            self.allocate(size, Need.DATA)
            if target.ended:
                raise Missing(ErrorCode.PARTITION_MISSING, f"partition was dropped incarnation={target.incarnation}")
            write_batch, pending = self.write_batch, target.pending
        write_batch.size += size
        if pending is None:
            step: Appends = Appends(target)
            target.pending = pending = step.items
            write_batch.steps.append(step)
            write_batch.open.append(target)
        pending.append((batch, level, done))
        if not self._scheduled:
            self._schedule()

    def add(self, step: Step, size: int, *, closing: bool = False) -> None:
        """Add an append or change for which ``admit`` has ensured capacity.

        Args:
            closing: write later appends after this one, instead of merging them with earlier ones.
        """
        if closing:
            self.write_batch.close()
        self.write_batch.steps.append(step)
        self.write_batch.size += size
        if not self._scheduled:
            self._schedule()

    @cython.cfunc
    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._commit_scheduled)

    # Capacity

    def admit(self, size: int, need: Need) -> None:
        """Ensure capacity for ``size`` more bytes. Raises Invalid(RECORD_TOO_LARGE), Busy(DISK_FULL, BUSY)."""
        if self.write_batch.size + size > self.capacities[need]:
            self.allocate(size, need)

    @cython.cfunc
    def _fits(self, size: int, need: Need) -> cython.bint:
        return self.write_batch.size + size <= max(self.capacities[need], self.write_batch.granted)

    def allocate(self, size: int, need: Need) -> None:
        """Make space for ``size`` bytes, if necessary by writing the pending appends first, without calling
        completions.

        Raises:
            Invalid: RECORD_TOO_LARGE.
            Busy: DISK_FULL or BUSY.
        """
        self.check_open()
        if size > self._group_bytes_max - _GROUP_HEADER_BYTES:
            reason = f"journal group is too large bytes={size} limit={self._group_bytes_max}"
            raise Invalid(ErrorCode.RECORD_TOO_LARGE, reason)
        if self._fits(size, need):
            return
        if need is Need.DATA and self._disk.full:
            raise Busy(ErrorCode.DISK_FULL, "disk is full", retry_after_ms=1000)
        self.write()
        self.check_open()
        if not self._fits(size, need):
            reason = f"too many full journal files wait to be sealed slots={len(self._journal.slots) - 1}"
            raise Busy(ErrorCode.BUSY, reason, retry_after_ms=BUSY_RETRY_MS)

    def refresh(self) -> None:
        """Compute the capacities again, after the free space has changed."""
        if self.failure is not None or self.closed:
            self.capacities = (-1, -1, -1)
        elif self._journal.free:
            self.capacities = self._plenty
        else:
            left = self._journal.capacity - PAGE_BYTES - GROUP_HEADER_BYTES
            self.capacities = tuple([min(self._plenty[0], left - kept) for kept in self._kept_bytes])
        if self._disk.full:
            self.capacities = (-1, *self.capacities[1:])
        self._capacity = self.capacities[0]
        self.update_congested()

    def update_congested(self) -> None:
        """Compute ``congested`` from the unsynced bytes and the free capacity."""
        if self._syncer.unsynced_bytes > self._unsynced_bytes_max:
            self.congested = True
        elif self._disk.full or self._journal.free:
            self.congested = False
        else:
            self.congested = self._journal.capacity < self._spare_bytes

    def check_open(self) -> None:
        """Raise the log's failure if it has failed, or Unavailable if it is closed."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # each raise adds to the traceback of the same exception
        if self.closed:
            raise Unavailable(ErrorCode.STOPPING, "log is closed")

    # The write batch

    def _commit_scheduled(self) -> None:
        self._scheduled = False
        self.commit()

    @property
    def uncommitted(self) -> bool:
        return bool(self.write_batch.steps)

    def hold(self, holding: cython.bint, /) -> None:
        if holding:
            self._held = not self._scheduled
            self._scheduled = True
        elif self._held:
            self._held = self._scheduled = False

    @cython.ccall
    def commit(self) -> None:
        if self.write_batch.steps and self.failure is None:
            self._write()
        if self._notifications.waiting:
            self._notifications.notify()

    @cython.ccall
    def write(self) -> None:
        """Write all pending appends and changes to the journal in one disk write. Completions are called later."""
        if self.write_batch.steps and self.failure is None:
            self._write()

    @cython.cfunc
    def _write(self) -> None:
        # ``FailStop`` is inlined here, because this runs for every commit: an exception stops the log.
        write_batch: WriteBatch = self.write_batch
        draft: Draft = self._draft
        self.writing, self.write_batch = write_batch, WriteBatch()
        done: cython.bint = False
        try:
            write_batch.close()
            for step in write_batch.steps:
                if type(step) is Appends:
                    appends: Appends = step
                    appends.prepare()
                else:
                    step.prepare()
            if write_batch.size and self._journal.capacity < write_batch.size + _GROUP_HEADER_BYTES:
                self._roll()
            draft.begin(self._clock.now_us())
            for step in write_batch.steps:
                if type(step) is Appends:
                    appends = step
                    appends.enter(draft)
                else:
                    step.enter(draft)
            if not draft.head.count or self._write_group(draft):
                self.writing = None
                self._queue_notifications(draft)
            done = True
        finally:
            if not done:
                self._broken(sys.exc_info()[1])

    @cython.cfunc
    def _write_group(self, draft: Draft) -> cython.bint:
        """Write the draft to the journal and update the log's state. Return False if the write failed."""
        head: GroupHead = draft.head
        journal: BareJournal = self._journal
        syncer = self._syncer
        sequence: cython.ulonglong = self.sequence + 1
        first = head.finish(draft.epoch, sequence, syncer.synced, self.checksum, draft.now_us)
        size: cython.Py_ssize_t = len(first) + head.payload
        draft.parts.insert(0, first)
        try:
            position: cython.longlong = journal.write(draft.parts, size, sequence)
        except OSError as error:
            draft.undo_offsets()
            self._failed(storage_failed(error))
            return False
        self.sequence, self.checksum = sequence, head.checksum
        slot = journal.current
        assert slot is not None, "it was just written"
        draft.settle(draft.state.contents[slot.serial], slot.serial, position + len(first))
        syncer.wrote(sequence, position, size)
        if not draft.only_appends or head.producers:
            self._changed(draft)
        if self._waits.count and not self._hides_unsynced:
            for entry in draft.indexed:
                self._waits.wake_due(entry[0])
        if self.capacities is self._plenty and journal.free and not self._disk.full:
            self.congested = syncer.unsynced_bytes > self._unsynced_bytes_max
        else:
            self.refresh()
        return True

    @cython.cfunc
    def _queue_notifications(self, draft: Draft) -> None:
        self._notifications.waiting.extend(draft.written)
        if self._hides_unsynced and draft.indexed:
            ends = {entry[0]: entry[0].next_offset for entry in draft.indexed if entry[0] is not None}
            self._syncer.wait(self.sequence, partial(self._show, ends, draft.synced))
        elif draft.synced:
            self._syncer.wait(self.sequence, partial(self._queue_synced, draft.synced))

    def _show(self, ends: dict[FilePartition, int], notifications: list[Call], synced: BrokerError | None) -> None:
        """Make the synced records of these partitions readable, then call the completions.

        Used only with ``durability=synced``.

        Args:
            ends: for each partition, the end of the records that were synced.
            notifications: completions to call.
            synced: error of the sync, or None.
        """
        if synced is None:
            for partition, next_offset in ends.items():
                partition.synced_offset = max(partition.synced_offset, next_offset)
                self._waits.wake_due(partition)
        self._queue_synced(notifications, synced)

    def _queue_synced(self, notifications: list[Call], synced: BrokerError | None) -> None:
        if synced is None:
            self._notifications.waiting.extend(notifications)
            return
        for done, _ in notifications:
            self._notifications.add(done, synced)

    def fail(self, error: BrokerError) -> list[Completion[int]]:
        """Stop writing. Return the completions of the appends and changes that were not written."""
        self.failure = error
        self.refresh()
        unwritten = [self.write_batch] if self.writing is None else [self.writing, self.write_batch]
        self.writing, self.write_batch = None, WriteBatch()
        return [owner for write_batch in unwritten for owner in write_batch.owners()]
