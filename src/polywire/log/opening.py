"""Open a log: lock the directory, recover its state, and write the first journal group of this start (decision 0102).

* When opening returns, all recovered data is in synced segments, and the first group is on disk.
* Nothing is changed before the journal has been verified.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from polywire.clock import Clock
from polywire.errors import Busy, Corrupt, ErrorCode
from polywire.log.base import Loop, Replay
from polywire.log.disk import Disk
from polywire.log.journal.group import EntryKind, GroupHead
from polywire.log.journal.recovery import Chain, find_chain
from polywire.log.journal.replay import Player, image_of_all
from polywire.log.journal.slots import FileJournal, Slot
from polywire.log.journal.staging import Staging
from polywire.log.journal.steps import enter, sealed_content
from polywire.log.journal.syncer import flushing
from polywire.log.log import NAMING_BYTES, FileLog
from polywire.log.partition.reader import Reader
from polywire.log.segments.scrub import Scrub
from polywire.log.segments.sealer import snapshot_name
from polywire.log.segments.sealing import Written, install, seal_all
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS, Sealed, SegmentSet, segment_name
from polywire.log.settings import PAGE_BYTES, LogSettings
from polywire.log.state import Contents, Image, LogState
from polywire.log.worker import MakeWorker, ThreadWorker, Worker, storage_failed
from polywire.store.data_directory import MARK_FILE, DataDirectory
from polywire.store.file import DISK_FULL, FileStore
from polywire.store.files import Access, File, Files, exists, make_directories, read_file, write_parts
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import Buffer

JOURNAL: Final = "journal"

logger: Final = structlog.get_logger("polywire.log")


def open_log(
    directory: Path,
    *,
    settings: LogSettings,
    loop: Loop,
    clock: Clock,
    replay: Replay,
    through: int | None = None,
    files: Files = SYSTEM_FILES,
    make_worker: MakeWorker = ThreadWorker,
) -> FileLog:
    """Recover the log of a data directory, or create one.

    Blocks on the disk, so call it before the broker serves clients.

    Args:
        through: sequence number of the last journal write that a repair of a damaged journal retains.

    Raises:
        Busy: BUSY: the directory is in use. DISK_FULL: no space.
        Unavailable: the disk failed.
        Corrupt: synced data is damaged.
    """
    try:
        make_directories(files, directory)
        _sync_names(files, directory)
        data_directory = DataDirectory.owned(directory, files)
        unlock = own_directory(files, directory, data_directory)
    except OSError as error:
        raise storage_failed(error) from error
    with ExitStack() as undone:
        undone.callback(unlock)
        opening = _Opening(data_directory, settings, loop, clock, replay, unlock, through, files, make_worker)
        undone.callback(opening.release)
        try:
            log = opening.run()
        except OSError as error:
            raise storage_failed(error) from error
        undone.pop_all()
        return log


def _sync_names(files: Files, directory: Path) -> None:
    """Sync the directory entries of the data directory and its files, which a killed process may have left unsynced."""
    # a process that may not open the parent directory cannot have created the data directory
    with suppress(PermissionError):
        files.sync_directory(directory.parent)
    files.sync_directory(directory)


def lock_directory(directory: Path, files: Files = SYSTEM_FILES) -> Callable[[], None]:
    """Lock a directory against brokers without changing it. Return a function that unlocks it. Raises Busy(BUSY)."""
    with ExitStack() as undone:
        for locked in (directory / MARK_FILE, directory):
            if exists(files, locked):
                undone.callback(_locked(files, locked, Access.READ, directory).close)
        return undone.pop_all().close


def _locked(files: Files, path: Path, access: Access, directory: Path) -> File:
    """Open and lock a file or directory. Raises Busy(BUSY) if another process holds the lock."""
    file = files.open(path, access)
    try:
        file.lock()
    except BlockingIOError:
        file.close()
        raise Busy(
            ErrorCode.BUSY,
            f"data directory is in use path={str(directory)!r} pid={_holder(files, directory / MARK_FILE)}",
        ) from None
    return file


def own_directory(files: Files, directory: Path, data_directory: DataDirectory) -> Callable[[], None]:
    """Lock the directory for this broker and write its owner file. Return a function that unlocks it.

    The owner file may be deleted, so the directory itself is locked as well. The journal files are locked, too, so a
    directory that was moved and re-created never has two writers.
    """
    path = directory / MARK_FILE
    with ExitStack() as undone:
        for locked in (path, directory):
            file = _locked(files, locked, Access.READ if locked is directory else Access.KEEP, directory)
            undone.callback(file.close)
            if locked is not directory:
                _write_mark(file, data_directory.content(files.owner))
        return undone.pop_all().close


def _write_mark(file: File, content: bytes) -> None:
    """Write the owner's token, by which clients find the broker from its directory. Errors are ignored.

    A full disk must not prevent a start.
    """
    with suppress(OSError):
        file.truncate(0)
        write_parts(file, [content], 0)


def _holder(files: Files, path: Path) -> str:
    with suppress(OSError):
        return read_file(files, path, 32).decode("ascii", "replace").partition("\n")[0] or "unknown"
    return "unknown"


def _release(scrub: Scrub, unlock: Callable[[], None]) -> None:
    scrub.stop()
    unlock()


class _Opening:
    def __init__(
        self,
        data_directory: DataDirectory,
        settings: LogSettings,
        loop: Loop,
        clock: Clock,
        replay: Replay,
        unlock: Callable[[], None],
        through: int | None,
        files: Files,
        make_worker: MakeWorker,
    ) -> None:
        self._through = through
        self._files = files
        self._make_worker = make_worker
        directory = Path(data_directory.path)
        self._data_directory = data_directory
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._replay = replay
        self._unlock = unlock
        self._directory = directory
        self._store = FileStore(
            directory, open_blobs_max=settings.open_blobs_max, files=files, kept_bytes=settings.cache_bytes, clock=clock
        )
        self._disk = Disk(
            directory,
            self._store,
            settings.disk_reserve_bytes,
            loop,
            files=files,
            clock=clock,
            make_worker=make_worker,
        )
        self._journal = FileJournal(
            directory / JOURNAL, slot_bytes=settings.slot_bytes, slot_count_max=settings.slot_count_max, files=files
        )
        self._sequence = self._checksum = 0
        self._sealed = True
        self._image: Image | None = None
        """State after recovery, if it must be sealed."""

    def run(self) -> FileLog:
        slots = self._journal.open_all()
        chain = find_chain(slots, through=self._through)
        self._check_journal(chain)
        self._restore_seed()
        start = self._start = 1 if chain is None else chain.start + 1
        segments = SegmentSet(self._store, start, self._clock)
        worker = self._make_worker("reader", self._loop)
        state = self._make_state(segments, worker, start)
        player = None
        if chain is not None:
            # After a broker was killed, some journal writes may exist only in the page cache; after a disk failure,
            # even writes that count as synced. The following steps delete files that those writes make unnecessary, so
            # sync the writes first.
            for slot in slots:
                slot.recover()
            self._journal.assign_serials(dict.fromkeys(group.slot for group in chain.groups))
            player = Player(self._store, state, self._replay, chain)
            player.play()
            self._report(chain)
            self._delete_unnamed(state, chain)
        name = self._begin(state, chain, start)
        scrub = Scrub(
            segments,
            self._loop,
            hours=self._settings.scrub_hours,
            make_worker=self._make_worker,
            token=self._files.token,
        )
        scrub.start()
        log = FileLog(
            settings=self._settings,
            loop=self._loop,
            clock=self._clock,
            replay=self._replay,
            journal=self._journal,
            state=state,
            reader_worker=worker,
            disk=self._disk,
            make_syncer=flushing(self._journal, self._clock, self._make_worker, self._settings),
            epoch=start,
            sequence=self._sequence,
            checksum=self._checksum,
            snapshot_name=name,
            unlock=partial(_release, scrub, self._unlock),
        )
        if chain is not None and player is not None and not self._sealed:
            log.adopt(self._unsealed(player, state, chain), chain.sealed)
        return log

    def _restore_seed(self) -> None:
        """Write missing or damaged seed files. If there is no space, a later start writes them."""
        try:
            self._journal.restore_seed()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise

    def release(self) -> None:
        self._disk.deleter.stop()
        self._journal.close()

    def _make_state(self, segments: SegmentSet, worker: Worker, start: int) -> LogState:
        settings = self._settings
        staging = Staging(bytes_max=settings.staged_bytes_max, batches_max=settings.staged_batches_max)
        reader = Reader(self._journal, segments, worker, epoch=start, root=self._data_directory.root)
        return LogState(reader, segments, staging, hides_unsynced=settings.durability >= 2)

    def _check_journal(self, chain: Chain | None) -> None:
        """Raise Corrupt if the journal is empty although the log is not new.

        A log is not new if it has segments or a journal file with content.
        """
        if chain is not None:
            return
        if self._store.list(f"{SEGMENTS}/") or self._store.list(f"{SNAPSHOTS}/"):
            raise Corrupt(
                ErrorCode.CORRUPT, f"the data directory has segments but no journal path={str(self._directory)!r}"
            )
        if not self._journal.is_blank():
            raise Corrupt(
                ErrorCode.CORRUPT,
                "no group of the journal has a valid checksum although its files are not empty: "
                f"the files or the seed are damaged path={str(self._directory / JOURNAL)!r}",
            )

    def _report(self, chain: Chain) -> None:
        torn = chain.torn
        if torn is not None:
            logger.warning(
                "truncated an incomplete write at the end of the journal; earlier records are not affected",
                path=torn.path,
                position=torn.position,
                size=torn.size,
                groups=torn.groups,
                last_sequence=chain.sequence,
            )

    def _delete_unnamed(self, state: LogState, chain: Chain) -> None:
        """Delete segments and snapshots that the journal does not name.

        They remain if the broker stopped between writing a file and naming it, or between removing its name and
        deleting it.
        """
        named = {segment_name(number) for number in state.segments.numbers()} | {chain.snapshot}
        for directory in (SEGMENTS, SNAPSHOTS):
            self._store.delete_remains(directory)
            for name in self._store.list(f"{directory}/"):
                if name not in named:
                    self._delete(name)

    # New start

    def _begin(self, state: LogState, chain: Chain | None, start: int) -> str:
        """Write the recovered state to segments and begin the journal of this start.

        Return the name of its snapshot.
        """
        head = GroupHead(self._journal.seed)
        parts: list[Buffer] = []
        head.entry(EntryKind.START, 0, 0, b"")
        if chain is None:
            self._free(slot_needed=set())
            self._write_start(head, parts, start)
            self._note_current(state)
            return ""
        self._sequence, self._checksum = chain.sequence, chain.checksum
        name = snapshot_name(start, 0)
        old = list(self._journal.slots.values())
        needed = {group.slot for group in chain.groups}
        try:
            self._free(slot_needed=needed)
            written, sealed = self._seal(state, chain, name)
        except Busy as busy:
            return self._begin_unsealed(state, chain, start, busy)
        enter(head, parts, EntryKind.SEALED, chain.sequence, sealed_content([item.number for item in sealed], ()))
        enter(head, parts, EntryKind.SNAPSHOT, chain.sequence, name.encode("ascii"))
        self._write_start(head, parts, start)
        for _ in install(state, written, sealed):
            """No client waits for the loop yet."""
        for slot in old:
            if slot in needed:
                self._journal.release(slot)
        state.contents.clear()
        self._note_current(state)
        if chain.snapshot is not None:
            self._delete(chain.snapshot)
        return name

    def _seal(self, state: LogState, chain: Chain, name: str) -> tuple[Written, list[Sealed]]:
        """Write everything recovered into segments. If this raises Busy, no new file remains."""
        image = self._image = image_of_all(state, chain.sequence)
        written = seal_all(self._store, state, self._journal.views, image, self._replay.snapshot(), name)
        added = zip(written.infos, written.numbers, strict=True)
        return written, [state.segments.add(info, number) for info, number in added]

    def _note_current(self, state: LogState) -> None:
        current = self._journal.current
        assert current is not None, "the start was written to it"
        state.contents.setdefault(current.serial, Contents())

    # Starts without space to seal (decision 0102), or with a body that the disk cannot read yet

    def _begin_unsealed(self, state: LogState, chain: Chain, start: int, busy: Busy) -> str:
        """Begin the start although there is no space for segments.

        The recovered journal files are written to segments later. The first journal write of the start goes to a free
        journal file or, if there is none, after the last one. Raises Busy(DISK_FULL) if it does not fit there.
        """
        self._sealed = False
        self._disk.refused(busy)
        head = GroupHead(self._journal.seed)
        parts: list[Buffer] = []
        head.entry(EntryKind.START, 0, 0, b"")
        enter(head, parts, EntryKind.SEALED, chain.sealed, sealed_content((), ()))
        if chain.snapshot is not None:
            enter(head, parts, EntryKind.SNAPSHOT, chain.rests_on, chain.snapshot.encode("ascii"))
        if not self._journal.free:
            last = chain.groups[-1]
            self._journal.continue_in(last.slot, last.position + last.length)
            pages = -(-head.size // PAGE_BYTES)
            if self._journal.capacity - pages * PAGE_BYTES <= NAMING_BYTES:  # keep the sealer's reserve free
                raise busy
        self._write_start(head, parts, start)
        self._note_current(state)
        logger.warning(
            "recovered records cannot be moved to segments yet: retrying; the broker rejects records while the disk is full",
            path=str(self._directory),
            slots=len(self._journal.slots),
            reason=busy.message,
        )
        return chain.snapshot or ""

    def _unsealed(self, player: Player, state: LogState, chain: Chain) -> list[tuple[Slot, Image]]:
        if not chain.groups or self._image is None:
            return player.full  # without the last journal file, which is still being written
        return [*player.full, (chain.groups[-1].slot, self._image)]

    def _delete(self, name: str) -> None:
        """Queue a segment or snapshot for deletion after the start.

        It is deleted at once if the start needs its space, or its name: after a failed start, names are used again.
        """
        if self._disk.full or name.partition("/")[2] >= f"{self._start:08x}":
            self._store.delete(name)
        else:
            self._disk.deleter.delete([name])

    def _free(self, *, slot_needed: set[Slot]) -> None:
        """Ensure that this start has a free journal file, and a second one if space permits.

        Raises Busy(DISK_FULL) or OSError.

        Args:
            slot_needed: journal files with recovered data.
        """
        for slot in list(self._journal.slots.values()):
            if slot not in slot_needed:
                self._journal.release(slot)
        try:
            while not self._journal.free or self._journal.count < self._settings.slot_count_min:
                self._journal.add(self._journal.plan_slot()())
        except OSError as error:
            self._journal.add(None)
            if error.errno not in DISK_FULL:
                raise
            if not self._journal.free:
                raise Busy(ErrorCode.DISK_FULL, f"disk is full path={str(self._directory)!r}") from error

    def _write_start(self, head: GroupHead, parts: list[Buffer], start: int) -> None:
        if self._journal.current is None:
            self._journal.roll()
        first = head.finish(start, self._sequence + 1, self._sequence, self._checksum, self._clock.now_us())
        self._sequence += 1
        self._checksum = head.checksum
        self._journal.write([first, *parts], head.size, self._sequence)
        current = self._journal.current
        assert current is not None, "roll() has made a slot current"
        current.sync()
        self._journal.align()
