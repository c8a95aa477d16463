"""The mechanisms behind each promise of the log, with a switch that disables one in the simulation.

A switch changes one thing, at a named function, until its patch is undone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.errors import ErrorCode, Missing
from polywire.log import log, opening
from polywire.log.disk import Deleter
from polywire.log.journal import bare_journal, recovery, replay, slots, snapshot
from polywire.log.journal.staging import StagedToken, Staging
from polywire.log.journal.syncer import Flusher
from polywire.log.journal.write_batch import Draft
from polywire.log.log import FileLog
from polywire.log.opening import _Opening
from polywire.log.partition.cold_reads import Window
from polywire.log.partition.partition import FilePartition
from polywire.log.partition.reader import SlotsPin
from polywire.log.segments import segment
from polywire.log.segments.sealer import Sealer
from polywire.log.segments.segment import Segment
from polywire.log.settings import LogSettings
from polywire.log.state import LogState
from polywire.log.waits import Waits
from polywire.store.file import FileStore
from polywire.types import Level
from tests.sim import test_failures, test_names, test_starts
from tests.sim.files import SimulatedFile, SimulatedFiles, SimulatedMapping
from tests.sim.mutation import Mutation, nothing, prepared, replaced, wrapped
from tests.unit.log.segments import test_sealer

# Syncs


def _files_unsynced(prefix: str = "", suffix: str = "") -> Callable[[pytest.MonkeyPatch], None]:
    """Do not sync files of these names."""

    def sync(old: Callable[..., None], file: SimulatedFile, **named: bool) -> None:
        if not (file.name.startswith(prefix) and suffix in file.name):
            old(file, **named)

    return wrapped(SimulatedFile, "sync", sync)


def _directories_unsynced(*names: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Do not sync directories of these names."""

    def sync(old: Callable[..., None], files: SimulatedFiles, path: Path) -> None:
        if path.name not in names:
            old(files, path)

    return wrapped(SimulatedFiles, "sync_directory", sync)


def _recovery_unsynced(patch: pytest.MonkeyPatch) -> None:
    """Do not sync slots that recovery has read before it deletes what they replace."""
    run, sync = _Opening.run, slots.Slot.sync
    found: list[bool] = []

    def opened(self: _Opening) -> FileLog:
        found.append(True)
        try:
            return run(self)
        finally:
            found.clear()

    patch.setattr(_Opening, "run", opened)
    patch.setattr(_Opening, "_begin", _after(_Opening._begin, found.clear))
    patch.setattr(slots.Slot, "sync", lambda slot: None if found else sync(slot))


def _after(function: Callable[..., Any], first: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any, **named: Any) -> Any:
        first()
        return function(*args, **named)

    return both


def _start_unsynced(patch: pytest.MonkeyPatch) -> None:
    """Do not sync the group that begins a start."""
    write, sync = _Opening._write_start, slots.Slot.sync
    writing: list[bool] = []

    def written(self: _Opening, *args: Any) -> None:
        writing.append(True)
        write(self, *args)
        writing.clear()

    patch.setattr(_Opening, "_write_start", written)
    patch.setattr(slots.Slot, "sync", lambda slot: None if writing else sync(slot))


def _named_when_written(old: Callable[..., None], log: FileLog, *args: Any) -> None:
    """Let segments count when their naming group is written, before it is synced."""
    old(log, *args[:-1], nothing)
    args[-1]()


def _synced_when_written(flusher: Flusher, sequence: int, callback: Callable[[None], object]) -> None:
    callback(None)
    flusher.start()


def _install_any(owner: Sealer) -> None:
    """Install slots in the order in which their syncs end."""
    owner._named = type(owner._named)(sorted(owner._named, key=lambda named: not named.is_durable))
    _install_next(owner)


_install_next = Sealer._install_next


def _rests_on_snapshot(old: Callable[..., None], log: FileLog, *args: Any) -> None:
    """Count a slot as sealed although later removals are in no synced group."""
    log._removed_at = 0
    old(log, *args)


def _retried(old: Callable[..., None], flusher: Flusher, *args: Any) -> None:
    """Retry a failed sync, and trust it."""
    with suppress(OSError):
        old(flusher, *args)
        return
    with suppress(OSError):
        old(flusher, *args)


def _unfinished(patch: pytest.MonkeyPatch) -> None:
    """Write nothing to the disk at a clean stop."""
    close, finish, sync = FileLog.close, Flusher.finish, slots.Slot.sync
    closing: list[bool] = []

    def closed(log: FileLog) -> None:
        closing.append(True)
        close(log)
        closing.clear()

    def finished(flusher: Flusher) -> None:
        flusher._unsynced.clear()
        finish(flusher)

    patch.setattr(FileLog, "close", closed)
    patch.setattr(Flusher, "finish", finished)
    patch.setattr(slots.Slot, "sync", lambda slot: None if closing else sync(slot))


def _write_believed(old: Callable[..., int], journal: slots.FileJournal, parts: Any, size: int, sequence: int) -> int:
    """Count a failed journal write as done."""
    position = journal.position
    with suppress(OSError):
        return old(journal, parts, size, sequence)
    journal.position = position + size
    return position


def _follow_anything(groups: Any, sealed: int, **_: object) -> Any:
    """Accept groups by their number only."""
    while (group := groups.get(sealed := sealed + 1)) is not None and group.whole:
        yield group


def _reach_ignored(old: Callable[..., Any], groups: Any) -> Any:
    """Accept a state although the groups that it depends on are lost."""
    return (replace(naming, rests_on=0) for naming in old(groups))


def _unpinned(pin: SlotsPin, found: Any, unpinned: Callable[[], None]) -> None:
    pin._slots, pin._unpinned = [], unpinned


def _shown_at_once(old: Callable[..., Any], *args: Any) -> Any:
    state = old(*args)
    state._hides_unsynced = False
    return state


class _AcknowledgedWhenWritten(Draft):
    """Acknowledge before the sync under durability=synced."""

    def __init__(self, state: LogState, *, epoch: int, floor: Level, seed: int) -> None:
        super().__init__(state, epoch=epoch, floor=Level.WRITTEN, seed=seed)


class _KeepingNumbers(Draft):
    """Keep the numbers of a failed write."""

    def undo_offsets(self) -> None:
        """Keep the numbers of a group that was not written."""


def _without_claims(patch: pytest.MonkeyPatch) -> None:
    """Let two publishes claim the same token."""

    def claim(staging: Staging, token: bytes) -> StagedToken:
        found = staging.get(token)
        if found is None:
            raise Missing(ErrorCode.STAGE_MISSING, "no such staged batches")
        return found

    patch.setattr(Staging, "claim", claim)


def _deferred(opening: _Opening, name: str) -> None:
    """Leave the names of a failed start to the next one, which deletes them at some time."""
    opening._disk.deleter.delete([name])


def _drop_forgotten(old: Callable[..., Any], state: LogState, partition: FilePartition) -> None:
    """Keep a dropped partition in images."""
    packed = state._packed.get(partition.incarnation)
    old(state, partition)
    if packed is not None:
        state._packed[partition.incarnation] = packed


def _state_stale(old: Callable[..., Any], log: FileLog) -> Any:
    """Label a snapshot with the state of an earlier group."""
    state, _ = old(log)
    return state, 0


def _forget_damage(old: Callable[..., Any], *args: Any) -> Any:
    """Accept groups with damaged entries."""
    return [run._replace(damaged=array("Q")) for run in old(*args)]


def _number_again(old: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Continue with the number of the previous start."""
    chain = old(*args, **named)
    return chain if chain is None else replace(chain, start=chain.start - 1)


def _unsalvaged(old: Callable[..., Any], segment: Segment, *args: Any, strict: bool = False) -> Any:
    return old(segment, *args)


def _any_copy(copy: bytes) -> tuple[int, ...] | None:
    return snapshot._HEADER.unpack_from(copy) if len(copy) > snapshot._HEADER.size + 8 else None


def _copy_trusted(old: Callable[..., Any], copy: bytes) -> Any:
    """Trust the content of a snapshot without verification."""
    return old(copy) or (_any_copy(copy) if copy[:4] == b"PWT1" else None)


def _always_capacity(log: FileLog, _: int) -> bool:
    return True


def _no_reserve(settings: LogSettings) -> tuple[int, int, int]:
    return 0, 0, 0


LOG_MUTATIONS: Final[Sequence[Mutation]] = (
    # Syncs
    Mutation("journal-flush", "the flush of the journal's pages", replaced(SimulatedMapping, "flush", nothing)),
    Mutation("slot-sync", "the sync of a new slot", _files_unsynced(".slot")),
    Mutation("seed-sync", "the sync of the journal's seed", _files_unsynced(".seed")),
    Mutation("segment-sync", "the sync of a segment", _files_unsynced(suffix=".pws.")),
    Mutation("snapshot-sync", "the sync of a snapshot", _files_unsynced(suffix=".pwt.")),
    Mutation("journal-names", "the sync of the journal's directory", _directories_unsynced("journal")),
    Mutation("store-names", "the sync of the store's directories", _directories_unsynced("segments", "snapshots")),
    Mutation("data-names", "the sync of the data directory", _directories_unsynced("data")),
    Mutation("names-above", "the sync of the directories above", _directories_unsynced("polywire-simulated", "")),
    Mutation("recovery-sync", "a start's sync before it deletes", _recovery_unsynced),
    Mutation(
        "recovery-rewrite",
        "a start rewrites what a failed sync lost",
        replaced(slots.Slot, "lost_pages", lambda _: []),
        test=test_starts.test_a_start_rewrites_what_a_failed_sync_left_in_memory_only,
    ),
    Mutation("start-sync", "the sync of a start's first group", _start_unsynced),
    Mutation("closing-sync", "the flush of a clean stop", _unfinished),
    # Order
    Mutation("synced-answer", "an answer waits for the flush", replaced(Flusher, "wait", _synced_when_written)),
    Mutation(
        "durability-floor", "answers under durability=synced wait", replaced(log, "Draft", _AcknowledgedWhenWritten)
    ),
    Mutation(
        "durability-readers", "readers under durability=synced wait", wrapped(_Opening, "_make_state", _shown_at_once)
    ),
    Mutation("page-alignment", "no page is written while it is synced", replaced(slots.FileJournal, "align", nothing)),
    Mutation("failed-sync", "a failed sync is never retried", wrapped(Flusher, "_flush", _retried)),
    Mutation("failed-write", "a failed write ends the log", wrapped(slots.FileJournal, "write", _write_believed)),
    Mutation(
        "failed-numbers",
        "numbers of a failed write are taken back",
        replaced(log, "Draft", _KeepingNumbers),
        test=test_failures.test_a_read_after_a_failed_append_finds_the_end,
    ),
    Mutation("short-writes", "the rest of a short write is written", replaced(bare_journal, "_write_slowly", nothing)),
    Mutation(
        "slot-naming",
        "a slot is free once its naming group is synced",
        wrapped(FileLog, "name_slot", _named_when_written),
    ),
    Mutation(
        "removal-naming",
        "segments go once their removal is synced",
        wrapped(FileLog, "name_sealed", _named_when_written),
        first=21,
    ),
    Mutation(
        "removed-since",
        "a naming group waits for removals before it",
        wrapped(FileLog, "name_slot", _rests_on_snapshot),
        test=test_names.test_records_removed_during_encoding_exist_if_their_removal_is_lost,
    ),
    Mutation(
        "install-order",
        "slots are installed in the order they were filled",
        replaced(Sealer, "_install_next", _install_any),
        test=prepared(test_sealer.test_a_later_slot_waits_for_an_earlier_one),
    ),
    Mutation("slot-pins", "a slot is not written again while it is read", replaced(SlotsPin, "__init__", _unpinned)),
    Mutation(
        "sealing-capacity",
        "naming segments finds space in the journal",
        replaced(FileLog, "has_capacity", _always_capacity),
        test=prepared(test_names.test_removals_leave_the_space_for_naming_a_slot),
    ),
    Mutation(
        "removal-reserve",
        "the last slot has a reserve",
        lambda patch: patch.setattr(LogSettings, "kept_bytes", property(_no_reserve)),
    ),
    Mutation("locks", "one process has a data directory", replaced(SimulatedFile, "lock", nothing)),
    # Recovery
    Mutation("start-number", "no two starts have one number", wrapped(opening, "find_chain", _number_again)),
    Mutation(
        "entry-checksums", "a group counts with all of its entries", wrapped(recovery, "find_groups", _forget_damage)
    ),
    Mutation(
        "chain",
        "a group follows the one it names",
        replaced(recovery, "_unbroken_groups", _follow_anything),
        test=test_starts.test_groups_cut_off_by_a_start_do_not_replace_damaged_ones,
    ),
    Mutation(
        "reach",
        "a state counts with the groups it rests on",
        wrapped(recovery, "_references", _reach_ignored),
        test=test_names.test_a_state_does_not_count_without_the_groups_it_depends_on,
    ),
    Mutation("damage-proof", "a damaged synced group is no torn tail", replaced(recovery, "_examine_end", nothing)),
    Mutation(
        "earlier-starts",
        "groups of an unsealed start count",
        replaced(recovery, "_with_continued_starts", lambda _, found: found),
    ),
    Mutation(
        "ends-of-the-gone", "what was trimmed later is not missed", replaced(replay, "_removed_ends", lambda _: {})
    ),
    Mutation(
        "snapshot-changes",
        "changes in a snapshot are not applied again",
        wrapped(FileLog, "broker_state", _state_stale),
    ),
    Mutation(
        "snapshot-partitions", "a dropped partition leaves the snapshot", wrapped(LogState, "drop", _drop_forgotten)
    ),
    Mutation("unnamed-blobs", "names of a failed start are free at once", replaced(_Opening, "_delete", _deferred)),
    Mutation("remains", "temporary files are deleted", replaced(FileStore, "delete_remains", lambda *_: [])),
    Mutation(
        "snapshot-deletion",
        "the snapshot before is deleted",
        wrapped(Deleter, "delete", lambda old, deleter, names, **named: None if named else old(deleter, names)),
    ),
    # Verification
    Mutation("snapshot-checksum", "a damaged snapshot is not believed", wrapped(snapshot, "_fields_of", _copy_trusted)),
    Mutation(
        "seed-copy", "a damaged seed has a copy", wrapped(slots, "seed_copies", lambda old, *args: [old(*args)[0], b""])
    ),
    Mutation("batch-checksums", "a damaged batch is not served", replaced(segment, "first_damaged", lambda *_: -1)),
    Mutation(
        "unread-bodies",
        "a body that cannot be read is not sealed as damaged",
        wrapped(Segment, "stored", _unsalvaged),
        test=test_failures.test_a_transient_read_error_does_not_mark_damage,
    ),
    Mutation(
        "failed-reads",
        "what could not be read is read again",
        replaced(Window, "is_damaged_at", lambda *_: False),
        test=test_failures.test_a_failed_read_is_retried_for_the_next_reader,
    ),
    # Staging, compaction, callbacks
    Mutation("claims", "a token is published once", _without_claims),
    Mutation("staged-limit", "what is staged has a limit", replaced(Staging, "admit", nothing)),
    Mutation("wakes", "who waits is woken", replaced(Waits, "wake_due", nothing)),
)
