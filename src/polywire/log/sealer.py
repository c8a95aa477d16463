"""The sealer: takes full slots one after the other, has their segments written, names them in the journal, frees the slots.

Promises: slots are sealed in the order they were filled; segments nobody needs are removed only after the journal says so. Must not know:
how a group is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import structlog

from polywire.errors import BrokerError, Busy, Corrupt, ErrorCode, Invalid, Missing
from polywire.log.base import Loop
from polywire.log.compaction import NEVER, Compaction, is_worth_a_pass
from polywire.log.history import History, Image
from polywire.log.journal_file import FileJournal, Slot
from polywire.log.partition import FilePartition
from polywire.log.rewriting import Rewrite, choose, replace, write_anew
from polywire.log.sealing import Plan, install, plan_slots, snapshot_of, write_plan
from polywire.log.segment import SegmentInfo
from polywire.log.segments import SNAPSHOTS, Sealed, segment_name
from polywire.log.worker import Worker
from polywire.store.base import Store

RETRY_SECONDS: Final = 1.0  # after a full disk
REMOVED_MAX: Final = 256  # segments removed by one group, which must stay below a page
REMOVE_SECONDS: Final = 0.5  # dead segments are removed together
TIDY_SECONDS: Final = 0.25  # between two rewrites
REWRITE_GROUPS: Final = 2  # journal groups that must have room before a rewrite is begun and named: sealing comes first

logger: Final = structlog.get_logger("polywire.log")


class Owner(Protocol):
    """What the sealer needs of the log."""

    def broker_state(self) -> tuple[bytes, int]:
        """The broker's state, and the last group that a snapshot of it rests on: what is behind that one only appended."""

    def name_slot(self, slot: Slot, new: Sequence[int], snapshot: tuple[str, int], done: Callable[[], None]) -> None:
        """Journal that a slot is in new segments, and the snapshot (name, the broker's sequence); ``done`` once that counts."""

    def name_sealed(self, sequence: int, new: Sequence[int], removed: Sequence[int], done: Callable[[], None]) -> None:
        """Journal segments that are new and removed beside slots; ``done`` once that is synced."""

    def seal_failed(self, error: BrokerError) -> None:
        """Sealing cannot go on: Busy(DISK_FULL) for now, anything else for ever."""

    def seal_room(self, groups: int) -> bool:
        """Whether the journal has room for so many groups that name segments."""

    def slot_freed(self) -> None:
        """There is a slot to be written again."""


@dataclass(frozen=True, slots=True)
class _Full:
    slot: Slot
    image: Image


class Sealer:
    """Guards: one job at a time; ``sealed`` is the sequence everything up to which is in segments, by what the journal says on the disk."""

    def __init__(
        self,
        owner: Owner,
        store: Store,
        journal: FileJournal,
        history: History,
        loop: Loop,
        *,
        start: int,
        snapshot_name: str,
    ) -> None:
        self._owner = owner
        self._store = store
        self._journal = journal
        self._history = history
        self._loop = loop
        self._start: Final = start
        self._worker = Worker("seal", loop)
        self._queue: deque[_Full] = deque()
        self._parked: list[Slot] = []
        self._running = False
        self._installing = 0
        self._snapshot_name = snapshot_name
        self._snapshot_count = 0
        self._removing = False
        self._compaction: Compaction | None = None
        self._to_compact: dict[FilePartition, int] = {}
        self._looking = False
        self._replacing = False
        """A segment written anew is named and not yet installed."""
        self._stopped = False
        self.sealing = False
        """Segments of a slot are being written."""
        self.sealed = 0
        self.named = 0
        """Like ``sealed``, but already when the group is written."""

    @property
    def waiting(self) -> int:
        """Slots that are full and not free yet."""
        return len(self._queue) + self._installing + len(self._parked)

    def add(self, slot: Slot, image: Image) -> None:
        """A slot is full; ``image`` is the state after its last group."""
        self._queue.append(_Full(slot, image))

    def advance(self) -> None:
        """Seal the next slot if nothing else is being done."""
        if self._stopped or self._running or not self._queue:
            return
        full = self._queue[0]
        if self._installing and (self._history.reader.overlays or full.image.staged):
            return  # bodies may lie in slots that are about to be freed
        if not self._owner.seal_room(1):
            return  # readers pin every slot: the first to let go calls again
        self._running = True
        self.sealing = True
        broker, rests_on = self._owner.broker_state()
        broker_sequence = max(rests_on, full.image.sequence)
        contents = {full.slot.serial: self._history.contents[full.slot.serial]}
        plan = plan_slots(self._history, contents, self._journal.views, full.image)
        numbers = [self._history.segments.next_number() for _ in plan.blobs]
        self._snapshot_count += 1
        name = snapshot_name(self._start, self._snapshot_count)
        snapshot = snapshot_of(self._history, full.image, plan, numbers, (broker, broker_sequence))
        job = partial(write_plan, self._store, plan, numbers, name, snapshot)
        self._worker.run(job, partial(self._written, full, plan, numbers, name, broker_sequence))

    def _written(
        self,
        full: _Full,
        plan: Plan,
        numbers: Sequence[int],
        name: str,
        broker_sequence: int,
        infos: Sequence[SegmentInfo] | None,
        error: BrokerError | None,
    ) -> None:
        self._running = False
        if self._stopped:
            return
        if error is not None or infos is None:
            assert error is not None, "a job gives a result or an error"
            self.sealing = False
            if not isinstance(error, Missing):
                self._owner.seal_failed(error)
            if isinstance(error, (Busy, Missing)):  # what was missing was removed meanwhile: plan again
                self._loop.call_later(RETRY_SECONDS if isinstance(error, Busy) else 0.0, self.advance)
            return
        self._queue.popleft()
        sealed = [self._history.segments.add(info, number) for info, number in zip(infos, numbers, strict=True)]
        self._installing += 1
        old, self._snapshot_name = self._snapshot_name, name
        self.named = full.image.sequence

        def installed() -> None:
            self._installing -= 1
            self.sealed = full.image.sequence
            install(self._history, plan, sealed)
            del self._history.contents[full.slot.serial]
            self._parked.append(full.slot)
            if old:
                self._delete([old])
            self.free_parked()
            self.advance()  # the slot may be pinned: the next one needs not wait for its readers
            self._remove_soon()

        self._owner.name_slot(full.slot, numbers, (name, broker_sequence), installed)
        self.advance()
        self.sealing = self._running

    def free_parked(self) -> None:
        """Free slots that are sealed and that no reader pins any more."""
        still = [slot for slot in self._parked if slot.pins]
        free = [slot for slot in self._parked if not slot.pins]
        self._parked = still
        for slot in free:
            self._journal.release(slot)
        if free and not self._stopped:
            self._owner.slot_freed()
            self.advance()

    # Removing segments

    def _remove_soon(self) -> None:
        if self._history.segments.dead and not self._removing and not self._stopped:
            self._removing = True
            self._loop.call_later(REMOVE_SECONDS, self.remove)

    def note_dead(self) -> None:
        """Segments may have lost their last run."""
        self._remove_soon()

    def remove(self) -> None:
        """Journal the removal of segments nobody needs, then delete them."""
        self._removing = False
        if self._stopped or not self._owner.seal_room(2):
            return  # freeing a slot comes first; the next pass of the log's timer calls again
        dead = self._history.segments.take_dead(REMOVED_MAX)
        if not dead:
            return

        def removed() -> None:
            self._delete(self._history.segments.removed(dead))

        self._owner.name_sealed(self.named, (), [sealed.number for sealed in dead], removed)

    def _delete(self, names: Sequence[str]) -> None:
        if not self._stopped:
            self._worker.run(partial(_delete_all, self._store, names), _told_nobody)

    # Writing segments anew

    def tidy(self, now_us: int, *, merging: bool) -> None:
        """Write something anew if there is nothing else to do; the log's timer calls this. ``merging``: not only what frees space."""
        again = partial(self.tidy, now_us, merging=merging)
        busy = self._running or self._replacing or self._queue or self._installing
        if self._stopped:
            return
        if busy or not self._owner.seal_room(REWRITE_GROUPS):
            self._tidy_soon(again)
            return
        if self._compaction is not None:
            self._compact(self._compaction, again)
            return
        rewrite = choose(self._history, now_us, merging=merging)
        if rewrite is not None:
            self._rewrite(rewrite, partial(write_anew, self._store), again)
        elif self._to_compact and merging:
            partition, null_time_us = self._to_compact.popitem()
            if not partition.ended:
                self._compaction = Compaction(partition, null_time_us)
                self._compact(self._compaction, again)

    def _tidy_soon(self, again: Callable[[], None]) -> None:
        """Look again in a moment, once however many ask."""

        def look() -> None:
            self._looking = False
            again()

        if not self._looking:
            self._looking = True
            self._loop.call_later(TIDY_SECONDS, look)

    def compact(self, partition: FilePartition, null_time_us: int) -> None:
        """Compact a partition when there is nothing else to do, if it is worth it; nulls older than this go as well."""
        if is_worth_a_pass(partition) and (self._compaction is None or self._compaction.partition is not partition):
            self._to_compact[partition] = null_time_us

    def _compact(self, compaction: Compaction, again: Callable[[], None]) -> None:
        """The next step of a pass."""
        partition = compaction.partition
        sources = compaction.sources(self._history.reader) if not partition.ended else []
        if sources and compaction.noting:
            self._running = True
            self._worker.run(partial(compaction.note, sources), partial(self._noted, compaction, again))
        elif sources:
            over = partial(self._compacted, compaction, sources[-1][1].next_offset)
            rewrite = Rewrite((), {partition.incarnation: sources}, over=over)
            self._rewrite(rewrite, lambda name, rewrite: compaction.write(self._store, name, rewrite), again)
        else:
            if not compaction.noting:
                self._history.cleaned(partition, compaction.noted)
                self._compaction = None
            compaction.noting = False
            self._tidy_soon(again)

    def _noted(
        self,
        compaction: Compaction,
        again: Callable[[], None],
        found: tuple[int, bool] | None,
        error: BrokerError | None,
    ) -> None:
        self._running = False
        if found is None:
            assert error is not None, "a job gives a result or an error"
            self._not_rewritten(Rewrite((), {}, over=partial(self._compacted, compaction, 0)), error)
        else:
            compaction.noted, full = found
            compaction.noting = not full
            if full and compaction.noted <= compaction.partition.clean_offset:
                self._compacted(compaction, 0, _too_many_keys(compaction.noted))
        self.advance()
        if not self._stopped:
            self._tidy_soon(again)

    def _compacted(self, compaction: Compaction, end: int, error: BrokerError | None) -> None:
        """A group is on the disk. A partition of which something is damaged is left alone, or the newest null of a key could go before all
        that was older; when something was trimmed meanwhile, another pass finds out."""
        compaction.written = end
        self._history.reader.forget(compaction.partition)
        if error is not None:
            self._compaction = None
        if error is not None and not isinstance(error, Missing):
            compaction.partition.clean_offset = NEVER
            logger.error(
                "a partition is not compacted; an operator must look",
                partition=compaction.partition.incarnation,
                error=str(error),
            )

    def _rewrite(
        self, rewrite: Rewrite, write: Callable[[str, Rewrite], SegmentInfo | None], again: Callable[[], None]
    ) -> None:
        self._running = True
        number = self._history.segments.next_number()
        job = partial(write, segment_name(number), rewrite)
        self._worker.run(job, partial(self._rewritten, rewrite, number, again))

    def _rewritten(
        self,
        rewrite: Rewrite,
        number: int,
        again: Callable[[], None],
        info: SegmentInfo | None,
        error: BrokerError | None,
    ) -> None:
        self._running = False
        if self._stopped:
            return
        if error is not None:
            self._not_rewritten(rewrite, error)
        elif info is None:
            assert rewrite.over is not None, "only compaction may find that nothing is to be written"
            rewrite.over(None)
            self._tidy_soon(again)
        elif not self._owner.seal_room(REWRITE_GROUPS):
            self._delete([segment_name(number)])  # another pass of the timer writes it again
        else:
            self._name_rewritten(rewrite, self._history.segments.add(info, number), again)
        self.advance()

    def _not_rewritten(self, rewrite: Rewrite, error: BrokerError) -> None:
        """A damaged segment is kept as it is: its readers are told, and what is sound of it can be read."""
        if isinstance(error, Busy):
            return  # no space: another pass of the timer tries again
        if not isinstance(error, (Corrupt, Missing)):
            self._owner.seal_failed(error)
            return
        if rewrite.over is not None:
            rewrite.over(error)
        kept = [item for item in rewrite.old if item.segment in rewrite.damaged or isinstance(error, Missing)]
        for item in kept:
            if item.place in self._history.segments.by_place:
                item.damaged = True
                logger.error(
                    "a stored segment is damaged and is kept as it is; an operator must look",
                    segment=item.segment.name,
                    error=str(error),
                )

    def _name_rewritten(self, rewrite: Rewrite, new: Sealed, again: Callable[[], None]) -> None:
        """One group names the new segment and removes the old ones; until it is on the disk, readers use the old ones."""
        self._replacing = True
        old = self._history.segments.leave(rewrite.old)

        def installed() -> None:
            self._replacing = False
            replace(self._history, rewrite, new)
            self._delete(self._history.segments.removed(old))
            self._remove_soon()
            if rewrite.over is not None:
                rewrite.over(None)
            self._tidy_soon(again)

        self._owner.name_sealed(self.named, [new.number], [sealed.number for sealed in old], installed)

    def stop(self) -> None:
        """Finish the job at hand and end the thread; what it wrote and nobody named is deleted by recovery."""
        self._stopped = True
        self._worker.stop()


def snapshot_name(start: int, count: int) -> str:
    """Blob name of a snapshot."""
    return f"{SNAPSHOTS}/{start:08x}-{count:08x}.pwt"


def _too_many_keys(offset: int) -> Invalid:
    return Invalid(ErrorCode.INVALID_BATCH, f"batch has more keys than a pass can remember offset={offset}")


def _delete_all(store: Store, names: Sequence[str]) -> None:
    for name in names:
        store.delete(name)


def _told_nobody(_: None, __: BrokerError | None) -> None:
    """A blob that could not be deleted is deleted by recovery."""
