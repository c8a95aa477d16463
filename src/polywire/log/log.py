"""The log on files: writes go to the journal and later to segments, and a start recovers both.

It implements ``log.base.Log``. Syncs, sealing and reads from disk run in threads. Everything else runs on the event
loop, in the call or in ``commit``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Final

from polywire.clock import Clock, ElapsedClock
from polywire.errors import BrokerError, Busy, ErrorCode, Missing, Unavailable
from polywire.log.base import Completion, Encoding, Handle, Loop, Need, PartitionLog, Pressure, Ranges, Replay
from polywire.log.callbacks import FailStop, FailStopLoop, Notifications
from polywire.log.disk import Disk
from polywire.log.journal.group import ENTRY_BYTES, EntryKind, GroupHead
from polywire.log.journal.group_writer import GroupWriter
from polywire.log.journal.publishing import FilePublication, Publishable, prepared
from polywire.log.journal.replay import image_of_all
from polywire.log.journal.slots import FileJournal, Slot
from polywire.log.journal.staging import StagedBatch
from polywire.log.journal.steps import (
    CHANGE,
    Abandon,
    Begin,
    Drop,
    Entered,
    Open,
    Publish,
    Stage,
    Trim,
    enter,
    sealed_content,
)
from polywire.log.journal.syncer import MakeSyncer, Syncer
from polywire.log.journal.write_batch import Draft
from polywire.log.partition.partition import FilePartition
from polywire.log.segments.sealer import Sealer
from polywire.log.settings import PAGE_BYTES, LogSettings
from polywire.log.state import Contents, Image, LogState
from polywire.log.waits import Waits
from polywire.log.worker import Worker, storage_failed
from polywire.records.header import unnumbered_header
from polywire.types import Buffer, Level

# space for listing segments in the journal: up to a page of padding, and a page for the journal write
NAMING_BYTES: Final = 2 * PAGE_BYTES
SEALED_SHARE: Final = 1 / 16  # of a journal file: a clean stop seals more than this, which is replayed in some 0.1 s
# A journal file with more changes of the broker's state is sealed early, because a start after a kill replays them in some
# 0.4 s. With a large state it may have more: one for so many bytes of a snapshot, which takes as long to encode.
CHANGES_MAX: Final = 20_000
CHANGE_BYTES: Final = 64
EXPIRY_SECONDS: Final = 5.0
_FOR_CHANGE: Final = Need.CHANGE  # read for every change; a module constant is ten times as fast as an attribute
TOKENS_EXPIRED_MAX: Final = 1000  # maximum number of tokens that expire in one write batch


class FileLog:
    """The log of one data directory. Implements ``Log``. Create it with ``opening.open_log``."""

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
        self._notifications: Final = Notifications(loop)
        self._fail_stop: Final = FailStop(self._broken)
        self._own_loop: Final = (own := FailStopLoop(loop, self._run_own))
        self._waits: Final = Waits(own, self._notifications)
        self._on_failure: list[Callable[[BrokerError], None]] = []
        self._on_relief: list[Callable[[], None]] = []
        self._broker_state: Encoding | None = None
        # last journal write that did more than append; a snapshot taken now depends on it
        self._rests_on = self._removed_at = self._marked_synced = sequence
        self._flusher: Syncer = make_syncer(own, self._relieve, self._fail, lambda: self._sealer.sealing)
        self._flusher.synced = self._flusher.written = sequence
        self._sealer = Sealer(self, disk, journal, state, own, start=epoch, snapshot_name=snapshot_name)
        self._sealer.sealed = self._sealer.named = sequence - 1
        state.reader.unpinned = self._unpinned
        self._writer: Final = GroupWriter(
            settings=settings,
            draft=Draft(state, epoch=epoch, floor=settings.durability, seed=journal.seed),
            sequence=sequence,
            checksum=checksum,
            journal=journal,
            syncer=self._flusher,
            disk=disk,
            loop=loop,
            clock=clock,
            notifications=self._notifications,
            waits=self._waits,
            roll=self._roll,
            changed=self._changed,
            failed=self._fail,
            broken=self._broken,
        )
        # attributes instead of methods, because they are called often
        self.append: Final = self._writer.append
        self.hold: Final = self._writer.hold
        self.write: Final = self._writer.write
        self.commit: Final = self._writer.commit
        self._expire_timer()

    # Queries

    @property
    def pressure(self) -> Pressure:
        return self._writer

    @property
    def congested(self) -> bool:
        """Whether to pause reading from producers."""
        return self._writer.congested

    @property
    def uncommitted(self) -> bool:
        return self._writer.uncommitted

    @property
    def sealing(self) -> int:
        """Number of full journal files that are not yet written to segments and free again."""
        return self._sealer.waiting

    @property
    def synced_sequence(self) -> int:
        """Sequence number of the last journal write that survives a power loss."""
        return self._flusher.synced

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when ``congested`` becomes False."""
        self._on_relief.append(callback)
        self._relieve()

    def on_failure(self, callback: Callable[[BrokerError], None]) -> None:
        """Call ``callback`` when a write or sync has failed.

        After that nothing is acknowledged, and the broker must stop.
        """
        self._on_failure.append(callback)

    def name_partitions(self, name_of: Callable[[int], tuple[str, int] | None]) -> None:
        """Use these names of partitions in log lines and errors about damaged records; see ``DamageNotes``."""
        self._state.segments.notes.name_of = name_of

    # Partitions

    def partition(self, incarnation: int) -> FilePartition:
        return self._state.find(incarnation)

    def incarnations(self) -> Sequence[int]:
        return [partition.incarnation for partition in self._state.partitions.values() if not partition.ended]

    def open_partition(self, incarnation: int) -> FilePartition:
        self._writer.admit(ENTRY_BYTES, Need.CHANGE)
        opened = self._state.make(incarnation)
        self._writer.add(Open(opened), ENTRY_BYTES)
        return opened

    def drop_partition(self, incarnation: int) -> None:
        dropped = self._state.find(incarnation)
        self._writer.admit(ENTRY_BYTES, Need.REMOVAL)
        dropped.ended = True
        self._writer.add(Drop(dropped), ENTRY_BYTES, closing=True)
        self._waits.wake_due_soon(dropped)

    def trim(self, incarnation: int, first_offset: int) -> None:
        trimmed = self._state.find(incarnation)
        self._writer.admit(ENTRY_BYTES, Need.REMOVAL)
        self._writer.add(Trim(trimmed, first_offset), ENTRY_BYTES, closing=True)

    def begin(self, incarnation: int, offset: int) -> None:
        begun = self._state.find(incarnation)
        self._writer.admit(ENTRY_BYTES, Need.CHANGE)
        self._writer.add(Begin(begun, offset), ENTRY_BYTES, closing=True)

    def compact(self, incarnation: int, *, null_age_us: int) -> None:
        self._sealer.compact(self._state.find(incarnation), self._clock.now_us() - null_age_us)

    # Additions

    def reserve(self, size: int, *, need: Need = Need.DATA) -> None:
        self._writer.admit(size, need)
        write_batch = self._writer.write_batch
        write_batch.granted = max(write_batch.granted, write_batch.size + size)

    def change(self, change: bytes, *, level: Level, done: Completion[int] | None) -> None:
        size = ENTRY_BYTES + (len(change) + 7 & ~7)
        self._writer.admit(size, _FOR_CHANGE)
        self._journal.changes += 1
        self._writer.add(Entered(CHANGE, change, 0, level, done), size)

    def barrier(self, level: Level, done: Completion[int]) -> None:
        self._writer.check_open()
        self._writer.add(Entered(None, b"", 0, level, done), 0)

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
        assert any(token), "a token of zeros would count as no token"
        staging = self._state.staging
        size = ENTRY_BYTES + len(token) + len(batch)
        self._writer.admit(size, Need.DATA)
        staged = staging.get(token)
        if staged is not None and staged.claimed:
            raise Missing(ErrorCode.STAGE_MISSING, f"token is already being published or discarded token={token.hex()}")
        staging.admit(len(batch))
        made = StagedBatch(token, partition.incarnation, unnumbered_header(batch), len(batch))
        staging.add(made, expires_at_us)
        self._writer.add(Stage(token, batch, made, expires_at_us, level, done), size)

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
            self._writer.admit(size, Need.CHANGE)
        self._journal.changes += 1
        self._writer.add(Publish(made, change, level, done), size, closing=True)

    def abandon(self, tokens: Sequence[bytes]) -> None:
        found = [self._state.staging.get(token) for token in dict.fromkeys(tokens)]
        known = [staged for staged in found if staged is not None and not staged.claimed]
        if known:
            size = ENTRY_BYTES + sum(len(staged.token) for staged in known)
            self._writer.admit(size, Need.REMOVAL)
            for staged in known:
                staged.claimed = True
            self._writer.add(Abandon([staged.token for staged in known]), size, closing=True)

    def _refresh(self) -> None:
        self._writer.refresh()

    def _relieve(self) -> None:
        self._writer.update_congested()
        if self._on_relief and not self.congested:
            callbacks, self._on_relief = self._on_relief, []
            for callback in callbacks:
                self._loop.call_soon(callback)

    # Groups written

    def _changed(self, draft: Draft) -> None:
        sequence = self._writer.sequence
        self._rests_on = sequence
        if draft.removes:
            self._removed_at = sequence
        if draft.state_changed or draft.head.producers:
            self._broker_state = None

    def _run_own(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run one of the log's own callbacks, which contain no client code, unless the log has failed."""
        if self._writer.failure is None:
            with self._fail_stop:
                callback(*args)
        if self._notifications.waiting:
            self._notifications.notify()

    def _roll(self) -> None:
        """Continue the journal in the next file, and queue the full one to be written to segments."""
        full = self._journal.roll()
        current = self._journal.current
        assert current is not None, "there is one now"
        self._state.contents[current.serial] = Contents()
        assert full is not None, "the log opens with a current slot"
        image = self._state.image(self._writer.sequence, self._state.contents[full.serial].partitions)
        self._sealer.add(full, image)
        self._disk.measure()
        self._own_loop.call_soon(self._sealer.advance)
        self._grow()

    def _grow(self) -> None:
        if not self._journal.free and self._journal.may_grow() and not self._disk.full:
            self._reader_worker.run(self._journal.plan_slot(), lambda made: self._run_own(self._grown, (made,)))

    def _grown(self, made: Slot | BrokerError) -> None:
        if self._writer.closed:
            return
        self._journal.add(None if isinstance(made, BrokerError) else made)
        self._disk.measure()
        self._refresh()
        self._relieve()

    # Syncs and sealing

    def broker_state(self) -> tuple[Encoding, int]:
        self.write()  # write to the journal what the broker has already applied; completions keep their order
        if self._broker_state is None:
            self._broker_state = self._replay.encoding()
        return self._broker_state, self._rests_on

    def name_slot(self, slot: Slot, new: Sequence[int], snapshot: tuple[str, int], done: Callable[[], None]) -> None:
        # After this journal write, recovery begins after this file. It needs the write, and the segments and the
        # snapshot that the write lists.
        if not self._write_apart():
            return
        alone = (rests_on := max(snapshot[1], self._removed_at)) <= slot.last and self._flusher.is_local

        def counts() -> None:
            self._flusher.sealed(slot.last, naming)
            done()

        naming = self._writer.sequence + 1
        if not alone:
            self._flusher.spare(slot)
        self._name(sealed_content(new, ()), slot.last, None if alone else counts, (snapshot[0], rests_on))
        if alone and self._writer.failure is None:
            self._flusher.sync_last(slot, done)

    def name_sealed(self, sequence: int, new: Sequence[int], removed: Sequence[int], done: Callable[[], None]) -> None:
        if self._write_apart():
            self._name(sealed_content(new, removed), sequence, done)

    def _write_apart(self) -> bool:
        """Write pending appends separately, before an entry that names new segments.

        Return False if there is no space. The pending appends may need a whole journal write, and the reserved end of
        the last journal file is only for entries that name segments.
        """
        if self.uncommitted and not self._writer.closed:
            self.write()
        return self._writer.failure is None and not self._writer.closed

    def _name(
        self, content: bytes, sequence: int, done: Callable[[], None] | None, snapshot: tuple[str, int] | None = None
    ) -> None:
        """Journal the names of new segments. ``done`` is called once this and all earlier journal writes are synced."""
        self._writer.add(Entered(EntryKind.SEALED, content, sequence, Level.MEMORY, None), ENTRY_BYTES + len(content))
        if snapshot is not None:
            name = snapshot[0].encode("ascii")
            size = ENTRY_BYTES + (len(name) + 7 & ~7)
            self._writer.add(Entered(EntryKind.SNAPSHOT, name, snapshot[1], Level.MEMORY, None), size)
        self.write()
        if done is not None and self._writer.failure is None:
            self._flusher.wait(self._writer.sequence, lambda synced: done() if synced is None else None)

    def adopt(self, full: Sequence[tuple[Slot, Image]], sealed: int) -> None:
        """Queue journal files of earlier starts, which could not be written to segments for lack of space.

        Args:
            full: the files, each with the state after its last journal write.
            sealed: last journal write whose effect is in segments.
        """
        self._sealer.sealed = self._sealer.named = sealed
        for slot, image in full:
            self._sealer.add(slot, image)
        self._own_loop.call_soon(self._sealer.advance)

    def seal_failed(self, error: BrokerError) -> None:
        if isinstance(error, Busy):
            self._disk.refused(error)
            self._refresh()
            self._relieve()  # waiting producers continue, and get the error that the disk is full
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

    # Waits

    def wait(self, partition: PartitionLog, offset: int, wake: Callable[[], None]) -> Handle:
        assert isinstance(partition, FilePartition), "a partition of this log"
        return self._waits.add(partition, offset, wake)

    # Expiry of staged batches

    def _expire_timer(self) -> None:
        if not self._writer.closed and self._writer.failure is None:
            self._own_loop.call_later(EXPIRY_SECONDS, self._expire_timer)
            self._expire()

    def _expire(self) -> None:
        with suppress(Busy):  # retried by the next timer
            self.abandon(self._state.staging.expired()[:TOKENS_EXPIRED_MAX])
        self._sealer.remove_unneeded_soon()
        self._state.reader.rest()
        changes_max = max(CHANGES_MAX, self._sealer.state_bytes // CHANGE_BYTES)
        if (self._flusher.is_long or self._journal.changes > changes_max) and self._journal.free:
            self.write()
            self._roll()
        if self.congested and not self._sealer.waiting:
            self._grow()  # no write can create the missing file, because all writes wait for it
        self._disk.measure()
        self._sealer.tidy(self._clock.now_us(), merging=not self._disk.full)
        self._mark_synced()
        self._refresh()
        self._relieve()

    def _mark_synced(self) -> None:
        """If the last journal write is synced, write an empty one after it.

        Without it, later damage to the last journal write would be mistaken for a torn write.
        """
        fits = (
            self._flusher.is_local and self._writer.capacities[Need.CHANGE] > NAMING_BYTES
        )  # keep the sealer's reserve free
        if self._marked_synced < self._flusher.synced == self._writer.sequence and fits and not self.uncommitted:
            self.name_sealed(self._sealer.named, (), (), lambda: None)
            self._marked_synced = self._writer.sequence

    # End

    def _broken(self, error: BaseException | None) -> None:
        """Stop the log after an exception in its own code, because its state may be inconsistent."""
        self._fail(Unavailable(ErrorCode.STORAGE_FAILED, f"internal error of the log: {error!r}"))

    def _fail(self, error: BrokerError) -> None:
        """Stop acknowledging after a failed write or sync, which must not be retried."""
        if self._writer.failure is not None:
            return
        owners = self._writer.fail(error)
        for waiting in self._flusher.abandon():
            waiting(error)
        for done in owners:
            self._notifications.add(done, error)
        for callback in self._on_failure:
            self._notifications.add(callback, error)
        self._notifications.notify_soon()

    def close(self) -> None:
        if self._writer.closed:
            return
        self.commit()
        self._writer.closed = True  # callbacks cannot add anything any more
        self._refresh()
        self.commit()
        self._sealer.stop()
        if self._writer.failure is None:
            try:
                self._flusher.finish()
                self._write_last()
            except (OSError, BrokerError) as error:
                self._fail(error if isinstance(error, BrokerError) else storage_failed(error))
        self._flusher.stop()
        self._notifications.notify()
        self._reader_worker.stop()
        self._journal.close()
        self._unlock()

    def _write_last(self) -> None:
        """Write everything to segments, so that the next start need not replay the journal, and end the journal.

        A few journal writes are not sealed, because the start does it as quickly.
        If sealing fails, for example because the disk is full, the next start replays the journal. Raises OSError.
        """
        head = GroupHead(self._journal.seed)
        parts: list[Buffer] = []
        sequence = self._writer.sequence
        current = self._journal.current
        assert current is not None, "the log opens with a current slot"
        is_worth_it = self._sealer.waiting or self._journal.position > SEALED_SHARE * current.size
        if is_worth_it and self._flusher.is_local and self.has_capacity(1):
            sealed = self._sealer.seal_rest(image_of_all(self._state, sequence), self._replay.snapshot())
            if sealed is not None:
                numbers, name = sealed
                enter(head, parts, EntryKind.SEALED, sequence, sealed_content(numbers, ()))
                enter(head, parts, EntryKind.SNAPSHOT, sequence, name.encode("ascii"))
        self._journal.close_with(head, parts, self.epoch, sequence, self._writer.checksum, self._clock.now_us())
