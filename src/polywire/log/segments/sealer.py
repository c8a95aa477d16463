"""The sealer: writes full journal files (slots) into segments, records the segments in the journal, and frees the
slots.

* Slots are sealed in the order they were filled.
* Unneeded segments are deleted only after the journal has recorded their removal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec
import structlog

from polywire.errors import BrokerError, Busy, Corrupt, ErrorCode, Invalid, Missing
from polywire.log.base import Encoding, Loop
from polywire.log.disk import Disk
from polywire.log.journal.slots import FileJournal, Slot
from polywire.log.partition.partition import FilePartition
from polywire.log.segments.compaction import NEVER, Compaction, is_worth_a_pass
from polywire.log.segments.format import SegmentInfo
from polywire.log.segments.merge import Group, Merge, Source, choose, plan, read_groups, replace, write_merged
from polywire.log.segments.sealing import Written, collect_slots, install, seal, seal_all
from polywire.log.segments.segment_set import SNAPSHOTS, Sealed, segment_name
from polywire.log.state import Image, LogState
from polywire.log.worker import attempt, storage_failed

LEND_SECONDS: Final = (
    0.1  # longest wait for readers of a sealed file if a free file is needed; active readers finish by then
)
LENT_MAX: Final = 32  # files that slow readers may keep until they finish or are disconnected: 2 GiB of disk
RETRY_SECONDS: Final = 1.0  # seconds until a retry after the disk was full
UNREAD_MAX: Final = 30  # seconds to wait for a body that the disk cannot read
REMOVED_MAX: Final = 256  # segments removed by one journal write, which must fit a page
LOST_MAX: Final = 5_000  # runs of dropped or trimmed partitions that are counted per pass, in some 3 ms
LOST_SECONDS: Final = 0.01  # seconds between two passes
REMOVE_SECONDS: Final = 0.5  # seconds to wait before a removal, so that several segments are removed together
TIDY_SECONDS: Final = 0.25  # seconds between two merges
MERGE_GROUPS: Final = 2  # journal writes that must fit before a merge begins, because sealing has priority

logger: Final = structlog.get_logger("polywire.log")


class Owner(Protocol):
    """Methods of the log that ``Sealer`` uses."""

    def broker_state(self) -> tuple[Encoding, int]:
        """Return the broker's current state, and the last journal write that a snapshot of it depends on.

        Later journal writes only append records.
        """

    def name_slot(self, slot: Slot, new: Sequence[int], snapshot: tuple[str, int], done: Callable[[], None]) -> None:
        """Journal which segments contain a journal file's records, and the name of a snapshot.

        Args:
            slot: the journal file.
            new: numbers of the segments.
            snapshot: name of the snapshot, and the last journal write that its broker state depends on.
            done: called once this is durable.
        """

    def name_sealed(self, sequence: int, new: Sequence[int], removed: Sequence[int], done: Callable[[], None]) -> None:
        """Journal that a merge or a removal has added and removed segments.

        Args:
            sequence: last journal write whose effect is in segments.
            new: numbers of added segments.
            removed: numbers of removed segments.
            done: called once this is synced.
        """

    def seal_failed(self, error: BrokerError) -> None:
        """Handle a failure to write segments: Busy(DISK_FULL) is temporary, any other error permanent."""

    def has_capacity(self, groups: int) -> bool:
        """Return whether the journal has space for this many lists of segments."""

    def slot_freed(self) -> None: ...


class _Full(msgspec.Struct, frozen=True):
    slot: Slot
    image: Image


class _Named(msgspec.Struct):
    """A journal file whose content is in segments that the journal names.

    Attributes:
        replaced: name of the previous snapshot.
        is_durable: whether the names of the segments are durable.
    """

    full: _Full
    written: Written
    sealed: Sequence[Sealed]
    replaced: str
    is_durable: bool = False


class Sealer:
    """Writes full journal files to segments, merges segments and compacts them, one job at a time.

    Attributes:
        sealing: whether the segments of a journal file are being written.
        sealed: last journal write whose effect is in segments that the durable part of the journal names.
        named: like ``sealed``, but includes names that are written and not yet durable.
    """

    def __init__(
        self,
        owner: Owner,
        disk: Disk,
        journal: FileJournal,
        state: LogState,
        loop: Loop,
        *,
        start: int,
        snapshot_name: str,
    ) -> None:
        self._owner = owner
        self._store = disk.store
        self._journal = journal
        self._state = state
        self._loop = loop
        self._start: Final = start
        self._worker = disk.make_worker("seal", loop)
        self._deleter = disk.deleter
        # full journal files to seal, oldest first
        self._queue: deque[_Full] = deque()
        # sealed journal files that readers still use
        self._parked: list[Slot] = []
        # unlinked journal files that readers still use
        self._lent: list[Slot] = []
        self._replacing_pinned = False
        self._running = False
        self._installing = False
        """Whether the segments of ``_named[0]`` are being installed."""
        # journal files whose segments are written but not used for reads yet, oldest first
        self._named: deque[_Named] = deque()
        self._snapshot_name = snapshot_name
        if snapshot_name:
            state.segments.snapshots.add(snapshot_name)
        self._snapshot_count = 0
        self._removing = False
        self._counting = False
        self._compaction: Compaction | None = None
        self._to_compact: dict[FilePartition, int] = {}
        self._tidy_planned = False
        self._replacing = False
        """Whether a merged segment is listed in the journal and not yet installed."""
        self._stopped = False
        self._unread = 0
        """Number of failed attempts to seal the current journal file because data could not be read."""
        self.sealing = False
        self.state_bytes = 0
        """Size of the broker's state in the last snapshot."""
        self.sealed = 0
        self.named = 0

    @property
    def waiting(self) -> int:
        """Number of full journal files that are not yet free."""
        return len(self._queue) + len(self._named) + len(self._parked)

    @property
    def parked(self) -> bool:
        """Whether a journal file cannot be reused because of its last reader."""
        return bool(self._parked)

    def add(self, slot: Slot, image: Image) -> None:
        """Queue a full journal file. ``image`` is a copy of the log's state at its end."""
        self._queue.append(_Full(slot, image))

    def advance(self) -> None:
        """Write the next journal file to segments, unless another job is in progress."""
        if self._stopped or self._running or not self._queue:
            return
        full = self._queue[0]
        if self._named and (self._state.reader.published or full.image.staged):
            return  # wait: bodies of staged batches may be in journal files that are about to be freed
        if not self._owner.has_capacity(1):
            return  # readers use every journal file; the first one that finishes calls this again
        self._running = True
        self.sealing = True
        state, rests_on = self._owner.broker_state()
        self._in_slices(state.encode_rest(), partial(self._seal, full, state, max(rests_on, full.image.sequence)))

    def _seal(self, full: _Full, state: Encoding, broker_sequence: int) -> None:
        self.state_bytes = sum(map(len, state.pieces))
        contents = {full.slot.serial: self._state.contents[full.slot.serial]}
        strict = self._unread < UNREAD_MAX
        taken = collect_slots(self._state, contents, self._journal.views, full.image, strict=strict)
        self._snapshot_count += 1
        name = snapshot_name(self._start, self._snapshot_count)
        next_number = self._state.segments.next_number
        job = partial(seal, self._store, taken, next_number, name, (state.pieces, broker_sequence))
        self._worker.run(job, partial(self._written, full, name, broker_sequence))

    def _written(self, full: _Full, name: str, broker_sequence: int, written: Written | BrokerError) -> None:
        self._running = False
        if self._stopped:
            return
        if isinstance(written, BrokerError):
            self.sealing = False
            if not isinstance(written, Missing):
                self._owner.seal_failed(written)
            self._unread += isinstance(written, Busy) and written.code is not ErrorCode.DISK_FULL
            if isinstance(written, (Busy, Missing)):  # a segment was removed meanwhile: plan again
                self._loop.call_later(RETRY_SECONDS if isinstance(written, Busy) else 0.0, self.advance)
            return
        self._queue.popleft()
        self._unread = 0
        added = zip(written.infos, written.numbers, strict=True)
        sealed = [self._state.segments.add(info, number) for info, number in added]
        named = _Named(full, written, sealed, self._snapshot_name)
        self._named.append(named)
        self._snapshot_name = name
        self._state.segments.snapshots.add(name)
        self.named = full.image.sequence
        self._owner.name_slot(full.slot, written.numbers, (name, broker_sequence), partial(self._group_durable, named))
        self.advance()
        self.sealing = self._running

    def _group_durable(self, named: _Named) -> None:
        # segments are installed in the order in which their journal files were filled: the runs of a
        # partition must be in order, and installing removes exactly the same batches from its tail
        named.is_durable = True
        self._install_next()

    def _install_next(self) -> None:
        """Use the segments of the oldest journal file for reads, if their names are durable."""
        if self._installing or not self._named or not self._named[0].is_durable:
            return
        self._installing = True
        named = self._named[0]
        self._in_slices(install(self._state, named.written, named.sealed), partial(self._installed, named))

    def _installed(self, named: _Named) -> None:
        """Free a journal file whose segments are used for reads now.

        Earlier reads from the file may still be in progress.
        """
        self._installing = False
        self._named.popleft()
        self.sealed = named.full.image.sequence
        del self._state.contents[named.full.slot.serial]
        self._parked.append(named.full.slot)
        if named.replaced:
            self._state.segments.snapshots.discard(named.replaced)
            self._deleter.delete([named.replaced], urgent=True)
        self.free_parked()
        self.advance()  # readers may still use the file; the next one does not wait for it
        self._remove_soon()
        self._install_next()

    def _in_slices(self, work: Iterator[None], over: Callable[[], None]) -> None:
        if self._stopped:
            return
        for _ in work:
            self._loop.call_soon(self._in_slices, work, over)
            return
        over()

    def free_parked(self) -> None:
        """Free the journal files that readers no longer use."""
        still = [slot for slot in self._parked if slot.pins]
        free = [slot for slot in self._parked if not slot.pins]
        self._parked = still
        for slot in free:
            self._remove(self._journal.release, slot)
        if self._stopped:
            return
        if free:
            self._owner.slot_freed()
            self.advance()
        if still and not self._replacing_pinned:
            self._replacing_pinned = True
            self._loop.call_later(LEND_SECONDS, self._replace_pinned)
        self._close_returned()

    def _replace_pinned(self) -> None:
        """If no journal file is free, replace the oldest one that readers still use by a new file.

        The readers continue to read the unlinked file, so writers need not wait for them.
        """
        self._replacing_pinned = False
        wanted = not self._journal.free and not self._journal.may_grow()
        if self._stopped or not self._parked:
            return
        if wanted and len(self._lent) < LENT_MAX:
            slot = self._parked.pop(0)
            self._remove(self._journal.unlink, slot)
            self._lent.append(slot)
            self._worker.run(self._journal.plan_slot(), self._replacement_made)
        else:
            self.free_parked()

    def _remove(self, let_go: Callable[[Slot], None], slot: Slot) -> None:
        try:
            let_go(slot)
        except OSError as error:
            self._owner.seal_failed(storage_failed(error))

    def _replacement_made(self, made: Slot | BrokerError) -> None:
        if self._stopped:
            return
        self._journal.add(None if isinstance(made, BrokerError) else made)
        self._owner.slot_freed()
        self.advance()
        self.free_parked()

    def _close_returned(self) -> None:
        """Close, in the thread, unlinked journal files that readers no longer use.

        The system then frees their disk space.
        """
        for slot in [slot for slot in self._lent if not slot.pins]:
            self._lent.remove(slot)
            self._worker.run(slot.close, _ignore)

    # Removing segments

    def _remove_soon(self) -> None:
        if self._state.segments.dead and not self._removing and not self._stopped:
            self._removing = True
            self._loop.call_later(REMOVE_SECONDS, self.remove)

    def remove_unneeded_soon(self) -> None:
        """Schedule the removal of segments without needed data."""
        if not self._counting:
            self._subtract_released()

    def _subtract_released(self) -> None:
        """Update the segments' counts of needed data in several passes of the loop."""
        self._state.subtract_released(LOST_MAX)
        self._counting = self._state.has_released and not self._stopped
        if self._counting:
            self._loop.call_later(LOST_SECONDS, self._subtract_released)
        self._remove_soon()

    def remove(self) -> None:
        """Journal the removal of segments without needed data, then delete their files."""
        self._removing = False
        if self._stopped or not self._owner.has_capacity(2):
            return  # freeing a journal file has priority; the log's timer calls this again
        dead = self._state.segments.take_dead(REMOVED_MAX)
        if not dead:
            return

        def removed() -> None:
            self._deleter.delete(self._state.segments.removed(dead))

        self._owner.name_sealed(self.named, (), [sealed.number for sealed in dead], removed)

    # Merging and compacting

    def tidy(self, now_us: int, *, merging: bool) -> None:
        """Merge or compact if idle. Called by the log's timer.

        Args:
            merging: also merge small segments and compact. Otherwise only unneeded data is removed.
        """
        again = partial(self.tidy, now_us, merging=merging)
        busy = self._running or self._replacing or self._queue or self._named
        if self._stopped:
            return
        if busy or not self._owner.has_capacity(MERGE_GROUPS):
            self._tidy_soon(again)
            return
        if self._compaction is not None:
            self._compact(self._compaction, again)
            return
        groups = choose(self._state, now_us, merging=merging)
        if groups:
            self._running = True
            self._worker.run(partial(read_groups, groups), partial(self._groups_read, again, merging))
        elif merging:
            self._compact_next(again)

    def _groups_read(self, again: Callable[[], None], merging: bool, groups: Sequence[Group] | BrokerError) -> None:
        """Begin the first possible merge, unless a journal file has become full."""
        self._running = False
        if self._stopped:
            return
        self.advance()
        assert not isinstance(groups, BrokerError), f"each group has its own error error={groups}"
        if self._running or self._replacing:
            self._tidy_soon(again)
            return
        merge = None
        for group in groups:
            if group.failed is not None and group.error is not None:
                self._keep_damaged([group.failed], group.error)
            elif merge is None:
                merge = plan(self._state, group)
        if merge is not None:
            self._merge(merge, partial(write_merged, self._store), again)
        elif merging:
            self._compact_next(again)

    def _compact_next(self, again: Callable[[], None]) -> None:
        if self._to_compact:
            partition, null_time_us = self._to_compact.popitem()
            if not partition.ended:
                self._compaction = Compaction(partition, null_time_us)
                self._compact(self._compaction, again)

    def _tidy_soon(self, again: Callable[[], None]) -> None:
        """Call ``again`` after ``TIDY_SECONDS``. Further requests until then are ignored."""

        def look() -> None:
            self._tidy_planned = False
            again()

        if not self._tidy_planned:
            self._tidy_planned = True
            self._loop.call_later(TIDY_SECONDS, look)

    def compact(self, partition: FilePartition, null_time_us: int) -> None:
        """Queue a compaction if enough data was never compacted.

        Args:
            null_time_us: records without a value that are older than this are removed.
        """
        if is_worth_a_pass(partition) and (self._compaction is None or self._compaction.partition is not partition):
            self._to_compact[partition] = null_time_us

    def _compact(self, compaction: Compaction, again: Callable[[], None]) -> None:
        segments = compaction.segments(self._state.reader) if not compaction.partition.ended else []
        if segments:
            self._running = True
            self._worker.run(partial(compaction.sources, segments), partial(self._step, compaction, again))
        else:
            self._half_ended(compaction, again)

    def _step(
        self,
        compaction: Compaction,
        again: Callable[[], None],
        sources: list[Source] | BrokerError,
    ) -> None:
        self._running = False
        if self._stopped:
            return
        self.advance()
        if isinstance(sources, BrokerError):
            self._not_merged(Merge((), {}, over=partial(self._compacted, compaction, 0)), sources)
        if self._running or isinstance(sources, BrokerError):
            self._tidy_soon(again)
        elif not sources:
            self._half_ended(compaction, again)
        elif compaction.noting:
            self._running = True
            self._worker.run(partial(compaction.note, sources), partial(self._noted, compaction, again))
        else:
            over = partial(self._compacted, compaction, sources[-1][1].next_offset)
            merge = Merge((), {compaction.partition.incarnation: sources}, over=over)
            self._merge(merge, lambda name, merge: compaction.write(self._store, name, merge), again)

    def _half_ended(self, compaction: Compaction, again: Callable[[], None]) -> None:
        if not compaction.noting:
            self._state.cleaned(compaction.partition, compaction.noted)
            self._compaction = None
        compaction.noting = False
        self._tidy_soon(again)

    def _noted(
        self,
        compaction: Compaction,
        again: Callable[[], None],
        found: tuple[int, bool] | BrokerError,
    ) -> None:
        self._running = False
        if isinstance(found, BrokerError):
            self._not_merged(Merge((), {}, over=partial(self._compacted, compaction, 0)), found)
        else:
            compaction.noted, full = found
            compaction.noting = not full
            if full and compaction.noted <= compaction.partition.clean_offset:
                self._compacted(compaction, 0, _too_many_keys(compaction.noted))
        self.advance()
        if not self._stopped:
            self._tidy_soon(again)

    def _compacted(self, compaction: Compaction, end: int, merged: BrokerError | None) -> None:
        """Continue after segments were rewritten up to offset ``end``, or failed with an error.

        A damaged partition is not compacted again: a key's newest null could be removed while older records of the key
        remain. If a segment was trimmed meanwhile (Missing), a later pass handles the partition.
        """
        compaction.written = end
        self._state.reader.forget(compaction.partition)
        if merged is not None:
            self._compaction = None
        if merged is not None and not isinstance(merged, Missing):
            compaction.partition.clean_offset = NEVER
            logger.error(
                "cannot compact a partition (run polywire doctor)",
                partition=compaction.partition.incarnation,
                error=str(merged),
            )

    def _merge(
        self, merge: Merge, write: Callable[[str, Merge], SegmentInfo | None], again: Callable[[], None]
    ) -> None:
        self._running = True
        number = self._state.segments.next_number()
        job = partial(write, segment_name(number), merge)
        self._worker.run(job, partial(self._merged, merge, number, again))

    def _merged(
        self,
        merge: Merge,
        number: int,
        again: Callable[[], None],
        info: SegmentInfo | BrokerError | None,
    ) -> None:
        self._running = False
        if self._stopped:
            return
        if isinstance(info, BrokerError):
            self._not_merged(merge, info)
        elif info is None:
            assert merge.over is not None, "only compaction may find that nothing is to be written"
            merge.over(None)
            self._tidy_soon(again)
        elif not self._owner.has_capacity(MERGE_GROUPS):
            self._deleter.delete([segment_name(number)])  # the next pass of the timer writes it again
        else:
            self._name_merged(merge, self._state.segments.add(info, number), info, again)
        self.advance()

    def _not_merged(self, merge: Merge, error: BrokerError) -> None:
        """Handle an error of a merge.

        Damaged segments are never merged again, so that their intact part stays readable.
        """
        if isinstance(error, Busy):
            return  # no space: the next pass of the timer tries again
        if not isinstance(error, (Corrupt, Missing)):
            self._owner.seal_failed(error)
            return
        if merge.over is not None:
            merge.over(error)
        self._keep_damaged(
            [item for item in merge.old if item.segment in merge.damaged or isinstance(error, Missing)], error
        )

    def _keep_damaged(self, items: Sequence[Sealed], error: BrokerError) -> None:
        """Mark those of these segments that still exist as damaged, unless the error is Busy."""
        for item in items:
            if item.location in self._state.segments.by_location and not isinstance(error, Busy):
                item.damaged = True
                logger.error(
                    "a stored segment is damaged and will not be merged (run polywire doctor)",
                    segment=item.segment.name,
                    error=str(error),
                )

    def _name_merged(self, merge: Merge, new: Sealed, info: SegmentInfo, again: Callable[[], None]) -> None:
        """Journal the addition of the new segment and the removal of the old ones.

        Reads use the old ones until that is synced.
        """
        self._replacing = True
        old = self._state.segments.leave(merge.old)

        def counts() -> None:
            self._in_slices(replace(self._state, merge, new, info), replaced)

        def replaced() -> None:
            self._replacing = False
            self._deleter.delete(self._state.segments.removed(old))
            self._remove_soon()
            if merge.over is not None:
                merge.over(None)
            self._tidy_soon(again)

        self._owner.name_sealed(self.named, [new.number], [sealed.number for sealed in old], counts)

    def seal_rest(self, image: Image, broker: bytes) -> tuple[Sequence[int], str] | None:
        """Write everything that is in no segment yet, at the end of the log. Call it after ``stop``.

        Returns the numbers of the new segments and the name of the snapshot, for the last journal write. Returns None
        if this is not possible now.

        Args:
            image: copy of the log's state at the end of the journal.
            broker: the broker's state.
        """
        if self._named:  # their data is in segments already, and in ``contents`` until they are installed
            return None
        self._snapshot_count += 1
        name = snapshot_name(self._start, self._snapshot_count)
        written = attempt(partial(seal_all, self._store, self._state, self._journal.views, image, broker, name))
        if isinstance(written, BrokerError):
            logger.warning(
                "the next start will replay the journal, because it cannot be sealed", reason=written.message
            )
            return None
        return written.numbers, name

    def stop(self) -> None:
        """Finish the current job and stop the thread. Recovery deletes files that the journal does not name."""
        self._stopped = True
        self._deleter.stop()
        self._worker.stop()
        for slot in self._lent:
            slot.close()


def snapshot_name(start: int, count: int) -> str:
    return f"{SNAPSHOTS}/{start:08x}-{count:08x}.pwt"


def _too_many_keys(offset: int) -> Invalid:
    return Invalid(ErrorCode.INVALID_BATCH, f"batch has more keys than one compaction pass can hold offset={offset}")


def _ignore(_: BrokerError | None) -> None:
    pass
