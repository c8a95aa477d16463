"""The operator's way past a hole or a damaged group of the journal: what can be kept, and what is given up for it.

Promises: looking changes nothing; a repair keeps the longest beginning of the journal that makes sense, reports group by group and offset by
offset what it gives up, and sets aside the slots that held it. Must not know: topics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, Corrupt, ErrorCode, Unavailable
from polywire.log.base import Loop, Replay
from polywire.log.journal.group import TOKEN_BYTES, Entry, EntryKind, read_directory
from polywire.log.journal.recovery import Chain, FoundGroup, damaged_bodies, find_chain, newest_groups
from polywire.log.journal.replay import Player, image_of_all
from polywire.log.journal.slots import FileJournal, Slot
from polywire.log.journal.staging import Staging
from polywire.log.opening import JOURNAL, lock_directory, open_log, seal_recovered
from polywire.log.partition.reader import Reader
from polywire.log.segments.sealer import snapshot_name
from polywire.log.segments.segment_set import SegmentSet
from polywire.log.settings import LogSettings
from polywire.log.state import LogState
from polywire.log.worker import ThreadWorker, storage_failed
from polywire.records.batch import check_header, read_header
from polywire.records.columns import HEADER_BYTES
from polywire.store.data_directory import BlobRoot
from polywire.store.file import FileStore
from polywire.store.files import copy_file, exists, make_directories
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import Buffer

ASIDE: Final = "aside"
ALL_GROUPS: Final = 2**63 - 1

Offsets = tuple[int, int]
"""From the first to below the second."""


@dataclass(slots=True)
class GivenUp:
    """What a repair gives up. ``groups`` are those it cuts off; of some, ``unknown``, even the header is damaged, so that what they held is
    known only as far as it follows from later groups.

    records: offsets by partition, which later records get once more. damaged: offsets by partition of batches that stay as they are, damaged:
        they cannot be read, but nothing else loses its offset.
    """

    groups: int = 0
    unknown: int = 0
    records: dict[int, Offsets] = field(default_factory=dict)
    damaged: dict[int, list[Offsets]] = field(default_factory=dict)
    changes: int = 0
    staged: int = 0

    @property
    def nothing(self) -> bool:
        """Whether everything is kept."""
        return not self.groups and not self.damaged


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a look at a data directory found.

    reason: what keeps a broker from starting, None when nothing does. through: the last group that can be kept.
    """

    reason: Corrupt | None
    through: int
    given_up: GivenUp
    log_state: LogState | None


class OfflineLog:
    """A data directory that no broker owns meanwhile, looked at without changing anything."""

    def __init__(
        self, directory: Path, replay: Callable[[], Replay], loop: Loop, store: FileStore | None = None
    ) -> None:
        """replay: makes an empty broker's state. store: of the blobs, where they lie elsewhere than the journal."""
        self.directory: Final = directory
        self.store: Final = FileStore(directory) if store is None else store
        self.state: Replay = replay()
        self._replay = replay
        self._loop = loop
        self.journal: Final = FileJournal(directory / JOURNAL, slot_bytes=0, slot_count_max=0)
        self.slots: Final[Sequence[Slot]] = self.journal.open_to_read()

    def diagnose(self) -> Diagnosis:
        """Return whether a broker would start, and what could be kept if not.

        A start recovers the journal and seals what it recovered; both are done here, and what the second writes is discarded. Raises
        Corrupt where nothing can be kept or where cutting groups off does not help, Corrupt(NEWER_FORMAT) where nothing is to be given up,
        Unavailable where a file cannot be read.
        """
        reason: Corrupt | None = None
        try:
            chain, log_state, _ = self._play(None)
        except Corrupt as error:
            if error.code is ErrorCode.NEWER_FORMAT:
                raise
            reason = error
        else:
            if chain is not None:
                self._rehearse_start(chain, log_state)
            if chain is not None or not self.slots:
                return Diagnosis(None, 0 if chain is None else chain.sequence, GivenUp(), log_state)
            reason = Corrupt(ErrorCode.CORRUPT, "no group of the journal verifies")
        through = ALL_GROUPS
        while True:
            chain, log_state, broken = self._play(through)
            if chain is None:
                raise reason
            if broken is None:
                return Diagnosis(reason, chain.sequence, self._given_up(chain), log_state)
            through = broken.sequence - 1

    def recover(self) -> tuple[Chain | None, LogState]:
        """What a broker would start from, without a chain where nothing was ever stored. Raises Corrupt."""
        chain, log_state, _ = self._play(None)
        if chain is None and self.slots and not self.journal.is_blank():
            raise Corrupt(ErrorCode.CORRUPT, "no group of the journal verifies")
        return chain, log_state

    def _play(self, through: int | None) -> tuple[Chain | None, LogState, FoundGroup | None]:
        """Recover in memory; with ``through``, returns the group that makes no sense instead of raising Corrupt."""
        chain = find_chain(self.slots, through=through)
        self.state = self._replay()
        log_state = self._log_state(chain)
        if chain is None:
            return None, log_state, None
        self.journal.arrange(dict.fromkeys(group.slot for group in chain.groups))
        player = Player(self.store, log_state, self.state, chain)
        try:
            player.play()
        except BrokerError as error:
            if through is None or player.playing is None:
                raise _as_corrupt(error) from error
            return chain, log_state, player.playing
        return chain, log_state, None

    def _rehearse_start(self, chain: Chain, log_state: LogState) -> None:
        """Do what a start does with the state it has recovered, and write nothing. Raises Corrupt, Unavailable."""
        try:
            for slot in self.slots:
                slot.lost_pages()
            image = image_of_all(log_state, chain.sequence)
            name = snapshot_name(chain.start + 1, 0)
            with suppress(Busy):  # a start goes on without sealing what the disk does not give yet
                seal_recovered(_Discarding(self.directory), log_state, self.journal, image, self.state, name)
        except OSError as error:
            raise storage_failed(error) from error

    def _log_state(self, chain: Chain | None) -> LogState:
        start = 1 if chain is None else chain.start + 1
        segments = SegmentSet(self.store, start)
        worker = ThreadWorker("repair", self._loop)
        reader = Reader(self.journal, segments, worker, epoch=start, root=BlobRoot(str(self.directory), b""))
        return LogState(reader, segments, Staging(bytes_max=2**62, batches_max=2**62), hides_unsynced=False)

    def _given_up(self, chain: Chain) -> GivenUp:
        found = GivenUp()
        for group in [group for group in chain.groups if not group.whole]:
            for entry in damaged_bodies(group) or ():
                _note_damaged(found, group.slot, entry)
        cut = {sequence: group for sequence, group in newest_groups(self.slots).items() if sequence > chain.sequence}
        if cut:
            found.groups = max(cut) - chain.sequence
            found.unknown = found.groups - len(cut)
        for _, group in sorted(cut.items()):
            _note_cut(found, group)
        return found

    def slots_with(self, after: int) -> list[Slot]:
        """The slots that hold groups behind this one."""
        found_groups = newest_groups(self.slots).values()
        return list({group.slot.number: group.slot for group in found_groups if group.sequence > after}.values())

    def close(self) -> None:
        """Close every file."""
        self.journal.close()


class _Discarding(FileStore):
    """A store that takes whatever is written and keeps nothing."""

    def put_new(self, name: str, parts: Iterable[Buffer]) -> None:
        deque(parts, maxlen=0)

    def delete(self, name: str) -> None:
        """Nothing was kept."""


@contextmanager
def open_offline(directory: Path, replay: Callable[[], Replay], loop: Loop) -> Iterator[OfflineLog]:
    """A data directory, with every broker kept out of it. Raises Busy(BUSY) while one runs, Unavailable where none was, Corrupt, OSError."""
    if not exists(SYSTEM_FILES, directory / JOURNAL):
        raise Unavailable(ErrorCode.STORAGE_FAILED, f"no data directory of a broker path={str(directory)!r}")
    unlock = lock_directory(directory)
    try:
        offline = OfflineLog(directory, replay, loop)
        try:
            yield offline
        finally:
            offline.close()
    finally:
        unlock()


def repair(offline: OfflineLog, diagnosis: Diagnosis) -> Path:
    """Copy the slots that hold what is given up aside, on the disk before anything is changed; returns where they are. ``finish`` does the
    rest once the directory is let go."""
    aside = offline.directory / ASIDE / f"{diagnosis.through:016x}"
    make_directories(SYSTEM_FILES, aside)
    damaged = {slot.number: slot for slot in offline.slots_with(diagnosis.through)} or {
        slot.number: slot for slot in offline.slots
    }
    for path in [slot.path for slot in damaged.values()]:
        copy_file(SYSTEM_FILES, path, aside / path.name)
    SYSTEM_FILES.sync_directory(aside)
    return aside


def finish(directory: Path, through: int, slot_bytes: int, replay: Replay, loop: Loop, clock: Clock) -> None:
    """Make what is kept the beginning of a new start, as every start does. Raises BrokerError."""
    settings = LogSettings(slot_bytes=slot_bytes, disk_reserve_bytes=0)
    open_log(directory, settings=settings, loop=loop, clock=clock, replay=replay, through=through).close()


def _note_damaged(found: GivenUp, slot: Slot, entry: Entry) -> None:
    if entry.kind == EntryKind.STAGED:
        found.staged += 1
        return
    header = read_header(slot.view, entry.position)
    found.damaged.setdefault(header.partition, []).append((header.base_offset, header.next_offset))


def _note_cut(found: GivenUp, group: FoundGroup) -> None:
    """What a group that is cut off holds, as far as its directory and the headers of its batches show."""
    view = group.slot.view
    for entry in read_directory(view, group.position):
        found.changes += entry.kind == EntryKind.CHANGE
        found.staged += entry.kind == EntryKind.STAGED
        for at in _headers(entry.kind, entry.position, entry.length):
            if at + HEADER_BYTES <= group.position + group.length and check_header(view, at):
                header = read_header(view, at)
                first, end = found.records.get(header.partition, (header.base_offset, 0))
                found.records[header.partition] = (min(first, header.base_offset), max(end, header.next_offset))


def _headers(kind: int, position: int, length: int) -> Iterable[int]:
    """Where the headers of numbered batches lie in an entry."""
    if kind == EntryKind.BATCH:
        return (position,)
    return range(position + TOKEN_BYTES, position + length, HEADER_BYTES) if kind == EntryKind.PUBLISH else ()


def _as_corrupt(error: BrokerError) -> Corrupt:
    return error if isinstance(error, Corrupt) else Corrupt(ErrorCode.CORRUPT, error.message)
