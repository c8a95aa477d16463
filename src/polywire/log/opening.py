"""Opening a log: lock the directory, recover what is there, begin a new start (decision 0002).

Promises: when it returns, everything recovered lies in synced segments, and the new start is on the disk. Nothing is
changed before the chain was
found sound. Must not know: what the broker's state is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from polywire.clock import Clock
from polywire.errors import Corrupt, ErrorCode, Unavailable
from polywire.log.base import Loop, Replay
from polywire.log.disk import Disk
from polywire.log.group import EntryKind, GroupHead
from polywire.log.history import Contents, History
from polywire.log.journal_file import FileJournal, Slot, make_directory
from polywire.log.log import FileLog
from polywire.log.reading import Reader
from polywire.log.recovery import Chain, find_chain
from polywire.log.replay import Player
from polywire.log.sealer import snapshot_name
from polywire.log.sealing import install, plan_slots, snapshot_of, write_plan
from polywire.log.segments import SEGMENTS, SNAPSHOTS, Segments, segment_name
from polywire.log.settings import LogSettings
from polywire.log.staging import Staging
from polywire.log.turn import sealed_content
from polywire.log.worker import Worker, storage_failed
from polywire.store.file import FileStore
from polywire.store.mark import MARK_FILE, Home
from polywire.types import Buffer

_JOURNAL: Final = "journal"

logger: Final = structlog.get_logger("polywire.log")


def open_log(directory: Path, *, settings: LogSettings, loop: Loop, clock: Clock, replay: Replay) -> FileLog:
    """Recover the log of a data directory, or begin one. Waits for the disk: call it before anything is served.

    Raises Unavailable when the directory is in use or the disk fails, Corrupt when synced bytes do not verify, Busy(DISK_FULL).
    """
    try:
        make_directory(directory)
        home = Home.owned(directory)
        unlock = _lock(directory / MARK_FILE, home)
    except OSError as error:
        raise storage_failed(error) from error
    with ExitStack() as undone:
        undone.callback(unlock)
        try:
            log = _Opening(home, settings, loop, clock, replay, unlock).run()
        except OSError as error:
            raise storage_failed(error) from error
        undone.pop_all()
        return log


def _lock(path: Path, home: Home) -> Callable[[], None]:
    """Take the directory for this process; returns what gives it back."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").partition("\n")[0]
        os.close(descriptor)
        raise Unavailable(
            ErrorCode.STORAGE_FAILED, f"data directory is in use path={str(path.parent)!r} pid={holder}"
        ) from None
    with suppress(
        OSError
    ):  # without it nobody finds the directory by its mark; a full disk must not keep the broker from starting
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, home.content(), 0)
    return partial(os.close, descriptor)


class _Opening:
    """The steps of opening, in order."""

    def __init__(
        self,
        home: Home,
        settings: LogSettings,
        loop: Loop,
        clock: Clock,
        replay: Replay,
        unlock: Callable[[], None],
    ) -> None:
        directory = Path(home.directory)
        self._home = home
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._replay = replay
        self._unlock = unlock
        self._directory = directory
        self._store = FileStore(directory)
        self._disk = Disk(directory, self._store, settings.disk_reserve_bytes)
        self._journal = FileJournal(
            directory / _JOURNAL, slot_bytes=settings.slot_bytes, slot_count_max=settings.slot_count_max
        )

    def run(self) -> FileLog:
        slots = self._journal.open_all()
        chain = find_chain(slots)
        self._check_journal(chain)
        start = 1 if chain is None else chain.start + 1
        segments = Segments(self._store, start)
        worker = Worker("reader", self._loop)
        history = self._make_history(segments, worker, start)
        if chain is not None:
            # A killed broker leaves groups that only the page cache has. What follows deletes what they say is not needed.
            for slot in slots:
                os.fdatasync(slot.descriptor)
            Player(self._store, history, self._replay, chain).play()
            self._report(chain)
            self._delete_unnamed(history, chain)
        name = self._begin(history, chain, start)
        return FileLog(
            settings=self._settings,
            loop=self._loop,
            clock=self._clock,
            replay=self._replay,
            journal=self._journal,
            history=history,
            reader_worker=worker,
            disk=self._disk,
            epoch=start,
            sequence=self._sequence,
            checksum=self._checksum,
            snapshot_name=name,
            unlock=self._unlock,
        )

    def _make_history(self, segments: Segments, worker: Worker, start: int) -> History:
        settings = self._settings
        staging = Staging(bytes_max=settings.staged_bytes_max, batches_max=settings.staged_batches_max)
        reader = Reader(self._journal, segments, worker, epoch=start, home=self._home)
        return History(reader, segments, staging, hides_unsynced=settings.durability >= 2)

    def _check_journal(self, chain: Chain | None) -> None:
        """A journal without any group belongs to a log that never was. Raises Corrupt when something else lies there."""
        if chain is None and (self._store.list(f"{SEGMENTS}/") or self._store.list(f"{SNAPSHOTS}/")):
            raise Corrupt(
                ErrorCode.CORRUPT, f"the journal is missing beside its segments path={str(self._directory)!r}"
            )

    def _report(self, chain: Chain) -> None:
        torn = chain.torn
        if torn is not None:
            logger.warning(
                "cut a torn tail of the journal; nothing before it is affected",
                path=torn.path,
                position=torn.position,
                size=torn.size,
                groups=torn.groups,
                last_sequence=chain.sequence,
            )

    def _delete_unnamed(self, history: History, chain: Chain) -> None:
        """Blobs that no valid group names were left by a stop between writing and naming them, or between naming and deleting."""
        named = {segment_name(number) for number in history.segments.numbers()} | {chain.snapshot}
        for directory in (SEGMENTS, SNAPSHOTS):
            self._store.delete_remains(directory)
            for name in self._store.list(f"{directory}/"):
                if name not in named:
                    self._store.delete(name)

    # The new start

    def _begin(self, history: History, chain: Chain | None, start: int) -> str:
        """Seal what was recovered and write the group that begins the start; returns the name of its snapshot."""
        head = GroupHead(self._journal.seed)
        parts: list[Buffer] = []
        head.entry(EntryKind.START, 0, 0, b"")
        name = ""
        self._sequence = 0
        self._checksum = 0
        sealed, plan = [], None
        if chain is not None:
            self._sequence = chain.sequence
            self._checksum = chain.checksum
            name = snapshot_name(start, 0)
            image = history.image(chain.sequence, history.partitions.values())
            plan = plan_slots(history, history.contents, self._journal.views, image)
            numbers = [history.segments.next_number() for _ in plan.blobs]
            snapshot = snapshot_of(history, image, plan, numbers, (self._replay.snapshot(), chain.sequence))
            infos = write_plan(self._store, plan, numbers, name, snapshot)
            sealed = [history.segments.add(info, number) for info, number in zip(infos, numbers, strict=True)]
            _enter(head, parts, EntryKind.SEALED, chain.sequence, sealed_content(numbers, ()))
            _enter(head, parts, EntryKind.SNAPSHOT, chain.sequence, name.encode("ascii"))
        old = list(self._journal.slots.values())
        needed = {place.slot for place in chain.groups} if chain is not None else set()
        self._free(slot_needed=needed)
        self._write_start(head, parts, start)
        if plan is not None:
            install(history, plan, sealed)
        for slot in old:
            if slot in needed:
                self._journal.release(slot)
        history.contents.clear()
        current = self._journal.current
        assert current is not None, "the start was written to it"
        history.contents[current.serial] = Contents()
        if chain is not None and chain.snapshot is not None:
            self._store.delete(chain.snapshot)
        return name

    def _free(self, *, slot_needed: set[Slot]) -> None:
        """Make sure that there is a slot for the start, and one more."""
        for slot in list(self._journal.slots.values()):
            if slot not in slot_needed:
                self._journal.release(slot)
        while not self._journal.free or self._journal.count < self._settings.slot_count_min:
            self._journal.add(self._journal.plan_slot()())

    def _write_start(self, head: GroupHead, parts: list[Buffer], start: int) -> None:
        self._journal.turn_over()
        first = head.finish(start, self._sequence + 1, self._sequence, self._checksum, self._clock.now_us())
        self._sequence += 1
        self._checksum = head.checksum
        self._journal.write([first, *parts], head.size, self._sequence)
        current = self._journal.current
        assert current is not None, "turn_over made it so"
        os.fdatasync(current.descriptor)
        self._journal.align()


def _enter(head: GroupHead, parts: list[Buffer], kind: EntryKind, argument: int, content: bytes) -> None:
    head.entry(kind, 0, argument, content)
    parts.append(content + bytes(-len(content) % 8))
